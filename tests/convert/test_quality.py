"""Flags of suspicious games: each is raised by a game made for it and by no sound game."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from hexdata.board import Symmetry, pack_boards, swaps_colours, transform_moves
from hexdata.games.findings import Finding, Flag, count_flags, find_positions, flag_lists
from hexdata.schema import games_schema, raw_schema


def tiers_of(count):
    """Return the tiers that the legacy tool gives to a number of positions, in random order."""
    return [*[0] * 5, *[1] * 5, *[2] * 10, *[3] * count][:count]


@pytest.fixture
def sound(make):
    """Return ``sound(count, start=0, **more)``: sound games, one list of examples per game."""

    def games(count, start=0, **more):
        made = make.dicts(make.games(count, start=start), **more)
        for game in made:
            for example, tier in zip(game, tiers_of(len(game)), strict=True):
                example["metadata"]["value_sample_tier"] = tier
        return made

    return games


@pytest.fixture
def flags_with(make, convert, sound):
    """Return ``flags_with(game)``: the flags of a game that is converted together with sound games."""

    def flags(game, company=100, **options):
        others = sound(company, start=1000, source_file="others")
        make.write("a.pkl.gz", [example for one in [game, *others] for example in one])
        own, *rest = convert(make.folder, **options).games()
        assert {flag for row in rest for flag in row["flags"]} == set()
        return own["flags"]

    return flags


def with_repeat(make):
    """Return a v1 game whose sixth move is on the cell of its second."""
    moves, winner = make.games(1)[0]
    repeated = [*moves[:5].tolist(), int(moves[1]), *moves[5:8].tolist()]
    planes = np.zeros((2, make.n * make.n), np.float32)
    examples = []
    for ply in range(len(repeated) + 1):
        policy = make.policy(repeated[ply]) if ply < len(repeated) else None
        examples.append((planes.reshape(2, make.n, make.n).copy(), policy, 1.0 - winner))
        if ply < len(repeated):
            planes[:, repeated[ply]] = 0
            planes[ply % 2, repeated[ply]] = 1
    return examples


def test_sound_games_have_no_flag(make, convert, sound):
    make.write("a.pkl.gz", [example for game in sound(50) for example in game])
    store = convert(make.folder)
    assert [game["flags"] for game in store.games()] == [[]] * 50
    assert store.result.flags == {}
    assert json.loads(store.source("a.pkl.gz")["flags"]) == {}


def test_codes_are_sorted_and_documented():
    codes = [flag.code for flag in Flag]
    assert codes == sorted(codes)
    assert Flag.LABEL_CONTRADICTS_CHAIN.code == "label-contradicts-chain"
    lists = flag_lists(np.array([0, Flag.TRUNCATED | Flag.NO_CHAIN], np.uint32))
    assert lists.to_pylist() == [[], ["no-chain", "truncated"]]
    assert lists.type == games_schema().field("flags").type
    assert count_flags([np.array([1, 3], np.uint32), np.array([2], np.uint32)]) == {
        "colours-swapped": 2,
        "contradictory-duplicates": 2,
    }


def test_a_repeated_move(make, convert):
    make.write(
        "a.pkl.gz", with_repeat(make) + make.tuples(e for g in make.dicts(make.games(9, start=5)) for e in g)
    )
    game, *others = convert(make.folder).games()
    assert {"repeated-move", "policy-on-occupied"} <= set(game["flags"])
    assert not any(set(other["flags"]) - {"duplicate-exact"} for other in others)


def test_an_occupied_last_move_is_not_a_repeated_move(sound, flags_with, make):
    game = sound(1)[0]
    game[-1]["policy"] = make.policy(int(game[0]["policy"].argmax()))
    assert flags_with(game) == ["missing-positions", "policy-on-occupied"]


def test_a_dense_policy_on_an_occupied_cell(sound, flags_with, make):
    game = sound(1)[0]
    free = int(game[4]["policy"].argmax())
    game[4]["policy"] = (make.policy(int(game[0]["policy"].argmax())) + make.policy(free)) / np.float32(2)
    assert flags_with(game) == ["policy-on-occupied"]


def test_a_dense_policy_on_free_cells_is_sound(sound, flags_with, make):
    game = sound(1)[0]
    free = np.flatnonzero(~game[4]["board"].any(axis=0).reshape(-1))
    game[4]["policy"] = np.zeros(make.n**2, np.float32)
    game[4]["policy"][free] = np.float32(1 / len(free))
    assert flags_with(game) == []


@pytest.mark.parametrize(("ply", "plane"), [(4, 0), (4, 1), (5, 0), (5, 1)])
def test_impossible_stones(sound, flags_with, ply, plane):
    game = sound(1)[0]
    board = game[ply]["board"]
    board[plane].reshape(-1)[np.flatnonzero(~board.any(axis=0).reshape(-1))[-1]] = 1
    ahead = ply % 2 + (1 if plane == 0 else -1)
    assert ("impossible-stones" in flags_with(game)) == (ahead not in (0, 1))


def test_a_label_that_contradicts_the_chain_is_flagged(make, convert, sound):
    games = sound(300)
    for example in games[7]:
        example["value"] = 1.0 - example["value"]
        example["metadata"]["winner"] = None
    make.write("a.pkl.gz", [example for game in games for example in game])
    store = convert(make.folder)
    flagged = [i for i, game in enumerate(store.games()) if "label-contradicts-chain" in game["flags"]]
    assert flagged == [7]
    assert store.source("a.pkl.gz")["evidence"]["chains"] == [299, 1]
    assert store.games()[7]["flags"] == ["label-contradicts-chain"]


def test_labels_are_checked_in_the_convention_of_their_source(make, convert):
    games = make.games(300)
    moves, winner = games[7]
    games[7] = (moves, 1 - winner)
    make.v1("a.pkl.gz", games)
    store = convert(make.folder)
    assert store.source("a.pkl.gz")["value_sense"] == "blue-is-1"
    assert [i for i, game in enumerate(store.games()) if game["flags"]] == [7]
    assert store.result.flags == {"label-contradicts-chain": 1}


def test_a_winner_that_contradicts_the_value(sound, flags_with):
    game = sound(1)[0]
    for example in game:
        example["metadata"]["winner"] = {"BLUE": "RED", "RED": "BLUE"}[example["metadata"]["winner"]]
    assert flags_with(game) == ["winner-contradicts-value"]


def test_a_winner_that_contradicts_the_chain_without_a_decisive_value(sound, flags_with):
    game = sound(1)[0]
    for example in game:
        example["value"] = 0.5
        example["metadata"]["winner"] = {"BLUE": "RED", "RED": "BLUE"}[example["metadata"]["winner"]]
    assert flags_with(game) == ["label-contradicts-chain"]


def test_values_that_change_within_a_game(sound, flags_with):
    game = sound(1)[0]
    game[3]["value"] = 0.5
    assert flags_with(game) == ["value-not-constant"]


def test_colours_swapped(make, sound, flags_with):
    moves, winner = make.games(1)[0]
    images = transform_moves(moves, make.n, Symmetry.LONG_DIAGONAL)
    game = make.game((images, 1 - winner), first_player=1)
    for example, tier in zip(game, tiers_of(len(game)), strict=True):
        example["metadata"]["value_sample_tier"] = tier
    assert flags_with(game) == ["colours-swapped"]


@pytest.mark.parametrize(("first_player", "expected"), [(0, []), (1, ["player-contradicts-stones"])])
def test_player_contradicts_stones(sound, flags_with, first_player, expected):
    game = sound(1)[0]
    for ply, example in enumerate(game):
        example["player_to_move"] = (ply + first_player) % 2
    assert flags_with(game) == expected


def test_one_wrong_player_sets_the_flag(sound, flags_with):
    game = sound(1)[0]
    for ply, example in enumerate(game):
        example["player_to_move"] = ply % 2
    game[3]["player_to_move"] = 0  # blue is ahead
    assert flags_with(game) == ["player-contradicts-stones"]


@pytest.mark.parametrize(("ply", "tier"), [(0, 1), (12, 3), (3, 2), (3, None)])
def test_tier_counts(sound, flags_with, ply, tier):
    game = next(game for game in sound(20) if len(game) > 13)
    game[ply]["metadata"]["value_sample_tier"] = tier
    assert flags_with(game) == ["tier-counts"]


def test_games_without_tiers_are_sound(sound, flags_with):
    game = sound(1)[0]
    for example in game:
        example["metadata"]["value_sample_tier"] = None
    assert flags_with(game) == []


def test_missing_positions(sound, flags_with):
    game = sound(1)[0]
    del game[3]
    assert flags_with(game) == ["missing-positions"]


def test_an_unfinished_tuple_game_has_missing_positions(make, convert):
    games = [make.tuples(game) for game in make.dicts(make.games(9))]
    make.write("a.pkl.gz", [example for game in games for example in game][:-2])
    assert [game["flags"] for game in convert(make.folder).games()] == [[]] * 8 + [["missing-positions"]]


def test_a_resigned_game_has_no_chain(make, sound, flags_with):
    moves, winner = make.games(1)[0]
    game = make.game((moves[:-1], winner))
    for example, tier in zip(game, tiers_of(len(game)), strict=True):
        example["metadata"]["value_sample_tier"] = tier
    assert flags_with(game) == ["no-chain"]


# Duplicates.


def test_duplicates(make, convert):
    (moves, winner), other, third = make.games(3)
    make.v2("a.pkl.gz", [(moves, winner), other, (moves, winner), third])
    flags = {
        index: set(game["flags"]) - {"tier-counts"} for index, game in enumerate(convert(make.folder).games())
    }
    assert flags == {0: set(), 1: set(), 2: {"duplicate-exact"}, 3: set()}


@pytest.mark.parametrize("symmetry", [*Symmetry][1:])
def test_symmetric_duplicates(make, convert, symmetry):
    game, other = make.games(2)
    moves, winner = game
    first = int(swaps_colours(symmetry))
    image = transform_moves(moves, make.n, symmetry)
    right = make.game((image, winner ^ first), (0, 3), first)
    again = make.game((image, winner ^ first), (0, 4), first)
    make.write("a.pkl.gz", [e for g in [*make.dicts([game, other]), right, again] for e in g])
    games = convert(make.folder).games()
    assert [game["duplicate_of"] for game in games] == [None, None, 0, 0]
    for game in games[2:]:
        named = {flag for flag in game["flags"] if "duplicate" in flag}
        assert named == {"duplicate-symmetric"}, "the winner is the same one, in the other's colours"


@pytest.mark.parametrize("symmetry", [*Symmetry])
def test_contradictory_duplicates(make, convert, symmetry):
    games = make.games(120)
    moves, winner = games[0]
    first = int(swaps_colours(symmetry))
    image = transform_moves(moves, make.n, symmetry)
    wrong = make.game((image, 1 - (winner ^ first)), (0, 999), first)
    make.write("a.pkl.gz", [e for g in [*make.dicts(games), wrong] for e in g])
    game = convert(make.folder).games()[-1]
    kind = "duplicate-symmetric" if symmetry else "duplicate-exact"
    assert {"contradictory-duplicates", kind, "label-contradicts-chain"} <= set(game["flags"])


def test_duplicates_of_games_in_the_store(make, convert):
    games = make.games(4)
    make.v2("a.pkl.gz", games)
    convert(make.folder)
    images = [(transform_moves(moves, make.n, Symmetry.ROTATION), winner) for moves, winner in games[:2]]
    make.v1("b.pkl.gz", [*images, games[2]])
    store = convert(make.folder)
    found = [[flag for flag in game["flags"] if "duplicate" in flag] for game in store.games()]
    assert found == [[]] * 4 + [["duplicate-symmetric"]] * 2 + [["duplicate-exact"]]
    assert store.result.flags == {"duplicate-exact": 1, "duplicate-symmetric": 2}, "of this run alone"


def test_fragments_of_one_game(make, convert):
    games = make.dicts(make.games(3))
    again = make.dicts(make.games(1), file_idx=1)
    make.write("a.pkl.gz", [game[-1] for game in [*games, *again]])
    found = convert(make.folder).games()
    assert [("duplicate-fragment" in game["flags"]) for game in found] == [False, False, False, True]
    assert all("missing-positions" in game["flags"] for game in found)


# Shuffled files and positions of unknown games.


def test_games_of_shuffled_files_get_flags(make, convert, sound):
    games = sound(40)
    for example in games[3]:
        example["metadata"]["winner"] = {"BLUE": "RED", "RED": "BLUE"}[example["metadata"]["winner"]]
    del games[5][2]
    examples = [example for game in games for example in game]
    order = np.random.default_rng(1).permutation(len(examples))
    for number, part in enumerate(np.array_split(order, 3)):
        stats = {"num_buckets": 3, "source_files": ["x"]}
        make.write(f"shuffled_{number}.pkl.gz", [examples[i] for i in part], shuffling_stats=stats)
    flags = {game["line_idx"]: game["flags"] for game in convert(make.folder).games() if game["flags"]}
    assert flags == {4: ["winner-contradicts-value"], 6: ["missing-positions"]}


def test_positions_of_unknown_games_are_counted_in_the_notes(make, convert):
    games = make.dicts(make.games(5))
    examples = [example for game in games for example in game]
    for example in examples:
        example["metadata"] = {"winner": example["metadata"]["winner"]}
    examples[3]["board"][1, 0, :] = 1
    examples[3]["board"][0, 0, :] = 0
    examples.reverse()
    make.write("a.pkl.gz", examples, shuffling_stats={"num_buckets": 1, "source_files": ["x"]})
    store = convert(make.folder)
    (note,) = [
        n for n in json.loads(store.source("a.pkl.gz")["notes"]) if n.startswith("positions of unknown")
    ]
    assert "1 impossible-stones" in note
    assert note in store.result.file_notes["legacy/a.pkl.gz"]


def test_findings_equal_a_plain_implementation(make):
    """Compares the vectorized findings of random positions with a loop over cells."""
    rng = np.random.default_rng(3)
    n, count = 5, 400
    planes = rng.integers(0, 3, (count, n * n))
    boards = np.stack([planes == 1, planes == 2], axis=1).reshape(count, 2, n, n)
    moves = rng.integers(-1, n * n, count)
    players = rng.integers(-1, 2, count)
    batch = raw_batch(n, pack_boards(boards), moves, players)
    for row, found in enumerate(find_positions(batch, n).tolist()):
        blue, red = int(boards[row, 0].sum()), int(boards[row, 1].sum())
        move, player = int(moves[row]), int(players[row])
        plain = {
            Finding.OCCUPIED_MOVE: move >= 0 and bool(boards[row].any(axis=0).reshape(-1)[move]),
            Finding.RED_AHEAD: red - blue == 1,
            Finding.BLUE_AHEAD: blue - red == 1,
            Finding.FAR_AHEAD: abs(blue - red) > 1,
            Finding.PLAYER_AHEAD: (blue > red and player == 0) or (red > blue and player == 1),
            Finding.BLUE_MOVES_EVEN: blue == red and player == 0,
            Finding.RED_MOVES_EVEN: blue == red and player == 1,
        }
        assert {bit for bit in plain if found & bit} == {bit for bit, is_so in plain.items() if is_so}


def raw_batch(n, packed, moves, players):
    schema = raw_schema(n)
    columns = {
        "record": pa.array(np.arange(len(packed))),
        "board": pa.array([row.tobytes() for row in packed], pa.binary(packed.shape[1])),
        "move": pa.array(moves, mask=moves < 0),
        "value": pa.array(np.zeros(len(packed))),
        "player_to_move": pa.array(players, mask=players < 0),
    }
    arrays = [
        columns[f.name].cast(f.type) if f.name in columns else pa.nulls(len(packed), f.type) for f in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


# Real data.


def test_real_engine_games_have_none_of_the_flags(real_data, convert):
    source = real_data / "legacy" / "v2" / "neurohex_00_processed.pkl.gz"
    assert convert(source).result.flags == {}
    assert convert(real_data / "trmph" / "neurohex_00.trmph", store="trmph").result.flags == {}


def test_real_resigned_games_mostly_have_no_chain(real_data, convert):
    store = convert(real_data / "trmph" / "fusekipedia_19x19.trmph")
    assert store.result.flags == {"no-chain": 1906}
    flagged = Counter(game["source_id"] for game in store.games() if "no-chain" in game["flags"])
    assert json.loads(store.source("fusekipedia_19x19.trmph")["flags"]) == {"no-chain": flagged[0]}
