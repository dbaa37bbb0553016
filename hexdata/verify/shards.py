"""Verification of the shards against the shuffled positions, field by field. Read-only."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from shutil import disk_usage
from typing import Any, Final

import pyarrow as pa

from hexdata.errors import VerifyError
from hexdata.progress import Progress
from hexdata.schema import SPLITS, positions_schema
from hexdata.shards.block_check import check_block
from hexdata.shards.blocks import Block, block_fields, columns_to_block
from hexdata.shards.format import ShardWriter, read_blocks
from hexdata.shards.manifest import ShardEntry, ShardManifest
from hexdata.shards.reader import load_manifest
from hexdata.shards.sources import make_source
from hexdata.shuffle import ShuffleOptions
from hexdata.shuffle.stage import prepare
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.files import FileFacts
from hexdata.store.parquet import read_rows, regroup
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
    # If a check fails, the temporary files of the sort are removed at once.
    with closing(_expected_blocks(store, options, manifest, with_policy)) as expected:
        for split in SPLITS:
            for shard in manifest.splits.get(split, []):
                _check_shard(folder / shard.name, shard, expected)
                progress.advance(shard.positions)
    return f"{len(listed):,} shards contain the shuffled positions in the same order, with equal fields"


def _check_shard(path: AnyPath, shard: ShardEntry, expected: Iterator[tuple[str, Block]]) -> None:
    """Compare the blocks of a shard with the next ones that are expected.

    Types, shapes and bytes are compared, so that a NaN equals itself and -0.0 differs from 0.0.

    Raises:
        VerifyError: The blocks, their keys, offsets or digests, or the number of positions differ.
        StoreError: A block contains invalid values.
    """
    blocks, names = read_blocks(path), list[str]()
    # The expected blocks are written once more, for their offsets and digests.
    with Path(os.devnull).open("wb") as nowhere:
        writer = ShardWriter(nowhere)
        for _ in shard.blocks:
            # A missing block is reported as one that differs.
            key, found = next(blocks, ("", Block()))
            # Before the comparison, because this error names the invalid value.
            if found:
                check_block(found, path, key)
            name, block = next(expected, ("", Block()))
            if (key, _contents(found)) != (name, _contents(block)) or not found:
                record = f"block {name or key}"
                raise VerifyError("a block differs from the shuffled positions", path=path, record=record)
            writer.write_block(int(name), block)
            names.append(name)
        writer.close()
    made = writer.entry(shard.name, shard.sha256)
    if made.positions != shard.positions or next(blocks, None) is not None:
        raise VerifyError("the shard has other positions than the shard manifest records", path=path)
    if wrong := [
        name for name, *both in zip(names, made.blocks, shard.blocks, strict=True) if both[0] != both[1]
    ]:
        reason = "the shard manifest has a wrong offset or digest"
        raise VerifyError(reason, path=path, record=f"block {wrong[0]}")


def _contents(block: Block) -> dict[str, tuple[Any, ...]]:
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in block.items()}


def _expected_blocks(
    store: Store, options: VerifyOptions, manifest: ShardManifest, with_policy: bool
) -> Generator[tuple[str, Block]]:
    """Yield the key and the members of each block that the shards must contain."""
    targets = store.manifest.targets_of("shuffled")
    schema = positions_schema(manifest.board_size, targets)
    rows: Iterator[tuple[str, pa.RecordBatch | pa.Table]] = (
        (split, batch) for split in SPLITS for batch in read_rows(store.rows(f"shuffled/{split}"), schema)
    )
    if store.manifest.removed_buckets:
        rows = _sorted_rows(store, options)
    for _, parts in groupby(rows, key=itemgetter(0)):
        tables = regroup(map(itemgetter(1), parts), schema, manifest.block_size)
        for number, table in enumerate(tables):
            yield f"{number:06d}", columns_to_block(table, with_policy, targets)


def _sorted_rows(store: Store, options: VerifyOptions) -> Iterator[tuple[str, pa.Table]]:
    """Yield the split and the rows of the removed buckets, in order: the positions are sorted again."""
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
            with prepared.sort.reading(part) as tables:
                for key, table in tables:
                    yield SPLITS[key >> 32], table
