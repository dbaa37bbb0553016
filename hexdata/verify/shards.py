"""The shards against the shuffled positions: the same order, every field the same. Only reads."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from hexdata.errors import VerifyError
from hexdata.formats.shard_manifest import ShardEntry, ShardManifest
from hexdata.formats.shards import Block, block_samples, columns_to_block, read_placed_blocks
from hexdata.progress import Progress
from hexdata.schema import positions_schema
from hexdata.store import Store
from hexdata.store.parquet import Rows, read_rows, regroup

__all__ = ["check_shards"]


def check_shards(store: Store, progress: Progress) -> str:
    """The shards hold the shuffled positions: the same order, each field of each one the same."""
    folder = store.path / "shards"
    manifest = ShardManifest.load(folder)
    schema = positions_schema(manifest.board_size)
    shuffle, export = store.manifest.stages["shuffle"], store.manifest.stages["export"]
    stated = {
        "seed": manifest.seed,
        "splits": {split: manifest.positions(split) for split in manifest.splits},
        "shards": {split: len(shards) for split, shards in manifest.splits.items()},
        "digest": manifest.digest,
    }
    lineage = {**export, "seed": shuffle["seed"], "splits": shuffle["splits"]}
    if not stated.items() <= lineage.items() or export["splits"] != shuffle["splits"]:
        raise VerifyError("the shard manifest contradicts the store's", path=folder, found=stated)
    progress.begin("compare shards", export["positions"], "positions")
    for split, shards in manifest.splits.items():
        files = store.manifest.files_in(f"shuffled/{split}")
        sizes = tuple(((store.path / name).resolve(), f.rows) for name, f in files.items())
        start = 0
        for shard in shards:
            rows = Rows(sizes, start, start + shard.positions)
            size = manifest.block_size if manifest.layout == "blocks" else 1
            tables = regroup(read_rows(rows, schema), schema, size)
            _compare(store, progress, shard, start // manifest.block_size, tables, manifest)
            start += shard.positions
    count = sum(len(shards) for shards in manifest.splits.values())
    return f"{count:,} shards hold the shuffled positions in their order, field by field"


def _compare(
    store: Store,
    progress: Progress,
    shard: ShardEntry,
    first: int,
    tables: Iterator[pa.Table],
    manifest: ShardManifest,
) -> None:
    """Hold one shard against its rows: keys, fields, and where the manifest says that they begin."""
    path = store.path / "shards" / shard.name
    facts = store.manifest.files.get(f"shards/{shard.name}")
    if facts is None or (facts.rows, facts.bytes, facts.sha256) != (
        shard.positions,
        shard.bytes,
        shard.sha256,
    ):
        raise VerifyError("the two manifests contradict each other", path=path)
    blocks = read_placed_blocks(path)
    for number, table in enumerate(tables):
        key, found, places = next(blocks, ("", {}, {}))
        expected = columns_to_block(table, "policy" in found or _has_policy(table))
        name = f"{first + number:06d}"
        if manifest.layout == "samples":
            ((position_id, expected),) = block_samples(expected)
            name = f"{position_id:09d}"
        if key != name or not _equal(found, expected):
            raise VerifyError(
                "a block differs from the shuffled positions", path=path, record=f"block {name}"
            )
        for column, offsets in shard.offsets.items():
            if places.get(column) != offsets[number]:
                raise VerifyError(
                    f"{column} begins elsewhere",
                    path=path,
                    record=f"block {name}",
                    found=f"byte {places.get(column)}",
                    expected=f"byte {offsets[number]}, as the manifest says",
                )
        progress.advance(table.num_rows)
    if next(blocks, None) is not None:
        raise VerifyError("the shard holds more than it should", path=path)


def _has_policy(table: pa.Table) -> bool:
    return bool(table["policy"].null_count < table.num_rows)


def _equal(found: Block, expected: Block) -> bool:
    """Compare type, shape and bytes: a NaN equals itself, and -0.0 is not 0.0."""
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape, found[name].tobytes())
        == (array.dtype, array.shape, array.tobytes())
        for name, array in expected.items()
    )
