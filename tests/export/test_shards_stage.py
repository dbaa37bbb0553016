"""Export of shards: sizes, contents and order, reproducible bytes, and refused options."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import BudgetError, ConfigError
from hexdata.export import ExportOptions, export_shards
from hexdata.export import shards as shards_stage
from hexdata.schema import NO_GAME, NO_MOVE, NO_PLY, NO_TIER
from hexdata.shards.blocks import block_to_policy, row_fields
from hexdata.shards.format import read_blocks
from hexdata.shards.reader import load_manifest
from hexdata.shards.sources import make_source
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.verify import verify_store

SIZES = {"shard_size": 192, "block_size": 32}
ONE = ExportOptions(**SIZES, workers=1)
TARGETS = ("extra.odd", "root_value", "visits", "weight")
NULLS = {"move": NO_MOVE, "game_id": NO_GAME, "value_sample_tier": NO_TIER, "position_in_game": NO_PLY}
NULLS |= {"total_positions": NO_PLY, "visits": -1} | dict.fromkeys(TARGETS[:2] + TARGETS[3:], np.nan)
DTYPES = dict.fromkeys(("value", "root_value", "weight"), np.float32)


@pytest.fixture(scope="module")
def exported(tmp_path_factory, write_odd_store):
    """The odd store, shuffled into three buckets and exported. Read only: copy it."""
    store = write_odd_store(tmp_path_factory.mktemp("exported") / "store", 900, 3, TARGETS)
    shuffle_store(store, ShuffleOptions(seed=7, buckets=3, threads=1))
    result = export_shards(store, ONE)
    assert (result.shards, result.positions) == ({"train": 4, "val": 1, "test": 1}, 900)
    assert sum(result.splits.values()) == 900
    return store


def rows_of(store, split):
    """Return the shuffled rows of a split by column, and the blocks of its shards with keys."""
    shuffled = pa.concat_tables(map(pq.read_table, Store.open(store).files(f"shuffled/{split}")))
    rows = {}
    for name in ("position_id", "value", "player_to_move", *NULLS):
        values = [NULLS[name] if value is None else value for value in shuffled[name].to_pylist()]
        rows[name] = np.array(values, DTYPES.get(name))
    rows["board"] = np.array([list(board) for board in shuffled["board"].to_pylist()], np.uint8)
    rows["policy"] = np.zeros((len(shuffled), 25), np.float32)
    policies = shuffled.select(["move", "policy"]).to_pylist()
    for row, given in zip(rows["policy"], policies, strict=True):
        if given["policy"] is None and given["move"] is not None:
            row[given["move"]] = 1
        for cell in given["policy"] or ():
            row[cell["cell"]] = cell["probability"]
    shards = sorted((store / "shards").glob(f"{split}-*.tar"))
    return rows, *zip(*(pair for path in shards for pair in read_blocks(path)), strict=True)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_blocks_of_exact_sizes_hold_the_shuffled_rows_in_their_order(exported, split):
    expected, keys, blocks = rows_of(exported, split)
    count = len(expected["value"])
    sizes = [shard.positions for shard in load_manifest(make_source(exported / "shards")).splits[split]]
    assert sizes == [192] * (count // 192) + [count % 192]
    assert keys == tuple(f"{number:06d}" for number in range(-(-count // 32)))
    assert [len(block["value"]) for block in blocks] == [min(32, count - at) for at in range(0, count, 32)]
    assert set(row_fields(blocks[0])) == expected.keys() - {"policy"}
    for name in row_fields(blocks[0]):
        np.testing.assert_array_equal(np.concatenate([block[name] for block in blocks]), expected[name])
    found = np.concatenate([block_to_policy(block, 25) for block in blocks])
    np.testing.assert_array_equal(found, expected["policy"])


def test_other_sizes_replace_shards(exported, copy_store, store_bytes):
    store = copy_store(exported)
    options = ExportOptions(shard_size=300, block_size=100, workers=1)
    assert export_shards(store, options).shards == {"train": 3, "val": 1, "test": 1}
    verify_store(store).require()
    assert not export_shards(store, ExportOptions(**SIZES, workers=2)).already_done
    assert store_bytes(store) == store_bytes(exported)


def test_a_manifest_that_no_reader_accepts_is_refused_before_anything_is_written(
    exported, copy_store, store_bytes, monkeypatch
):
    store = copy_store(exported)
    monkeypatch.setattr(shards_stage, "_MAX_MANIFEST", 32_000)
    with pytest.raises(ConfigError, match="blocks would be too large"):
        export_shards(store, ExportOptions(shard_size=3, block_size=1, workers=1))
    assert store_bytes(store) == store_bytes(exported)
    export_shards(store, ExportOptions(shard_size=192, block_size=16, workers=1))
    assert 0 < (store / "shards" / "manifest.json").stat().st_size <= 32_000 + (1 << 14)


def test_too_little_memory_for_a_block_is_refused_before_anything_is_removed(
    exported, shuffled_store, copy_store, store_bytes
):
    """A store without dense policies needs less, and its shards have no such field."""
    store, least = copy_store(exported), ExportOptions.WORKER_MEMORY
    with pytest.raises(BudgetError, match="too little memory for 1 worker"):
        export_shards(store, ExportOptions(memory=least + 1000))
    assert store_bytes(store) == store_bytes(exported)
    export_shards(store, ExportOptions(memory=least + (65 << 20)))
    without = copy_store(shuffled_store, "without policies")
    export_shards(without, ExportOptions(memory=least))
    assert "policy_row" not in load_manifest(make_source(without / "shards")).fields
