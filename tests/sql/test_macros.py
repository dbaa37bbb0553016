"""Macros agree with the functions of ``hexdata.board`` for every board size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hexdata.board import MAX_SIZE, MIN_SIZE, cell_name, format_moves, pack_boards, split_trmph
from hexdata.sql import open_catalog
from hexdata.store import Store

MEMORY = 500_000_000
SIZES = (MIN_SIZE, 4, 5, 7, 8, 11, 13, 19, MAX_SIZE)


@pytest.mark.parametrize("size", SIZES)
def test_cell_returns_the_name_of_each_cell_only(sized_store: Callable[[int], Path], size: int) -> None:
    with open_catalog(sized_store(size), memory=MEMORY) as con:
        found = con.sql(f"SELECT cell(i::USMALLINT) FROM range({size * size}) t(i) ORDER BY i").fetchall()
        others = con.sql(
            f"SELECT cell(NULL), cell({size * size}), cell(65535::USMALLINT), cell(-1)"
        ).fetchall()
        assert con.sql("SELECT board_size()").fetchall() == [(size,)]
    assert [name for (name,) in found] == [cell_name(i, size) for i in range(size * size)]
    assert others == [(None,) * 4]


@pytest.mark.parametrize("size", SIZES)
def test_stones_are_counted_by_colour(sized_store: Callable[[int], Path], size: int) -> None:
    rng = np.random.default_rng(size)
    owner = rng.integers(0, 3, (20, size, size))
    owner[0], owner[1], owner[2] = 0, 1, 2
    planes = np.stack([owner == 1, owner == 2], axis=1)
    packed = pack_boards(planes)
    with open_catalog(sized_store(size), memory=MEMORY) as con:
        for board, (blue, red) in zip(packed, planes, strict=True):
            hexadecimal = board.tobytes().hex()
            query = (
                f"SELECT stones(b), blue_stones(b), red_stones(b) FROM (SELECT from_hex('{hexadecimal}') b)"
            )
            assert con.sql(query).fetchall() == [
                (int(blue.sum() + red.sum()), int(blue.sum()), int(red.sum()))
            ]
            ((found,),) = con.sql(f"SELECT planes(from_hex('{hexadecimal}'))").fetchall()
            assert np.array_equal(np.array(found).reshape(2, size, size), (blue, red))
        assert con.sql("SELECT planes(NULL::BLOB)").fetchall() == [(None,)]
        assert con.sql("SELECT stones(NULL::BLOB), red_stones(NULL::BLOB)").fetchall() == [(None, None)]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(MIN_SIZE, MAX_SIZE), seed=st.integers(0, 2**32 - 1))
def test_macros_agree_for_random_boards_of_any_size(
    sized_store: Callable[[int], Path], size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    owner = rng.integers(0, 3, (1, size, size))
    board = pack_boards(np.stack([owner == 1, owner == 2], axis=1))[0].tobytes()
    move = int(rng.integers(size * size))
    with open_catalog(sized_store(size), memory=MEMORY) as con:
        query = (
            f"SELECT cell({move}), blue_stones(from_hex('{board.hex()}')), stones(from_hex('{board.hex()}'))"
        )
        expected = (cell_name(move, size), int((owner == 1).sum()), int((owner > 0).sum()))
        assert con.sql(query).fetchall() == [expected]


def test_a_game_is_a_line_of_trmph(stores: dict[str, Path]) -> None:
    files = Store.open(stores["converted"]).files("games")
    games = [row for path in files for row in pq.read_table(path).to_pylist()]
    with open_catalog(stores["converted"], memory=MEMORY) as con:
        lines = dict(con.sql("SELECT game_id, trmph(game_id) FROM games").fetchall())
        by_position = con.sql("SELECT DISTINCT game_id, trmph(game_id) FROM positions").fetchall()
        assert con.sql("SELECT trmph(-5), trmph(NULL)").fetchall() == [(None, None)]
    assert dict(by_position) == lines
    assert len(lines) == len(games) > 50
    for game in games:
        ending = {"BLUE": " b", "RED": " r"}[game["winner"]]
        assert lines[game["game_id"]] == f"#7,{format_moves(game['moves'], 7)}{ending}"
        assert split_trmph(lines[game["game_id"]]).board_size == 7


@pytest.mark.parametrize("name", ["game_id", "id", "moves", "played", "winner", "won", "game", "m", "move"])
def test_an_argument_may_have_any_name(stores: dict[str, Path], name: str) -> None:
    """DuckDB inserts arguments as text, so no inner name of a macro may capture them."""
    with open_catalog(stores["converted"], memory=MEMORY) as con:
        query = f"""SELECT list(trmph({name}) ORDER BY {name}) = list((SELECT trmph(5)) ORDER BY {name})
            FROM (SELECT 5::BIGINT AS {name} FROM range(2))"""
        assert con.sql(query).fetchall() == [(True,)]
        different = f"SELECT count(DISTINCT trmph({name})) FROM (SELECT game_id AS {name} FROM games)"
        expected = con.sql("SELECT count(DISTINCT (moves, winner)) FROM games").fetchall()
        assert con.sql(different).fetchall() == expected


def test_games_without_moves_have_no_line(stores: dict[str, Path]) -> None:
    with open_catalog(stores["odd"], memory=MEMORY) as con:
        assert con.sql("SELECT count(*), count(trmph(game_id)) FROM games").fetchall() == [(39, 0)]


def test_a_store_without_positions_has_no_cells(stores: dict[str, Path]) -> None:
    with open_catalog(stores["none"], memory=MEMORY) as con:
        assert con.sql("SELECT board_size(), cell(3), trmph(0)").fetchall() == [(None, None, None)]
