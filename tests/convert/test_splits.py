"""Splits of games: the same for duplicates and mirror images, with the given shares, and permanent."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from hexdata.board import RED, SYMMETRIES, Symmetry, game_hash, swaps_colours, transform_moves
from hexdata.demo.games import DemoGame
from hexdata.games.find import position_hash
from hexdata.games.labels import split_of

SHARES = {"val": 0.3, "test": 0.2}


def image(make, game, symmetry):
    """Return the image of a game under a symmetry as v2 examples; reflections begin with red."""
    moves = transform_moves(game.moves, make.n, symmetry)
    if not swaps_colours(symmetry):
        return make.game(DemoGame(moves, game.winner), None)
    return make.game(DemoGame(moves, 1 - game.winner), None, first_player=RED)


def write_images(make, games, as_tuples):
    """Write each image of all games to its own file, each in another order."""
    for symmetry in SYMMETRIES:
        images = [image(make, game, symmetry) for game in games]
        for line, examples in enumerate(images, start=1):
            for example in examples:
                example["metadata"]["game_id"] = (int(symmetry), line)
        order = np.random.default_rng(int(symmetry)).permutation(len(images))
        flat = list(chain.from_iterable(images[i] for i in order))
        make.write(f"{symmetry.name}.pkl.gz", make.tuples(flat) if as_tuples else flat)


@pytest.mark.parametrize("as_tuples", [False, True])
def test_a_game_and_its_images_are_in_one_split(make, convert, as_tuples):
    games = make.games(40)
    write_images(make, games, as_tuples)
    store = convert(make.folder, **SHARES)
    sides = {}
    for game in store.games():
        sides.setdefault(game["game_hash"], []).append(game["split"])
    assert sorted(sides) == sorted({game_hash(game.moves, make.n) for game in games})
    assert all(len(splits) >= len(SYMMETRIES) and len(set(splits)) == 1 for splits in sides.values())
    assert set(chain.from_iterable(sides.values())) == {"train", "val", "test"}
    assert store.result.duplicate_games == 4 * 40 - len(sides)


def test_no_board_of_a_held_out_game_is_trained_on(make, convert):
    """Checks the final boards themselves, each represented by the smallest of its four images."""
    games = make.games(40)
    write_images(make, games, as_tuples=False)
    store = convert(make.folder, **SHARES)
    splits = {game["game_id"]: game["split"] for game in store.games()}
    positions = store.table("positions")
    sides = {}
    for game, move, board in zip(
        *(positions[c].to_pylist() for c in ("game_id", "move", "board")), strict=True
    ):
        if move is None:
            packed = np.frombuffer(board, np.uint8)
            sides.setdefault(position_hash(packed, make.n), set()).add(splits[game])
    assert len(sides) > 30
    assert all(len(split) == 1 for split in sides.values())


def test_images_of_final_positions_are_in_one_split(make, convert):
    for symmetry in SYMMETRIES:
        finals = [image(make, game, symmetry)[-1] for game in make.games(40)]
        for line, example in enumerate(finals):
            example["metadata"]["game_id"] = (int(symmetry), line)
        make.write(f"{symmetry.name}.pkl.gz", finals)
    store = convert(make.folder, **SHARES)
    sides = {}
    for game in store.games():
        sides.setdefault(game["game_hash"], set()).add(game["split"])
    assert len(sides) > 30
    assert all(len(split) == 1 for split in sides.values())


def test_a_split_is_the_same_in_every_store(make, convert):
    games = make.games(60)
    half = convert(make.v2("a.pkl.gz", games[:30]), store="half", **SHARES)
    whole = convert(make.v1("b.pkl.gz", games[::-1]), store="whole", **SHARES)
    splits = {game["game_hash"]: game["split"] for game in whole.games()}
    assert all(splits[game["game_hash"]] == game["split"] for game in half.games())


def test_splits_do_not_change_when_files_are_added(make, convert):
    games = make.games(60)
    first = convert(make.v2("b.pkl.gz", games[:30]), **SHARES).games()
    make.v2("a.pkl.gz", games[30:])
    assert convert(make.folder, **SHARES).games()[:30] == first


def test_positions_of_unknown_games_are_in_train(make, convert):
    from hexdata.shuffle import ShuffleOptions, shuffle_store

    finals = [game[-1] for game in make.dicts(make.games(40))]
    for example in finals:
        example["metadata"]["game_id"] = None
    store = convert(make.write("a.pkl.gz", finals), val=0.5, test=0.4)
    assert shuffle_store(store.path, ShuffleOptions(threads=1)).splits["train"] == 40


def test_the_splits_have_the_requested_shares():
    """100,000 hashes; three standard errors are 0.2 % and 0.1 %."""
    hashes = np.random.default_rng(0).bytes(16 * 100_000)
    counts = Counter(split_of(hashes[i : i + 16], 0.05, 0.01) for i in range(0, len(hashes), 16))
    assert counts["val"] == pytest.approx(5_000, abs=207)
    assert counts["test"] == pytest.approx(1_000, abs=95)
    assert sum(counts.values()) == 100_000


@pytest.mark.parametrize(
    ("h", "split"),
    [
        (0, "test"),
        (0.00999, "test"),
        (0.01001, "val"),
        (0.05999, "val"),
        (0.06001, "train"),
        (0.99999, "train"),
    ],
)
def test_a_split_is_a_range_of_hashes(h, split):
    """Pinned: another rule would move games of existing stores to other splits."""
    first = int(h * 2**64).to_bytes(8, "big")
    assert split_of(first + b"\xff" * 8, val=0.05, test=0.01) == split


def test_with_shares_of_zero_everything_is_in_train(make, convert):
    store = convert(make.v2("a.pkl.gz", make.games(30)), val=0.0, test=0.0)
    assert {game["split"] for game in store.games()} == {"train"}


def test_a_position_and_its_images_have_the_same_hash(make):
    board = image(make, make.games(1)[0], Symmetry.IDENTITY)[-1]["board"]
    hashes = set()
    for symmetry in SYMMETRIES:
        planes = image(make, make.games(1)[0], symmetry)[-1]["board"]
        hashes.add(position_hash(np.packbits(planes.astype(bool)), make.n))
    assert hashes == {position_hash(np.packbits(board.astype(bool)), make.n)}
    assert len(hashes | {position_hash(np.packbits(board[::-1].astype(bool)), make.n)}) == 2
