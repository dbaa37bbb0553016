"""Shards found and opened: mapped into memory and held against the manifest, each fault named.

They lie in a folder, or elsewhere and are copied. Knows files, not rows. Never reads the numbers of a block,
but to hash a whole file on request.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import mmap
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

from hexdata.errors import BudgetError, ConfigError, FormatError, StoreError
from hexdata.formats.shard_manifest import MANIFEST_NAME, FieldSpec, ShardEntry, ShardManifest
from hexdata.formats.shards import POLICY_FIELDS
from hexdata.loader.cached import CachedSource
from hexdata.loader.headers import HINT, Member, check_member, policy_count
from hexdata.loader.options import Check, OnError
from hexdata.loader.shard_cache import CopyFile
from hexdata.progress import SILENT, Progress
from hexdata.remote import AnyPath, is_fault
from hexdata.store import Store
from hexdata.store.files import exists

__all__ = ["LocalShard", "ShardPlace", "check_split", "open_shards", "shard_folder"]

_THREADS: Final = 8
"""That hash or fetch shards."""
_TOO_MANY: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

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
        return exists(folder / "shards" / MANIFEST_NAME)
    except OSError:  # a place that does not answer is named when it is read
        return False


def check_split(manifest: ShardManifest, split: str, place: str) -> list[str]:
    """Return the fields that every block of a split stores.

    Raises:
        ConfigError: there is no such split, or the shards are not of blocks.
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
    return sorted(shards[0].offsets) if shards else []


@dataclass
class LocalShard:
    """One shard: where it is, what the manifest says of it, the key of its first block, its map once open."""

    place: ShardPlace
    entry: ShardEntry
    first_key: int
    block_size: int
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
            return (self.place / self.entry.name).open("rb")
        return self.place.open_to_map(self.entry, digest=digest)

    def member(self, name: str, block: int) -> Member:
        """Return one field of the block of that number in the shard."""
        return Member(self.address, self.first_key + block, name, self.entry.offsets[name][block])

    def stored_rows(self, name: str, block: int) -> int:
        """Return how many rows of a field the block of that number in the shard has.

        Raises:
            FormatError: as ``policy_count`` does, of dense policies.
        """
        if name in POLICY_FIELDS:
            return policy_count(self.open(), self.member(name, block), self.fields[name])
        return min(self.block_size, self.entry.positions - block * self.block_size)

    def check_member(self, name: str, block: int) -> None:
        """See that the headers before a field are those of the block of that number in the shard.

        Raises:
            FormatError: they are not.
        """
        rows = self.stored_rows(name, block)
        check_member(self.open(), self.member(name, block), self.fields[name], rows)

    def find_fault(self, *, digest: bool, blocks: bool) -> StoreError | FormatError | None:
        """Open the shard and return what is wrong with it, if anything.

        Args:
            digest: hash the whole file.
            blocks: read the headers of all blocks.

        Raises:
            BudgetError: the process may not map so many.
        """
        try:
            self.open(digest=digest)
            for name, block in product(self.entry.offsets, range(self.entry.blocks if blocks else 0)):
                self.check_member(name, block)
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

    With ``on_error="skip"`` every header is read now, since what is left decides the order; otherwise a
    block's are read when it is first used. Shards that lie elsewhere are fetched, some at a time, which
    ``progress`` hears of.

    Raises:
        StoreError: the first fault, with ``on_error="raise"``.
        BudgetError: the process may not map so many, or the copies do not fit into the cache.
    """
    shards = []
    key = 0
    for entry in manifest.splits[split]:
        shards.append(LocalShard(place, entry, key, manifest.block_size, manifest.fields))
        key += entry.blocks
    elsewhere = isinstance(place, CachedSource)
    if isinstance(place, CachedSource):
        place.cache.require_size(manifest.splits[split], together=True)
        progress.begin("fetch", sum(shard.entry.bytes for shard in shards), "bytes")
    skip, digests = on_error == "skip", check == "digests"
    used: list[LocalShard] = []
    faults: list[Fault] = []
    threads = ThreadPoolExecutor(_THREADS if digests or elsewhere else 1)
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
