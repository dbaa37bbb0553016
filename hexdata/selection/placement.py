"""Assignment of positions to buckets: by position, by game or by stratum.

Each function returns a query for the selected positions with three more columns: ``split`` (index into
``SPLITS``), ``bucket`` (UINTEGER) and ``sort_key`` (UBIGINT).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import ConfigError
from hexdata.order import derive_key, sort_key_sql
from hexdata.schema import SPLITS
from hexdata.selection.expression import Expression
from hexdata.selection.groups import ValueGroup, count_groups, group_table, grouped_sql, same_group_sql
from hexdata.selection.ranks import cell_shifts, keys_at_ranks, segments
from hexdata.selection.tables import StoreTables, write_table
from hexdata.storage import AnyPath
from hexdata.store.session import DuckDBPyConnection

__all__ = ["assign_games", "assign_positions", "assign_strata"]

MAX_STRATUM_PARTS: Final = 1 << 20
"""Maximum size of the table of strata and buckets, which is joined to every position."""
_LAST_KEY: Final = (1 << 64) - 1


def assign_positions(chosen: str, key: int, buckets: dict[int, int]) -> str:
    """Assign each position by its sort key; the number of buckets does not change the order."""
    return _by_range(chosen, key, "sort_key", buckets)


def assign_games(chosen: str, key: int, game_key: int, buckets: dict[int, int]) -> str:
    """Assign each game by the game's own key, and each position without a game by its sort key."""
    return _by_range(chosen, key, f"coalesce({sort_key_sql('game_id', game_key)}, sort_key)", buckets)


def _by_range(chosen: str, key: int, bucket_key: str, buckets: dict[int, int]) -> str:
    """Assign each position to the bucket whose key range contains ``bucket_key``.

    Args:
        chosen: Query for positions with ``split_index``.
        key: Key of ``sort_key``.
        bucket_key: SQL expression of type UBIGINT.
        buckets: Number of buckets by split, an index into ``SPLITS``.
    """
    count = " ".join(f"WHEN {split} THEN {number}" for split, number in buckets.items())
    # Bucket i begins at key floor(i · 2^64 / B), so it is the largest i with i · 2^64 < (key + 1) · B.
    bucket = f"(({bucket_key})::UHUGEINT + 1) * (CASE split_index {count} END)::UHUGEINT - 1"
    return f"""
        SELECT * RENAME (split_index AS split), (({bucket}) >> 64)::UINTEGER AS bucket
        FROM (SELECT *, {sort_key_sql("position_id", key)} AS sort_key FROM ({chosen}))
    """


def assign_strata(
    con: DuckDBPyConnection,
    tables: StoreTables,
    chosen: str,
    expression: Expression,
    seed: int,
    key: int,
    buckets: dict[int, int],
    folder: AnyPath,
) -> str:
    """Divide the positions of each stratum evenly between the buckets, to within one position.

    The n positions of a stratum are sorted by a separate key. With B buckets, bucket b receives the ranks r
    with floor((b·n + o) / B) <= r < floor(((b + 1)·n + o) / B). The offset o in [0, B) is drawn per stratum,
    so that the remainders of different strata fall into different buckets.

    The separate key is not ``sort_key``, which orders the rows of a bucket. Otherwise each part of a stratum
    would be a range of ``sort_key``, and the start and end of a bucket would contain only some of the strata.

    Args:
        con: Open DuckDB session.
        tables: Tables of the store.
        chosen: Query for positions with ``split_index``.
        expression: The expression whose values define the strata.
        seed: Seed of the shuffle.
        key: Key of ``sort_key``.
        buckets: Number of buckets by split, an index into ``SPLITS``.
        folder: Folder for the lookup tables that the query reads.

    Raises:
        ConfigError: There are too many strata, or too many parts of strata in buckets.
    """
    grouped = f"""
        SELECT *, {sort_key_sql("position_id", derive_key(seed, "strata"))} AS cut_key
        FROM ({grouped_sql(tables, chosen, expression)})
    """
    strata = count_groups(con, grouped, expression)
    cuts = sum(min(buckets[stratum.split], stratum.rows) for stratum in strata)
    if cuts > MAX_STRATUM_PARTS:
        raise ConfigError(
            "too many strata for this number of buckets",
            found=f"{cuts:,} parts of strata in buckets",
            expected=f"at most {MAX_STRATUM_PARTS:,}",
            hint="Use fewer buckets or a coarser expression in stratify_by.",
        )
    shares = [_shares(stratum, buckets[stratum.split], seed) for stratum in strata]
    lows = _lowest_keys(con, grouped, strata, [ranks for _, ranks in shares], folder)
    bits = _cell_bits(len(strata), max(buckets.values()))
    parts = pa.concat_tables(
        _parts(stratum, bucket, low, 64 - bits)
        for stratum, (bucket, _), low in zip(strata, shares, lows, strict=True)
    )
    table = write_table(folder / "strata.parquet", parts)
    return f"""
        SELECT p.* EXCLUDE (group_value, cut_key, cell) RENAME (split_index AS split), t.bucket,
               {sort_key_sql("p.position_id", key)} AS sort_key
        FROM (SELECT *, cut_key >> {64 - bits} AS cell FROM ({grouped})) p
        LEFT JOIN {table} t
        ON {same_group_sql("p", "t")} AND p.cell = t.cell AND p.cut_key BETWEEN t.low AND t.high
    """


def _shares(
    stratum: ValueGroup, buckets: int, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the buckets that receive a part of a stratum, and the first rank of each part."""
    offset = derive_key(seed, "stratify", SPLITS[stratum.split], *stratum.purpose) % buckets
    bounds = (np.arange(buckets + 1, dtype=np.int64) * stratum.rows + offset) // buckets
    used = np.flatnonzero(bounds[1:] > bounds[:-1])
    return used, bounds[used]


def _lowest_keys(
    con: DuckDBPyConnection,
    grouped: str,
    strata: Sequence[ValueGroup],
    ranks: Sequence[npt.NDArray[np.int64]],
    folder: AnyPath,
) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield, for each stratum, the lowest key of each part; the first part starts at key 0."""
    sizes = np.array([stratum.rows for stratum in strata], dtype=np.int64)
    shifted = group_table(strata).append_column("shift", pa.array(cell_shifts(sizes, 64)))
    table = write_table(folder / "strata-groups.parquet", shifted)
    keyed = f"""
        SELECT t.number, p.cut_key AS key, t.shift
        FROM ({grouped}) p JOIN {table} t ON {same_group_sql("p", "t")}
    """
    for low in keys_at_ranks(con, keyed, [r[1:] for r in ranks]):
        yield np.append(np.uint64(0), low)


def _cell_bits(strata: int, buckets: int) -> int:
    """Return the base-2 logarithm of the number of cells: about two per part, limited in total."""
    wanted = (2 * buckets - 1).bit_length()
    return max(1, min(wanted, (MAX_STRATUM_PARTS // strata).bit_length() - 1))


def _parts(
    stratum: ValueGroup, bucket: npt.NDArray[np.int64], low: npt.NDArray[np.uint64], shift: int
) -> pa.Table:
    """Return the key ranges of one stratum, each with its bucket, split at cell boundaries."""
    cell, low, high, which = segments(low, _LAST_KEY, shift)
    count = len(cell)
    return pa.table(
        {
            "split": pa.array(np.full(count, stratum.split, np.uint8)),
            "value": pa.array([stratum.value] * count, pa.string()),
            "cell": pa.array(cell),
            "low": pa.array(low),
            "high": pa.array(high),
            "bucket": pa.array(bucket[which].astype(np.uint32)),
        }
    )
