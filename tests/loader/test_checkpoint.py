"""The state of a loader: small, JSON-able, and good for nothing but what it was taken of."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.errors import ConfigError, StoreError
from hexdata.loader import Loader
from hexdata.order import ORDER_VERSION

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder

BASE: dict[str, Any] = {"batch_size": 16, "fields": ("position_id",)}


def test_a_state_is_pinned(shards: ShardFolder) -> None:
    """A literal state: if its keys change, so must the state's version."""
    loader = Loader(shards.path, seed=3, where="value = 1", **BASE)
    loader.set_epoch(2)
    next(iter(loader))
    state = loader.state_dict()
    rows, digest = state.pop("rows"), state.pop("epoch_digest")
    assert (len(rows), len(digest)) == (64, 16)
    assert state == {
        "version": 3,
        "order_version": ORDER_VERSION,
        "digest": loader.manifest.digest,
        "split": "train",
        "seed": 3,
        "shuffle": True,
        "mode": "exact",
        "global_batch": 16,
        "remainder": "short",
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


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_a_state_is_a_few_hundred_bytes_of_json(shards: ShardFolder, mode: Any) -> None:
    loader = Loader(shards.path, mode=mode, **BASE)
    next(iter(loader))
    text = json.dumps(loader.state_dict())
    assert len(text) < 700
    other = Loader(shards.path, mode=mode, **BASE)
    other.load_state_dict(json.loads(text))
    assert other.state_dict() == loader.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "another seed; found {'seed': 0}; expected {'seed': 1}"),
        ({"batch_size": 8}, "another global_batch"),
        ({"shuffle": False, "seed": 2}, "another seed, shuffle"),
        ({"remainder": "drop"}, "another remainder"),
        ({"split": "val", "shuffle": True}, "another split"),
        ({"mode": "stream"}, r"another mode, streams, window; found {'mode': 'exact', "),
        ({"where": "value = 1"}, "another where"),
        ({"newest": 3}, "another newest"),
        ({"final_policy": "skip"}, "another final_policy_skip"),
    ],
)
def test_a_state_of_other_options_is_refused(
    shards: ShardFolder, options: dict[str, Any], message: str
) -> None:
    state = Loader(shards.path, **BASE).state_dict()
    with pytest.raises(ConfigError, match=message):
        Loader(shards.path, **{**BASE, **options}).load_state_dict(state)


@pytest.mark.parametrize(("name", "value"), [("streams", (2, 4)), ("window", 99)])
def test_a_state_of_other_streams_is_refused(shards: ShardFolder, name: str, value: Any) -> None:
    state = Loader(shards.path, mode="stream", **BASE).state_dict()
    with pytest.raises(ConfigError, match=f"another {name}"):
        Loader(shards.path, mode="stream", **BASE, **{name: value}).load_state_dict(state)


def test_a_state_of_other_shards_is_refused(shards: ShardFolder, make_shards: MakeShards) -> None:
    state = Loader(shards.path, **BASE).state_dict()
    with pytest.raises(StoreError, match="other shards; found digest"):
        Loader(make_shards(train=134, val=20, seed=8).path, **BASE).load_state_dict(state)


def test_a_state_of_other_positions_of_the_shards_is_refused(make_shards: MakeShards) -> None:
    """One shard more is missing than was when the state was taken."""
    folder = make_shards(train=134)
    states = [Loader(folder.path, on_error="skip", **BASE).state_dict()]
    for number in (1, 4):
        (folder.path / f"train-{number:06d}.tar").unlink()
        with pytest.warns(UserWarning, match="skipped a shard: .*the shard is missing"):
            loader = Loader(folder.path, on_error="skip", **BASE)
        for state in states:
            with pytest.raises(StoreError, match="other positions of these shards"):
                loader.load_state_dict(state)
        states.append(loader.state_dict())
        loader.load_state_dict(states[-1])


def test_what_is_no_state_is_refused(shards: ShardFolder) -> None:
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
