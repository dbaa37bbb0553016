"""Files on a local disk. A file under its final name is complete, even after a crash or a power failure."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import ClassVar, Final

from hexdata.errors import StoreError
from hexdata.storage.base import HashingFile, Storage, Tagged
from hexdata.storage.errors import add_path_to_disk_full, add_path_to_error
from hexdata.storage.reading import PART

__all__ = ["LocalStorage", "make_folder", "open_file", "open_in_place", "refuse_links", "walk_once"]

_TEMPORARY_SUFFIX: Final = ".tmp"
_TEMPORARY_NAME: Final = re.compile(r"\..+\.\d+\.tmp", re.DOTALL)
"""The temporary names of ``publish``: a dot, the file name, a random number and the suffix."""


@dataclass(frozen=True)
class LocalStorage(Storage):
    """A file or folder on a local disk."""

    path: Path
    memory: ClassVar[int] = 0
    keeps_work: ClassVar[bool] = True

    def exists(self) -> bool:
        """Return whether the file or folder exists."""
        return self.path.exists()

    def size(self) -> int | None:
        """Return the size of the file in bytes, or None if there is no such file."""
        return self.path.stat().st_size if self.path.is_file() else None

    def version(self) -> str:
        """Return the size and the modification time; empty if the file does not exist."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return ""
        return f"{status.st_size} {status.st_mtime_ns}"

    def files(self) -> dict[str, int]:
        """Return the sizes in bytes of all files below the folder, by relative name, sorted."""
        if self.path.is_file():
            return {"": self.path.stat().st_size}
        paths = [
            folder / name
            for folder, _, names in walk_once(self.path, onerror=_raise_unless_missing)
            for name in names
        ]
        sizes = {
            path.relative_to(self.path).as_posix(): path.stat().st_size for path in paths if path.is_file()
        }
        return dict(sorted(sizes.items()))

    def free_space(self) -> int:
        """Return the free space in bytes on the disk. The path need not exist."""
        path = self.path.absolute()
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    def work_path(self, name: str, purpose: str) -> Path:  # noqa: ARG002
        """Return the path ``name`` below the folder."""
        return self.path / name

    def open(self, *, block: int = PART) -> BufferedReader:  # noqa: ARG002
        """Open the file for reading and seeking. ``block`` has no effect."""
        return open_file(self.path)

    def source(self) -> Path:
        """Return the path."""
        return self.path

    def read_range(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of the file, or fewer if it is shorter."""
        with open_file(self.path) as file:
            file.seek(start)
            return file.read(stop - start)

    def read_tail(self, count: int) -> bytes:
        """Return the last ``count`` bytes of the file, or all if it is shorter."""
        with open_file(self.path) as file:
            file.seek(-min(count, file.seek(0, io.SEEK_END)), io.SEEK_END)
            return file.read()

    def read_tagged(self, max_bytes: int) -> Tagged:
        """Return at most ``max_bytes`` bytes of the file, without a tag."""
        with open_file(self.path) as file:
            return Tagged(file.read(max_bytes), None)

    @contextmanager
    def publish(self, *, replace: bool = True) -> Iterator[HashingFile]:  # noqa: ARG002
        """Write the file under a temporary name, sync it and rename it. ``replace`` has no effect."""
        path = self.path
        make_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{int.from_bytes(os.urandom(6))}{_TEMPORARY_SUFFIX}")
        try:
            with add_path_to_disk_full(path), temporary.open("xb") as opened:  # "x" follows no link
                with HashingFile(opened, path) as file:  # closed while it can still be flushed
                    yield file
                with add_path_to_error(path):
                    os.fsync(opened.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def put(self, data: bytes, tag: str | None) -> None:  # noqa: ARG002
        """Replace the file. ``tag`` has no effect: a lock on a local disk cannot be lost."""
        with self.publish() as file:
            file.write(data)

    def append(self, line: bytes, *, max_bytes: int) -> None:  # noqa: ARG002
        """Append a line to a small log file with a single write. ``max_bytes`` has no effect."""
        self.path.parent.mkdir(exist_ok=True)
        with open_in_place(self.path) as file, add_path_to_error(self.path):
            file.write(line)

    def remove(self) -> None:
        """Remove the file if it exists."""
        self.path.unlink(missing_ok=True)

    def remove_tree(self) -> None:
        """Remove the folder and its contents if it exists. Errors are ignored."""
        if self.path.is_dir():  # rmtree would block on a pipe
            shutil.rmtree(self.path, ignore_errors=True)

    def remove_unfinished(self, folders: Iterable[str] | None = None) -> None:
        """Remove the temporary files that killed processes left in the folder."""
        pattern = f".*{_TEMPORARY_SUFFIX}"
        found = [self.path.rglob(pattern)]
        if folders is not None:
            found = [*((self.path / name).rglob(pattern) for name in folders), self.path.glob(pattern)]
        for paths in found:
            for path in paths:
                if _TEMPORARY_NAME.fullmatch(path.name):
                    path.unlink(missing_ok=True)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def open_file(path: Path) -> BufferedReader:
    """Open a local file for reading. Rejects pipes and devices, which may block or never end.

    Raises:
        OSError: The file cannot be opened or is not a regular file.
    """
    kind = path.stat().st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # open() raises its own error for a folder
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path.open("rb")


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents so that they survive a power failure."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Sync ``folder`` so that a new name in it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with add_path_to_error(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_in_place(path: Path) -> io.FileIO:
    """Open a file of the store for reading, appending and truncating. Create it if it is missing.

    Raises:
        StoreError: The path is a symbolic link, has more than one hard link or is not a regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise _linked_file_error(path) from error
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
        os.close(descriptor)
        raise _linked_file_error(path)
    return os.fdopen(descriptor, "ab+", buffering=0)


def _linked_file_error(path: Path) -> StoreError:
    return StoreError(
        "hexdata writes to this file in place, but it may belong to something else",
        path=path,
        found="a symbolic or hard link, a folder or a device",
        expected="a regular file that is not linked",
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
                "a store holds no links that hexdata would write through",
                path=entry.path,
                found=f"a symbolic link to {str(Path(entry.path).readlink())!r}",
                hint="Replace the link by what it leads to, or remove it, and run the command again.",
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
