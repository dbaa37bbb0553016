"""From choices to SQL: the positions that take part, their splits, their keys and their buckets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hexdata.order import derive_key, sort_key_sql
from hexdata.schema import SPLITS
from hexdata.selection.choices import Choices
from hexdata.store import Store
from hexdata.store.session import DuckDBPyConnection, read_parquet_sql

__all__ = ["Placement", "Selection", "select"]


@dataclass(frozen=True)
class Selection:
    """The positions that take part.

    Attributes:
        key: of ``sort_key``, the shuffle's.
        rows: positions by split, in the order of ``SPLITS``; splits without any are left out.
        left_out: positions that a choice left out, by the name of the choice, in the order in which the
            choices are made.
    """

    key: int
    rows: dict[str, int]
    left_out: dict[str, int]
    chosen_sql: str
    """A query for the positions that take part: their columns, and ``split`` as index of ``SPLITS``."""

    def place(self, buckets: dict[str, int], con: DuckDBPyConnection, folder: Path) -> Placement:  # noqa: ARG002
        """Say which bucket of its split each position goes to.

        Args:
            buckets: their number by split.
            con: an open session, for counting.
            folder: where small tables may be left that the queries read; it must outlive them.
        """
        count = " ".join(f"WHEN {SPLITS.index(split)} THEN {n}" for split, n in buckets.items())
        # Bucket i begins at key floor(i · 2^64 / B), so it is the largest i with i · 2^64 < (key + 1) · B.
        bucket = f"""((sort_key::UHUGEINT + 1) * (CASE split {count} END)::UHUGEINT - 1) >> 64"""
        return Placement(f"""
            SELECT *, ({bucket})::UINTEGER AS bucket
            FROM (SELECT *, {sort_key_sql("position_id", self.key)} AS sort_key FROM ({self.chosen_sql}))
        """)


@dataclass(frozen=True)
class Placement:
    """The positions that take part, each with its place in the order (split, bucket, sort_key)."""

    sql: str

    def rows_sql(self, start: int | None = None, stop: int | None = None) -> str:
        """Return a query for the positions, in no order; only for start <= position_id < stop, if given.

        Their columns, ``split`` (index of ``SPLITS``), ``bucket`` (UINTEGER) and ``sort_key`` (UBIGINT).
        """
        if start is None:
            return self.sql
        return f"SELECT * FROM ({self.sql}) WHERE position_id >= {start} AND position_id < {stop}"


def select(
    store: Store,
    choices: Choices,  # noqa: ARG001
    seed: int,
    con: DuckDBPyConnection,
    folder: Path,  # noqa: ARG001
) -> Selection:
    """Carry out the choices on a store.

    Args:
        store: at least converted, with positions.
        choices: what is wanted.
        seed: of the shuffle; every draw is derived from it.
        con: an open session.
        folder: where small tables may be left that the selection's queries read.
    """
    positions = store.files("positions")
    chosen = _with_split_sql(positions, store.files("games"))
    counted = dict(con.sql(f"SELECT split, count(*) FROM ({chosen}) GROUP BY split").fetchall())
    rows = {split: counted[i] for i, split in enumerate(SPLITS) if i in counted}
    return Selection(derive_key(seed, "shuffle"), rows, {}, chosen)


def _with_split_sql(positions: list[Path], games: list[Path]) -> str:
    """Return a query for the positions ``p.*`` with the ``split`` of their games, as index of ``SPLITS``.

    Only the games held out are joined: the others, and positions of no known game, train.
    """
    held_out = (
        f"SELECT game_id, split FROM {read_parquet_sql(games)} WHERE split <> '{SPLITS[0]}'"
        if games
        else "SELECT NULL::BIGINT AS game_id, NULL AS split WHERE false"
    )
    number = " ".join(f"WHEN '{name}' THEN {i}" for i, name in enumerate(SPLITS) if i)
    return f"""
        SELECT p.*, (CASE g.split {number} ELSE 0 END)::UTINYINT AS split
        FROM {read_parquet_sql(positions)} p LEFT JOIN ({held_out}) g USING (game_id)
    """
