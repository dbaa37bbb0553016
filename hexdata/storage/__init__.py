"""Access to object stores through fsspec: ``s3://…``, ``gs://…`` and ``az://…``.

This package handles addresses and bytes only, not the formats of stores, shards or games. Local paths remain
``pathlib.Path``.
"""

from __future__ import annotations

from hexdata.storage.address import (
    CLIENT_MEMORY,
    AnyPath,
    RemotePath,
    as_path,
    client_memory,
    local_path,
    prefix_of,
)
from hexdata.storage.cache_dir import scratch_folder
from hexdata.storage.errors import is_fault, telling
from hexdata.storage.objects import (
    Changed,
    Tagged,
    abort_uploads,
    objects_below,
    put_if,
    read_tagged,
    remove_object,
    upload,
    version_of,
)
from hexdata.storage.reading import file_system, open_binary, open_file, read_range, read_tail
from hexdata.storage.retry import is_passing, patiently

__all__ = [
    "CLIENT_MEMORY",
    "AnyPath",
    "Changed",
    "RemotePath",
    "Tagged",
    "abort_uploads",
    "as_path",
    "client_memory",
    "file_system",
    "is_fault",
    "is_passing",
    "local_path",
    "objects_below",
    "open_binary",
    "open_file",
    "patiently",
    "prefix_of",
    "put_if",
    "read_range",
    "read_tagged",
    "read_tail",
    "remove_object",
    "scratch_folder",
    "telling",
    "upload",
    "version_of",
]
