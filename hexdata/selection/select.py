"""From choices to SQL: the positions that take part, their splits, their keys and their buckets.

Reads what it must to count and to cut; moves no row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from hexdata.errors import ConfigError
from hexdata.order import derive_key
from hexdata.remote import AnyPath
from hexdata.schema import SPLITS
from hexdata.selection.balance import BalanceRow, balance
from hexdata.selection.choices import Choices
from hexdata.selection.expression import Expression, check_condition, check_expression, explained
from hexdata.selection.games import Duplicates, count_duplicates, limit_games, without_copies
from hexdata.selection.place import Placement, place_games, place_positions, place_strata
from hexdata.selection.tables import Tables
from hexdata.store import Store
from hexdata.store.session import DuckDBPyConnection

__all__ = ["Selection", "select"]

_EXPRESSIONS: Final = ("where", "balance_by", "stratify_by")
_STRATA: Final = {"length": "total_positions"}
"""Names for what to stratify by that are no columns."""


@dataclass(frozen=True)
class Selection:
    """The positions that take part.

    Attributes:
        key: of ``sort_key``, the shuffle's.
        rows: positions by split, in the order of ``SPLITS``; splits without any are left out.
        left_out: positions that a choice left out, by the name of the choice, in the order in which the
            choices are made; only those that were asked for.
        chosen_sql: a query for the positions that take part: their columns, and ``split`` as index of
            ``SPLITS``.
        duplicates: the games that the whole store holds more than once.
        balance: what ``balance_by`` did to each group; empty if it was not asked for.
        notes: what a person should know about the choices made.
    """

    key: int
    rows: dict[str, int]
    left_out: dict[str, int]
    chosen_sql: str
    duplicates: Duplicates
    balance: tuple[BalanceRow, ...]
    notes: tuple[str, ...]
    _seed: int = field(repr=False)
    _tables: Tables = field(repr=False)
    _assign: str = field(repr=False)
    _strata: Expression | None = field(repr=False)

    def place(self, buckets: dict[str, int], con: DuckDBPyConnection, folder: AnyPath) -> Placement:
        """Say which bucket of its split each position goes to.

        Args:
            buckets: their number by split.
            con: an open session, for counting.
            folder: where small tables may be left that the queries read; it must outlive them.

        Raises:
            ConfigError: there are too many strata.
        """
        numbers = {SPLITS.index(split): number for split, number in buckets.items()}
        rows = f"SELECT * RENAME (split AS split_index) FROM ({self.chosen_sql})"
        if self._strata is not None:
            with explained(self._strata):
                return place_strata(
                    con, self._tables, rows, self._strata, self._seed, self.key, numbers, folder
                )
        if self._assign == "game":
            return place_games(self._tables, rows, self.key, derive_key(self._seed, "shuffle-games"), numbers)
        return place_positions(self._tables, rows, self.key, numbers)


def select(store: Store, choices: Choices, seed: int, con: DuckDBPyConnection, folder: AnyPath) -> Selection:
    """Carry out the choices on a store.

    Args:
        store: at least converted, with positions.
        choices: what is wanted.
        seed: of the shuffle; every draw is derived from it.
        con: an open session.
        folder: where small tables may be left that the selection's queries read.

    Raises:
        ConfigError: an expression cannot be used, or no position is left.
    """
    tables = Tables.of(store)
    expressions = {
        name: check_expression(con, name, _spelled(name, text), tables.expression_columns)
        for name in _EXPRESSIONS
        if (text := getattr(choices, name)) is not None
    }
    if "where" in expressions:
        check_condition("where", expressions["where"])
    tables = tables.ready_for(con, expressions.values(), folder)
    duplicates = count_duplicates(con, tables)
    choosing = _Choosing(con, tables, choices, expressions, seed, folder)
    choosing.choose()
    if choices.dedup == "exact" and duplicates.fragments:
        choosing.notes.append(
            f"only dedup symmetric can tell copies that are fragments of a game: {duplicates.fragments:,}"
        )
    columns = ", ".join(tables.position_columns)
    return Selection(
        key=derive_key(seed, "shuffle"),
        rows={split: choosing.counts[i] for i, split in enumerate(SPLITS) if choosing.counts.get(i)},
        left_out=choosing.left_out,
        chosen_sql=f"SELECT {columns}, split_index AS split FROM ({choosing.rows})",
        duplicates=duplicates,
        balance=choosing.table,
        notes=tuple(choosing.notes),
        _seed=seed,
        _tables=tables,
        _assign=choices.assign,
        _strata=expressions.get("stratify_by"),
    )


def _spelled(name: str, text: str) -> str:
    return _STRATA.get(text.strip(), text) if name == "stratify_by" else text


class _Choosing:
    """The choices, made one after the other: the positions left, and what was counted on the way."""

    def __init__(
        self,
        con: DuckDBPyConnection,
        tables: Tables,
        choices: Choices,
        expressions: dict[str, Expression],
        seed: int,
        folder: AnyPath,
    ) -> None:
        self.con = con
        self.tables = tables
        self.choices = choices
        self.expressions = expressions
        self.seed = seed
        self.folder = folder
        self.rows = tables.rows_sql()
        self.left = int(con.sql(f"SELECT count(*) FROM {tables.positions}").fetchall()[0][0])
        self.counts: dict[int, int] = {}
        """Positions left by split, index of ``SPLITS``; empty until they are counted."""
        self.left_out: dict[str, int] = {}
        self.notes: list[str] = []
        self.table: tuple[BalanceRow, ...] = ()

    def choose(self) -> None:
        """Make all choices."""
        if "where" in self.expressions:
            with explained(self.expressions["where"]):
                self._where(self.expressions["where"])
        if self.choices.dedup != "none":
            self._dedup(self.choices.dedup)
        if self.choices.per_game is not None:
            self._per_game(self.choices.per_game)
        if "balance_by" in self.expressions:
            with explained(self.expressions["balance_by"]):
                self._balance(self.expressions["balance_by"])
        if not self.counts:
            self._count()

    def _where(self, condition: Expression) -> None:
        evaluated = self.tables.evaluated_sql(self.rows, condition, "is_wanted", "BOOLEAN")
        self.rows = f"SELECT * EXCLUDE (is_wanted) FROM ({evaluated}) WHERE is_wanted"
        self._count()
        self._leave_out("where")

    def _dedup(self, kind: str) -> None:
        self.rows = without_copies(
            self.con,
            self.tables,
            self.rows,
            kind,
            self.folder / "dedup.parquet",
            all_rows="where" not in self.expressions,
        )
        self._count()
        self._leave_out("dedup")

    def _per_game(self, most: int) -> None:
        path = self.folder / "per-game.parquet"
        self.rows = limit_games(
            self.con, self.tables, self.rows, most, self.choices.per_game_by, self.seed, path
        )
        unknown = self._count()
        self._leave_out("per_game")
        if unknown:
            self.notes.append(f"per_game does not limit positions of no known game: {unknown:,} stay")

    def _balance(self, expression: Expression) -> None:
        balanced = balance(self.con, self.tables, self.rows, expression, self.seed, self.folder)
        self.rows, self.counts, self.table = balanced.sql, balanced.rows, balanced.table
        self._leave_out("balance_by")
        self.notes += balanced.notes

    def _count(self) -> int:
        """Count the positions left, by split; return how many of them are of no known game."""
        counted = self.con.sql(f"""
            SELECT split_index, count(*), count(*) FILTER (game_id IS NULL) FROM ({self.rows}) GROUP BY ALL
        """).fetchall()
        self.counts = {split: count for split, count, _ in counted}
        return sum(unknown for _, _, unknown in counted)

    def _leave_out(self, choice: str) -> None:
        """Book what a choice has left out.

        Raises:
            ConfigError: that was all there was.
        """
        left = sum(self.counts.values())
        self.left_out[choice] = self.left - left
        if not left:
            raise ConfigError(
                f"{choice} leaves no position",
                found=f"{self.left:,} positions before it, 0 after it",
                hint="Ask for less.",
            )
        self.left = left
