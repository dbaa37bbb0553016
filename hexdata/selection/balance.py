"""Balancing: reduce every group of positions to the size of the smallest group by a seeded random choice.

The result table also contains the means that a cut at the head of each group would give, for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.order import derive_key, sort_key_sql, sort_subkeys
from hexdata.schema import SPLITS
from hexdata.selection.expression import Expression
from hexdata.selection.groups import ValueGroup, count_groups, group_table, grouped_sql, same_group_sql
from hexdata.selection.ranks import cell_shifts, keys_at_ranks, segments
from hexdata.selection.tables import StoreTables, write_table
from hexdata.storage import AnyPath
from hexdata.store.session import DuckDBPyConnection

__all__ = ["BalanceRow", "Balanced", "Means", "balance"]

_SUBKEYS: Final = ("subkey_0", "subkey_1", "subkey_2")
_BLOCK_BITS: Final = 16
"""Base-2 logarithm of the number of position ids in a block; sources are looked up by block."""


@dataclass(frozen=True)
class Means:
    """Means over a set of positions; None if no position has a value.

    Attributes:
        total_positions: Mean length of the positions' games, in positions.
        value: Mean value.
        source_offset: Mean relative position within the source file, from 0 (start) to 1 (end); 0.5 for a
            whole file.
    """

    total_positions: float | None
    value: float | None
    source_offset: float | None


@dataclass(frozen=True)
class BalanceRow:
    """Effect of balancing on one group, or on a whole split where ``total`` is true.

    Attributes:
        split: A name in ``SPLITS``.
        group: The value of the expression as text; None for NULL and for a whole split.
        total: Whether the row describes a whole split.
        before: Number of positions before balancing.
        kept: Number of positions kept.
        whole: Means over all positions before balancing.
        head: Means over the first ``kept`` positions of each group, for comparison.
        seeded: Means over the positions that were kept.
    """

    split: str
    group: str | None
    total: bool
    before: int
    kept: int
    whole: Means
    head: Means
    seeded: Means


@dataclass(frozen=True)
class Balanced:
    """Result of :func:`balance`.

    Attributes:
        sql: Query for the remaining positions.
        rows: Number of remaining positions by split, an index into ``SPLITS``.
        table: The effect on each group and split.
        notes: Messages for the user.
    """

    sql: str
    rows: dict[int, int]
    table: tuple[BalanceRow, ...]
    notes: tuple[str, ...]


def balance(
    con: DuckDBPyConnection,
    tables: StoreTables,
    rows: str,
    expression: Expression,
    seed: int,
    folder: AnyPath,
) -> Balanced:
    """Reduce the groups of each split to the size of the split's smallest group.

    A group is the positions with one value of ``expression``. The positions with the lowest
    ``sort_key(position_id, derive_key(seed, "balance", value))`` are kept. ``order.balanced_take`` makes the
    same choice for the same seed, value and ids.

    Args:
        con: Open DuckDB session.
        tables: Tables of the store.
        rows: Query for the positions.
        expression: The expression whose values define the groups.
        seed: Seed of the shuffle.
        folder: Folder for the lookup tables that the resulting query reads.

    Raises:
        ConfigError: There are too many groups.
    """
    grouped = grouped_sql(tables, rows, expression)
    groups = count_groups(con, grouped, expression)
    smallest = {split: min(g.rows for g in groups if g.split == split) for split in {g.split for g in groups}}
    cut = [group for group in groups if group.rows > smallest[group.split]]
    limits = write_table(
        folder / "balance.parquet",
        _limits(con, tables.positions, grouped, cut, [smallest[g.split] for g in cut], seed, folder),
    )
    joined = f"""
        SELECT p.*, t.head, t.highest, {sort_key_sql("position_id", _SUBKEYS)} AS group_key
        FROM ({grouped}) p LEFT JOIN {limits} t ON {same_group_sql("p", "t")}
    """
    kept = "(highest IS NULL OR group_key <= highest)"
    counts = {split: sum(g.split == split for g in groups) for split in smallest}
    return Balanced(
        sql=f"""
            SELECT * EXCLUDE (group_value, head, highest, group_key) FROM ({joined}) WHERE {kept}
        """,
        rows={split: smallest[split] * counts[split] for split in sorted(smallest)},
        table=_compare(con, tables, joined, kept, folder),
        notes=tuple(_null_notes(groups, smallest, expression)),
    )


def _limits(
    con: DuckDBPyConnection,
    positions: str,
    grouped: str,
    cut: Sequence[ValueGroup],
    kept: Sequence[int],
    seed: int,
    folder: AnyPath,
) -> pa.Table:
    """Return the subkeys, the last key kept and the last position id kept for each group that is cut.

    Args:
        con: Open DuckDB session.
        positions: SQL of all positions of the store.
        grouped: Query for the remaining positions with their groups.
        cut: The groups to reduce.
        kept: Number of positions to keep of each group.
        seed: Seed of the shuffle.
        folder: Folder for temporary tables.
    """
    sizes = np.array([group.rows for group in cut], dtype=np.int64)
    keys = [sort_subkeys(derive_key(seed, "balance", *group.purpose)) for group in cut]
    table = group_table(cut)
    for name, words in zip(_SUBKEYS, np.array(keys, dtype=np.uint64).reshape(-1, 3).T, strict=True):
        table = table.append_column(name, pa.array(words))
    last = [np.array([count - 1]) for count in kept]
    bits = int(con.sql(f"SELECT max(position_id) FROM {positions}").fetchall()[0][0]).bit_length()
    found = {
        "highest": (sort_key_sql("p.position_id", [f"t.{name}" for name in _SUBKEYS]), 64),
        "head": ("p.position_id::UBIGINT", bits),
    }
    limits = table
    for name, (key, key_bits) in found.items():
        shifted = table.append_column("shift", pa.array(cell_shifts(sizes, key_bits)))
        groups = write_table(folder / f"balance-{name}.parquet", shifted)
        keyed = f"""
            SELECT t.number, {key} AS key, t.shift
            FROM ({grouped}) p JOIN {groups} t ON {same_group_sql("p", "t")}
        """
        limits = limits.append_column(name, pa.array(_firsts(keys_at_ranks(con, keyed, last))))
    return limits


def _firsts(found: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
    return np.concatenate([np.empty(0, np.uint64), *found])


def _compare(
    con: DuckDBPyConnection, tables: StoreTables, joined: str, kept: str, folder: AnyPath
) -> tuple[BalanceRow, ...]:
    """Compute the means of each group and split: all positions, the first ones, and those kept.

    Means are computed over decimals because their sums are exact. Sums of floats would depend on the threads.
    """
    sources = write_table(folder / "balance-sources.parquet", _source_ranges(con, tables))
    placed = f"""
        SELECT split_index, group_value, total_positions, value::DECIMAL(18, 9) AS exact_value,
               ((2 * (position_id - s.first) + 1) / (2 * s.count))::DECIMAL(18, 9) AS source_offset,
               {kept} AS seeded, (head IS NULL OR position_id <= head) AS head
        FROM ({joined}) p LEFT JOIN {sources} s
        ON s.block = p.position_id >> {_BLOCK_BITS} AND p.position_id BETWEEN s.low AND s.high
    """
    means = ", ".join(
        f"avg({column}) FILTER ({taken})"
        for taken in ("true", "head", "seeded")
        for column in ("total_positions", "exact_value", "source_offset")
    )
    measured = con.sql(f"""
        SELECT split_index, group_value, grouping(group_value) AS total,
               count(*), count(*) FILTER (seeded), {means}
        FROM ({placed}) GROUP BY GROUPING SETS ((split_index, group_value), (split_index))
        ORDER BY split_index, total, group_value NULLS FIRST
    """).fetchall()
    return tuple(
        BalanceRow(
            SPLITS[split], group, bool(total), before, taken, Means(*m[:3]), Means(*m[3:6]), Means(*m[6:])
        )
        for split, group, total, before, taken, *m in measured
    )


def _source_ranges(con: DuckDBPyConnection, tables: StoreTables) -> pa.Table:
    """Return the range of position ids of each source, split at block boundaries.

    Columns: block, low, high (inclusive), first (first id of the source), count (positions of the source).
    Position ids are assigned source by source, in the order of source ids.
    """
    counts = con.sql(f"SELECT positions FROM {tables.sources} WHERE positions > 0 ORDER BY source_id")
    count = np.asarray(counts.fetchnumpy()["positions"], dtype=np.int64)
    first = np.cumsum(count) - count
    block, low, high, which = segments(first.astype(np.uint64), int(count.sum()) - 1, _BLOCK_BITS)
    columns = {"block": block, "low": low, "high": high, "first": first[which], "count": count[which]}
    return pa.table({name: pa.array(column.astype(np.int64)) for name, column in columns.items()})


def _null_notes(groups: Sequence[ValueGroup], smallest: dict[int, int], expression: Expression) -> list[str]:
    """Return a note for each split whose smallest group is the one of NULL."""
    return [
        f"{SPLITS[g.split]}: the smallest group of {expression.text} is NULL with {g.rows:,} positions, and "
        f'all groups are reduced to its size; to exclude it, add --where "({expression.text}) IS NOT NULL"'
        for g in groups
        if g.value is None and g.rows == smallest[g.split] < max(o.rows for o in groups if o.split == g.split)
    ]
