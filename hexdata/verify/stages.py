"""Checks of the stages after the conversion: the shuffle, its quality, and the shards. Read-only.

The expected buckets are computed again from the seed, the options and the number of buckets in the manifest,
and the bytes of the shards from the shuffled positions.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import chain, groupby
from operator import itemgetter
from shutil import disk_usage
from typing import Any, Final

import pyarrow as pa

from hexdata.errors import VerifyError
from hexdata.order import derive_key, sort_key
from hexdata.progress import Progress
from hexdata.quality import Quality
from hexdata.schema import SPLITS, positions_schema
from hexdata.selection import SelectionOptions, select
from hexdata.shards.blocks import Block, block_fields, columns_to_block
from hexdata.shards.format import ShardWriter
from hexdata.shards.manifest import ShardEntry, ShardManifest
from hexdata.shards.reader import load_manifest
from hexdata.shards.sources import make_source
from hexdata.shuffle import ShuffleOptions
from hexdata.shuffle.sort import Bucket
from hexdata.shuffle.stage import prepare
from hexdata.storage import AnyPath
from hexdata.storage.local import HashingFile
from hexdata.store import Store
from hexdata.store.files import FileFacts
from hexdata.store.integrity import BUCKETS_REMOVED
from hexdata.store.parquet import open_parquet, read_rows, regroup
from hexdata.store.session import DuckDBPyConnection, duckdb_session, read_parquet_sql
from hexdata.system import default_workers
from hexdata.temporary import temporary_folder
from hexdata.text import count_of
from hexdata.verify.tables import VerifyOptions, require_none

_Digest = tuple[int, int, int, int]
"""Rows of a bucket, the sum and the xor of the digests of its rows, and the number of rows with a policy."""
_NO_ROWS: Final = (0, 0, 0, 0)
# With the same seed, the shuffle counts as complete and is not written again.
_HINT: Final = "Run `hexdata shuffle` with another seed."
_MANIFEST_MEMORY: Final = 5
"""Bytes of memory for each byte of the shard manifest: measured for one of 1.9 MB."""
_STATED: Final = ("board_size", "block_size", "shard_size", "seed", "order_version")
"""Values that both the shard manifest and the store's manifest state, besides counts and the digest."""


def check_stage(store: Store, stage: str) -> str:
    """Check that a stage was run on the current content of the store and lost no rows.

    Raises:
        StoreError: The content of the store has changed since the stage was run.
        VerifyError: The positions written, rejected and excluded do not add up to those read.
    """
    store.require_stage(stage)
    from_store = stage in ("shuffle", "pickles-original")
    # The other stages read the shuffled positions, whose number may be lower.
    before = store.manifest.counts if from_store else store.manifest.stages["shuffle"]
    lineage = store.manifest.stages[stage]
    left_out = sum(lineage.get("left_out", {}).values())  # only a shuffle can leave out positions
    read, accounted = before["positions"], lineage["positions"] + lineage["rejected"] + left_out
    if read != accounted:
        reason = f"the output of the {stage} stage does not account for all positions"
        raise VerifyError(reason, found=f"{accounted:,}", expected=f"{read:,}")
    excluded = f" + {left_out:,} excluded by options" if left_out else ""
    return f"{read:,} = {lineage['positions']:,} + {lineage['rejected']:,}{excluded}"


def check_rows(store: Store, limits: dict[str, Any]) -> str:
    """Check that each bucket contains its rows, each once, with every column unchanged.

    If the buckets were removed, only the numbers in the manifest are checked.

    The rows of each bucket are compared as a multiset, by the sum and the xor of a hash of each complete row.
    DuckDB's hash may change between versions; here, both sides are computed in the same process.

    Args:
        store: The store to check, with the stage shuffle.
        limits: Memory and threads of the DuckDB session.

    Returns:
        The detail of the check.

    Raises:
        VerifyError: A bucket has other rows, or the manifest states other splits, buckets or options.
    """
    lineage, removed = store.manifest.stages["shuffle"], store.manifest.removed_buckets
    if lineage["buckets"].keys() != lineage["splits"].keys():
        reason = "the manifest records buckets of other splits than it has positions of"
        raise VerifyError(reason, found=lineage["buckets"], expected=lineage["splits"])

    def require(name: str, counted: object) -> None:
        if lineage[name] != counted:
            reason = f"the manifest records wrong {name} of the shuffle"
            raise VerifyError(reason, found=lineage[name], expected=counted, hint=_HINT)

    every = (Bucket(split, n).name for split, count in lineage["buckets"].items() for n in range(count))
    expected = dict.fromkeys(every, _NO_ROWS)
    found = dict.fromkeys(store.manifest.buckets(), _NO_ROWS)
    with temporary_folder("placement") as folder, duckdb_session(**limits, store=store.path) as con:
        options, seed = recorded_selection(store), lineage["seed"]
        selection = select(store, options, seed, lambda _: lineage["buckets"], con, folder)
        require("splits", selection.rows)
        require("left_out", selection.left_out)
        columns = positions_schema(store.manifest.board_size or 1, selection.targets)
        values = "0::UBIGINT AS digest" if removed else _digest_sql(columns)
        split = f"{[*SPLITS]}[split + 1] AS split"  # lists start at 1 in DuckDB
        expected |= _digests(con, f"SELECT {split}, bucket, policy, {values} FROM ({selection.sql})")
        if files := store.files("shuffled"):
            names = "regexp_extract(filename, '([a-z]+).bucket-([0-9]+)[.]parquet$', ['split', 'bucket'])"
            rows = f"SELECT *, unnest({names}) FROM {read_parquet_sql(files, row_location=True)}"
            found |= _digests(con, f"SELECT split, bucket::BIGINT AS bucket, policy, {values} FROM ({rows})")
    if removed:
        found = {name: (facts.rows, *expected.get(name, _NO_ROWS)[1:]) for name, facts in removed.items()}
    policies = dict.fromkeys(lineage["buckets"], 0)  # their number decides whether shards have policies
    for name, (*_, count) in expected.items():
        policies[name.split("/")[1]] += count
    require("policies", policies)
    wrong = list[VerifyError]()
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            changed = f"{found.get(name, _NO_ROWS)[0]:,} rows, changed or from other buckets"
            right = f"{expected.get(name, _NO_ROWS)[0]:,} rows"
            reason, path = "the bucket contains wrong rows", store.path / name
            wrong.append(VerifyError(reason, path=path, found=changed, expected=right, hint=_HINT))
    require_none(wrong, "buckets contain wrong rows", store.path)
    total = sum(digest[0] for digest in found.values())
    if removed:
        return f"{BUCKETS_REMOVED}; their {total:,} rows are compared with the shards"
    return f"{total:,} rows, each exactly once, in the correct bucket, with all columns unchanged"


def recorded_selection(store: Store) -> SelectionOptions:
    """Return the selection options that the manifest records of the shuffle.

    Raises:
        VerifyError: They are of a wrong type, or unknown.
    """
    options = store.manifest.stages["shuffle"]["choices"]
    try:
        return SelectionOptions(**options)
    except (AttributeError, TypeError) as error:  # an unknown name, or a number where text is expected
        reason = "the manifest records unknown shuffle options, or values of a wrong type"
        raise VerifyError(reason, found=options) from error


def _digest_sql(columns: pa.Schema) -> str:
    """Return an SQL column with the digest of a row. The length distinguishes an empty list from null.

    The signs of floats are hashed separately, because DuckDB's hash of -0.0 is that of 0.0.
    """
    hashed = [f'"{name}"' for name in columns.names]
    hashed += [f'signbit("{field.name}")' for field in columns if pa.types.is_floating(field.type)]
    return f"hash({', '.join(hashed)}, len(policy), [signbit(i.probability) FOR i IN policy]) AS digest"


def _digests(con: DuckDBPyConnection, query: str) -> dict[str, _Digest]:
    """Return the digest of each bucket with rows by its name.

    Args:
        con: The session.
        query: A query for the split, bucket, policy and digest of each row.
    """
    # A row that occurs twice has no effect on the xor, but on the sum, so both are compared.
    rows = con.sql(f"""
        SELECT split, bucket, count(*), sum(digest::HUGEINT), bit_xor(digest), count(policy)
        FROM ({query}) GROUP BY split, bucket
    """).fetchall()
    return {
        Bucket(split, bucket).name: (count, total, xor, policies)
        for split, bucket, count, total, xor, policies in rows
    }


def check_order(store: Store) -> str:
    """Check that the sort keys ascend strictly within each bucket; return the detail of the check.

    Raises:
        VerifyError: The keys of a bucket do not ascend.
    """
    key, buckets = derive_key(store.manifest.stages["shuffle"]["seed"], "shuffle"), store.files("shuffled")
    for path in buckets:
        last = -1
        with open_parquet(path) as file:
            for batch in file.iter_batches(columns=["position_id"]):
                keys = sort_key(batch.column(0).to_numpy(), key)
                # Python integers, since -1 is not a uint64.
                if int(keys[0]) <= last or (keys[1:] <= keys[:-1]).any():
                    raise VerifyError("the rows of the bucket are not sorted by key", path=path)
                last = int(keys[-1])
    return f"the rows of {count_of(len(buckets), 'bucket')} are sorted by key"


def check_quality(quality: Quality | None) -> str:
    """Check that no figure deviates from a random order by more than its limit; return the detail.

    Args:
        quality: The measured quality, or None if the store has no training split.

    Raises:
        VerifyError: A figure deviates too far; the error names all such figures.
    """
    if quality is None:
        return "no train split to measure"
    if failed := [figure for figure in quality.figures if not figure.ok]:
        reason = f"the shuffle differs from a random order ({quality.reference})"
        hint = "Shuffle with another --seed. If that fails too, check the games of the positions."
        # A failed lag may also be the worst one.
        found = {
            f"{f.title}: {f.after:.4g}, {f.note if f.z is None else f'expected {f.expected:.4g}'}": None
            for f in failed
        }
        raise VerifyError(reason, found="; ".join(found), hint=hint)
    if not (judged := quality.conclusive):
        return f"{quality.positions:,} positions in the {quality.split} split: too few to judge"
    furthest = max(abs(figure.z or 0.0) for figure in judged)
    return f"{len(judged)} figures of {quality.split} agree with a random order, within {furthest:.1f} s.d."


# --- shards ---------------------------------------------------------------------------------------------


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
        StoreError: The shard manifest cannot be read.
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
    wrong, per_shard = list[VerifyError](), manifest.shard_size // manifest.block_size
    # After an error, the temporary files of the sort are removed at once.
    with closing(_expected_blocks(store, options, manifest, with_policy)) as expected:
        for (split, index), blocks in groupby(expected, key=lambda each: (each[0], each[1] // per_shard)):
            shard = manifest.splits[split][index]
            wrong += _find_difference(folder / shard.name, shard, blocks)
            progress.advance(shard.positions)
    require_none(wrong, "shards differ from the shuffled positions", folder)
    return f"{len(listed):,} shards contain the shuffled positions in the same order, with equal fields"


def _find_difference(
    path: AnyPath, shard: ShardEntry, expected: Iterable[tuple[str, int, Block]]
) -> Iterator[VerifyError]:
    """Yield an error if a shard, whose digest is known, has other bytes than one of the expected blocks."""
    numbers = list[int]()
    with HashingFile(io.FileIO(os.devnull, "w")) as nowhere:
        writer = ShardWriter(nowhere)
        for _, number, block in expected:
            writer.write_block(number, block)
            numbers.append(number)
        writer.close()
        made = writer.entry(shard.name, nowhere.sha256)
    if made != shard:
        pairs = zip(numbers, made.blocks, shard.blocks, strict=False)
        wrong = [f"block {number:06d}" for number, one, other in pairs if one != other]
        reason = "the shard has other bytes than a shard of the shuffled positions"
        yield VerifyError(reason, path=path, record=wrong[0] if wrong else None)


def _expected_blocks(
    store: Store, options: VerifyOptions, manifest: ShardManifest, with_policy: bool
) -> Generator[tuple[str, int, Block]]:
    """Yield the split, the number and the members of each block that the shards must contain."""
    targets = store.manifest.targets_of("shuffled")
    schema = positions_schema(manifest.board_size, targets)
    rows: Iterator[tuple[str, pa.RecordBatch | pa.Table]] = (
        (split, batch) for split in SPLITS for batch in read_rows(store.rows(f"shuffled/{split}"), schema)
    )
    if store.manifest.removed_buckets:
        rows = _sorted_rows(store, options)
    for split, parts in groupby(rows, key=itemgetter(0)):
        tables = regroup(map(itemgetter(1), parts), schema, manifest.block_size)
        for number, table in enumerate(tables):
            yield split, number, columns_to_block(table, with_policy, targets)


def sort_memory(store: Store, options: VerifyOptions) -> int:
    """Return the bytes of memory for sorting the rows of removed buckets, beside the shard manifest."""
    shards = store.manifest.files_in("shards")
    size = sum(facts.bytes for name, facts in shards.items() if name.endswith(".json"))
    return options.memory - _MANIFEST_MEMORY * size


def _sorted_rows(store: Store, options: VerifyOptions) -> Iterator[tuple[str, pa.Table]]:
    """Yield the split and the rows of the removed buckets, in order: the positions are sorted again."""
    lineage = store.manifest.stages["shuffle"]
    again = ShuffleOptions(
        **asdict(recorded_selection(store)),
        seed=lineage["seed"],
        # The largest split has the number of buckets of the option; the other numbers follow from it.
        buckets=max(lineage["buckets"].values()),
        memory=sort_memory(store, options),
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
