"""Tests of ``hexdata.loader.checkpoint``: states of a loader, and the digest of an epoch."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo.games import make_games
from hexdata.errors import ConfigError, StoreError
from hexdata.export import ExportOptions, export_shards
from hexdata.formats.trmph import write_trmph
from hexdata.loader import Loader
from hexdata.loader.checkpoint import STEP_SHIFT, EpochDigest, combine_digests, digest_key
from hexdata.order import ORDER_VERSION, derive_key, sort_key
from hexdata.shuffle import ShuffleOptions, shuffle_store

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder

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
def test_a_state_survives_json(shards: ShardFolder, mode: Any) -> None:
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


def test_the_message_gives_the_epoch_to_start_with(tmp_path: Path) -> None:
    """The state was saved within the loop, at the last batch. Games were added later."""
    store = tmp_path / "store"
    for name in "ab":
        write_trmph(tmp_path / f"{name}.trmph", make_games(9, seed=ord(name), board_size=5), 5)
    convert_sources([tmp_path / "a.trmph"], store, ConvertOptions(workers=1, val=0, test=0))
    loader = Loader(store, batch_size=32)
    states = [loader.state_dict() for _ in loader]
    assert states[-1]["batch"] == len(loader)
    convert_sources([tmp_path / "b.trmph"], store, ConvertOptions(workers=1, val=0, test=0))
    grown = Loader(store, batch_size=32)
    for state in states:
        with pytest.raises(StoreError, match=r"start a new epoch: set_epoch\(1\)"):
            grown.load_state_dict(state)


def test_a_state_of_another_mode_is_refused(tmp_path: Path) -> None:
    write_trmph(tmp_path / "a.trmph", make_games(9, seed=1, board_size=5), 5)
    store = tmp_path / "store"
    convert_sources([tmp_path / "a.trmph"], store, ConvertOptions(workers=1, val=0, test=0))
    shuffle_store(store, ShuffleOptions(threads=1))
    export_shards(store, ExportOptions(workers=1))
    with pytest.raises(ConfigError, match="the state was saved with another mode"):
        Loader(store, mode="games").load_state_dict(Loader(store, mode="exact").state_dict())


def test_a_state_with_other_skipped_shards_is_refused(make_shards: MakeShards) -> None:
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


# --- the epoch digest ---------------------------------------------------------------------------------


SHARDS = "5" * 64
STEPS = [[3, 1, 4], [15, 9, 2], [6, 5, 35]]


def digest_of(steps, shards=SHARDS, epoch=0):
    digest = EpochDigest(shards, epoch)
    for step, ids in enumerate(steps):
        digest.add(step, np.array(ids, np.int64))
    return digest


def test_the_digest_is_the_documented_sum():
    key = derive_key(0, "digest", SHARDS, 7)
    total = sum(int(sort_key(i + step * 2**36, key)) for step, ids in enumerate(STEPS) for i in ids)
    assert digest_of(STEPS, epoch=7).value == total % 2**64
    assert str(digest_of(STEPS, epoch=7)) == format(total % 2**64, "016x")


def test_the_digest_is_pinned():
    """If this literal changes, runs of different releases cannot be compared."""
    assert str(digest_of(STEPS)) == "058dcb291a268ec6"


@given(cut=st.lists(st.integers(0, 3), min_size=9, max_size=9), seed=st.integers(0, 9))
def test_digests_of_ranks_and_workers_add_up(cut, seed):
    """Any rank may deliver a position, in any order within its step."""
    digests = [EpochDigest(SHARDS, 0) for _ in range(4)]
    for number, rank in enumerate(cut):
        digests[rank].add(number // 3, np.array([STEPS[number // 3][number % 3]]))
    random.Random(seed).shuffle(digests)
    assert combine_digests(map(str, digests)) == str(digest_of(STEPS))


@pytest.mark.parametrize(
    "steps",
    [
        [[3, 1, 4], [15, 9, 2], [6, 5]],
        [[3, 1, 4], [15, 9, 2], [6, 5, 35, 35]],
        [[3, 1, 4], [15, 9, 2], [6, 5, 36]],
        [[3, 1, 15], [4, 9, 2], [6, 5, 35]],
        [[15, 9, 2], [3, 1, 4], [6, 5, 35]],
        [[3, 1, 4], [], [15, 9, 2], [6, 5, 35]],
        [],
    ],
)
def test_other_deliveries_change_the_digest(steps):
    assert str(digest_of(steps)) != str(digest_of(STEPS))


def test_other_shards_and_epochs_have_other_digests():
    digests = {str(digest_of(STEPS, shards, epoch)) for shards in (SHARDS, "6" * 64) for epoch in (0, 1)}
    assert len(digests) == 4


def test_a_digest_continues_from_its_value():
    first = digest_of(STEPS[:1])
    rest = EpochDigest(SHARDS, 0, first.value)
    for step in (1, 2):
        rest.add(step, np.array(STEPS[step]))
        assert rest.value == rest.value  # reading the value does not change it
    assert str(rest) == str(digest_of(STEPS))


def test_sums_of_sort_keys_equal_the_positions():
    """A device delivers the sum of each step as a signed number, which wraps."""
    key = digest_key(SHARDS, 0)
    digest = digest_of(STEPS[:1])
    for step in (1, 2):
        keys = sort_key(np.array(STEPS[step]) + (step << STEP_SHIFT), key).view(np.int64)
        digest.add_sum(keys.sum())
        copied = pickle.loads(pickle.dumps(digest))
        assert copied.value == digest.value == digest_of(STEPS[: step + 1]).value


def test_pending_positions_do_not_change_the_sum():
    ids = np.random.default_rng(1).integers(0, 2**36, 200_000)
    whole = EpochDigest(SHARDS, 2)
    value = 0
    for step, part in enumerate(np.split(ids, 100)):
        whole.add(step, part)
        alone = EpochDigest(SHARDS, 2)
        alone.add(step, part)
        value += alone.value
    assert whole.value == value % 2**64


# --- what a state belongs to ----------------------------------------------------------------------------


def convert_games(store: Path, folder: Path, *seeds: int) -> Path:
    for seed in seeds:
        path = folder / f"{seed}.trmph"
        write_trmph(path, make_games(9, seed=seed, board_size=5), 5)
        convert_sources([path], store, ConvertOptions(workers=1, val=0, test=0))
    return store


def test_a_state_between_epochs_belongs_to_its_store(tmp_path: Path) -> None:
    """It remains valid if games are added, but not for another store, also one that was added to."""
    store, other = (convert_games(tmp_path / name, tmp_path, seed) for name, seed in (("a", 1), ("b", 2)))
    states = []
    for seed in (3, 4, 5):
        loader = Loader(store, mode="games", where="position_in_game < 9", **BASE)
        states.append(loader.state_dict())
        list(loader)
        states.append(json.loads(json.dumps(loader.state_dict())))
        convert_games(store, tmp_path, seed)
        convert_games(other, tmp_path, seed)
    for state in states:
        Loader(store, mode="games", where="position_in_game < 9", **BASE).load_state_dict(state)
        for files in (None, [9, 9], [0, 0], [1], []):
            wrong = {name: value for name, value in state.items() if name != "files"}
            wrong |= {} if files is None else {"files": files}
            with pytest.raises((ConfigError, StoreError), match="the state"):
                Loader(store, mode="games", where="position_in_game < 9", **BASE).load_state_dict(wrong)
        with pytest.raises(StoreError, match="the state belongs to other games"):
            Loader(other, mode="games", where="position_in_game < 9", **BASE).load_state_dict(state)


def test_a_state_between_epochs_belongs_to_its_weights(tmp_path: Path) -> None:
    store = convert_games(tmp_path / "store", tmp_path, 1)
    count = Loader(store, **BASE).positions
    state = Loader(store, weights=np.full(count, 0.5), **BASE).state_dict()
    Loader(store, weights=np.full(count, 0.5), **BASE).load_state_dict(state)
    with pytest.raises(StoreError, match="other weights"):
        Loader(store, weights=np.full(count, 0.25), **BASE).load_state_dict(state)
    text = Loader(store, weights="0.5", **BASE).state_dict()
    convert_games(store, tmp_path, 2)
    Loader(store, weights="0.5", **BASE).load_state_dict(text)
    count = Loader(store, **BASE).positions
    with pytest.raises(StoreError, match="other games"):
        Loader(store, weights=np.full(count, 0.5), **BASE).load_state_dict(state)


NUMBERS = (
    0,
    1,
    7,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**400,
    10**5000,
)


@pytest.mark.parametrize("mode", ["games", "exact", "stream"])
@pytest.mark.parametrize("name", ["epoch", "seed", "batch_size", "world_size", "newest", "window", "streams"])
def test_every_number_that_is_accepted_is_accepted_in_a_state(
    trmph_store: Path, tmp_path: Path, mode: Any, name: str
) -> None:
    store = shutil.copytree(trmph_store, tmp_path / "store")
    shuffle_store(store, ShuffleOptions(threads=1))
    export_shards(store, ExportOptions(workers=1))
    accepted = 0
    for number in NUMBERS:
        options = {"mode": mode, **BASE}
        if name != "epoch":
            options[name] = (number, 4) if name == "streams" else number
        try:
            loaders = [Loader(store, **options) for _ in range(2)]
            if name == "epoch":
                loaders[0].set_epoch(number)
                list(loaders[0])
        except ConfigError:
            continue
        loaders[1].load_state_dict(json.loads(json.dumps(loaders[0].state_dict())))
        accepted += 1
    assert accepted or (mode == "stream" and name in ("newest", "world_size"))
