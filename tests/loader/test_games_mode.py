"""Tests of games mode: every field of every position equals exact mode's, in the documented order."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import BudgetError
from hexdata.loader import Loader
from hexdata.loader.game_table import GameTable
from hexdata.order import Permutation, derive_key
from hexdata.schema import SPLITS
from tests.convert.conftest import REAL_DATA, Converted
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

N = 5
CELLS = N * N
IDS = ("position_id",)
SHUFFLED = "legacy-shuffled"
"""A format whose boards are compared with the moves in any case."""
PAGE = Path(__file__).parents[2] / "docs" / "order.md"


def table_of(store: Path, **options: Any) -> GameTable:
    games = Loader(store, mode="games", fields=IDS, **options).games
    assert games is not None
    return games


def game_ids_of(table: GameTable) -> list[int]:
    return table.arrays["game_id"].tolist()


def compare(store: Path, options: Any = FEW, **common: Any) -> Path:
    """Compare games mode with exact mode over the positions of a store, and return the store."""
    assert_modes_agree(store, write_shards(store, store.with_name("shards")), options, **common)
    return store


@pytest.mark.parametrize("n", [3, 5, 13, 15, 16, 19, 26, 27] if FULL else [3, 15, 16])
def test_sound_games_are_in_the_table(tmp_path: Path, n: int) -> None:
    """Games of any length, begun by either player, with tiers for some of them."""
    games = sample_games(14, n)
    games[0] = game_row(0, [], n)
    games[1] = game_row(1, np.random.default_rng(1).permutation(n * n).tolist(), n, 1)
    parts = [[row for game in games[i : i + 5] for row in position_rows(game, n)] for i in (0, 5, 10)]
    store = compare(write_store(tmp_path / "store", n, games, parts), COMPARED if FULL else FEW)
    for split in SPLITS:
        expected = [game["game_id"] for game in games if game["split"] == split]
        table = table_of(store, split=split)
        assert game_ids_of(table) == expected
        assert table.game_rows == table.positions == sum(len(games[i]["moves"]) + 1 for i in expected)
        # No array has one entry per position, and a cell takes one byte where that is enough.
        assert table.arrays["fill"].dtype == (np.uint8 if n <= 15 else np.uint16)
        assert not {"value_sample_tier", "position_offset", "values"} & table.arrays.keys()


# --- games that are not as their moves say --------------------------------------------------------------

Change = Callable[[list[Row], Row], object]
"""Changes the positions of a game, or its row in the table games."""


def change(ply: int, **values: Any) -> Change:
    return lambda rows, game: rows[ply].update(values)


def change_game(**values: Any) -> Change:
    return lambda rows, game: game.update(values)


def last_moves(*moves: int | None) -> Change:
    return lambda rows, game: game.update(moves=[*game["moves"][: -len(moves)], *moves])


def empty(first_player: int | None, player: int) -> Change:
    """Return a change to a game without moves."""

    def apply(rows: list[Row], game: Row) -> None:
        del rows[1:], game["moves"][:]
        game.update(first_player=first_player, positions=1, total_positions=1)
        rows[0].update(player_to_move=player, move=7, total_positions=1)

    return apply


def truncate(rows: list[Row], game: Row) -> None:
    """Leave the last positions out, as ``--truncate-repeats`` does."""
    del rows[6:], game["moves"][5:]
    game.update(positions=6, total_positions=6, flags=["truncated"])
    for row in rows:
        row["total_positions"] = 6
    rows[5]["move"] = None


def dense_policy(seed: int) -> list[float]:
    return (np.random.default_rng(seed).random(CELLS, np.float32) / CELLS).tolist()


def update_all(name: str, value: Callable[[int, Row], Any]) -> Change:
    return lambda rows, game: [row.update({name: value(ply, row)}) for ply, row in enumerate(rows)]


IN_TABLE: dict[str, Change] = {
    "truncated": truncate,
    "next move on the last position": lambda rows, game: rows[-1].update(
        move=next(cell for cell in range(CELLS) if cell not in game["moves"])
    ),
    "policy of the last position": change(-1, policy=dense_policy(1), move=None),
    "one dense policy": change(4, policy=dense_policy(2)),
    "dense policies": update_all("policy", lambda ply, row: dense_policy(ply)),
    "one-hot policy on another cell": change(4, policy=[0.0] * (CELLS - 1) + [1.0]),
    "dense policy of zeros": change(4, policy=[0.0] * CELLS),
    "tier of one position": change(4, value_sample_tier=None),
    **{f"no moves, first {p}, player {q}": empty(p, q) for p, q in ((0, 0), (1, 1), (None, 0), (None, 1))},
}
"""Changes after which a game is held as a game."""
WITH_VALUES: dict[str, Change] = {
    "value of one position": change(4, value=0.0),
    "value of the first position": change(0, value=0.25),
    "values": update_all("value", lambda ply, row: ply / 32),
    "negative zero": change(3, value=-0.0),
}
"""Further changes, after which each position has a value of its own."""
WITH_IDS: dict[str, Change] = {
    "reversed": lambda rows, game: rows.reverse(),
    "permuted": lambda rows, game: rows.sort(key=lambda row: row["position_in_game"] * 7 % 11),
    "ids far apart": update_all("position_id", lambda ply, row: 100_000 + 3_000 * ply),
}
"""Further changes, after which each position has an id of its own."""
PACKED: dict[str, Change] = {
    "repeated move": lambda rows, game: [
        each.__setitem__(key, game["moves"][2]) for each, key in ((game["moves"], 7), (rows[7], "move"))
    ],
    "missing first position": lambda rows, game: rows.pop(0),
    "missing position": lambda rows, game: game.update(positions=len(rows) - bool(rows.pop(5))),
    "missing last position": lambda rows, game: rows.pop(),
    "next move on an occupied cell": lambda rows, game: rows[-1].update(move=game["moves"][0]),
    "another move": lambda rows, game: rows[4].update(move=game["moves"][7]),
    "no move": change(4, move=None),
    "contradicting player": change(4, player_to_move=1),
    "contradicting players": update_all("player_to_move", lambda ply, row: 1 - row["player_to_move"]),
    "dense policy without a move": change(4, policy=dense_policy(2), move=None),
    "dense policy and move on an occupied cell": lambda rows, game: rows[4].update(
        policy=dense_policy(2), move=game["moves"][1]
    ),
    "other ply": change(4, position_in_game=9),
    "no total": change(4, total_positions=None),
    "other total": change(4, total_positions=40),
    "ply beyond the game": change(4, position_in_game=60_000),
    "unknown game": change(4, game_id=None),
    "game id -1": change(4, game_id=-1),
    "move 65535": change(4, move=65_535),
    "repeated position": lambda rows, game: rows.insert(4, dict(rows[3])),
    "repeated position instead of another": lambda rows, game: rows.__setitem__(4, dict(rows[3])),
    "unknown moves": change_game(moves=None),
    "unknown first player": change_game(first_player=None),
    "other first player": change_game(first_player=1),
    "more positions than there are": change_game(positions=30),
    "fewer positions than there are": change_game(positions=3),
    "large positions": change_game(positions=1 << 62),
    "another total in games": change_game(total_positions=30),
    "a move less": lambda rows, game: game["moves"].pop(),
    "a move beyond the board": last_moves(25),
    "null move in games": last_moves(None),
    "too many moves": change_game(moves=[*range(25), 0], positions=27, total_positions=27),
    "1000 moves": change_game(moves=[0] * 1_000, positions=1_001, total_positions=None),
    "no moves, first 0, player 1": empty(0, 1),
    "position of another game": change(4, game_id=0),
}
"""Changes after which the positions of a game are held one by one. The last one changes game 0, too."""


@pytest.mark.parametrize("further", [{}, WITH_VALUES, WITH_IDS], ids=["no others", "values", "ids"])
def test_unusual_games(tmp_path: Path, further: Mapping[str, Change]) -> None:
    """Each game has one change. All positions are delivered as exact mode does."""
    kept = {**IN_TABLE, **further}
    changes = [None, *kept.values(), *PACKED.values(), None]
    rng = np.random.default_rng(3)
    games = [game_row(i, rng.permutation(CELLS)[: 12 + i % 4].tolist(), N) for i in range(len(changes))]
    parts = [position_rows(game, N) for game in games]
    for rows, game, apply in zip(parts, games, changes, strict=True):
        if apply:
            apply(rows, game)
    names = ["changed by the last one", *kept, *PACKED, "not changed"]
    store = compare(write_store(tmp_path / "store", N, games, [[row for rows in parts for row in rows]]))
    table = table_of(store)
    assert [names[i] for i in game_ids_of(table)] == [*kept, "not changed"]
    assert table.positions == sum(map(len, parts))
    assert ("values" in table.arrays, "position_offset" in table.arrays) == (
        further is WITH_VALUES,
        further is WITH_IDS,
    )


@pytest.mark.parametrize(
    ("formats", "check"), [(SHUFFLED, "sizes"), (["trmph", SHUFFLED], "sizes"), ("trmph", "digests")]
)
def test_boards_are_compared_with_the_moves(tmp_path: Path, formats: Any, check: Any) -> None:
    """Those of shuffled collections, also if their part begins with another source; of others on request."""
    games = [game_row(i, range(i, i + 9), N, i % 2) for i in range(5)]
    rows = [row for game in games for row in position_rows(game, N)]
    rows[34]["board"] = rows[36]["board"]  # of game 3
    store = write_store(tmp_path / "store", N, games, [rows] if formats == SHUFFLED else [rows, []], formats)
    compare(store, check=check)
    assert game_ids_of(table_of(store, check=check)) == [0, 1, 2, 4]


@pytest.mark.parametrize("fields", [(), ("policy",), SEARCHED])
def test_memory_is_checked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...]
) -> None:
    """The hint names the fields that could be left out."""
    games = sample_games(40, N)
    rows = [row for game in games for row in position_rows(game, N)]
    add_search(rows, N)
    store = write_store(tmp_path / "store", N, games, [rows], targets=SEARCHED)
    memory = 40 * CELLS + 10 * len(rows) + 1000 if fields else 300  # enough for the games alone, or not
    monkeypatch.setattr("hexdata.loader.shared_arrays.available_memory", lambda: memory / 0.8)
    with pytest.raises(BudgetError) as caught:
        Loader(store, mode="games", fields=("board", *fields))
    if fields:
        Loader(store, mode="games", fields=("board", "value"))
    assert all(name in str(caught.value.hint) for name in fields)


# --- any content --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documented() -> Callable[[Path, str, int], tuple[list[int], int]]:
    """The function of ``docs/order.md`` that returns the ids of a split in stored order."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "def rows_of_split(" in block)
    names: dict[str, Any] = {}
    exec(block[: block.index("\nrows, ")], names)
    function: Callable[[Path, str, int], tuple[list[int], int]] = names["rows_of_split"]
    return function


@pytest.mark.parametrize("seed", range(16 if FULL else 3))
def test_random_changes_to_random_games(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documented: Any, seed: int
) -> None:
    """Also with row groups, parts and scanned blocks that end within games, and with results of a search."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr("hexdata.store.parquet.ROW_GROUP_ROWS", int(rng.integers(9, 99)))
    monkeypatch.setattr("hexdata.loader.game_table._SCAN_ROWS", int(rng.integers(1, 99)))
    monkeypatch.setattr("hexdata.fill._GAMES_AT_ONCE", int(rng.integers(1, 9)))
    games = sample_games(int(rng.integers(1, 25)), N, seed)
    rows = [row for game in games for row in position_rows(game, N, float(rng.integers(2)))]
    targets = SEARCHED if seed % 2 else ()
    if targets:
        add_search(rows[: len(rows) * 2 // 3], N, seed)
    names = (
        "value",
        "player_to_move",
        "move",
        "policy",
        "position_in_game",
        "total_positions",
        "game_id",
        "board",
    )
    for _ in range(int(rng.integers(30))):  # a value of another position, or none
        at, other = rng.integers(len(rows), size=2).tolist()
        name = names[int(rng.integers(len(names)))]
        rows[at] = {**rows[at], name: rows[other][name]}
        rows.insert(other, dict(rows[at])) if at % 5 == 0 else None
        if rng.random() < 0.2:
            games[int(rng.integers(len(games)))].update(
                ({"moves": None}, {"first_player": None}, {"split": "val"}, {"positions": 9})[at % 4]
            )
    blocks = np.array_split(np.arange(len(rows)), int(rng.integers(1, len(rows) + 1)))
    if seed % 3:  # blocks of consecutive rows in any order, from whole files to single rows
        rows = [rows[i] for block in rng.permutation(len(blocks)) for i in blocks[block]]
    cuts = np.sort(rng.integers(0, len(rows) + 1, int(rng.integers(4))))
    parts = [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    store = write_store(tmp_path / "store", N, games, parts, SHUFFLED, targets=targets)
    options = COMPARED if FULL else COMPARED[seed % 2 :: 2]
    for loader in assert_modes_agree(
        store, write_shards(store, tmp_path / "shards"), options, fields=(*ALL_FIELDS, *targets)
    ):
        if loader.games and loader.positions == loader.games.positions:
            ids, in_games = documented(store, loader.options.split, N)
            assert (loader.games.positions, loader.games.game_rows) == (len(ids), in_games)
            order = range(len(ids))
            if loader.options.shuffle:
                key = derive_key(loader.options.seed, "epoch", 0)
                order = Permutation(len(ids), key).slice(0, len(ids)).tolist()
            loader.set_epoch(0)
            found = [position for batch in loader for position in batch["position_id"].tolist()]
            assert found == [ids[index] for index in order]


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="no real data beside the repository")
@pytest.mark.parametrize(
    "name",
    ["legacy", *(f"trmph/{path.name}" for path in sorted(REAL_DATA.glob("trmph/*")))]
    if FULL
    else ["legacy/variants", "trmph/realmix_A.trmph"],
)
def test_real_data(tmp_path: Path, name: str) -> None:
    """Every game with all its moves is in the table."""
    store = tmp_path / "store"
    convert_sources([REAL_DATA / name], store, ConvertOptions(workers=1))
    compare(store, batch_size=8192)
    games = Converted(store).games()
    splits = {game["split"] for game in games}
    held = {game for split in splits for game in game_ids_of(table_of(store, split=split))}
    assert held == {game["game_id"] for game in games if game["moves"] is not None}
    assert len(held) >= 20
