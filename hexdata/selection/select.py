"""Translation of :class:`SelectionOptions` into SQL queries over a store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from hexdata.errors import ConfigError
from hexdata.order import derive_key
from hexdata.schema import SPLITS, is_target
from hexdata.selection.balance import BalanceRow, balance
from hexdata.selection.dedup import Duplicates, count_duplicates, drop_duplicates, limit_per_game
from hexdata.selection.expression import Expression, check_condition, check_expression, explain_failures
from hexdata.selection.options import SelectionOptions
from hexdata.selection.placement import assign_games, assign_positions, assign_strata
from hexdata.selection.tables import SPLIT_INDEX_SQL, StoreTables
from hexdata.storage import AnyPath
from hexdata.store import Store
from hexdata.store.session import DuckDBPyConnection

__all__ = ["Selection", "select"]

_EXPRESSIONS: Final = ("where", "balance_by", "stratify_by")
_STRATA: Final = {"length": "total_positions"}
"""Aliases that ``stratify_by`` accepts."""


@dataclass(frozen=True)
class Selection:
    """The positions selected for a shuffle.

    Attributes:
        key: Key of ``sort_key`` of the shuffle.
        rows: Number of selected positions by split, in the order of ``SPLITS``; empty splits are omitted.
        left_out: Number of positions removed by each option that was given, in the order of application.
        chosen_sql: Query for the selected positions: the columns of positions, and ``split``, an index into
            ``SPLITS``.
        targets: Optional columns of the selected positions, sorted by name.
        duplicates: Duplicate games of the whole store.
        balance: Effect of ``balance_by`` on each group; empty if ``balance_by`` was not given.
        notes: Messages for the user.
    """

    key: int
    rows: dict[str, int]
    left_out: dict[str, int]
    chosen_sql: str
    targets: tuple[str, ...]
    duplicates: Duplicates
    balance: tuple[BalanceRow, ...]
    notes: tuple[str, ...]
    _seed: int = field(repr=False)
    _tables: StoreTables = field(repr=False)
    _assign: str = field(repr=False)
    _strata: Expression | None = field(repr=False)

    def assign_buckets(self, buckets: dict[str, int], con: DuckDBPyConnection, folder: AnyPath) -> str:
        """Return the query that assigns each selected position to a bucket of its split.

        Its columns are those of positions, ``split`` (index into ``SPLITS``), ``bucket`` and ``sort_key``.

        Args:
            buckets: Number of buckets by split.
            con: Open DuckDB session.
            folder: Folder for lookup tables; it must exist as long as the query is used.

        Raises:
            ConfigError: There are too many strata.
        """
        numbers = {SPLITS.index(split): number for split, number in buckets.items()}
        rows = f"SELECT * RENAME (split AS split_index) FROM ({self.chosen_sql})"
        if self._strata is not None:
            with explain_failures(self._strata):
                return assign_strata(
                    con, self._tables, rows, self._strata, self._seed, self.key, numbers, folder
                )
        if self._assign == "game":
            return assign_games(rows, self.key, derive_key(self._seed, "shuffle-games"), numbers)
        return assign_positions(rows, self.key, numbers)


def select(
    store: Store, options: SelectionOptions, seed: int, con: DuckDBPyConnection, folder: AnyPath
) -> Selection:
    """Select the positions of a shuffle.

    Args:
        store: Converted store with positions.
        options: The filters to apply.
        seed: Seed of the shuffle; every random choice is derived from it.
        con: Open DuckDB session.
        folder: Folder for lookup tables; it must exist as long as the selection is used.

    Raises:
        ConfigError: An expression is invalid, or no position is left.
    """
    tables = StoreTables.of(store)
    expressions = {
        name: check_expression(con, name, _resolve_alias(name, text), tables.expression_columns)
        for name in _EXPRESSIONS
        if (text := getattr(options, name)) is not None
    }
    if "where" in expressions:
        check_condition("where", expressions["where"])
    tables = tables.with_lookup_tables(con, expressions.values(), folder)
    duplicates = count_duplicates(con, tables)
    selector = _Selector(con, tables, options, expressions, seed, folder)
    selector.apply()
    if options.dedup == "exact" and duplicates.fragments:
        selector.notes.append(
            f"dedup exact cannot detect {duplicates.fragments:,} duplicates that are fragments of a game; "
            "dedup symmetric can"
        )
    tables = selector.tables
    columns = ", ".join(f'"{name}"' for name in tables.position_columns)
    return Selection(
        key=derive_key(seed, "shuffle"),
        rows={split: selector.counts[i] for i, split in enumerate(SPLITS) if selector.counts.get(i)},
        left_out=selector.left_out,
        chosen_sql=f"SELECT {columns}, split_index AS split FROM ({selector.rows})",
        targets=tuple(sorted(filter(is_target, tables.position_columns))),
        duplicates=duplicates,
        balance=selector.table,
        notes=tuple(selector.notes),
        _seed=seed,
        _tables=tables,
        _assign=options.assign,
        _strata=expressions.get("stratify_by"),
    )


def _resolve_alias(name: str, text: str) -> str:
    return _STRATA.get(text.strip(), text) if name == "stratify_by" else text


class _Selector:
    """Applies the filters one after the other and counts the positions that each removes."""

    def __init__(
        self,
        con: DuckDBPyConnection,
        tables: StoreTables,
        options: SelectionOptions,
        expressions: dict[str, Expression],
        seed: int,
        folder: AnyPath,
    ) -> None:
        self.con = con
        self.tables = tables
        self.options = options
        self.expressions = expressions
        self.seed = seed
        self.folder = folder
        self.rows = tables.rows_sql()
        self.left = tables.rows
        self.counts: dict[int, int] = {}
        """Remaining positions by split, an index into ``SPLITS``; empty until they are counted."""
        self.left_out: dict[str, int] = {}
        self.notes: list[str] = []
        self.table: tuple[BalanceRow, ...] = ()

    def apply(self) -> None:
        """Apply all filters."""
        if "where" in self.expressions:
            with explain_failures(self.expressions["where"]):
                self._where(self.expressions["where"])
        if self.options.dedup != "none":
            self._dedup(self.options.dedup)
        if self.options.per_game is not None:
            self._per_game(self.options.per_game)
        if "balance_by" in self.expressions:
            with explain_failures(self.expressions["balance_by"]):
                self._balance(self.expressions["balance_by"])
        if not self.counts:
            self._count_all()

    def _where(self, condition: Expression) -> None:
        evaluated = self.tables.evaluated_sql(self.rows, condition, "is_wanted", "BOOLEAN")
        self.rows = f"SELECT * EXCLUDE (is_wanted) FROM ({evaluated}) WHERE is_wanted"
        self._count()
        self._record_left_out("where")

    def _dedup(self, kind: str) -> None:
        self.rows = drop_duplicates(
            self.con,
            self.tables,
            self.rows,
            kind,
            self.folder / "dedup.parquet",
            all_rows="where" not in self.expressions,
        )
        self._count()
        self._record_left_out("dedup")

    def _per_game(self, limit: int) -> None:
        path = self.folder / "per-game.parquet"
        self.rows = limit_per_game(
            self.con, self.tables, self.rows, limit, self.options.per_game_by, self.seed, path
        )
        unknown = self._count()
        self._record_left_out("per_game")
        if unknown:
            self.notes.append(f"per_game does not limit the {unknown:,} positions without a game")

    def _balance(self, expression: Expression) -> None:
        balanced = balance(self.con, self.tables, self.rows, expression, self.seed, self.folder)
        self.rows, self.counts, self.table = balanced.sql, balanced.rows, balanced.table
        self._record_left_out("balance_by")
        self.notes += balanced.notes

    def _count(self) -> int:
        """Count the remaining positions by split; return the number of those without a game."""
        counted = self.con.sql(f"""
            SELECT split_index, count(*), count(*) FILTER (game_id IS NULL) FROM ({self.rows}) GROUP BY ALL
        """).fetchall()
        self.counts = {split: count for split, count, _ in counted}
        return sum(unknown for _, _, unknown in counted)

    def _count_all(self) -> None:
        """Count all positions by split from the games, of which there are far fewer than positions."""
        counted = self.con.sql(f"""
            SELECT {SPLIT_INDEX_SQL}, sum(positions)::BIGINT FROM {self.tables.games} GROUP BY ALL
        """).fetchall()
        self.counts = dict(counted)
        self.counts[0] = self.counts.get(0, 0) + self.left - sum(self.counts.values())

    def _record_left_out(self, option: str) -> None:
        """Record the number of positions that an option removed.

        Raises:
            ConfigError: It removed all of them.
        """
        left = sum(self.counts.values())
        self.left_out[option] = self.left - left
        if not left:
            raise ConfigError(
                f"{option} removes all positions",
                found=f"{self.left:,} positions before, 0 after",
                hint=f"Relax {option}.",
            )
        self.left = left
