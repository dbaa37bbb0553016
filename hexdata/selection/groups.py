"""Groups of positions with equal values of an expression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from hexdata.errors import ConfigError
from hexdata.schema import SPLITS
from hexdata.selection.expression import Expression
from hexdata.selection.tables import StoreTables
from hexdata.store.session import DuckDBPyConnection

__all__ = ["ValueGroup", "count_groups", "group_table", "grouped_sql", "same_group_sql"]

MAX_GROUPS: Final = 10_000


@dataclass(frozen=True)
class ValueGroup:
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


def grouped_sql(tables: StoreTables, rows: str, expression: Expression) -> str:
    """Return a query for ``rows`` with a column ``group_value``: the expression's value as text."""
    return tables.evaluated_sql(rows, expression, "group_value", "VARCHAR")


def count_groups(con: DuckDBPyConnection, grouped: str, expression: Expression) -> list[ValueGroup]:
    """Return the groups of each split, ordered by split and value, NULL first.

    Raises:
        ConfigError: There are more than ``MAX_GROUPS`` values.
    """
    limit = len(SPLITS) * MAX_GROUPS
    counted = con.sql(f"""
        SELECT split_index, group_value, count(*) FROM ({grouped}) GROUP BY ALL LIMIT {limit + 1}
    """).fetchall()
    groups = [
        ValueGroup(*row) for row in sorted(counted, key=lambda row: (row[0], row[1] is not None, row[1]))
    ]
    if len(groups) > limit or len({group.value for group in groups}) > MAX_GROUPS:
        raise ConfigError(
            f"{expression.option} has too many values",
            found=expression.text,
            expected=f"at most {MAX_GROUPS:,}",
            hint="Use a coarser expression, such as total_positions // 10.",
        )
    return groups


def group_table(groups: Sequence[ValueGroup]) -> pa.Table:
    """Return groups as a table (split, value, number), for joins with :func:`same_group_sql`."""
    return pa.table(
        {
            "split": pa.array([group.split for group in groups], pa.uint8()),
            "value": pa.array([group.value for group in groups], pa.string()),
            "number": pa.array(np.arange(len(groups)), pa.int32()),
        }
    )


def same_group_sql(rows: str, table: str) -> str:
    """Return the join condition between rows of :func:`grouped_sql` and of a :func:`group_table`."""
    return f"{rows}.split_index = {table}.split AND {rows}.group_value IS NOT DISTINCT FROM {table}.value"
