"""Files on a local disk. A file under its final name is complete, even after a crash or a power failure."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, ClassVar, Final

from hexdata.retry import on_disk
from hexdata.storage.base import HashingFile, HeldLock, Storage, Tagged
from hexdata.storage.errors import add_path_to_disk_full, add_path_to_error
from hexdata.storage.local_files import (
    create_file,
    make_folder,
    open_file,
    open_in_place,
    refuse_links,
    sync_file,
    sync_folder,
    walk_once,
)
from hexdata.storage.lock import LOCK_NAME, find_lock_holder, kernel_lock
from hexdata.storage.reading import PART

__all__ = ["LocalStorage"]

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
        return _status(self.path) is not None

    def size(self) -> int | None:
        """Return the size of the file in bytes, or None if there is no such file."""
        status = _status(self.path)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def is_folder(self) -> bool:
        """Return whether the path is a folder, which no file can replace."""
        status = _status(self.path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def version(self) -> str:
        """Return the size and the modification time; empty if the file does not exist."""
        status = _status(self.path)
        return "" if status is None else f"{status.st_size} {status.st_mtime_ns}"

    def files(self) -> dict[str, int]:
        """Return the sizes in bytes of all files below the folder, by relative name, sorted."""
        return on_disk(self._files)

    def _files(self) -> dict[str, int]:
        if (size := self.size()) is not None:
            return {"": size}
        paths = [
            folder / name
            for folder, _, names in walk_once(self.path, onerror=_raise_unless_missing)
            for name in names
        ]
        sizes = {path.relative_to(self.path).as_posix(): LocalStorage(path).size() for path in paths}
        return dict(sorted((name, size) for name, size in sizes.items() if size is not None))

    def names(self) -> list[str]:
        """Return the names directly in the folder, sorted; none if it does not exist or cannot be listed."""
        try:
            return sorted(on_disk(os.listdir, self.path))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []

    def free_space(self) -> int:
        """Return the free space in bytes on the disk. The path need not exist."""
        path = self.path.absolute()
        while not LocalStorage(path).exists():
            path = path.parent
        return on_disk(shutil.disk_usage, path).free

    def work_path(self, name: str, purpose: str) -> Path:  # noqa: ARG002
        """Return the path ``name`` below the folder."""
        return self.path / name

    def open(self, *, block: int = PART) -> BufferedReader:  # noqa: ARG002
        """Open the file for reading and seeking. ``block`` has no effect."""
        return open_file(self.path)

    @property
    def local(self) -> Path:
        """The path."""
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
    def publish(self, *, replace: bool = True, sync: bool = True) -> Iterator[HashingFile]:  # noqa: ARG002
        """Write the file under a temporary name, sync it and rename it. ``replace`` has no effect."""
        path = self.path
        make_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{int.from_bytes(os.urandom(6))}{_TEMPORARY_SUFFIX}")
        try:
            with add_path_to_disk_full(path), create_file(temporary, path) as opened:
                with HashingFile(opened, path) as file:  # closed while it can still be flushed
                    yield file
                if sync:
                    with add_path_to_error(path):
                        sync_file(opened, file.sha256)
            on_disk(temporary.replace, path)
        except BaseException:
            with suppress(OSError):  # which would hide the error
                temporary.unlink()
            raise
        if sync:
            sync_folder(path.parent)

    def put(self, data: bytes, tag: str | None) -> None:  # noqa: ARG002
        """Replace the file. ``tag`` has no effect: a lock on a local disk cannot be lost."""
        with self.publish() as file:
            file.write(data)

    def append(self, line: bytes, *, max_bytes: int) -> None:  # noqa: ARG002
        """Append a line to a small log file with a single write. ``max_bytes`` has no effect."""
        on_disk(self.path.parent.mkdir, exist_ok=True)
        with open_in_place(self.path) as file, add_path_to_error(self.path):
            on_disk(file.write, line)

    def extend(self, data: bytes, size: int) -> bool:
        """Replace everything after the first ``size`` bytes of a file by ``data``, and sync it."""
        try:
            status = on_disk(self.path.lstat)
        except FileNotFoundError:
            return False
        if status.st_size < size or status.st_nlink > 1:
            return False
        with open_in_place(self.path) as file, add_path_to_error(self.path):
            on_disk(_replace_end, file, size, data)
        return True

    @contextmanager
    def lock(self, stage: str, folders: Iterable[str], *, shares_work: bool) -> Iterator[HeldLock]:  # noqa: ARG002
        """Hold the kernel's lock, which is released when the process ends and cannot be lost."""
        refuse_links(self.path, folders)
        make_folder(self.path)
        with kernel_lock(self.path / LOCK_NAME, self.path, stage):
            yield HeldLock(_do_nothing, has_current_work=True)

    def find_writer(self) -> str | None:
        """Return a description of the process that holds the lock, or None. Tests it only for a moment."""
        return find_lock_holder(self.path / LOCK_NAME)

    def remove(self, before_request: Callable[[], None] = lambda: None) -> None:  # noqa: ARG002
        """Remove the file if it exists."""
        on_disk(self.path.unlink, missing_ok=True)

    def remove_tree(
        self,
        before_request: Callable[[], None] = lambda: None,  # noqa: ARG002
        *,
        durable: bool = False,
        known: Iterable[str] = (),  # noqa: ARG002
    ) -> None:
        """Remove the folder and its contents if it exists. Unless ``durable``, errors are ignored."""
        if self.is_folder():  # rmtree would block on a pipe
            if durable:
                on_disk(_remove_folder, self.path)
            else:
                shutil.rmtree(self.path, ignore_errors=True)
        if durable and self.path.parent.is_dir():
            sync_folder(self.path.parent)

    def remove_unfinished(self, folders: Iterable[str] | None = None) -> None:
        """Remove the temporary files that killed processes left in the folder."""
        on_disk(self._remove_unfinished, folders)

    def _remove_unfinished(self, folders: Iterable[str] | None) -> None:
        pattern = f".*{_TEMPORARY_SUFFIX}"
        found = [self.path.rglob(pattern)]
        if folders is not None:
            found = [*((self.path / name).rglob(pattern) for name in folders), self.path.glob(pattern)]
        for paths in found:
            for path in paths:
                if _TEMPORARY_NAME.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def unreplaceable(self) -> list[str]:
        """Return an empty list: local files are always replaced."""
        return []

    def query_filesystem(self) -> Any:
        """Return None: DuckDB opens local files itself."""
        return None

    def is_temporary(self, error: BaseException) -> bool:  # noqa: ARG002
        """Return False: an error of a disk concerns the file."""
        return False


def _status(path: Path) -> os.stat_result | None:
    """Return the properties of a file or folder; None if there is none or a link leads nowhere."""
    try:
        return on_disk(path.stat)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the latter for a name with a zero byte
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return None


def _replace_end(file: io.FileIO, size: int, data: bytes) -> None:
    """Replace everything after the first ``size`` bytes of a file, and sync it."""
    file.truncate(size)
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    os.fsync(file.fileno())


def _do_nothing() -> None:
    """The kernel guarantees that the lock is still held."""


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _remove_folder(folder: Path) -> None:
    """Remove a folder and its contents. The error of a file has its path.

    ``rmtree`` of Python 3.11 gives only its name, and that of Python 3.13 the path of its folder. Files that
    another process has open on NFS keep their folders until they are closed.
    """
    failed: list[str] = []

    def fail(_: object, path: str, raised: Any) -> None:
        error: OSError = raised[1] if isinstance(raised, tuple) else raised
        if error.errno != errno.ENOTEMPTY or not _has_only_open_files(path):
            failed.append(path)
            error.filename = failed[0]
            raise error

    if sys.version_info >= (3, 12):
        shutil.rmtree(folder, onexc=fail)
    else:
        shutil.rmtree(folder, onerror=fail)


def _has_only_open_files(folder: str) -> bool:
    """Return whether a folder has only files that NFS has renamed because a process has them open."""
    names = [name for _, _, files in os.walk(folder) for name in files]
    return bool(names) and all(name.startswith(".nfs") for name in names)
