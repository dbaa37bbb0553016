"""Games found from boards alone: exactly the played games that can be distinguished.

Games with different origins never meet, so one conversion holds many cases, each with an origin of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hexdata.convert import shuffled
from hexdata.demo.games import DemoGame
from tests.convert.conftest import flat
from tests.demo_games import demo_games
from tests.pairs import FULL

BLOCK = [5 * row + column for row in (1, 2, 3) for column in (1, 2, 3)]
"""Cells in the middle of a board of 5 x 5, so that no stones connect two edges."""


def game(*cells: int, winner: int = 0) -> DemoGame:
    return DemoGame(np.array([BLOCK[cell] for cell in cells], np.uint16), winner)


def key(played: DemoGame) -> tuple[tuple[int, ...], int]:
    return tuple(played.moves.tolist()), played.winner


def examples_of(make, games, origin="x"):
    """Return the examples of games without ids, one game after the other."""
    examples = flat(make.game(each, None, source_file=origin) for each in games)
    for example in examples:
        del example["metadata"]["game_id"]
    return examples


def found_games(store) -> dict[str | None, Counter]:
    """Check that every game has its own positions only, and count games by origin, moves and winner."""
    rows: dict[int, list[dict]] = defaultdict(list)
    for row in store.rows("positions"):
        rows[row["game_id"]].append(row)
    assert sum(map(len, rows.values())) - len(rows.pop(None, ())) == sum(map(len, rows.values()))
    found: dict[str | None, Counter] = defaultdict(Counter)
    for each in store.games():
        own = sorted(rows[each["game_id"]], key=lambda row: row["position_in_game"])
        assert [row["move"] for row in own] == [*each["moves"], None]
        assert [row["position_in_game"] for row in own] == [*range(len(own))]
        assert {row["total_positions"] for row in own} == {len(own)} == {each["total_positions"]}
        planes = np.unpackbits(np.frombuffer(own[-1]["board"], np.uint8))
        assert planes.sum() == len(own) - 1
        first = each["first_player"]
        assert [row["player_to_move"] for row in own] == [(ply + first) % 2 for ply in range(len(own))]
        assert (each["provenance"], each["positions"]) == ("recovered", len(own))
        assert each["file_idx"] is each["line_idx"] is None
        found[each["origin"]][tuple(each["moves"]), ("BLUE", "RED").index(each["winner"])] += 1
    return found


def certain(games: list[DemoGame], lengths_known: bool = True) -> Counter:
    """Count the games that can be distinguished by their boards, with a plain algorithm.

    A game is lost if two pasts and two futures meet at one of its boards, within its class.
    """
    pasts, futures = defaultdict(set), defaultdict(set)

    def passed(played: DemoGame):
        moves, winner = key(played)
        for ply in range(len(moves) + 1):
            board = frozenset(moves[:ply:2]), frozenset(moves[1:ply:2])
            yield (board, winner, len(moves) if lengths_known else None), moves[:ply], moves[ply:]

    for played in games:
        for board, past, future in passed(played):
            pasts[board].add(past)
            futures[board].add(future)
    return Counter(
        key(played)
        for played in games
        if all(len(pasts[board]) == 1 or len(futures[board]) == 1 for board, _, _ in passed(played))
    )


@st.composite
def crossing_games(draw) -> list[DemoGame]:
    """Return games on a few cells of a board, which cross very often; some are copies."""
    cells = draw(st.permutations(range(9)))[: draw(st.integers(1, 6))]
    lengths = st.integers(1, len(cells)) | st.just(len(cells))
    orders = st.tuples(st.permutations(cells), lengths, st.integers(0, 3))
    drawn = draw(st.lists(orders, min_size=1, max_size=14))
    return [game(*order[:length], winner=int(winner == 0)) for order, length, winner in drawn]


@settings(max_examples=60 if FULL else 3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(crossing_games(), min_size=6, max_size=6), tuples=st.booleans())
def test_exactly_the_distinguishable_games_are_found(make, convert, tmp_path_factory, drawn, tuples):
    convert.folder = make.folder = tmp_path_factory.mktemp("crossing")
    if tuples:  # which name no origin
        store = convert(make.shuffled(make.tuples(examples_of(make, drawn[0]))))
        assert found_games(store).get(None, Counter()) == certain(drawn[0], lengths_known=False)
        return
    store = convert(make.shuffled(flat(examples_of(make, games, str(i)) for i, games in enumerate(drawn))))
    assert found_games(store) == {str(i): certain(games) for i, games in enumerate(drawn) if certain(games)}


CROSS = [game(0, 1, 2, 3, 4), game(2, 1, 0, 5, 6)]
"""Two games that reach the same board at ply 3 and then diverge: positions 0 to 5 and 6 to 11."""
APART = [game(0, 1, 2, 3, 4), game(5, 6, 7, 8, 0)]


def test_missing_and_contradicting_positions_lose_only_their_own_games(make, convert):
    """Cases by their origin, with the games that may be found."""
    cases: dict[str, tuple[list, Counter]] = {}

    def case(name, games, expected=(), without=(), number=None, **metadata):
        examples = examples_of(make, games, name)
        if number is not None:
            examples[number]["metadata"] |= metadata
            for field in metadata.keys() & {"policy", "player_to_move"}:
                examples[number][field] = examples[number]["metadata"].pop(field)
        left = [example for index, example in enumerate(examples) if index not in without]
        cases[name] = left, Counter(map(key, expected))

    case("crossing", CROSS)
    case("other winner", [CROSS[0], CROSS[1]._replace(winner=1)], [CROSS[0], CROSS[1]._replace(winner=1)])
    longer = game(2, 1, 0, 5, 6, 7)
    case("other length", [CROSS[0], longer], [CROSS[0], longer])
    for record in range(1, 6):
        third = game(0, 1, 8, 3, 4)
        case(f"without {record}", [APART[0], third, APART[1]], [third, APART[1]], [record])
    for missing in product([2, 3, 4], [8, 9, 10]):
        case(f"without {missing}", CROSS, without=missing)
    wrong = {
        "winner": "RED",
        "total_positions": 7,
        "position_in_game": 3,
        "policy": make.policy(BLOCK[0]),
        "player_to_move": 1,
    }
    for name, value in wrong.items():
        case(f"wrong {name}", APART, [APART[1]], number=2, **{name: value})
    found = found_games(convert(make.shuffled(flat(examples for examples, _ in cases.values()))))
    assert found == {name: expected for name, (_, expected) in cases.items() if expected}


def test_a_game_that_red_began_is_found_where_the_player_is_named(make, convert):
    examples = flat(make.game(APART[0], None, 1, source_file=name) for name in ("named", "nameless"))
    for ply, example in enumerate(examples[:6]):
        example["player_to_move"] = (ply + 1) % 2
    store = convert(make.shuffled(examples))
    assert found_games(store) == {"named": Counter([key(APART[0])])}
    assert store.games()[0]["first_player"] == 1


@pytest.mark.parametrize("layout", ["dicts", "tuples"])
def test_games_of_the_demo_are_found_across_files_and_shuffles(make, convert, monkeypatch, layout):
    """The same with little memory; half of the files find less."""
    make.n = 7
    games = [*demo_games(40, seed=3, board_size=7), *demo_games(5, seed=3, board_size=7)]
    examples = examples_of(make, games, None)
    if layout == "tuples":
        examples = make.tuples(examples)
    order = np.random.default_rng(0).permutation(len(examples))
    folders = [
        make.shuffled([examples[i] for i in part], f"set {number}", sources=(str(number),))
        for number, part in enumerate(np.array_split(order, 2))
    ]
    store = convert(*folders)
    assert sum(found_games(store).values(), Counter()) == certain(games, layout == "dicts")
    assert {each["source_id"] for each in store.games()} == {0}
    if layout == "dicts":
        assert convert(folders[0], store="half").result.games < len(games) // 2
        return
    monkeypatch.setattr(shuffled, "BATCH_ROWS", 64)
    monkeypatch.setattr("hexdata.games.find.WINDOW_ROWS", 64)
    assert convert(*folders, store="narrow").files() == store.files()


def test_ids_are_used_first_and_boards_for_the_rest(make, convert):
    make.n = 7
    games = demo_games(40, seed=3, board_size=7)
    dicts = [make.game(each, (0, line) if line % 2 else None) for line, each in enumerate(games)]
    store = convert(make.shuffled(flat(dicts)))
    assert [each["provenance"] for each in store.games()] == ["metadata"] * 20 + ["recovered"] * 20
    assert Counter(tuple(each["moves"]) for each in store.games()) == Counter(key(each)[0] for each in games)
    assert store.result.without_game == 0
