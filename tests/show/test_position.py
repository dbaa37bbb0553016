"""Positions and games from arrays and moves: attributes, facts and drawings."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hexdata
from hexdata.board import pack_boards
from hexdata.errors import ConfigError, FormatError
from hexdata.show import Game, Position
from hexdata.show.position import played_moves

NS = "{http://www.w3.org/2000/svg}"


def made(n: int = 3) -> np.ndarray:
    planes = np.zeros((2, n, n), np.float32)
    planes[0, 0, 0] = planes[1, 2, 1] = 1
    return planes


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "bool"])
def test_a_row_of_a_batch_is_a_position(dtype):
    position = Position.of_planes(made().astype(dtype), move=np.uint16(4), value=np.float32(1))
    assert (position.move, position.value, position.player) == (4, 1.0, 0)
    assert position.planes.tolist() == made().tolist()
    assert not position.planes.flags.writeable


@given(st.integers(3, 32), st.integers(0, 2**32))
def test_a_packed_board_is_the_same_position(n, seed):
    planes = np.random.default_rng(seed).integers(0, 2, (2, n, n), np.uint8)
    packed = pack_boards(planes[None])[0]
    assert np.array_equal(Position.of_planes(packed).planes, planes)


def test_null_values_of_shards_become_none():
    facts = {"game_id": -1, "position_in_game": 65535, "total_positions": 65535, "value_sample_tier": 255}
    position = Position.of_planes(made(), move=65535, **facts)
    known = (position.move, position.game_id, position.ply, position.total_positions)
    assert (*known, position.value_sample_tier) == (None,) * 5
    others = dict.fromkeys(facts, 0)
    position = Position.of_planes(made(), move=0, **others)
    known = (position.move, position.game_id, position.ply, position.total_positions)
    assert (*known, position.value_sample_tier) == (0,) * 5


def test_a_policy_becomes_a_move_none_or_shades():
    one_hot, dense = np.eye(9)[7], np.full(9, 1 / 9)
    assert Position.of_planes(made(), policy=one_hot).move == 7
    assert Position.of_planes(made(), policy=one_hot).policy is None
    final = Position.of_planes(made(), policy=np.zeros((3, 3)))
    assert (final.move, final.policy) == (None, None)
    assert "no next move" in final.facts()
    spread = Position.of_planes(made(), policy=dense)
    assert spread.move is None
    assert spread.policy.tolist() == pytest.approx(dense)
    root = ElementTree.fromstring(spread.svg())
    shaded = next(g for g in root.iter(NS + "g") if g.get("class") == "hexdata-fill-heat")
    assert len(list(shaded.iter(NS + "path"))) == 9
    assert not [circle for circle in root.iter(NS + "circle") if circle.get("data-mark") == "next"]


def test_an_unknown_player_is_derived_from_the_stones():
    planes = made()
    assert Position.of_planes(planes).player == 0
    assert Position.of_planes(planes, player_to_move=1).player == 1
    planes[0, 1, 1] = 1
    assert Position.of_planes(planes).player == 1


def test_facts_are_short_texts():
    position = Position.of_planes(
        made(),
        move=2,
        value=1.0,
        winner=1,
        value_sample_tier=3,
        position_id=12345,
        game_id=7,
        position_in_game=2,
        total_positions=10,
        last_move=7,
    )
    assert position.facts() == [
        "position 12345",
        "game 7",
        "ply 2 of 9",
        "last move b3",
        "blue to move",
        "next move c1",
        "value 1 (red wins)",
        "winner red",
        "tier 3",
    ]
    assert repr(position) == f"<Position on a board of size 3: {', '.join(position.facts())}>"
    for fact in position.facts():
        assert fact in str(position)
        assert fact in position._repr_svg_()
    assert Position.of_planes(made(), value=0.25).facts()[-1] == "value 0.25 (0 blue wins, 1 red wins)"
    assert Position.of_planes(made(), value=0).facts()[-1] == "value 0 (blue wins)"


def test_json_names_cells():
    position = Position.of_planes(made(), move=2, last_move=7)
    facts = json.loads(json.dumps(position.to_json()))
    assert (facts["blue"], facts["red"], facts["board_size"]) == (["a1"], ["b3"], 3)
    assert (facts["move"], facts["last_move"], facts["player_to_move"]) == ("c1", "b3", "blue")
    assert facts["winner"] is facts["policy"] is facts["game_id"] is None


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Position.of_planes(np.zeros((3, 3))), ConfigError),
        (lambda: Position.of_planes(np.zeros((3, 5, 5))), ConfigError),
        (lambda: Position.of_planes(np.zeros((2, 5, 4))), ConfigError),
        (lambda: Position.of_planes(np.zeros((2, 2, 2))), FormatError),
        (lambda: Position.of_planes(np.zeros(43)), ConfigError),  # packed boards are uint8
        (lambda: Position.of_planes(np.zeros(44, np.uint8)), ConfigError),
        (lambda: Position.of_planes(made(), move=9), FormatError),
        (lambda: Position.of_planes(made(), last_move=-1), FormatError),
        (lambda: Position.of_planes(made(), policy=np.ones(10)), ConfigError),
        (lambda: Position.of_planes(made(), colour="blue"), ConfigError),
        (lambda: Game([]), ConfigError),
    ],
)
def test_invalid_positions_are_refused(make, error):
    with pytest.raises(error):
        make()


def test_a_game_has_a_position_per_move():
    game = hexdata.Game.of_moves(np.array([4, 0, 8]), 3, winner=0)
    assert len(game) == len(game.positions) == 4
    assert [position.player for position in game.positions] == [0, 1, 0, 1]
    assert [position.move for position in game.positions] == [4, 0, 8, None]
    assert [position.last_move for position in game.positions] == [None, 4, 0, 8]
    assert game.at(2).planes.reshape(2, 9).tolist() == [
        [0, 0, 0, 0, 1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert game.last is game.at(3)
    assert str(game) == str(game.last)
    assert game.to_json()["moves"] == "b2a1c3"
    with pytest.raises(hexdata.HexdataError, match="found ply 4; expected 0 to 3"):
        game.at(4)


def test_moves_count_as_played_only_if_they_lead_to_the_stones():
    planes = np.zeros((2, 3, 3), np.uint8)
    planes[1, 0, 0] = planes[0, 1, 1] = 1  # red a1, blue b2
    assert played_moves([0, 4, 8], 2, planes, first_player=1).tolist() == [0, 4]
    assert played_moves([4, 0, 8], 2, planes, first_player=0).tolist() == [4, 0]
    assert played_moves([4, 0, 8], 2, planes, first_player=None).tolist() == [4, 0]
    assert played_moves([4, 0, 8], 2, planes, first_player=1) is None
    assert played_moves([4, 0, 8], 3, planes, first_player=0) is None
    assert played_moves([4], 2, planes, first_player=0) is None
    assert played_moves([4, 4], 2, planes, first_player=0) is None
    assert played_moves(None, 2, planes, first_player=0) is None
    assert played_moves([4, 0], None, planes, first_player=0) is None


def film(game: Game, **options: int) -> list[str]:
    """Return the captions of the frames of a filmstrip."""
    root = ElementTree.fromstring(game.svg(**options))
    frames = [group for group in root.iter(NS + "g") if group.get("data-frame")]
    return [list(frame.iter(NS + "text"))[-1].text for frame in frames]


def test_a_film_has_every_position_or_every_kth_and_the_last():
    game = Game.of_moves(np.arange(9), 3)
    assert film(game)[:3] == ["ply 0", "ply 1: a1", "ply 2: b1"]
    assert len(film(game)) == 10
    assert film(game, every=4) == ["ply 0", "ply 4: a2", "ply 8: b3", "ply 9: c3"]
    assert film(game, every=3)[-1] == "ply 9: c3"
    assert len(film(game, every=3)) == 4
    assert film(game, every=99) == ["ply 0", "ply 9: c3"]
    with pytest.raises(ConfigError):
        game.svg(every=0)


@pytest.mark.parametrize("moves", [47, 48, 100, 676])
def test_a_long_game_has_about_48_frames(moves):
    frames = film(Game.of_moves(np.arange(moves), 26))
    assert len(frames) <= 49
    assert len(frames) > 20
    assert frames[-1].startswith(f"ply {moves}:")


def test_stones_are_numbered_by_their_ply():
    game = Game.of_moves(np.array([4, 0, 8]), 3)
    root = ElementTree.fromstring(game.last.svg(numbers=True))
    (group,) = [g for g in root.iter(NS + "g") if g.get("class") == "hexdata-fill-on-stone"]
    assert sorted(text.text for text in group.iter(NS + "text")) == ["1", "2", "3"]
    without = ElementTree.fromstring(game.last.svg())
    assert not [g for g in without.iter(NS + "g") if g.get("class") == "hexdata-fill-on-stone"]
