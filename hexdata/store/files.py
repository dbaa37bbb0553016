"""Facts and contents of the files of a store."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Final

from hexdata.storage import AnyPath, HashingFile, storage_of
from hexdata.strict_json import MAX_JSON_BYTES, Count, HexDigest

__all__ = [
    "FileFacts",
    "canonical_json",
    "digest_beginning",
    "digest_file",
    "read_bounded",
    "write_bytes",
]

_CHUNK: Final = 1 << 18
"""Bytes that are read at a time."""


@dataclass(frozen=True)
class FileFacts:
    """Row count, size in bytes and SHA-256 (hexadecimal) of one file, as recorded in a manifest."""

    rows: Count
    bytes: Count
    sha256: HexDigest

    @classmethod
    def of(cls, file: HashingFile, rows: int = 0) -> FileFacts:
        """Return the facts of a file that is being published, with the data written so far."""
        return cls(rows=rows, bytes=file.tell(), sha256=file.sha256)

    def to_json(self) -> dict[str, object]:
        """Return the entry in the form that the manifest stores."""
        return asdict(self)


def write_bytes(path: AnyPath, data: bytes, *, rows: int = 0, replace: bool = True) -> FileFacts:
    """Publish ``data`` as one file, as ``Storage.publish`` does; return its size, digest and ``rows``."""
    with storage_of(path).publish(replace=replace) as file:
        file.write(data)
        return FileFacts.of(file, rows)


def digest_file(path: AnyPath) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 (hexadecimal) of a file, read in chunks."""
    storage = storage_of(path)
    if storage.local is not None:
        with storage.open() as file:
            digest = hashlib.file_digest(file, "sha256")
            return file.tell(), digest.hexdigest()
    digest, size = hashlib.sha256(), 0
    for block in storage.blocks():
        digest.update(block)
        size += len(block)
    return size, digest.hexdigest()


def digest_beginning(path: AnyPath, count: int) -> str:
    """Return the SHA-256 (hexadecimal) of the first ``count`` bytes of a file, read in chunks."""
    digest = hashlib.sha256()
    with storage_of(path).open() as file:
        while count and (chunk := file.read(min(count, _CHUNK))):
            digest.update(chunk)
            count -= len(chunk)
    return digest.hexdigest()


def read_bounded(path: AnyPath) -> bytes:
    """Return the content of a JSON file, cut at one byte more than ``MAX_JSON_BYTES``."""
    with storage_of(path).open() as file:
        return file.read(MAX_JSON_BYTES + 1)


def canonical_json(value: object) -> bytes:
    """Return JSON with sorted keys and a final newline. Equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()
