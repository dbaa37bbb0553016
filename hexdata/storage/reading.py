"""Reading of local files and objects, with retries for objects."""

from __future__ import annotations

import errno
import io
import stat
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hexdata.storage.address import AnyPath
from hexdata.storage.retry import add_path, patiently

if TYPE_CHECKING:
    from upath import UPath

__all__ = [
    "PART",
    "file_system",
    "open_binary",
    "open_file",
    "open_object",
    "read_range",
    "read_tail",
    "speaks_s3",
]

PART: Final = 8 << 20
"""Bytes per request and per uploaded part."""
_BUFFER: Final = 1 << 17
"""Bytes per read from the current block."""


def file_system(path: UPath) -> Any:
    """Return the fsspec file system of a path, which Python and DuckDB share."""
    return path.fs


def speaks_s3(system: Any) -> bool:
    """Return whether a file system uses the S3 protocol."""
    return hasattr(system, "call_s3")


def open_file(path: Path) -> BufferedReader:
    """Open a local file for reading. Rejects pipes and devices, which may block or never end.

    Raises:
        OSError: The file cannot be opened or is not a regular file.
    """
    kind = path.stat().st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # open() raises its own error for a folder
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path.open("rb")


def open_binary(path: AnyPath, *, block: int = PART) -> BufferedReader:
    """Open a file or an object for reading and seeking.

    Args:
        path: Local path or address.
        block: Bytes per request for an object, 8 MiB by default. The last block is kept in memory.

    Raises:
        OSError: It cannot be opened or, later, read.
    """
    if isinstance(path, Path):
        return open_file(path)
    return open_object(file_system(path), path.path, str(path), block=block)


def read_range(path: AnyPath, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a file or an object, or fewer if it is shorter.

    Raises:
        OSError: It cannot be read.
    """
    if isinstance(path, Path):
        with open_file(path) as file:
            file.seek(start)
            return file.read(stop - start)
    with add_path(path):
        found: bytes = patiently(file_system(path).cat_file, path.path, start=start, end=stop)
    return found


def read_tail(path: AnyPath, count: int) -> bytes:
    """Return the last ``count`` bytes of a file or an object, or all if it is shorter.

    Raises:
        OSError: It cannot be read.
    """
    if isinstance(path, Path):
        with open_file(path) as file:
            file.seek(-min(count, file.seek(0, io.SEEK_END)), io.SEEK_END)
            return file.read()
    with add_path(path):
        found: bytes = patiently(file_system(path).tail, path.path, count)
    return found


def open_object(
    system: Any, path: str, name: str, *, block: int = PART, info: dict[str, Any] | None = None
) -> BufferedReader:
    """Open an object of a file system, as :func:`open_binary` does.

    Args:
        system: File system of fsspec.
        path: Path in this file system.
        name: Name of the object for error messages.
        block: Bytes per request, 8 MiB by default.
        info: Properties of the object, if already known. They save a request, and any other version of the
            object is rejected.

    Raises:
        OSError: It cannot be opened or, later, read.
    """
    known = {"size": info["size"]} if info is not None and speaks_s3(system) else {}
    with add_path(name):
        opened = patiently(system.open, path, "rb", block_size=block, cache_type="readahead", **known)
    if known and info is not None:
        opened.details = info
        if "ETag" in info:  # s3fs omits this condition if the size is given
            opened.read_kw = {**opened.read_kw, "IfMatch": info["ETag"]}
    return BufferedReader(_RetryingReader(opened, name), _BUFFER)


class _RetryingReader(io.RawIOBase):
    """Raw reader of an object opened by fsspec, which retries failed reads."""

    def __init__(self, opened: Any, name: str) -> None:
        self._opened = opened
        self._name = name

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a writable buffer; return the number of bytes, 0 at the end."""
        view = memoryview(buffer).cast("B")
        with add_path(self._name):
            data: bytes = patiently(self._opened.read, len(view))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset and return it."""
        return int(self._opened.seek(offset, whence))

    def tell(self) -> int:
        """Return the current offset."""
        return int(self._opened.tell())

    def close(self) -> None:
        """Close the object. Repeated calls have no effect."""
        super().close()
        self._opened.close()
