"""Checks of the shuffle: the rows of each bucket, their order, and the quality. Read-only.

The expected buckets are computed again from the seed, the options and the number of buckets in the manifest.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from hexdata.errors import VerifyError
from hexdata.order import derive_key, sort_key
from hexdata.quality import Quality
from hexdata.schema import SPLITS, positions_schema
from hexdata.selection import SelectionOptions, select
from hexdata.store import Store
from hexdata.store.integrity import BUCKETS_REMOVED
from hexdata.store.parquet import open_parquet
from hexdata.store.session import DuckDBPyConnection, duckdb_session, read_parquet_sql
from hexdata.temporary import temporary_folder

_Digest = tuple[int, int, int, int]
"""Rows of a bucket, the sum and the xor of the digests of its rows, and the number of rows with a policy."""
_NO_ROWS: Final = (0, 0, 0, 0)
# With the same seed, the shuffle counts as complete and is not written again.
_HINT: Final = "Run `hexdata shuffle` with another seed."


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
    stated = {
        _bucket_name(split, number): _NO_ROWS
        for split, count in lineage["buckets"].items()
        for number in range(count)
    }
    found = dict.fromkeys(store.manifest.buckets(), _NO_ROWS)
    if lineage["buckets"].keys() != lineage["splits"].keys():
        reason = "the manifest records buckets of other splits than it has positions of"
        raise VerifyError(reason, found=lineage["buckets"], expected=lineage["splits"])
    with temporary_folder("placement") as folder, duckdb_session(**limits, store=store.path) as con:
        options, seed = recorded_selection(store), lineage["seed"]
        selection = select(store, options, seed, lambda _: lineage["buckets"], con, folder)
        for name, counted in (("splits", selection.rows), ("left_out", selection.left_out)):
            if counted != lineage[name]:
                reason = f"the manifest records wrong {name} of the shuffle"
                raise VerifyError(reason, found=lineage[name], expected=counted)
        columns = positions_schema(store.manifest.board_size or 1, selection.targets)
        values = "0::UBIGINT AS digest" if removed else _digest_sql(columns)
        expected = stated | _digests(con, f"SELECT split, bucket, policy, {values} FROM ({selection.sql})")
        if removed:
            found = {name: (facts.rows, *expected.get(name, _NO_ROWS)[1:]) for name, facts in removed.items()}
        else:
            for split, name in enumerate(SPLITS):
                if files := store.files(f"shuffled/{name}"):
                    number = "regexp_extract(filename, '(\\d+)\\.parquet$', 1)::UINTEGER AS bucket"
                    rows = f"FROM {read_parquet_sql(files, row_location=True)}"
                    found |= _digests(con, f"SELECT {split} AS split, {number}, policy, {values} {rows}")
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            rows = f"{found.get(name, _NO_ROWS)[0]:,} rows, changed or from other buckets"
            right = f"{expected.get(name, _NO_ROWS)[0]:,} rows"
            reason, path = "the bucket contains wrong rows", store.path / name
            raise VerifyError(reason, path=path, found=rows, expected=right, hint=_HINT)
    policies = dict.fromkeys(lineage["buckets"], 0)
    for name, (*_, count) in found.items():
        policies[name.split("/")[1]] += count
    # This number decides whether shards have policies.
    if lineage["policies"] != policies:
        reason = "the manifest records wrong policies of the shuffle"
        raise VerifyError(reason, found=lineage["policies"], expected=policies, hint=_HINT)
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


def _bucket_name(split: str, bucket: int) -> str:
    return f"shuffled/{split}/bucket-{bucket:06d}.parquet"


def _digest_sql(columns: pa.Schema) -> str:
    """Return an SQL expression for the digest of a row. The length distinguishes an empty list from null.

    The signs of floats are hashed separately, because DuckDB's hash of -0.0 is that of 0.0.
    """
    hashed = [f'"{name}"' for name in columns.names]
    hashed += [f'signbit("{field.name}")' for field in columns if pa.types.is_floating(field.type)]
    return f"hash({', '.join(hashed)}, len(policy), [signbit(i.probability) FOR i IN policy]) AS digest"


def _digests(con: DuckDBPyConnection, query: str) -> dict[str, _Digest]:
    """Return the digest of each bucket with rows by its name.

    Args:
        con: The session.
        query: A query for the split (its index in ``SPLITS``), bucket, policy and digest of each row.
    """
    # A row that occurs twice has no effect on the xor, but on the sum, so both are compared.
    rows = con.sql(f"""
        SELECT split, bucket, count(*), sum(digest::HUGEINT), bit_xor(digest), count(policy)
        FROM ({query}) GROUP BY split, bucket
    """).fetchall()
    return {
        _bucket_name(SPLITS[split], bucket): (count, total, xor, policies)
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
    return f"the rows of {len(buckets):,} buckets are sorted by key"


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
