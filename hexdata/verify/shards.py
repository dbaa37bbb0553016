"""Verification of the shards against the shuffled positions, field by field. Read-only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final

import numpy as np
import pyarrow as pa

from hexdata.errors import VerifyError
from hexdata.order import derive_key, sort_key
from hexdata.progress import Progress
from hexdata.schema import SPLITS, positions_schema
from hexdata.shards.block_check import check_block
from hexdata.shards.blocks import Block, block_fields, block_to_members, columns_to_block, members_to_block
from hexdata.shards.format import block_samples, read_blocks_with_offsets, sample_fields
from hexdata.shards.manifest import ShardEntry, ShardManifest
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.parquet import ParquetFiles, read_rows, regroup
from hexdata.verify.options import VerifyOptions
from hexdata.verify.shuffled import open_placement
from hexdata.verify.without_buckets import (
    Part,
    PlacedRows,
    UInt64Array,
    are_sorted,
    divide_shard,
    find_different,
    read_part_rows,
    read_placed,
    row_digests,
)

__all__ = ["check_shards"]

_STATED: Final = ("board_size", "layout", "block_size", "shard_size", "seed", "order_version")
"""Values that both the shard manifest and the store's manifest state, besides counts and the digest."""
_SAMPLES: Final = 1_024
"""Number of samples that are compared at once."""


def check_shards(store: Store, options: VerifyOptions, progress: Progress) -> str:
    """Check that the shards contain the shuffled positions in the same order, with equal fields.

    If the buckets were removed, the shards are compared with the positions of the store.

    Args:
        store: The store to check, with the stages shuffle and export.
        options: Limits of memory and threads.
        progress: Receives progress reports.

    Returns:
        The detail of the check.

    Raises:
        VerifyError: The shards or the shard manifest differ.
        StoreError: A shard or the shard manifest cannot be read.
    """
    folder = store.path / "shards"
    manifest = ShardManifest.load(folder)
    shuffle, export = store.manifest.stages["shuffle"], store.manifest.stages["export"]
    stated = {
        **{name: getattr(manifest, name) for name in _STATED},
        "splits": {split: manifest.positions(split) for split in manifest.splits},
        "shards": {split: len(shards) for split, shards in manifest.splits.items()},
        "digest": manifest.digest,
    }
    lineage = {**export, **shuffle, "board_size": store.manifest.board_size}
    if not stated.items() <= lineage.items() or export["splits"] != shuffle["splits"]:
        raise VerifyError(
            "the shard manifest and the manifest of the store differ",
            path=folder,
            found={name: value for name, value in stated.items() if lineage.get(name) != value} or stated,
        )
    progress.begin("compare shards", export["positions"], "positions")
    comparison = _Comparison(store, options, progress, manifest)
    fields = comparison.with_positions() if store.manifest.removed_buckets else comparison.with_buckets()
    with_policy = not fields.isdisjoint(("policy", "policy_row"))
    targets, version = store.manifest.targets_of("shuffled"), manifest.schema_version
    if manifest.fields != block_fields(manifest.board_size, with_policy, targets, version):
        raise VerifyError("the shard manifest lists wrong fields", path=folder, found=list(manifest.fields))
    count = sum(len(shards) for shards in manifest.splits.values())
    return f"{count:,} shards contain the shuffled positions in the same order, with equal fields"


class _Comparison:
    """Compares the shards of a store with its shuffled positions."""

    def __init__(
        self, store: Store, options: VerifyOptions, progress: Progress, manifest: ShardManifest
    ) -> None:
        self.store = store
        self.options = options
        self.progress = progress
        self.manifest = manifest
        self.targets = store.manifest.targets_of("shuffled")

    @property
    def _rows_per_record(self) -> int:
        return self.manifest.block_size if self.manifest.layout == "blocks" else 1

    def with_buckets(self) -> set[str]:
        """Compare the shards with the buckets, and return the names of their fields.

        Raises:
            VerifyError: A shard differs.
        """
        schema = positions_schema(self.manifest.board_size, self.targets)
        root, stored = self.store.path.resolve(), self.store.manifest
        fields: set[str] = set()
        for split, shards in self.manifest.splits.items():
            buckets = [(root / name, facts.rows) for name, facts in stored.buckets(split).items()]
            files = ParquetFiles(buckets)
            rows = _RowReader(read_rows(files.rows(0, len(files)), schema) if buckets else iter(()))
            for number, shard in enumerate(shards):
                fields |= self._compare(number, shard, rows.take(shard.positions), schema)
        return fields

    def with_positions(self) -> set[str]:
        """Compare the shards with the positions of the store, and return the names of their fields.

        Raises:
            VerifyError: A shard differs.
        """
        key = derive_key(self.manifest.seed, "shuffle")
        parts: dict[int, list[Part]] = {}
        policies: dict[int, bool] = {}
        fields: set[str] = set()
        for split, shards in self.manifest.splits.items():
            place, found = SPLITS.index(split), set[str]()
            bucket_rows = [facts.rows for facts in self.store.manifest.buckets(split).values()]
            parts[place] = []
            for number, shard in enumerate(shards):
                keys, digests = [], []
                for block in self._read_rows(number, shard, found):
                    keys.append(sort_key(block["position_id"], key))
                    digests.append(row_digests(block))
                    self.progress.advance(len(keys[-1]))
                divided = divide_shard(
                    number, self._start(number), np.concatenate(keys), np.concatenate(digests), bucket_rows
                )
                if not are_sorted(np.concatenate(keys), divided):
                    raise VerifyError("the positions are not sorted by key", path=self._path(shard))
                parts[place] += divided
            policies[place] = "policy" in found
            fields |= found
        schema = positions_schema(self.manifest.board_size, self.targets)
        names = {*block_fields(self.manifest.board_size, with_policy=False, targets=self.targets), "policy"}
        schema = pa.schema([field for field in schema if field.name in names])
        counts = {split: self.manifest.positions(split) for split in self.manifest.splits}
        self.progress.begin("compare positions", sum(counts.values()), "positions")
        with open_placement(self.store, self.options) as (con, selection, query):
            if selection.rows != counts:
                raise VerifyError(
                    "the shards have other positions than the store", found=counts, expected=selection.rows
                )

            def placed_rows() -> Iterator[tuple[PlacedRows, UInt64Array, UInt64Array]]:
                for placed in read_placed(con, query, schema):
                    keys = sort_key(placed.rows["position_id"].to_numpy(), key)
                    yield placed, keys, self._digests(placed, policies)
                    self.progress.advance(len(keys))

            different = find_different(parts, placed_rows())
            if different is not None:
                place, number = different
                shard = self.manifest.splits[SPLITS[place]][number]
                rows = read_part_rows(con, query, schema, place, parts[place], number)
                self._compare(number, shard, rows, schema)
                raise VerifyError("the shard has other positions than the store", path=self._path(shard))
        return fields

    def _digests(self, placed: PlacedRows, policies: Mapping[int, bool]) -> UInt64Array:
        """Return the digests that rows have in shards.

        Args:
            placed: The rows.
            policies: Whether the samples of a split have policies; not used for blocks.
        """
        if self.manifest.layout == "blocks":
            return row_digests(columns_to_block(placed.rows, _has_policy(placed.rows), self.targets))
        digests = np.zeros(len(placed.split), np.uint64)
        for split in np.unique(placed.split).tolist():
            chosen = placed.split == split
            block = columns_to_block(placed.rows.filter(chosen), policies[split], self.targets)
            digests[chosen] = row_digests(sample_fields(block))
        return digests

    def _read_rows(self, number: int, shard: ShardEntry, found: set[str]) -> Iterator[Block]:
        """Yield the rows of a shard, as :func:`row_digests` expects them.

        Args:
            number: Number of the shard within its split.
            shard: Entry of the shard in the shard manifest.
            found: Receives the names of the members.

        Raises:
            VerifyError: The shard differs from the manifests, or a policy is not in the form of shards.
        """
        cells = self.manifest.board_size**2
        records = self._read(number, shard)
        while batch := list(islice(records, 1 if self.manifest.layout == "blocks" else _SAMPLES)):
            record, members = batch[0]
            found.update(members)
            if self.manifest.layout == "blocks":
                block = members_to_block(members, cells)
                if self.manifest.schema_version > 1 and not _equal(members, block_to_members(block)):
                    raise self._differs(shard, record)
                yield block
                continue
            specs = _specs(members)
            for record, sample in batch:
                if _specs(sample) != specs or int(record.split()[1]) != int(sample.get("position_id", -1)):
                    raise self._differs(shard, record)
            yield {name: np.stack([sample[name] for _, sample in batch]) for name in members}

    def _compare(
        self, number: int, shard: ShardEntry, rows: Iterator[pa.RecordBatch], schema: pa.Schema
    ) -> set[str]:
        """Compare a shard with its shuffled rows: its keys, fields and offsets.

        Args:
            number: Number of the shard within its split.
            shard: Entry of the shard in the shard manifest.
            rows: The shuffled rows.
            schema: Columns of the rows.

        Returns:
            The names of the fields of the shard.

        Raises:
            VerifyError: The shard differs.
        """
        fields: set[str] = set()
        tables = regroup(rows, schema, self._rows_per_record)
        for record, found in self._read(number, shard):
            table = next(tables, None)
            if table is None:
                raise self._differs(shard, record)
            with_policy = "policy_row" in found or "policy" in found or _has_policy(table)
            expected = columns_to_block(table, with_policy, self.targets)
            name = record
            if self.manifest.layout == "samples":
                ((position_id, expected),) = block_samples(expected)
                name = f"sample {position_id:09d}"
            elif self.manifest.schema_version > 1:
                expected = block_to_members(expected)
            if record != name or not _equal(found, expected):
                raise self._differs(shard, record)
            fields |= found.keys()
            self.progress.advance(table.num_rows)
        return fields

    def _read(self, number: int, shard: ShardEntry) -> Iterator[tuple[str, Block]]:
        """Yield the name and the members of each block or sample of a shard.

        Raises:
            VerifyError: The numbers of positions, the keys of blocks or the offsets are wrong.
            StoreError: A block contains invalid values.
        """
        path, listed = self._path(shard), self.store.manifest.files.get(f"shards/{shard.name}")
        if listed is None or (listed.rows, listed.bytes, listed.sha256) != (
            shard.positions,
            shard.bytes,
            shard.sha256,
        ):
            raise VerifyError("the shard manifest and the manifest of the store differ", path=path)
        blocks = read_blocks_with_offsets(path)
        is_block = self.manifest.layout == "blocks"
        for index, first in enumerate(range(0, shard.positions, self._rows_per_record)):
            rows = min(self._rows_per_record, shard.positions - first)
            key, found, offsets = next(blocks, ("", {}, {}))
            name = f"{(self._start(number) + first) // self.manifest.block_size:06d}" if is_block else key
            record = f"{self.manifest.layout.removesuffix('s')} {name}"
            if is_block and found:
                check_block(found, path, key, board_size=self.manifest.board_size, rows=rows)
            if key != name or not found:
                raise self._differs(shard, record)
            fields_with_offset = sorted(offsets) if is_block else []
            if sorted(shard.offsets) != fields_with_offset:
                raise VerifyError(
                    "the shard manifest has offsets of wrong fields",
                    path=path,
                    found=", ".join(sorted(shard.offsets)) or "none",
                    expected=", ".join(fields_with_offset) or "none",
                )
            for field, places in shard.offsets.items():
                if offsets[field] != places[index]:
                    raise VerifyError(
                        f"{field} is not at the offset in the shard manifest",
                        path=path,
                        record=record,
                        found=f"byte {offsets[field]}",
                        expected=f"byte {places[index]}",
                    )
            yield record, found
        if next(blocks, None) is not None:
            raise VerifyError("the shard contains more positions than the shard manifest records", path=path)

    def _start(self, number: int) -> int:
        """Return the number of positions of a split before a shard."""
        return number * self.manifest.shard_size

    def _path(self, shard: ShardEntry) -> AnyPath:
        return self.store.path / "shards" / shard.name

    def _differs(self, shard: ShardEntry, record: str) -> VerifyError:
        return VerifyError(
            f"a {record.split()[0]} differs from the shuffled positions",
            path=self._path(shard),
            record=record,
        )


class _RowReader:
    """Reads a stream of rows in parts of any size."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    def take(self, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the next rows, or fewer at the end."""
        while rows > 0 and (batch := self._rest or next(self._batches, None)) is not None:
            self._rest = batch.slice(rows) if batch.num_rows > rows else None
            yield batch.slice(0, rows)
            rows -= batch.num_rows


def _has_policy(table: pa.Table) -> bool:
    return bool(table["policy"].null_count < table.num_rows)


def _specs(sample: Block) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (array.dtype.str, array.shape) for name, array in sample.items()}


def _equal(found: Block, expected: Block) -> bool:
    """Compare types, shapes and bytes of arrays, so that a NaN equals itself and -0.0 differs from 0.0."""
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape, found[name].tobytes())
        == (array.dtype, array.shape, array.tobytes())
        for name, array in expected.items()
    )
