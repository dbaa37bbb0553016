"""Tests of ``PositionDataset`` against the arrays in the shards and the batches of ``Loader``."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hexdata
from hexdata.batch import FIELDS
from hexdata.errors import ConfigError, StoreError
from hexdata.loader import Loader, PositionDataset
from hexdata.order import shuffle_indices

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder


@pytest.mark.parametrize("dense", [False, True])
def test_a_position_has_its_stored_values(make_shards: MakeShards, dense: bool) -> None:
    folder = make_shards(train=40, dense=dense)
    source = folder.splits["train"]
    dataset = PositionDataset(folder.path, fields=FIELDS)
    assert len(dataset) == 40
    for index in (0, 17, 39, -1, -40, np.int64(3)):
        position = dataset[index]
        assert position.keys() == set(FIELDS)
        bits = np.unpackbits(source["board"][index], count=50).reshape(2, 5, 5)
        np.testing.assert_array_equal(position["board"], bits.astype(np.float32), strict=True)
        for name in ("policy", "value", "move", "position_id", "game_id", "total_positions"):
            np.testing.assert_array_equal(position[name], source[name][index])
            assert position[name].dtype == source[name].dtype


def test_several_positions_are_views_of_one_batch(shards: ShardFolder) -> None:
    dataset = PositionDataset(shards.path, fields=("board", "value", "position_id"))
    indices = [5, 130, 5, -2, 64]
    many = dataset.__getitems__(indices)
    assert len({id(position["board"].base) for position in many}) == 1
    for index, position in zip(indices, many, strict=True):
        for name, value in dataset[index].items():
            np.testing.assert_array_equal(position[name], value)
    batch = dataset.batch(np.array(indices))
    assert batch["position_id"].tolist() == shards.splits["train"]["position_id"][indices].tolist()
    assert dataset.__getitems__([]) == []


@pytest.mark.parametrize("index", [134, -135, 10**9])
def test_an_index_out_of_range_is_an_error(shards: ShardFolder, index: int) -> None:
    dataset = PositionDataset(shards.path)
    with pytest.raises(IndexError, match=r"index -?\d+ is out of range for the 134 positions of train"):
        dataset[index]
    with pytest.raises(IndexError):
        dataset.__getitems__([0, index])


@pytest.mark.parametrize("index", [1.0, 1.5, True, "1", None, slice(0, 2)])
def test_an_index_must_be_an_integer(shards: ShardFolder, index: Any) -> None:
    dataset = PositionDataset(shards.path)
    with pytest.raises(TypeError, match="the index of a position must be an integer, not "):
        dataset[index]
    with pytest.raises(TypeError, match="indices must be a sequence or an array of integers, not "):
        dataset.batch([index, index])


def test_a_dataset_can_be_iterated(shards: ShardFolder) -> None:
    dataset: Any = PositionDataset(shards.path, "val", fields=("position_id",))
    ids = [position["position_id"] for position in dataset]
    assert ids == shards.splits["val"]["position_id"].tolist()


def test_shuffled_indices_give_the_batches_of_the_loader(shards: ShardFolder) -> None:
    """Including the random symmetries and value weights of the epoch."""
    options: dict[str, Any] = {
        "seed": 9,
        "fields": ("board", "policy", "value", "position_id"),
        "symmetry": True,
        "tier_probability": (1.0, 0.7, 0.4, 0.1),
        "where": "value_sample_tier <> 2",
    }
    loader = Loader(shards.path, batch_size=10, **options)
    dataset = PositionDataset(shards.path, **options)
    assert len(dataset) == loader.positions < 134
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        dataset.set_epoch(epoch)
        indices = iter(shuffle_indices(range(len(dataset)), 9, epoch))
        for batch in loader:
            for name, array in dataset.batch([next(indices) for _ in batch["value"]]).items():
                np.testing.assert_array_equal(array, batch[name], strict=True)


def test_a_dataset_can_be_pickled(shards: ShardFolder) -> None:
    dataset = PositionDataset(shards.path, fields=("board", "value"))
    dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(copy[77]["board"], dataset[77]["board"])


def test_hexdata_exports_the_dataset() -> None:
    assert hexdata.PositionDataset is PositionDataset


def test_invalid_options_are_refused(shards: ShardFolder, make_shards: MakeShards) -> None:
    with pytest.raises(ConfigError, match="unknown fields"):
        PositionDataset(shards.path, fields=("boards",))
    with pytest.raises(ConfigError, match="no such split"):
        PositionDataset(shards.path, "test")
    with pytest.raises(ConfigError, match="epoch cannot be used"):
        PositionDataset(shards.path).set_epoch(-1)
    folder = make_shards(train=20)
    (folder.path / "train-000000.tar").unlink()
    with pytest.raises(StoreError, match="missing"):
        PositionDataset(folder.path)
