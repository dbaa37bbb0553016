"""Files and folders on local disks and in object stores: ``s3://…``, ``gs://…`` and ``az://…``.

``storage_of`` returns the ``Storage`` of a path, the one interface for both kinds. This package
handles addresses and bytes only, not the formats of stores, shards or games. Local paths remain
``pathlib.Path``.
"""

from __future__ import annotations

from pathlib import Path

from hexdata.storage.address import AnyPath, RemotePath, as_path, local_path, prefix_of
from hexdata.storage.base import Changed, HashingFile, HeldLock, Storage, Tagged
from hexdata.storage.cache_dir import cache_folder
from hexdata.storage.errors import (
    add_path_to_disk_full,
    add_path_to_error,
    error_number,
    is_address,
    is_disk_full,
    is_fault,
    translate_errors,
)
from hexdata.storage.local import LocalStorage
from hexdata.storage.local_files import make_folder, open_file, open_in_place, sync_folder, walk_once
from hexdata.storage.lock import LOCK_NAME
from hexdata.storage.objects import ObjectStorage
from hexdata.storage.reading import file_system, list_objects, object_info
from hexdata.storage.retry import READ_TIMEOUT, REQUESTS, is_temporary, log_retry, with_retries

__all__ = [
    "LOCK_NAME",
    "READ_TIMEOUT",
    "REQUESTS",
    "AnyPath",
    "Changed",
    "HashingFile",
    "HeldLock",
    "LocalStorage",
    "ObjectStorage",
    "RemotePath",
    "Storage",
    "Tagged",
    "add_path_to_disk_full",
    "add_path_to_error",
    "as_path",
    "cache_folder",
    "client_memory",
    "error_number",
    "file_system",
    "is_address",
    "is_disk_full",
    "is_fault",
    "is_temporary",
    "list_objects",
    "local_path",
    "log_retry",
    "make_folder",
    "object_info",
    "open_file",
    "open_in_place",
    "prefix_of",
    "storage_of",
    "sync_folder",
    "translate_errors",
    "walk_once",
    "with_retries",
]


def storage_of(path: AnyPath) -> Storage:
    """Return the storage of a file or folder.

    Args:
        path: Local path, or address of an object or of a prefix of objects.
    """
    return LocalStorage(path) if isinstance(path, Path) else ObjectStorage(path)


def client_memory(*paths: AnyPath) -> int:
    """Return the bytes that a client library adds to a process: 0 if all paths are local."""
    return max((storage_of(path).memory for path in paths), default=0)
