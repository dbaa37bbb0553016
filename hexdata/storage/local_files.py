"""Functions for files and folders on a local disk."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, Final

from hexdata import system
from hexdata.errors import StoreError
from hexdata.retry import is_transient, on_disk
from hexdata.storage.errors import add_path_to_error

__all__ = [
    "create_file",
    "make_folder",
    "open_file",
    "open_in_place",
    "refuse_links",
    "sync_file",
    "sync_folder",
    "walk_once",
]

_BLOCK: Final = 1 << 20
"""Bytes that are written again at once."""


def open_file(path: Path) -> BufferedReader:
    """Open a local file for reading. Rejects pipes and devices, which may block or never end.

    Opening and reading are tried again after temporary errors.

    Raises:
        OSError: The file cannot be opened or is not a regular file.
    """
    return BufferedReader(on_disk(_open_regular, path))


def _open_regular(path: Path) -> _NamedFile:
    kind = path.stat().st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # open() raises its own error for a folder
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return _NamedFile(path)


def create_file(path: Path, final: Path) -> BufferedWriter:
    """Create a local file for writing. Writing is tried again after temporary errors.

    Args:
        path: Path of the file.
        final: Path that it will be renamed to, for errors of writing.

    Raises:
        FileExistsError: There is a file or a link of this name.
    """
    return BufferedWriter(on_disk(_NamedFile, path, "xb", final))


def sync_file(file: BufferedWriter, sha256: str) -> None:
    """Sync a file that was created here, and try again after temporary errors.

    Linux takes pages that it could not write for written, so all are written again before the next attempt.

    Args:
        file: The open file.
        sha256: SHA-256 of its content, in hexadecimal.
    """

    def attempt() -> None:
        try:
            os.fsync(file.fileno())
        except OSError as error:
            if is_transient(error):
                _write_again(file, sha256)
            raise

    on_disk(attempt)


def _write_again(file: BufferedWriter, sha256: str) -> None:
    digest = hashlib.sha256()
    with open_file(Path(file.name)) as written:
        file.seek(0)
        while block := written.read(_BLOCK):
            digest.update(block)
            file.write(block)
    file.flush()
    if digest.hexdigest() != sha256:
        raise StoreError("the disk returns other bytes than were written", path=file.name)


class _NamedFile(io.FileIO):
    """A file whose errors name it, and whose reads and writes are tried again after temporary errors."""

    def __init__(self, path: Path, mode: str = "rb", shown: Path | None = None) -> None:
        super().__init__(path, mode)
        self._path = shown or path

    def readinto(self, buffer: Any) -> int:
        """Read into a writable buffer; return the number of bytes, 0 at the end."""
        with add_path_to_error(self._path):
            return on_disk(_never_none, super().readinto, buffer)

    def readall(self) -> bytes:
        """Read up to the end."""
        data, block = bytearray(), memoryview(bytearray(_BLOCK))
        while count := self.readinto(block):
            data += block[:count]
        return bytes(data)

    def write(self, data: Any) -> int:
        """Write some bytes and return their number."""
        with add_path_to_error(self._path):
            return on_disk(_never_none, super().write, data)


def _never_none(operation: Callable[[Any], int | None], buffer: Any) -> int:
    """Return the result of reading or writing; raise the error EAGAIN, for which Python returns None."""
    count = operation(buffer)
    if count is None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return count


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents so that they survive a power failure."""
    if not folder.is_dir():
        make_folder(folder.parent)
        on_disk(folder.mkdir, exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Sync ``folder`` so that a new name in it survives a power failure."""
    with add_path_to_error(folder):
        on_disk(system.sync_folder, folder)


def open_in_place(path: Path) -> io.FileIO:
    """Open a file of the store for reading, appending and truncating. Create it if it is missing.

    Raises:
        StoreError: The path is a symbolic link, has more than one hard link or is not a regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | system.OPEN_IN_PLACE
    try:
        descriptor = on_disk(os.open, path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise _linked_file_error(path) from error
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1 or path.is_symlink():
        os.close(descriptor)
        raise _linked_file_error(path)
    return os.fdopen(descriptor, "ab+", buffering=0)


def _linked_file_error(path: Path) -> StoreError:
    return StoreError(
        "hexdata writes to this file in place, so it must be a regular file without links",
        path=path,
        found="a symbolic or hard link, a folder or a device",
        hint="Remove it and run the command again.",
    )


def refuse_links(store: Path, folders: Iterable[str]) -> None:
    """Check that a store contains no links through which a process would write outside of it.

    Data files may be symbolic links, because they are replaced by renaming and never written through. The
    path of the store itself may also contain links.

    Args:
        store: Folder of the store.
        folders: Folders to check, relative to the store.

    Raises:
        StoreError: A folder, or a file that is written in place, is a symbolic link.
    """
    _refuse_links_in(store, below=False)
    for folder in folders:
        _refuse_links_in(store / folder, files=folder.startswith(".") or folder == "logs")


def _refuse_links_in(folder: Path, *, files: bool = True, below: bool = True) -> None:
    try:
        entries = on_disk(lambda: list(os.scandir(folder)))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_symlink() and (files or entry.is_dir()):
            raise StoreError(
                "hexdata does not write through symbolic links in a store",
                path=entry.path,
                found=f"a symbolic link to {str(Path(entry.path).readlink())!r}",
                hint="Replace the link with its target, or remove it, and run the command again.",
            )
        if below and entry.is_dir(follow_symlinks=False):
            _refuse_links_in(Path(entry.path), files=files)


def walk_once(
    root: Path, onerror: Callable[[OSError], None] | None = None
) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk a folder tree like ``os.walk``, following links, but visit each folder only once.

    Yields:
        The path of each folder, the list of its subfolders and the names of its files. Subfolders removed
        from the list are not visited.
    """
    visited: set[Path] = set()
    for folder, subfolders, names in os.walk(root, onerror=onerror, followlinks=True):
        resolved = Path(folder).resolve()
        if resolved in visited:
            subfolders.clear()
            continue
        visited.add(resolved)
        yield Path(folder), subfolders, names
