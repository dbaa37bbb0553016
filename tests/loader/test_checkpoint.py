"""Tests of ``hexdata.loader.checkpoint``: states of a loader, and the digest of an epoch."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import ConfigError, StoreError
from hexdata.loader import Loader
from hexdata.loader.checkpoint import EpochDigest
from hexdata.order import ORDER_VERSION, derive_key, sort_key

if TYPE_CHECKING:
    from tests.conftest import DemoTrmph
    from tests.loader.conftest import Searched
    from tests.shard_folder import ShardFolder

BASE: dict[str, Any] = {"batch_size": 16, "fields": ("position_id",)}


def test_a_state_is_pinned(shards: ShardFolder) -> None:
    """If the keys of this literal change, the version of states must change too."""
    loader = Loader(shards.path, seed=3, where="value = 1", **BASE)
    loader.set_epoch(2)
    next(iter(loader))
    state = loader.state_dict()
    rows, digest = state.pop("rows"), state.pop("epoch_digest")
    assert (len(rows), len(digest)) == (64, 16)
    assert state == {
        "version": 4,
        "order_version": ORDER_VERSION,
        "digest": loader.manifest.digest,
        "split": "train",
        "seed": 3,
        "shuffle": True,
        "mode": "exact",
        "global_batch": 16,
        "remainder": "auto",
        "where": "value = 1",
        "newest": None,
        "final_policy_skip": False,
        "streams": None,
        "window": None,
        "rank": 0,
        "world_size": 1,
        "epoch": 2,
        "batch": 1,
    }


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_and_its_original_deliver_and_count_alone(
    shards: ShardFolder, make: Callable[[Loader], Loader]
) -> None:
    whole, loader = Loader(shards.path, **BASE), Loader(shards.path, **BASE)
    batches = iter(loader)
    next(batches)
    other = make(loader)
    for _ in (*batches, *other, *whole):
        pass
    assert loader.epoch_digest == other.epoch_digest == whole.epoch_digest


def test_an_invalid_state_is_refused(shards: ShardFolder) -> None:
    loader = Loader(shards.path, **BASE)
    state = loader.state_dict()
    for name in ("version", "order_version"):
        with pytest.raises(StoreError, match=f"another {name}; found 99; expected {state[name]}"):
            loader.load_state_dict({**state, name: 99})
    older = {"version": 2, "order_version": state["order_version"], "epoch": 1}
    with pytest.raises(StoreError, match="another version; found 2"):
        loader.load_state_dict(older)
    broken: list[Any] = [{}, None, {**state, "more": 1}]
    broken += [{**state, "batch": batch} for batch in (10_000, -1, "2", True, 1.0)]
    broken += [{**state, "epoch": epoch} for epoch in (-1, None)]
    broken += [{**state, "batch": 1, "epoch_digest": digest} for digest in ("x", 7)]
    for each in broken:
        with pytest.raises(ConfigError, match="state"):
            loader.load_state_dict(each)
    assert loader.state_dict() == state


def test_the_digest_is_the_documented_sum() -> None:
    """If the literal changes, runs of different releases cannot be compared."""
    shards, steps = "5" * 64, [[3, 1, 4], [15, 9, 2], [6, 5, 35]]
    for epoch in (0, 7):
        key, digest = derive_key(0, "digest", shards, epoch), EpochDigest(shards, epoch)
        for step, ids in enumerate(steps):
            digest.add(step, np.array(ids))
        total = sum(int(sort_key(i + step * 2**36, key)) for step, ids in enumerate(steps) for i in ids)
        assert str(digest) == format(total % 2**64, "016x")
        assert epoch or str(digest) == "058dcb291a268ec6"


def test_a_state_between_epochs_belongs_to_its_store(tmp_path: Path, demo_trmph: DemoTrmph) -> None:
    """It remains valid if games are added, but not for another store, also one that was added to."""

    def add(name: str, seed: int) -> Path:
        demo_trmph(tmp_path / str(seed), games=5, files=1, seed=seed, board_size=5)
        convert_sources([tmp_path / str(seed)], tmp_path / name, ConvertOptions(workers=1, val=0, test=0))
        return tmp_path / name

    def make(store: Path) -> Loader:
        return Loader(store, mode="games", where="position_in_game < 9", **BASE)

    store, other = add("a", 1), add("b", 2)
    between, within = [], []
    for seed in (3, 4):
        loader = make(store)
        between.append(loader.state_dict())
        list(loader)
        between.append(json.loads(json.dumps(loader.state_dict())))
        next(iter(loader))
        within.append(loader.state_dict())
        add("a", seed)
        add("b", seed)
    grown, stranger = make(store), make(other)
    for state in between:
        grown.load_state_dict(state)
        for files in (None, [9, 9], [0, 0], [1], []):
            wrong = {name: value for name, value in state.items() if name != "files"}
            wrong |= {} if files is None else {"files": files}
            with pytest.raises((ConfigError, StoreError), match="the state"):
                grown.load_state_dict(wrong)
        with pytest.raises(StoreError, match="belongs to other games"):
            stranger.load_state_dict(state)
    for state in within:
        with pytest.raises(StoreError, match="belongs to other games"):
            grown.load_state_dict(state)


LARGE = (2**31, 2**61, 2**62, 2**64, 10**400)


@pytest.mark.parametrize("mode", ["games", "exact", "stream"])
def test_every_number_that_is_accepted_is_accepted_in_a_state(searched: Searched, mode: Any) -> None:
    data = searched.store if mode == "games" else searched.shards
    accepted = set()
    names = ("epoch", "seed", "batch_size", "world_size", "newest", "window", "streams")
    for name, number in itertools.product(names, LARGE):
        options = {"mode": mode, **BASE}
        if name != "epoch":
            options[name] = (number, 4) if name == "streams" else number
        try:
            loader = Loader(data, **options)
            if name == "epoch":
                loader.set_epoch(number)
                list(loader)
        except ConfigError:
            continue
        state = json.loads(json.dumps(loader.state_dict()))
        loader.set_epoch(0)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        accepted.add(name)
    assert {"epoch", "seed", "window"} <= accepted
