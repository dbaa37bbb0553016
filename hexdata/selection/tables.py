"""SQL for the tables of a store, and the columns that expressions may use.

Queries have one row per position. Games and sources are joined only if an expression uses their columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa

from hexdata.board import MIN_SIZE
from hexdata.schema import SPLITS, games_schema, positions_schema, sources_schema, sql_columns
from hexdata.selection.expression import Expression
from hexdata.selection.ranks import segments
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.columns import ViewColumn, select_sql, view_columns
from hexdata.store.parquet import ROW_GROUP_ROWS, write_parquet
from hexdata.store.session import DuckDBPyConnection, read_parquet_sql

__all__ = ["GAME_COLUMNS", "SPLIT_INDEX_SQL", "StoreTables", "write_table"]

_CASES: Final = " ".join(f"WHEN '{split}' THEN {index}" for index, split in enumerate(SPLITS) if index)
SPLIT_INDEX_SQL: Final = f"(CASE split {_CASES} ELSE 0 END)::UTINYINT"
"""SQL of the ``split_index`` of a game."""
_SOURCE_FACTS: Final = ("model", "simulations", "temperature", "seed", "commit", "date")
"""Columns of sources that expressions may use, besides ``source``."""
_SOURCE_COLUMNS: Final = frozenset({"source", "source_id", *_SOURCE_FACTS})
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
_BLOCK_BITS: Final = 12
"""Base-2 logarithm of the number of game ids in a block; ranges of games are looked up by block."""


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
        held_out: SQL of the games outside the training split, set by :meth:`with_lookup_tables`.
        source_runs: SQL of ranges of game ids with their source, set by :meth:`with_lookup_tables` if an
            expression uses a column of sources.
    """

    positions: str
    games: str
    sources: str
    position_columns: dict[str, str]
    view_columns: dict[str, ViewColumn]
    rows: int
    held_out: str | None = None
    source_runs: str | None = None

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
        """Return a query for all positions. Joins only the games outside the training split."""
        assert self.held_out is not None, "call with_lookup_tables first"
        return f"""
            SELECT p.*, coalesce(g.split_index, 0)::UTINYINT AS split_index
            FROM {self.positions} p LEFT JOIN {self.held_out} g USING (game_id)
        """

    def evaluated_sql(self, rows: str, expression: Expression, name: str, kind: str) -> str:
        """Return a query for ``rows`` with a column ``name``: the expression cast to the type ``kind``.

        In the expression, ``split`` is the name of the position's split. Other columns of games and sources
        are NULL for positions without a game.
        """
        added = [
            name
            for name in sorted(expression.columns & self.view_columns.keys())
            if name not in self.position_columns
        ]
        computed = "".join(f', {self.view_columns[name].sql} AS "{name}"' for name in added)
        texts = " ".join(f"WHEN {i} THEN '{split}'" for i, split in enumerate(SPLITS))
        return f"""
            SELECT p.* EXCLUDE ({", ".join(["split", *added])}), {expression.sql}::{kind} AS {name}
            FROM (SELECT *, CASE split_index {texts} END AS split{computed} FROM ({rows})) p
            {self._join_games_sql(sorted(expression.columns & _OWN_COLUMNS.keys() - _SOURCE_COLUMNS))}
            {self._join_sources_sql() if expression.columns & _SOURCE_COLUMNS else ""}
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

    def _join_games_sql(self, columns: Sequence[str]) -> str:
        spelled = {"game_positions": "positions AS game_positions"}
        selected = ", ".join(spelled.get(name, f'"{name}"') for name in columns)
        joined = f"(SELECT game_id AS of_game, {selected} FROM {self.games})"
        return f"LEFT JOIN {joined} g ON p.game_id = g.of_game" if columns else ""

    def _join_sources_sql(self) -> str:
        assert self.source_runs is not None, "call with_lookup_tables first"
        return f"""
            LEFT JOIN {self.source_runs} r
            ON p.game_id >> {_BLOCK_BITS} = r.block AND p.game_id BETWEEN r.low AND r.high
        """

    def with_lookup_tables(
        self, con: DuckDBPyConnection, expressions: Iterable[Expression], folder: AnyPath
    ) -> StoreTables:
        """Return these tables with the lookup tables that queries join, written to ``folder``.

        Each pass of a shuffle is a separate query that reads the lookup tables again, so they are small.
        """
        ready = self._with_held_out(con, folder / "held-out.parquet")
        if any(expression.columns & _SOURCE_COLUMNS for expression in expressions):
            return replace(ready, source_runs=write_table(folder / "source-runs.parquet", self._runs(con)))
        return ready

    def _with_held_out(self, con: DuckDBPyConnection, path: AnyPath) -> StoreTables:
        query = f"""
            SELECT game_id, {SPLIT_INDEX_SQL} AS split_index
            FROM {self.games} WHERE split <> '{SPLITS[0]}' ORDER BY game_id
        """
        rows = con.sql(query).to_arrow_reader(ROW_GROUP_ROWS)
        write_parquet(path, rows.schema, rows)
        return replace(self, held_out=read_parquet_sql([path.resolve()]))

    def _runs(self, con: DuckDBPyConnection) -> pa.Table:
        """Return ranges of game ids with their source, split at block boundaries.

        The games of a source have consecutive ids, so a few ranges replace a join with all games.
        """
        facts = ", ".join(f'"{name}"' for name in _SOURCE_FACTS)
        starts = con.sql(f"""
            SELECT game_id, source_id, name, {facts} FROM (
                SELECT game_id, source_id, lag(source_id) OVER (ORDER BY game_id) AS before FROM {self.games}
            ) LEFT JOIN (SELECT source_id, name, {facts} FROM {self.sources}) USING (source_id)
            WHERE source_id IS DISTINCT FROM before ORDER BY game_id
        """).fetchall()
        lows = np.array([0, *(game for game, *_ in starts[1:])], dtype=np.uint64)
        last = con.sql(f"SELECT coalesce(max(game_id), 0) FROM {self.games}").fetchall()[0][0]
        block, low, high, run = segments(lows, last, _BLOCK_BITS)
        names = ("source_id", "source", *_SOURCE_FACTS)
        runs = [starts[i][1:] for i in run] if starts else [(None,) * len(names)] * len(run)
        schema = sources_schema()
        return pa.table(
            {
                "block": pa.array(block.astype(np.int64)),
                "low": pa.array(low.astype(np.int64)),
                "high": pa.array(high.astype(np.int64)),
                **{
                    name: pa.array(values, schema.field("name" if name == "source" else name).type)
                    for name, values in zip(names, zip(*runs, strict=True), strict=True)
                },
            }
        )


def write_table(path: AnyPath, table: pa.Table) -> str:
    """Write a lookup table atomically and return the SQL that reads it."""
    write_parquet(path, table.schema, [table])
    return read_parquet_sql([path.resolve()])


def _table_sql(store: Store, table: str, schema: pa.Schema) -> str:
    """Return SQL that reads a table, or an empty relation if it has no files."""
    paths = store.files(table)
    if paths:
        rows = select_sql(table, store.manifest, lambda by_name: read_parquet_sql(paths, by_name=by_name))
        return f"({rows})"
    columns = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in sql_columns(schema).items())
    return f"(SELECT {columns} WHERE false)"
