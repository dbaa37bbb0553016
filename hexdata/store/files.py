"""Atomic file operations for local disks and object stores.

A file under its final name is complete, even if the process or the machine stops at any moment. On a local
disk a file is written under a temporary name, synced and renamed. For an object store it is written to a
temporary local file first, then uploaded and verified.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

from hexdata.errors import StoreError
from hexdata.storage import (
    AnyPath,
    RemotePath,
    abort_uploads,
    file_system,
    objects_below,
    open_binary,
    patiently,
    remove_object,
    scratch_folder,
    upload,
)
from hexdata.store.disk_space import add_path_to_disk_full, add_path_to_error
from hexdata.strict_json import MAX_JSON_BYTES, Count, HexDigest

__all__ = [
    "FileFacts",
    "HashingFile",
    "append_line",
    "atomic_file",
    "canonical_json",
    "digest_file",
    "exists",
    "has_size",
    "make_folder",
    "names_below",
    "open_in_place",
    "read_bounded",
    "refuse_links",
    "remove_file",
    "remove_temporaries",
    "remove_tree",
    "size_of_tree",
    "walk_once",
    "write_bytes",
]

_TEMPORARY_SUFFIX: Final = ".tmp"
_TEMPORARY_NAME: Final = re.compile(r"\..+\.\d+\.tmp", re.DOTALL)
"""The temporary names of :func:`atomic_file`: a dot, the file name, a random number and the suffix."""


@dataclass(frozen=True)
class FileFacts:
    """Row count, size in bytes and SHA-256 (hexadecimal) of one file, as recorded in a manifest."""

    rows: Count
    bytes: Count
    sha256: HexDigest

    def to_json(self) -> dict[str, object]:
        """Return the entry in the form that the manifest stores."""
        return asdict(self)


class HashingFile(io.RawIOBase):
    """A write-only binary file that computes the size and the SHA-256 of the data written through it."""

    def __init__(self, file: IO[bytes], path: Path | None = None) -> None:
        self._file = file
        self._path = path or Path(str(file.name))
        self._hash = hashlib.sha256()
        self._size = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of ``data`` (bytes-like), add it to the digest and return the number of bytes."""
        self._hash.update(data)
        with add_path_to_error(self._path):
            written = self._file.write(data)
        self._size += written
        return written

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Flush the underlying file."""
        with add_path_to_error(self._path):
            self._file.flush()

    def facts(self, rows: int) -> FileFacts:
        """Return the size and the digest of the data written so far, with the given number of rows."""
        return FileFacts(rows=rows, bytes=self._size, sha256=self._hash.hexdigest())


@contextmanager
def atomic_file(path: AnyPath, *, replace: bool = True) -> Iterator[HashingFile]:
    """Open ``path`` for writing so that the file appears complete or not at all.

    The temporary file is in the same folder and has a random name. Processes that write the same file at the
    same time, even on different machines, therefore do not collide, and the last one to finish wins. On any
    exception the temporary file is removed.

    Args:
        path: Final path or object address.
        replace: Whether to overwrite an existing object with other content (default: True). False protects an
            object from a process that has lost the store's lock without noticing. Local files are always
            replaced, because a lock on a local disk cannot be lost.

    Yields:
        The open file.

    Raises:
        OSError: The file cannot be written.
        StoreError: The uploaded object differs from the data that was sent.
    """
    if not isinstance(path, Path):
        with _uploaded_file(path, replace) as file:
            yield file
        return
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


@contextmanager
def _uploaded_file(path: RemotePath, replace: bool) -> Iterator[HashingFile]:
    """Open a temporary local file and upload it to ``path`` on exit."""
    folder = scratch_folder("uploads")
    folder.mkdir(parents=True, exist_ok=True)
    with (
        add_path_to_disk_full(folder),
        tempfile.NamedTemporaryFile(dir=folder, prefix=f"{path.name}.") as opened,
    ):
        fcntl.flock(opened, fcntl.LOCK_EX)  # marks the file as in use by a running process
        with HashingFile(opened.file) as file:
            yield file
        upload(Path(opened.name), path, replace=replace)


def _remove_abandoned_uploads() -> None:
    """Remove the upload files of processes that were killed on this machine."""
    for path in scratch_folder("uploads").glob("*"):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except OSError:  # still in use, or already removed
            continue


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


def write_bytes(path: AnyPath, data: bytes, *, rows: int = 0, replace: bool = True) -> FileFacts:
    """Write ``data`` as one file with :func:`atomic_file` and return its size, digest and ``rows``."""
    with atomic_file(path, replace=replace) as file:
        file.write(data)
        return file.facts(rows)


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


def append_line(path: AnyPath, line: bytes, *, max_bytes: int) -> None:
    """Append a line to a small log file.

    Args:
        path: The file.
        line: The line with its newline character.
        max_bytes: If the file is an object, only the last ``max_bytes`` of its content are kept. Local files
            are kept whole.
    """
    if isinstance(path, Path):
        path.parent.mkdir(exist_ok=True)
        with open_in_place(path) as file, add_path_to_error(path):
            file.write(line)  # a single write, so that lines of several processes do not mix
        return
    before = file_system(path).tail(path.path, max_bytes) if exists(path) else b""
    write_bytes(path, before + line)


def remove_temporaries(folder: AnyPath, *, below: bool = True) -> None:
    """Remove the temporary files that killed processes left in ``folder``.

    For an object store, abort unfinished uploads and remove their local files instead. Call this only on
    folders that hexdata owns and while no other process writes to them.

    Args:
        folder: Folder or address to clean.
        below: Whether to include subfolders (default: True).
    """
    if not isinstance(folder, Path):
        _remove_abandoned_uploads()
        abort_uploads(folder)
        return
    for path in (folder.rglob if below else folder.glob)(f".*{_TEMPORARY_SUFFIX}"):
        if _TEMPORARY_NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)


def remove_file(path: AnyPath) -> None:
    """Remove a file if it exists."""
    if isinstance(path, Path):
        path.unlink(missing_ok=True)
    else:
        remove_object(path)


def remove_tree(folder: AnyPath) -> None:
    """Remove a folder and its contents if it exists."""
    if isinstance(folder, Path):
        if folder.is_dir():  # rmtree would block on a pipe
            shutil.rmtree(folder, ignore_errors=True)
        return
    if set("*?[") & set(folder.path):  # fsspec would interpret these characters as a pattern
        for name in objects_below(folder):
            remove_file(folder / name)
        return
    try:
        patiently(file_system(folder).rm, folder.path, recursive=True)
    except FileNotFoundError:
        return


def size_of_tree(folder: AnyPath) -> int:
    """Return the total size in bytes of all files below a folder; 0 if it does not exist."""
    if isinstance(folder, Path):
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return sum(objects_below(folder).values())


def names_below(folder: AnyPath) -> set[str]:
    """Return the names of all files below a folder, relative to it, without hidden files."""
    if isinstance(folder, Path):
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    else:
        found = set(objects_below(folder))
    return {name for name in found if not name.rpartition("/")[2].startswith(".")}


def exists(path: AnyPath) -> bool:
    """Return whether a file or folder exists.

    Raises:
        OSError: The object store cannot be reached.
    """
    return path.exists() if isinstance(path, Path) else bool(patiently(file_system(path).exists, path.path))


def has_size(path: AnyPath, size: int) -> bool:
    """Return whether a file exists and has the given size in bytes."""
    if isinstance(path, Path):
        return path.is_file() and path.stat().st_size == size
    try:
        return bool(patiently(file_system(path).info, path.path)["size"] == size)
    except FileNotFoundError:
        return False


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


def digest_file(path: AnyPath) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 (hexadecimal) of a file, read in chunks."""
    with open_binary(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return file.tell(), digest.hexdigest()


def read_bounded(path: AnyPath) -> bytes:
    """Return the content of a JSON file, cut at one byte more than ``MAX_JSON_BYTES``."""
    with open_binary(path) as file:
        return file.read(MAX_JSON_BYTES + 1)


def canonical_json(value: object) -> bytes:
    """Return JSON with sorted keys and a final newline. Equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()
