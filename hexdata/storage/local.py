"""Files on a local disk. A file under its final name is complete, even after a crash or a power failure.

Each call of the system is repeated after temporary errors (``hexdata.retry.on_disk``), and its error names
the file. ``LocalStorage`` documents the interface that it has in common with ``ObjectStorage``.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, Final, NamedTuple

from hexdata import system
from hexdata.errors import StoreError
from hexdata.retry import on_disk, repeats_on_disk
from hexdata.storage.errors import add_path_to_error
from hexdata.storage.lock import HOLDER_NAME, LOCK_NAME, MAX_BYTES, locked_error

_TEMPORARY_SUFFIX: Final = ".tmp"
_TEMPORARY_NAME: Final = re.compile(r"\..+\.\d+\.tmp", re.DOTALL)
"""The temporary names of ``publish``: a dot, the file name, a random number and the suffix."""


class HashingFile(BufferedWriter):
    """A binary file that is written from its beginning, with the SHA-256 of the data written so far."""

    def __init__(self, file: io.FileIO) -> None:
        super().__init__(file)
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write all of ``data`` (bytes-like), add it to the digest and return the number of bytes."""
        self._hash.update(data)
        return super().write(data)

    @property
    def sha256(self) -> str:
        """SHA-256 of the data written so far, in hexadecimal."""
        return self._hash.hexdigest()


class Version(NamedTuple):
    """The version of a file or an object."""

    content: str
    """Size and time of the last change of a file; tag of an object."""
    status_time: int = 0
    """Time of the last change of a file, its hard links or its permissions in nanoseconds. A copy may get the
    time of the last change of another file, but not this one."""


@dataclass(frozen=True)
class LocalStorage:
    """A file or folder on a local disk.

    Unless stated otherwise, methods raise ``OSError`` if the disk fails.

    Attributes:
        path: Path of the file or folder.
    """

    path: Path

    @property
    def local(self) -> Path:
        """The path, if libraries can open it themselves; None for an object."""
        return self.path

    # --- properties -----------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Return whether the file or folder exists."""
        return _status(self.path) is not None

    def size(self) -> int | None:
        """Return the size of the file in bytes, or None if there is no such file."""
        status = _status(self.path)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def version(self) -> Version | None:
        """Return a version that changes with the content of the file; None if it does not exist."""
        found = _status(self.path)
        return found and Version(f"{found.st_size} {found.st_mtime_ns}", found.st_ctime_ns)

    def files(self) -> dict[str, int]:
        """Return the sizes in bytes of all files below the folder, by relative name, sorted.

        A file at the path itself has an empty name. A folder that does not exist has no files. Links are
        followed, each folder once.
        """
        if (size := self.size()) is not None:
            return {"": size}
        walked = walk_once(self.path, onerror=_raise_unless_missing)
        found = [folder / name for folder, _, names in walked for name in names]
        sizes = {path.relative_to(self.path).as_posix(): LocalStorage(path).size() for path in found}
        return {name: size for name, size in sorted(sizes.items()) if size is not None}

    def names(self) -> list[str]:
        """Return the names directly in the folder, sorted; none if it does not exist or cannot be listed."""
        try:
            return sorted(on_disk(os.listdir, self.path))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []

    # --- reading --------------------------------------------------------------------------------------

    def open(self, *, block: int = 0) -> BufferedReader:  # noqa: ARG002
        """Open the file for reading and seeking.

        Args:
            block: Bytes per request to an object store, 8 MiB by default. The last block is kept in memory.
        """
        return open_file(self.path)

    def read_range(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of the file, or fewer if it is shorter."""
        with open_file(self.path) as file:
            file.seek(start)
            return file.read(stop - start)

    def read_tagged(self, max_bytes: int) -> tuple[bytes, str | None]:
        """Return at most ``max_bytes`` bytes of the file, and the tag of this version for :meth:`put`."""
        return self.read_range(0, max_bytes), None

    # --- writing --------------------------------------------------------------------------------------

    @contextmanager
    def publish(self, *, replace: bool = True, sync: bool = True) -> Iterator[HashingFile]:  # noqa: ARG002
        """Open the file for writing so that it appears complete or not at all.

        It is written under a random temporary name in the same folder, synced and renamed. If processes write
        the same file at the same time, the last one to finish wins. After an exception nothing is left.

        Args:
            replace: Whether to overwrite an existing object with other content (default: True). Local files
                are always replaced, because a lock on a local disk cannot be lost.
            sync: Whether the file survives a power failure (default: True). False is for temporary files that
                are compared with their digests before they are used again.
        """
        path = self.path
        make_folder(path.parent)
        # In the same folder, since only a rename on one disk replaces a file at once.
        temporary = path.with_name(f".{path.name}.{int.from_bytes(os.urandom(6))}{_TEMPORARY_SUFFIX}")
        try:
            with HashingFile(on_disk(_NamedFile, temporary, "xb")) as file:
                yield file
                file.flush()
                # Contents before the name: a power failure could leave an empty file under its final name.
                if sync:
                    with add_path_to_error(path):
                        os.fsync(file.fileno())  # once: Linux takes what it could not write for written
            on_disk(temporary.replace, path)
        except BaseException as error:
            if isinstance(error, OSError) and error.filename == str(temporary):
                error.filename = str(path)  # the user knows no temporary name
            with suppress(OSError):  # which would hide the error
                temporary.unlink()
            raise
        # Until the folder is synced, a power failure can undo the rename.
        if sync:
            sync_folder(path.parent)

    def put(self, data: bytes, tag: str | None) -> str | None:  # noqa: ARG002
        """Publish a small file if the stored version still has the given tag; return its new tag.

        Local files have no tags and are always replaced.
        """
        with self.publish() as file:
            file.write(data)
        return None

    # --- locking --------------------------------------------------------------------------------------

    @contextmanager
    def lock(self, stage: str, folders: Iterable[str]) -> Iterator[Callable[[], None]]:
        """Hold the lock of the folder: at most one process writes to it at a time.

        Args:
            stage: Name of the stage that writes, for messages of other processes.
            folders: Subfolders that hexdata writes to. Links in them are refused.

        Yields:
            A function that raises ``StoreLockedError`` if the lock has been lost. It is called before
            anything is published or removed. A lock on a local disk cannot be lost.

        Raises:
            StoreLockedError: Another process holds the lock; the message names it.
            StoreError: A link leads out of the folder.
        """
        # First, since creating the folder or opening the lock file would already write through a link.
        on_disk(_refuse_links, self.path, folders)
        make_folder(self.path)
        path, holder = self.path / LOCK_NAME, LocalStorage(self.path / HOLDER_NAME)
        if path.exists():
            # Raises if a pipe has this name: to open it for writing, as below, would wait for a reader.
            open_file(path).close()
        with ExitStack() as stack:
            try:
                with add_path_to_error(path):
                    is_held = on_disk(lambda: stack.enter_context(system.locked(path, wait=False)))
                if not is_held:
                    known = b""
                    with suppress(OSError):  # the holder removes the file when it ends, which may be now
                        known = holder.read_range(0, MAX_BYTES)
                    raise locked_error(self.path, known)
                # After the lock is held, so that only its holder writes this file.
                with holder.publish(sync=False) as file:
                    file.write(json.dumps({"pid": os.getpid(), "stage": stage}).encode())
            except OSError as error:
                # The user does not know these files. Not ``Path.exists``, which raises in a folder of others.
                if not os.path.exists(error.filename or ""):  # noqa: PTH110
                    error.filename = str(self.path)
                raise
            try:
                yield lambda: None
            finally:
                with suppress(OSError):  # it is only for messages
                    holder.remove()

    # --- removing -------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Remove the file if it exists."""
        on_disk(self.path.unlink, missing_ok=True)

    def remove_tree(self, require: Callable[[], None] | None = None) -> None:
        """Remove the folder and its contents if it exists.

        Args:
            require: Called before each request to an object store; raises to prevent it. With it, the folder
                is gone afterwards, also after a crash. Default None: the folder contains unfinished work, so
                errors of a local disk are ignored, and nothing is synced.
        """
        shutil.rmtree(self.path, ignore_errors=True)
        if require is not None and self.path.parent.is_dir():
            # What is left raises its error. NFS keeps files that another process has open, by such names.
            for folder, _, names in () if self.path.is_symlink() else os.walk(self.path, topdown=False):
                for name in names:
                    if not name.startswith(".nfs"):
                        on_disk(Path(folder, name).unlink, missing_ok=True)
                if not any(Path(folder).rglob(".nfs*")):
                    on_disk(os.rmdir, folder)
            sync_folder(self.path.parent)

    @repeats_on_disk
    def remove_unfinished(self, folders: Iterable[str] | None = None) -> None:
        """Remove the temporary files that killed processes left in the folder.

        Call this only on folders that hexdata owns and while no other process writes to them.

        Args:
            folders: Subfolders to clean with everything below them, besides the files directly in the folder.
                None (default) for all.
        """
        pattern = f".*{_TEMPORARY_SUFFIX}"
        searched = [self.path] if folders is None else [self.path / name for name in folders]
        found = [path for folder in searched for path in folder.rglob(pattern)]
        for path in (*found, *self.path.glob(pattern)):
            # The glob alone also matches hidden files that end in .tmp and are not hexdata's.
            if _TEMPORARY_NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)


def _status(path: Path) -> os.stat_result | None:
    """Return the properties of a file or folder; None if there is none or a link leads nowhere."""
    try:
        return on_disk(path.stat)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the latter for a name with a zero byte
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise


# --- open files ---------------------------------------------------------------------------------------


class _NamedFile(io.FileIO):
    """A file whose errors name it, and whose reads and writes are tried again after temporary errors."""

    def __init__(self, path: Path, mode: str = "rb") -> None:
        self._path = path
        super().__init__(str(path), mode)

    def readinto(self, buffer: Any) -> int:
        """Read into a writable buffer; return the number of bytes, 0 at the end."""
        return self._repeat(super().readinto, buffer)

    read = io.RawIOBase.read  # type: ignore[assignment]  # which calls ``readinto``, other than FileIO
    readall = io.RawIOBase.readall

    def write(self, data: Any) -> int:
        """Write some bytes and return their number."""
        return self._repeat(super().write, data)

    @repeats_on_disk
    def _repeat(self, operation: Callable[[Any], int | None], buffer: Any) -> int:
        with add_path_to_error(self._path):
            count = operation(buffer)
        if count is None:  # what Python returns for the error EAGAIN
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(self._path))
        return count


def open_file(path: Path) -> BufferedReader:
    """Open a local file for reading. Rejects pipes and devices, which may block or never end.

    Opening and reading are tried again after temporary errors.

    Raises:
        OSError: The file cannot be opened or is not a regular file.
    """
    kind = on_disk(path.stat).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # open() raises its own error for a folder
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return BufferedReader(on_disk(_NamedFile, path))


# --- folders ------------------------------------------------------------------------------------------


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


def walk_once(root: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk a folder tree like ``os.walk``, following links, but visit each folder only once.

    Args:
        root: Folder at which to begin.
        onerror: Called with the error of a folder that cannot be listed; the walk continues after it.

    Yields:
        The path of each folder, the list of its subfolders and the names of its files. Subfolders removed
        from the list are not visited.
    """
    visited: set[Path] = set()
    pending = [root]
    while pending:
        folder = pending.pop()
        try:
            _, subfolders, names = on_disk(lambda path: next(os.walk(path, onerror=_raise)), folder)
            resolved = folder.resolve()
        except OSError as error:
            onerror(error)
            continue
        # By resolved path: a link to a folder above would otherwise never end.
        if resolved not in visited:
            visited.add(resolved)
            yield folder, subfolders, names
            pending += [folder / name for name in reversed(subfolders)]


def _raise(error: OSError) -> None:
    raise error


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _refuse_links(store: Path, folders: Iterable[str]) -> None:
    """Check that a store contains no links through which a process would write outside of it.

    Data files may be symbolic links, because they are replaced by renaming and never written through. The
    path of the store itself may also contain links.

    Args:
        store: Folder of the store.
        folders: Folders to check, relative to the store.

    Raises:
        StoreError: A folder, or a file that is written in place, is a symbolic link.
    """
    for start in ("", *folders):
        are_written_in_place = start.startswith(".") or start in ("", "logs")
        for root, subfolders, names in os.walk(store / start, onerror=_raise_unless_missing):
            for name in (*subfolders, *(names if are_written_in_place else ())):
                if (path := Path(root, name)).is_symlink():
                    reason = "hexdata does not write through symbolic links in a store"
                    hint = "Replace the link with its target, or remove it, and run the command again."
                    raise StoreError(reason, path=path, hint=hint)
            if not start:  # other folders below the store belong to others
                break
