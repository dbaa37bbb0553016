"""Selections of positions against plain Python, and ``set_epoch(epoch, where=…)``."""

from __future__ import annotations

import math
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.errors import ConfigError, StoreError
from hexdata.loader import Loader
from hexdata.store import Store
from tests.kit.loaders import ids_of
from tests.loader.conftest import Searched
from tests.loader.game_stores import SEARCHED

IDS = ("position_id",)
FIRST, SECOND = "position_in_game < 4", "move % 2 = 1"


def make(data: Path, **options: Any) -> Loader:
    return Loader(data, **{"batch_size": 32, "seed": 5, "fields": IDS, **options})


def selected(data: Path, **options: Any) -> list[int]:
    return sorted(number for batch in ids_of(make(data, **options)) for number in batch)


def over(value: float | None, limit: float) -> bool:
    return value is not None and value > limit


CONDITIONS: dict[str, Any] = {
    "1 = 1": lambda row: True,
    "value_sample_tier < 2": lambda row: row["value_sample_tier"] in (0, 1),
    "move IS NULL": lambda row: row["move"] is None,
    "move % 2 = 0": lambda row: row["move"] is not None and row["move"] % 2 == 0,
    "value = 1 AND player_to_move = 0": lambda row: row["value"] == 1 and row["player_to_move"] == 0,
    "game_id IN (1, 8) OR position_in_game >= 7": lambda row: (
        row["game_id"] in (1, 8) or over(row["position_in_game"], 6)
    ),
    "position_id < 20 OR total_positions = 12": lambda row: (
        row["position_id"] < 20 or row["total_positions"] == 12
    ),
    "position_in_game - total_positions < -3": lambda row: (
        row["total_positions"] - row["position_in_game"] > 3
    ),
    "move * move * move > 1000 -- more than 16 bits": lambda row: (row["move"] or 0) ** 3 > 1000,
    "game_id IS NULL": lambda row: row["game_id"] is None,
    "visits >= 800": lambda row: over(row["visits"], 799),
    "visits * 4 > 2147483647": lambda row: over(row["visits"], 2**29),
    "visits IS NULL": lambda row: row["visits"] is None,
    "NOT (visits > 0)": lambda row: row["visits"] == 0,
    "root_value = 0.25 OR weight < 0.1": lambda row: (
        row["root_value"] == 0.25 or (row["weight"] is not None and row["weight"] < np.float32(0.1))
    ),
    "extra.temperature < 0.5 AND position_in_game > 3": lambda row: (
        row["position_in_game"] > 3
        and row["extra.temperature"] is not None
        and row["extra.temperature"] < 0.5
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


@pytest.mark.parametrize("fields", [IDS, (*IDS, *SEARCHED)], ids=["ids", "targets"])
def test_conditions_select_the_matching_positions(
    searched: Searched, data: Path, monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...]
) -> None:
    """Also if a table of games has extra.NAME as float32, because batches need it."""
    monkeypatch.setattr("hexdata.loader.game_table._SCAN_ROWS", 150)
    loader = make(data, fields=fields)
    for where, matches in CONDITIONS.items():
        if fields == IDS or "extra" in where:
            expected = [number for number, row in searched.rows.items() if matches(row)]
            assert expected, where
            loader.set_epoch(0, where=where)
            assert sorted(i for batch in loader for i in batch["position_id"].tolist()) == expected, where


def test_other_selections_and_their_intersection(searched: Searched, data: Path) -> None:
    rows = searched.rows
    games = sorted({row["game_id"] for row in rows.values()} - {None})
    parts = []
    for newest in (1, 4, len(games), 1000):
        parts.append({number for number, row in rows.items() if row["game_id"] in games[-newest:]})
        assert selected(data, newest=newest) == sorted(parts[-1])
    parts = [parts[1], {number for number, row in rows.items() if row["value"] == 1}]
    parts.append(
        {number for number, row in rows.items() if row["move"] is not None or row["policy"] is not None}
    )
    assert 0 < len(parts[2]) < len(rows)
    assert selected(data, final_policy="skip") == sorted(parts[2])
    expected = sorted(set.intersection(*parts))
    assert selected(data, where="value = 1", newest=4, final_policy="skip") == expected != []


INVALID: list[tuple[Any, str]] = [
    ("visit > 3", "extra.limits, extra.temperature"),
    ("tier < 2", "value_sample_tier"),
    ("value <", "where"),
    ("", "where"),
    (5, "where"),
    ("board IS NULL", "board"),
    ("winner = 0", "winner"),
    ("_row < 10", "_row"),
    ("move", "BIGINT"),
    ("random() < 0.5", "random"),
    ("position_id > (SELECT avg(position_id) FROM labels)", "subquery"),
    ("1 = 1); SELECT 0 AS _row WHERE (1 = 1", "where"),
    ("value > 2", "value > 2"),
    ("(value::TEXT || 'x')::INTEGER = 1", "where fails for a position"),
    ("extra.temp > 3", "Did you mean extra.temperature?"),
    ('"extra.temperature" > 3', "extra.temperature, without quotes"),
    ("len(policy) > 3", "no column 'policy'"),
    ("positions.visits > 3", "qualified"),
    ("extra.limits", "DOUBLE"),
]
"""Conditions that are refused, and a part of the error."""


def test_a_refused_condition_changes_nothing(data: Path) -> None:
    loader, plain = make(data, where=FIRST), make(data, where=FIRST)
    for each in (loader, plain):
        list(islice(each, 2))
    for where, found in INVALID:
        with pytest.raises(ConfigError) as caught:
            loader.set_epoch(5, where=where)
        assert found in str(caught.value)
    with pytest.raises(ConfigError):
        make(data, where=INVALID[0][0])
    assert loader.state_dict() == plain.state_dict()
    assert ids_of(loader) == ids_of(plain)


# --- other conditions for later epochs ----------------------------------------------------------------


def test_an_epoch_is_that_of_a_loader_with_the_condition(data: Path) -> None:
    """Also later epochs, until the condition is changed again."""
    loader = make(data)
    plans = {where: make(data, where=where) for where in (None, FIRST, SECOND)}
    for epoch, where in ((0, None), (1, FIRST), (2, SECOND), (0, None), (4, SECOND), (4, FIRST)):
        loader.set_epoch(epoch, where=where)
        plain = plans[where]
        plain.set_epoch(epoch)
        assert (loader.positions, len(loader), loader.options) == (plain.positions, len(plain), plain.options)
        for _ in range(2):
            assert ids_of(loader) == ids_of(plain)
    loader.set_epoch(2)
    plain.set_epoch(2)
    assert ids_of(loader) == ids_of(plain)


# --- columns that games mode reads from the store for a condition -------------------------------------


def test_a_store_that_has_changed_is_refused(searched: Searched, tmp_path: Path) -> None:
    """Labels are in memory; other columns are read again."""
    copied = shutil.copytree(searched.store, tmp_path / "store")
    loader = make(copied)
    games = copied / "games/part-000000.parquet"
    whole = games.read_bytes()
    half = len(whole) // 2
    games.write_bytes(whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :])
    with pytest.raises(StoreError, match=games.name):
        loader.set_epoch(1, where="first_player = 0")
    games.write_bytes(whole)
    opened = Store.open(copied)
    opened.manifest.files.pop("positions/part-000002.parquet")
    opened.manifest.save(copied)
    loader.set_epoch(1, where=FIRST)
    with pytest.raises(StoreError, match="changed since the loader was made"):
        loader.set_epoch(1, where="visits > 3")
    assert loader.options.where == FIRST
