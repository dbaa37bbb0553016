"""What every place that shards are read from is: an address, and bytes from some place on.

Says how the ways to fail are named, the same for all of them. Never opens
anything.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import IO, Final, NamedTuple, Protocol

from hexdata.errors import StoreError
from hexdata.shards.manifest import MANIFEST_NAME
from hexdata.shards.member_check import HINT

__all__ = [
    "WHOLE",
    "ByteStream",
    "FileStream",
    "Part",
    "Source",
    "check_size",
    "expect_end",
    "missing",
    "unreachable",
]


class Part(NamedTuple):
    """Which bytes of a file are wanted.

    Attributes:
        start: the first one. What comes before it is not read where the source can do that.
        stop: where reading will stop, None for the end of the file. The stream may go on after it.
        size: bytes that the whole file must have, None for any; a source that can tell refuses others.
    """

    start: int = 0
    stop: int | None = None
    size: int | None = None


WHOLE: Final = Part()


class ByteStream(Protocol):
    """The bytes of one file from some place on."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes, one or more asked for; none at the end.

        Raises:
            StoreError: the place they come from failed.
        """

    def finish(self) -> None:
        """Say that the end was met, and hear whether all went well.

        Raises:
            StoreError: there are more bytes, or the command that gave them failed.
        """


class Source(Protocol):
    """A folder of shards, wherever it lies: a value that can be pickled and holds nothing open."""

    def address(self, name: str) -> str:
        """Return where the file of this name is, as messages say it."""

    def open(self, name: str, part: Part = WHOLE) -> AbstractContextManager[ByteStream]:
        """Open the file of a plain name at the part's first byte; on leaving, all that was opened is closed.

        Raises:
            StoreError: the file is missing, of another size, or cannot be reached.
        """


class FileStream:
    """The bytes of a file that its caller has opened, and closes."""

    def __init__(self, file: IO[bytes], address: str) -> None:
        self._file = file
        self._address = address

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes."""
        try:
            return self._file.read(size)
        except OSError as error:
            raise unreachable(self._address, error) from error

    def finish(self) -> None:
        """See that nothing is left."""
        expect_end(self, self._address)


def missing(name: str, address: str) -> StoreError:
    """Return the error for a file that is not there."""
    if name == MANIFEST_NAME:
        return StoreError("no shard manifest", path=address, hint="Run `hexdata export` first.")
    return StoreError("a shard is missing", path=address, hint=HINT)


def check_size(address: str, found: int | None, expected: int | None) -> None:
    """See that a file has the size that it must have, where both are known.

    Raises:
        StoreError: it has not.
    """
    if None not in (found, expected) and found != expected:
        raise StoreError(
            "a shard is cut or altered", path=address, found=f"{found} bytes", expected=expected, hint=HINT
        )


def expect_end(stream: ByteStream, address: str) -> None:
    """See that a stream has come to its end.

    Raises:
        StoreError: it has not.
    """
    if stream.read(1):
        raise StoreError("a shard is cut or altered", path=address, found="more bytes", hint=HINT)


def unreachable(address: str, error: Exception) -> StoreError:
    """Return the error for a place that fails."""
    return StoreError("a file cannot be read", path=address, found=str(error) or type(error).__name__)
