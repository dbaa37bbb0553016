"""A store's tables as SQL, and what an expression sees of them: one row a position, each column once.

Joins games and sources only where one of their columns is asked for. Reads no position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import numpy as np
import pyarrow as pa

from hexdata.remote import AnyPath
from hexdata.schema import SPLITS, games_schema, positions_schema, sources_schema, sql_columns
from hexdata.selection.expression import Expression
from hexdata.selection.ranks import segments
from hexdata.store import Store
from hexdata.store.parquet import ROW_GROUP_ROWS, write_parquet
from hexdata.store.session import DuckDBPyConnection, read_parquet_sql

__all__ = ["Tables", "write_table"]

_OF_SOURCE: Final = frozenset({"source", "source_id"})
_BLOCK_BITS: Final = 12
"""Runs of games are found by blocks of game ids, 2 to this power of them."""


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
    parts: tuple[tuple[AnyPath, int], ...]
    """The files of the positions, each with its rows: together they have the ids 0…N-1 in order."""
    held_out: str | None = None
    """The games that do not train, with their ``split_index``, once :meth:`ready_for` queries of rows."""
    source_runs: str | None = None
    """Ranges of game ids with their source, once :meth:`ready_for` expressions of sources."""

    @classmethod
    def of(cls, store: Store) -> Tables:
        """Return the tables of a store that holds positions."""
        assert store.manifest.board_size is not None
        positions = store.files("positions")
        rows = (facts.rows for facts in store.manifest.files_in("positions").values())
        return cls(
            read_parquet_sql(positions),
            _table_sql(store.files("games"), games_schema()),
            _table_sql(store.files("sources"), sources_schema()),
            sql_columns(positions_schema(store.manifest.board_size)),
            tuple(zip(positions, rows, strict=True)),
        )

    def positions_between(self, start: int, stop: int) -> str:
        """Return the positions of the files that have some of start <= position_id < stop."""
        firsts = accumulate((rows for _, rows in self.parts), initial=0)
        touched = [
            path
            for first, (path, rows) in zip(firsts, self.parts, strict=False)
            if first < stop and first + rows > start
        ]
        return read_parquet_sql(touched or [path for path, _ in self.parts[:1]])

    @property
    def expression_columns(self) -> dict[str, str]:
        """Columns that an expression may use: those of positions come first, then those of games."""
        return {"split": "VARCHAR", "source": "VARCHAR", **self._game_columns, **self.position_columns}

    @property
    def _game_columns(self) -> dict[str, str]:
        own = sql_columns(games_schema())
        taken = {"positions", "split", *self.position_columns}
        return {name: own[name] for name in own if name not in taken} | {"game_positions": own["positions"]}

    def rows_sql(self) -> str:
        """Return a query for every position. Only the games held out are joined."""
        assert self.held_out is not None, "ready_for comes before queries of rows"
        return f"""
            SELECT p.*, coalesce(g.split_index, 0)::UTINYINT AS split_index
            FROM {self.positions} p LEFT JOIN {self.held_out} g USING (game_id)
        """

    def evaluated_sql(self, rows: str, expression: Expression, name: str, kind: str) -> str:
        """Return a query for ``rows`` with one column more: the expression's value, as SQL type ``kind``.

        ``split`` is the text of the split that a position stands in. Other columns of games, and
        ``source``, are NULL where the game is not known.
        """
        texts = " ".join(f"WHEN {i} THEN '{split}'" for i, split in enumerate(SPLITS))
        return f"""
            SELECT p.* EXCLUDE (split), {expression.sql}::{kind} AS {name}
            FROM (SELECT *, CASE split_index {texts} END AS split FROM ({rows})) p
            {self._join_games_sql(sorted(expression.columns & self._game_columns.keys() - _OF_SOURCE))}
            {self._join_sources_sql() if expression.columns & _OF_SOURCE else ""}
        """

    def _join_games_sql(self, columns: Sequence[str]) -> str:
        spelled = {"game_positions": "positions AS game_positions"}
        selected = ", ".join(spelled.get(name, f'"{name}"') for name in columns)
        joined = f"(SELECT game_id AS of_game, {selected} FROM {self.games})"
        return f"LEFT JOIN {joined} g ON p.game_id = g.of_game" if columns else ""

    def _join_sources_sql(self) -> str:
        assert self.source_runs is not None, "ready_for comes before expressions of sources"
        return f"""
            LEFT JOIN {self.source_runs} r
            ON p.game_id >> {_BLOCK_BITS} = r.block AND p.game_id BETWEEN r.low AND r.high
        """

    def ready_for(
        self, con: DuckDBPyConnection, expressions: Iterable[Expression], folder: AnyPath
    ) -> Tables:
        """Return these tables with what queries need beside them, written to ``folder``.

        Every slice of a shuffle is a query of its own, and reads the games anew: so they read few.
        """
        ready = replace(self, held_out=self._held_out(con, folder / "held-out.parquet"))
        if any(expression.columns & _OF_SOURCE for expression in expressions):
            return replace(ready, source_runs=write_table(folder / "source-runs.parquet", self._runs(con)))
        return ready

    def _held_out(self, con: DuckDBPyConnection, path: AnyPath) -> str:
        number = " ".join(f"WHEN '{name}' THEN {i}" for i, name in enumerate(SPLITS) if i)
        query = f"""
            SELECT game_id, (CASE split {number} ELSE 0 END)::UTINYINT AS split_index
            FROM {self.games} WHERE split <> '{SPLITS[0]}' ORDER BY game_id
        """
        rows = con.sql(query).to_arrow_reader(ROW_GROUP_ROWS)
        write_parquet(path, rows.schema, rows)
        return read_parquet_sql([path.resolve()])

    def _runs(self, con: DuckDBPyConnection) -> pa.Table:
        """Return ranges of game ids with their source, cut at blocks of ids.

        Games of one source stand together in the order of ids, so a few ranges say what a join of all
        games would, without holding them.
        """
        starts = con.sql(f"""
            SELECT game_id, source_id, name FROM (
                SELECT game_id, source_id, lag(source_id) OVER (ORDER BY game_id) AS before FROM {self.games}
            ) LEFT JOIN (SELECT source_id, name FROM {self.sources}) USING (source_id)
            WHERE source_id IS DISTINCT FROM before ORDER BY game_id
        """).fetchall()
        lows = np.array([0, *(game for game, _, _ in starts[1:])], dtype=np.uint64)
        last = con.sql(f"SELECT coalesce(max(game_id), 0) FROM {self.games}").fetchall()[0][0]
        block, low, high, run = segments(lows, last, _BLOCK_BITS)
        runs = [starts[i][1:] for i in run] if starts else [(None, None)] * len(run)
        return pa.table(
            {
                "block": pa.array(block.astype(np.int64)),
                "low": pa.array(low.astype(np.int64)),
                "high": pa.array(high.astype(np.int64)),
                "source_id": pa.array([source for source, _ in runs], pa.int32()),
                "source": pa.array([name for _, name in runs], pa.string()),
            }
        )


def write_table(path: AnyPath, table: pa.Table) -> str:
    """Write a small table for queries to read, atomically; return the SQL that reads it."""
    write_parquet(path, table.schema, [table])
    return read_parquet_sql([path.resolve()])


def _table_sql(paths: list[AnyPath], schema: pa.Schema) -> str:
    """Return the SQL of a table, one without rows where there is no file."""
    if paths:
        return read_parquet_sql(paths)
    columns = ", ".join(f"NULL::{kind} AS {name}" for name, kind in sql_columns(schema).items())
    return f"(SELECT {columns} WHERE false)"
