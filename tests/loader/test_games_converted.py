"""Tests of games mode against exact mode over converted stores: layouts, flags and all real data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.board import Symmetry, transform_moves
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import StoreError
from hexdata.export import ExportOptions, export_shards
from hexdata.games.findings import Flag
from hexdata.loader import Loader
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.conftest import CopyStore, DemoTrmph
from tests.convert.conftest import REAL_DATA, Converted, Example, Make
from tests.legacy_pickles import load_pickle
from tests.loader.game_stores import COMPARED, FEW, assert_modes_agree
from tests.pairs import FULL

STATS = {"num_buckets": 3, "source_files": ["x"]}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return Make(tmp_path / "legacy")


def add_shards(store: Path) -> Path:
    """Shuffle a store, unless it has been, and export its shards."""
    shuffle_store(store, ShuffleOptions(seed=1, buckets=2, threads=1))
    export_shards(store, ExportOptions(shard_size=8192, block_size=1024, workers=1))
    return store


def convert(folder: Path, store: Path, **options: Any) -> Path:
    convert_sources([folder], store, ConvertOptions(workers=1, max_reject_rate=1.0, **options))
    return store


def compare(store: Path, options: Any = FEW) -> Loader:
    """Compare both modes, and return a loader of all training positions."""
    add_shards(store)
    assert_modes_agree(store, store, options)
    return Loader(store, mode="games", fields=("position_id",))


def table_games(store: Path) -> set[int]:
    """Return the ids of the games in the tables of all splits."""
    found: set[int] = set()
    for split in {game["split"] for game in Converted(store).games()}:
        loader = Loader(store, mode="games", split=split, fields=("position_id",))
        assert loader.games is not None
        found |= set(loader.games.arrays["game_id"].tolist())
    return found


# --- layouts ------------------------------------------------------------------------------------------


def test_raw_games(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    compare(store, COMPARED)
    assert table_games(store) == set(range(80))


@pytest.mark.parametrize("n", [13, 19])
def test_raw_games_of_other_sizes(tmp_path: Path, demo_trmph: DemoTrmph, n: int) -> None:
    demo_trmph(tmp_path / "raw", games=12, files=2, board_size=n)
    store = convert(tmp_path / "raw", tmp_path / "store")
    loader = compare(store)
    assert loader.games is not None
    assert loader.games.arrays["fill"].dtype == (np.uint16 if n == 19 else np.uint8)
    assert table_games(store) == set(range(12))


def shuffled(make: Make, examples: list[Example]) -> None:
    order = np.random.default_rng(1).permutation(len(examples))
    for number, part in enumerate(np.array_split(order, 3)):
        rows = [examples[i] for i in part]
        make.write(f"shuffled_{number}.pkl.gz", rows, shuffling_stats=STATS)


def reordered(make: Make, games: list[list[Example]]) -> list[Example]:
    """Permute the plies within each game, as the legacy tool of July 2025 wrote them."""
    rng = np.random.default_rng(2)
    return [game[i] for game in games for i in rng.permutation(len(game))]


def anonymous(examples: list[Example]) -> list[Example]:
    for example in examples:
        example["metadata"] = {"winner": example["metadata"]["winner"]}
    return examples


def joined(games: list[list[Example]]) -> list[Example]:
    return [example for game in games for example in game]


def v1(make: Make) -> None:
    make.v1("a.pkl.gz", make.games(30))


def v2(make: Make) -> None:
    make.v2("a.pkl.gz", make.games(30))
    make.v2("b.pkl.gz", make.games(30, start=30), file_idx=1)


def v2_reordered(make: Make) -> None:
    make.write("a.pkl.gz", reordered(make, make.dicts(make.games(30))))


def v2_without_ids(make: Make) -> None:
    games = make.dicts(make.games(30))
    for example in joined(games):
        example["metadata"]["game_id"] = None
    make.write("a.pkl.gz", reordered(make, games))


def red_first(make: Make) -> None:
    games = [
        make.game((transform_moves(moves, make.n, Symmetry.LONG_DIAGONAL), 1 - winner), (0, line), 1)
        for line, (moves, winner) in enumerate(make.games(30), start=1)
    ]
    make.write("a.pkl.gz", joined(games))


def shuffled_with_ids(make: Make) -> None:
    shuffled(make, joined(make.dicts(make.games(30))))


def shuffled_without_ids(make: Make) -> None:
    shuffled(make, anonymous(joined(make.dicts(make.games(30)))))


def shuffled_red_first(make: Make) -> None:
    red_first(make)
    games = make.games(10)
    examples = joined(
        [
            make.game((transform_moves(moves, make.n, Symmetry.LONG_DIAGONAL), 1 - winner), (0, line), 1)
            for line, (moves, winner) in enumerate(games, start=1)
        ]
    )
    for example in examples:
        example["player_to_move"] = (example["metadata"]["position_in_game"] + 1) % 2
    shuffled(make, examples)


LAYOUTS: dict[str, tuple[Callable[[Make], None], int]] = {
    "v1": (v1, 30),
    "v2": (v2, 60),
    "v2, plies in another order": (v2_reordered, 30),
    "v2 without ids": (v2_without_ids, 30),
    "red first": (red_first, 30),
    "shuffled": (shuffled_with_ids, 30),
    "shuffled without ids": (shuffled_without_ids, 30),
    "shuffled, red first": (shuffled_red_first, 40),
}
"""Functions that write legacy files, and the number of whole games in them."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_legacy_files(tmp_path: Path, make: Make, name: str) -> None:
    write, whole = LAYOUTS[name]
    write(make)
    store = convert(make.folder, tmp_path / "store", val=0.2, test=0.1)
    compare(store)
    assert len(table_games(store)) == whole


# --- flags --------------------------------------------------------------------------------------------


def with_repeat(make: Make, then: int) -> list[Example]:
    """Return a game whose sixth move is on the cell of its second, and more moves."""
    moves, winner = make.games(1, start=90)[0]
    played = [*moves[:5].tolist(), int(moves[1]), *moves[5 : 5 + then].tolist()]
    planes = np.zeros((2, make.n * make.n), np.float32)
    examples = []
    for ply in range(len(played) + 1):
        example = make.game((moves, winner), (9, 9))[0]
        example["board"] = planes.reshape(2, make.n, make.n).copy()
        example["policy"] = make.policy(played[ply]) if ply < len(played) else None
        example["metadata"] |= {"position_in_game": ply, "total_positions": len(played) + 1}
        examples.append(example)
        if ply < len(played):
            planes[:, played[ply]] = 0
            planes[ply % 2, played[ply]] = 1
    return examples


def flagged(make: Make) -> None:
    """Write a game for each flag, among sound ones."""
    n, made = make.n, make.games(60)
    games = make.dicts(made)
    free = n * n - 1

    def dense(*cells: int) -> Any:
        policy = np.zeros(n * n, np.float32)
        policy[list(cells)] = np.float32(1 / len(cells))
        return policy

    def first_move(game: list[Example]) -> int:
        return int(game[0]["policy"].argmax())

    games[1][4]["policy"] = dense(first_move(games[1]), int(games[1][4]["policy"].argmax()))
    stones = games[2][5]["board"]  # blue is one stone ahead
    stones[0].reshape(-1)[np.flatnonzero(~stones.any(axis=0).reshape(-1))[0]] = 1
    games[3][4]["board"][:, 0, 0] = 0
    for example in games[4]:
        example["value"] = 1.0 - example["value"]
        example["metadata"]["winner"] = None
    del games[5][3]
    games[6][-1]["policy"] = games[6][0]["policy"].copy()  # a next move on an occupied cell
    cell = int(np.flatnonzero(~games[7][-1]["board"].any(axis=0).reshape(-1))[0])
    games[7][-1]["policy"] = make.policy(cell)  # and on a free one
    for ply, example in enumerate(games[8]):
        example["player_to_move"] = (ply + 1) % 2
    for ply, example in enumerate(games[9]):
        example["player_to_move"] = ply % 2
    games[9][3]["player_to_move"] = 0
    games[10][3]["value"] = 0.5
    for example in games[11]:
        example["metadata"]["winner"] = {"BLUE": "RED", "RED": "BLUE"}[example["metadata"]["winner"]]
    games[12][3]["metadata"]["value_sample_tier"] = None
    for example in games[13]:
        example["policy"] = dense(*range(n * n))
    games[14][-1]["policy"] = dense(0, free)
    games[15].pop()
    games[16].pop(0)
    images = [transform_moves(moves, n, Symmetry.ROTATION) for moves, _ in made[20:22]]
    games += [
        make.game((made[20].moves, made[20].winner), (0, 901)),
        make.game((images[0], made[20].winner), (0, 902)),
        make.game((images[1], 1 - made[21].winner), (0, 903)),
        make.game((made[22].moves[:-1], made[22].winner), (0, 904)),
        make.game(
            (transform_moves(made[23].moves, n, Symmetry.LONG_DIAGONAL), 1 - made[23].winner), (0, 905), 1
        ),
        with_repeat(make, 3),
    ]
    again = make.game(made[5], (0, 906))
    del again[3]
    make.write("a.pkl.gz", joined([*games, again]))


@pytest.mark.parametrize("layout", ["files", "shuffled", "plies in another order"])
@pytest.mark.parametrize("truncate", [False, True])
def test_every_flag(tmp_path: Path, make: Make, layout: str, truncate: bool) -> None:
    """Games that follow from their moves are in the table, whatever their flags."""
    flagged(make)
    if layout != "files":
        examples = load_pickle(make.folder / "a.pkl.gz")["examples"]
        (make.folder / "a.pkl.gz").unlink()
        if layout == "shuffled":
            shuffled(make, examples)
        else:
            rng = np.random.default_rng(2)
            keys = [(repr(e["metadata"]["game_id"]), rng.random()) for e in examples]
            make.write("a.pkl.gz", [examples[i] for i in sorted(range(len(keys)), key=keys.__getitem__)])
    store = convert(make.folder, tmp_path / "store", truncate_repeats=truncate)
    games = Converted(store).games()
    found = {flag for game in games for flag in game["flags"]}
    truncated = {Flag.TRUNCATED.code} if truncate else {Flag.REPEATED_MOVE.code}
    if layout == "files":
        others = {Flag.TRUNCATED.code, Flag.REPEATED_MOVE.code} - truncated
        assert found == {flag.code for flag in Flag} - others
    assert truncated <= found
    compare(store)
    in_table = table_games(store)
    never = {"repeated-move", "player-contradicts-stones", "impossible-stones"}
    for game in games:
        flags = set(game["flags"])
        changed = game["file_idx"] == 0 and game["line_idx"] <= 17
        if game["moves"] is None or flags & never:
            assert game["game_id"] not in in_table
        elif not changed:
            assert game["game_id"] in in_table
    assert len(in_table) > 40


# --- mixed stores -------------------------------------------------------------------------------------


def test_a_store_that_grew_in_several_runs(tmp_path: Path, make: Make, demo_trmph: DemoTrmph) -> None:
    """Rows of games of earlier runs keep their order, before the packed positions."""
    store = tmp_path / "store"
    demo_trmph(tmp_path / "raw", games=10, files=2, board_size=make.n)
    convert(tmp_path / "raw", store)
    counts = []
    for number, write in enumerate((flagged, shuffled_without_ids, v2_reordered, v1), start=1):
        each = Make(tmp_path / f"run-{number}")
        write(each)
        convert(each.folder, store)
        loader = Loader(store, mode="games", shuffle=False, fields=("position_id", "game_id"))
        assert loader.games is not None
        ids = np.concatenate([batch["position_id"] for batch in loader])
        assert np.array_equal(np.sort(ids), np.unique(ids))
        counts.append((len(loader.games.arrays["game_id"]), loader.positions))
    assert counts == sorted(counts)
    compare(store, COMPARED)


def test_adding_games_changes_the_identity(tmp_path: Path, demo_trmph: DemoTrmph) -> None:
    demo_trmph(tmp_path / "a", games=6, files=1)
    demo_trmph(tmp_path / "b", games=6, files=1, seed=2)
    store = convert(tmp_path / "a", tmp_path / "store")
    before = Loader(store, batch_size=16)
    start = before.state_dict()
    next(iter(before))
    convert(tmp_path / "b", store)
    loader = Loader(store, batch_size=16)
    assert loader.positions > before.positions
    with pytest.raises(StoreError, match="the state belongs to other games; found digest"):
        loader.load_state_dict(before.state_dict())
    loader.load_state_dict(start)


# --- real data ----------------------------------------------------------------------------------------


SAMPLE = ["legacy/variants", "trmph/realmix_A.trmph", "trmph/wolve_10x10.trmph"]
"""The smallest real files, with every layout of legacy files."""


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no real data beside the repository")
@pytest.mark.parametrize(
    "name",
    ["legacy", *(f"trmph/{path.name}" for path in sorted(REAL_DATA.glob("trmph/*")))] if FULL else SAMPLE,
)
def test_real_data(tmp_path: Path, name: str) -> None:
    """Every game with all its moves is in the table."""
    store = tmp_path / "store"
    convert_sources([REAL_DATA / name], store, ConvertOptions(workers=1))
    add_shards(store)
    assert_modes_agree(store, store, FEW, batch_size=8192)
    games = Converted(store).games()
    whole = {game["game_id"] for game in games if game["moves"] is not None}
    assert table_games(store) == whole
    assert len(whole) >= 20
