"""How well a shuffle mixed: figures from the named ``.sql`` files in ``queries/``. Computes in SQL only."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from hexdata.pool import default_workers
from hexdata.schema import SPLITS
from hexdata.store import Store
from hexdata.store.session import DuckDBPyConnection, duckdb_session, quote, read_parquet_sql

__all__ = ["Dispersion", "dispersion"]

DUCKDB_MEMORY: Final = 500 << 20


@dataclass(frozen=True)
class Dispersion:
    """How well the games of the training split are spread, before and after the shuffle.

    ``largest_share`` is the largest part of one bucket that one game has, and ``games_in_bucket`` the
    games in that bucket. Neighbours are shares of all adjacent pairs that are of one game. A figure is
    None where there is nothing to count: no known game, or no pair.
    """

    largest_share: float | None
    games_in_bucket: int | None
    neighbours_before: float | None
    neighbours_after: float | None
    neighbours_expected: float | None


def dispersion(store: str | Path) -> Dispersion:
    """Measure the dispersion of games in a shuffled store.

    Raises:
        StoreError: there is no store, or it is not shuffled.
    """
    target = Store.open(store)
    target.require_stage("shuffle")
    with duckdb_session(memory=DUCKDB_MEMORY, threads=default_workers(), spill=target.work / "spill") as con:
        for view, sql in _views(target).items():
            con.execute(f"CREATE VIEW {view} AS {sql}")
        share, games = _row(con, "bucket_share")
        return Dispersion(
            largest_share=share,
            games_in_bucket=games,
            neighbours_before=_row(con, "neighbours_before")[0],
            neighbours_after=_row(con, "neighbours_after")[0],
            neighbours_expected=_row(con, "neighbours_expected")[0],
        )


def _row(con: DuckDBPyConnection, name: str) -> tuple[Any, ...]:
    """Return the one row of a named query."""
    query = (resources.files(__name__) / "queries" / f"{name}.sql").read_text(encoding="utf-8")
    return con.sql(query).fetchall()[0]


def _views(store: Store) -> dict[str, str]:
    """Return the views that the queries read, by name."""
    shuffled = " UNION ALL ".join(
        f"""SELECT {quote(split)} AS split,
            regexp_extract(filename, 'bucket-(\\d+)\\.parquet$', 1)::INTEGER AS bucket, * EXCLUDE (filename)
            FROM {read_parquet_sql(files, places=True)}"""
        for split in SPLITS
        if (files := store.files(f"shuffled/{split}"))
    )
    games = store.files("games")
    positions = read_parquet_sql(store.files("positions"))
    training = (
        f"""SELECT p.* FROM {positions} p
        ANTI JOIN (SELECT game_id FROM {read_parquet_sql(games)} WHERE split <> 'train') USING (game_id)"""
        if games
        else f"SELECT * FROM {positions}"
    )
    return {"shuffled": shuffled, "training": training}
