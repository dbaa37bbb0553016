"""The games of legacy files of every layout: their positions, labels, flags, splits and duplicates."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pytest

from hexdata.board import RED, Symmetry, game_hash, symmetry_table, transform_moves
from hexdata.demo.games import DemoGame
from hexdata.games.findings import split_of
from tests.convert.conftest import flat


def test_values_between_0_and_1_are_kept_exactly(make, convert):
    """0.3 is not exact in float32; its original value is in ``metadata``, in the source's convention."""
    games = make.dicts(make.games(4), note="kept")
    for game in games[:2]:
        for example, value in zip(game, (0.5, 0.3), strict=False):
            example["value"] = value
    dicts, tuples = flat(games), make.tuples(flat(games))
    store = convert(make.write("a.pkl.gz", dicts), make.write("b.pkl.gz", tuples))
    senses = [store.source(name)["value_sense"] for name in ("a.pkl.gz", "b.pkl.gz")]
    assert senses == ["blue-is-0", "blue-is-1"]
    positions = store.table("positions")
    values = np.array([example["value"] for example in dicts] * 2)
    assert np.array_equal(positions["value"].to_numpy(), values.astype(np.float32))
    extra = [json.loads(text or "{}") for text in positions["metadata"].to_pylist()]
    assert [e.get("hexdata:value") for e in extra[:3]] == [None, 0.3, None]
    assert [e.get("hexdata:value") for e in extra[len(dicts) :][:3]] == [None, 1.0 - 0.3, None]
    assert extra[1]["note"] == "kept"


@pytest.mark.parametrize("variant", ["tuples", "dicts"])
def test_the_player_of_a_colour_swapped_game_follows_from_its_boards(make, convert, variant):
    (game,) = make.games(1)
    moves = transform_moves(game.moves, make.n, Symmetry.LONG_DIAGONAL)
    examples = make.game(DemoGame(moves, 1 - game.winner), first_player=RED)
    store = convert(make.write("a.pkl.gz", make.tuples(examples) if variant == "tuples" else examples))
    (found,) = store.games()
    assert (found["first_player"], found["winner"]) == (RED, ("RED", "BLUE")[game.winner])
    assert found["game_hash"] == game_hash(game.moves, make.n)  # it is a mirror image
    players = store.table("positions")["player_to_move"].to_pylist()
    assert players == [1 - ply % 2 for ply in range(len(examples))]


def test_games_of_one_move_and_of_all_cells(make, convert):
    make.n = 3
    full = DemoGame(np.array([0, 3, 1, 4, 5, 2, 7, 6, 8], dtype=np.uint16), 0)
    store = convert(make.v2("a.pkl.gz", [full, DemoGame(full.moves[:1], 0)]), value_convention="blue-is-0")
    assert [(game["total_positions"], len(game["moves"])) for game in store.games()] == [(10, 9), (2, 1)]


def test_final_positions_without_ids_belong_to_no_known_game(make, convert):
    finals = [game[-1] for game in make.dicts(make.games(8))]
    for example in finals:
        example["metadata"]["game_id"] = None
    store = convert(make.write("final.pkl.gz", finals), make.write("old.pkl.gz", make.tuples(finals)))
    assert (store.games(), store.result.without_game) == ([], 16)
    positions = store.table("positions")
    assert positions["game_id"].null_count == 16
    assert positions["position_in_game"].to_pylist()[:8] == [len(g.moves) for g in make.games(8)]
    assert positions["player_to_move"].to_pylist()[:8] == [len(g.moves) % 2 for g in make.games(8)]


def test_matching_plies_without_matching_boards_are_not_a_game(make, convert):
    """Dicts without ids; boards are exchanged between two games with the same length and winner."""
    lengths = {}
    for game in make.games(40):
        lengths.setdefault((len(game.moves), game.winner), []).append(game)
    twins = next(games for games in lengths.values() if len(games) > 1)
    one, other = (make.game(game, None) for game in twins[:2])
    store = convert(make.write("a.pkl.gz", one[:6] + other[6:] + other[:6] + one[6:]))
    assert (store.games(), store.result.without_game) == ([], len(one) + len(other))


def test_ids_that_do_not_identify_a_game_are_not_used(make, convert):
    """Two games with one id, as from different runs of the legacy tool; the ids are still stored."""
    one, other, sound = make.games(3)
    store = convert(make.shuffled(make.game(one) + make.game(other) + make.game(sound, (0, 2))))
    assert [game["line_idx"] for game in store.games()] == [2]
    extra = [json.loads(text or "{}") for text in store.table("positions")["metadata"].to_pylist()]
    assert sum(e.get("hexdata:game_id") == [0, 1] for e in extra) == len(one.moves) + len(other.moves) + 2


# Flags of suspicious games


def tiers_of(count):
    """Return the tiers that the legacy tool gives to a number of positions, in some order."""
    return [*[0] * 5, *[1] * 5, *[2] * 10, *[3] * count][:count]


def sound(make, count):
    """Return sound games, one list of examples per game."""
    games = make.dicts(make.games(count))
    for game in games:
        for example, tier in zip(game, tiers_of(len(game)), strict=True):
            example["metadata"]["value_sample_tier"] = tier
    return games


OTHER = {"BLUE": "RED", "RED": "BLUE"}


def policy_on_a_stone(share_of_move):
    """Spoil a policy. The boards show the move that was played, so the move is not a repeated one."""

    def spoil(make, game):
        stone, free = (make.policy(int(game[ply]["policy"].argmax())) for ply in (0, 4))
        game[4]["policy"] = (stone + share_of_move * free) / np.float32(1 + share_of_move)

    return spoil


def one_stone_more(ply, plane):
    def spoil(_, game):
        board = game[ply]["board"]
        board[plane].reshape(-1)[np.flatnonzero(~board.any(axis=0).reshape(-1))[-1]] = 1

    return spoil


def other_winner(value):
    """Name the other winner in every position, with this value if it is not None."""

    def spoil(_, game):
        for example in game:
            example["value"] = example["value"] if value is None else value
            example["metadata"]["winner"] = OTHER[example["metadata"]["winner"]]

    return spoil


def without_winner(_, game):
    for example in game:
        example["value"] = 1.0 - example["value"]
        example["metadata"]["winner"] = None


def players_from(first_player):
    def spoil(_, game):
        for ply, example in enumerate(game):
            example["player_to_move"] = (ply + first_player) % 2

    return spoil


def tier(ply, number):
    return lambda _, game: game[ply]["metadata"].update(value_sample_tier=number)


def resigned(_, game):
    """End the game before its last move; the number of positions is the one that is left."""
    game.pop()
    game[-1]["policy"] = None
    for example, own in zip(game, tiers_of(len(game)), strict=True):
        example["metadata"] |= {"total_positions": len(game), "value_sample_tier": own}


def colours_swapped(_, game):
    for example in game:
        example["board"] = np.ascontiguousarray(example["board"].transpose(0, 2, 1)[::-1])
        if example["policy"] is not None:
            example["policy"] = example["policy"].reshape(5, 5).T.reshape(-1).copy()
        example["value"] = 1.0 - example["value"]
        example["metadata"]["winner"] = OTHER[example["metadata"]["winner"]]


FAULTS = [
    (policy_on_a_stone(0), {"policy-on-occupied"}),
    (policy_on_a_stone(1), {"policy-on-occupied"}),
    (one_stone_more(4, 1), {"impossible-stones"}),
    (one_stone_more(5, 0), {"impossible-stones"}),
    (without_winner, {"label-contradicts-chain"}),
    (other_winner(None), {"winner-contradicts-value"}),
    (other_winner(0.5), {"label-contradicts-chain"}),
    (lambda _, game: game[3].update(value=0.5), {"value-not-constant"}),
    (colours_swapped, {"colours-swapped"}),
    (lambda _, game: (colours_swapped(_, game), players_from(1)(_, game)), {"colours-swapped"}),
    (lambda _, game: game[5].update(player_to_move=0), {"player-contradicts-stones"}),
    (players_from(0), set()),
    (players_from(1), {"player-contradicts-stones"}),
    (tier(0, 1), {"tier-counts"}),
    (tier(12, 3), {"tier-counts"}),
    (tier(3, 2), {"tier-counts"}),
    (tier(3, None), {"tier-counts"}),
    (lambda _, game: game.pop(3), {"missing-positions"}),
    (resigned, {"no-chain"}),
]


@pytest.mark.parametrize("layout", ["in order", "shuffled"])
def test_each_flag_is_raised_by_a_game_made_for_it_and_by_no_other(make, convert, layout):
    games = [game for game in sound(make, 300) if len(game) > 13]
    expected = [set() for _ in games]
    for number, (spoil, flags) in enumerate(FAULTS):
        spoil(make, games[3 * number])
        expected[3 * number] = flags
    folder = (
        make.shuffled(flat(games)) if layout == "shuffled" else make.write("a.pkl.gz", flat(games)).parent
    )
    store = convert(folder)
    found = sorted(store.games(), key=lambda game: game["line_idx"])
    assert [{flag for flag in game["flags"] if "duplicate" not in flag} for game in found] == expected
    counts = Counter(flag for flags in expected for flag in flags)
    assert {code: n for code, n in store.result.flags.items() if "duplicate" not in code} == counts


# Games that are cut before a repeated move, as the legacy tool did


def test_requested_cuts_do_not_count_as_rejected(make, convert):
    make.write("a.pkl.gz", make.tuples(make.game(make.repeating(at=2, tail=5))))
    store = convert(make.folder, truncate_repeats=True, max_reject_rate=0.0, value_convention="blue-is-1")
    assert store.result.reasons == {"after-repeat": 6}


# Splits and duplicates


def test_a_split_is_a_range_of_hashes():
    """Pinned: another rule would move games of existing stores to other splits."""
    bounds = [(0, "test"), (0.00999, "test"), (0.01001, "val"), (0.05999, "val"), (0.06001, "train")]
    for share, split in [*bounds, (0.99999, "train")]:
        first = int(share * 2**64).to_bytes(8, "big")
        assert split_of(first + b"\xff" * 8, val=0.05, test=0.01) == split


def copies(make, count, seed):
    """Yield examples, moves, first player and winner of images of a few games; some lack a position.

    The winner is None where it is unknown.
    """
    draw, table = random.Random(seed), symmetry_table(make.n)
    centre = [make.n * make.n // 2] if make.n % 2 else []
    others = [cell for cell in range(make.n * make.n) if cell not in centre]
    originals = [centre + draw.sample(others, draw.randint(1, 6)) for _ in range(count // 3)]
    for number, moves in enumerate(draw.choices(originals, k=count)):
        image, winner = draw.randrange(4), draw.choice([0, 1, None])
        moves = np.array([table[image][cell] for cell in moves], np.uint16)
        examples = make.game(DemoGame(moves, winner or 0), (0, number), first_player=image // 2)
        if winner is None:
            for example in examples:
                example["value"], example["metadata"]["winner"] = 0.5, None
        is_whole = draw.random() < 0.8
        yield examples[not is_whole :], moves.tolist() if is_whole else None, image // 2, winner


@pytest.mark.parametrize("n", [3, 4])
def test_duplicates_are_those_of_a_plain_search(make, convert, n):
    make.n = n
    games = [*copies(make, 120, seed=3)]
    for start in range(0, 120, 40):
        make.write(f"{start:03}.pkl.gz", flat(examples for examples, *_ in games[start : start + 40]))
        store = convert(make.folder, value_convention="blue-is-0")
    found, firsts, kinds = store.games(), {}, Counter()
    for number, (_, moves, player, winner) in enumerate(games):
        first = firsts.setdefault(found[number]["game_hash"], number)
        flags = {flag for flag in found[number]["flags"] if "duplicate" in flag}
        assert (found[number]["moves"], found[number]["duplicate_of"]) == (
            moves,
            first if first < number else None,
        )
        _, other, other_player, other_winner = games[first]
        expected = set()
        if first < number:
            same = (moves, player) == (other, other_player)
            expected = {"duplicate-exact" if same else "duplicate-symmetric"}
        if expected and moves is None:
            expected = {"duplicate-fragment"}
        elif (
            expected and None not in (winner, other_winner) and winner ^ player != other_winner ^ other_player
        ):
            expected.add("contradictory-duplicates")
        assert flags == expected
        kinds.update(expected)
    assert len(kinds) == 4
    hashes = {game_hash(moves, n, player) for _, moves, player, _ in games if moves is not None}
    assert hashes == {game["game_hash"] for game in found if game["moves"] is not None}
