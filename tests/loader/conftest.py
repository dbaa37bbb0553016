"""Fixtures: folders of synthetic shards, and the same positions with results of a search in both modes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.loader.game_stores import (
    SEARCHED,
    Row,
    add_search,
    position_rows,
    sample_games,
    write_shards,
    write_store,
)
from tests.shard_folder import make_shards, shards

__all__ = ["make_shards", "shards"]


@dataclass(frozen=True)
class Searched:
    """A store with results of a search, its positions as shards, and the rows of the split train by id."""

    store: Path
    shards: Path
    rows: dict[int, Row]


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """Games in three parts, some packed, in small row groups; one part has no results. Read only."""
    n = 5
    games = sample_games(24, n, 3)
    parts: list[list[Row]] = [[], [], []]
    for number, game in enumerate(games):
        rows = position_rows(game, n, number % 2)
        if number % 3 < 2:
            add_search(rows, n, number)
        if number == 3:
            for row in rows:
                row["game_id"] = None
        if number in (4, 5):
            del rows[0]
        parts[number % 3] += reversed(rows) if number == 6 else rows
    folder = tmp_path_factory.mktemp("searched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hexdata.store.parquet.ROW_GROUP_ROWS", 37)
        store = write_store(folder / "store", n, games, parts, targets=SEARCHED)
    numbered = enumerate(row for rows in parts for row in rows)
    kept = {
        number: {**dict.fromkeys(SEARCHED), **row, "position_id": number}
        for number, row in numbered
        if row["game_id"] is None or games[row["game_id"]]["split"] == "train"
    }
    # Null and NaN are the same for a loader.
    clean = {
        number: {name: None if value != value else value for name, value in row.items()}
        for number, row in kept.items()
    }
    return Searched(store, write_shards(store, folder / "shards"), clean)


@pytest.fixture(params=["games", "exact"])
def data(request: pytest.FixtureRequest, searched: Searched) -> Path:
    """The same positions for games mode and for exact mode."""
    return searched.store if request.param == "games" else searched.shards
