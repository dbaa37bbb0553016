"""The selection of positions for a shuffle: the filters, and the query that they make.

The filters that act on games, the removal of duplicates and a maximum number of positions per game, write
lookup tables of the games concerned, never positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hexdata.errors import ConfigError
from hexdata.options import SelectionOptions
from hexdata.order import derive_key, sort_key_sql
from hexdata.schema import SPLITS, is_target
from hexdata.selection.expression import Expression, check_condition, check_expression, explain_failures
from hexdata.selection.groups import BalanceRow, assign_strata, balance
from hexdata.selection.tables import SPLIT_INDEX, StoreTables, save_query
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.session import DuckDBPyConnection

# --- filters of games ---------------------------------------------------------------------------------

# The largest value of the type of tiers, UTINYINT.
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


def duplicates_sql(tables: StoreTables, kind: str, rows: str | None) -> str:
    """Return a query for the ids of the duplicate games, ascending.

    Of equal games, the one with the lowest id is no duplicate.

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


def limit_per_game(con: DuckDBPyConnection, rows: str, limit: int, by: str, seed: int, path: AnyPath) -> str:
    """Return a query for at most ``limit`` positions per game of ``rows``.

    Positions are kept in the order of a seeded key or, with ``by="tier"``, of their value sample tier (NULL
    last) and then the key. The ply of a position has no influence. All positions without a game are kept.

    Args:
        con: Open DuckDB session.
        rows: Query for the positions.
        limit: Maximum number of positions per game, at least 1.
        by: ``"key"`` or ``"tier"``.
        seed: Seed of the shuffle.
        path: File for a table with the first position beyond the limit of each game, which the query reads.
    """
    tier = f"coalesce(value_sample_tier, {_UNKNOWN_TIER})" if by == "tier" else "0"
    keyed = f"""
        SELECT *, {tier}::UTINYINT AS game_tier,
               {sort_key_sql("position_id", derive_key(seed, "per-game"))} AS game_key
        FROM ({rows})
    """
    # For each game with more positions, the first one that is left out: it and those after it are removed.
    limits = save_query(
        con,
        path,
        f"""
        SELECT game_id, game_tier AS tier, game_key AS key FROM ({keyed}) WHERE game_id IS NOT NULL
        QUALIFY row_number() OVER (PARTITION BY game_id ORDER BY game_tier, game_key) = {limit + 1}
        ORDER BY game_id
        """,
    )
    return f"""
        SELECT p.* EXCLUDE (game_tier, game_key)
        FROM ({keyed}) p LEFT JOIN {limits} t USING (game_id)
        WHERE t.key IS NULL OR game_tier < t.tier OR (game_tier = t.tier AND game_key < t.key)
    """


# --- the selection -----------------------------------------------------------------------------------

_STRATA: Final = {"length": "total_positions"}
"""Aliases that ``stratify_by`` accepts."""


@dataclass(frozen=True)
class Selection:
    """The positions selected for a shuffle.

    Attributes:
        rows: Number of selected positions by split, in the order of ``SPLITS``; empty splits are omitted.
        left_out: Number of positions removed by each option that was given, in the order of application.
        buckets: Number of buckets by split.
        sql: Query for the selected positions: the columns of positions, ``split`` (an index into ``SPLITS``),
            ``bucket`` and ``sort_key``.
        targets: Optional columns of the selected positions, sorted by name.
        duplicates: Duplicate games of the whole store.
        balance: Effect of ``balance_by`` on each group; empty if ``balance_by`` was not given.
        notes: Messages for the user.
    """

    rows: dict[str, int]
    left_out: dict[str, int]
    buckets: dict[str, int]
    sql: str
    targets: tuple[str, ...]
    duplicates: Duplicates
    balance: tuple[BalanceRow, ...]
    notes: tuple[str, ...]


def select(
    store: Store,
    options: SelectionOptions,
    seed: int,
    count_buckets: Callable[[dict[str, int]], dict[str, int]],
    con: DuckDBPyConnection,
    folder: AnyPath,
) -> Selection:
    """Select the positions of a shuffle and assign each to a bucket of its split.

    Args:
        store: Converted store with positions.
        options: The filters to apply.
        seed: Seed of the shuffle; every random choice is derived from it.
        count_buckets: Returns the number of buckets by split, from the number of positions by split.
        con: Open DuckDB session.
        folder: Folder for lookup tables; it must exist as long as the query of the selection is used.

    Raises:
        ConfigError: An expression is invalid, no position is left, or there are too many groups.
    """
    tables = StoreTables.of(store)
    columns = tables.expression_columns

    def checked(option: str, text: str | None) -> Expression | None:
        return None if text is None else check_expression(con, option, text, columns)

    # All expressions are checked before the first query over positions, which reads all of them.
    where = checked("where", options.where)
    if where is not None:
        check_condition(where)
    balance_by = checked("balance_by", options.balance_by)
    strata = options.stratify_by and _STRATA.get(options.stratify_by.strip(), options.stratify_by)
    stratify_by = checked("stratify_by", strata)
    # Reads the games table only.
    counted = con.sql(f"""
        SELECT count(*) FILTER (is_exact), coalesce(sum(positions) FILTER (is_exact), 0)::BIGINT,
               count(*) FILTER (is_symmetric), coalesce(sum(positions) FILTER (is_symmetric), 0)::BIGINT,
               count(*) FILTER (is_symmetric AND fragment)
        FROM ({_copies_sql(tables)})
    """).fetchall()
    duplicates = Duplicates(*counted[0])

    # Each filter acts on what the filters before it have kept, in the order that the options document.
    left = _Rows(con, tables)
    notes: list[str] = []
    table: tuple[BalanceRow, ...] = ()
    if where is not None:
        with explain_failures(where):
            evaluated = tables.evaluated_sql(left.sql, where, "is_wanted", "BOOLEAN")
            left.narrow("where", f"SELECT * EXCLUDE (is_wanted) FROM ({evaluated}) WHERE is_wanted")
    if options.dedup != "none":
        compared = None if where is None else left.sql  # all games are compared without a join
        # After ``where``, so that a game is left out only if its copy is kept.
        dropped = save_query(con, folder / "dedup.parquet", duplicates_sql(tables, options.dedup, compared))
        left.narrow("dedup", f"SELECT * FROM ({left.sql}) ANTI JOIN {dropped} USING (game_id)")
    if options.per_game is not None:
        path = folder / "per-game.parquet"
        left.narrow(
            "per_game", limit_per_game(con, left.sql, options.per_game, options.per_game_by, seed, path)
        )
        if left.without_game:
            notes.append(f"per_game does not limit the {left.without_game:,} positions without a game")
    if balance_by is not None:
        with explain_failures(balance_by):
            sql, table, null_notes = balance(con, tables, left.sql, balance_by, seed, folder)
            left.narrow("balance_by", sql)
        notes += null_notes
    if options.dedup == "exact" and duplicates.fragments:
        notes.append(
            f"dedup exact cannot detect {duplicates.fragments:,} duplicates that are fragments of a game; "
            "dedup symmetric can"
        )
    # The number of buckets follows from the rows that are left, so it is known only now.
    rows = {split: left.counts[i] for i, split in enumerate(SPLITS) if left.counts.get(i)}
    buckets = count_buckets(rows)
    names = ", ".join(f'"{name}"' for name in tables.position_columns)
    chosen = f"SELECT {names}, split_index FROM ({left.sql})"
    key_sql = sort_key_sql("position_id", derive_key(seed, "shuffle"))
    keyed = f"SELECT *, {key_sql} AS sort_key FROM ({chosen})"
    if stratify_by is not None:
        with explain_failures(stratify_by):
            placed = assign_strata(con, tables, keyed, stratify_by, seed, buckets, folder)
    else:
        bucket_key = "sort_key"
        if options.assign == "game":  # a position without a game is assigned by its own key
            bucket_key = f"coalesce({sort_key_sql('game_id', derive_key(seed, 'shuffle-games'))}, sort_key)"
        count = " ".join(f"WHEN {SPLITS.index(split)} THEN {number}" for split, number in buckets.items())
        # Bucket i begins at key floor(i · 2^64 / B), so it is the largest i with i · 2^64 < (key + 1) · B.
        bucket = f"(({bucket_key})::UHUGEINT + 1) * (CASE split_index {count} END)::UHUGEINT - 1"
        placed = f"""
            SELECT * RENAME (split_index AS split), (({bucket}) >> 64)::UINTEGER AS bucket FROM ({keyed})
        """
    return Selection(
        rows=rows,
        left_out=left.left_out,
        buckets=buckets,
        sql=placed,
        targets=tuple(sorted(filter(is_target, tables.position_columns))),
        duplicates=duplicates,
        balance=table,
        notes=tuple(notes),
    )


class _Rows:
    """The positions that the filters so far have kept.

    Attributes:
        sql: Query for the positions.
        counts: Number of positions by split, an index into ``SPLITS``.
        without_game: Number of positions without a game.
        left_out: Number of positions that each filter has removed.
    """

    def __init__(self, con: DuckDBPyConnection, tables: StoreTables) -> None:
        """Start with all positions. They are counted from the games, which are far fewer."""
        self.sql = tables.rows_sql()
        of_games = con.sql(
            f"SELECT {SPLIT_INDEX}, sum(positions)::BIGINT FROM {tables.games} GROUP BY ALL"
        ).fetchall()
        self.counts = dict(of_games)
        self.without_game = tables.rows - sum(self.counts.values())
        # The games table does not have these positions, which belong to the training split.
        self.counts[0] = self.counts.get(0, 0) + self.without_game
        self.left_out: dict[str, int] = {}
        self._con = con

    def narrow(self, option: str, sql: str) -> None:
        """Replace the query by one that ``option`` has narrowed, and count what it removes.

        Raises:
            ConfigError: It removes all positions.
        """
        before = sum(self.counts.values())
        counted = self._con.sql(f"""
            SELECT split_index, count(*), count(*) FILTER (game_id IS NULL) FROM ({sql}) GROUP BY ALL
        """).fetchall()
        self.sql = sql
        self.counts = {split: count for split, count, _ in counted}
        self.without_game = sum(unknown for _, _, unknown in counted)
        self.left_out[option] = before - sum(self.counts.values())
        if not counted:
            raise ConfigError(f"{option} removes all positions; there are {before:,} before it")
