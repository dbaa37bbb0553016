"""Ranges of shards: ``Loader(..., shards="1-2")``."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hexdata.errors import ConfigError, StoreError
from hexdata.loader import Loader, PositionDataset, combine_digests
from hexdata.loader.options import LoaderOptions
from hexdata.loader.trial import LoadOptions, run_loader_trial
from hexdata.order import Permutation, derive_key
from tests.shard_folder import SHARD_SIZE

BASE = {"batch_size": 4, "fields": ("position_id",)}
MODES = ("exact", "stream")
STREAMS = {"streams": (2, 2), "window": 16}


def ids_of(loader):
    return np.concatenate([batch["position_id"] for batch in loader]).tolist()


def stored(shards, start, stop):
    """Return the ids of shards start to stop (exclusive) in stored order."""
    return shards.splits["train"]["position_id"][start * SHARD_SIZE : stop * SHARD_SIZE].tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("given", "start", "stop"), [("1-2", 1, 3), ((2, 4), 2, 4), (" 3 ", 3, 4)])
def test_only_these_shards_are_read(shards, mode, given, start, stop):
    loader = Loader(shards.path, mode=mode, shards=given, **BASE, **STREAMS)
    expected = stored(shards, start, stop)
    assert loader.positions == len(expected)
    first, second = ids_of(loader), ids_of(loader)
    assert sorted(first) == sorted(second) == sorted(expected)
    assert first != second
    in_order = Loader(shards.path, mode=mode, shards=given, shuffle=False, **BASE, **STREAMS)
    assert ids_of(in_order) == expected
    assert [shard.name for shard in loader.manifest.splits["train"]] == [
        f"train-{number:06d}.tar" for number in range(start, stop)
    ]


def test_the_order_is_that_of_the_selected_shards(shards):
    loader = Loader(shards.path, shards="1-2", seed=5, **BASE)
    expected = np.array(stored(shards, 1, 3))
    order = Permutation(len(expected), derive_key(5, "epoch", 0)).slice(0, len(expected))
    assert ids_of(loader) == expected[order].tolist()
    dataset = PositionDataset(shards.path, shards=(1, 3), fields=("position_id",))
    assert dataset.batch(range(len(dataset)))["position_id"].tolist() == expected.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_ranks_and_workers_share_the_selected_shards(shards, mode):
    options = {"mode": mode, "shards": (1, 4), **BASE, **STREAMS}
    loaders = [Loader(shards.path, rank=rank, world_size=2, **options) for rank in range(2)]
    found = [
        batch["position_id"]
        for loader in loaders
        for worker in range(2)
        for batch in loader.batches(worker, workers=2)
    ]
    assert sorted(np.concatenate(found).tolist()) == sorted(stored(shards, 1, 4))
    single = Loader(shards.path, **options | {"batch_size": 8})
    ids_of(single)
    for loader in loaders:
        ids_of(loader)
    assert combine_digests(loader.epoch_digest for loader in loaders) == single.epoch_digest


@pytest.mark.parametrize("mode", MODES)
def test_a_state_resumes_only_with_the_same_shards(shards, mode):
    options = {"mode": mode, **BASE, **STREAMS}
    loader = Loader(shards.path, shards="1-3", **options)
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["shards"] == [1, 4]
    rest = [batch["position_id"].tolist() for batch in batches]
    resumed = Loader(shards.path, shards=(1, 4), **options)
    resumed.load_state_dict(state)
    assert [batch["position_id"].tolist() for batch in resumed] == rest
    for other in ("0-3", "1-2", None):
        with pytest.raises((ConfigError, StoreError), match="other"):
            Loader(shards.path, shards=other, **options).load_state_dict(state)
    whole = Loader(shards.path, **options)
    assert "shards" not in whole.state_dict()
    with pytest.raises(ConfigError):
        resumed.load_state_dict(whole.state_dict())


def test_selected_shards_can_be_filtered(shards):
    loader = Loader(shards.path, shards="1-2", where="value = 1", **BASE)
    values = shards.splits["train"]["value"][SHARD_SIZE : 3 * SHARD_SIZE]
    expected = np.array(stored(shards, 1, 3))[values == 1]
    assert sorted(ids_of(loader)) == sorted(expected.tolist())


@pytest.mark.parametrize(
    "given",
    ["", "all", "3-1", "-1", "1-", "a-b", (2, 2), (3, 1), (-1, 2), (1,), (0, 1, 2), (0.5, 2), 3, True],
)
def test_other_values_are_refused(shards, given):
    with pytest.raises(ConfigError, match="shards cannot be used"):
        Loader(shards.path, shards=given, **BASE)


def test_shards_beyond_the_last_one_are_refused(shards):
    last = len(shards.shards["train"]) - 1
    Loader(shards.path, shards=f"0-{last}", **BASE)
    with pytest.raises(ConfigError, match=f"shards from 0 to {last}"):
        Loader(shards.path, shards=f"0-{last + 1}", **BASE)
    with pytest.raises(ConfigError, match="games mode reads no shards"):
        LoaderOptions(mode="games", shards="0-1")


def test_other_shards_need_not_exist(shards):
    (shards.path / "train-000000.tar").unlink()
    assert sorted(ids_of(Loader(shards.path, shards="1-2", **BASE))) == sorted(stored(shards, 1, 3))


def test_a_trial_run_reads_only_these_shards(shards):
    result = run_loader_trial(shards.path, LoadOptions(shards="1-2", batch_size=8))
    assert (result.positions, result.epochs[0].positions) == (2 * SHARD_SIZE, 2 * SHARD_SIZE)
