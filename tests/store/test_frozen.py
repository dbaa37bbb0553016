"""Stores written by every earlier version of the schema can still be read.

``frozen/v1`` was written by the first release of schema version 1: four games of every layout on a 5 x 5
board and a line with a repeated move, shuffled with seed 7 into two buckets. It must never be written
again. If it cannot be read any more, there is a bug, or the schema needs a new version and a new folder.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata import Loader, verify_store
from hexdata.schema import games_schema, positions_schema
from hexdata.store import Store

FROZEN = Path(__file__).parent / "frozen" / "v1"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FROZEN, tmp_path / "v1"))


def table_of(store: Path, name: str) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in Store.open(store).files(name)])


def test_the_frozen_tables_are_unchanged(store):
    positions, games = table_of(store, "positions"), table_of(store, "games")
    assert positions.schema.equals(positions_schema(5))
    assert games.schema.equals(games_schema())
    assert positions["position_id"].to_pylist() == list(range(250))
    assert table_of(store, "rejected")["reason"].to_pylist() == ["repeated-move"]
    boards = b"".join(positions["board"].to_pylist())
    assert hashlib.sha256(boards).hexdigest()[:16] == "e68fe53f0e25e5c2"
    assert games["game_hash"][0].as_py().hex() == "94177ca4cf3526fd4eabbb32c665cbe1"


def test_a_frozen_store_passes_verify(store):
    result = verify_store(store)
    assert [check.name for check in result.checks if not check.ok] == []
    assert result.skipped == []


def test_the_frozen_shards_have_the_same_order(store):
    loader = Loader(store, batch_size=64, seed=3, fields=("position_id",))
    ids = [int(i) for batch in loader for i in batch["position_id"]]
    assert ids[:8] == [187, 132, 43, 2, 159, 188, 111, 7]
