"""Verification of the shards against the shuffled positions, field by field. Read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa

from hexdata.errors import VerifyError
from hexdata.progress import Progress
from hexdata.schema import positions_schema
from hexdata.shards.block_check import check_block
from hexdata.shards.blocks import Block, block_fields, block_to_members, columns_to_block
from hexdata.shards.format import block_samples, read_blocks_with_offsets
from hexdata.shards.manifest import ShardEntry, ShardManifest
from hexdata.store import Store
from hexdata.store.parquet import ParquetFiles, read_rows, regroup
from hexdata.verify.options import VerifyOptions
from hexdata.verify.shuffled import open_order

__all__ = ["check_shards"]

_STATED: Final = ("board_size", "layout", "block_size", "shard_size", "seed", "order_version")
"""Values that both the shard manifest and the store's manifest state, besides counts and the digest."""


def check_shards(store: Store, options: VerifyOptions, progress: Progress) -> str:
    """Check that the shards contain the shuffled positions in the same order, with equal fields.

    If the buckets were removed, the positions of the store are sorted again.

    Args:
        store: the store to check, with the stages shuffle and export.
        options: limits of memory and threads.
        progress: receives progress reports.

    Returns:
        The detail of the check.

    Raises:
        VerifyError: the shards or the shard manifest differ.
        StoreError: a shard or the shard manifest cannot be read.
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
    fields: set[str] = set()
    progress.begin("compare shards", export["positions"], "positions")
    with _open_rows(store, options, manifest.board_size) as (read, schema):
        for split, shards in manifest.splits.items():
            rows = _RowReader(read(split))
            start = 0
            for shard in shards:
                size = manifest.block_size if manifest.layout == "blocks" else 1
                tables = regroup(rows.take(shard.positions), schema, size)
                fields |= _compare(store, progress, shard, start // manifest.block_size, tables, manifest)
                start += shard.positions
    with_policy = not fields.isdisjoint(("policy", "policy_row"))
    targets, version = store.manifest.targets_of("shuffled"), manifest.schema_version
    if manifest.fields != block_fields(manifest.board_size, with_policy, targets, version):
        raise VerifyError("the shard manifest lists wrong fields", path=folder, found=list(manifest.fields))
    count = sum(len(shards) for shards in manifest.splits.values())
    return f"{count:,} shards contain the shuffled positions in the same order, with equal fields"


@contextmanager
def _open_rows(
    store: Store, options: VerifyOptions, board_size: int
) -> Iterator[tuple[Callable[[str], Iterator[pa.RecordBatch]], pa.Schema]]:
    """Yield a function that returns the shuffled rows of a split, and the schema of the rows."""
    targets = store.manifest.targets_of("shuffled")
    schema = positions_schema(board_size, targets)
    if store.manifest.removed_buckets:
        names = {*block_fields(board_size, with_policy=False, targets=targets), "policy"}
        schema = pa.schema([field for field in schema if field.name in names])
        with open_order(store, options, schema) as read:
            yield read, schema
        return
    root = store.path.resolve()

    def read_buckets(split: str) -> Iterator[pa.RecordBatch]:
        buckets = [(root / name, facts.rows) for name, facts in store.manifest.buckets(split).items()]
        files = ParquetFiles(buckets, store.manifest.schema_version)
        return read_rows(files.rows(0, len(files)), schema) if buckets else iter(())

    yield read_buckets, schema


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


def _compare(
    store: Store,
    progress: Progress,
    shard: ShardEntry,
    first: int,
    tables: Iterator[pa.Table],
    manifest: ShardManifest,
) -> set[str]:
    """Compare a shard with its shuffled rows: its keys, fields and offsets.

    Args:
        store: the store to check.
        progress: receives progress reports.
        shard: entry of the shard in the shard manifest.
        first: number of the shard's first block.
        tables: the shuffled rows, one table per block or sample.
        manifest: the shard manifest.

    Returns:
        The names of the fields of the shard.

    Raises:
        VerifyError: the shard differs.
    """
    path = store.path / "shards" / shard.name
    facts = store.manifest.files.get(f"shards/{shard.name}")
    if facts is None or (facts.rows, facts.bytes, facts.sha256) != (
        shard.positions,
        shard.bytes,
        shard.sha256,
    ):
        raise VerifyError("the shard manifest and the manifest of the store differ", path=path)
    fields: set[str] = set()
    blocks = read_blocks_with_offsets(path)
    sample = manifest.layout.removesuffix("s")
    for number, table in enumerate(tables):
        key, found, offsets = next(blocks, ("", {}, {}))
        with_policy = "policy_row" in found or "policy" in found or _has_policy(table)
        expected = columns_to_block(table, with_policy, store.manifest.targets_of("shuffled"))
        name = f"{first + number:06d}"
        if manifest.layout == "samples":
            ((position_id, expected),) = block_samples(expected)
            name = f"{position_id:09d}"
        elif manifest.schema_version > 1:
            expected = block_to_members(expected)
        record = f"{sample} {name}"
        if manifest.layout == "blocks" and found:
            check_block(found, path, key, board_size=manifest.board_size, rows=table.num_rows)
        if key != name or not _equal(found, expected):
            raise VerifyError(f"a {sample} differs from the shuffled positions", path=path, record=record)
        fields_with_offset = sorted(offsets) if manifest.layout == "blocks" else []
        if sorted(shard.offsets) != fields_with_offset:
            raise VerifyError(
                "the shard manifest has offsets of wrong fields",
                path=path,
                found=", ".join(sorted(shard.offsets)) or "none",
                expected=", ".join(fields_with_offset) or "none",
            )
        for field, listed in shard.offsets.items():
            if offsets[field] != listed[number]:
                raise VerifyError(
                    f"{field} is not at the offset in the shard manifest",
                    path=path,
                    record=record,
                    found=f"byte {offsets[field]}",
                    expected=f"byte {listed[number]}",
                )
        fields |= found.keys()
        progress.advance(table.num_rows)
    if next(blocks, None) is not None:
        raise VerifyError("the shard contains more positions than the shard manifest records", path=path)
    return fields


def _has_policy(table: pa.Table) -> bool:
    return bool(table["policy"].null_count < table.num_rows)


def _equal(found: Block, expected: Block) -> bool:
    """Compare types, shapes and bytes of arrays, so that a NaN equals itself and -0.0 differs from 0.0."""
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape, found[name].tobytes())
        == (array.dtype, array.shape, array.tobytes())
        for name, array in expected.items()
    )
