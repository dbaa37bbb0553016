"""Figures about a store, from the named ``.sql`` files in ``queries/``. Computes in SQL only."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from hexdata.schema import SPLITS
from hexdata.store import Store
from hexdata.store.session import duckdb_session, quote, read_parquet_sql

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
    share = _one(target, "bucket_share") or (None, None, None, None)
    before, after = _one(target, "neighbours_before"), _one(target, "neighbours_after")
    expected = _one(target, "neighbours_expected")
    return Dispersion(
        largest_share=share[1],
        games_in_bucket=share[2],
        neighbours_before=_share(before),
        neighbours_after=_share(after),
        neighbours_expected=expected[0] if expected else None,
    )


def _share(row: tuple[Any, ...] | None) -> float | None:
    return row[0] / (row[1] - 1) if row and row[1] > 1 else None


def _one(store: Store, name: str) -> tuple[Any, ...] | None:
    """Run a named query over the store's views; return its first row.

    One thread in insertion order, so that ``lag(…) OVER ()`` goes through the files as they stand.
    """
    query = (resources.files(__name__) / "queries" / f"{name}.sql").read_text()
    ordered = "lag(" in query
    with duckdb_session(memory=DUCKDB_MEMORY, threads=1 if ordered else 2, spill=store.work / "spill") as con:
        con.execute(f"SET preserve_insertion_order = {str(ordered).lower()}")
        for view, sql in _views(store).items():
            con.execute(f"CREATE VIEW {view} AS {sql}")
        return con.execute(query).fetchone()


def _views(store: Store) -> dict[str, str]:
    """Return the views that the queries read, by name."""
    shuffled = " UNION ALL ".join(
        f"""SELECT {quote(split)} AS split,
            regexp_extract(filename, 'bucket-(\\d+)', 1)::INTEGER AS bucket, * EXCLUDE (filename)
            FROM {read_parquet_sql(files, filename=True)}"""
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
