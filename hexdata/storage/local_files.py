"""Functions for files and folders on a local disk."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from hexdata import system
from hexdata.errors import StoreError
from hexdata.storage.errors import add_path_to_error

__all__ = ["make_folder", "open_file", "open_in_place", "refuse_links", "sync_folder", "walk_once"]


def open_file(path: Path) -> BufferedReader:
    """Open a local file for reading. Rejects pipes and devices, which may block or never end.

    Raises:
        OSError: The file cannot be opened or is not a regular file.
    """
    kind = path.stat().st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # open() raises its own error for a folder
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return BufferedReader(_NamedFile(path))


class _NamedFile(io.FileIO):
    """A file opened for reading whose errors name it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path

    def readinto(self, buffer: Any) -> int | None:
        """Read into a writable buffer; return the number of bytes, 0 at the end."""
        with add_path_to_error(self._path):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        """Read up to the end."""
        with add_path_to_error(self._path):
            return super().readall()


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents so that they survive a power failure."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Sync ``folder`` so that a new name in it survives a power failure."""
    with add_path_to_error(folder):
        system.sync_folder(folder)


def open_in_place(path: Path) -> io.FileIO:
    """Open a file of the store for reading, appending and truncating. Create it if it is missing.

    Raises:
        StoreError: The path is a symbolic link, has more than one hard link or is not a regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | system.OPEN_IN_PLACE
    try:
        descriptor = os.open(path, flags, 0o666)
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
        entries = list(os.scandir(folder))
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
