"""Positions and games from arrays and moves: attributes, facts and drawings."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hexdata
from hexdata.board import format_moves
from hexdata.demo.games import make_game
from hexdata.errors import ConfigError, FormatError
from hexdata.show import Game, Position, read_trmph

NS = "{http://www.w3.org/2000/svg}"
BOARD = np.zeros((2, 3, 3), np.float32)
BOARD[0, 0, 0] = BOARD[1, 2, 1] = 1


def test_a_row_of_a_batch_is_a_position():
    """Values that represent null become None."""
    for dtype in ("float32", "float16", "uint8", "bool"):
        position = Position.of_planes(BOARD.astype(dtype), move=np.uint16(4), value=np.float32(1))
        assert (position.move, position.value, position.player) == (4, 1.0, 0)
        assert position.planes.tolist() == BOARD.tolist()
        assert not position.planes.flags.writeable
    nulls = {"game_id": -1, "position_in_game": 65535, "total_positions": 65535, "value_sample_tier": 255}
    for move, facts, expected in ((65535, nulls, None), (0, dict.fromkeys(nulls, 0), 0)):
        position = Position.of_planes(BOARD, move=move, **facts)
        known = (position.move, position.game_id, position.ply, position.total_positions)
        assert (*known, position.value_sample_tier) == (expected,) * 5


def test_a_policy_becomes_a_move_none_or_shades():
    one_hot, dense = np.eye(9)[7], np.full(9, 1 / 9)
    known = Position.of_planes(BOARD, policy=one_hot)
    assert (known.move, known.policy) == (7, None)
    final = Position.of_planes(BOARD, policy=np.zeros((3, 3)))
    assert (final.move, final.policy) == (None, None)
    assert "no next move" in final.facts()
    spread = Position.of_planes(BOARD, policy=dense)
    assert spread.move is None
    assert spread.policy.tolist() == pytest.approx(dense)
    root = ElementTree.fromstring(spread.svg())
    (shaded,) = (group for group in root.iter(NS + "g") if group.findall(NS + "path[@data-cell]"))
    assert len(list(shaded.iter(NS + "path"))) == 9
    assert not [circle for circle in root.iter(NS + "circle") if circle.get("data-mark") == "next"]


def test_facts_are_in_every_form():
    facts = {"winner": 1, "value_sample_tier": 3, "position_id": 12345, "game_id": 7, "last_move": 7}
    position = Position.of_planes(BOARD, move=2, value=1.0, position_in_game=2, total_positions=10, **facts)
    told = ["position 12345", "game 7", "ply 2 of 9", "last move b3", "blue to move", "next move c1"]
    assert position.facts() == [*told, "value 1 (red wins)", "winner red", "tier 3"]
    for text in (repr(position), position._repr_svg_(), " ".join(str(position).split())):
        assert all(fact in text for fact in position.facts())
    assert Position.of_planes(BOARD, value=0.25).facts()[-1] == "value 0.25 (0 blue wins, 1 red wins)"
    assert Position.of_planes(BOARD, value=0).facts()[-1] == "value 0 (blue wins)"
    content = json.loads(json.dumps(position.to_json()))
    expected = {"blue": ["a1"], "red": ["b3"], "board_size": 3, "move": "c1", "last_move": "b3"}
    expected |= {"player_to_move": "blue", "winner": "red", "policy": None, "root_value": None, "game_id": 7}
    assert expected.items() <= content.items()


def test_invalid_positions_are_refused():
    packed = [np.zeros(43), np.zeros(44, np.uint8)]  # packed boards are uint8, of a board's number of bytes
    for board in (np.zeros((3, 3)), np.zeros((3, 5, 5)), np.zeros((2, 5, 4)), *packed):
        with pytest.raises(ConfigError):
            Position.of_planes(board)
    for wrong in ({"move": 9}, {"last_move": -1}, {"board": np.zeros((2, 2, 2))}):
        with pytest.raises(FormatError):
            Position.of_planes(**({"board": BOARD} | wrong))
    for wrong in ({"policy": np.ones(10)}, {"colour": "blue"}):
        with pytest.raises(ConfigError):
            Position.of_planes(BOARD, **wrong)
    with pytest.raises(ConfigError):
        Game([])
    with pytest.raises(ConfigError):
        Game.of_moves(np.arange(9), 3).svg(every=0)


# --- games ----------------------------------------------------------------------------------------------


def test_a_game_has_a_position_per_move():
    game = Game.of_moves(np.array([4, 0, 8]), 3, winner=0)
    assert len(game) == len(game.positions) == 4
    assert [position.player for position in game.positions] == [0, 1, 0, 1]
    assert [position.move for position in game.positions] == [4, 0, 8, None]
    assert [position.last_move for position in game.positions] == [None, 4, 0, 8]
    assert [np.flatnonzero(plane).tolist() for plane in game.at(2).planes] == [[4], [0]]
    assert game.last is game.at(3)
    assert str(game) == str(game.last)
    assert game.to_json()["moves"] == "b2a1c3"
    with pytest.raises(hexdata.HexdataError, match="found ply 4; expected 0 to 3"):
        game.at(4)
    numbers = []
    for shown in (True, False):
        root = ElementTree.fromstring(game.last.svg(numbers=shown))
        on_stones = [g for g in root.iter(NS + "g") if g.get("class") == "hexdata-fill-on-stone"]
        numbers.append(sorted(text.text for group in on_stones for text in group.iter(NS + "text")))
    assert numbers == [["1", "2", "3"], []]


def test_a_film_has_every_position_or_every_kth_and_the_last():
    game = Game.of_moves(np.arange(9), 3)

    def film(**options: int) -> list[str]:
        root = ElementTree.fromstring(game.svg(**options))
        frames = [group for group in root.iter(NS + "g") if group.get("data-frame")]
        return [list(frame.iter(NS + "text"))[-1].text for frame in frames]

    assert film()[:3] == ["ply 0", "ply 1: a1", "ply 2: b1"]
    assert len(film()) == 10
    assert film(every=4) == ["ply 0", "ply 4: a2", "ply 8: b3", "ply 9: c3"]
    assert film(every=3) == ["ply 0", "ply 3: c1", "ply 6: c2", "ply 9: c3"]
    assert film(every=99) == ["ply 0", "ply 9: c3"]


@given(st.data())
def test_moves_of_trmph_are_parsed_in_order(data):
    n = data.draw(st.integers(3, 32))
    moves = data.draw(st.lists(st.integers(0, n * n - 1), unique=True, max_size=40))
    starts = ["#", "http://www.trmph.com/hex/board#", " https://trmph.com/hex/board#"]
    tail, winner = data.draw(st.sampled_from([(" b", 0), (" r", 1), (" 1", 0), (" 2 # by hand", 1)]))
    game = read_trmph(f"{data.draw(st.sampled_from(starts))}{n},{format_moves(moves, n)}{tail}")
    assert (game.size, game.winner, game.moves.tolist()) == (n, winner, moves)
    stones = [np.flatnonzero(plane).tolist() for plane in game.last.planes]
    assert stones == [sorted(moves[::2]), sorted(moves[1::2])]
    assert game.last.total_positions == len(moves) + 1


def test_a_missing_winner_is_that_of_the_chain():
    for number in range(4):
        moves, winner = make_game(number, 1, 7)
        text = f"#7,{format_moves(moves.tolist(), 7)}"
        assert read_trmph(text).winner == winner
        assert read_trmph(f"#7,{format_moves(moves[:-1].tolist(), 7)}").winner is None
        assert read_trmph(f"{text} {'br'[1 - winner]}").winner == 1 - winner  # what is said is believed
