"""Paths that may lead into an object store: ``s3://…``, ``gs://…``, ``az://…``, through fsspec.

Everything here works on addresses and bytes; what a store, a shard or a game is, it does not know. A local
path stays a ``pathlib.Path`` and never comes here.
"""

from __future__ import annotations

from hexdata.remote.address import (
    CLIENT_MEMORY,
    AnyPath,
    RemotePath,
    as_path,
    client_memory,
    local_path,
    prefix_of,
)
from hexdata.remote.faults import is_fault, telling
from hexdata.remote.objects import (
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
from hexdata.remote.patience import is_passing, patiently
from hexdata.remote.reading import file_system, open_binary, open_file, read_range, read_tail
from hexdata.remote.scratch import scratch_folder

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
