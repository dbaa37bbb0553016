"""Verification of the shuffle: the rows of each bucket, their order, and the quality. Read-only.

The expected buckets are computed again from the seed, the options and the number of buckets in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyarrow as pa

from hexdata.errors import VerifyError
from hexdata.order import derive_key, sort_key
from hexdata.quality import Figure, Quality
from hexdata.schema import SPLITS, positions_schema
from hexdata.selection import Selection, SelectionOptions, select
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.columns import select_sql
from hexdata.store.integrity import BUCKETS_REMOVED
from hexdata.store.parquet import open_parquet
from hexdata.store.session import DuckDBPyConnection, duckdb_session, read_parquet_sql
from hexdata.temporary import temporary_folder
from hexdata.verify.options import VerifyOptions

__all__ = ["check_order", "check_quality", "check_rows", "open_placement"]

_BucketKey = tuple[str, int]
"""Split and number of a bucket."""
_BucketDigest = tuple[int, int, int, int]
"""Rows of a bucket, the sum and the xor of the digests of its rows, and the number of rows with a policy."""
_NO_ROWS: Final = (0, 0, 0, 0)


def check_rows(store: Store, options: VerifyOptions) -> str:
    """Check that each bucket contains its rows, each once, with every column unchanged.

    If the buckets were removed, only the numbers in the manifest are checked.

    The rows of each bucket are compared as a multiset, by the sum and the xor of a hash of each complete row.
    DuckDB's hash may change between versions; here, both sides are computed in the same process.

    Returns:
        The detail of the check.

    Raises:
        VerifyError: A bucket has other rows, or the manifest states other splits, buckets or options.
    """
    lineage = store.manifest.stages["shuffle"]
    _check_bucket_names(store)
    removed = store.manifest.removed_buckets
    with open_placement(store, options) as (con, selection, query):
        for name, counted in (("splits", selection.rows), ("left_out", selection.left_out)):
            if counted != lineage[name]:
                raise VerifyError(
                    f"the manifest records wrong {name} of the shuffle", found=lineage[name], expected=counted
                )
        columns = positions_schema(store.manifest.board_size or 1, selection.targets)
        only_counted = "0::UBIGINT AS digest, policy IS NOT NULL AS has_policy"
        values = only_counted if removed else _digest_sql(columns)
        expected = _digests(con, f"SELECT split, bucket, {values} FROM ({query})")
        if removed:
            found = {
                key: (removed[name].rows, *digest[1:])
                for key, digest in expected.items()
                if (name := _bucket_name(*key)) in removed
            }
        else:
            found = _digests(con, _found_sql(store, columns))
    for split, bucket in sorted(expected.keys() | found.keys()):
        digest, correct = found.get((split, bucket), _NO_ROWS), expected.get((split, bucket), _NO_ROWS)
        if digest != correct:
            same_count = ", changed or from other buckets" if digest[0] == correct[0] else ""
            raise VerifyError(
                "the bucket contains wrong rows",
                path=store.path / _bucket_name(split, bucket),
                found=f"{digest[0]:,} rows{same_count}",
                expected=f"{correct[0]:,} rows",
                hint="Run `hexdata shuffle` again.",
            )
    policies = dict.fromkeys(lineage["buckets"], 0)
    for (split, _), (*_, count) in found.items():
        policies[split] += count
    if lineage.get("policies", policies) != policies:
        raise VerifyError(
            "the manifest records wrong policies of the shuffle",
            found=lineage["policies"],
            expected=policies,
            hint="Run `hexdata shuffle` with another seed.",
        )
    rows = sum(digest[0] for digest in found.values())
    if removed:
        return f"{BUCKETS_REMOVED}; their {rows:,} rows are compared with the shards"
    return f"{rows:,} rows, each exactly once, in the correct bucket, with all columns unchanged"


@contextmanager
def open_placement(
    store: Store, options: VerifyOptions
) -> Iterator[tuple[DuckDBPyConnection, Selection, str]]:
    """Select the positions of the shuffle again, and assign them to their buckets.

    Args:
        store: The store.
        options: Limits of memory and threads.

    Yields:
        The session, the selection, and the query for the rows with their buckets.
    """
    lineage = store.manifest.stages["shuffle"]
    with (
        temporary_folder("placement") as folder,
        duckdb_session(**options.session(store.path)._asdict(), store=store.path) as con,
    ):
        selection = select(store, _options(store), lineage["seed"], con, folder)
        yield con, selection, selection.assign_buckets(lineage["buckets"], con, folder)


def _options(store: Store) -> SelectionOptions:
    options = store.manifest.stages["shuffle"]["choices"]
    try:
        return SelectionOptions(**options)
    except (AttributeError, TypeError) as error:  # for example, a number where text is expected
        raise VerifyError("the manifest records shuffle options of a wrong type", found=options) from error


def _check_bucket_names(store: Store) -> None:
    """Check that each split has the stated number of buckets, numbered from 0.

    Raises:
        VerifyError: A split has other buckets.
    """
    for split, count in store.manifest.stages["shuffle"]["buckets"].items():
        names = list(store.manifest.buckets(split))
        if names != [_bucket_name(split, number) for number in range(count)]:
            raise VerifyError(
                f"the split {split} has other buckets than the manifest records",
                found=f"{len(names)} files",
                expected=f"{count} files, bucket-000000.parquet and so on",
            )


def _bucket_name(split: str, bucket: int) -> str:
    return f"shuffled/{split}/bucket-{bucket:06d}.parquet"


def _digest_sql(columns: pa.Schema) -> str:
    """Return an SQL expression for the digest of a row. The length distinguishes an empty list from null.

    The signs of floats are hashed separately, because DuckDB's hash of -0.0 is that of 0.0.
    """
    names = [f'"{name}"' for name in columns.names]
    signs = [f'signbit("{field.name}")' for field in columns if pa.types.is_floating(field.type)]
    signs.append("[signbit(item.probability) FOR item IN policy]")
    return f"hash({', '.join([*names, 'len(policy)', *signs])}) AS digest, policy IS NOT NULL AS has_policy"


def _found_sql(store: Store, columns: pa.Schema) -> str:
    return " UNION ALL ".join(
        f"""SELECT {SPLITS.index(split)} AS split,
            regexp_extract(filename, 'bucket-(\\d+)\\.parquet$', 1)::UINTEGER AS bucket,
            {_digest_sql(columns)}
            FROM ({_bucket_rows_sql(store, files)})"""
        for split in SPLITS
        if (files := store.files(f"shuffled/{split}"))
    )


def _bucket_rows_sql(store: Store, files: list[AnyPath]) -> str:
    read = read_parquet_sql(files, row_location=True)
    return select_sql("shuffled", store.manifest, lambda _: read, added=["filename"])


def _digests(con: DuckDBPyConnection, query: str) -> dict[_BucketKey, _BucketDigest]:
    rows = con.sql(f"""
        SELECT split, bucket, count(*), sum(digest::HUGEINT), bit_xor(digest), count_if(has_policy)
        FROM ({query}) GROUP BY split, bucket
    """).fetchall()
    return {
        (SPLITS[split], bucket): (count, int(total), xor, int(policies))
        for split, bucket, count, total, xor, policies in rows
    }


def check_order(store: Store) -> str:
    """Check that the sort keys ascend strictly within each bucket.

    Returns:
        The detail of the check.

    Raises:
        VerifyError: The keys of a bucket do not ascend.
    """
    lineage = store.manifest.stages["shuffle"]
    key = derive_key(lineage["seed"], "shuffle")
    for split in lineage["buckets"]:
        for path in store.files(f"shuffled/{split}"):
            last = -1
            with open_parquet(path) as file:
                for batch in file.iter_batches(columns=["position_id"]):
                    keys = sort_key(batch.column(0).to_numpy(), key)
                    if int(keys[0]) <= last or (keys[1:] <= keys[:-1]).any():
                        raise VerifyError("the rows of the bucket are not sorted by key", path=path)
                    last = int(keys[-1])
    return f"the rows of {sum(lineage['buckets'].values()):,} buckets are sorted by key"


def check_quality(quality: Quality | None) -> str:
    """Check that no figure of the shuffle deviates from a random order by more than its limit.

    Args:
        quality: The measured quality, or None if the store has no training split.

    Returns:
        The detail of the check.

    Raises:
        VerifyError: A figure deviates too far; the error names all such figures.
    """
    if quality is None:
        return "no train split to measure"
    failed = [figure for figure in quality.figures if not figure.ok]
    if failed:
        raise VerifyError(
            f"the shuffle differs from a random order ({quality.reference})",
            found="; ".join(dict.fromkeys(map(_describe, failed))),
            hint="Shuffle with another --seed. If that fails too, check how the positions of the store are "
            "assigned to games.",
        )
    judged = quality.conclusive
    if not judged:
        return f"{quality.positions:,} positions in the {quality.split} split: too few to judge"
    furthest = max(abs(figure.z or 0.0) for figure in judged)
    return (
        f"{len(judged)} figures of the {quality.split} split agree with a random order, within "
        f"{furthest:.1f} s.d."
    )


def _describe(figure: Figure) -> str:
    if figure.z is None or figure.expected is None or figure.deviation is None:
        return f"{figure.title}: {figure.after:.4g}, {figure.note}"
    return (
        f"{figure.title}: {figure.after:.4g}, expected {figure.expected:.4g} ± {figure.deviation:.2g}: "
        f"{figure.z:+.1f} s.d."
    )
