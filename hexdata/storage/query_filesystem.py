"""Read-only file system for queries, which caches the properties and the ends of objects.

DuckDB opens a Parquet file several times in a query. Each time it asks for its size and time, and reads its
end, which contains the footer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

from hexdata.storage.objects import ObjectReader, ObjectStorage, tag_of

_UNFINISHED: Final = "/."
"""Part of the keys in hidden folders, to which a session adds objects."""
_END: Final = 1 << 16
"""Bytes of the end of an object that are read at once."""
_ENDS: Final = 32
"""Number of ends that are kept."""


class QueryFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no type information
    """Reads the objects of a store, each in the version that it had at its first use.

    DuckDB converts exceptions to text, so the first one is kept as ``failure``.

    Args:
        store: Any object of the bucket.
    """

    # fsspec would otherwise return the instance of an earlier session, with its versions and its failure.
    cachable = False

    def __init__(self, store: ObjectStorage) -> None:
        super().__init__()
        self.protocol = store.path.protocol
        self._strip_protocol = store.path.fs._strip_protocol
        self.failure: Exception | None = None
        self._store = store
        self._known: dict[str, dict[str, Any]] = {}
        self._listed: set[str] = set()
        self._end = functools.lru_cache(_ENDS)(self._read)

    def _recorded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function, and keep its error if it is the first one."""
        try:
            return function(*arguments)
        except Exception as error:
            # DuckDB asks again after an error, and later errors may only be consequences.
            self.failure = self.failure or error
            raise

    def _storage(self, key: str) -> ObjectStorage:
        return ObjectStorage(self._store.path.with_segments(f"{self.protocol}://{key}"))

    def _find(self, path: str) -> dict[str, Any]:
        """Return the properties of an object. The first request in a folder lists the whole folder.

        Hidden folders are not listed, because each of their objects is written shortly before its first use.
        """
        key = self._strip_protocol(path)
        folder = key.rpartition("/")[0]
        if key not in self._known and folder not in self._listed and _UNFINISHED not in key:
            listed = self._storage(folder).listing(recursive=False)
            self._known |= {f"{folder}/{name}": info for name, info in listed.items()}
            self._listed.add(folder)
        if key not in self._known:  # created after the listing, or missing
            self._known[key] = self._storage(key).info()
        return self._known[key]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return the properties of an object."""
        return dict(self._recorded(self._find, path))

    def modified(self, path: str) -> Any:
        """Return the modification time of an object, or whatever changes with its content."""
        info = self.info(path)
        return info.get("LastModified") or self._recorded(self._store.path.fs.modified, path)

    def glob(self, path: str, **_: Any) -> list[str]:
        """Return the path itself if the object exists: names are no patterns."""
        return [self._strip_protocol(path)] if self.exists(path) else []

    def open(self, path: str, mode: str = "rb", **_: Any) -> ObjectReader:
        """Open an object for reading.

        DuckDB's threads seek and read through one handle, so each has an offset and a block. They are found
        by number, because Python discards thread-local data of DuckDB's threads between two calls.
        """
        if mode != "rb":
            raise NotImplementedError(f"{path}: this file system is read-only")
        key, size = self._strip_protocol(path), int(self.info(path)["size"])

        def read(start: int, stop: int) -> bytes:
            # Only reads of the end are kept: it contains the footer, which DuckDB reads each time it opens a
            # file.
            first = max(0, size - _END)
            if start < first:
                return bytes(self._recorded(self._read, key, start, stop))
            return bytes(self._recorded(self._end, key, first, size)[start - first : stop - first])

        return ObjectReader(read, size, user=threading.get_ident)

    def _read(self, key: str, start: int, stop: int) -> bytes:
        return self._storage(key).read_version(tag_of(self._known[key]), start, stop)
