"""Queries, selections, shows and checks of a store with optional columns, which one of its parts lacks."""

from __future__ import annotations

import shutil
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import ConfigError
from hexdata.schema import sources_schema
from hexdata.show import read_position
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.sql import run_query
from hexdata.store.manifest import Manifest
from hexdata.store.parquet import write_parquet
from hexdata.verify import verify_store
from tests.conftest import odd_positions
from tests.pairs import FULL

if TYPE_CHECKING:
    from tests.conftest import CopyStore, WriteOddStore

TARGETS = ("extra.odd", "extra.temperature", "root_value", "visits", "weight")
SOURCES = "sources/part-000000.parquet"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory, write_odd_store: WriteOddStore) -> Path:
    """A store with optional columns, except in the second of its three parts; its sources have facts."""
    store = write_odd_store(tmp_path_factory.mktemp("targets") / "store", 300, 3, TARGETS)
    manifest = Manifest.load(store)
    rows = pq.read_table(store / SOURCES).to_pylist()
    rows[0] |= {"model": "net-7", "simulations": 800, "date": date(2025, 9, 8)}
    table = pa.Table.from_pylist(rows, schema=sources_schema())
    manifest.files[SOURCES] = write_parquet(store / SOURCES, table.schema, [table])
    manifest.save(store)
    return store


def rows_of(store: Path, text: str) -> list[dict[str, Any]]:
    with run_query(store, text) as result:
        return pa.Table.from_batches(result.batches, result.schema).to_pylist()


def expected() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = odd_positions(300, TARGETS).to_pylist()
    return [row | dict.fromkeys(TARGETS) if 100 <= i < 200 else row for i, row in enumerate(rows)]


def test_the_views_have_the_columns_and_the_struct(searched):
    rows = rows_of(searched, "SELECT * FROM positions")
    for row, given in zip(rows, expected(), strict=True):
        extra = {name: given[f"extra.{name}"] for name in ("odd", "temperature")}
        assert repr(row["extra"]) == repr(extra)
        assert all(row[name] == given[name] for name in ("root_value", "visits", "weight", "policy"))
    assert rows_of(searched, "SELECT extra FROM shuffled") == []


def test_a_store_without_them_has_null_columns_and_no_struct(stores):
    rows = rows_of(stores["odd"], "SELECT * FROM positions LIMIT 2")
    assert [row["root_value"] for row in rows] == [None, None]
    assert {"visits", "weight"} <= rows[0].keys()
    assert "extra" not in rows[0]


def test_the_probability_of_a_cell(searched):
    text = "SELECT position_id, policy, policy_probability(policy, 4) AS p FROM positions"
    for row in rows_of(searched, text):
        given = {item["cell"]: item["probability"] for item in row["policy"] or []}
        assert row["p"] == (None if row["policy"] is None else given.get(4, 0.0))


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("root_value < 0.5", lambda row: row["root_value"] is not None and row["root_value"] < 0.5),
        ("visits IS NULL", lambda row: row["visits"] is None),
        (
            "extra.temperature > 0.25 AND weight > 0.5",
            lambda row: (row["extra.temperature"] or 0) > 0.25 and (row["weight"] or 0) > 0.5,
        ),
        ("metadata IS NULL", lambda row: row["metadata"] is None),
        (
            "model = 'net-7' AND simulations > 100 AND date >= '2025-09-01' AND temperature IS NULL",
            lambda row: row["game_id"] is not None,
        ),
        ("end_reason IS NULL AND swap IS NULL AND seed IS NULL", lambda _: True),
    ],
)
def test_conditions_may_use_them(searched, copy_store: CopyStore, where, wanted):
    store = copy_store(searched)
    shuffle_store(store, ShuffleOptions(seed=1, buckets=1, threads=1, where=where))
    found = {row["position_id"] for row in rows_of(store, "SELECT position_id FROM shuffled")}
    assert found == {row["position_id"] for row in expected() if wanted(row)}
    if FULL or "extra." in where:  # these names are the hard ones
        assert [check.name for check in verify_store(store).checks if not check.ok] == []


@pytest.mark.parametrize("where", ["extra.unknown = 1", "other.temperature = 1", "extra.odd.x = 1"])
def test_other_qualified_names_are_refused(searched, copy_store: CopyStore, where):
    with pytest.raises(ConfigError, match="where"):
        shuffle_store(copy_store(searched), ShuffleOptions(seed=1, where=where))


def test_a_position_is_shown_with_them(searched):
    for number, given in list(enumerate(expected()))[::17]:
        position = read_position(searched, number)
        assert (position.root_value, position.visits, position.weight) == tuple(
            given[name] for name in ("root_value", "visits", "weight")
        )
        assert position.extra == {name: given[f"extra.{name}"] for name in ("odd", "temperature")}
        shown = position.to_json()
        assert (shown["visits"], shown["extra"]) == (given["visits"], dict(position.extra))
        assert (f"{given['visits']} visits" in str(position)) == (given["visits"] is not None)


@pytest.fixture(scope="module")
def shuffled(searched, tmp_path_factory):
    """The store, shuffled into one bucket. Read-only: copy it."""
    store = shutil.copytree(searched, tmp_path_factory.mktemp("shuffled") / "store")
    shuffle_store(store, ShuffleOptions(seed=1, buckets=1, threads=1))
    return store


@pytest.mark.parametrize("column", TARGETS)
def test_a_value_altered_in_a_bucket_is_found(shuffled, copy_store: CopyStore, column):
    store, name = copy_store(shuffled), "shuffled/train/bucket-000000.parquet"
    manifest, table = Manifest.load(store), pq.read_table(store / name)
    values = table[column].to_pylist()
    values[values.index(None)] = 1
    index = table.schema.get_field_index(column)
    table = table.set_column(
        index, table.schema.field(index), pa.array(values, table.schema.field(index).type)
    )
    manifest.files[name] = write_parquet(store / name, table.schema, [table])
    manifest.save(store)
    assert "shuffled rows" in [check.name for check in verify_store(store).checks if not check.ok]
