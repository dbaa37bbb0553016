"""Games on a board with columns beyond ``z``, with swaps and passes, through every stage."""

from __future__ import annotations

import numpy as np
import pytest

from hexdata import Loader
from hexdata.board import BLUE, RED, format_moves, pack_boards, replay
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.export import ExportOptions, export_shards
from hexdata.show import ShowOptions, draw_svg, read_game
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.sql import open_catalog
from tests.demo_games import demo_games

N = 27
GAMES = demo_games(3, 1, N)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    (folder / "in").mkdir()
    links = [f"{N}c1,{format_moves(moves, N)}\n" for moves, _ in GAMES]
    special = f"{N}c1,aa1:sc3:pd4aa5:rb\n{N}c1,aa1:Sc3d4:fw\n"
    (folder / "in" / "a.hexworld").write_text("".join(links) + special)
    (folder / "in" / "b.sgf").write_text(f"(;FF[4]GM[11]SZ[{N}]DT[2024-05-06]RE[B+T];W[AA27];B[a1];W[z1])\n")
    options = ConvertOptions(workers=1, val=0, test=0)
    convert_sources([folder / "in"], folder / "store", options)
    shuffle_store(folder / "store", ShuffleOptions(threads=1))
    export_shards(folder / "store", ExportOptions(workers=1))
    return folder / "store"


def test_games_are_stored_with_their_ends_and_swaps(store):
    queries = [
        "SELECT winner, end_reason, swap, first_player FROM games ORDER BY game_id",
        "SELECT trmph(game_id) FROM games ORDER BY game_id",
        "SELECT format, date::VARCHAR FROM sources ORDER BY source_id",
        "SELECT cell(move), player_to_move FROM positions WHERE game_id = 3 ORDER BY position_in_game",
    ]
    with open_catalog(store, memory=500_000_000) as con:
        rows, lines, dates, moves = (con.sql(query).fetchall() for query in queries)
    assert rows == [
        *((("BLUE", "RED")[winner], "chain", None, BLUE) for _, winner in GAMES),
        ("RED", "resigned", "pieces", RED),
        ("BLUE", "unknown", "sides", BLUE),
        ("BLUE", "time", None, RED),
    ]
    texts = [f"#{N},{format_moves(moves, N)} {'br'[winner]}" for moves, winner in GAMES]
    assert [line for (line,) in lines] == [*texts, None, f"#{N},aa1c3d4 b", f"#{N},aa27a1z1 b"]
    assert dates == [("hexworld", None), ("sgf", "2024-05-06")]
    assert moves == [("a27", 1), ("c3", 0), (None, 1), ("d4", 0), ("aa5", 1), (None, 0)]


@pytest.mark.parametrize("mode", ["games", "exact"])
def test_every_position_is_delivered(store, mode):
    loader = Loader(store, batch_size=256, seed=1, mode=mode, fields=("board", "move", "value"))
    found = [
        (board.tobytes(), int(move), float(value))
        for batch in loader
        for board, move, value in zip(
            *(pack_boards(batch["board"]), batch["move"], batch["value"]), strict=True
        )
    ]
    assert len(found) == sum(len(moves) + 1 for moves, _ in GAMES) + 6 + 4 + 4
    for moves, winner in GAMES:
        boards = pack_boards(replay(moves, N))
        expected = zip(boards, [*moves.tolist(), 65535], strict=True)
        assert {(board.tobytes(), move, float(winner)) for board, move in expected} <= set(found)


def test_a_game_is_drawn(store):
    game = read_game(store, 0)
    np.testing.assert_array_equal(game.moves, GAMES[0].moves)
    svg = draw_svg(game.last, ShowOptions())
    assert ">aa</text>" in svg
    assert ">27</text>" in svg
