"""The value convention is decided from the evidence in each source and recorded with its counts."""

from __future__ import annotations

import json
import re
from itertools import chain

import numpy as np
import pytest

from hexdata.board import winner_of
from hexdata.errors import FormatError, InputError
from hexdata.games.convention import Decision, Votes, decide
from hexdata.live.chunk_source_loader import ChunkSourceLoader
from hexdata.verify import verify_store
from hexdata.verify.roundtrip import check_round_trip
from tests.convert.conftest import flat


def without_winners(games):
    """Return the examples of games in one list, without named winners."""
    examples = flat(games)
    for example in examples:
        example["metadata"]["winner"] = None
    return examples


def inverted(examples, name_winners=False):
    for example in examples:
        example["value"] = 1.0 - example["value"]
        if name_winners:
            example["metadata"]["winner"] = ("BLUE", "RED")[int(example["value"])]
    return examples


# Files with other evidence


def unclear(make, name="a.pkl.gz", start=0):
    """Write ten games without named winners; the values of four contradict their boards."""
    games = make.dicts(make.games(10, start=start))
    inverted(flat(games[:4]))
    return make.write(name, without_winners(games))


def silent(make):
    """Write games without an end or a named winner."""
    return make.write("a.pkl.gz", without_winners([game[:-1] for game in make.dicts(make.games(5))]))


def named_and_refuted(make):
    """Write four games whose values agree with their named winners and contradict every board."""
    return make.write("a.pkl.gz", inverted(flat(make.dicts(make.games(4))), name_winners=True))


def mislabelled(make):
    """Write five finished games, one of them mislabelled with its winner, and many unfinished games."""
    games = make.dicts(make.games(40))
    inverted(games[4], name_winners=True)
    return make.write("a.pkl.gz", flat(games[:5]) + flat(game[:-1] for game in games[5:]))


def one_repeats(make):
    """Write nine sound tuple games, and one with a repeated move whose chain contradicts its value."""
    examples = make.tuples(flat(make.game(game, None) for game in make.games(9)))
    for number in range(200):
        game = make.game(make.repeating(number, at=4, of=0, tail=99))
        if winner_of(game[-1]["board"][np.newaxis].astype(np.uint8))[0] == game[-1]["value"]:
            return make.write("a.pkl.gz", examples + make.tuples(inverted(game)))
    raise AssertionError("no such game")


def evidence(store):
    source = store.source("a.pkl.gz")
    return source["value_sense"], source["evidence"]["by"], source["evidence"]["counted"]["chains"]


@pytest.mark.parametrize(("change", "convention"), [(list, "blue-is-0"), (inverted, "blue-is-1")])
def test_winning_chains_on_final_boards_decide(make, convert, change, convention):
    examples = without_winners(make.dicts(make.games(9)))
    values = [example["value"] for example in examples]
    store = convert(make.write("a.pkl.gz", change(examples)))
    chains = [9, 0] if convention == "blue-is-0" else [0, 9]
    assert evidence(store) == (convention, "chains", chains)
    assert store.source("a.pkl.gz")["evidence"]["given"] is False
    assert store.table("positions")["value"].to_pylist() == values
    assert [g["winner"] for g in store.games()] == [("BLUE", "RED")[g.winner] for g in make.games(9)]


def test_one_error_lists_every_undecided_file(make, convert):
    for index in range(8):
        if index % 4 == 3:
            unclear(make, f"{index}.pkl.gz", start=10 * index)
        else:
            (make.v1 if index % 2 else make.v2)(f"{index}.pkl.gz", make.games(10, start=10 * index))
    with pytest.raises(InputError, match="of 2 files") as caught:
        convert(make.folder)
    assert re.findall(r"legacy/(\d)\.pkl\.gz: winning chains 6", str(caught.value)) == ["3", "7"]
    store = convert(make.folder, value_convention="blue-is-0")
    assert [
        (row["value_sense"], json.loads(row["value_sense_evidence"])["by"]) for row in store.rows("sources")
    ] == [
        ("blue-is-0", "winners"),
        ("blue-is-1", "chains"),
        ("blue-is-0", "winners"),
        ("blue-is-0", "given"),
    ] * 2


def test_flagged_games_are_not_evidence(make, convert):
    """The only contradicting chain of a tuple file belongs to a game with a repeated move."""
    store = convert(one_repeats(make))
    assert evidence(store) == ("blue-is-1", "chains", [0, 9])
    assert store.source("a.pkl.gz")["evidence"]["chains"] == [1, 9]
    assert {"repeated-move", "label-contradicts-chain"} <= set(store.games()[9]["flags"])
    assert not any(game["flags"] for game in store.games()[:9])


@pytest.mark.parametrize("given", ["auto", "blue-is-0", "blue-is-1"])
def test_named_winners_override_every_board_with_a_note(make, convert, given):
    store = convert(named_and_refuted(make), value_convention=given)
    assert evidence(store)[:2] == ("blue-is-0", "winners")
    assert store.result.flags["label-contradicts-chain"] == 4
    (note,) = store.notes()
    assert ": 4 of 4" in note
    assert store.result.file_notes == {"legacy/a.pkl.gz": [note]}
    assert ["legacy/a.pkl.gz" in note for note in store.result.notes] == [True] * (given == "blue-is-1")


@pytest.mark.parametrize("flipped", [False, True])
def test_a_file_in_which_red_begins_decides_by_its_own_games(make, convert, flipped):
    """Games that red began are flagged, but they are the evidence if there are no others."""
    examples = without_winners(make.dicts(make.games(6)))
    for example in examples:
        example["board"] = np.ascontiguousarray(example["board"].transpose(0, 2, 1)[::-1])
        if example["policy"] is not None:
            example["policy"] = example["policy"].reshape(make.n, make.n).T.reshape(-1).copy()
    store = convert(make.write("a.pkl.gz", inverted(examples) if flipped else examples))
    assert evidence(store)[0] == ("blue-is-0" if flipped else "blue-is-1")
    for game in store.games():
        assert "colours-swapped" in game["flags"]
        assert "label-contradicts-chain" not in game["flags"]


ZERO, ONE = "blue-is-0", "blue-is-1"
DICT, TUPLE = ZERO, ONE


@pytest.mark.parametrize(
    ("chains", "winners", "layout", "expected"),
    [
        # Named winners: 19 votes outweigh each opposing vote, for any boards and layout.
        ((0, 0), (1, 0), TUPLE, (ZERO, "winners")),
        ((0, 0), (1, 19), DICT, (ONE, "winners")),
        ((5, 5), (10, 0), DICT, (ZERO, "winners")),
        ((4, 5), (1000, 0), TUPLE, (ZERO, "winners")),
        ((100, 0), (0, 100), None, (ONE, "winners")),
        # Chains: four votes outweigh each opposing vote; the layout may be one of the four.
        ((1, 9), (0, 0), TUPLE, (ONE, "chains")),
        ((4, 1), (0, 0), DICT, (ZERO, "chains")),
        ((3, 1), (0, 0), DICT, (ZERO, "chains")),
        ((1, 1), (0, 0), DICT, None),
        ((79, 21), (0, 0), DICT, None),
        ((8, 2), (0, 0), TUPLE, (ZERO, "chains")),
        ((7, 2), (0, 0), TUPLE, None),
        ((1, 0), (0, 0), TUPLE, (ZERO, "chains")),
        ((3, 1), (0, 0), TUPLE, None),
        ((1, 0), (0, 0), None, (ZERO, "chains")),
        # Contradicting named winners without a board: the same rule.
        ((0, 0), (9, 1), DICT, (ZERO, "winners")),
        ((0, 0), (6, 4), DICT, None),
        # Only the layout, or nothing at all.
        ((0, 0), (0, 0), DICT, (ZERO, "layout")),
        ((0, 0), (0, 0), TUPLE, (ONE, "layout")),
        ((0, 0), (0, 0), None, None),
    ],
)
def test_the_weight_of_evidence_decides(chains, winners, layout, expected):
    votes = Votes(chains, winners)
    decided = decide(votes, layout)
    against = chains[expected[0] == ZERO] if expected else 0
    assert decided == (expected and Decision(*expected, against))
    other = {ZERO: ONE, ONE: ZERO, None: None}
    mirrored = decide(Votes(chains[::-1], winners[::-1]), other[layout])
    assert mirrored == (expected and Decision(other[expected[0]], expected[1], against))
    if expected and expected[1] != "layout":
        assert {decide(votes, layout, given) for given in (ZERO, ONE)} == {decided}, "overridden"
    else:
        assert [decide(votes, layout, given).convention for given in (ZERO, ONE)] == [ZERO, ONE]


@pytest.mark.parametrize("given", ["auto", "blue-is-1"])
@pytest.mark.parametrize(
    ("write", "size"),
    [(mislabelled, 3), (one_repeats, 11), (named_and_refuted, 5), (silent, 3), (unclear, 11)],
)
def test_live_decides_as_convert_and_an_export_restores_the_values(make, convert, write, size, given):
    make.n = size
    path = write(make)
    loader = ChunkSourceLoader(directory=path.parent, value_convention=given)
    if write is unclear and given == "auto":
        with pytest.raises(InputError):
            convert(path)
        with pytest.raises(FormatError, match="the value convention of the file cannot be determined"):
            loader.read(path.name)
        return
    store = convert(path, value_convention=given)
    (trip,) = check_round_trip(store.path, path)
    assert trip.ok, trip.detail
    assert verify_store(store.path).ok
    chunks = loader.read(path.name).chunks
    flags = [[flag for flag in game["flags"] if "duplicate" not in flag] for game in store.games()]
    assert [list(chunk.flags) for chunk in chunks] == flags
    values = [
        [chunk.value] * (len(chunk.moves) + 1) if chunk.moves is not None else chunk.block["value"].tolist()
        for chunk in chunks
    ]
    assert list(chain.from_iterable(values)) == store.table("positions")["value"].to_pylist()
