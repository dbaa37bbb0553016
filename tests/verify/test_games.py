"""Verify finds wrong positions of games, with arrays for a few games as with arrays for all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import VerifyError
from hexdata.store import Store
from hexdata.verify import VerifyOptions
from hexdata.verify.games import check_games

if TYPE_CHECKING:
    from .conftest import Edit, Rewrite

GAMES = "games/part-000000.parquet"
PART = "positions/part-000001.parquet"
ARRAYS = [pytest.param(300, id="a few games"), pytest.param(None, id="all games")]


def recovered(table: pa.Table) -> pa.Table:
    """Return games that are all recovered."""
    index = table.schema.get_field_index("provenance")
    return table.set_column(index, table.schema.field(index), pa.array(["recovered"] * len(table)))


def numbered(table: pa.Table) -> pa.Table:
    """Return positions with the plies of their games, 0, 1, 2, …, and their number."""
    games = table["game_id"].fill_null(-1).to_numpy()
    plies, totals = np.zeros(len(games), np.uint16), np.zeros(len(games), np.uint16)
    for game in np.unique(games):
        (rows,) = np.nonzero(games == game)
        plies[rows], totals[rows] = np.arange(len(rows)), len(rows)
    for name, values in (("position_in_game", plies), ("total_positions", totals)):
        table = table.set_column(
            table.schema.get_field_index(name), table.schema.field(name), pa.array(values, pa.uint16())
        )
    return table


@pytest.fixture
def plies(store: Path, rewrite: Rewrite) -> Path:
    """A store whose games are all recovered; the positions have no plies except those of one file."""
    rewrite(store, GAMES, recovered)
    for path in sorted((store / "positions").iterdir()):
        name = f"positions/{path.name}"
        rewrite(store, name, numbered if name == PART else without_plies)
    return store


def without_plies(table: pa.Table) -> pa.Table:
    index = table.schema.get_field_index("position_in_game")
    return table.set_column(index, table.schema.field(index), pa.nulls(len(table), pa.uint16()))


def find_row(store: Path, name: str = PART) -> tuple[int, int]:
    """Return the row of the fourth position of a game, and the game."""
    rows = pq.read_table(store / name, columns=["game_id"])["game_id"].to_pylist()
    game = next(game for game in rows if game is not None)
    return rows.index(game) + 3, game


def check(store: Path, held_bytes: int | None) -> str:
    return check_games(Store.open(store), VerifyOptions(), held_bytes=held_bytes)


@pytest.mark.parametrize("held", ARRAYS)
def test_right_games_pass(plies: Path, held: int | None) -> None:
    count = pq.read_metadata(plies / GAMES).num_rows
    assert check(plies, held) == f"{count:,} games have all their positions"


@pytest.mark.parametrize("held", ARRAYS)
def test_a_repeated_position_is_found(plies: Path, rewrite: Rewrite, edit: Edit, held: int | None) -> None:
    row, game = find_row(plies)
    rewrite(plies, PART, lambda table: edit(table, "position_in_game", row, 2))
    with pytest.raises(
        VerifyError, match=rf"game {game}: .*found position_in_game 2; expected each position"
    ):
        check(plies, held)


@pytest.mark.parametrize("held", ARRAYS)
def test_a_position_repeated_in_another_file_is_found(
    plies: Path, rewrite: Rewrite, edit: Edit, held: int | None
) -> None:
    other = "positions/part-000002.parquet"
    (row, game), (other_row, other_game) = find_row(plies), find_row(plies, other)
    rewrite(plies, PART, lambda table: edit(table, "game_id", row, other_game))
    rewrite(plies, PART, lambda table: edit(table, "position_in_game", row, None))
    rewrite(plies, other, lambda table: edit(table, "game_id", other_row, game))
    check(plies, held)
    rewrite(plies, other, lambda table: edit(table, "position_in_game", other_row, 2))
    with pytest.raises(
        VerifyError, match=rf"game {game}: .*found position_in_game 2; expected each position"
    ):
        check(plies, held)


@pytest.mark.parametrize("held", ARRAYS)
def test_a_position_beyond_the_last_is_found(
    plies: Path, rewrite: Rewrite, edit: Edit, held: int | None
) -> None:
    row, _ = find_row(plies)
    rewrite(plies, PART, lambda table: edit(table, "position_in_game", row, 30))
    with pytest.raises(
        VerifyError, match=r"found position_in_game 30; expected .* below its total_positions"
    ):
        check(plies, held)


@pytest.mark.parametrize("held", ARRAYS)
def test_a_position_of_another_game_is_found(
    plies: Path, rewrite: Rewrite, edit: Edit, held: int | None
) -> None:
    row, game = find_row(plies)
    rewrite(plies, PART, lambda table: edit(table, "game_id", row, game + 1))
    with pytest.raises(VerifyError, match=rf"game {game} has the wrong number of positions"):
        check(plies, held)


@pytest.mark.parametrize("game", [-1, 10_000])
def test_a_position_of_an_unknown_game_is_found(plies: Path, rewrite: Rewrite, edit: Edit, game: int) -> None:
    rewrite(plies, PART, lambda table: edit(table, "game_id", 50, game))
    with pytest.raises(VerifyError, match=rf"unknown game; found game_id {game}; expected a game_id from 0"):
        check(plies, None)


def test_a_file_with_wrong_statistics_is_found(plies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = range(1)
    monkeypatch.setattr(
        "hexdata.verify.games._row_groups",
        lambda store, read=check_games.__globals__["_row_groups"]: [
            group._replace(games=narrow) for group in read(store)
        ],
    )
    with pytest.raises(VerifyError, match="states another range of game_ids than it has"):
        check(plies, None)


def test_files_without_statistics_are_read(plies: Path) -> None:
    table = pq.read_table(plies / PART)
    pq.write_table(table, plies / PART, write_statistics=False)
    assert "games have all their positions" in check(plies, None)


def test_duplicates_are_compared_in_ranges_of_hashes(
    store: Path, rewrite: Rewrite, edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hexdata.verify.games._HASHED_BYTES", 1 << 26)
    check(store, None)
    rewrite(store, GAMES, lambda table: edit(table, "game_hash", 4, table["game_hash"][5].as_py()))
    with pytest.raises(VerifyError, match="found games 4 and 5"):
        check(store, None)
