"""Which value means that blue won: decided by evidence, source by source, and recorded with its counts."""

from __future__ import annotations

import re
from itertools import chain

import pytest

from hexdata.errors import ConfigError, InputError
from hexdata.games.sense import Votes, decide


def without_winners(games):
    """The examples of some games, flat, with no winner named."""
    examples = list(chain.from_iterable(games))
    for example in examples:
        example["metadata"]["winner"] = None
    return examples


def turned(examples):
    for example in examples:
        example["value"] = 1.0 - example["value"]
    return examples


def stored_values(store):
    return store.table("positions")["value"].to_pylist()


@pytest.mark.parametrize(("turn", "sense"), [(list, "blue-is-0"), (turned, "blue-is-1")])
def test_winning_chains_on_final_boards_decide(make, convert, turn, sense):
    values = [example["value"] for example in without_winners(make.dicts(make.games(9)))]
    store = convert(make.write("a.pkl.gz", turn(without_winners(make.dicts(make.games(9))))))
    source = store.source("a.pkl.gz")
    chains = [9, 0] if sense == "blue-is-0" else [0, 9]
    assert (source["value_sense"], source["evidence"]["chains"]) == (sense, chains)
    assert source["evidence"]["given"] is False
    assert stored_values(store) == values
    assert [g["winner"] for g in store.games()] == [("BLUE", "RED")[g.winner] for g in make.games(9)]


@pytest.mark.parametrize(("turn", "sense"), [(list, "blue-is-0"), (turned, "blue-is-1")])
def test_named_winners_decide_where_no_game_is_finished(make, convert, turn, sense):
    examples = list(chain.from_iterable(game[:-1] for game in make.dicts(make.games(9))))
    values = [example["value"] for example in examples]
    store = convert(make.write("a.pkl.gz", turn(examples)))
    source = store.source("a.pkl.gz")
    assert source["evidence"]["chains"] == [0, 0]
    assert max(source["evidence"]["winners"]) == len(examples)
    assert source["value_sense"] == sense
    assert stored_values(store) == values


def test_each_source_has_a_sense_of_its_own(make, convert):
    games = make.games(12)
    make.v1("a.pkl.gz", games[:6])
    make.v2("b.pkl.gz", games[6:])
    store = convert(make.folder)
    assert [s["value_sense"] for s in store.rows("sources")] == ["blue-is-1", "blue-is-0"]
    expected = chain.from_iterable([float(game.winner)] * (len(game.moves) + 1) for game in games)
    assert stored_values(store) == list(expected)


def unclear(make, name="a.pkl.gz", wrong=2):
    """A file of ten games, some of whose values contradict their boards; its winners are not named."""
    games = make.dicts(make.games(10))
    turned(chain.from_iterable(games[:wrong]))
    return make.write(name, without_winners(games))


def silent(make, name="a.pkl.gz"):
    """A file without a finished game or a named winner."""
    return make.write(name, without_winners([game[:-1] for game in make.dicts(make.games(5))]))


@pytest.mark.parametrize("write", [unclear, silent])
def test_a_source_that_does_not_show_its_sense_stops_the_run(make, convert, write, tmp_path):
    write(make)
    with pytest.raises(InputError, match="--value-sense blue-is-0 or --value-sense blue-is-1") as caught:
        convert(make.folder)
    assert caught.value.path == "legacy/a.pkl.gz"
    counts = "8 for blue-is-0 and 2 for" if write is unclear else "0 for blue-is-0 and 0 for"
    assert counts in str(caught.value)
    assert not (tmp_path / "store" / "manifest.json").exists()


@pytest.mark.parametrize("write", [unclear, silent])
@pytest.mark.parametrize("sense", ["blue-is-0", "blue-is-1"])
def test_the_sense_given_is_that_of_a_source_that_does_not_show_it(make, convert, write, sense, request):
    write(make)
    with pytest.raises(InputError):
        convert(make.folder)
    request.getfixturevalue("no_reader")  # what was read is kept
    store = convert(make.folder, value_sense=sense)
    source = store.source("a.pkl.gz")
    assert (source["value_sense"], source["evidence"]["given"]) == (sense, True)


def test_a_given_sense_decides_how_the_values_are_stored(make, convert):
    path = silent(make)
    zero = stored_values(convert(path, store="zero", value_sense="blue-is-0"))
    one = stored_values(convert(path, store="one", value_sense="blue-is-1"))
    assert one == [1.0 - value for value in zero]
    assert zero == list(chain.from_iterable([float(game.winner)] * len(game.moves) for game in make.games(5)))


def test_a_given_sense_does_not_turn_what_is_clear(make, convert):
    """One odd file among many must not cost the labels of the others."""
    make.v1("older.pkl.gz", make.games(6))
    silent(make, "odd.pkl.gz")
    store = convert(make.folder, value_sense="blue-is-0")
    older = store.source("older.pkl.gz")
    assert (older["value_sense"], older["evidence"]) == (
        "blue-is-1",
        {"chains": [0, 6], "winners": [0, 0], "given": False},
    )
    assert store.source("odd.pkl.gz")["evidence"]["given"] is True


def test_trmph_needs_no_evidence(make, convert):
    """Its winner is written out; a resigned game has no chain on its final board."""
    make.folder.mkdir()
    (make.folder / "a.trmph").write_text("#5,a1b1 b\n#5,c3b1a2 r\n")
    store = convert(make.folder)
    assert store.source("a.trmph")["value_sense"] == "blue-is-0"
    assert stored_values(store) == [0.0] * 3 + [1.0] * 4


def test_a_source_without_positions_has_no_sense(make, convert):
    store = convert(make.write("a.pkl.gz", []))
    assert store.source("a.pkl.gz")["value_sense"] is None


@pytest.mark.parametrize(
    ("chains", "winners", "sense"),
    [
        ((99, 1), (0, 0), "blue-is-0"),
        ((1, 99), (0, 0), "blue-is-1"),
        ((0, 0), (0, 1), "blue-is-1"),
        ((100, 0), (50, 50), "blue-is-0"),  # boards prove what names only say
        ((98, 2), (0, 0), None),
        ((98, 2), (100, 0), None),
        ((100, 0), (0, 100), None),  # they contradict each other
        ((0, 0), (0, 0), None),
    ],
)
def test_a_clear_majority_decides(chains, winners, sense):
    votes = Votes(chains, winners)
    if sense is not None:
        assert decide(votes, "a.pkl.gz") == sense
        return
    with pytest.raises(InputError, match=re.escape("at least 99% one way")):
        decide(votes, "a.pkl.gz")


def test_an_unknown_sense_is_a_wrong_option(make, convert):
    with pytest.raises(ConfigError, match="blue-is-2"):
        convert(make.folder, value_sense="blue-is-2")
