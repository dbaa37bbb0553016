"""Stores written by every earlier version of the schema can still be read, and are never written.

``frozen/README.md`` says how the stores were made. They must never be written again. If one cannot be read
any more, there is a bug.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata import (
    ConvertOptions,
    Loader,
    ShuffleOptions,
    convert_sources,
    export_shards,
    shuffle_store,
    verify_store,
)
from hexdata.errors import StoreError
from hexdata.export import export_pickles
from hexdata.report import write_report
from hexdata.schema import positions_schema, table_schema
from hexdata.show import read_game, read_position
from hexdata.sql import run_query
from hexdata.store import Store
from hexdata.store.parquet import ParquetRows, open_parquet, read_rows
from hexdata.verify import check_round_trip

FROZEN = Path(__file__).parent / "frozen"
N = 5


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FROZEN / "v1", tmp_path / "v1"))


@pytest.fixture(params=["v1_dicts", "v1_trmph"])
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the folder of a frozen store and of its sources."""
    return Path(shutil.copytree(FROZEN / request.param, tmp_path / request.param))


@pytest.fixture
def dicts(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FROZEN / "v1_dicts", tmp_path / "v1_dicts"))


def examples(folder: Path) -> list[dict[str, Any]]:
    """Return the examples of the pickles of a frozen store, in the order of position ids."""
    return [
        example
        for path in sorted((folder / "inputs").iterdir())
        for example in pickle.loads(gzip.decompress(path.read_bytes()))["examples"]
    ]


def dense_policies(folder: Path) -> dict[int, np.ndarray]:
    """Return the policies that are not one-hot, by position id. Policies of zeros are included."""
    policies = {number: example["policy"] for number, example in enumerate(examples(folder))}
    return {
        number: policy
        for number, policy in policies.items()
        if policy is not None and not (np.count_nonzero(policy) == 1 and policy.max() == 1)
    }


def rows_of(store: Path, text: str) -> list[dict[str, Any]]:
    with run_query(store, text) as result:
        return pa.Table.from_batches(result.batches, result.schema).to_pylist()


def table_of(store: Path, name: str) -> pa.Table:
    """Return a table in the current schema."""
    opened = Store.open(store)
    manifest = opened.manifest
    schema = table_schema(name, manifest.board_size)
    files = [(path, pq.read_metadata(path).num_rows) for path in opened.files(name)]
    rows = ParquetRows.over(files, 0, sum(count for _, count in files), manifest.schema_version)
    return pa.Table.from_batches(read_rows(rows, schema), schema)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_frozen_tables_are_unchanged(store):
    positions, games = table_of(store, "positions"), table_of(store, "games")
    assert positions["position_id"].to_pylist() == list(range(250))
    assert table_of(store, "rejected")["reason"].to_pylist() == ["repeated-move"]
    boards = b"".join(positions["board"].to_pylist())
    assert hashlib.sha256(boards).hexdigest()[:16] == "e68fe53f0e25e5c2"
    assert games["game_hash"][0].as_py().hex() == "94177ca4cf3526fd4eabbb32c665cbe1"
    assert games["end_reason"].null_count == games["swap"].null_count == games.num_rows
    assert table_of(store, "sources")["model"].null_count == 4


def test_a_frozen_store_passes_verify(store):
    result = verify_store(store)
    assert [check.name for check in result.checks if not check.ok] == []
    assert result.skipped == []


def test_the_frozen_shards_have_the_same_order(store):
    loader = Loader(store, batch_size=64, seed=3, fields=("position_id",))
    ids = [int(i) for batch in loader for i in batch["position_id"]]
    assert ids[:8] == [187, 132, 43, 2, 159, 188, 111, 7]


def test_a_store_and_its_exports_equal_the_sources(release):
    result = verify_store(release / "store")
    assert [check.name for check in result.checks if not check.ok] == []
    assert result.skipped == []
    assert all(source.ok for source in check_round_trip(release / "store", release / "inputs"))


def test_policies_are_read_as_sparse_ones_with_the_same_bits(dicts):
    expected = dense_policies(dicts)
    assert len(expected) > 20
    assert any(np.signbit(policy).any() for policy in expected.values())
    assert any(not policy.any() for policy in expected.values())
    text = "SELECT position_id, policy FROM {} WHERE policy IS NOT NULL ORDER BY position_id"
    for table in ("positions", "shuffled"):
        found = {}
        for row in rows_of(dicts / "store", text.format(table)):
            policy = np.zeros(N * N, np.float32)
            for item in row["policy"]:
                policy[item["cell"]] = item["probability"]
            found[row["position_id"]] = policy
        assert found.keys() == expected.keys()
        assert all(found[number].tobytes() == policy.tobytes() for number, policy in expected.items())


def test_new_columns_are_null_and_metadata_keeps_its_text(dicts):
    store = dicts / "store"
    rows = rows_of(store, "SELECT metadata, root_value, visits, weight FROM positions")
    kept = [
        {key: item["metadata"][key] for key in ("root_value", "visits", "note")} for item in examples(dicts)
    ]
    assert [json.loads(row["metadata"]) for row in rows] == kept
    assert all(row[name] is None for row in rows for name in ("root_value", "visits", "weight"))
    assert rows_of(store, "SELECT count(end_reason) + count(swap) AS n FROM games") == [{"n": 0}]
    assert rows_of(store, "SELECT count(model) + count(date) AS n FROM sources") == [{"n": 0}]


def test_positions_and_games_are_shown(dicts):
    (number, policy), *_ = dense_policies(dicts).items()
    position = read_position(dicts / "store", number)
    assert position.policy is not None
    assert position.policy.tobytes() == policy.tobytes()
    assert (position.root_value, position.visits, position.weight, position.extra) == (None, None, None, {})
    game = read_game(dicts / "store", 0)
    assert (game.end_reason, game.swap, len(game)) == (None, None, 18)


@pytest.mark.usefixtures("no_charts")
def test_a_report_is_written(release, tmp_path):
    write_report(release / "store", tmp_path / "report.html")
    assert "Lineage" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("mode", ["games", "exact", "stream"])
def test_every_mode_of_the_loader_delivers_the_policies_of_the_sources(dicts, mode):
    given = examples(dicts)
    fields = ("position_id", "policy", "value")
    found = {}
    for batch in Loader(dicts / "store", batch_size=16, seed=1, mode=mode, fields=fields):
        for row, number in enumerate(batch["position_id"].tolist()):
            found[number] = (batch["policy"][row], batch["value"][row])
    splits = rows_of(dicts / "store", "SELECT position_id FROM shuffled WHERE split = 'train'")
    assert found.keys() == {row["position_id"] for row in splits}
    for number, (policy, value) in found.items():
        expected = given[number]["policy"]
        assert (policy == (np.zeros(N * N) if expected is None else expected)).all()
        assert value == given[number]["value"]


@pytest.mark.parametrize(
    "write",
    [
        lambda release: convert_sources(
            [release / "inputs"], release / "store", ConvertOptions(workers=1, max_reject_rate=1)
        ),
        lambda release: shuffle_store(release / "store", ShuffleOptions(seed=8)),
        lambda release: export_shards(release / "store"),
        lambda release: export_pickles(release / "store"),
    ],
    ids=["convert", "shuffle", "export", "pickles"],
)
def test_commands_that_write_are_refused_and_change_no_byte(release, write: Callable[[Path], object]):
    before = bytes_of(release)
    with pytest.raises(
        StoreError, match="schema version 1, which this release reads but does not write"
    ) as e:
        write(release)
    assert "hexdata convert INPUT... NEWSTORE" in str(e.value)
    assert bytes_of(release) == before


def test_a_store_of_the_current_version_must_have_all_columns(dicts):
    path = Store.open(dicts / "store").files("positions")[0]
    with (
        pytest.raises(StoreError, match="does not have the columns of its table"),
        open_parquet(path, positions_schema(N)),
    ):
        pass
    with open_parquet(path, positions_schema(N), version=1) as file:
        assert file.metadata.num_rows == 51
