"""Local shards found and opened: mapped into memory and held against the manifest, each fault named.

Knows files, not rows. Never reads the numbers of a block, but to hash a whole file on request.
"""

from __future__ import annotations

import errno
import mmap
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

from hexdata.errors import BudgetError, ConfigError, FormatError, StoreError
from hexdata.formats.shard_manifest import FieldSpec, ShardEntry, ShardManifest
from hexdata.formats.shards import POLICY_FIELDS
from hexdata.loader.headers import CURE, Member, check_member, policy_count
from hexdata.loader.options import Check, OnError
from hexdata.store import Store
from hexdata.store.files import digest_file

__all__ = ["LocalShard", "check_split", "open_shards", "shard_folder"]

_HASHING_THREADS: Final = 8
_TOO_MANY: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

Fault = tuple[ShardEntry, StoreError | FormatError]
"""A shard that cannot be used, and why."""


def shard_folder(store: Path) -> Path:
    """Return the folder of the shards' manifest: ``store`` itself, or the one in a store.

    A store to which more was added since its shards were written is warned of: they lack it.

    Raises:
        StoreError: it is a store that was not exported.
    """
    try:
        whole = Store.open(store)
    except StoreError:  # no store, but perhaps a folder of shards, as may be copied anywhere
        return store if not (store / "shards").is_dir() else store / "shards"
    if "export" not in whole.manifest.stages:
        whole.require_stage("export")
    for stage in ("shuffle", "export"):
        try:
            whole.require_stage(stage)
        except StoreError as error:
            warnings.warn(str(error), stacklevel=3)
    return store / "shards"


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
            cure="Run `hexdata export` with --layout blocks.",
        )
    if split not in manifest.splits:
        splits = ", ".join(manifest.splits)
        raise ConfigError("no such split in the shards", path=place, found=split, expected=splits)
    shards = manifest.splits[split]
    return sorted(shards[0].offsets) if shards else []


@dataclass
class LocalShard:
    """One shard: its file, what the manifest says of it, the key of its first block, its map once open."""

    path: Path
    entry: ShardEntry
    first_key: int
    block_size: int
    fields: Mapping[str, FieldSpec]
    data: mmap.mmap | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the map behind, as it cannot travel to another process."""
        return {**self.__dict__, "data": None}

    def open(self) -> mmap.mmap:
        """Return the map of the file, opened at the first call.

        Raises:
            StoreError: the file is missing, cannot be read, or is not as long as the manifest says.
            BudgetError: the process may not map so many.
        """
        if self.data is None:
            try:
                self.data = self._map()
            except FileNotFoundError:
                raise StoreError("a shard is missing", path=self.path, cure=CURE) from None
            except OSError as error:
                if error.errno not in _TOO_MANY:
                    raise self._unreadable(error) from error
                raise BudgetError(
                    "too many shards to map at once",
                    path=self.path,
                    found=error.strerror,
                    cure="Raise the limit (`ulimit -n`), or export with a larger --shard-size.",
                ) from error
        return self.data

    def _map(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            size = file.seek(0, 2)
            if size != self.entry.bytes:
                raise self._altered(f"{size} bytes", self.entry.bytes)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def check_digest(self) -> None:
        """See that the file's bytes are those that were exported.

        Raises:
            StoreError: they are not, or cannot be read.
        """
        try:
            _, digest = digest_file(self.path)
        except OSError as error:
            raise self._unreadable(error) from error
        if digest != self.entry.sha256:
            raise self._altered(f"SHA-256 {digest}", self.entry.sha256)

    def member(self, name: str, block: int) -> Member:
        """Return one field of the block of that number in the shard."""
        return Member(self.path, self.first_key + block, name, self.entry.offsets[name][block])

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
            self.open()
            if digest:
                self.check_digest()
            for name, block in product(self.entry.offsets, range(self.entry.blocks if blocks else 0)):
                self.check_member(name, block)
        except (StoreError, FormatError) as error:
            return error
        return None

    def _unreadable(self, error: OSError) -> StoreError:
        return StoreError("a shard cannot be read", path=self.path, found=error.strerror)

    def _altered(self, found: object, expected: object) -> StoreError:
        return StoreError(
            "a shard is cut or altered", path=self.path, found=found, expected=expected, cure=CURE
        )


def open_shards(
    folder: Path,
    manifest: ShardManifest,
    split: str,
    *,
    on_error: OnError,
    check: Check,
) -> tuple[list[LocalShard], list[Fault]]:
    """Open the shards of a split; return those that can be used, and the faults of the others.

    With ``on_error="skip"`` every header is read now, since what is left decides the order; otherwise a
    block's are read when it is first used.

    Raises:
        StoreError: the first fault, with ``on_error="raise"``.
        BudgetError: the process may not map so many.
    """
    shards = []
    key = 0
    for entry in manifest.splits[split]:
        shards.append(LocalShard(folder / entry.name, entry, key, manifest.block_size, manifest.fields))
        key += entry.blocks
    skip, digests = on_error == "skip", check == "digests"
    used: list[LocalShard] = []
    faults: list[Fault] = []
    with ThreadPoolExecutor(_HASHING_THREADS if digests else 1) as threads:
        found = threads.map(lambda shard: shard.find_fault(digest=digests, blocks=skip), shards)
        for shard, fault in zip(shards, found, strict=True):
            if fault is None:
                used.append(shard)
            elif skip:
                faults.append((shard.entry, fault))
            else:
                threads.shutdown(cancel_futures=True)
                raise fault
    return used, faults
