"""Groups of positions cut to the size of the smallest, by seeded choice, and what that changes.

The head cut beside it is only measured, to be compared: nothing is ever taken from the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.order import derive_key, sort_key_sql, sort_subkeys
from hexdata.remote import AnyPath
from hexdata.schema import SPLITS
from hexdata.selection.expression import Expression
from hexdata.selection.groups import Group, count_groups, group_table, grouped_sql, same_group_sql
from hexdata.selection.ranks import cell_shifts, keys_at, segments
from hexdata.selection.tables import Tables, write_table
from hexdata.store.session import DuckDBPyConnection

__all__ = ["BalanceRow", "Balanced", "Means", "balance"]

_SUBKEYS: Final = ("subkey_0", "subkey_1", "subkey_2")
_BLOCK_BITS: Final = 16
"""Sources are found by blocks of position ids, 2 to this power of them."""


@dataclass(frozen=True)
class Means:
    """Means over some positions; None where no position has one."""

    total_positions: float | None
    value: float | None
    place: float | None
    """Where in its source a position stands, from 0 at its head to 1 at its end; 0.5 for all of it."""


@dataclass(frozen=True)
class BalanceRow:
    """What became of one group, or, where ``total``, of a whole split.

    Attributes:
        split: a name of ``SPLITS``.
        group: the value of the expression as text; None for NULL, and for the whole split.
        total: that this is the whole split.
        before: positions.
        kept: positions.
        whole: means over all of them.
        head: over as many as are kept, taken from the head: what a naive cut would have left.
        seeded: over those that are kept.
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
    """The positions that are left, and what was done to each group."""

    sql: str
    rows: dict[int, int]
    """Positions left by split, index of ``SPLITS``."""
    table: tuple[BalanceRow, ...]
    notes: tuple[str, ...]


def balance(
    con: DuckDBPyConnection, tables: Tables, rows: str, expression: Expression, seed: int, folder: AnyPath
) -> Balanced:
    """Cut, within each split, every group of one value of an expression to the size of the smallest.

    What is kept of a group are the positions of lowest ``sort_key(position_id, derive_key(seed,
    "balance", value))``, so ``order.balanced_take`` of the same seed, value and ids is the same choice.

    Args:
        con: an open session.
        tables: of the store.
        rows: positions.
        expression: what the groups are values of.
        seed: of the shuffle.
        folder: for the tables that the query reads.

    Raises:
        ConfigError: there are too many groups.
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
    cut: Sequence[Group],
    kept: Sequence[int],
    seed: int,
    folder: AnyPath,
) -> pa.Table:
    """Return, for the groups that are cut, their subkeys and the last key and position id that are kept.

    Args:
        con: an open session.
        positions: all of the store's.
        grouped: those that are left, with their groups.
        cut: groups.
        kept: what is left of each.
        seed: of the shuffle.
        folder: for a table that is needed on the way.
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
        limits = limits.append_column(name, pa.array(_firsts(keys_at(con, keyed, last))))
    return limits


def _firsts(found: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
    return np.concatenate([np.empty(0, np.uint64), *found])


def _compare(
    con: DuckDBPyConnection, tables: Tables, joined: str, kept: str, folder: AnyPath
) -> tuple[BalanceRow, ...]:
    """Measure each group, and each split, whole and as either cut leaves it.

    Means are of decimals, whose sums are exact: floats would give other last digits with other threads.
    """
    sources = write_table(folder / "balance-sources.parquet", _source_ranges(con, tables))
    placed = f"""
        SELECT split_index, group_value, total_positions, value::DECIMAL(18, 9) AS exact_value,
               ((2 * (position_id - s.first) + 1) / (2 * s.count))::DECIMAL(18, 9) AS place,
               {kept} AS seeded, (head IS NULL OR position_id <= head) AS head
        FROM ({joined}) p LEFT JOIN {sources} s
        ON s.block = p.position_id >> {_BLOCK_BITS} AND p.position_id BETWEEN s.low AND s.high
    """
    means = ", ".join(
        f"avg({column}) FILTER ({taken})"
        for taken in ("true", "head", "seeded")
        for column in ("total_positions", "exact_value", "place")
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


def _source_ranges(con: DuckDBPyConnection, tables: Tables) -> pa.Table:
    """Return the ranges of position ids that the sources have, cut at blocks of ids.

    Its columns are block, low, high, and the first id and the count of the source's positions: sources
    stand one after the other in the order of their ids.
    """
    counts = con.sql(f"SELECT positions FROM {tables.sources} WHERE positions > 0 ORDER BY source_id")
    count = np.asarray(counts.fetchnumpy()["positions"], dtype=np.int64)
    first = np.cumsum(count) - count
    block, low, high, which = segments(first.astype(np.uint64), int(count.sum()) - 1, _BLOCK_BITS)
    columns = {"block": block, "low": low, "high": high, "first": first[which], "count": count[which]}
    return pa.table({name: pa.array(column.astype(np.int64)) for name, column in columns.items()})


def _null_notes(groups: Sequence[Group], smallest: dict[int, int], expression: Expression) -> list[str]:
    """Warn of splits in which all groups are cut to the number of positions without a value."""
    return [
        f"{SPLITS[g.split]}: the smallest group of {expression.text} is NULL, {g.rows:,} positions, and the "
        f'others are cut to it; leave it out with --where "({expression.text}) IS NOT NULL"'
        for g in groups
        if g.value is None and g.rows == smallest[g.split] < max(o.rows for o in groups if o.split == g.split)
    ]
