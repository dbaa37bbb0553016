"""Tests of games mode on damaged stores: every error names the file and what to do."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import BudgetError, ConfigError, HexdataError, StoreError
from hexdata.loader import Loader, PositionDataset, game_reader
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet
from tests.conftest import CopyStore, DemoTrmph
from tests.loader.game_stores import (
    ALL_FIELDS,
    FEW,
    Row,
    assert_modes_agree,
    contents,
    position_rows,
    sample_games,
    write_shards,
    write_store,
)
from tests.object_store import ACCESS_KEY, SECRET_KEY

if TYPE_CHECKING:
    from upath import UPath

N = 5
GAMES = "games/part-000000.parquet"
SOURCES = "sources/part-000000.parquet"
POSITIONS = "positions/part-000001.parquet"

Change = Callable[[list[Row], list[Row]], None]


def rows_of_games(count: int = 12) -> tuple[list[Row], list[Row]]:
    games = sample_games(count, N, seed=2)
    for game in games:
        game["split"] = "train"
    return games, [row for game in games for row in position_rows(game, N)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two parts of positions, some of them without a game. Read only: copy it."""
    games, rows = rows_of_games()
    for row in rows[::40]:
        row["game_id"] = None
    half = len(rows) // 2
    return write_store(tmp_path_factory.mktemp("sound") / "store", N, games, [rows[:half], rows[half:]])


@pytest.fixture
def store(sound: Path, copy_store: CopyStore) -> Path:
    return copy_store(sound)


def read_all(store: Path, **options: Any) -> dict[str, Any]:
    return contents(Loader(store, **{"mode": "games", "fields": ALL_FIELDS, **options}))


def rewrite(store: Path, name: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change a table, and the manifest with it."""
    manifest = Manifest.load(store)
    table = change(pq.read_table(store / name))
    manifest.files[name] = write_parquet(store / name, table.schema, [table])
    manifest.save(store)


def check_error(error: HexdataError, name: str) -> None:
    """Check that a message names a file, and that it says what to do."""
    assert error.path is not None
    assert str(error.path).endswith(name), error
    assert error.hint, error


# --- files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [GAMES, POSITIONS, SOURCES])
@pytest.mark.parametrize("check", ["sizes", "digests"])
def test_missing_and_cut_files(store: Path, name: str, check: Any) -> None:
    data = (store / name).read_bytes()
    for content in (None, b"", data[:-1], data + b"\0"):
        if content is None:
            (store / name).unlink()
        else:
            (store / name).write_bytes(content)
        with pytest.raises(StoreError) as caught:
            Loader(store, mode="games", check=check)
        check_error(caught.value, name)


@pytest.mark.parametrize("name", [GAMES, POSITIONS, SOURCES])
def test_flipped_bits_are_found(store: Path, name: str) -> None:
    path = store / name
    data = path.read_bytes()
    for offset in np.linspace(0, len(data) - 1, 40).astype(int):
        damaged = bytearray(data)
        damaged[offset] ^= 1 << (offset % 8)
        path.write_bytes(damaged)
        for check in ("sizes", "digests"):
            with pytest.raises(StoreError) as caught:
                read_all(store, check=check)
            check_error(caught.value, name)


# --- columns ------------------------------------------------------------------------------------------


def drop(name: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.drop_columns([name])


def cast(name: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(name)
        return table.set_column(index, pa.field(name, kind), pa.nulls(len(table), kind))

    return change


COLUMNS: dict[str, tuple[str, Callable[[pa.Table], pa.Table]]] = {
    **{
        f"no {name}": (POSITIONS, drop(name))
        for name in (
            "position_id",
            "game_id",
            "position_in_game",
            "move",
            "policy",
            "value",
            "player_to_move",
        )
    },
    "no board": (POSITIONS, drop("board")),
    "move as text": (POSITIONS, cast("move", pa.string())),
    "value as double": (POSITIONS, cast("value", pa.float64())),
    "policy of doubles": (POSITIONS, cast("policy", pa.list_(pa.float64()))),
    "board of another size": (POSITIONS, cast("board", pa.binary(43))),
    "nullable value": (POSITIONS, cast("value", pa.float32())),
    "no moves": (GAMES, drop("moves")),
    "no split": (GAMES, drop("split")),
    "no positions in games": (GAMES, drop("positions")),
    "moves of int32": (GAMES, cast("moves", pa.list_(pa.int32()))),
    "nullable game_id": (GAMES, cast("game_id", pa.int64())),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_wrong_columns(store: Path, name: str) -> None:
    file, change = COLUMNS[name]
    rewrite(store, file, change)
    with pytest.raises(StoreError) as caught:
        read_all(store)
    check_error(caught.value, file)


@pytest.mark.parametrize("name", [GAMES, POSITIONS])
def test_another_number_of_rows(store: Path, name: str) -> None:
    rewrite(store, name, lambda table: table.slice(1))
    manifest = Manifest.load(store)
    facts = manifest.files[name]
    manifest.files[name] = type(facts)(facts.rows + 1, facts.bytes, facts.sha256)
    manifest.save(store)
    with pytest.raises(StoreError) as caught:
        read_all(store)
    check_error(caught.value, name)


# --- values -------------------------------------------------------------------------------------------


def position(index: int, **values: Any) -> Change:
    def change(games: list[Row], rows: list[Row]) -> None:
        rows[index].update(values)

    return change


def positions(**values: Any) -> Change:
    def change(games: list[Row], rows: list[Row]) -> None:
        for row in rows:
            row.update(values)

    return change


def game(index: int, **values: Any) -> Change:
    def change(games: list[Row], rows: list[Row]) -> None:
        games[index].update(values)

    return change


def swap_games(games: list[Row], rows: list[Row]) -> None:
    games[2], games[3] = games[3], games[2]


def repeat_game(games: list[Row], rows: list[Row]) -> None:
    games[3] = {**games[2]}


def all_ids(first: int) -> Change:
    def change(games: list[Row], rows: list[Row]) -> None:
        for number, row in enumerate(rows):
            row["position_id"] = first + number

    return change


def moves_of(*last: int | None) -> Change:
    def change(games: list[Row], rows: list[Row]) -> None:
        games[3]["moves"] = [*games[3]["moves"][: -len(last)], *last]

    return change


FIRST, SECOND = "positions/part-000000.parquet", POSITIONS


def policy(row: int, *entries: tuple[int | None, float | None] | None, **changes: Any) -> Change:
    """Return a change that gives a position a policy with these cells and probabilities."""
    items = [entry and {"cell": entry[0], "probability": entry[1]} for entry in entries]
    return position(row, policy=items, **changes)


REFUSED: dict[str, tuple[Change, str, str]] = {
    "value above 1": (position(7, value=2.0), FIRST, "value: .* found 2.0"),
    "value below 0": (position(7, value=-0.5), FIRST, "value: .* found -0.5"),
    "value NaN": (position(-1, value=float("nan")), SECOND, "value: .* found nan"),
    "values NaN": (positions(value=float("nan")), FIRST, "value: .* found nan"),
    "value of an unknown game": (position(7, value=9.0, game_id=None), FIRST, "value: .* found 9.0"),
    "tier": (position(-1, value_sample_tier=7), SECOND, "value_sample_tier: .* found 7"),
    "tiers": (positions(value_sample_tier=7), FIRST, "value_sample_tier: .* found 7"),
    "player": (position(7, player_to_move=2), FIRST, "player_to_move: .* found 2"),
    "players": (positions(player_to_move=200), FIRST, "player_to_move: .* found 200"),
    "move": (position(7, move=25), FIRST, "move: .* found 25"),
    "last move": (position(-1, move=65_534), SECOND, "move: .* found 65534"),
    "game id": (position(7, game_id=12), FIRST, "game_id: .* found 12; expected 0 to 11"),
    "large game id": (position(-1, game_id=1 << 62), SECOND, "game_id: .* found 4611"),
    "negative game id": (position(7, game_id=-2), FIRST, "game_id: .* found -2"),
    "negative position id": (position(7, position_id=-5), FIRST, "position_id: .* found -5"),
    "large position id": (position(-1, position_id=1 << 62), SECOND, "position_id: .* found 4611"),
    "negative position ids": (all_ids(-500), FIRST, "position_id: .* found -500"),
    "large position ids": (all_ids((1 << 62) - 5), FIRST, "position_id: .* found 4611"),
    "cell beyond the board": (policy(7, (25, 0.5), move=None), FIRST, "policy: .* found cell 25 with 0.5"),
    "cells out of order": (
        policy(7, (3, 0.5), (2, 0.5), move=None),
        FIRST,
        "policy: .* found cell 2 with 0.5",
    ),
    "repeated cell": (policy(-1, (3, 0.5), (3, 0.5)), SECOND, "policy: .* expected cells in ascending order"),
    "too many cells": (policy(7, *[(0, 0.1)] * 26, move=None), FIRST, "policy: .* 26 cells; .* most 25"),
    "negative policy": (policy(-1, (3, -1.0)), SECOND, "policy: .* found cell 3 with -1.0"),
    "policy NaN": (policy(7, (3, float("nan"))), FIRST, "policy: .* found cell 3 with nan"),
    "policy with a null": (policy(7, (3, 0.5), None, move=None), FIRST, "policy: .* contains a null"),
    "null probability": (policy(7, (3, 0.5), (4, None)), FIRST, "policy: .* contains a null"),
    "both colours": (position(7, board=b"\xff" * 7, game_id=None), FIRST, "board: .* found the board ff"),
    "unknown split": (game(3, split="other"), GAMES, "split: .* found other; expected train, val, test"),
    "id in games": (game(3, game_id=40), GAMES, "game_id: .* found 40 in row 3; expected .* up to 11"),
    "negative id in games": (game(0, game_id=-1), GAMES, "game_id: .* found -1 in row 0"),
    "games out of order": (swap_games, GAMES, "game_id: .* found 2 in row 3"),
    "repeated game": (repeat_game, GAMES, "game_id: .* found 2 in row 3"),
}
"""Changes that make a store invalid, the file with the fault, and the message."""


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_values_are_refused(tmp_path: Path, name: str) -> None:
    change, file, message = REFUSED[name]
    games, rows = rows_of_games()
    change(games, rows)
    store = write_store(tmp_path / "store", N, games, [rows[:60], rows[60:]])
    for options in ({}, {"check": "digests"}):
        with pytest.raises(StoreError, match=message) as caught:
            read_all(store, **options)
        check_error(caught.value, file)
    with pytest.raises(StoreError, match=message):
        PositionDataset(store, fields=ALL_FIELDS)


TARGETS = ("extra.temperature", "root_value", "visits", "weight")
REFUSED_TARGETS: dict[str, tuple[Change, str, str]] = {
    "root value": (position(7, root_value=1.5), FIRST, "root_value: .* found 1.5"),
    "root value of an unknown game": (position(-1, root_value=-1.0, game_id=None), SECOND, "root_value"),
    "visits": (position(7, visits=-3), FIRST, "visits: .* found -3"),
    "weight": (position(-1, weight=-0.5), SECOND, "weight: .* found -0.5"),
    "infinite weight": (position(7, weight=float("inf")), FIRST, "weight: .* found inf"),
}


@pytest.mark.parametrize("name", REFUSED_TARGETS)
def test_invalid_targets_are_refused(tmp_path: Path, name: str) -> None:
    change, file, message = REFUSED_TARGETS[name]
    games, rows = rows_of_games()
    for row in rows:
        row.update(dict.fromkeys(TARGETS))
    change(games, rows)
    store = write_store(tmp_path / "store", N, games, [rows[:60], rows[60:]], targets=TARGETS)
    with pytest.raises(StoreError, match=message) as caught:
        read_all(store, fields=(*ALL_FIELDS, *TARGETS))
    check_error(caught.value, file)
    assert read_all(store)  # columns that are not delivered are not read


PACKED: dict[str, Change] = {
    "game id -1": position(7, game_id=-1),
    "move 65535": position(7, move=65_535),
    "first player": game(3, first_player=2),
    "move beyond the board": moves_of(25),
    "move 65535 in games": moves_of(65_535),
    "null move in games": moves_of(None),
    "null moves in games": moves_of(None, None),
    "too many moves": game(3, moves=[*range(25), 0], positions=27, total_positions=27),
    "1000 moves": game(3, moves=[0] * 1_000, positions=1_001, total_positions=None),
    "negative positions": game(3, positions=-1),
    "large positions": game(3, positions=1 << 62),
    "position twice": lambda games, rows: rows.append(dict(rows[20])),
}
"""Changes to the table games, or to a position, that leave every position readable."""


@pytest.mark.parametrize("name", PACKED)
def test_games_that_contradict_their_positions_are_packed(tmp_path: Path, name: str) -> None:
    games, rows = rows_of_games()
    PACKED[name](games, rows)
    store = write_store(tmp_path / "store", N, games, [rows[:60], rows[60:]])
    for loader in assert_modes_agree(store, write_shards(store, tmp_path / "shards"), FEW[:2]):
        assert loader.games is not None
        assert 0 < loader.games.game_rows < loader.games.positions == len(rows)


def test_a_store_without_positions(tmp_path: Path) -> None:
    Manifest().save(tmp_path)
    for options in ({}, {"mode": "games"}):
        with pytest.raises(ConfigError, match=r"the store has no positions.*Convert files"):
            Loader(tmp_path, **options)  # type: ignore[arg-type]


def test_splits_without_positions(sound: Path) -> None:
    with pytest.raises(ConfigError, match="the split has no positions; found val"):
        Loader(sound, split="val")
    with pytest.raises(ConfigError, match="unknown split; found fit; expected train, val, test"):
        Loader(sound, split="fit")
    with pytest.raises(ConfigError, match="no shards to skip"):
        Loader(sound, on_error="skip")
    with pytest.raises(ConfigError, match="the options select no position"):
        Loader(sound, where="value > 1")


def test_a_folder_that_is_not_a_store(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(StoreError, match="not a hexdata store"):
            Loader(path, mode="games")


@pytest.mark.parametrize("name", ["a b", "ключ", "-x", "a%20b", "a*b[1]", "a'b", 'a"b', "c:d", "a?b#c"])
def test_odd_names_of_stores(sound: Path, copy_store: CopyStore, name: str) -> None:
    store = copy_store(sound, name)
    expected = read_all(sound)
    found = read_all(store, where="move < 30 or move is null")
    for field, array in expected.items():
        assert found[field].tobytes() == array.tobytes()
    copied = pickle.loads(pickle.dumps(Loader(store)))
    assert copied.positions == Loader(sound).positions
    (store / POSITIONS).unlink()
    with pytest.raises(StoreError, match=re.escape(name)):
        read_all(store)


def test_a_read_only_store(store: Path) -> None:
    """Nothing is written into the store."""
    paths = [store, *store.rglob("*")]
    before = {path: path.stat().st_mtime_ns for path in paths}
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        loader = Loader(store, batch_size=64, where="value > 0.5")
        assert len(list(pickle.loads(pickle.dumps(loader)))) == len(list(loader))
        assert {path: path.stat().st_mtime_ns for path in [store, *store.rglob("*")]} == before
    finally:
        for path in paths:
            path.chmod(0o755)


def test_a_store_that_is_converted_into_while_it_is_read(
    tmp_path: Path, demo_trmph: DemoTrmph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader keeps the files that the manifest named when it was opened."""
    demo_trmph(tmp_path / "a", games=6, files=2)
    demo_trmph(tmp_path / "b", games=6, files=1, seed=2)
    store = tmp_path / "store"
    convert_sources([tmp_path / "a"], store, ConvertOptions(workers=1))
    before = read_all(store)
    read = game_reader._TableReader._read_labels
    converted = []

    def convert_meanwhile(self: Any, part: int, rows: Any) -> None:
        if not converted:
            converted.append(convert_sources([tmp_path / "b"], store, ConvertOptions(workers=1)))
        read(self, part, rows)

    monkeypatch.setattr(game_reader._TableReader, "_read_labels", convert_meanwhile)
    found = read_all(store)
    assert converted
    assert all(found[name].tobytes() == before[name].tobytes() for name in before)
    assert len(read_all(store)["value"]) > len(found["value"])


def test_an_edited_manifest(store: Path) -> None:
    path = store / "manifest.json"
    path.write_text(path.read_text().replace('"games": 12', '"games": 11'))
    with pytest.raises(StoreError, match="manifest"):
        read_all(store)
    manifest_text = path.read_text()
    path.write_text(manifest_text[: len(manifest_text) // 2])
    with pytest.raises(StoreError, match="manifest"):
        read_all(store)


def test_counts_of_the_manifest_that_lie(store: Path) -> None:
    manifest = Manifest.load(store)
    for games, positions_count in ((5, 142), (0, 0)):
        manifest.counts |= {"games": games, "positions": positions_count}
        manifest.save(store)
        with pytest.raises(StoreError, match=r"game_id: .*; expected ascending numbers up to"):
            read_all(store)


def test_too_little_memory(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(game_reader, "available_memory", lambda: 300)
    with pytest.raises(BudgetError, match=r"does not fit into the available memory.*mode='stream'"):
        Loader(sound)


def test_a_store_in_an_object_store(sound: Path, bucket: UPath) -> None:
    for path in sound.rglob("*"):
        if path.is_file():
            (bucket / "store" / path.relative_to(sound).as_posix()).write_bytes(path.read_bytes())
    address = f"{str(bucket).rstrip('/')}/store"
    expected = read_all(sound)
    for options in ({}, {"check": "digests"}):
        found = contents(Loader(address, mode="games", fields=ALL_FIELDS, **options))  # type: ignore[arg-type]
        assert all(found[name].tobytes() == array.tobytes() for name, array in expected.items())
    loader = Loader(address, batch_size=32)
    assert loader.options.mode == "games"
    data = pickle.dumps(loader)
    assert not any(key.encode() in data for key in (ACCESS_KEY, SECRET_KEY))
    ids = [len(batch["value"]) for batch in loader]
    del loader
    assert [len(batch["value"]) for batch in pickle.loads(data)] == ids
    state = Loader(sound, batch_size=32).state_dict()
    Loader(address, batch_size=32).load_state_dict(state)
    (bucket / "store" / POSITIONS).unlink()
    with pytest.raises(StoreError, match=r"positions/part-000001\.parquet: a file of the store is missing"):
        Loader(address)
