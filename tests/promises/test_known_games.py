"""The games of positions are known from their boards, whatever their policies are; the others are counted.

Every file is written from random moves, and what is expected follows from these moves alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest

from hexdata import Loader, convert_sources, export_shards, shuffle_store
from hexdata.convert import ConvertOptions
from hexdata.export import ExportOptions, PicklesOptions, export_pickles
from hexdata.report import write_report
from hexdata.shuffle import ShuffleOptions
from hexdata.verify import check_round_trip, verify_store
from tests.kit.command_line import hexdata_run
from tests.legacy_pickles import assert_same, load_pickle, save_pickle
from tests.loader.game_stores import FEW, assert_modes_agree, write_shards
from tests.pairs import FULL

N = 6
CELLS = N * N

Policy = npt.NDArray[np.float32] | None
Rng = np.random.Generator


@dataclass
class Played:
    """A game: its moves, its boards float32 (m + 1, 2, n, n), its policies, and who won."""

    moves: list[int]
    boards: npt.NDArray[np.float32]
    policies: list[Policy]
    winner: int


def play(moves: list[int], winner: int) -> Played:
    """Return a game. A stone on an occupied cell replaces the other stone."""
    boards = np.zeros((len(moves) + 1, 2, CELLS), np.float32)
    for ply, cell in enumerate(moves):
        boards[ply + 1 :, :, cell] = 0
        boards[ply + 1 :, ply % 2, cell] = 1
    policies: list[Policy] = [one_hot(cell) for cell in moves]
    return Played(moves, boards.reshape(-1, 2, N, N), [*policies, None], winner)


def one_hot(cell: int) -> npt.NDArray[np.float32]:
    policy = np.zeros(CELLS, np.float32)
    policy[cell] = 1
    return policy


def random_games(count: int, seed: int) -> list[Played]:
    """Return games of different lengths, both winners, no two of them equal."""
    rng = np.random.default_rng(seed)
    return [play(rng.permutation(CELLS)[: 8 + i].tolist(), i % 2) for i in range(count)]


def soft(rng: Rng) -> npt.NDArray[np.float32]:
    """Return a policy of several cells. That of the move need not be among them."""
    policy = np.zeros(CELLS, np.float32)
    cells = rng.permutation(CELLS)[:5]
    policy[cells] = rng.random(5).astype(np.float32) + np.float32(0.01)
    return policy / policy.sum()


# --- policies and files -------------------------------------------------------------------------------


def change_policies(
    *plies: int | slice, to: Callable[[Played, Rng], Policy]
) -> Callable[[Played, Rng], None]:
    """Return a function that changes policies of a game."""

    def change(game: Played, rng: Rng) -> None:
        for ply in plies:
            for index in range(len(game.policies))[ply] if isinstance(ply, slice) else [ply]:
                game.policies[index] = to(game, rng)

    return change


CHANGES: dict[str, Callable[[Played, Rng], None]] = {
    "none": change_policies(to=lambda game, rng: None),
    "soft in the middle": change_policies(3, to=lambda game, rng: soft(rng)),
    "soft everywhere": change_policies(slice(-1), to=lambda game, rng: soft(rng)),
    "soft to the end": change_policies(slice(None), to=lambda game, rng: soft(rng)),
    "zeros": change_policies(2, 5, to=lambda game, rng: np.zeros(CELLS, np.float32)),
    "one-hot on another cell": change_policies(4, to=lambda game, rng: one_hot(game.moves[6])),
    "one-hot on an occupied cell": change_policies(4, to=lambda game, rng: one_hot(game.moves[1])),
    "absent in the middle": change_policies(2, 5, to=lambda game, rng: None),
}


def as_tuples(games: list[Played], rng: Rng) -> Iterator[list[Any]]:
    yield [
        (board, policy, float(1 - game.winner))
        for game in games
        for board, policy in zip(game.boards, game.policies, strict=True)
    ]


def as_dicts(games: list[Played], rng: Rng, ids: bool = True) -> list[Any]:
    """Return the examples of all games, shuffled within each."""
    examples = []
    for number, game in enumerate(games):
        for ply in rng.permutation(len(game.boards)).tolist():
            metadata = {
                "game_id": (0, number + 1) if ids else None,
                "position_in_game": ply,
                "total_positions": len(game.boards),
                "winner": ("BLUE", "RED")[game.winner],
            }
            fields = {"board": game.boards[ply], "policy": game.policies[ply], "value": float(game.winner)}
            examples.append(fields | {"metadata": metadata})
    return examples


def in_two_buckets(games: list[Played], rng: Rng) -> Iterator[list[Any]]:
    examples = as_dicts(games, rng)
    for part in np.array_split(rng.permutation(len(examples)), 2):
        yield [examples[i] for i in part]


LAYOUTS: dict[str, Callable[[list[Played], Rng], Iterator[list[Any]]]] = {
    "tuples": as_tuples,
    "dicts with ids": lambda games, rng: iter([as_dicts(games, rng)]),
    "dicts without ids": lambda games, rng: iter([as_dicts(games, rng, ids=False)]),
    "shuffled dicts with ids": in_two_buckets,
}


def write(folder: Path, layout: str, games: list[Played], seed: int = 0) -> list[Path]:
    """Write the games as legacy pickles and return their paths."""
    paths = []
    for number, examples in enumerate(LAYOUTS[layout](games, np.random.default_rng(seed))):
        header: dict[str, Any] = {}
        name = f"part_{number}_processed.pkl.gz"
        if layout.startswith("shuffled"):
            header = {"shuffling_stats": {"num_buckets": 2, "bucket_id": number, "source_files": ["a"]}}
            name = f"shuffled_{number:04d}.pkl.gz"
        paths.append(save_pickle(folder / name, {"examples": examples, **header}))
    return paths


def convert(source: Path, store: Path, **options: Any) -> Any:
    return convert_sources([source], store, ConvertOptions(workers=1, val=0, test=0, **options))


# --- tests --------------------------------------------------------------------------------------------


def positions_of_games(store: Path) -> dict[tuple[int, ...], list[dict[str, Any]]]:
    """Return the positions of each game of a store in ascending ply, by its moves."""
    games = {row["game_id"]: row for row in pq.read_table(store / "games").to_pylist()}
    rows: dict[int, list[dict[str, Any]]] = {game_id: [] for game_id in games}
    for row in pq.read_table(store / "positions").to_pylist():
        rows[row["game_id"]].append(row)
    for own in rows.values():
        own.sort(key=lambda row: row["position_in_game"])
    return {tuple(games[game_id]["moves"]): own for game_id, own in rows.items()}


def changes_of(layout: str) -> list[str]:
    """Return the changes that are made in files of a layout: all, or in sum every one."""
    return [*CHANGES] if FULL else [*CHANGES][[*LAYOUTS].index(layout) :: len(LAYOUTS)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_position_keeps_its_game_and_its_policy(tmp_path: Path, layout: str) -> None:
    changes = changes_of(layout)
    games = random_games(2 * len(changes) + 1, seed=7)
    rng = np.random.default_rng(1)
    absent = []
    for game, change in zip(games[1:], itertools.cycle(changes), strict=False):
        CHANGES[change](game, rng)
        absent += [game] if change == "absent in the middle" else []
    originals = write(tmp_path / "in", layout, games)
    store = tmp_path / "store"
    result = convert(tmp_path / "in", store)
    assert (result.games, result.without_game) == (len(games), 0)

    found = positions_of_games(store)
    assert found.keys() == {tuple(game.moves) for game in games}
    for game in games:
        rows = found[tuple(game.moves)]
        played = [*game.moves, None]
        boards = np.packbits(game.boards.reshape(len(played), -1).astype(bool), axis=1)
        assert [row["board"] for row in rows] == [board.tobytes() for board in boards]
        expected = [None if p is None else cell for p, cell in zip(game.policies, played, strict=True)]
        assert [row["move"] for row in rows] == expected

    # The pickles are restored, array for array.
    assert all(each.ok for each in check_round_trip(store, tmp_path / "in"))
    export_pickles(store, PicklesOptions(order="original"))
    for path in originals:
        (restored,) = (store / "pickles" / "original").rglob(path.name)
        assert_same(load_pickle(restored)["examples"], load_pickle(path)["examples"])

    # Both modes of the loader deliver the moves and the policies; games are held as games.
    (loader, *_) = assert_modes_agree(store, write_shards(store, tmp_path / "shards"), FEW)
    assert loader.games is not None
    held = loader.games.game_rows
    assert held == result.positions - sum(len(game.boards) for game in absent)
    (batch,) = Loader(store, mode="games", batch_size=4096, fields=("position_id", "policy", "policy_mask"))
    policies = dict(zip(batch["position_id"].tolist(), batch["policy"], strict=True))
    masks = dict(zip(batch["position_id"].tolist(), batch["policy_mask"].tolist(), strict=True))
    for game in games:
        for row, policy in zip(found[tuple(game.moves)], game.policies, strict=True):
            assert masks[row["position_id"]] == (policy is not None)
            assert np.array_equal(policies[row["position_id"]], np.zeros(CELLS) if policy is None else policy)


@pytest.mark.parametrize("layout", LAYOUTS if FULL else ["dicts with ids"])
def test_duplicates_are_found_whatever_the_policies_are(tmp_path: Path, layout: str) -> None:
    plain, other = random_games(2, seed=3)
    rng = np.random.default_rng(2)
    copy = play(plain.moves, plain.winner)
    turned = play([CELLS - 1 - cell for cell in plain.moves], plain.winner)
    for game in (copy, turned):
        CHANGES["soft everywhere"](game, rng)
    write(tmp_path / "in", layout, [plain, copy, other, turned])
    result = convert(tmp_path / "in", tmp_path / "store")
    flags = {"duplicate-exact": 1, "duplicate-symmetric": 1}
    assert {name: result.flags.get(name) for name in flags} == flags


@pytest.mark.parametrize("layout", ["tuples", "dicts with ids", "shuffled dicts with ids"])
def test_a_repeated_move_under_any_policy(tmp_path: Path, layout: str) -> None:
    """The cell changes its colour, the game goes on, and --truncate-repeats ends it there."""
    before, after = random_games(2, seed=5)
    repeated = [play([0, 7, 14, 0, 21, 8, 28, last], winner=0) for last in (9, 10, 11)]  # red plays a1 again
    for game, policy in zip(repeated, (one_hot(0), soft(np.random.default_rng(0)), None), strict=True):
        game.policies[3] = policy
    games = [before, *repeated, after]
    write(tmp_path / "in", layout, games)
    result = convert(tmp_path / "in", tmp_path / "store")
    assert (result.games, result.without_game) == (5, 0)
    assert positions_of_games(tmp_path / "store").keys() == {tuple(game.moves) for game in games}
    # Without a policy, no move is stored that could be wrong.
    assert result.flags["repeated-move"] == 2
    cut = convert(tmp_path / "in", tmp_path / "cut", truncate_repeats=True)
    assert (cut.games, cut.rejected, cut.without_game) == (5, 2 * 5, 0)
    assert (cut.flags["truncated"], cut.flags["no-chain"], "policy-on-occupied" in cut.flags) == (2, 5, False)
    assert tuple(repeated[0].moves[:3]) in positions_of_games(tmp_path / "cut")
    assert all(each.ok for each in check_round_trip(tmp_path / "cut", tmp_path / "in"))


def test_a_soft_policy_in_a_shuffled_file_without_ids(tmp_path: Path) -> None:
    """The move is found where only one board of the file has one stone more."""
    games = random_games(6, seed=9)
    rng = np.random.default_rng(4)
    for game in games:
        for ply in range(5, len(game.moves), 2):
            game.policies[ply] = soft(rng)
    (examples,) = as_tuples(games, rng)
    shuffled = [examples[i] for i in rng.permutation(len(examples))]
    stats = {"num_buckets": 1, "bucket_id": 0, "source_files": ["a"]}
    save_pickle(tmp_path / "in/shuffled_0000.pkl.gz", {"examples": shuffled, "shuffling_stats": stats})
    result = convert(tmp_path / "in", tmp_path / "store")
    assert (result.games, result.without_game) == (len(games), 0)
    assert positions_of_games(tmp_path / "store").keys() == {tuple(game.moves) for game in games}
    assert all(each.ok for each in check_round_trip(tmp_path / "store", tmp_path / "in"))


def test_positions_without_a_game_are_named_everywhere(tmp_path: Path) -> None:
    """Two of the games of a tuple file lack their first board, so that their beginning is unknown."""
    rng = np.random.default_rng(12)
    games = [play(rng.permutation(CELLS)[: 7 + i % 3].tolist(), i % 2) for i in range(60)]
    lost = games[3:6:2]
    whole = [game for game in games if game not in lost]
    for game in lost:
        game.boards, game.policies = game.boards[1:], game.policies[1:]
    write(tmp_path / "in", "tuples", games)
    expected = sum(len(game.boards) for game in lost)
    store = tmp_path / "store"
    printed = hexdata_run("convert", tmp_path / "in", store)
    told = f"{expected:,} of {sum(len(game.boards) for game in games):,} positions"
    assert told in " ".join((printed.out + printed.err).split())
    again = hexdata_run("convert", tmp_path / "in", tmp_path / "again", "--json").facts
    assert (again["without_game"], again["games"]) == (expected, len(whole))

    assert told in " ".join(hexdata_run("info", store).out.split())
    assert hexdata_run("info", store, "--json").facts["without_game"] == expected

    shuffle_store(store, ShuffleOptions(seed=1, buckets=2, threads=1))
    export_shards(store, ExportOptions(workers=1))
    details = {check.name: check.detail for check in verify_store(store).checks}
    assert told in details["games"]
    assert told in details["shuffle quality"]
    write_report(store, tmp_path / "report.html")
    text = re.sub(r"<[^>]*>|\s+", " ", (tmp_path / "report.html").read_text())
    assert told in text

    write(tmp_path / "whole", "tuples", whole)
    assert convert(tmp_path / "whole", tmp_path / "known").without_game == 0
    for command in ("info", "verify"):
        assert "no known game" not in hexdata_run(command, tmp_path / "known").out
