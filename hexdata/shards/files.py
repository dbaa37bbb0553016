"""Shards found and opened: mapped into memory and held against the manifest, each fault named.

They lie in a folder, or elsewhere and are copied. Knows files, not rows. Never reads the numbers of a block,
but to hash a whole file on request.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import math
import mmap
import tarfile
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import BudgetError, ConfigError, FormatError, StoreError
from hexdata.progress import SILENT, Progress
from hexdata.shards.block_check import blocks_are_right, check_field
from hexdata.shards.blocks import POLICY_FIELDS, block_fields
from hexdata.shards.cache import CopyFile
from hexdata.shards.cached_source import CachedSource
from hexdata.shards.manifest import MANIFEST_NAME, FieldSpec, ShardEntry, ShardManifest
from hexdata.shards.member_check import HINT, BlockPlace, altered, place_block
from hexdata.shards.options import Check, OnError
from hexdata.shards.tar_members import (
    HEADER_BYTES,
    MOST_END_BYTES,
    MemberHeader,
    broken,
    check_end,
    member_headers,
    parse_headers,
)
from hexdata.storage import AnyPath, is_fault, open_file, storage_of
from hexdata.store import Store

__all__ = ["LocalShard", "ShardPlace", "check_split", "open_shards", "row_bytes", "shard_folder"]

_THREADS: Final = 8
"""That hash or fetch shards."""
_BYTES_AT_ONCE: Final = 1 << 18
"""Values that are checked at once: they fit into the processor's cache."""
_TOO_MANY: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

Array = npt.NDArray[Any]
ShardPlace = Path | CachedSource
"""Where shards to be mapped are: a folder, or a place that they are copied from."""

Fault = tuple[ShardEntry, StoreError | FormatError]
"""A shard that cannot be used, and why."""


def shard_folder(store: AnyPath) -> AnyPath:
    """Return the folder of the shards' manifest: ``store`` itself, or the one in a store.

    A store to which more was added since its shards were written is warned of: they lack it.

    Raises:
        StoreError: it is a store that was not exported.
    """
    try:
        whole = Store.open(store)
    except StoreError as error:  # no store, but perhaps a folder of shards, as may be copied anywhere
        if is_fault(error):  # which any further question would only wait for again
            raise
        return store / "shards" if _has_shards(store) else store
    if "export" not in whole.manifest.stages:
        whole.require_stage("export")
    for stage in ("shuffle", "export"):
        try:
            whole.require_stage(stage)
        except StoreError as error:
            warnings.warn(str(error), stacklevel=4)
    return store / "shards"


def _has_shards(folder: AnyPath) -> bool:
    if isinstance(folder, Path):
        return (folder / "shards").is_dir()
    try:
        return storage_of(folder / "shards" / MANIFEST_NAME).exists()
    except OSError:  # a place that does not answer is named when it is read
        return False


def check_split(manifest: ShardManifest, split: str, place: str) -> list[str]:
    """Return the fields that every block of a split stores.

    Raises:
        ConfigError: there is no such split, or the shards are not of blocks.
        StoreError: the blocks have other fields than they must have.
    """
    if manifest.layout != "blocks":
        raise ConfigError(
            "the loader reads shards of blocks",
            path=place,
            found=f"layout {manifest.layout}",
            hint="Run `hexdata export` with --layout blocks.",
        )
    if split not in manifest.splits:
        splits = ", ".join(manifest.splits)
        raise ConfigError("no such split in the shards", path=place, found=split, expected=splits)
    shards = manifest.splits[split]
    if not shards:
        return []
    known = block_fields(manifest.board_size, with_policy="policy" in shards[0].offsets)
    for shard in shards:
        if shard.offsets.keys() != known.keys():
            raise _foreign(place, f"members of {shard.name}", sorted(shard.offsets), sorted(known))
    for name, spec in known.items():
        if manifest.fields.get(name) != spec:
            raise _foreign(place, f"field {name}", manifest.fields.get(name), spec)
    return sorted(known)


def _foreign(place: str, record: str, found: object, expected: object) -> StoreError:
    return StoreError(
        "the shard manifest is of other blocks than hexdata reads",
        path=place,
        record=record,
        found=found,
        expected=expected,
        hint=HINT,
    )


def row_bytes(spec: FieldSpec) -> int:
    """Return the bytes of one row of a field."""
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


@dataclass
class LocalShard:
    """One shard: where it is, what the manifest says of it, the key of its first block, its map once open."""

    place: ShardPlace
    entry: ShardEntry
    first_key: int
    block_size: int
    board_size: int
    fields: Mapping[str, FieldSpec]
    data: mmap.mmap | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the map behind, as it cannot travel to another process."""
        return {**self.__dict__, "data": None}

    @functools.cached_property
    def address(self) -> str:
        """Where it lies, as messages say it."""
        if isinstance(self.place, Path):
            return str(self.place / self.entry.name)
        return self.place.address(self.entry.name)

    def open(self, *, digest: bool = False) -> mmap.mmap:
        """Return the map of the file, opened at the first call; if asked, held against its digest then.

        Raises:
            StoreError: the file is missing, cannot be read, or is not what the manifest says.
            BudgetError: the process may not map so many, or there is no room for a copy.
        """
        if self.data is None:
            try:
                self.data = self._map(digest)
            except FileNotFoundError:
                raise StoreError("a shard is missing", path=self.address, hint=HINT) from None
            except OSError as error:
                if error.errno not in _TOO_MANY:
                    raise StoreError(
                        "a shard cannot be read", path=self.address, found=error.strerror
                    ) from error
                raise BudgetError(
                    "too many shards to map at once",
                    path=self.address,
                    found=error.strerror,
                    hint="Raise the limit (`ulimit -n`), or export with a larger --shard-size.",
                ) from error
        return self.data

    def _map(self, digest: bool) -> mmap.mmap:
        with self._file(digest) as file:
            size = file.seek(0, 2)
            if size != self.entry.bytes:
                raise self._altered(f"{size} bytes", self.entry.bytes)
            if digest and isinstance(self.place, Path):  # a copy was looked at as it was opened
                file.seek(0)
                found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != self.entry.sha256:
                    raise self._altered(f"SHA-256 {found}", self.entry.sha256)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _file(self, digest: bool) -> CopyFile:
        if isinstance(self.place, Path):
            return open_file(self.place / self.entry.name)
        return self.place.open_to_map(self.entry, digest=digest)

    def stored_rows(self, name: str, block: int) -> int:
        """Return how many rows of a field the block of that number in the shard has.

        Raises:
            FormatError: of dense policies, the headers before them are not the field's.
        """
        if name in POLICY_FIELDS:
            return self._header(name, self._block(block)).shape[0]
        return min(self.block_size, self.entry.positions - block * self.block_size)

    def check_block(self, block: int) -> None:
        """Check that the block of that number in the shard has all its members, each with its own headers.

        Raises:
            FormatError: it has not; what the members hold is not looked at.
        """
        place, data = self._block(block), self.open()
        headers = {name: self._header(name, place) for name in self.entry.offsets}
        place.check_layout(headers)
        for header in headers.values():
            stop = header.begin + header.bytes
            length = -stop % tarfile.BLOCKSIZE
            if length and data[stop : stop + length] != bytes(length):
                raise broken(self.address, header.name, "other bytes after the numbers", "zeros")
        if block + 1 == self.entry.blocks:
            end = max(header.end for header in headers.values())
            check_end(data[end : end + MOST_END_BYTES], len(data) - end, len(data), self.address)

    def check_values(self, name: str, blocks: Sequence[int]) -> None:
        """Check what a field of blocks, by their numbers in the shard, holds once their headers are checked.

        Raises:
            FormatError: it holds what no position has.
        """
        together = max(1, _BYTES_AT_ONCE // (self.block_size * row_bytes(self.fields[name])))
        for start in range(0, len(blocks), together):
            part = blocks[start : start + together]
            arrays = [self._values(name, block) for block in part]
            rows = self.stored_rows("board", part[-1])  # the last block may have fewer than the others
            if len(part) > 1 and blocks_are_right(name, arrays, self.board_size, rows):
                continue
            for block, array in zip(part, arrays, strict=True):
                place = self._block(block)
                check_field(name, array, self.board_size, place.rows, self.address, place.member(name))

    def _block(self, block: int) -> BlockPlace:
        return place_block(self.address, self.entry, block, self.first_key, self.block_size)

    def _values(self, name: str, block: int) -> Array:
        """Return a field of a block, a view of the map."""
        spec = self.fields[name]
        shape = (self.stored_rows(name, block), *spec.shape)
        begin = self.entry.offsets[name][block]
        return np.frombuffer(self.open(), spec.dtype, math.prod(shape), begin).reshape(shape)

    def _header(self, name: str, place: BlockPlace) -> MemberHeader:
        """Return the headers of a field of the block, which are seen to be its own."""
        data, spec, start = self.open(), self.fields[name], self.entry.offsets[name][place.number]
        begin = start - HEADER_BYTES
        if not 0 <= begin <= len(data) - HEADER_BYTES:
            found = f"a member at byte {begin}, of {len(data)} bytes"
            raise altered(self.address, place.member(name), found, "a member within the shard")
        headers = data[begin:start]
        if name not in POLICY_FIELDS:  # most are byte for byte as they are written, which is quickly seen
            shape = (place.rows, *spec.shape)
            size = math.prod(shape) * int(spec.dtype[2])
            if start + size <= len(data) and headers == member_headers(place.key, name, spec.dtype, shape):
                return MemberHeader(place.key, name, spec.dtype, shape, start, size)
        header = parse_headers(headers, begin, len(data), self.address, place.member(name))
        place.check_header(name, header, spec)
        return header

    def find_fault(self, *, digest: bool, blocks: bool) -> StoreError | FormatError | None:
        """Open the shard and return what is wrong with it, if anything.

        Args:
            digest: hash the whole file.
            blocks: check all blocks, headers and values.

        Raises:
            BudgetError: the process may not map so many.
        """
        try:
            self.open(digest=digest)
            for block in range(self.entry.blocks if blocks else 0):
                self.check_block(block)
            for name in self.entry.offsets if blocks else ():
                self.check_values(name, range(self.entry.blocks))
        except (StoreError, FormatError) as error:
            return error
        return None

    def _altered(self, found: object, expected: object) -> StoreError:
        return StoreError(
            "a shard is cut or altered", path=self.address, found=found, expected=expected, hint=HINT
        )


def open_shards(
    place: ShardPlace,
    manifest: ShardManifest,
    split: str,
    *,
    on_error: OnError,
    check: Check,
    progress: Progress = SILENT,
) -> tuple[list[LocalShard], list[Fault]]:
    """Open the shards of a split; return those that can be used, and the faults of the others.

    With ``on_error="skip"`` every block is read and checked now, since what is left decides the order;
    otherwise a block is checked when it is first used. Shards that lie elsewhere are fetched, some at a
    time, which ``progress`` hears of.

    Raises:
        StoreError: the first fault, with ``on_error="raise"``.
        BudgetError: the process may not map so many, or the copies do not fit into the cache.
    """
    shards = []
    key = 0
    for entry in manifest.splits[split]:
        shards.append(
            LocalShard(place, entry, key, manifest.block_size, manifest.board_size, manifest.fields)
        )
        key += entry.blocks
    elsewhere = isinstance(place, CachedSource)
    if isinstance(place, CachedSource):
        place.cache.require_size(manifest.splits[split], together=True)
        progress.begin("fetch", sum(shard.entry.bytes for shard in shards), "bytes")
    skip, digests = on_error == "skip", check == "digests"
    used: list[LocalShard] = []
    faults: list[Fault] = []
    threads = ThreadPoolExecutor(_THREADS if digests or skip or elsewhere else 1)
    try:
        found = threads.map(lambda shard: shard.find_fault(digest=digests, blocks=skip), shards)
        for shard, fault in zip(shards, found, strict=True):
            if fault is None:
                used.append(shard)
            elif skip:
                faults.append((shard.entry, fault))
            else:
                raise fault
            if elsewhere:
                progress.advance(shard.entry.bytes)
    finally:
        threads.shutdown(cancel_futures=True)  # whatever ended it, no more are begun
    return used, faults
