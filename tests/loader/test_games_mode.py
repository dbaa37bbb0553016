"""Tests of games mode: every field of every position equals exact mode's, for any content of a store."""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.errors import BudgetError, ConfigError
from hexdata.loader import Loader, PositionDataset
from hexdata.loader.game_table import GameTable
from tests.loader.game_stores import (
    ALL_FIELDS,
    COMPARED,
    FEW,
    SEARCHED,
    Row,
    add_search,
    assert_modes_agree,
    game_row,
    position_rows,
    sample_games,
    write_shards,
    write_store,
)
from tests.pairs import FULL

BOARD_SIZE = 5
CELLS = BOARD_SIZE * BOARD_SIZE
IDS = ("position_id",)
SHUFFLED = "legacy-shuffled"


def flat(parts: list[list[Row]]) -> list[Row]:
    return [row for part in parts for row in part]


def table_of(store: Path, **options: Any) -> GameTable:
    games = Loader(store, mode="games", fields=IDS, **options).games
    assert games is not None
    return games


def game_ids_of(table: GameTable) -> list[int]:
    return table.arrays["game_id"].tolist()


def packed_ids(table: GameTable) -> list[int]:
    return table.arrays["packed.position_id"].tolist()


def write(
    path: Path,
    games: list[Row],
    parts: list[list[Row]],
    formats: list[str] | str = "trmph",
    n: int = BOARD_SIZE,
    options: Iterable[Mapping[str, Any]] = FEW,
) -> Path:
    """Write a store and compare games mode with exact mode over its positions; return the store."""
    store = write_store(path, n, games, parts, formats)
    assert_modes_agree(store, write_shards(store, path.with_name(f"{path.name}-shards")), options)
    return store


# --- sound games --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 5, 13, 15, 16, 19, 26, 27] if FULL else [3, 5, 15, 16, 27])
def test_sound_games_are_in_the_table(tmp_path: Path, n: int) -> None:
    """Games of any length, begun by either player, with tiers for some of them."""
    games = sample_games(14, n)
    games[0] = game_row(0, [], n)
    games[1] = game_row(1, np.random.default_rng(1).permutation(n * n).tolist(), n, 1)
    parts = [[row for game in games[i : i + 5] for row in position_rows(game, n)] for i in (0, 5, 10)]
    store = write(tmp_path / "store", games, parts, n=n, options=COMPARED if n in (5, 16) else FEW)
    for split in ("train", "val", "test"):
        expected = [game["game_id"] for game in games if game["split"] == split]
        table = table_of(store, split=split)
        assert game_ids_of(table) == expected
        assert packed_ids(table) == []
        assert table.game_rows == table.positions == sum(len(games[i]["moves"]) + 1 for i in expected)
        assert table.arrays["fill"].dtype == (np.uint8 if n <= 15 else np.uint16)
        assert not {"tier", "position_id_start", "value_start"} & table.arrays.keys()


def test_tiers_are_read_only_if_needed(tmp_path: Path) -> None:
    games = sample_games(5, BOARD_SIZE)
    store = write_store(tmp_path / "store", BOARD_SIZE, games, [flat([position_rows(g, 5) for g in games])])
    for options, reads in (
        ({}, False),
        ({"fields": IDS}, False),
        ({"where": "move < 3"}, True),
        ({"tier_probability": (0, 1, 1, 1)}, True),
        ({"fields": ("value_sample_tier",)}, True),
    ):
        games_table = Loader(store, **{"split": "train", **options}).games
        assert games_table is not None
        assert ("tier" in games_table.arrays) == reads


# --- games that are not as their moves say --------------------------------------------------------------

Change = Callable[[list[Row], Row], None]
"""Changes the positions of a game, and its row in the table games."""


def change(ply: int, **values: Any) -> Change:
    def apply(rows: list[Row], game: Row) -> None:
        rows[ply].update(values)

    return apply


def change_game(**values: Any) -> Change:
    return lambda rows, game: game.update(values)


def without(ply: int) -> Change:
    def apply(rows: list[Row], game: Row) -> None:
        del rows[ply]
        game["positions"] -= 1

    return apply


def repeat_move(rows: list[Row], game: Row) -> None:
    game["moves"][7] = rows[7]["move"] = game["moves"][2]


def truncate(rows: list[Row], game: Row) -> None:
    """Leave the last positions out, as ``--truncate-repeats`` does."""
    del rows[6:], game["moves"][5:]
    game.update(positions=6, total_positions=6, flags=["truncated"])
    for row in rows:
        row["total_positions"] = 6
    rows[5]["move"] = None


def next_move(rows: list[Row], game: Row) -> None:
    rows[-1]["move"] = next(cell for cell in range(CELLS) if cell not in game["moves"])


def repeat_row(rows: list[Row], game: Row) -> None:
    rows.insert(4, dict(rows[3]))


def repeat_row_instead_of_another(rows: list[Row], game: Row) -> None:
    rows[4] = dict(rows[3])


def reverse(rows: list[Row], game: Row) -> None:
    rows.reverse()


def permute(rows: list[Row], game: Row) -> None:
    rows[:] = [rows[i] for i in np.random.default_rng(5).permutation(len(rows))]


def shift_ids(rows: list[Row], game: Row) -> None:
    for index, row in enumerate(rows):
        row["position_id"] = 100_000 + 300 * index


def other_player(rows: list[Row], game: Row) -> None:
    for row in rows:
        row["player_to_move"] = 1 - row["player_to_move"]


def dense_everywhere(rows: list[Row], game: Row) -> None:
    for ply, row in enumerate(rows):
        row["policy"] = dense_policy(ply)


def dense_policy(seed: int) -> list[float]:
    weights = np.random.default_rng(seed).random(CELLS, np.float32)
    return (weights / weights.sum()).tolist()


def values_vary(rows: list[Row], game: Row) -> None:
    for ply, row in enumerate(rows):
        row["value"] = ply / 32


UNUSUAL: dict[str, tuple[Change, bool]] = {
    "repeated move": (repeat_move, False),
    "truncated": (truncate, True),
    "missing first position": (without(0), False),
    "missing position": (without(5), False),
    "missing last position": (without(-1), False),
    "next move on the last position": (next_move, True),
    "next move on an occupied cell": (lambda rows, game: rows[-1].update(move=game["moves"][0]), False),
    "policy of the last position": (change(-1, policy=dense_policy(1), move=None), True),
    "another move": (change(4, move=24), False),
    "no move": (change(4, move=None), False),
    "contradicting player": (change(4, player_to_move=1), False),
    "contradicting players": (other_player, False),
    "value of one position": (change(4, value=0.0), True),
    "value of the first position": (change(0, value=0.25), True),
    "values": (values_vary, True),
    "negative zero": (change(3, value=-0.0), True),
    "one dense policy": (change(4, policy=dense_policy(2)), True),
    "dense policy without a move": (change(4, policy=dense_policy(2), move=None), False),
    "dense policies": (dense_everywhere, True),
    "dense policy and move on an occupied cell": (
        lambda rows, game: rows[4].update(policy=dense_policy(2), move=game["moves"][1]),
        False,
    ),
    "one-hot policy on another cell": (change(4, policy=[0.0] * (CELLS - 1) + [1.0]), True),
    "dense policy of zeros": (change(4, policy=[0.0] * CELLS), True),
    "other ply": (change(4, position_in_game=9), False),
    "no ply": (change(4, position_in_game=None), False),
    "no total": (change(4, total_positions=None), False),
    "other total": (change(4, total_positions=40), False),
    "ply beyond the game": (change(4, position_in_game=60_000), False),
    "unknown game": (change(4, game_id=None), False),
    "position of another game": (change(4, game_id=1), False),
    "tier of one position": (change(4, value_sample_tier=None), True),
    "repeated position": (repeat_row, False),
    "repeated position instead of another": (repeat_row_instead_of_another, False),
    "reversed": (reverse, True),
    "permuted": (permute, True),
    "ids far apart": (shift_ids, True),
    "unknown moves": (change_game(moves=None), False),
    "unknown first player": (change_game(first_player=None), False),
    "other first player": (change_game(first_player=1), False),
    "more positions than there are": (change_game(positions=30), False),
    "fewer positions than there are": (change_game(positions=3), False),
    "another total in games": (change_game(total_positions=30), False),
    "no total in games": (change_game(total_positions=None), False),
    "a move less": (lambda rows, game: game["moves"].pop(), False),
}
"""Changes to a game, and whether it remains in the table."""


def random_games(count: int, seed: int) -> tuple[list[Row], list[list[Row]]]:
    """Return games of 12 and more moves, and the positions of each."""
    rng = np.random.default_rng(seed)
    games = [game_row(i, rng.permutation(CELLS)[: 12 + i].tolist(), BOARD_SIZE) for i in range(count)]
    return games, [position_rows(game, BOARD_SIZE) for game in games]


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_game(tmp_path: Path, name: str) -> None:
    """All its positions are delivered as exact mode does, and other games stay in the table."""
    apply, remains = UNUSUAL[name]
    games, parts = random_games(4, seed=3)
    apply(parts[2], games[2])
    table = table_of(write(tmp_path / "store", games, [flat(parts)]))
    lost = {2} if not remains else set()
    if name == "position of another game":
        lost |= {1}
    assert set(game_ids_of(table)) == {0, 1, 2, 3} - lost
    assert table.positions == sum(map(len, parts))
    has_own_ids = name in ("reversed", "permuted", "ids far apart")
    assert ("position_id_start" in table.arrays) == has_own_ids
    has_own_values = name in (
        "value of one position",
        "value of the first position",
        "values",
        "negative zero",
    )
    assert ("value_start" in table.arrays) == has_own_values


@pytest.mark.parametrize("name", list(UNUSUAL)[:: 1 if FULL else 2])
def test_all_games_are_unusual(tmp_path: Path, name: str) -> None:
    """Also over two parts with positions of each game in both, and in a single part."""
    apply, remains = UNUSUAL[name]
    games, parts = random_games(3, seed=4)
    for game, rows in zip(games, parts, strict=True):
        apply(rows, game)
    rows = flat(parts)
    if name == "ids far apart":
        for index, row in enumerate(rows):
            row["position_id"] = index * 300
    table = table_of(write(tmp_path / "store", games, [rows[::2], rows[1::2]]))
    assert table.positions == len(rows)
    assert (len(game_ids_of(table)) > 0) == remains


@pytest.mark.parametrize("first_player", [0, 1, None])
@pytest.mark.parametrize("player", [0, 1])
def test_a_game_without_moves(tmp_path: Path, first_player: int | None, player: int) -> None:
    games = [game_row(0, [], BOARD_SIZE, first_player=first_player), game_row(1, [3, 4], BOARD_SIZE)]
    parts = [position_rows(game, BOARD_SIZE) for game in games]
    parts[0][0]["player_to_move"] = player
    parts[0][0]["move"] = 7
    table = table_of(write(tmp_path / "store", games, [flat(parts)]))
    assert (0 in game_ids_of(table)) == (first_player in (None, player))


def test_positions_without_a_game_are_in_train(tmp_path: Path) -> None:
    games = [game_row(0, [3, 4, 5], BOARD_SIZE, split="val")]
    loose = [{**row, "game_id": None} for row in position_rows(games[0], BOARD_SIZE)]
    store = write(tmp_path / "store", games, [loose, position_rows(games[0], BOARD_SIZE), loose])
    train, val = table_of(store), table_of(store, split="val")
    assert (train.game_rows, packed_ids(train)) == (0, [0, 1, 2, 3, 8, 9, 10, 11])
    assert (val.game_rows, packed_ids(val)) == (4, [])


def test_a_store_of_one_position(tmp_path: Path) -> None:
    game = game_row(0, [], BOARD_SIZE)
    one = position_rows(game, BOARD_SIZE)
    assert table_of(write(tmp_path / "game", [game], [one])).game_rows == 1
    loose = [{**one[0], "game_id": None}]
    assert packed_ids(table_of(write(tmp_path / "loose", [], [loose]))) == [0]


def test_many_positions_without_any_game(tmp_path: Path) -> None:
    rows = [row for game in sample_games(60, BOARD_SIZE) for row in position_rows(game, BOARD_SIZE)]
    for row in rows:
        row["game_id"] = None
    table = table_of(write(tmp_path / "store", [], [rows[:300], [], rows[300:]]))
    assert (table.game_rows, len(packed_ids(table))) == (0, len(rows))


@pytest.mark.parametrize("seed", range(8))
def test_the_game_of_every_row_is_found(tmp_path: Path, seed: int) -> None:
    """For games of many lengths, of which several may begin within a group of rows."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, (2, 3, 20, 300)[seed % 4], 400)
    lengths[: seed * 20] = 1
    starts = np.concatenate([[0], np.cumsum(lengths)])
    arrays = {
        "fill": np.empty((400, 0), np.uint8),
        "first_player": np.zeros(400, np.uint8),
        "starts": starts,
        "packed.position_id": np.empty(0, np.int64),
    }
    table = GameTable(20, arrays, read_again=lambda: table)
    rows = rng.permutation(starts[-1])
    games, plies = table.find(rows)
    expected = np.searchsorted(starts, rows, side="right") - 1
    assert np.array_equal(games, expected)
    assert np.array_equal(plies, rows - starts[expected])


# --- results of a search ------------------------------------------------------------------------------


def searched_games(count: int, seed: int = 0, n: int = BOARD_SIZE) -> tuple[list[Row], list[list[Row]]]:
    """Return games with policies and targets, and the rows of the positions of each."""
    games = sample_games(count, n, seed)
    parts = [position_rows(game, n, number % 2) for number, game in enumerate(games)]
    for number, rows in enumerate(parts):
        add_search(rows, n, seed + number)
    return games, parts


def test_results_of_a_search_are_those_of_exact_mode(tmp_path: Path) -> None:
    """Also of packed positions, of a part without optional columns, and with row groups within games."""
    games, parts = searched_games(12)
    del parts[3][0]
    parts[8][0].update(policy=dense_policy(1), move=None)  # a policy, and an unknown move
    parts[7].reverse()
    for row in parts[6]:
        row["game_id"] = None
    old = [position_rows(game, BOARD_SIZE) for game in games[9:]]
    rows = flat(parts[:9])
    store = write_store(
        tmp_path / "store", BOARD_SIZE, games, [rows[:50], rows[50:], flat(old)], targets=SEARCHED
    )
    shards = write_shards(store, tmp_path / "shards")
    loaders = assert_modes_agree(store, shards, COMPARED, fields=(*ALL_FIELDS, *SEARCHED))
    tables = [loader.games for loader in loaders if loader.games is not None]
    in_tables = set(flat([game_ids_of(table) for table in tables]))
    assert in_tables == set(range(12)) - {3, 6, 8}


@pytest.mark.parametrize("seed", range(4 if FULL else 2))
def test_random_positions_of_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    monkeypatch.setattr("hexdata.store.parquet.ROW_GROUP_ROWS", int(rng.integers(1, 99)))
    monkeypatch.setattr("hexdata.loader.game_table._SCAN_ROWS", int(rng.integers(1, 99)))
    games, parts = searched_games(int(rng.integers(1, 15)), seed)
    rows = flat(parts)
    for _ in range(int(rng.integers(20))):
        _CHANGES[int(rng.integers(len(_CHANGES)))](rng, rows, games)
    order = rng.permutation(len(rows)) if seed % 2 else np.arange(len(rows))
    parts = [[rows[i] for i in part] for part in np.array_split(order, 3)]
    store = write_store(tmp_path / "store", BOARD_SIZE, games, parts, SHUFFLED, targets=SEARCHED)
    shards = write_shards(store, tmp_path / "shards")
    assert_modes_agree(store, shards, CHANGED, fields=(*ALL_FIELDS, *SEARCHED))


@pytest.mark.parametrize("n", [16, 17])
def test_policies_of_large_boards(tmp_path: Path, n: int) -> None:
    games, parts = searched_games(3, n=n)
    store = write_store(tmp_path / "store", n, games, [flat(parts)], targets=SEARCHED)
    shards = write_shards(store, tmp_path / "shards")
    (loader, *_) = assert_modes_agree(store, shards, FEW, fields=("board", "policy", "position_id", "weight"))
    assert loader.games is not None
    assert loader.games.arrays["policy_cell"].dtype == (np.uint8 if n == 16 else np.uint16)


def test_the_table_contains_only_what_the_fields_need(tmp_path: Path) -> None:
    games, parts = searched_games(10)
    store = write_store(tmp_path / "store", BOARD_SIZE, games, [flat(parts)], targets=SEARCHED)
    entries = {"policy_cell", "policy_probability"}
    optional = {*SEARCHED, *entries}
    for fields, expected in (
        (("board", "value"), set()),
        (("board", "policy"), entries),
        (("policy_mask", "move"), set()),
        (("root_value", "extra.temperature"), {"root_value", "extra.temperature"}),
    ):
        table = Loader(store, mode="games", fields=fields).games
        assert table is not None
        assert optional & table.arrays.keys() == expected
    one_hot = write_store(tmp_path / "one-hot", BOARD_SIZE, games, [flat(random_games(10, 1)[1])])
    assert not any(name.startswith("policy") for name in table_of(one_hot).arrays)


@pytest.mark.parametrize("form", ["float32", "fill"])
def test_a_copy_shares_the_policies_and_resumes(tmp_path: Path, form: Any) -> None:
    games, parts = searched_games(10)
    store = write_store(tmp_path / "store", BOARD_SIZE, games, [flat(parts)], targets=SEARCHED)
    options = {"fields": (*ALL_FIELDS, *SEARCHED), "symmetry": True, "seed": 2, "board": form}
    loader = Loader(store, mode="games", batch_size=16, **options)
    expected = list(loader)
    loader.set_epoch(0, 2)
    copied = pickle.loads(pickle.dumps(loader))
    assert isinstance(copied.games.arrays["policy_probability"].base, mmap.mmap)
    for batch, again in zip(expected[2:], copied, strict=True):
        assert all(batch[name].tobytes() == again[name].tobytes() for name in batch)
    dataset = PositionDataset(
        store, seed=2, **{name: options[name] for name in ("fields", "symmetry", "board")}
    )
    whole = dataset.batch(np.arange(len(dataset)))
    ids = {number: row for row, number in enumerate(whole["position_id"].tolist())}
    rows = np.array([ids[number] for number in expected[0]["position_id"].tolist()])
    assert all(whole[name][rows].tobytes() == expected[0][name].tobytes() for name in whole)


def test_a_missing_target_is_named(tmp_path: Path) -> None:
    games, parts = searched_games(2)
    store = write_store(tmp_path / "store", BOARD_SIZE, games, [flat(parts)], targets=["visits"])
    with pytest.raises(ConfigError, match=r"does not have these fields.*found root_value"):
        Loader(store, mode="games", fields=("board", "root_value"))


@pytest.mark.parametrize("fields", [("board", "policy"), SEARCHED])
def test_memory_for_policies_and_targets_is_checked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...]
) -> None:
    games, parts = searched_games(40)
    store = write_store(tmp_path / "store", BOARD_SIZE, games, [flat(parts)], targets=SEARCHED)
    memory = 40 * CELLS + 10 * len(flat(parts)) + 1000  # enough for the games alone
    monkeypatch.setattr("hexdata.loader.game_reader.available_memory", lambda: memory / 0.8)
    Loader(store, mode="games", fields=("board", "value"))
    with pytest.raises(BudgetError, match="found 0 MB; expected at least 1 MB") as caught:
        Loader(store, mode="games", fields=fields)
    names = ", ".join(name for name in fields if name != "board")
    assert str(caught.value.hint).startswith(f"Leave out some of the fields {names}; or run")


# --- shuffled collections -----------------------------------------------------------------------------


def shuffled_parts(games: list[Row], files: int, seed: int = 0) -> list[list[Row]]:
    rows = flat([position_rows(game, BOARD_SIZE) for game in games])
    order = np.random.default_rng(seed).permutation(len(rows))
    return [[rows[i] for i in part] for part in np.array_split(order, files)]


def test_positions_of_a_game_in_several_files(tmp_path: Path) -> None:
    games = sample_games(40, BOARD_SIZE)
    table = table_of(write(tmp_path / "store", games, shuffled_parts(games, 4), SHUFFLED))
    assert packed_ids(table) == []
    assert game_ids_of(table) == [game["game_id"] for game in games if game["split"] == "train"]
    assert (table.arrays["position_id_start"] >= 0).sum() > 20


@pytest.mark.parametrize("seed", range(3))
def test_boards_of_a_shuffled_collection_that_contradict_the_moves(tmp_path: Path, seed: int) -> None:
    games = [game_row(i, range(i, i + 9), BOARD_SIZE, i % 2) for i in range(12)]
    parts = shuffled_parts(games, 3, seed)
    changed = parts[1][5]
    board = bytearray(changed["board"])
    stones = [index for index, byte in enumerate(board) if byte]
    if stones:
        board[stones[0]] &= board[stones[0]] - 1  # removes a stone
    else:
        board[0] = 0x80
    changed["board"] = bytes(board)
    table = table_of(write(tmp_path / "store", games, parts, SHUFFLED))
    assert set(game_ids_of(table)) == set(range(12)) - {changed["game_id"]}
    assert len(packed_ids(table)) == 10


def test_other_boards_are_compared_with_the_moves_on_request(tmp_path: Path) -> None:
    games = [game_row(i, range(i, i + 9), BOARD_SIZE) for i in range(5)]
    parts = [position_rows(game, BOARD_SIZE) for game in games]
    parts[3][4]["board"] = parts[3][6]["board"]
    store = write_store(tmp_path / "store", BOARD_SIZE, games, parts)
    shards = write_shards(store, tmp_path / "shards")
    for loader in assert_modes_agree(store, shards, FEW, check="digests"):
        assert loader.games is not None
        assert game_ids_of(loader.games) == [0, 1, 2, 4]


# --- any content --------------------------------------------------------------------------------------

_CHANGES: tuple[Callable[[np.random.Generator, list[Row], list[Row]], None], ...] = (
    lambda rng, rows, games: None,
    lambda rng, rows, games: rows.pop(int(rng.integers(len(rows)))) and None,
    lambda rng, rows, games: rows.append(dict(rows[int(rng.integers(len(rows)))])),
    lambda rng, rows, games: _set(rng, rows, "value", float(rng.random(dtype=np.float32))),
    lambda rng, rows, games: _set(rng, rows, "player_to_move", int(rng.integers(2))),
    lambda rng, rows, games: _set(rng, rows, "move", int(rng.integers(CELLS))),
    lambda rng, rows, games: _set(rng, rows, "move", None),
    lambda rng, rows, games: _set(rng, rows, "policy", dense_policy(int(rng.integers(99)))),
    lambda rng, rows, games: _set(rng, rows, "position_in_game", int(rng.integers(30))),
    lambda rng, rows, games: _set(rng, rows, "position_in_game", None),
    lambda rng, rows, games: _set(rng, rows, "total_positions", int(rng.integers(30))),
    lambda rng, rows, games: _set(rng, rows, "value_sample_tier", None),
    lambda rng, rows, games: _set(rng, rows, "game_id", None),
    lambda rng, rows, games: _set(rng, rows, "game_id", int(rng.integers(len(games)))),
    lambda rng, rows, games: _set(rng, rows, "board", rows[0]["board"]),
    lambda rng, rows, games: _set(rng, games, "moves", None),
    lambda rng, rows, games: _set(rng, games, "first_player", None),
    lambda rng, rows, games: _set(rng, games, "split", "val"),
    lambda rng, rows, games: _set(rng, games, "positions", int(rng.integers(30))),
)


def _set(rng: np.random.Generator, rows: list[Row], name: str, value: object) -> None:
    rows[int(rng.integers(len(rows)))][name] = value


CHANGED = tuple(COMPARED[i] for i in (1, 3, 7, 8, 9, 10))
"""Options with which changed games are compared: all conditions, which scan the labels."""


@pytest.mark.parametrize("seed", range(16 if FULL else 4))
def test_random_changes_to_random_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Also with row groups and scanned blocks that end within games."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr("hexdata.store.parquet.ROW_GROUP_ROWS", int(rng.integers(1, 99)))
    monkeypatch.setattr("hexdata.loader.game_table._SCAN_ROWS", int(rng.integers(1, 99)))
    monkeypatch.setattr("hexdata.fill._GAMES_AT_ONCE", int(rng.integers(1, 9)))
    games = sample_games(int(rng.integers(1, 25)), BOARD_SIZE, seed)
    rows = flat([position_rows(game, BOARD_SIZE, float(rng.integers(2))) for game in games])
    for _ in range(int(rng.integers(30))):
        _CHANGES[int(rng.integers(len(_CHANGES)))](rng, rows, games)
        rows = rows or flat([position_rows(games[0], BOARD_SIZE)])
    blocks = np.array_split(np.arange(len(rows)), int(rng.integers(1, len(rows) + 1)))
    if rng.random() < 0.6:  # blocks of consecutive rows in any order, from whole files to single rows
        rows = [rows[i] for block in rng.permutation(len(blocks)) for i in blocks[block]]
    cuts = np.sort(rng.integers(0, len(rows) + 1, int(rng.integers(4))))
    parts = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    write(tmp_path / "store", games, parts, SHUFFLED, options=CHANGED)
