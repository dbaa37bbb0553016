"""Filters that act on games: removal of duplicate games, and a maximum number of positions per game.

Both write lookup tables of the games concerned, never positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from hexdata.order import derive_key, sort_key_sql
from hexdata.selection.tables import StoreTables
from hexdata.storage import AnyPath
from hexdata.store.parquet import write_parquet
from hexdata.store.session import DuckDBPyConnection, read_parquet_sql

__all__ = ["Duplicates", "count_duplicates", "drop_duplicates", "duplicates_sql", "limit_per_game"]

SLICE_ROWS: Final = 1 << 21
"""Positions per query: DuckDB sorts them in a fraction of the smallest memory budget."""
_BATCH_ROWS: Final = 1 << 16
_UNKNOWN_TIER: Final = 255
"""Sorts after every tier."""


@dataclass(frozen=True)
class Duplicates:
    """Numbers of games and positions in a store that each kind of ``dedup`` removes.

    Attributes:
        exact_games: Games that ``dedup="exact"`` removes.
        exact_positions: Their positions.
        symmetric_games: Games that ``dedup="symmetric"`` removes, including the exact ones.
        symmetric_positions: Their positions.
        fragments: Symmetric games without a complete move list, which ``dedup="exact"`` cannot detect.
    """

    exact_games: int
    exact_positions: int
    symmetric_games: int
    symmetric_positions: int
    fragments: int


def count_duplicates(con: DuckDBPyConnection, tables: StoreTables) -> Duplicates:
    """Count the duplicate games of a store. Reads the games table only."""
    counted = con.sql(f"""
        SELECT count(*) FILTER (is_exact), coalesce(sum(positions) FILTER (is_exact), 0)::BIGINT,
               count(*) FILTER (is_symmetric), coalesce(sum(positions) FILTER (is_symmetric), 0)::BIGINT,
               count(*) FILTER (is_symmetric AND fragment)
        FROM ({_copies_sql(tables)})
    """).fetchall()
    return Duplicates(*counted[0])


def drop_duplicates(
    con: DuckDBPyConnection, tables: StoreTables, rows: str, kind: str, path: AnyPath, all_rows: bool
) -> str:
    """Return a query for ``rows`` without the positions of duplicate games.

    Of equal games that have positions in ``rows``, the one with the lowest id is kept. Positions without a
    game are kept.

    Args:
        con: Open DuckDB session.
        tables: Tables of the store.
        rows: Query for the positions.
        kind: ``"exact"`` or ``"symmetric"``.
        path: File for the table of duplicate games, which the query reads.
        all_rows: Whether ``rows`` contains all positions of the store, which saves a join.
    """
    copies = duplicates_sql(tables, kind, None if all_rows else rows)
    schema = pa.schema([("game_id", pa.int64())])
    write_parquet(path, schema, con.sql(copies).to_arrow_reader(_BATCH_ROWS))
    dropped = read_parquet_sql([path.resolve()])
    return f"SELECT * FROM ({rows}) ANTI JOIN {dropped} USING (game_id)"


def duplicates_sql(tables: StoreTables, kind: str, rows: str | None) -> str:
    """Return a query for the ids of the duplicate games, ascending.

    Args:
        tables: Tables of the store.
        kind: ``"exact"`` or ``"symmetric"``.
        rows: Query with a column ``game_id``, whose games are compared; None for all games.
    """
    present = "" if rows is None else f"SEMI JOIN (SELECT game_id FROM ({rows})) USING (game_id)"
    return f"SELECT game_id FROM ({_copies_sql(tables, present)}) WHERE is_{kind} ORDER BY game_id"


def _copies_sql(tables: StoreTables, present: str = "") -> str:
    """Return a query for games with equal hashes: whether each is a duplicate of a game with a lower id.

    Games with equal moves have equal hashes, so only hashes with a ``duplicate_of`` are read. Moves are
    compared by their MD5 because the lists would exceed the memory. ``present`` is a join that filters games.
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


def limit_per_game(
    con: DuckDBPyConnection, tables: StoreTables, rows: str, limit: int, by: str, seed: int, path: AnyPath
) -> str:
    """Return a query for at most ``limit`` positions per game of ``rows``.

    Positions are kept in the order of a seeded key or, with ``by="tier"``, of their value sample tier (NULL
    last) and then the key. The ply of a position has no influence. All positions without a game are kept.

    Args:
        con: Open DuckDB session.
        tables: Tables of the store.
        rows: Query for the positions.
        limit: Maximum number of positions per game, at least 1.
        by: ``"key"`` or ``"tier"``.
        seed: Seed of the shuffle.
        path: File for a table with the first position beyond the limit of each game, which the query reads.
    """
    tier = f"coalesce(value_sample_tier, {_UNKNOWN_TIER})" if by == "tier" else "0"
    ranked = f"""
        SELECT *, {tier}::UTINYINT AS game_tier,
               {sort_key_sql("position_id", derive_key(seed, "per-game"))} AS game_key
        FROM ({rows})
    """
    schema = pa.schema([("game_id", pa.int64()), ("tier", pa.uint8()), ("key", pa.uint64())])
    write_parquet(path, schema, _first_beyond_limit(con, tables, ranked, limit))
    limits = read_parquet_sql([path.resolve()])
    return f"""
        SELECT p.* EXCLUDE (game_tier, game_key)
        FROM ({ranked}) p LEFT JOIN {limits} t USING (game_id)
        WHERE t.key IS NULL OR game_tier < t.tier OR (game_tier = t.tier AND game_key < t.key)
    """


def _first_beyond_limit(
    con: DuckDBPyConnection, tables: StoreTables, ranked: str, limit: int
) -> Iterator[pa.RecordBatch]:
    """Yield (game_id, tier, key) of the first position beyond ``limit`` in each game that has one.

    Games are processed in ranges of ids because sorting all positions at once would need too much memory.
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
            QUALIFY row_number() OVER (PARTITION BY game_id ORDER BY game_tier, game_key) = {limit + 1}
            ORDER BY game_id
        """).to_arrow_reader(_BATCH_ROWS)
