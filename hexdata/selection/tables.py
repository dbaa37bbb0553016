"""A store's tables as SQL, and what an expression sees of them: one row a position, each column once.

Joins games and sources only where one of their columns is asked for. Reads no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from hexdata.schema import SPLITS, games_schema, positions_schema, sources_schema
from hexdata.selection.expression import Expression
from hexdata.store import Store
from hexdata.store.parquet import write_parquet
from hexdata.store.session import read_parquet_sql

__all__ = ["Tables", "write_table"]

_SQL_TYPES: Final = {
    pa.bool_(): "BOOLEAN",
    pa.float32(): "FLOAT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.string(): "VARCHAR",
    pa.uint8(): "UTINYINT",
    pa.uint16(): "USMALLINT",
}


@dataclass(frozen=True)
class Tables:
    """The tables of one store, as SQL.

    Relations here have the columns of positions and ``split_index``, the place of the split in ``SPLITS``.
    Positions of no known game train, as do those of games that are not held out.
    """

    positions: str
    games: str
    sources: str
    position_columns: dict[str, str]
    """DuckDB's types by name."""

    @classmethod
    def of(cls, store: Store) -> Tables:
        """Return the tables of a store that holds positions."""
        assert store.manifest.board_size is not None
        return cls(
            read_parquet_sql(store.files("positions")),
            _table_sql(store.files("games"), games_schema()),
            _table_sql(store.files("sources"), sources_schema()),
            _columns(positions_schema(store.manifest.board_size)),
        )

    @property
    def expression_columns(self) -> dict[str, str]:
        """Columns that an expression may use: those of positions come first, then those of games."""
        return {"split": "VARCHAR", "source": "VARCHAR", **self._game_columns, **self.position_columns}

    @property
    def _game_columns(self) -> dict[str, str]:
        own = _columns(games_schema())
        taken = {"positions", "split", *self.position_columns}
        return {name: own[name] for name in own if name not in taken} | {"game_positions": own["positions"]}

    def rows_sql(self) -> str:
        """Return a query for every position. Only the games held out are joined."""
        number = " ".join(f"WHEN '{name}' THEN {i}" for i, name in enumerate(SPLITS) if i)
        return f"""
            SELECT p.*, (CASE g.split {number} ELSE 0 END)::UTINYINT AS split_index
            FROM {self.positions} p LEFT JOIN (
                SELECT game_id, split FROM {self.games} WHERE split <> '{SPLITS[0]}'
            ) g USING (game_id)
        """

    def evaluated_sql(self, rows: str, expression: Expression, name: str, kind: str) -> str:
        """Return a query for ``rows`` with one column more: the expression's value, as SQL type ``kind``.

        ``split`` is the text of the split that a position stands in. Other columns of games, and
        ``source``, are NULL where the game is not known.
        """
        texts = " ".join(f"WHEN {i} THEN '{split}'" for i, split in enumerate(SPLITS))
        game_columns = sorted(expression.columns & (self._game_columns.keys() | {"source"}))
        return f"""
            SELECT p.* EXCLUDE (split), {expression.sql}::{kind} AS {name}
            FROM (SELECT *, CASE split_index {texts} END AS split FROM ({rows})) p
            {self._join_games_sql(game_columns) if game_columns else ""}
        """

    def _join_games_sql(self, columns: Sequence[str]) -> str:
        spelled = {"game_positions": "g.positions AS game_positions", "source": "s.name AS source"}
        selected = ", ".join(spelled.get(name, f'g."{name}"') for name in columns)
        sources = f"LEFT JOIN {self.sources} s ON s.source_id = g.source_id" if "source" in columns else ""
        return f"""
            LEFT JOIN (SELECT g.game_id AS of_game, {selected} FROM {self.games} g {sources}) g
            ON p.game_id = g.of_game
        """


def write_table(path: Path, table: pa.Table) -> str:
    """Write a small table for queries to read, atomically; return the SQL that reads it."""
    write_parquet(path, table.schema, [table])
    return read_parquet_sql([path.resolve()])


def _columns(schema: pa.Schema) -> dict[str, str]:
    return {field.name: _sql_type(field.type) for field in schema}


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return _sql_type(kind.value_type)
    if pa.types.is_list(kind):
        return f"{_sql_type(kind.value_type)}[]"
    return "BLOB" if pa.types.is_fixed_size_binary(kind) else _SQL_TYPES[kind]


def _table_sql(paths: list[Path], schema: pa.Schema) -> str:
    """Return the SQL of a table, one without rows where there is no file."""
    if paths:
        return read_parquet_sql(paths)
    columns = ", ".join(f"NULL::{kind} AS {name}" for name, kind in _columns(schema).items())
    return f"(SELECT {columns} WHERE false)"
