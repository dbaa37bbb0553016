"""Choices made game by game: copies of a game left out, and at most so many positions of each. Writes tables
of the games concerned, and no positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from hexdata.order import derive_key, sort_key_sql
from hexdata.remote import AnyPath
from hexdata.selection.tables import Tables
from hexdata.store.parquet import write_parquet
from hexdata.store.session import DuckDBPyConnection, read_parquet_sql

__all__ = ["Duplicates", "count_duplicates", "limit_games", "without_copies"]

SLICE_ROWS: Final = 1 << 21
"""Positions whose games are looked at together: what DuckDB sorts in a fraction of the smallest memory."""
_BATCH_ROWS: Final = 1 << 16
_UNKNOWN_TIER: Final = 255
"""Comes after every tier."""


@dataclass(frozen=True)
class Duplicates:
    """Games of a store that each kind of ``dedup`` would leave out, and their positions."""

    exact_games: int
    exact_positions: int
    symmetric_games: int
    """The exact ones are among them."""
    symmetric_positions: int
    fragments: int
    """Games among the symmetric ones of which not all moves are at hand: ``exact`` cannot tell them."""


def count_duplicates(con: DuckDBPyConnection, tables: Tables) -> Duplicates:
    """Count the duplicates of a store, from its games alone."""
    counted = con.sql(f"""
        SELECT count(*) FILTER (is_exact), coalesce(sum(positions) FILTER (is_exact), 0)::BIGINT,
               count(*) FILTER (is_symmetric), coalesce(sum(positions) FILTER (is_symmetric), 0)::BIGINT,
               count(*) FILTER (is_symmetric AND fragment)
        FROM ({_copies_sql(tables)})
    """).fetchall()
    return Duplicates(*counted[0])


def without_copies(
    con: DuckDBPyConnection, tables: Tables, rows: str, kind: str, path: AnyPath, all_rows: bool
) -> str:
    """Return a query for ``rows`` without those of games that are copies: ``exact`` or ``symmetric``.

    Of the games that are the same, the one with the lowest id stays, among those that have positions in
    ``rows``. Positions of no known game stay.

    Args:
        con: an open session.
        tables: of the store.
        rows: positions.
        kind: of sameness.
        path: of the table of copies, which the query reads.
        all_rows: that ``rows`` are all positions, so that no game has lost its own.
    """
    present = "" if all_rows else f"SEMI JOIN (SELECT game_id FROM ({rows})) USING (game_id)"
    copies = f"SELECT game_id FROM ({_copies_sql(tables, present)}) WHERE is_{kind} ORDER BY game_id"
    schema = pa.schema([("game_id", pa.int64())])
    write_parquet(path, schema, con.sql(copies).to_arrow_reader(_BATCH_ROWS))
    return f"SELECT * FROM ({rows}) ANTI JOIN {read_parquet_sql([path.resolve()])} USING (game_id)"


def _copies_sql(tables: Tables, present: str = "") -> str:
    """Return a query for the games that share their hash: how each stands to one of lower id.

    Games of the same moves share their hash, so only hashes that have a ``duplicate_of`` are looked at. The
    moves are compared by their MD5, since a list a game would not fit into the memory. ``present`` is a
    join that takes games out.
    """
    return f"""
        SELECT game_id, positions, moves IS NULL AS fragment,
               game_id > min(game_id) OVER (PARTITION BY game_hash) AS is_symmetric,
               moves IS NOT NULL AND game_id > min(game_id) OVER (PARTITION BY first, moves) AS is_exact
        FROM (
            SELECT game_id, positions, game_hash, coalesce(first_player, 0) AS first,
                   md5_number(moves::VARCHAR) AS moves
            FROM {tables.games} {present} WHERE positions > 0
        )
        SEMI JOIN (SELECT game_hash FROM {tables.games} WHERE duplicate_of IS NOT NULL) USING (game_hash)
    """


def limit_games(
    con: DuckDBPyConnection, tables: Tables, rows: str, most: int, by: str, seed: int, path: AnyPath
) -> str:
    """Return a query for at most ``most`` of each game's ``rows``; those of no known game all stay.

    They are the first in the order of a seeded key of the position, or, by ``tier``, of the value sample
    tier, NULL last, and then of the key: plies decide nothing.

    Args:
        con: an open session.
        tables: of the store.
        rows: positions.
        most: at least 1.
        by: ``key`` or ``tier``.
        seed: of the shuffle.
        path: of a table with the first position too many of each game that has one; the query reads it.
    """
    tier = f"coalesce(value_sample_tier, {_UNKNOWN_TIER})" if by == "tier" else "0"
    ranked = f"""
        SELECT *, {tier}::UTINYINT AS game_tier,
               {sort_key_sql("position_id", derive_key(seed, "per-game"))} AS game_key
        FROM ({rows})
    """
    schema = pa.schema([("game_id", pa.int64()), ("tier", pa.uint8()), ("key", pa.uint64())])
    write_parquet(path, schema, _first_too_many(con, tables, ranked, most))
    return f"""
        SELECT p.* EXCLUDE (game_tier, game_key)
        FROM ({ranked}) p LEFT JOIN {read_parquet_sql([path.resolve()])} t USING (game_id)
        WHERE t.key IS NULL OR game_tier < t.tier OR (game_tier = t.tier AND game_key < t.key)
    """


def _first_too_many(
    con: DuckDBPyConnection, tables: Tables, ranked: str, most: int
) -> Iterator[pa.RecordBatch]:
    """Give (game_id, tier, key) of the first position beyond ``most`` of each game that has one.

    Games are looked at in ranges of ids, since sorting all positions would take the memory of all.
    """
    ranges = con.sql(f"""
        SELECT min(game_id), max(game_id)
        FROM (SELECT game_id, sum(positions) OVER (ORDER BY game_id) // {SLICE_ROWS} AS slice
              FROM {tables.games})
        GROUP BY slice ORDER BY ALL
    """).fetchall()
    for low, high in ranges:
        yield from con.sql(f"""
            SELECT game_id, game_tier AS tier, game_key AS key FROM ({ranked})
            WHERE game_id BETWEEN {low} AND {high}
            QUALIFY row_number() OVER (PARTITION BY game_id ORDER BY game_tier, game_key) = {most + 1}
            ORDER BY game_id
        """).to_arrow_reader(_BATCH_ROWS)
