"""Stores written by every earlier version of the schema can still be read, and are never written.

``frozen/README.md`` says how the stores were made. They must never be written again. If one cannot be read
any more, there is a bug.
"""

from __future__ import annotations

import gzip
import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hexdata import ExportOptions, Loader, export_shards, verify_store
from hexdata.errors import StoreError
from hexdata.report import write_report
from hexdata.sql import run_query
from hexdata.verify import check_round_trip

FROZEN = Path(__file__).parent / "frozen"
N = 5


@pytest.fixture
def dicts(tmp_path):
    return copied("v2_dicts", tmp_path)


def copied(name, tmp_path):
    """Return a copy of a folder. Its shards, of version 1, are refused, and so written again."""
    folder = Path(shutil.copytree(FROZEN / name, tmp_path / name))
    with pytest.raises(StoreError, match="another version; found 1"):
        Loader(folder / "store", mode="exact")
    assert [check.name for check in verify_store(folder / "store").checks if not check.ok] == ["shards"]
    assert not export_shards(folder / "store", ExportOptions(shard_size=64, block_size=32)).already_done
    return folder


@pytest.fixture(scope="module")
def examples():
    """The examples of the pickles of the store of dicts, in the order of position ids."""
    paths = sorted((FROZEN / "v2_dicts" / "inputs").iterdir())
    return [e for path in paths for e in pickle.loads(gzip.decompress(path.read_bytes()))["examples"]]


def rows_of(store, text):
    with run_query(store, text) as result:
        return pa.Table.from_batches(result.batches, result.schema).to_pylist()


@pytest.mark.parametrize("name", ["v2_dicts", "v2_trmph"])
def test_a_store_and_its_exports_equal_the_sources(name, tmp_path):
    folder = copied(name, tmp_path)
    result = verify_store(folder / "store")
    assert [check.name for check in result.checks if not check.ok] == []
    assert result.skipped == []
    assert all(source.ok for source in check_round_trip(folder / "store", folder / "inputs"))
    write_report(folder / "store", tmp_path / "report.html")
    assert "Lineage" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_policies_are_read_as_sparse_ones_with_the_same_bits(dicts, examples):
    """The policies that are not one-hot, by position id. Policies of zeros are included."""
    known = {number: each["policy"] for number, each in enumerate(examples) if each["policy"] is not None}
    policies = {i: p for i, p in known.items() if not (np.count_nonzero(p) == 1 and p.max() == 1)}
    assert len(policies) > 20
    assert any(np.signbit(policy).any() for policy in policies.values())
    assert any(not policy.any() for policy in policies.values())
    for table in ("positions", "shuffled"):
        found = {}
        for row in rows_of(dicts / "store", f"SELECT * FROM {table} WHERE policy IS NOT NULL"):
            policy = found[row["position_id"]] = np.zeros(N * N, np.float32)
            for item in row["policy"]:
                policy[item["cell"]] = item["probability"]
        assert found.keys() == policies.keys()
        assert all(found[number].tobytes() == policy.tobytes() for number, policy in policies.items())


@pytest.mark.parametrize("mode", ["games", "exact", "stream"])
def test_every_mode_of_the_loader_delivers_the_policies_of_the_sources(dicts, examples, mode):
    found, fields = {}, ("position_id", "policy", "value")
    for batch in Loader(dicts / "store", batch_size=16, seed=1, mode=mode, fields=fields):
        found |= zip(
            batch["position_id"].tolist(), zip(batch["policy"], batch["value"], strict=True), strict=True
        )
    splits = rows_of(dicts / "store", "SELECT position_id FROM shuffled WHERE split = 'train'")
    assert found.keys() == {row["position_id"] for row in splits}
    for number, (policy, value) in found.items():
        expected = examples[number]["policy"]
        assert (policy == (np.zeros(N * N) if expected is None else expected)).all()
        assert value == examples[number]["value"]
