"""The interface for files and folders on local disks and in object stores."""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

from hexdata.storage.address import AnyPath
from hexdata.storage.errors import Changed, add_path_to_error
from hexdata.storage.reading import PART

__all__ = ["Changed", "HashingFile", "HeldLock", "Storage", "Tagged"]


class Tagged(NamedTuple):
    """The bytes of a file, and the tag of this version, which is None if the storage has no tags."""

    data: bytes
    tag: str | None


class HeldLock(NamedTuple):
    """State of a lock that is held.

    Attributes:
        require: Raises ``StoreLockedError`` if the lock has been lost. Called before anything is published or
            removed.
        has_current_work: Whether the previous holder kept its unfinished work in the same location, so that
            the work found there is up to date.
    """

    require: Callable[[], None]
    has_current_work: bool


class HashingFile(io.RawIOBase):
    """A write-only binary file that computes the size and the SHA-256 of the data written through it.

    Args:
        file: File that receives the data.
        path: Path for error messages. Default: the file's own name.
    """

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

    @property
    def sha256(self) -> str:
        """SHA-256 of the data written so far, in hexadecimal."""
        return self._hash.hexdigest()


class Storage(ABC):
    """One file or folder on a local disk or in an object store.

    ``hexdata.storage.storage_of`` returns the storage of a path, with the same behaviour for both kinds
    except where a method says otherwise. Unless stated otherwise, methods raise ``OSError`` if the disk or
    the object store fails.

    Attributes:
        path: Path or address of the file or folder.
        memory: Measured bytes that the client library and its buffers add to a process.
        keeps_work: Whether unfinished work is kept beside the files that it becomes. In an object store, it
            is kept on this machine.
    """

    path: AnyPath
    memory: ClassVar[int]
    keeps_work: ClassVar[bool]

    # --- properties -----------------------------------------------------------------------------------

    @abstractmethod
    def exists(self) -> bool:
        """Return whether the file or folder exists."""

    @abstractmethod
    def size(self) -> int | None:
        """Return the size of the file in bytes, or None if there is no such file."""

    @abstractmethod
    def is_folder(self) -> bool:
        """Return whether the path is a folder that no file can replace. Always False in an object store."""

    @abstractmethod
    def version(self) -> str:
        """Return a text that changes with the content of the file; empty if it does not exist."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """Return the sizes in bytes of all files below the folder, by relative name, sorted.

        A file at the path itself has an empty name. A folder that does not exist has no files. Links are
        followed, each folder once; markers of empty folders in object stores are omitted.
        """

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the files and folders directly in the folder, sorted.

        A local folder that does not exist or may not be listed has no names.
        """

    @abstractmethod
    def unreplaceable(self) -> list[str]:
        """Return the relative names of files below the folder that ``publish(replace=False)`` keeps."""

    @abstractmethod
    def free_space(self) -> int | None:
        """Return the free space in bytes on the disk, or None for an object store, which has no limit.

        The path need not exist.
        """

    @abstractmethod
    def work_path(self, name: str, purpose: str) -> Path:
        """Return the local path of unfinished work that belongs to the folder. It may not exist.

        Args:
            name: Path of the work below a local folder.
            purpose: Name of the cache folder, such as "work", for an object store.
        """

    # --- reading --------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, *, block: int = PART) -> BufferedReader:
        """Open the file for reading and seeking.

        Args:
            block: Bytes per request to an object store, 8 MiB by default. The last block is kept in memory.
        """

    def blocks(self) -> Iterator[bytes]:
        """Yield the content in order, in blocks. Of an object, all blocks are of one version."""
        with self.open() as file:
            while data := file.read(PART):
                yield data

    @property
    @abstractmethod
    def local(self) -> Path | None:
        """The path, if libraries can open it themselves; None for an object."""

    @abstractmethod
    def read_range(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of the file, or fewer if it is shorter."""

    @abstractmethod
    def read_tail(self, count: int) -> bytes:
        """Return the last ``count`` bytes of the file, or all if it is shorter."""

    @abstractmethod
    def read_tagged(self, max_bytes: int) -> Tagged:
        """Return the content of a small file with the tag for :meth:`put`.

        Args:
            max_bytes: Maximum number of bytes to read.

        Raises:
            FileNotFoundError: The file does not exist.
        """

    # --- writing --------------------------------------------------------------------------------------

    @abstractmethod
    def publish(self, *, replace: bool = True, sync: bool = True) -> AbstractContextManager[HashingFile]:
        """Open the file for writing so that it appears complete or not at all.

        A local file is written under a random temporary name in the same folder, synced and renamed; an
        object is written to a temporary local file first, then uploaded and verified. If processes write the
        same file at the same time, the last one to finish wins. After an exception nothing is left behind.

        Args:
            replace: Whether to overwrite an existing object with other content (default: True). False
                protects an object from a process that has lost the store's lock without noticing. Local
                files are always replaced, because a lock on a local disk cannot be lost.
            sync: Whether a local file survives a power failure (default: True). False is for temporary files
                that are compared with their digests before they are used again.

        Raises:
            StoreError: The uploaded object differs from the data that was sent.
        """

    @abstractmethod
    def put(self, data: bytes, tag: str | None) -> str | None:
        """Publish a small file if the stored version still has the given tag.

        Local files have no tags and are always replaced.

        Args:
            data: New content.
            tag: Expected tag, or None if no object may exist.

        Returns:
            The new tag.

        Raises:
            Changed: The object store has another version.
        """

    @abstractmethod
    def append(self, line: bytes, *, max_bytes: int) -> None:
        """Append a line to a small log file.

        Args:
            line: The line with its newline character.
            max_bytes: If the file is an object, only the last ``max_bytes`` of its content are kept. Local
                files are kept whole.

        Raises:
            StoreError: The local file is a link or no regular file.
        """

    @abstractmethod
    def extend(self, data: bytes, size: int) -> bool:
        """Replace everything after the first ``size`` bytes of a file by ``data``, and sync it.

        If the process is killed, any part of ``data`` may have been written.

        Args:
            data: Bytes to append.
            size: Number of valid bytes.

        Returns:
            False if nothing was written, because the file is shorter, has more than one hard link or is an
            object.
        """

    # --- locking --------------------------------------------------------------------------------------

    @abstractmethod
    def lock(
        self, stage: str, folders: Iterable[str], *, shares_work: bool
    ) -> AbstractContextManager[HeldLock]:
        """Hold the lock of the folder: at most one process writes to it at a time.

        Args:
            stage: Name of the stage that writes, for messages of other processes.
            folders: Subfolders that hexdata writes to. On a disk, links in them are refused.
            shares_work: Whether unfinished work is kept in the folder. Otherwise, the work of an object store
                is kept on this machine.

        Raises:
            StoreLockedError: Another process holds the lock; the message names it.
            StoreError: A link leads out of the folder.
        """

    @abstractmethod
    def find_writer(self) -> str | None:
        """Return a description of the process that holds the lock; None if there is none.

        Always None in an object store, where a reader cannot tell a current lease from one that has ended.
        """

    # --- removing -------------------------------------------------------------------------------------

    @abstractmethod
    def remove(self, before_request: Callable[[], None] = lambda: None) -> None:
        """Remove the file if it exists.

        Args:
            before_request: Called before each request to an object store, also before repeated ones; raises
                to prevent it. Not called on a local disk. Default: a function that does nothing.
        """

    @abstractmethod
    def remove_tree(
        self,
        before_request: Callable[[], None] = lambda: None,
        *,
        durable: bool = False,
        known: Iterable[str] = (),
    ) -> None:
        """Remove the folder and its contents if it exists.

        Args:
            before_request: As for :meth:`remove`.
            durable: Whether the folder must be gone afterwards, also after a crash. Default: False, which on
                a local disk ignores errors and does not sync. Object stores always raise errors.
            known: Names of files below the folder. They are removed from an object store even if its listing
                does not contain them yet. Default: none.

        Raises:
            OSError: Something could not be removed, with its path.
        """

    @abstractmethod
    def remove_unfinished(self, folders: Iterable[str] | None = None) -> None:
        """Remove what killed processes left of unfinished files in the folder.

        Call this only on folders that hexdata owns and while no other process writes to them.

        Args:
            folders: Subfolders to clean with everything below them, besides the files directly in the folder.
                None (default) for all. Uploads to an object store are aborted everywhere below the folder.
        """

    # --- libraries and errors -------------------------------------------------------------------------

    @abstractmethod
    def query_filesystem(self) -> Any:
        """Return the fsspec file system that DuckDB must use, or None if it opens the files itself."""

    @abstractmethod
    def is_temporary(self, error: BaseException) -> bool:
        """Return whether an error says nothing about the file, because the storage may answer later."""
