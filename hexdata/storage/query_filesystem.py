"""Read-only file system for queries, which caches the properties and the ends of objects.

DuckDB opens a Parquet file several times in a query. Each time it asks for the size and the time of the file,
and reads its end, which contains the footer. It reads a small file whole.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import SEEK_SET, BufferedReader
from typing import Any, Final

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

from hexdata.storage.reading import list_objects, object_info, open_object
from hexdata.storage.retry import with_retries

__all__ = ["QueryFileSystem"]

_UNFINISHED: Final = "/."
"""Part of the keys in hidden folders, to which a session adds objects."""

_END_BYTES: Final = 1 << 20
"""Maximum size of an end that is kept."""
_ALL_ENDS_BYTES: Final = 2 << 20
"""Maximum size of all ends that are kept."""
_KEPT: Final = ("name", "size", "type", "ETag", "LastModified")
"""Properties kept from a listing, to save memory with many objects."""


class QueryFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no type information
    """Reads through another file system and caches the properties of objects.

    An object that is replaced after its first use is not read any more, if the store supports conditions.
    DuckDB converts exceptions to text, so the first one is kept as ``failure``.

    Args:
        system: File system of an object store.
        protocol: Protocol in the addresses of queries, such as ``s3``. Without it, DuckDB would use the first
            of the library's protocols.
    """

    cachable = False

    def __init__(self, system: Any, protocol: str) -> None:
        super().__init__()
        self.protocol = protocol
        self._strip_protocol = system._strip_protocol
        self._system = system
        self.failure: BaseException | None = None
        self._known: dict[str, dict[str, Any]] = {}
        self._listed: set[str] = set()
        self._ends: OrderedDict[str, bytes] = OrderedDict()
        """Ends of objects, the one used last at the end."""
        self._ends_lock = threading.Lock()

    @contextmanager
    def keep_failure(self) -> Iterator[None]:
        """Keep the first exception raised in this context, and raise it again."""
        try:
            yield
        except BaseException as error:
            self.failure = self.failure or error
            raise

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return the properties of an object. The first request in a folder lists the whole folder.

        Hidden folders are not listed, because each of their objects is written shortly before its first use.

        Raises:
            FileNotFoundError: The object does not exist.
            OSError: The request failed.
        """
        with self.keep_failure():
            return self._find(path)

    def _find(self, path: str) -> dict[str, Any]:
        key = self._strip_protocol(path)
        folder = key.rpartition("/")[0]
        if key not in self._known and folder not in self._listed and _UNFINISHED not in key:
            listed = list_objects(self._system, folder, recursive=False)
            self._known |= {
                one["name"]: {name: one[name] for name in _KEPT if name in one}
                for one in listed.values()
                if one["type"] == "file"
            }
            self._listed.add(folder)
        if key not in self._known:  # created after the listing, or missing
            self._known[key] = object_info(self._system, key)
        return self._known[key]

    def exists(self, path: str, **_: Any) -> bool:
        """Return whether an object exists.

        Raises:
            OSError: The request failed.
        """
        with self.keep_failure():
            try:
                self._find(path)
            except FileNotFoundError:
                return False
            return True

    def modified(self, path: str) -> Any:
        """Return the modification time of an object."""
        with self.keep_failure():
            return self._find(path).get("LastModified") or with_retries(self._system.modified, path)

    def ls(self, path: str, detail: bool = True, **named: Any) -> Any:
        """List a folder without the cache."""
        with self.keep_failure():
            return with_retries(self._system.ls, path, detail=detail, **named)

    def glob(self, path: str, **named: Any) -> Any:
        """Return the paths of the objects that match a pattern."""
        if any(character in path for character in "*?["):
            with self.keep_failure():
                return with_retries(self._system.glob, path, **named)
        return [self._strip_protocol(path)] if self.exists(path) else []

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        """Open an object for reading. Each thread keeps one block in memory."""
        if mode != "rb":
            raise NotImplementedError(f"{path}: this file system is read-only")
        info = self.info(path)
        return _SharedObject(self, info, lambda: open_object(self._system, path, path, info=info))

    def end_of(self, name: str, count: int) -> bytes | None:
        """Return the last ``count`` bytes of an object, or None if they are not kept."""
        with self._ends_lock:
            end = self._ends.get(name, b"")
            if len(end) < count:
                return None
            self._ends.move_to_end(name)
            return end[len(end) - count :]

    def keep_end(self, name: str, end: bytes) -> None:
        """Keep the end of an object, instead of those that were not used for the longest time."""
        with self._ends_lock:
            self._ends.pop(name, None)
            self._ends[name] = end
            while sum(map(len, self._ends.values())) > _ALL_ENDS_BYTES:
                self._ends.popitem(last=False)


class _SharedObject:
    """An open object shared by threads, with a separate offset and block for each thread.

    Several DuckDB threads seek and read through one handle. Threads are identified by number, because Python
    discards thread-local data of DuckDB's threads between two calls.
    """

    def __init__(
        self, system: QueryFileSystem, info: dict[str, Any], open_for_thread: Callable[[], BufferedReader]
    ) -> None:
        self._system = system
        self._name: str = info["name"]
        self._size = int(info["size"])
        self._open_for_thread = open_for_thread
        self._opened: dict[int, BufferedReader] = {}

    def _of_this_thread(self) -> BufferedReader:
        number = threading.get_ident()
        if number not in self._opened:
            self._opened[number] = self._open_for_thread()
        return self._opened[number]

    def read(self, size: int = -1) -> bytes:
        """Read ``size`` bytes, or all that remain, at the offset of this thread."""
        with self._system.keep_failure():
            opened = self._of_this_thread()
            count = self._size - opened.tell()
            if not 0 < count <= _END_BYTES or 0 <= size < count:
                return opened.read(size)
            end = self._system.end_of(self._name, count)
            if end is None:
                end = opened.read()
                self._system.keep_end(self._name, end)
            opened.seek(self._size)
            return end

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        """Move this thread to an offset and return it."""
        with self._system.keep_failure():
            return self._of_this_thread().seek(offset, whence)

    def tell(self) -> int:
        """Return the offset of this thread."""
        return self._of_this_thread().tell()

    def seekable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the object for all threads."""
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()
