"""Sources of shards: the protocol that all of them implement, and the source of a local folder.

The other sources are in ``http``, ``command``, ``objects`` and ``cache``. ``locate`` chooses one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import IO, Final, NamedTuple, Protocol, TypeAlias

from hexdata.errors import StoreError
from hexdata.retry import with_attempts
from hexdata.shards.manifest import MANIFEST_NAME, REPAIR_HINT, ShardEntry, missing_manifest_error
from hexdata.storage import is_address, open_file
from hexdata.store.disk_space import disk_error_hint, system_message

__all__ = [
    "WHOLE_FILE",
    "ByteRange",
    "ByteStream",
    "FileStream",
    "FolderSource",
    "Pace",
    "ShardFile",
    "ShardSource",
    "TooSlowError",
    "altered_shard_error",
    "check_file_size",
    "check_stream_end",
    "discard_bytes",
    "missing_file_error",
    "unreadable_file_error",
]

_CHUNK: Final = 1 << 20
_WAIT: Final = 60.0
_BYTES_PER_SECOND: Final = 4096
"""Seconds that a remote file may take, and the slowest rate at which its bytes may arrive."""

ShardFile: TypeAlias = BufferedReader | BufferedRandom
"""An open local file of a shard."""


class ByteRange(NamedTuple):
    """The bytes of a file to read.

    Attributes:
        start: Offset of the first byte. Sources that can seek do not read the bytes before it.
        stop: Offset at which the caller stops reading; None for the end of the file. A hint for sources
            that request ranges: the stream may continue after it.
        file_size: Expected size of the whole file; None for any. Checked if the source states the size.
    """

    start: int = 0
    stop: int | None = None
    file_size: int | None = None


WHOLE_FILE: Final = ByteRange()


class ByteStream(Protocol):
    """The bytes of one file, from some offset to its end."""

    def read(self, size: int, /) -> bytes:
        """Return 1 to ``size`` bytes; none at the end of the file.

        Raises:
            StoreError: The source failed.
        """

    def finish(self) -> None:
        """Check that all bytes have been read, and that the source ended without an error.

        Raises:
            StoreError: There are more bytes, or the command that writes them failed.
        """


class ShardSource(Protocol):
    """A folder of shards and their manifest, local or remote. Picklable; keeps no file open."""

    def address(self, name: str) -> str:
        """Return the path or URL of a file, for messages."""

    def open(self, name: str, part: ByteRange = WHOLE_FILE) -> AbstractContextManager[ByteStream]:
        """Open a file for reading from ``part.start``. Leaving the context closes it.

        Args:
            name: Plain file name.
            part: The bytes to read. Default: the whole file.

        Raises:
            StoreError: The file is missing, has another size, or cannot be read.
        """


class FileStream:
    """The bytes of an open local file, which the caller closes."""

    def __init__(self, file: IO[bytes], address: str) -> None:
        self._file = file
        self._address = address

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes."""
        try:
            return self._file.read(size)
        except OSError as error:
            raise unreadable_file_error(self._address, error) from error

    def finish(self) -> None:
        """Check that all bytes have been read."""
        check_stream_end(self, self._address)


@dataclass(frozen=True)
class FolderSource:
    """Shards in a local folder."""

    folder: Path

    def address(self, name: str) -> str:
        """Return the path of a file."""
        return str(self.folder / name)

    @contextmanager
    def open(self, name: str, part: ByteRange = WHOLE_FILE) -> Iterator[FileStream]:
        """Open a file; see :meth:`ShardSource.open`."""
        address = self.address(name)
        try:
            file = open_file(self.folder / name)
        except FileNotFoundError:
            raise missing_file_error(name, address) from None
        except OSError as error:
            raise unreadable_file_error(address, error) from error
        with file:
            check_file_size(address, file.seek(0, 2), part.file_size)
            file.seek(part.start)
            yield FileStream(file, address)

    def open_to_map(self, entry: ShardEntry) -> ShardFile:
        """Open a shard to be mapped into memory.

        Raises:
            OSError: It cannot be opened.
        """
        return open_file(self.folder / entry.name)

    def find_fault(self, name: str, size: int) -> StoreError | None:
        """Return the error of a file that is missing or does not have ``size`` bytes; None if it is right."""
        address = self.address(name)
        try:
            check_file_size(address, (self.folder / name).stat().st_size, size)
        except FileNotFoundError:
            return missing_file_error(name, address)
        except OSError as error:
            return unreadable_file_error(address, error)
        except StoreError as error:
            return error
        return None


class TooSlowError(TimeoutError):
    """A source sends bytes, but too slowly. A repetition would not help."""


class Pace:
    """The time that reading a remote file may take, without the pauses of the reader.

    Args:
        seconds: Seconds in addition to those for the bytes. Default: 60.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._allowed = _WAIT if seconds is None else seconds
        self._waited = 0.0
        self._bytes = 0

    def add(self, since: float, count: int) -> None:
        """Add the time since ``time.monotonic()`` was ``since``, in which ``count`` bytes were read.

        Raises:
            TooSlowError: Reading has taken too long.
        """
        self._waited += time.monotonic() - since
        self._bytes += count
        if self.left < 0:
            raise TooSlowError(f"only {self._bytes:,} bytes in {self._waited:.0f} s")

    @property
    def left(self) -> float:
        """Seconds left."""
        return self._allowed + self._bytes / _BYTES_PER_SECOND - self._waited


# --- helpers of all sources ---------------------------------------------------------------------------


def discard_bytes(read: Callable[[int], bytes], count: int) -> int:
    """Read and discard ``count`` bytes; return the number of bytes that are missing at the end."""
    while count and (data := read(min(count, _CHUNK))):
        count -= len(data)
    return count


def check_file_size(address: str, found: int | None, expected: int | None) -> None:
    """Compare the size of a file with the expected size, if both are known.

    Raises:
        StoreError: They differ.
    """
    if None not in (found, expected) and found != expected:
        raise altered_shard_error(address, f"{found} bytes", expected)


def check_stream_end(stream: ByteStream, address: str) -> None:
    """Check that all bytes of a stream have been read.

    Raises:
        StoreError: There are more bytes.
    """
    if stream.read(1):
        raise altered_shard_error(address, "more bytes")


def altered_shard_error(address: str, found: object, expected: object = None) -> StoreError:
    """Return the error for a shard of which the size or the digest is wrong."""
    return StoreError(
        "the shard is truncated or altered", path=address, found=found, expected=expected, hint=REPAIR_HINT
    )


def missing_file_error(name: str, address: str) -> StoreError:
    """Return the error for a missing shard or manifest."""
    if name == MANIFEST_NAME:
        return missing_manifest_error(address)
    return StoreError("the shard is missing", path=address, hint=REPAIR_HINT)


def unreadable_file_error(address: str, error: Exception) -> StoreError:
    """Return the error for a file that cannot be read."""
    text, hint = str(error), "Check the address and whether the file can be read, and run the command again."
    if isinstance(error, OSError) and not is_address(address) and (of_disk := disk_error_hint(error)):
        text, hint = system_message(error), of_disk
    found = with_attempts(text or type(error).__name__, error)
    return StoreError("a file cannot be read", path=address, found=found, hint=hint)
