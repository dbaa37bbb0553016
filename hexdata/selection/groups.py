"""Balancing and stratification, by groups of positions with equal values of an expression.

Balancing reduces every group to the size of the smallest one. Stratification divides every group, a stratum,
evenly between the buckets. Both cut a group where a key reaches a rank, such as the 1,000th lowest key.

Sorting all keys of a few large groups takes DuckDB eight times as long as finding a few of them. So the rows
are counted by the upper bits of their keys, the cells, and only the rows in the cells of the requested ranks
are sorted. The result is exact for any keys, and takes little time where they are uniformly distributed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import ConfigError
from hexdata.order import derive_key, sort_key_sql, sort_subkeys
from hexdata.schema import SPLITS
from hexdata.selection.expression import Expression
from hexdata.selection.tables import StoreTables, save_query, save_rows
from hexdata.storage import AnyPath
from hexdata.store.session import DuckDBPyConnection, quote_sql

MAX_GROUPS: Final = 10_000
MAX_STRATUM_PARTS: Final = 1 << 20
"""Maximum size of the table of strata and buckets, which is joined to every position."""
_CELL_BITS: Final = 16
"""Base-2 logarithm of the number of cells of all groups: more of them take longer to count than to sort."""
_BLOCK_BITS: Final = 16
"""Base-2 logarithm of the number of position ids in a block; the source of a position is joined by block."""
_SUBKEYS: Final = ("subkey_0", "subkey_1", "subkey_2")
_SAME_GROUP: Final = "p.split_index = t.of_split AND p.group_value IS NOT DISTINCT FROM t.of_value"
"""Join condition between positions p with a ``group_value`` and a table t of groups."""


# --- groups -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """The positions of one split for which an expression has the same value.

    Attributes:
        split: Index into ``SPLITS``.
        value: The value as DuckDB casts it to text; None for NULL.
        rows: Number of positions.
    """

    split: int
    value: str | None
    rows: int

    @property
    def purpose(self) -> tuple[str, ...]:
        """The value as arguments of ``derive_key``; NULL differs from every text."""
        return () if self.value is None else (self.value,)


def _count_groups(con: DuckDBPyConnection, grouped: str, expression: Expression) -> list[_Group]:
    """Return the groups of each split, ordered by split and value, NULL first.

    Args:
        con: Open DuckDB session.
        grouped: Query for positions with ``group_value``, the value of the expression as text.
        expression: The expression, for the error.

    Raises:
        ConfigError: There are more than ``MAX_GROUPS`` values.
    """
    # One row more than allowed shows that there are too many, whatever their number.
    limit = len(SPLITS) * MAX_GROUPS
    counted = con.sql(f"""
        SELECT split_index, group_value, count(*) FROM ({grouped}) GROUP BY ALL LIMIT {limit + 1}
    """).fetchall()
    # NULL and text cannot be compared, so whether there is a value decides first.
    groups = [_Group(*row) for row in sorted(counted, key=lambda row: (row[0], row[1] is not None, row[1]))]
    if len(groups) > limit or len({group.value for group in groups}) > MAX_GROUPS:
        raise ConfigError(
            f"{expression.option} has too many values, at most {MAX_GROUPS:,} are possible: use a coarser "
            f"expression than {quote_sql(expression.text)}, such as total_positions // 10"
        )
    return groups


def _save_groups(path: AnyPath, groups: Sequence[_Group], columns: Mapping[str, npt.ArrayLike]) -> str:
    """Write a table of groups (number, of_split, of_value and more columns); return the SQL that reads it."""
    table = {
        "number": pa.array(range(len(groups)), pa.int32()),
        "of_split": pa.array([group.split for group in groups], pa.uint8()),
        "of_value": pa.array([group.value for group in groups], pa.string()),
        **{name: pa.array(values) for name, values in columns.items()},
    }
    return save_rows(path, pa.table(table).to_reader())


def _keys_at_ranks_sql(keyed: str, wanted: str, key_bits: int, groups: int) -> str:
    """Return a query for the keys at given ranks of groups: the rows of ``wanted`` with their ``key``.

    Args:
        keyed: Query for rows (number, key): the number of the group, and a key that is unique within it.
        wanted: Query for rows (number, rank) and more columns: ranks within groups, counted from 1.
        key_bits: Number of bits of the keys.
        groups: Number of groups.
    """
    # The groups share the cells, but each has at least two.
    shift = max(key_bits - max(_CELL_BITS - groups.bit_length(), 1), 0)
    # The cell of a rank is the first whose last rank reaches it; ``in_cell`` is the rank within the cell.
    return f"""
        WITH cells AS (
            SELECT number, key >> {shift} AS cell, count(*) AS rows FROM ({keyed}) GROUP BY ALL
        ), counted AS (
            SELECT *, sum(rows) OVER (PARTITION BY number ORDER BY cell) AS last_rank FROM cells
        ), places AS (
            SELECT w.*, cell, w.rank - (last_rank - rows) AS in_cell
            FROM ({wanted}) w ASOF JOIN counted c ON w.number = c.number AND w.rank <= c.last_rank
        ), sorted AS (
            SELECT number, cell, key, row_number() OVER (PARTITION BY number, cell ORDER BY key) AS in_cell
            FROM (SELECT number, key, key >> {shift} AS cell FROM ({keyed}))
            SEMI JOIN places USING (number, cell)
        )
        SELECT places.* EXCLUDE (cell, in_cell), key
        FROM places JOIN sorted USING (number, cell, in_cell)
    """


# --- balancing ----------------------------------------------------------------------------------------


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


def balance(
    con: DuckDBPyConnection,
    tables: StoreTables,
    rows: str,
    expression: Expression,
    seed: int,
    folder: AnyPath,
) -> tuple[str, tuple[BalanceRow, ...], list[str]]:
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
        folder: Folder for the table of groups that the resulting query reads.

    Returns:
        The query for the remaining positions, the effect on each group and split, and notes for the user.

    Raises:
        ConfigError: There are too many groups.
    """
    grouped = tables.evaluated_sql(rows, expression, "group_value", "VARCHAR")
    groups = _count_groups(con, grouped, expression)
    smallest = {split: min(g.rows for g in groups if g.split == split) for split in {g.split for g in groups}}
    # The key differs between groups, so that two groups with the same ids make unrelated choices.
    subkeys = np.array(
        [sort_subkeys(derive_key(seed, "balance", *group.purpose)) for group in groups], np.uint64
    )
    columns = {
        "rank": [smallest[group.split] for group in groups],
        **dict(zip(_SUBKEYS, subkeys.T, strict=True)),
    }
    table = _save_groups(folder / "balance-groups.parquet", groups, columns)

    def last_kept(key: str, key_bits: int) -> str:
        """Return a query for the largest key of each group if the smallest keys are kept."""
        keyed = f"SELECT number, {key} AS key FROM ({grouped}) p JOIN {table} t ON {_SAME_GROUP}"
        return _keys_at_ranks_sql(keyed, f"SELECT number, rank FROM {table}", key_bits, len(groups))

    # Positions up to the key ``highest`` are kept. Those up to the id ``head``, the same number of positions,
    # are the first ones of the group; they are only compared with those kept.
    group_key = sort_key_sql("position_id", _SUBKEYS)
    limits = save_query(
        con,
        folder / "balance.parquet",
        f"""
        SELECT t.*, by_key.key AS highest, by_id.key AS head FROM {table} t
        JOIN ({last_kept(group_key, 64)}) by_key USING (number)
        JOIN ({last_kept("position_id::UBIGINT", tables.rows.bit_length())}) by_id USING (number)
        ORDER BY number
        """,
    )
    chosen = f"""
        SELECT p.*, position_id <= head AS is_head, {group_key} <= highest AS is_kept
        FROM ({grouped}) p JOIN {limits} t ON {_SAME_GROUP}
    """
    return (
        f"SELECT * EXCLUDE (group_value, is_head, is_kept) FROM ({chosen}) WHERE is_kept",
        _compare(con, tables, chosen),
        _null_notes(groups, smallest, expression),
    )


def _compare(con: DuckDBPyConnection, tables: StoreTables, chosen: str) -> tuple[BalanceRow, ...]:
    """Compute the means of each group and split: all positions, the first ones, and those kept.

    Means are computed over decimals because their sums are exact. Sums of floats would depend on the threads.
    """
    means = ", ".join(
        f"avg({column}) FILTER ({taken})"
        for taken in ("true", "is_head", "is_kept")
        for column in ("total_positions", "value::DECIMAL(18, 9)", "source_offset")
    )
    # Position ids are assigned source by source, in the order of source ids.
    measured = con.sql(f"""
        WITH ranges AS (
            SELECT positions AS size, (sum(positions) OVER (ORDER BY source_id) - positions)::BIGINT AS first
            FROM {tables.sources} WHERE positions > 0
        ), blocks AS (
            SELECT *, unnest(range(first >> {_BLOCK_BITS}, (last >> {_BLOCK_BITS}) + 1)) AS block
            FROM (SELECT *, first + size - 1 AS last FROM ranges)
        ), placed AS (
            SELECT p.*, ((2 * (position_id - first) + 1) / (2 * size))::DECIMAL(18, 9) AS source_offset
            FROM ({chosen}) p LEFT JOIN blocks s
            ON s.block = p.position_id >> {_BLOCK_BITS} AND p.position_id BETWEEN first AND last
        )
        SELECT split_index, group_value, grouping(group_value) AS total,
               count(*), count(*) FILTER (is_kept), {means}
        FROM placed GROUP BY GROUPING SETS ((split_index, group_value), (split_index))
        ORDER BY split_index, total, group_value NULLS FIRST
    """).fetchall()
    return tuple(
        BalanceRow(
            SPLITS[split], group, bool(total), before, kept, Means(*m[:3]), Means(*m[3:6]), Means(*m[6:])
        )
        for split, group, total, before, kept, *m in measured
    )


def _null_notes(groups: Sequence[_Group], smallest: dict[int, int], expression: Expression) -> list[str]:
    """Return a note for each split whose smallest group is the one of NULL."""
    return [
        f"{SPLITS[g.split]}: the smallest group of {expression.text} is NULL with {g.rows:,} positions, and "
        f'all groups are reduced to its size; to exclude it, add --where "({expression.text}) IS NOT NULL"'
        for g in groups
        if g.value is None and g.rows == smallest[g.split] < max(o.rows for o in groups if o.split == g.split)
    ]


# --- stratification -----------------------------------------------------------------------------------


def assign_strata(
    con: DuckDBPyConnection,
    tables: StoreTables,
    rows: str,
    expression: Expression,
    seed: int,
    buckets: dict[str, int],
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
        rows: Query for positions with ``split_index``.
        expression: The expression whose values define the strata.
        seed: Seed of the shuffle.
        buckets: Number of buckets by split.
        folder: Folder for the tables that the query reads.

    Raises:
        ConfigError: There are too many strata, or too many parts of strata in buckets.
    """
    grouped = f"""
        SELECT *, {sort_key_sql("position_id", derive_key(seed, "strata"))} AS cut_key
        FROM ({tables.evaluated_sql(rows, expression, "group_value", "VARCHAR")})
    """
    strata = _count_groups(con, grouped, expression)
    # A stratum has a part in at most as many buckets as it has rows.
    counts = [buckets[SPLITS[stratum.split]] for stratum in strata]
    cuts = sum(min(count, stratum.rows) for count, stratum in zip(counts, strata, strict=True))
    if cuts > MAX_STRATUM_PARTS:
        raise ConfigError(
            f"too many strata for this number of buckets: they have {cuts:,} parts, and at most "
            f"{MAX_STRATUM_PARTS:,} are possible; use fewer buckets or a coarser expression in stratify_by"
        )
    # Without offsets, the last bucket would get an extra row of every stratum, and the first one of none.
    offsets = [
        derive_key(seed, "stratify", SPLITS[stratum.split], *stratum.purpose) % count
        for stratum, count in zip(strata, counts, strict=True)
    ]
    columns = {"rows": [stratum.rows for stratum in strata], "buckets": counts, "first": offsets}
    table = _save_groups(folder / "strata-groups.parquet", strata, columns)
    keyed = f"SELECT number, cut_key AS key FROM ({grouped}) p JOIN {table} t ON {_SAME_GROUP}"
    # The number of positions of a stratum up to each bucket is the rank of the last one in the bucket.
    wanted = f"""
        SELECT number, of_split, of_value, bucket, ((bucket + 1) * rows + first) // buckets AS rank
        FROM (SELECT *, unnest(range(buckets)) AS bucket FROM {table})
        WHERE rank > (bucket * rows + first) // buckets
    """
    # Parts are divided at cells, so that rows find their part by an equality join: joins by range are slow.
    # At least twice as many cells as buckets, unless the cells of all strata would exceed the maximum.
    bits = max(
        1, min((2 * max(counts) - 1).bit_length(), (MAX_STRATUM_PARTS // len(strata)).bit_length() - 1)
    )
    shift = 64 - bits
    parts = save_query(
        con,
        folder / "strata.parquet",
        f"""
        SELECT *, unnest(range((low >> {shift})::BIGINT, (high >> {shift})::BIGINT + 1)) AS cell FROM (
            SELECT of_split, of_value, bucket::UINTEGER AS bucket, key AS high,
                   coalesce(lag(key) OVER (PARTITION BY number ORDER BY key) + 1, 0)::UBIGINT AS low
            FROM ({_keys_at_ranks_sql(keyed, wanted, 64, len(strata))})
        ) ORDER BY of_split, of_value, low, cell
        """,
    )
    return f"""
        SELECT p.* EXCLUDE (group_value, cut_key) RENAME (split_index AS split), t.bucket
        FROM ({grouped}) p LEFT JOIN {parts} t
        ON {_SAME_GROUP} AND (p.cut_key >> {shift})::BIGINT = t.cell AND p.cut_key BETWEEN t.low AND t.high
    """
