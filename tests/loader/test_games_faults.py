"""Tests of games mode on stores whose tables are not valid: every error names the file and what to do.

``tests/promises/test_changes_under_readers.py`` has files that are damaged or change while they are open.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import HexdataError, StoreError
from hexdata.loader import Loader
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet
from tests.conftest import CopyStore
from tests.loader.game_stores import (
    ALL_FIELDS,
    SEARCHED,
    Row,
    position_rows,
    sample_games,
    write_shards,
    write_store,
)

N = 5
GAMES, FIRST, LAST = "games/part-000000.parquet", *(f"positions/part-00000{i}.parquet" for i in (0, 1))

Change = Callable[[list[Row], list[Row]], object]
"""Changes the rows of the games and of the positions."""


def make(path: Path, change: Change) -> Path:
    games = sample_games(12, N, seed=2)
    rows = [row for game in games for row in position_rows(game, N)]
    for game in games:
        game["split"] = "train"
    for row in rows:
        row.update(dict.fromkeys(SEARCHED))
    change(games, rows)
    return write_store(path, N, games, [rows[:60], rows[60:]], targets=SEARCHED)


def refused(store: Path, file: str) -> str:
    """Check that a store is refused, with the name of a file and a hint, and return the message."""
    with pytest.raises(StoreError) as caught:
        list(Loader(store, mode="games", fields=(*ALL_FIELDS, *SEARCHED)))
    assert str(caught.value.path).endswith(file)
    assert caught.value.hint
    return str(caught.value)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("sound") / "store", lambda games, rows: rows[9].update(game_id=None))


COLUMNS: dict[str, tuple[str, ...]] = {
    LAST: (
        "position_id",
        "game_id",
        "position_in_game",
        "move",
        "policy",
        "value",
        "player_to_move",
        "board",
    ),
    GAMES: ("moves", "split", "positions"),
}
TYPES: list[tuple[str, str, pa.DataType]] = [
    (LAST, "move", pa.string()),
    (LAST, "value", pa.float64()),
    (LAST, "value", pa.float32()),  # with nulls
    (LAST, "policy", pa.list_(pa.float64())),
    (LAST, "board", pa.binary(43)),
    (GAMES, "moves", pa.list_(pa.int32())),
    (GAMES, "game_id", pa.int64()),  # with nulls
]


@pytest.mark.parametrize(
    ("file", "column", "kind"), [*((f, c, None) for f, columns in COLUMNS.items() for c in columns), *TYPES]
)
def test_wrong_columns(
    sound: Path, copy_store: CopyStore, file: str, column: str, kind: pa.DataType | None
) -> None:
    """A column that is missing, or that has another type."""
    store = copy_store(sound)
    manifest, table = Manifest.load(store), pq.read_table(store / file)
    if kind is None:
        table = table.drop_columns([column])
    else:
        index = table.schema.get_field_index(column)
        table = table.set_column(index, pa.field(column, kind), pa.nulls(len(table), kind))
    manifest.files[file] = write_parquet(store / file, table.schema, [table])
    manifest.save(store)
    refused(store, file)


def one(index: int, **values: Any) -> Change:
    return lambda games, rows: rows[index].update(values)


def every(**values: Any) -> Change:
    return lambda games, rows: [row.update(values) for row in rows]


def game(index: int, **values: Any) -> Change:
    return lambda games, rows: games[index].update(values)


def ids_from(first: int) -> Change:
    return lambda games, rows: [row.update(position_id=first + i) for i, row in enumerate(rows)]


def policy(index: int, *entries: tuple[int, float | None] | None) -> Change:
    items = [entry and {"cell": entry[0], "probability": entry[1]} for entry in entries]
    return one(index, policy=items, move=None)


NAN, HUGE = float("nan"), 1 << 62
VALUES: dict[str, tuple[Change, str, str]] = {
    "value above 1": (one(7, value=2.0), FIRST, "2.0"),
    "value below 0": (one(7, value=-0.5), FIRST, "-0.5"),
    "value NaN": (one(-1, value=NAN), LAST, "nan"),
    "value of an unknown game": (one(7, value=9.0, game_id=None), FIRST, "9.0"),
    "value_sample_tier": (one(-1, value_sample_tier=7), LAST, "7"),
    "value_sample_tier of all": (every(value_sample_tier=7), FIRST, "7"),
    "player_to_move": (one(7, player_to_move=2), FIRST, "2"),
    "move": (one(7, move=25), FIRST, "25"),
    "move of the last": (one(-1, move=65_534), LAST, "65534"),
    "game_id": (one(7, game_id=12), FIRST, "12"),
    "game_id that is large": (one(-1, game_id=HUGE), LAST, str(HUGE)),
    "game_id that is negative": (one(7, game_id=-2), FIRST, "-2"),
    "position_id that is negative": (one(7, position_id=-5), FIRST, "-5"),
    "position_id that is large": (one(-1, position_id=HUGE), LAST, str(HUGE)),
    "position_id, all negative": (ids_from(-500), FIRST, "-500"),
    "position_id, all large": (ids_from(HUGE - 5), FIRST, str(HUGE)[:4]),
    "position_id out of order": (one(7, position_id=999, game_id=None), FIRST, "8"),
    "policy beyond the board": (policy(7, (25, 0.5)), FIRST, "cell 25 with 0.5"),
    "policy out of order": (policy(7, (3, 0.5), (2, 0.5)), FIRST, "cell 2 with 0.5"),
    "policy with a cell twice": (policy(-1, (3, 0.5), (3, 0.5)), LAST, "cell 3 with 0.5"),
    "policy of too many cells": (policy(7, *[(0, 0.1)] * 26), FIRST, "cell 0 with 0.1"),
    "policy below 0": (policy(-1, (3, -1.0)), LAST, "cell 3 with -1.0"),
    "policy NaN": (policy(7, (3, NAN)), FIRST, "cell 3 with nan"),
    "policy with a null": (policy(7, (3, 0.5), None), FIRST, "null"),
    "policy without a probability": (policy(7, (3, 0.5), (4, None)), FIRST, "null"),
    "board of both colours": (one(7, board=b"\xff" * 7, game_id=None), FIRST, "ff"),
    "root_value": (one(7, root_value=1.5), FIRST, "1.5"),
    "root_value of an unknown game": (one(-1, root_value=-1.0, game_id=None), LAST, "-1.0"),
    "visits": (one(7, visits=-3), FIRST, "-3"),
    "weight": (one(-1, weight=-0.5), LAST, "-0.5"),
    "weight that is infinite": (one(7, weight=float("inf")), FIRST, "inf"),
    "split": (game(3, split="other"), GAMES, "other"),
    "game_id of games": (game(3, game_id=40), GAMES, "40 in row 3"),
    "game_id of games below 0": (game(0, game_id=-1), GAMES, "-1 in row 0"),
    "game_id out of order": (lambda games, rows: games.insert(2, games.pop(3)), GAMES, "2 in row 3"),
    "game_id of two games": (lambda games, rows: games[3].update(game_id=2), GAMES, "2 in row 3"),
}
"""Invalid values of a column, which is the first word; the file, and what the error must contain."""


SHARDS = (
    *("value above 1", "value NaN", "value_sample_tier", "player_to_move", "move"),
    *("board of both colours", "root_value", "visits", "weight"),
)


@pytest.mark.parametrize("name", VALUES)
def test_invalid_values_are_refused(tmp_path: Path, name: str) -> None:
    change, file, found = VALUES[name]
    message = refused(make(tmp_path / "store", change), file)
    assert name.split()[0].rstrip(",") in message
    assert found in message


@pytest.mark.parametrize("name", SHARDS)
def test_shards_with_invalid_values_are_refused(tmp_path: Path, name: str) -> None:
    """Their digests are right, as those of a careless publisher."""
    shards = write_shards(make(tmp_path / "store", VALUES[name][0]), tmp_path / "shards")
    for mode in ("exact", "stream"):
        with pytest.raises(HexdataError):
            list(Loader(shards, mode=mode, fields=(*ALL_FIELDS, *SEARCHED)))  # type: ignore[arg-type]


def test_columns_that_are_not_delivered_are_not_read(tmp_path: Path) -> None:
    store = make(tmp_path / "store", one(7, root_value=1.5))
    assert len(list(Loader(store, mode="games", fields=("board", "value")))) == 1


def test_counts_of_the_manifest_that_lie(sound: Path, copy_store: CopyStore) -> None:
    store = copy_store(sound)
    manifest = Manifest.load(store)
    for games, positions in ((5, 142), (0, 0)):
        manifest.counts |= {"games": games, "positions": positions}
        manifest.save(store)
        assert "game_id" in refused(store, ".parquet")
