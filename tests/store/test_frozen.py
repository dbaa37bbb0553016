"""Stores written by every earlier version of the schema can still be read, and are never written.

``frozen/README.md`` says how the stores were made. They must never be written again. If one cannot be read
any more, there is a bug.
"""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hexdata import (
    Loader,
    verify_store,
)
from hexdata.report import write_report
from hexdata.show import read_game, read_position
from hexdata.sql import run_query
from hexdata.verify import check_round_trip

FROZEN = Path(__file__).parent / "frozen"
N = 5


@pytest.fixture(params=["v2_dicts", "v2_trmph"])
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the folder of a frozen store and of its sources."""
    return Path(shutil.copytree(FROZEN / request.param, tmp_path / request.param))


@pytest.fixture
def dicts(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FROZEN / "v2_dicts", tmp_path / "v2_dicts"))


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


def test_results_of_a_search_and_metadata_are_those_of_the_sources(dicts):
    store = dicts / "store"
    rows = rows_of(store, "SELECT metadata, root_value, visits, weight FROM positions ORDER BY position_id")
    given = [example["metadata"] for example in examples(dicts)]
    assert [(row["root_value"], row["visits"], row["weight"]) for row in rows] == [
        (item["root_value"], item["visits"], None) for item in given
    ]
    assert all(json.loads(row["metadata"])["note"] == "é" for row in rows)


def test_positions_and_games_are_shown(dicts):
    (number, policy), *_ = dense_policies(dicts).items()
    position = read_position(dicts / "store", number)
    assert position.policy is not None
    assert position.policy.tobytes() == policy.tobytes()
    given = examples(dicts)
    assert (position.root_value, position.visits) == tuple(
        given[number]["metadata"][name] for name in ("root_value", "visits")
    )
    assert len(read_game(dicts / "store", 0)) == given[0]["metadata"]["total_positions"]


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
