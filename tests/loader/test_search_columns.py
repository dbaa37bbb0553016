"""Conditions and weights over results of a search, in exact and games mode, against plain Python."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from hexdata.errors import BudgetError, ConfigError, StoreError
from hexdata.loader import Loader, PositionDataset
from hexdata.store import Store
from tests.loader.game_stores import (
    SEARCHED,
    Row,
    add_search,
    position_rows,
    sample_games,
    write_shards,
    write_store,
)

BOARD_SIZE = 5
IDS = ("position_id",)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Games with results of a search, some packed, in small row groups; one part has no such columns."""
    games = sample_games(24, BOARD_SIZE, 3)
    parts: list[list[Row]] = [[], [], []]
    for number, game in enumerate(games):
        rows = position_rows(game, BOARD_SIZE, number % 2)
        if number % 3 < 2:
            add_search(rows, BOARD_SIZE, number)
        if number == 3:
            for row in rows:
                row["game_id"] = None
        if number in (4, 5):
            del rows[0]
        parts[number % 3] += reversed(rows) if number == 6 else rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hexdata.store.parquet.ROW_GROUP_ROWS", 37)
        path = tmp_path_factory.mktemp("search") / "store"
        return write_store(path, BOARD_SIZE, games, parts, targets=SEARCHED)


@pytest.fixture(scope="module")
def shards(store: Path) -> Path:
    return write_shards(store, store.parent / "shards")


@pytest.fixture(params=["games", "exact"])
def data(request: pytest.FixtureRequest, store: Path, shards: Path) -> Path:
    """The same positions for games mode and for exact mode."""
    return store if request.param == "games" else shards


@pytest.fixture(scope="module")
def rows(store: Path) -> dict[int, Row]:
    """The rows of the split train by position id, with None for null."""
    opened = Store.open(store)
    splits = {
        row["game_id"]: row["split"]
        for path in opened.files("games")
        for row in pq.read_table(path).to_pylist()
    }
    found = {}
    for path in opened.files("positions"):
        for row in pq.read_table(path).to_pylist():
            if splits.get(row["game_id"], "train") == "train":
                found[row["position_id"]] = {**dict.fromkeys(SEARCHED), **row}
    return found


@pytest.fixture(autouse=True)
def _small_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hexdata.loader.game_table._SCAN_ROWS", 50)


def ids_of(loader: Loader) -> list[int]:
    return sorted(number for batch in loader for number in batch["position_id"].tolist())


def make(data: Path, **options: Any) -> Loader:
    return Loader(data, **{"batch_size": 32, "seed": 5, "fields": IDS, **options})


def over(value: float | None, limit: float) -> bool:
    return value is not None and value > limit


CONDITIONS: dict[str, Any] = {
    "visits >= 800": lambda row: over(row["visits"], 799),
    "visits * 4 > 2147483647": lambda row: over(row["visits"], 2**29),
    "visits IS NULL": lambda row: row["visits"] is None,
    "NOT (visits > 0)": lambda row: row["visits"] == 0,
    "root_value = 0.25 OR weight < 0.1": lambda row: (
        row["root_value"] == 0.25 or (row["weight"] is not None and row["weight"] < np.float32(0.1))
    ),
    "extra.temperature < 0.5 AND position_in_game > 3": lambda row: (
        row["extra.temperature"] is not None
        and row["extra.temperature"] < 0.5
        and over(row["position_in_game"], 3)
    ),
    "extra.limits = 0.1::DOUBLE OR extra.LIMITS = 1e300": lambda row: row["extra.limits"] in (0.1, 1e300),
    "EXTRA.limits > 0 AND extra.limits < 1e-300": lambda row: row["extra.limits"] == 5e-324,
    "isinf(extra.limits)": lambda row: row["extra.limits"] == -math.inf,
    "extra.limits IS NULL AND extra.temperature IS NOT NULL": lambda row: (
        row["extra.limits"] is None and row["extra.temperature"] is not None
    ),
    "struct_extract(extra, 'temperature') > 1": lambda row: over(row["extra.temperature"], 1),
    "coalesce(weight, root_value, extra.temperature) IS NULL": lambda row: (
        row["weight"] is row["root_value"] is row["extra.temperature"] is None
    ),
}


@pytest.mark.parametrize("where", CONDITIONS)
def test_conditions_select_the_same_positions_in_both_modes(
    store: Path, shards: Path, rows: dict[int, Row], where: str
) -> None:
    expected = sorted(number for number, row in rows.items() if CONDITIONS[where](row))
    assert 0 < len(expected) < len(rows)
    for data in (store, shards):
        assert ids_of(make(data, where=where)) == expected
    # The table contains the columns as batches need them: extra.NAME as float32.
    assert ids_of(make(store, where=where, fields=(*IDS, *SEARCHED))) == expected


def test_a_float64_is_compared_exactly(tmp_path: Path) -> None:
    games = sample_games(4, BOARD_SIZE)
    rows = [row for game in games for row in position_rows(game, BOARD_SIZE)]
    numbers = [0.1, float(np.float32(0.1)), math.nextafter(0.1, 1), None, math.nan]
    for index, row in enumerate(rows):
        row["extra.x"] = numbers[index % 5]
    store = write_store(tmp_path / "store", BOARD_SIZE, games, [rows], targets=["extra.x"])
    for data in (store, write_shards(store, tmp_path / "shards")):
        for where, kept in (("extra.x > 0.1::DOUBLE", (1, 2)), ("extra.x IS NULL", (3, 4))):
            loader = make(data, where=where, fields=("position_id", "extra.x"))
            assert {number % 5 for number in ids_of(loader)} == set(kept)


WEIGHTS = {
    "coalesce(weight, 1)": lambda row: 1 if row["weight"] is None else row["weight"],
    "CASE WHEN extra.temperature > 0 THEN 2 ELSE 0.5 END": lambda row: (
        2 if over(row["extra.temperature"], 0) else 0.5
    ),
}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_over_columns(data: Path, rows: dict[int, Row], weights: str) -> None:
    by_expression = make(data, weights=weights)
    ids = np.array(list(rows))
    numbers = np.array([WEIGHTS[weights](row) for row in rows.values()], np.float64)
    by_array = make(data, weights=(ids, numbers))
    for _ in range(2):
        assert ids_of(by_expression) == ids_of(by_array)
    selected = make(data, weights=weights, where="visits > 0 AND extra.temperature > 0")
    assert set(ids_of(selected)) <= {
        number for number, row in rows.items() if over(row["visits"], 0) and over(row["extra.temperature"], 0)
    }


def test_weights_must_be_known_and_not_too_large(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"found null or nan; .*coalesce"):
        make(data, weights="weight")
    with pytest.raises(ConfigError, match=r"expected a number from 0 to 65,535.* Use least\(…, 65535\)"):
        make(data, weights="coalesce(visits, 0)")


def test_a_changed_condition_is_resumed(data: Path, rows: dict[int, Row]) -> None:
    where = "visits > 0 AND extra.temperature < 0"
    loader = make(data, batch_size=8)
    copied = pickle.loads(pickle.dumps(loader))
    loader.set_epoch(3, where=where)
    whole = [batch["position_id"].tolist() for batch in islice(loader, 2)]
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [batch["position_id"].tolist() for batch in loader]
    assert sorted(chain.from_iterable(whole + rest)) == sorted(
        number
        for number, row in rows.items()
        if over(row["visits"], 0) and over(-(row["extra.temperature"] or 0), 0)
    )
    for other in (make(data, batch_size=8), copied):
        other.load_state_dict(state)
        assert other.options.where == where
        assert [batch["position_id"].tolist() for batch in other] == rest
    assert ids_of(pickle.loads(pickle.dumps(loader))) == ids_of(loader)


def test_workers_use_the_conditions_and_weights(data: Path) -> None:
    pytest.importorskip("torch")
    from hexdata.torch import TorchLoader

    options = {"where": "extra.limits > 0", "weights": "coalesce(visits, 1) % 3 / 2"}
    plain, workers = make(data, **options), TorchLoader(make(data, **options), num_workers=1)
    for where in (options["where"], "extra.temperature > 0"):
        for each in (plain, workers):
            each.set_epoch(1, where=where)
        expected = [batch["position_id"].tolist() for batch in plain]
        assert [batch["position_id"].tolist() for batch in workers] == expected


def test_datasets_select_and_weight(data: Path) -> None:
    where, weights = "visits >= 800 AND extra.limits IS NOT NULL", "1 + coalesce(weight, 0)"
    dataset = PositionDataset(data, where=where, weights=weights, fields=IDS, seed=5)
    loader = make(data, where=where, weights=weights)
    found = dataset.batch(dataset.epoch_indices(0))["position_id"]
    assert sorted(found.tolist()) == ids_of(loader)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "visit > 3",
            r"no column 'visit'.* expected one of .*extra\.limits, extra\.temperature, .*visits, weight",
        ),
        ("extra.temp > 3", r"no column 'extra\.temp'.*Did you mean extra\.temperature\?"),
        ('"extra.temperature" > 3', r"no column.*Did you mean extra\.temperature, without quotes\?"),
        ("len(policy) > 3", r"no column 'policy'.*A loader does not evaluate it; `hexdata shuffle --where`"),
        ("positions.visits > 3", "must not be qualified"),
        ("extra.limits", "where is not a condition; found DOUBLE"),
    ],
)
def test_a_column_that_the_store_lacks_is_refused(data: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(data, where=text)
    loader = make(data)
    with pytest.raises(ConfigError, match=message):
        loader.set_epoch(1, where=text)


def test_a_store_without_results_of_a_search(tmp_path: Path) -> None:
    games = sample_games(4, BOARD_SIZE)
    parts = [[row for game in games for row in position_rows(game, BOARD_SIZE)]]
    store = write_store(tmp_path / "store", BOARD_SIZE, games, parts)
    for data in (store, write_shards(store, tmp_path / "shards")):
        for options in ({"where": "visits > 3"}, {"weights": "visits"}, {"where": "extra.visits > 3"}):
            with pytest.raises(
                ConfigError, match=r"no column '(extra\.)?visits'.*expected one of .*game_id, .*move,"
            ):
                make(data, **options)


def test_stream_mode_refuses_both(shards: Path) -> None:
    with pytest.raises(ConfigError, match="stream mode cannot select positions"):
        make(shards, mode="stream", where="visits > 3")
    with pytest.raises(ConfigError, match="stream mode cannot apply weights"):
        make(shards, mode="stream", weights="weight")


# --- reading from the store, in games mode --------------------------------------------------------------


def test_columns_of_an_expression_are_not_kept(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = "visits > 0 AND extra.limits > 0"
    loader = make(store, where=where)
    assert loader.games is not None
    assert not set(SEARCHED) & loader.games.arrays.keys()
    monkeypatch.setattr("hexdata.loader.stored_columns.available_memory", lambda: 12 * loader.games.positions)
    with pytest.raises(BudgetError, match="the columns of where or weights do not fit") as caught:
        make(store, where=where)
    assert "extra.limits, visits" in str(caught.value.hint)


def test_a_store_that_has_changed_is_refused(store: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(store, tmp_path / "store")
    loader = make(copied)
    opened = Store.open(copied)
    opened.manifest.files.pop("positions/part-000002.parquet")
    opened.manifest.save(copied)
    loader.set_epoch(1, where="position_in_game > 3")  # a label, which the loader has
    with pytest.raises(StoreError, match="the store has changed since the loader was made"):
        loader.set_epoch(1, where="visits > 3")
    assert loader.options.where == "position_in_game > 3"


@pytest.mark.parametrize("changes", [{"visits": -3}, {"visits": 6}, {"game_id": 0}])
def test_a_file_that_was_replaced_is_refused(tmp_path: Path, changes: Row) -> None:
    """The columns are read after the labels."""
    games = sample_games(4, BOARD_SIZE)
    rows = [{**row, "visits": 5} for game in games for row in position_rows(game, BOARD_SIZE)]
    store = write_store(tmp_path / "store", BOARD_SIZE, games, [rows], targets=["visits"])
    loader = make(store)
    last = max(
        i for i, row in enumerate(rows) if games[row["game_id"]]["split"] == "train" and row["game_id"]
    )
    rows[last].update(changes)
    write_store(tmp_path / "altered", BOARD_SIZE, games, [rows], targets=["visits"])
    name = "positions/part-000000.parquet"
    shutil.copy(tmp_path / "altered" / name, store / name)
    with pytest.raises(StoreError, match="the file was altered"):
        loader.set_epoch(1, where="visits > 3")
