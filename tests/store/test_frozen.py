"""Stores of every version that was ever written stay readable: small frozen ones lie beside this test.

``frozen/v1`` was made by the first release of schema version 1: four games of every layout on a 5 x 5 board
and a line with a repeated move, shuffled with seed 7 into two buckets. It is never made anew: what cannot
be read any more is a broken promise, or a new version of the schema with a folder of its own.
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


def test_its_tables_are_those_that_were_written(store):
    positions, games = table_of(store, "positions"), table_of(store, "games")
    assert positions.schema.equals(positions_schema(5))
    assert games.schema.equals(games_schema())
    assert positions["position_id"].to_pylist() == list(range(250))
    assert table_of(store, "rejected")["reason"].to_pylist() == ["repeated-move"]
    boards = b"".join(positions["board"].to_pylist())
    assert hashlib.sha256(boards).hexdigest()[:16] == "e68fe53f0e25e5c2"
    assert games["game_hash"][0].as_py().hex() == "94177ca4cf3526fd4eabbb32c665cbe1"


def test_it_verifies(store):
    result = verify_store(store)
    assert [check.name for check in result.checks if not check.ok] == []
    assert result.skipped == []


def test_its_shards_give_the_same_order(store):
    loader = Loader(store, batch_size=64, seed=3, fields=("position_id",))
    ids = [int(i) for batch in loader for i in batch["position_id"]]
    assert ids[:8] == [187, 132, 43, 2, 159, 188, 111, 7]
