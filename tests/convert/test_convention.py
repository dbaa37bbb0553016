"""The value convention is decided from the evidence in each source and recorded with its counts."""

from __future__ import annotations

import json
import re
from itertools import chain

import numpy as np
import pytest

from hexdata.board import winner_of
from hexdata.errors import ConfigError, FormatError, InputError
from hexdata.games.convention import Decision, Votes, decide
from hexdata.live.chunk import FoundFile
from hexdata.live.chunk_source_loader import ChunkSourceLoader
from hexdata.sql import run_query
from hexdata.verify import verify_store
from hexdata.verify.roundtrip import check_round_trip
from tests.pairs import every_pair


def without_winners(games):
    """Return the examples of games in one list, without named winners."""
    examples = list(chain.from_iterable(games))
    for example in examples:
        example["metadata"]["winner"] = None
    return examples


def inverted(examples):
    for example in examples:
        example["value"] = 1.0 - example["value"]
    return examples


def stored_values(store):
    return store.table("positions")["value"].to_pylist()


@pytest.mark.parametrize(("change", "convention"), [(list, "blue-is-0"), (inverted, "blue-is-1")])
def test_winning_chains_on_final_boards_decide(make, convert, change, convention):
    values = [example["value"] for example in without_winners(make.dicts(make.games(9)))]
    store = convert(make.write("a.pkl.gz", change(without_winners(make.dicts(make.games(9))))))
    source = store.source("a.pkl.gz")
    chains = [9, 0] if convention == "blue-is-0" else [0, 9]
    assert (source["value_sense"], source["evidence"]["chains"]) == (convention, chains)
    assert source["evidence"]["given"] is False
    assert stored_values(store) == values
    assert [g["winner"] for g in store.games()] == [("BLUE", "RED")[g.winner] for g in make.games(9)]


@pytest.mark.parametrize(("change", "convention"), [(list, "blue-is-0"), (inverted, "blue-is-1")])
def test_named_winners_decide_where_no_game_is_finished(make, convert, change, convention):
    examples = list(chain.from_iterable(game[:-1] for game in make.dicts(make.games(9))))
    values = [example["value"] for example in examples]
    store = convert(make.write("a.pkl.gz", change(examples)))
    source = store.source("a.pkl.gz")
    assert source["evidence"]["chains"] == [0, 0]
    assert max(source["evidence"]["winners"]) == len(examples)
    assert source["value_sense"] == convention
    assert stored_values(store) == values


def test_each_source_has_its_own_convention(make, convert):
    games = make.games(12)
    make.v1("a.pkl.gz", games[:6])
    make.v2("b.pkl.gz", games[6:])
    store = convert(make.folder)
    assert [s["value_sense"] for s in store.rows("sources")] == ["blue-is-1", "blue-is-0"]
    expected = chain.from_iterable([float(game.winner)] * (len(game.moves) + 1) for game in games)
    assert stored_values(store) == list(expected)


def unclear(make, name="a.pkl.gz", wrong=4, start=0):
    """A file of ten games without named winners, some of whose values contradict their boards."""
    games = make.dicts(make.games(10, start=start))
    inverted(chain.from_iterable(games[:wrong]))
    return make.write(name, without_winners(games))


def silent(make, name="a.pkl.gz"):
    """A file without a finished game or a named winner."""
    return make.write(name, without_winners([game[:-1] for game in make.dicts(make.games(5))]))


def named_and_refuted(make, name="a.pkl.gz", games=4):
    """A file whose values agree with its named winners and contradict every board."""
    examples = list(chain.from_iterable(make.dicts(make.games(games))))
    for example in inverted(examples):
        example["metadata"]["winner"] = ("BLUE", "RED")[int(example["value"])]
    return make.write(name, examples)


def test_a_source_whose_evidence_is_near_even_stops_the_run(make, convert, tmp_path):
    unclear(make)
    with pytest.raises(InputError, match="--value-convention blue-is-0 or --value-convention") as caught:
        convert(make.folder)
    assert caught.value.path == "legacy/a.pkl.gz"
    votes = "winning chains 6 for blue-is-0 and 4 for blue-is-1, named winners 0 and 0, layout blue-is-0"
    assert votes in str(caught.value)
    assert not (tmp_path / "store" / "manifest.json").exists()


def test_one_error_lists_every_undecided_file(make, convert):
    for index in range(20):
        if index % 4 == 3:
            unclear(make, f"{index:02}.pkl.gz", start=10 * index)
        else:
            (make.v1 if index % 2 else make.v2)(f"{index:02}.pkl.gz", make.games(10, start=10 * index))
    with pytest.raises(InputError, match="of 5 files") as caught:
        convert(make.folder)
    named = re.findall(r"legacy/(\d+)\.pkl\.gz: winning chains 6", str(caught.value))
    assert named == ["03", "07", "11", "15", "19"]
    assert "\n" not in str(caught.value)
    store = convert(make.folder, value_convention="blue-is-0")
    decided = [
        (row["value_sense"], json.loads(row["value_sense_evidence"])["by"]) for row in store.rows("sources")
    ]
    assert decided[:4] == [
        ("blue-is-0", "winners"),
        ("blue-is-1", "chains"),
        ("blue-is-0", "winners"),
        ("blue-is-0", "given"),
    ]


@pytest.mark.parametrize("write", [unclear, silent])
@pytest.mark.parametrize("convention", ["blue-is-0", "blue-is-1"])
def test_a_given_convention_applies_to_sources_that_do_not_show_it(make, convert, write, convention, request):
    if write is unclear:  # a refused run keeps its spools only in a store
        make.v2("known.pkl.gz", make.games(3, start=20))
        convert(make.folder)
    write(make)
    if write is unclear:
        with pytest.raises(InputError):
            convert(make.folder)
        request.getfixturevalue("no_reader")  # the spools are reused
    store = convert(make.folder, value_convention=convention)
    source = store.source("a.pkl.gz")
    assert (source["value_sense"], source["evidence"]["given"]) == (convention, True)
    assert source["evidence"]["by"] == "given"
    noted = any("although blue-is-0 is usual for its layout" in note for note in notes_of(store))
    assert noted == (convention == "blue-is-1")


def notes_of(store):
    return store.result.file_notes.get("legacy/a.pkl.gz", [])


@pytest.mark.parametrize(("layout", "convention"), [("v1", "blue-is-1"), ("v2", "blue-is-0")])
def test_the_layout_decides_without_other_evidence(make, convert, layout, convention):
    examples = without_winners([game[:-1] for game in make.dicts(make.games(5))])
    values = [example["value"] for example in examples]
    make.write("a.pkl.gz", make.tuples(examples) if layout == "v1" else examples)
    store = convert(make.folder)
    source = store.source("a.pkl.gz")
    assert (source["value_sense"], source["evidence"]["by"]) == (convention, "layout")
    assert stored_values(store) == values
    (note,) = notes_of(store)
    assert f"its games do not show its value convention; read as {convention}, which the legacy tool" in note


def repeated(make, game):
    """Return a v1 game with a move on an occupied cell, with values in the convention of v2."""
    moves = [*game.moves[:4], game.moves[0], *game.moves[4:]]
    boards = [np.zeros((2, make.n, make.n), np.float32)]
    for ply, move in enumerate(moves):
        board = boards[-1].copy()
        board[:, move // make.n, move % make.n] = 0
        board[ply % 2, move // make.n, move % make.n] = 1
        boards.append(board)
    policies = [*map(make.policy, moves), None]
    return [(board, policy, float(game.winner)) for board, policy in zip(boards, policies, strict=True)]


def test_flagged_games_are_not_evidence(make, convert):
    """The only contradicting chain of a tuple file belongs to a game with a repeated move."""
    one_repeats(make)
    store = convert(make.folder)
    source = store.source("a.pkl.gz")
    assert source["value_sense"] == "blue-is-1"
    assert source["evidence"]["chains"] == [1, 9]
    assert source["evidence"]["counted"]["chains"] == [0, 9]
    assert {"repeated-move", "label-contradicts-chain"} <= set(store.games()[9]["flags"])
    assert not any(game["flags"] for game in store.games()[:9])


def test_named_winners_decide_against_a_mislabelled_game(make, convert):
    """The chains are 4 : 1, and every named winner agrees with the values."""
    games = make.dicts(make.games(60))
    unfinished = [example for game in games[5:] for example in game[:-1]]
    for example in inverted(games[4]):
        example["metadata"]["winner"] = ("BLUE", "RED")[int(example["value"])]
    make.write("a.pkl.gz", [e for game in games[:5] for e in game] + unfinished)
    for given in ("auto", "blue-is-0", "blue-is-1"):
        store = convert(make.folder, store=given, value_convention=given)
        source = store.source("a.pkl.gz")
        assert (source["value_sense"], source["evidence"]["by"]) == ("blue-is-0", "winners")
        assert source["evidence"]["counted"] == {"chains": [4, 1], "winners": [60, 0]}
        assert store.result.flags["label-contradicts-chain"] == 1
        assert [g["game_id"] for g in store.games() if "label-contradicts-chain" in g["flags"]] == [4]
    with run_query(store.path, "@flags") as result:
        counts = {row["flag"]: row["games"] for batch in result.batches for row in batch.to_pylist()}
    assert counts["label-contradicts-chain"] == 1


def test_one_mislabelled_game_alone_is_flagged(make, convert):
    store = convert(named_and_refuted(make, games=1))
    assert store.source("a.pkl.gz")["value_sense"] == "blue-is-0"
    assert "label-contradicts-chain" in store.games()[0]["flags"]


@pytest.mark.parametrize("given", ["auto", "blue-is-0", "blue-is-1"])
def test_named_winners_override_every_board_with_a_note(make, convert, given):
    path = named_and_refuted(make)
    store = convert(path, value_convention=given)
    source = store.source("a.pkl.gz")
    assert (source["value_sense"], source["evidence"]["by"]) == ("blue-is-0", "winners")
    assert store.result.flags["label-contradicts-chain"] == 4
    note = "4 of 4 winning chains contradict its value convention, blue-is-0, decided by named winners"
    assert json.loads(source["notes"]) == [note]
    unused = "the value convention blue-is-1 was not applied to 1 file, which has the other one: "
    assert notes_of(store) == [note]
    assert store.result.notes == ([f"{unused}legacy/a.pkl.gz"] if given == "blue-is-1" else [])


def test_one_finished_game_decides_against_the_layout_with_a_note(make, convert):
    games = make.dicts(make.games(5))
    examples = without_winners([*(game[:-1] for game in games[:4]), games[4]])
    values = [example["value"] for example in examples]
    store = convert(make.write("a.pkl.gz", inverted(examples)))
    source = store.source("a.pkl.gz")
    assert (source["value_sense"], source["evidence"]["by"]) == ("blue-is-1", "chains")
    assert notes_of(store) == [
        "read as blue-is-1, as 1 of 1 winning chains show, although blue-is-0 is usual for its layout"
    ]
    assert stored_values(store) == values


def test_another_convention_for_a_converted_file_is_only_a_note(make, convert):
    silent(make)
    (make.folder / "b.trmph").write_text("#5,a1b1 b\n")
    files = convert(make.folder, value_convention="blue-is-0").files()
    again = convert(make.folder, value_convention="blue-is-1")
    assert again.files() == files
    assert again.result.notes == [
        "the value convention blue-is-1 was not applied to 1 file, which has the other one: legacy/a.pkl.gz"
    ]
    assert convert(make.folder, value_convention="blue-is-0").result.notes == []


def test_half_of_the_games_inverted_is_undecided(make, convert):
    games = make.dicts(make.games(10))
    inverted(chain.from_iterable(games[::2]))
    path = make.write("a.pkl.gz", [example for game in games for example in game])  # named as they were
    with pytest.raises(InputError, match="chains 5 for blue-is-0 and 5 for blue-is-1, named winners 5 and 5"):
        convert(path)


@pytest.mark.parametrize("flipped", [False, True])
def test_a_file_in_which_red_begins_decides_by_its_own_games(make, convert, flipped):
    """Games that red began are flagged, but they are the evidence if there are no others."""

    def mirrored(example):
        board = np.ascontiguousarray(example["board"].transpose(0, 2, 1)[::-1])
        policy = example["policy"]
        policy = None if policy is None else policy.reshape(make.n, make.n).T.reshape(-1).copy()
        value = 1.0 - example["value"] if flipped else example["value"]
        return {**example, "board": board, "policy": policy, "value": value}

    examples = without_winners(make.dicts(make.games(6)))
    store = convert(make.write("a.pkl.gz", [mirrored(example) for example in examples]))
    source = store.source("a.pkl.gz")
    assert source["value_sense"] == ("blue-is-0" if flipped else "blue-is-1")
    assert all("colours-swapped" in g["flags"] for g in store.games())
    assert not any("label-contradicts-chain" in g["flags"] for g in store.games())


def test_a_given_convention_decides_how_the_values_are_stored(make, convert):
    path = silent(make)
    zero = stored_values(convert(path, store="zero", value_convention="blue-is-0"))
    one = stored_values(convert(path, store="one", value_convention="blue-is-1"))
    assert one == [1.0 - value for value in zero]
    assert zero == list(chain.from_iterable([float(game.winner)] * len(game.moves) for game in make.games(5)))


def test_a_given_convention_does_not_override_clear_files(make, convert):
    """One unclear file among many must not change the labels of the others."""
    make.v1("older.pkl.gz", make.games(6))
    silent(make, "odd.pkl.gz")
    store = convert(make.folder, value_convention="blue-is-0")
    older = store.source("older.pkl.gz")
    assert (older["value_sense"], older["evidence"]) == (
        "blue-is-1",
        {
            "chains": [0, 6],
            "winners": [0, 0],
            "given": False,
            "by": "chains",
            "counted": {"chains": [0, 6], "winners": [0, 0]},
        },
    )
    assert store.source("odd.pkl.gz")["evidence"]["given"] is True


def test_trmph_needs_no_evidence(make, convert):
    """TRMPH states the winner; a resigned game has no chain on its final board."""
    make.folder.mkdir()
    (make.folder / "a.trmph").write_text("#5,a1b1 b\n#5,c3b1a2 r\n")
    store = convert(make.folder)
    assert store.source("a.trmph")["value_sense"] == "blue-is-0"
    assert stored_values(store) == [0.0] * 3 + [1.0] * 4


def test_a_source_without_positions_has_no_convention(make, convert):
    store = convert(make.write("a.pkl.gz", []))
    assert store.source("a.pkl.gz")["value_sense"] is None


ZERO, ONE = "blue-is-0", "blue-is-1"
DICT, TUPLE = ZERO, ONE


@pytest.mark.parametrize(
    ("chains", "winners", "layout", "expected"),
    [
        # Named winners: 19 votes outweigh each opposing vote, for any boards and layout.
        ((0, 0), (1, 0), TUPLE, (ZERO, "winners")),
        ((4, 1), (766, 0), DICT, (ZERO, "winners")),
        ((0, 0), (1, 19), DICT, (ONE, "winners")),
        ((0, 2), (10, 0), DICT, (ZERO, "winners")),
        ((5, 5), (10, 0), DICT, (ZERO, "winners")),
        ((0, 3), (1000, 0), DICT, (ZERO, "winners")),
        ((4, 5), (1000, 0), TUPLE, (ZERO, "winners")),
        ((100, 0), (0, 100), None, (ONE, "winners")),
        # Chains: four votes outweigh each opposing vote; the layout may be one of the four.
        ((1, 9), (0, 0), TUPLE, (ONE, "chains")),
        ((4, 1), (0, 0), DICT, (ZERO, "chains")),
        ((3, 1), (0, 0), DICT, (ZERO, "chains")),
        ((2, 1), (0, 0), DICT, None),
        ((1, 1), (0, 0), DICT, None),
        ((8, 2), (0, 0), DICT, (ZERO, "chains")),
        ((79, 21), (0, 0), DICT, None),
        ((8, 2), (0, 0), TUPLE, (ZERO, "chains")),
        ((7, 2), (0, 0), TUPLE, None),
        ((1, 0), (0, 0), TUPLE, (ZERO, "chains")),
        ((3, 1), (0, 0), TUPLE, None),
        ((4, 1), (0, 0), TUPLE, (ZERO, "chains")),
        ((2, 0), (0, 0), TUPLE, (ZERO, "chains")),
        ((1, 0), (0, 0), None, (ZERO, "chains")),
        ((100, 0), (50, 50), None, (ZERO, "chains")),
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


def mislabelled(make):
    """Return five finished games, one of them mislabelled with its winner, and many unfinished games."""
    games = make.dicts(make.games(40))
    for example in inverted(games[4]):
        example["metadata"]["winner"] = ("BLUE", "RED")[int(example["value"])]
    examples = [e for game in games[:5] for e in game] + [e for game in games[5:] for e in game[:-1]]
    return make.write("a.pkl.gz", examples)


def one_repeats(make):
    """Return nine sound tuple games, and one with a repeated move whose chain contradicts its value."""
    examples = make.tuples(example for game in make.games(9) for example in make.game(game, None))
    bad = next(
        made
        for made in (repeated(make, game) for game in make.games(200, seed=3))
        if winner_of(made[-1][0][np.newaxis].astype(np.uint8))[0] == made[-1][2]
    )
    return make.write("a.pkl.gz", examples + bad)


@every_pair(
    write=[mislabelled, one_repeats, named_and_refuted, silent, unclear],
    size=[3, 5, 11],
    given=["auto", "blue-is-0", "blue-is-1"],
)
def test_live_decides_as_convert_and_an_export_restores_the_values(make, convert, write, size, given):
    if size != 5 and given == "blue-is-0":
        pytest.skip("the other two options tell")
    if write is one_repeats and size == 3:
        pytest.skip("no game of so few moves repeats one")
    make.n = size
    path = write(make)
    file = FoundFile(path, path.name, path.stat().st_size)
    loader = ChunkSourceLoader(value_convention=given)
    if write is unclear and given == "auto":
        with pytest.raises(InputError):
            convert(path)
        with pytest.raises(FormatError, match="the value convention of the file cannot be determined"):
            loader.read(file)
        return
    store = convert(path, value_convention=given)
    (trip,) = check_round_trip(store.path, path)
    assert trip.ok, trip.detail
    assert verify_store(store.path).ok
    chunks = loader.read(file).chunks
    flags = [[flag for flag in game["flags"] if "duplicate" not in flag] for game in store.games()]
    assert [list(chunk.flags) for chunk in chunks] == flags
    values = [
        [chunk.value] * (len(chunk.moves) + 1) if chunk.moves is not None else chunk.block["value"].tolist()
        for chunk in chunks
    ]
    assert list(chain.from_iterable(values)) == stored_values(store)


def test_an_unknown_convention_is_a_wrong_option(make, convert):
    with pytest.raises(ConfigError, match="blue-is-2"):
        convert(make.folder, value_convention="blue-is-2")
