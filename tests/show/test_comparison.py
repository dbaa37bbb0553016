"""Differences between two positions: facts, drawings, and what is compared."""

from __future__ import annotations

import json
import shutil
from itertools import product
from xml.etree import ElementTree

import numpy as np
import pytest

from hexdata.board import SYMMETRIES, replay, transform_planes
from hexdata.errors import ConfigError
from hexdata.show import Comparison, Position, ShowOptions, compare, draw_svg, read_game, read_position

NS = "{http://www.w3.org/2000/svg}"


def test_positions_of_a_game_differ_by_the_moves_between_them(store):
    game = read_game(store, 3)
    comparison = Comparison(game.at(2), game.at(5))
    assert comparison.cells == sorted(game.moves[2:5].tolist())
    assert comparison.facts()[0].startswith(f"only in position {game.at(5).position_id}: ")
    assert "ply: 5 instead of 2" in comparison.facts()
    assert not any(fact.startswith(("game", "winner", "value")) for fact in comparison.facts())


def test_each_difference_is_a_fact():
    first = Position.of_moves([0, 1, 2], 3, move=5, value=0.0, extra={"a": 1.0})
    planes = np.array(first.planes)
    planes[:, 0, 0] = 0, 1
    planes[0, 0, 2], planes[1, 2, 2] = 0, 1
    second = Position(planes, 0, value=0.25, visits=7, metadata="{}", extra={"b": 2.0})
    assert Comparison(first, second).facts() == [
        "only in the first: blue c1",
        "only in the second: red c3",
        "red instead of blue: a1",
        "ply: none instead of 3",
        "player to move: blue instead of red",
        "last move: none instead of c1",
        "next move: none instead of c2",
        "value: 0.25 instead of 0",
        "visits: 7 instead of none",
        "a: none instead of 1",
        "b: 2 instead of none",
        "the metadata differ",
    ]


def test_equal_positions_have_no_differences():
    position = Position.of_moves([0, 4], 3)
    assert Comparison(position, Position.of_moves([0, 4], 3)).facts() == ["no differences"]
    other = Position.of_moves([0, 4], 3, move=5)
    assert Comparison(position, other).facts() == ["all stones are equal", "next move: c2 instead of none"]


def test_the_largest_changes_of_policies_are_listed():
    policies = np.zeros((2, 9), np.float32)
    policies[0, :5] = 0.3, 0.3, 0.2, 0.1, 0.1
    policies[1, :5] = 0.7, 0.0, 0.1, 0.1, 0.1
    first, second = (Position(np.zeros((2, 3, 3)), 0, policy=policy) for policy in policies)
    expected = "policy: a1 70 instead of 30 %, b1 0 instead of 30 %, c1 10 instead of 20 %"
    assert Comparison(first, second).facts() == ["all stones are equal", expected]
    none = Position(np.zeros((2, 3, 3)), 0)
    assert "only the first has a dense policy" in Comparison(first, none).facts()
    assert "only the second has a dense policy" in Comparison(none, first).facts()


@pytest.mark.parametrize(
    ("before", "after", "fact"),
    [
        (0.25, 0.2500001, "0.2500001 instead of 0.25"),
        (None, float("nan"), "nan instead of none"),
        (float("nan"), float("nan"), None),
        (0.5, float("inf"), "inf instead of 0.5"),
    ],
)
def test_numbers_are_shown_with_the_digits_that_differ(before, after, fact):
    first, second = (Position(np.zeros((2, 3, 3)), 0, root_value=x, extra={"a": x}) for x in (before, after))
    expected = [f"root value: {fact}", f"a: {fact}"] if fact else []
    assert Comparison(first, second).facts()[1:] == expected


def test_small_changes_and_nan_in_policies_are_differences():
    def fact(before: list[float], after: list[float]) -> list[str]:
        policies = (np.array([*policy, *[0.0] * 5], np.float32) for policy in (before, after))
        first, second = (Position(np.zeros((2, 3, 3)), 0, policy=policy) for policy in policies)
        return Comparison(first, second).facts()[1:]

    small = "policy: no probability differs by more than 0.5 %"
    assert fact([0.5, 0.5, 0, 0], [0.502, 0.498, 0, 0]) == [small]
    assert fact([np.nan, 1, 0, 0], [np.nan, 1, 0, 0]) == []
    assert fact([0.5, 0.5, 0, 0], [0.5, np.nan, 0, 0]) == ["policy: b1 nan instead of 50 %"]
    assert fact([np.inf, 0, 0, 0], [np.inf, 0.5, 0, 0]) == ["policy: b1 50 instead of 0 %"]


@pytest.mark.parametrize("symmetry", SYMMETRIES[1:])
def test_an_image_of_the_position_is_recognized(symmetry):
    planes = replay([0, 1, 7], 3)[-1]
    image = Position(transform_planes(planes, symmetry).copy(), 0)
    (fact,) = (fact for fact in Comparison(Position(planes, 1), image).facts() if "are equal after" in fact)
    assert ("rotation" in fact) == (symmetry == 1)
    assert ("colours swapped" in fact) == (symmetry > 1)


def test_the_text_has_parentheses_around_differing_cells():
    text = Comparison(Position.of_moves([0], 3), Position.of_moves([3, 4, 5], 3)).text()
    assert text.splitlines()[2:5] == [" 1 ╲(·)· · ╲ 1", "  2 ╲(●|○|●)╲ 2", "   3 ╲ · · · ╲ 3"]
    assert "( ) different" in text
    assert "only in ply 1: blue a1" in text


@pytest.mark.parametrize(("color", "unicode"), list(product((False, True), repeat=2)))
@pytest.mark.parametrize("width", [58, 78])
def test_lines_of_the_text_fit_a_terminal(color, unicode, width):
    random = np.random.default_rng(1)
    first, second = (Position.of_moves(random.permutation(169)[:120], 13) for _ in range(2))
    text = Comparison(first, second).text(color=color, unicode=unicode, width=width)
    assert unicode or text.isascii()
    assert color or max(map(len, text.splitlines())) <= width


def test_the_ascii_text_names_a_rotation():
    first, second = Position.of_moves([0], 3), Position.of_moves([8], 3)
    assert Comparison(first, second).text(unicode=False).isascii()


def test_the_svg_shows_both_boards_with_the_differing_cells(store):
    comparison = compare(str(store), "41", ShowOptions(position=40))
    svg = ElementTree.fromstring(draw_svg(comparison, ShowOptions()))
    frames = [group for group in svg.iter(f"{NS}g") if "data-frame" in group.attrib]
    assert len(frames) == 2
    for frame in frames:
        (path,) = (path for path in frame.iter(f"{NS}path") if path.get("data-mark") == "different")
        assert path.get("d", "").count("M") == len(comparison.cells)
    assert comparison._repr_svg_() == comparison.svg()
    equal = compare(str(store), "40", ShowOptions(position=40))
    assert equal.title == "position 40 compared with position 40"
    assert "data-mark" not in equal.svg()


def test_each_kind_of_second_position_is_found(store):
    options = ShowOptions(game=3, ply=4)
    first = read_game(store, 3).at(4)
    assert compare(str(store), str(first.position_id), options).facts() == ["no differences"]
    assert compare(str(store), "3:4", options).facts() == ["no differences"]
    assert compare(str(store), "#7,a1b2c3", options).second.ply == 3
    shard = f"{store}/shards/train-000000.tar:5"
    position = compare(shard, shard).first
    assert compare(str(store), shard, ShowOptions(position=position.position_id)).cells == []
    assert compare("#5,a1b2c3", "#5,a1b2", ShowOptions(ply=2)).cells == []
    named = shutil.copytree(store, store.parent / "odd.tar:17")
    assert compare(str(named), "3", ShowOptions(position=3)).facts() == ["no differences"]


@pytest.mark.parametrize(
    ("location", "other", "options", "message"),
    [
        ("#5,a1", "3", {}, "another kind.*not of a store"),
        ("#5,a1", "3:4", {}, "another kind.*not of a store"),
        ("STORE/shards/train-000000.tar:5", "3", {}, "another kind.*not of a store"),
        *(
            ("STORE", other, {"position": 1}, "second position of the comparison cannot be used")
            for other in ("", "-5", "7:", ":7", "STORE", "nowhere")
        ),
        ("STORE", "#6,a1", {"position": 1}, "different board sizes.*sizes 7 and 6"),
        ("STORE", "2", {"game": 1, "every": 2}, "every does not apply to a comparison"),
        ("STORE", "2", {"position": 1, "numbers": True}, "numbers does not apply to a comparison"),
    ],
)
def test_what_cannot_be_compared_is_refused(store, location, other, options, message):
    with pytest.raises(ConfigError, match=message):
        compare(location.replace("STORE", str(store)), other, ShowOptions(**options))


def test_json_has_both_positions_and_the_differences(store):
    comparison = Comparison(read_position(store, 3), read_position(store, 4))
    content = json.loads(json.dumps(comparison.to_json()))
    assert (content["first"]["position_id"], content["second"]["position_id"]) == (3, 4)
    assert len(content["cells"]) == len(comparison.cells) == 1
    assert content["differences"] == comparison.facts()
    assert repr(comparison) == "<Comparison: position 4 compared with position 3, 1 differing cell>"
