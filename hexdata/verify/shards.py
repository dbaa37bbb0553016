"""Verification of the shards against the shuffled positions, field by field. Read-only."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import chain
from shutil import disk_usage
from typing import Final

import pyarrow as pa

from hexdata.errors import VerifyError
from hexdata.progress import Progress
from hexdata.schema import SPLITS, positions_schema
from hexdata.shards.block_check import check_block
from hexdata.shards.blocks import Block, block_fields, columns_to_block
from hexdata.shards.format import read_blocks
from hexdata.shards.manifest import ShardEntry, ShardManifest
from hexdata.shards.reader import load_manifest
from hexdata.shards.sources import make_source
from hexdata.shuffle import ShuffleOptions
from hexdata.shuffle.stage import prepare
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.files import FileFacts
from hexdata.store.parquet import read_rows
from hexdata.system import default_workers
from hexdata.temporary import temporary_folder
from hexdata.verify.shuffled import recorded_selection
from hexdata.verify.tables import VerifyOptions

_STATED: Final = ("board_size", "block_size", "shard_size", "seed", "order_version")
"""Values that both the shard manifest and the store's manifest state, besides counts and the digest."""


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
    manifest = load_manifest(make_source(folder))
    shuffle, export = store.manifest.stages["shuffle"], store.manifest.stages["export"]
    listed = {
        f"shards/{shard.name}": FileFacts(shard.positions, shard.bytes, shard.sha256)
        for shard in chain(*manifest.splits.values())
    }
    stated = {
        **{name: getattr(manifest, name) for name in _STATED},
        "splits": {split: manifest.positions(split) for split in manifest.splits},
        "shards": {split: len(shards) for split, shards in manifest.splits.items()},
        "digest": manifest.digest,
        "files": listed,
    }
    files = {name: f for name, f in store.manifest.files_in("shards").items() if name.endswith(".tar")}
    lineage = {**export, **shuffle, "board_size": store.manifest.board_size, "files": files}
    differing = [name for name, value in stated.items() if lineage[name] != value]
    if differing or export["splits"] != shuffle["splits"]:
        reason = "the shard manifest and the manifest of the store differ"
        raise VerifyError(reason, path=folder, found=", ".join(differing or ["splits"]))
    progress.begin("compare shards", export["positions"], "positions")
    targets, with_policy = store.manifest.targets_of("shuffled"), any(shuffle["policies"].values())
    if manifest.fields != block_fields(manifest.board_size, with_policy, targets):
        raise VerifyError("the shard manifest lists wrong fields", path=folder, found=list(manifest.fields))
    schema = positions_schema(manifest.board_size, targets)
    rows = _sorted_rows(store, options) if store.manifest.removed_buckets else _bucket_rows(store, schema)
    with closing(rows):  # if a check fails, the temporary files of the sort are removed at once
        reader = _RowReader(rows, schema)
        for split in SPLITS:
            for number, shard in enumerate(manifest.splits.get(split, [])):
                path = folder / shard.name
                for key, count, found in _blocks(path, number, shard, manifest):
                    table = reader.take(count)
                    if table.num_rows != count or not _is_equal(found, table, with_policy, targets):
                        raise _differs(path, key)
                    progress.advance(count)
    return f"{len(listed):,} shards contain the shuffled positions in the same order, with equal fields"


def _is_equal(found: Block, table: pa.Table, with_policy: bool, targets: Sequence[str]) -> bool:
    """Return whether a block has the values of its shuffled rows.

    Types, shapes and bytes are compared, so that a NaN equals itself and -0.0 differs from 0.0.
    """
    # Rows with policies differ, though the manifest of the store records none.
    with_policy = with_policy or table["policy"].null_count < table.num_rows
    expected = columns_to_block(table, with_policy, targets)
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape, found[name].tobytes())
        == (array.dtype, array.shape, array.tobytes())
        for name, array in expected.items()
    )


def _bucket_rows(store: Store, schema: pa.Schema) -> Generator[pa.RecordBatch]:
    """Yield the rows of all buckets, in order."""
    for split in SPLITS:
        yield from read_rows(store.rows(f"shuffled/{split}"), schema)


def _sorted_rows(store: Store, options: VerifyOptions) -> Generator[pa.RecordBatch]:
    """Yield the rows of the removed buckets, in order: the positions are sorted again."""
    lineage = store.manifest.stages["shuffle"]
    again = ShuffleOptions(
        **asdict(recorded_selection(store)),
        seed=lineage["seed"],
        # The largest split has the number of buckets of the option; the other numbers follow from it.
        buckets=max(lineage["buckets"].values()),
        memory=options.memory,
        threads=options.threads,
    )
    with temporary_folder("sorted") as folder:
        prepared = prepare(store, again, folder, None, default_workers())
        if prepared.selection.rows != lineage["splits"]:
            raise VerifyError("the shards have other positions than the store", path=store.path)
        # As many passes as the free disk requires; their rows are the same as those of one pass.
        for part in prepared.parts(disk_usage(folder).free):
            with closing(prepared.sort.read(part)) as tables:
                for _, table in tables:
                    yield from table.to_batches()


def _blocks(
    path: AnyPath, number: int, shard: ShardEntry, manifest: ShardManifest
) -> Iterator[tuple[str, int, Block]]:
    """Yield the key, the number of positions and the members of each block of a shard.

    Raises:
        VerifyError: The numbers of positions, the keys of blocks or the offsets are wrong.
        StoreError: A block contains invalid values.
    """
    blocks = read_blocks(path)
    size = manifest.block_size
    for first, stated in zip(range(0, shard.positions, size), shard.offsets, strict=True):
        # A missing block is reported as one that differs.
        key, found, offset = next(blocks, ("", Block(), 0))
        # Before the comparison, because this error names the invalid value.
        if found:
            check_block(found, path, key)
        if key != (expected := f"{(number * manifest.shard_size + first) // size:06d}"):
            raise _differs(path, expected)
        if stated != offset:
            reason, record = "the shard manifest has wrong offsets", f"block {key}"
            raise VerifyError(reason, path=path, record=record, found=stated, expected=offset)
        yield key, min(size, shard.positions - first), found
    if next(blocks, None) is not None:
        raise VerifyError("the shard contains more positions than the shard manifest records", path=path)


def _differs(path: AnyPath, key: str) -> VerifyError:
    return VerifyError("a block differs from the shuffled positions", path=path, record=f"block {key}")


class _RowReader:
    """Reads a stream of rows in parts of any size."""

    def __init__(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
        self._batches = batches
        self._schema = schema
        self._rest: pa.RecordBatch | None = None

    def take(self, rows: int) -> pa.Table:
        """Return the next rows, or fewer at the end."""
        parts = []
        while rows > 0 and (batch := self._rest or next(self._batches, None)) is not None:
            self._rest = batch.slice(rows) if batch.num_rows > rows else None
            parts.append(batch.slice(0, rows))
            rows -= batch.num_rows
        return pa.Table.from_batches(parts, self._schema).combine_chunks()
