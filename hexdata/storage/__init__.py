"""Files and folders on local disks and in object stores: ``s3://…``, ``gs://…`` and ``az://…``.

``storage_of`` returns the storage of a path: a ``LocalStorage`` or an ``ObjectStorage``. They have the
same methods with the same behaviour, except where a method says otherwise. This package handles addresses and
bytes only, not the formats of stores, shards or games. Local paths remain ``pathlib.Path``.

- properties: ``exists``, ``size``, ``version``, ``files``, ``names``
- reading: ``open``, ``read_range``, ``local`` (the path for libraries)
- writing: ``publish`` (all or nothing), ``read_tagged`` and ``put`` (if unchanged)
- locking: ``lock``
- removing: ``remove``, ``remove_tree``, ``remove_unfinished``
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hexdata.storage.address import AnyPath, as_path, cache_folder, local_path, prefix_of
from hexdata.storage.errors import is_address, translate_errors
from hexdata.storage.local import LocalStorage
from hexdata.storage.objects import ObjectStorage

__all__ = [
    "AnyPath",
    "LocalStorage",
    "ObjectStorage",
    "as_path",
    "cache_folder",
    "client_memory",
    "is_address",
    "local_path",
    "local_work",
    "prefix_of",
    "storage_of",
    "translate_errors",
]


_CLIENT_MEMORY: Final = 48 << 20
"""Measured bytes that the client library of an object store and its buffers add to a process."""


def storage_of(path: AnyPath) -> LocalStorage | ObjectStorage:
    """Return the storage of a file or folder.

    Args:
        path: Local path, or address of an object or of a prefix of objects.
    """
    return LocalStorage(path) if isinstance(path, Path) else ObjectStorage(path)


def local_work(path: AnyPath, name: str) -> Path:
    """Return the local folder of unfinished work that belongs to a folder. It may not exist.

    Args:
        path: Folder, or address of a prefix, whose work is in a cache folder.
        name: Name of the work below a local folder, and of the cache folder without the dot at its beginning.
    """
    local = storage_of(path).local
    return cache_folder(name.lstrip("."), path) if local is None else local / name


def client_memory(*paths: AnyPath) -> int:
    """Return the bytes that a client library adds to a process: 0 if all paths are local."""
    return _CLIENT_MEMORY if any(map(is_address, paths)) else 0
