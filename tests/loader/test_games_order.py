"""The order of games mode is that of the Python code in ``docs/order.md``, for any content of a store."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.loader import Loader
from hexdata.order import Permutation, derive_key
from hexdata.schema import SPLITS
from tests.loader.game_stores import Row, position_rows, sample_games, write_store

BOARD_SIZE = 5
PAGE = Path(__file__).parents[2] / "docs" / "order.md"

CHANGES: list[Callable[[list[Row], Row, Row], None]] = [
    lambda rows, row, game: rows.remove(row),
    lambda rows, row, game: rows.append(dict(row)),
    lambda rows, row, game: rows.reverse(),
    lambda rows, row, game: row.update(game_id=None),
    lambda rows, row, game: row.update(position_in_game=None, total_positions=None),
    lambda rows, row, game: row.update(position_in_game=row["position_in_game"] + 1),
    lambda rows, row, game: row.update(total_positions=row["total_positions"] + 1),
    lambda rows, row, game: row.update(player_to_move=1 - row["player_to_move"]),
    lambda rows, row, game: row.update(move=None),
    lambda rows, row, game: row.update(move=7),
    lambda rows, row, game: row.update(move=None, policy=[1 / 25] * 25),
    lambda rows, row, game: row.update(policy=[1 / 25] * 25),
    lambda rows, row, game: row.update(board=bytes(len(row["board"]))),
    lambda rows, row, game: row.update(value=0.25, value_sample_tier=None),
    lambda rows, row, game: rows[-1].update(move=3),
    lambda rows, row, game: game.update(moves=None),
    lambda rows, row, game: game.update(first_player=None),
    lambda rows, row, game: game.update(total_positions=game["total_positions"] + 1),
    lambda rows, row, game: game.update(positions=game["positions"] - 1),
    lambda rows, row, game: game.update(moves=[*game["moves"][:-1], *game["moves"][:1]]),
    lambda rows, row, game: None,
]
"""Changes of the positions of a game, of one of them, or of the game."""


@pytest.fixture(scope="module")
def rows_of_split() -> Callable[[Path, str, int], tuple[list[int], int]]:
    """Return the function of this name on the page."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "def rows_of_split(" in block)
    names: dict[str, Any] = {}
    exec(block[: block.index("\nrows, ")], names)
    function: Callable[[Path, str, int], tuple[list[int], int]] = names["rows_of_split"]
    return function


@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_the_documented_one(tmp_path: Path, seed: int, rows_of_split: Any) -> None:
    """The sources are files of a shuffled collection, whose boards are compared when a loader is made."""
    rng = np.random.default_rng(seed)
    games = sample_games(60, BOARD_SIZE, seed)
    parts: list[list[Row]] = [[], []]
    for game in games:
        rows = position_rows(game, BOARD_SIZE)
        CHANGES[int(rng.integers(len(CHANGES)))](rows, rows[int(rng.integers(len(rows)))], game)
        parts[int(rng.integers(2))] += rows
    store = write_store(tmp_path / "store", BOARD_SIZE, games, parts, "legacy-shuffled")
    for split in SPLITS:
        rows, in_games = rows_of_split(store, split, BOARD_SIZE)
        assert split != "train" or 0 < in_games < len(rows)
        options: dict[str, Any] = {
            "mode": "games",
            "split": split,
            "batch_size": 4096,
            "fields": ("position_id",),
        }
        stored = Loader(store, shuffle=False, **options)
        assert stored.games is not None
        assert (stored.games.positions, stored.games.game_rows) == (len(rows), in_games)
        assert next(iter(stored))["position_id"].tolist() == rows
        order = Permutation(len(rows), derive_key(seed, "epoch", 0)).slice(0, len(rows))
        shuffled = Loader(store, shuffle=True, seed=seed, **options)
        assert next(iter(shuffled))["position_id"].tolist() == [rows[index] for index in order]
