"""Files that are complete or absent: written under a temporary name, synced, then renamed.

Promise: a file under its final name is whole, at whatever moment the process or the machine dies. In an
object store nothing is renamed: what is written lies here until it is whole; then it is uploaded and checked.
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
from hexdata.remote import (
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
from hexdata.store.room import name_file, naming_full
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
"""What :func:`atomic_file` makes of a name: a dot, the name, a number and the suffix."""


@dataclass(frozen=True)
class FileFacts:
    """What a manifest keeps of one file."""

    rows: Count
    bytes: Count
    sha256: HexDigest

    def to_json(self) -> dict[str, object]:
        """Return the entry as a manifest holds it."""
        return asdict(self)


class HashingFile(io.RawIOBase):
    """A binary file that hashes and counts what is written through it, front to back."""

    def __init__(self, file: IO[bytes], path: Path | None = None) -> None:
        self._file = file
        self._path = path or Path(str(file.name))
        self._hash = hashlib.sha256()
        self._size = 0

    def writable(self) -> bool:
        """Say that it can be written: it can do nothing else."""
        return True

    def write(self, data: Any) -> int:
        """Write all of ``data`` (any bytes-like object) and take it into the digest."""
        self._hash.update(data)
        with name_file(self._path):
            written = self._file.write(data)
        self._size += written
        return written

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Flush the file below."""
        with name_file(self._path):
            self._file.flush()

    def facts(self, rows: int) -> FileFacts:
        """Return the facts of what was written so far."""
        return FileFacts(rows=rows, bytes=self._size, sha256=self._hash.hexdigest())


@contextmanager
def atomic_file(path: AnyPath, *, replace: bool = True) -> Iterator[HashingFile]:
    """Open ``path`` for writing such that it appears whole, or not at all.

    Without ``replace`` an object stays that holds something else already: a process that has lost the
    store's lock, and does not know it yet, must not put its own over what another has published. On a disk
    no lock is lost, and files are replaced.

    The temporary name stands in the same folder and is drawn by the system, so that two processes that
    write the same file do not meet, on whatever machines they run; the last to finish wins, with the same
    bytes where the content is a function of its inputs. On any exception the temporary file is removed.
    """
    if not isinstance(path, Path):
        with _uploaded(path, replace) as file:
            yield file
        return
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{int.from_bytes(os.urandom(6))}{_TEMPORARY_SUFFIX}")
    try:
        with naming_full(path), temporary.open("xb") as opened:  # "x" follows no link
            with HashingFile(opened, path) as file:  # closed while it can still be flushed
                yield file
            with name_file(path):
                os.fsync(opened.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextmanager
def _uploaded(path: RemotePath, replace: bool) -> Iterator[HashingFile]:
    """Open a file of this machine that becomes an object once it is whole."""
    folder = scratch_folder("uploads")
    folder.mkdir(parents=True, exist_ok=True)
    with naming_full(folder), tempfile.NamedTemporaryFile(dir=folder, prefix=f"{path.name}.") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)  # which says that its process lives
        with HashingFile(opened.file) as file:
            yield file
        upload(Path(opened.name), path, replace=replace)


def _remove_unsent() -> None:
    """Remove what killed processes of this machine had not uploaded yet."""
    for path in scratch_folder("uploads").glob("*"):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except OSError:  # its process lives, or it has just gone
            continue


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, such that they survive a power cut."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Make a new name in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with name_file(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: AnyPath, data: bytes, *, rows: int = 0, replace: bool = True) -> FileFacts:
    """Write a whole small file, as :func:`atomic_file` does."""
    with atomic_file(path, replace=replace) as file:
        file.write(data)
        return file.facts(rows)


def open_in_place(path: Path) -> io.FileIO:
    """Open a file of the store to read it, append to it and truncate it; create it if it is missing.

    Raises:
        StoreError: it is a link, has a second name elsewhere, or is no regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise _foreign(path) from error
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
        os.close(descriptor)
        raise _foreign(path)
    return os.fdopen(descriptor, "ab+", buffering=0)


def _foreign(path: Path) -> StoreError:
    return StoreError(
        "hexdata writes to this file in place, but it may belong to something else",
        path=path,
        found="a symbolic or hard link, a folder or a device",
        expected="a regular file that is not linked",
        hint="Remove it and run the command again.",
    )


def refuse_links(store: Path, folders: Iterable[str]) -> None:
    """Check that nothing in a store leads out of it, before a process writes to it.

    A data file may be a link: it is replaced by renaming, never written through. The store's own path may
    lead through links.

    Args:
        store: its folder.
        folders: of the store, relative, which are looked through.

    Raises:
        StoreError: a folder, or a file that is written in place, is a symbolic link.
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


def append_line(path: AnyPath, line: bytes, *, most: int) -> None:
    """Append a line to a small file that people read; of an object, no more than ``most`` bytes are kept."""
    if isinstance(path, Path):
        path.parent.mkdir(exist_ok=True)
        with open_in_place(path) as file, name_file(path):  # one write, so that lines stay whole
            file.write(line)
        return
    before = file_system(path).tail(path.path, most) if exists(path) else b""
    write_bytes(path, before + line)


def remove_temporaries(folder: AnyPath, *, below: bool = True) -> None:
    """Remove what killed processes left under temporary names, in ``folder`` and, if so asked, below.

    In an object store these are uploads that nobody will finish.

    Call it only on folders of our own, while no other process writes to them.
    """
    if not isinstance(folder, Path):
        _remove_unsent()
        abort_uploads(folder)
        return
    for path in (folder.rglob if below else folder.glob)(f".*{_TEMPORARY_SUFFIX}"):
        if _TEMPORARY_NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)


def remove_file(path: AnyPath) -> None:
    """Remove a file, if it is there."""
    if isinstance(path, Path):
        path.unlink(missing_ok=True)
    else:
        remove_object(path)


def remove_tree(folder: AnyPath) -> None:
    """Remove a folder and all below it, if it is there."""
    if isinstance(folder, Path):
        if folder.is_dir():  # else rmtree would wait for the other end of a pipe
            shutil.rmtree(folder, ignore_errors=True)
        return
    if set("*?[") & set(folder.path):  # fsspec would take it for a pattern
        for name in objects_below(folder):
            remove_file(folder / name)
        return
    try:
        patiently(file_system(folder).rm, folder.path, recursive=True)
    except FileNotFoundError:
        return


def size_of_tree(folder: AnyPath) -> int:
    """Return the bytes of all files below a folder; 0 if there is none."""
    if isinstance(folder, Path):
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return sum(objects_below(folder).values())


def names_below(folder: AnyPath) -> set[str]:
    """Return the files below a folder by their names from there on, but for hidden ones."""
    if isinstance(folder, Path):
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    else:
        found = set(objects_below(folder))
    return {name for name in found if not name.rpartition("/")[2].startswith(".")}


def exists(path: AnyPath) -> bool:
    """Say whether there is a file or a folder.

    Raises:
        OSError: an object store does not answer.
    """
    return path.exists() if isinstance(path, Path) else bool(patiently(file_system(path).exists, path.path))


def has_size(path: AnyPath, size: int) -> bool:
    """Say whether there is a file of so many bytes."""
    if isinstance(path, Path):
        return path.is_file() and path.stat().st_size == size
    try:
        return bool(patiently(file_system(path).info, path.path)["size"] == size)
    except FileNotFoundError:
        return False


def walk_once(
    root: Path, onerror: Callable[[OSError], None] | None = None
) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Walk as ``os.walk`` does, through links too, but enter each folder once, however many lead there.

    Yields each folder as it was reached, its subfolders (those taken out of the list are not entered),
    and the names of its files.
    """
    entered: set[Path] = set()
    for folder, subfolders, names in os.walk(root, onerror=onerror, followlinks=True):
        here = Path(folder).resolve()
        if here in entered:
            subfolders.clear()
            continue
        entered.add(here)
        yield Path(folder), subfolders, names


def digest_file(path: AnyPath) -> tuple[int, str]:
    """Return (bytes, SHA-256 as hexadecimal text) of a file, read in bounded memory."""
    with open_binary(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return file.tell(), digest.hexdigest()


def read_bounded(path: AnyPath) -> bytes:
    """Return the bytes of a JSON file, at most one more than it may have."""
    with open_binary(path) as file:
        return file.read(MAX_JSON_BYTES + 1)


def canonical_json(value: object) -> bytes:
    """Return JSON text with sorted keys and a last newline: the same value gives the same bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()
