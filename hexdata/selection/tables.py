"""SQL for the tables of a store, and the columns that expressions may use.

Queries have one row per position. Games and sources are joined only if an expression uses their columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from hexdata.board import MIN_SIZE
from hexdata.schema import (
    SPLITS,
    ViewColumn,
    games_schema,
    positions_schema,
    sources_schema,
    sql_columns,
    view_columns,
)
from hexdata.selection.expression import Expression
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.parquet import ROW_GROUP_ROWS, write_parquet
from hexdata.store.session import DuckDBPyConnection, read_parquet_sql

_CASES: Final = " ".join(f"WHEN '{split}' THEN {index}" for index, split in enumerate(SPLITS))
SPLIT_INDEX: Final = f"(CASE split {_CASES} ELSE 0 END)::UTINYINT"
"""SQL of ``split_index``. A split that does not exist, which ``verify`` reports, counts as training."""
_SOURCE_FACTS: Final = ("model", "simulations", "temperature", "seed", "commit", "date")
"""Columns of sources that expressions may use, besides ``source``."""
_SHADOWED: Final = frozenset({"positions", "split", *positions_schema(MIN_SIZE).names})
"""Columns of games that expressions cannot use, because positions or queries have a column of that name."""
_OWN_COLUMNS: Final = {
    name: kind for name, kind in sql_columns(games_schema()).items() if name not in _SHADOWED
} | {"game_positions": "BIGINT"}
GAME_COLUMNS: Final = {
    **dict.fromkeys(("split", "source"), "VARCHAR"),
    **{name: sql_columns(sources_schema())[name] for name in _SOURCE_FACTS},
    **_OWN_COLUMNS,
}
"""DuckDB's types of the columns of games and of their sources that expressions may use, by name."""


@dataclass(frozen=True)
class StoreTables:
    """The tables of one store, as SQL.

    Queries return the columns of positions and ``split_index``, the index of the split in ``SPLITS``.
    Positions without a game belong to the training split.

    Attributes:
        positions: SQL that reads the positions table.
        games: SQL that reads the games table.
        sources: SQL that reads the sources table.
        position_columns: DuckDB's types of the stored columns of positions, by name.
        view_columns: The columns of positions that expressions may use, by name.
        rows: Number of positions.
    """

    positions: str
    games: str
    sources: str
    position_columns: dict[str, str]
    view_columns: dict[str, ViewColumn]
    rows: int

    @classmethod
    def of(cls, store: Store) -> StoreTables:
        """Return the tables of a store that contains positions."""
        assert store.manifest.board_size is not None
        schema = positions_schema(store.manifest.board_size, store.manifest.targets)
        return cls(
            _table_sql(store, "positions", schema),
            _table_sql(store, "games", games_schema()),
            _table_sql(store, "sources", sources_schema()),
            sql_columns(schema),
            view_columns(schema),
            store.manifest.counts["positions"],
        )

    @property
    def expression_columns(self) -> dict[str, str]:
        """DuckDB's types of the columns that expressions may use; positions shadow games."""
        return GAME_COLUMNS | {name: column.type for name, column in self.view_columns.items()}

    def rows_sql(self) -> str:
        """Return a query for all positions. It joins only the games outside the training split."""
        return f"""
            SELECT p.*, coalesce(g.split_index, 0)::UTINYINT AS split_index
            FROM {self.positions} p LEFT JOIN (
                SELECT game_id, {SPLIT_INDEX} AS split_index
                FROM {self.games} WHERE split <> '{SPLITS[0]}'
            ) g USING (game_id)
        """

    def evaluated_sql(self, rows: str, expression: Expression, name: str, kind: str) -> str:
        """Return a query for ``rows`` with a column ``name``: the expression cast to the type ``kind``.

        In the expression, ``split`` is the name of the position's split. Other columns of games and sources
        are NULL for positions without a game.
        """
        splits = " ".join(f"WHEN {index} THEN '{split}'" for index, split in enumerate(SPLITS))
        # Only columns that the expression uses, since this is computed for every position.
        added = sorted(expression.columns & (self.view_columns.keys() - self.position_columns.keys()))
        computed = "".join(f', {self.view_columns[name].sql} AS "{name}"' for name in added)
        of_games = sorted(expression.columns & (GAME_COLUMNS.keys() - {"split"}))
        joined = f"LEFT JOIN ({self.games_sql(of_games)}) ON p.game_id = of_game" if of_games else ""
        return f"""
            SELECT p.* EXCLUDE ({", ".join(["split", *added])}), {expression.sql}::{kind} AS {name}
            FROM (SELECT *, CASE split_index {splits} END AS split{computed} FROM ({rows})) p {joined}
        """

    def games_sql(self, columns: Iterable[str]) -> str:
        """Return a query for ``of_game``, the id of each game, and some of ``GAME_COLUMNS``."""
        facts = {"source": "s.name", **{name: f's."{name}"' for name in _SOURCE_FACTS}}
        stored = facts | {name: f'g."{name}"' for name in _OWN_COLUMNS} | {"game_positions": "g.positions"}
        selected = [f'{stored.get(name, name)} AS "{name}"' for name in columns]
        return f"""
            SELECT {", ".join(["game_id AS of_game", *selected])}
            FROM {self.games} g LEFT JOIN {self.sources} s ON g.source_id = s.source_id
        """


def save_query(con: DuckDBPyConnection, path: AnyPath, query: str) -> str:
    """Write the result of a query to a file and return the SQL that reads it, see :func:`save_rows`."""
    return save_rows(path, con.sql(query).to_arrow_reader(ROW_GROUP_ROWS))


def save_rows(path: AnyPath, rows: pa.RecordBatchReader) -> str:
    """Write a small table to a Parquet file and return the SQL that reads it.

    Queries join such files instead of tables in memory, because each pass of a shuffle runs them again in a
    session of its own, perhaps on another machine.
    """
    write_parquet(path, rows.schema, rows)
    # An absolute path, since a task on another machine may have another working directory.
    return read_parquet_sql([path.resolve()])


def _table_sql(store: Store, table: str, schema: pa.Schema) -> str:
    """Return SQL that reads a table, or an empty relation if it has no files."""
    # DuckDB refuses to read an empty list of files.
    paths = store.files(table)
    if paths:
        return read_parquet_sql(paths)
    columns = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in sql_columns(schema).items())
    return f"(SELECT {columns} WHERE false)"
