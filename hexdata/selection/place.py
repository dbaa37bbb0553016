"""Where each position of a selection goes: the bucket of its split, by position, by game or by stratum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import ConfigError
from hexdata.order import derive_key, sort_key_sql
from hexdata.remote import AnyPath
from hexdata.schema import SPLITS
from hexdata.selection.expression import Expression
from hexdata.selection.groups import Group, count_groups, group_table, grouped_sql, same_group_sql
from hexdata.selection.ranks import cell_shifts, keys_at, segments
from hexdata.selection.tables import Tables, write_table
from hexdata.store.session import DuckDBPyConnection

__all__ = ["Placement", "place_games", "place_positions", "place_strata"]

MOST_CUTS: Final = 1 << 20
"""Cuts between buckets that all strata may need together: their table is joined while rows stream past."""
_LAST_KEY: Final = (1 << 64) - 1


@dataclass(frozen=True)
class Placement:
    """The positions that take part, each with its place in the order (split, bucket, sort_key)."""

    sql: str
    tables: Tables

    def rows_sql(self, start: int | None = None, stop: int | None = None) -> str:
        """Return a query for the positions, in no order; only for start <= position_id < stop, if given.

        Their columns, ``split`` (index of ``SPLITS``), ``bucket`` (UINTEGER) and ``sort_key`` (UBIGINT).
        """
        if start is None or stop is None:
            return self.sql
        # Each position takes part by what it is, so that the other files need not even be opened.
        near = self.sql.replace(self.tables.positions, self.tables.positions_between(start, stop))
        return f"SELECT * FROM ({near}) WHERE position_id >= {start} AND position_id < {stop}"


def place_positions(tables: Tables, chosen: str, key: int, buckets: dict[int, int]) -> Placement:
    """Give each position the bucket in whose range its sort key lies: no cut changes the order."""
    return _by_range(tables, chosen, key, "sort_key", buckets)


def place_games(tables: Tables, chosen: str, key: int, game_key: int, buckets: dict[int, int]) -> Placement:
    """Give each game the bucket in whose range its own key lies; a position of no known game goes alone."""
    return _by_range(tables, chosen, key, f"coalesce({sort_key_sql('game_id', game_key)}, sort_key)", buckets)


def _by_range(tables: Tables, chosen: str, key: int, bucket_key: str, buckets: dict[int, int]) -> Placement:
    """Give each position the bucket in whose range ``bucket_key`` lies.

    Args:
        tables: of the store.
        chosen: positions with ``split_index``.
        key: of ``sort_key``.
        bucket_key: an expression, UBIGINT.
        buckets: their number by split, index of ``SPLITS``.
    """
    count = " ".join(f"WHEN {split} THEN {number}" for split, number in buckets.items())
    # Bucket i begins at key floor(i · 2^64 / B), so it is the largest i with i · 2^64 < (key + 1) · B.
    bucket = f"(({bucket_key})::UHUGEINT + 1) * (CASE split_index {count} END)::UHUGEINT - 1"
    sql = f"""
        SELECT * RENAME (split_index AS split), (({bucket}) >> 64)::UINTEGER AS bucket
        FROM (SELECT *, {sort_key_sql("position_id", key)} AS sort_key FROM ({chosen}))
    """
    return Placement(sql, tables)


def place_strata(
    con: DuckDBPyConnection,
    tables: Tables,
    chosen: str,
    expression: Expression,
    seed: int,
    key: int,
    buckets: dict[int, int],
    folder: AnyPath,
) -> Placement:
    """Give every bucket its fair share of each value of an expression, to within one position.

    A stratum of n positions is sorted by a key of its own. With B buckets, bucket b gets the ranks from
    floor((b·n + o) / B) up to, and without, floor(((b + 1)·n + o) / B). The offset o, in [0, B), is drawn for
    each stratum, so that what does not divide evenly falls on other buckets in each.

    That key is not ``sort_key``, which orders the rows of a bucket: each part of a stratum would then be a
    range of it, wider or narrower by chance, and at both ends of a bucket few strata would stand together.

    Args:
        con: an open session.
        tables: of the store.
        chosen: positions with ``split_index``.
        expression: what the strata are values of.
        seed: of the shuffle.
        key: of ``sort_key``.
        buckets: their number by split, index of ``SPLITS``.
        folder: for the tables that the placement's query reads.

    Raises:
        ConfigError: there are too many strata, or too many cuts between buckets in all of them.
    """
    grouped = f"""
        SELECT *, {sort_key_sql("position_id", derive_key(seed, "strata"))} AS cut_key
        FROM ({grouped_sql(tables, chosen, expression)})
    """
    strata = count_groups(con, grouped, expression)
    cuts = sum(min(buckets[stratum.split], stratum.rows) for stratum in strata)
    if cuts > MOST_CUTS:
        raise ConfigError(
            "too many strata for so many buckets",
            found=f"{cuts:,} parts of strata in buckets",
            expected=f"at most {MOST_CUTS:,}",
            hint="Give fewer buckets, or a coarser expression to stratify by.",
        )
    shares = [_shares(stratum, buckets[stratum.split], seed) for stratum in strata]
    lows = _lowest_keys(con, grouped, strata, [ranks for _, ranks in shares], folder)
    bits = _cell_bits(len(strata), max(buckets.values()))
    parts = pa.concat_tables(
        _parts(stratum, bucket, low, 64 - bits)
        for stratum, (bucket, _), low in zip(strata, shares, lows, strict=True)
    )
    table = write_table(folder / "strata.parquet", parts)
    sql = f"""
        SELECT p.* EXCLUDE (group_value, cut_key, cell) RENAME (split_index AS split), t.bucket,
               {sort_key_sql("p.position_id", key)} AS sort_key
        FROM (SELECT *, cut_key >> {64 - bits} AS cell FROM ({grouped})) p
        LEFT JOIN {table} t
        ON {same_group_sql("p", "t")} AND p.cell = t.cell AND p.cut_key BETWEEN t.low AND t.high
    """
    return Placement(sql, tables)


def _shares(stratum: Group, buckets: int, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the buckets that get a part of a stratum, and the rank at which each part begins."""
    offset = derive_key(seed, "stratify", SPLITS[stratum.split], *stratum.purpose) % buckets
    bounds = (np.arange(buckets + 1, dtype=np.int64) * stratum.rows + offset) // buckets
    used = np.flatnonzero(bounds[1:] > bounds[:-1])
    return used, bounds[used]


def _lowest_keys(
    con: DuckDBPyConnection,
    grouped: str,
    strata: Sequence[Group],
    ranks: Sequence[npt.NDArray[np.int64]],
    folder: AnyPath,
) -> Iterator[npt.NDArray[np.uint64]]:
    """Give, for each stratum, the lowest key of each part; the first part begins at key 0."""
    sizes = np.array([stratum.rows for stratum in strata], dtype=np.int64)
    shifted = group_table(strata).append_column("shift", pa.array(cell_shifts(sizes, 64)))
    table = write_table(folder / "strata-groups.parquet", shifted)
    keyed = f"""
        SELECT t.number, p.cut_key AS key, t.shift
        FROM ({grouped}) p JOIN {table} t ON {same_group_sql("p", "t")}
    """
    for low in keys_at(con, keyed, [r[1:] for r in ranks]):
        yield np.append(np.uint64(0), low)


def _cell_bits(strata: int, buckets: int) -> int:
    """Return how many cells, a power of two, the keys are cut into: about two a part, yet few in all."""
    wanted = (2 * buckets - 1).bit_length()
    return max(1, min(wanted, (MOST_CUTS // strata).bit_length() - 1))


def _parts(
    stratum: Group, bucket: npt.NDArray[np.int64], low: npt.NDArray[np.uint64], shift: int
) -> pa.Table:
    """Return the ranges of keys of one stratum, each with its bucket, cut at cells."""
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
