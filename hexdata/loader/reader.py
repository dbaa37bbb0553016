"""Shards into memory, packed as stored: read through webdataset and held against the manifest.

Never trusts a tar file to end where it should: one that was cut between two members looks complete.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from webdataset.tariterators import group_by_keys, tar_file_expander

from hexdata.errors import FormatError, StoreError
from hexdata.formats.shards import POLICY_FIELDS, Block, ShardManifest, decode_npy

__all__ = ["ShardReader"]

_CURE = "Run `hexdata verify`, then `hexdata export` again."


class ShardReader:
    """Reads chosen members of one split's shards as blocks that are what the manifest says.

    Raises:
        StoreError: if a shard of the split is missing or of another size: found before any is read.
    """

    def __init__(self, folder: Path, manifest: ShardManifest, split: str, members: Sequence[str]) -> None:
        self._folder = folder
        self._manifest = manifest
        self._members = members
        self._shards = manifest.splits[split]
        self._first_keys = np.cumsum([0, *(shard.blocks for shard in self._shards)]).tolist()
        for shard in range(len(self._shards)):
            self._find(shard)

    def read(self, shard: int) -> Iterator[Block]:
        """Yield the blocks of one shard, given by its number in the split.

        Raises:
            StoreError: if the shard is missing or of another size.
            FormatError: if its content is not what the manifest says, naming shard and member.
        """
        path = self._find(shard)
        samples = _read_samples(path, self._members)
        blocks = self._shards[shard].blocks
        for number in range(blocks):
            sample = next(samples, None)
            if sample is None:
                raise _altered(path, "end of the shard", f"{number} blocks", blocks)
            yield self._decode(path, shard, number, sample)
        if next(samples, None) is not None:
            raise _altered(path, "end of the shard", "more blocks", blocks)

    def _find(self, shard: int) -> Path:
        """Return the shard's path, checked for presence and size."""
        entry = self._shards[shard]
        path = self._folder / entry.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise StoreError("a shard is missing", path=path, cure=_CURE) from None
        if size != entry.bytes:
            found, expected = f"{size} bytes", f"{entry.bytes}"
            raise StoreError(
                "a shard is cut or altered", path=path, found=found, expected=expected, cure=_CURE
            )
        return path

    def _decode(self, path: Path, shard: int, number: int, sample: Mapping[str, Any]) -> Block:
        """Turn the ``number``-th sample of the shard into a block of the length that it must have."""
        key = f"{self._first_keys[shard] + number:06d}"
        if sample["__key__"] != key:
            raise _altered(path, f"block {number}", f"key {sample['__key__']}", key)
        block_size = self._manifest.block_size
        rows = min(block_size, self._shards[shard].positions - number * block_size)
        block: Block = {}
        for name in self._members:
            member = f"{key}.{name}.npy"
            if f"{name}.npy" not in sample:
                raise _altered(path, member, "no such member", "one in every block")
            array = decode_npy(sample[f"{name}.npy"], path, member)
            self._check(path, member, name, array, rows)
            block[name] = array
        return block

    def _check(self, path: Path, member: str, name: str, array: npt.NDArray[Any], rows: int) -> None:
        spec = self._manifest.fields[name]
        shape = (array.shape[:1] if name in POLICY_FIELDS else (rows,)) + spec.shape
        if array.dtype.str != spec.dtype or array.shape != shape:
            found = f"{array.dtype.str} of shape {array.shape}"
            raise _altered(path, member, found, f"{spec.dtype} of shape {shape}")


def _read_samples(path: Path, members: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield webdataset's samples of one shard, with the chosen members alone, undecoded.

    The file is opened here, since webdataset would read the path as a URL and leave it open.
    """
    chosen = tuple(f".{name}.npy" for name in members)
    with path.open("rb") as stream:
        files = tar_file_expander(
            [{"url": str(path), "stream": stream}], select_files=lambda name: name.endswith(chosen)
        )
        try:
            yield from group_by_keys(files)
        except (tarfile.TarError, ValueError) as error:
            raise _altered(path, "tar structure", str(error.args[0]), "a readable shard") from error


def _altered(path: Path, record: str, found: object, expected: object) -> FormatError:
    return FormatError(
        "the shard is not what the manifest says",
        code="broken-shard",
        path=path,
        record=record,
        found=found,
        expected=expected,
        cure=_CURE,
    )
