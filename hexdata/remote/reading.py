"""Objects read: opened like a file, by ranges, in blocks, and again where that fails. Writes nothing."""

from __future__ import annotations

import errno
import io
import stat
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hexdata.remote.address import AnyPath
from hexdata.remote.patience import naming, patiently

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
"""Bytes that are sent or asked for at a time."""
_BUFFER: Final = 1 << 17
"""Bytes that are taken at a time from those that were asked for."""


def file_system(path: UPath) -> Any:
    """Return the file system of a path: fsspec's, the one object that Python and DuckDB read through."""
    return path.fs


def speaks_s3(system: Any) -> bool:
    """Say whether a file system is that of S3."""
    return hasattr(system, "call_s3")


def open_file(path: Path) -> BufferedReader:
    """Open a file of this machine to be read. A pipe or a device would be waited for, or never end.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    kind = path.stat().st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # a folder has an error of its own
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path.open("rb")


def open_binary(path: AnyPath, *, block: int = PART) -> BufferedReader:
    """Open a file or an object to be read, from the front or by seeking.

    Of an object, so many bytes are asked for at a time, and kept until others are.

    Raises:
        OSError: it cannot be opened, or, later, read.
    """
    if isinstance(path, Path):
        return open_file(path)
    return open_object(file_system(path), path.path, str(path), block=block)


def read_range(path: AnyPath, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a file or an object, or fewer where it ends before.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(path, Path):
        with open_file(path) as file:
            file.seek(start)
            return file.read(stop - start)
    with naming(path):
        found: bytes = patiently(file_system(path).cat_file, path.path, start=start, end=stop)
    return found


def read_tail(path: AnyPath, count: int) -> bytes:
    """Return the last ``count`` bytes of a file or an object, or all where it has fewer.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(path, Path):
        with open_file(path) as file:
            file.seek(-min(count, file.seek(0, io.SEEK_END)), io.SEEK_END)
            return file.read()
    with naming(path):
        found: bytes = patiently(file_system(path).tail, path.path, count)
    return found


def open_object(
    system: Any, path: str, name: str, *, block: int = PART, info: dict[str, Any] | None = None
) -> BufferedReader:
    """Open an object of a file system, as :func:`open_binary` does.

    Args:
        system: fsspec's.
        path: in it.
        name: by which errors call it.
        block: bytes that are asked for at a time.
        info: what the store has said of the object, if it has: it is then not asked again, and another
            version of the object is not read.

    Raises:
        OSError: it cannot be opened, or, later, read.
    """
    known = {"size": info["size"]} if info is not None and speaks_s3(system) else {}
    with naming(name):
        opened = patiently(system.open, path, "rb", block_size=block, cache_type="readahead", **known)
    if known and info is not None:
        opened.details = info
        if "ETag" in info:  # which s3fs leaves out where it is given the size
            opened.read_kw = {**opened.read_kw, "IfMatch": info["ETag"]}
    return BufferedReader(_Reading(opened, name), _BUFFER)


class _Reading(io.RawIOBase):
    """An object that fsspec has opened; what it cannot give now, it is asked for again."""

    def __init__(self, opened: Any, name: str) -> None:
        self._opened = opened
        self._name = name

    def readable(self) -> bool:
        """Say yes."""
        return True

    def seekable(self) -> bool:
        """Say yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a writable buffer; return how many bytes, 0 at the end."""
        view = memoryview(buffer).cast("B")
        with naming(self._name):
            piece: bytes = patiently(self._opened.read, len(view))
        view[: len(piece)] = piece
        return len(piece)

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        return int(self._opened.seek(place, whence))

    def tell(self) -> int:
        """Return the place."""
        return int(self._opened.tell())

    def close(self) -> None:
        """Let go of the object; again does nothing."""
        super().close()
        self._opened.close()
