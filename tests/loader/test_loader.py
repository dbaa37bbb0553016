"""The loader's promise: every position exactly once an epoch, in an order of (seed, epoch) alone."""

from __future__ import annotations

import itertools
import json
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.errors import ConfigError, FormatError, HexdataError, StoreError
from hexdata.formats.shards import ShardManifest
from hexdata.loader import Loader
from hexdata.loader.options import FIELDS
from hexdata.order import Permutation, derive_key

if TYPE_CHECKING:
    from .conftest import MakeShards, ShardFolder

IDS = ("position_id",)


def ids_of(loader: Loader) -> list[list[int]]:
    """Run the rest of the epoch: the position ids, batch by batch."""
    return [batch["position_id"].tolist() for batch in loader]


def steps_of(folder: ShardFolder, world_size: int, **options: Any) -> list[list[int]]:
    """Run an epoch on every rank: the position ids of each step, rank after rank."""
    ranks = [
        ids_of(Loader(folder.path, rank=r, world_size=world_size, fields=IDS, **options))
        for r in range(world_size)
    ]
    return [list(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain(*batches))


# --- order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 5, 16, 200])
@pytest.mark.parametrize("window_shards", [1, 4, 100])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_position_exactly_once(
    shards: ShardFolder, world_size: int, batch_size: int, window_shards: int, shuffle: bool
) -> None:
    options = {"batch_size": batch_size, "window_shards": window_shards, "shuffle": shuffle}
    steps = steps_of(shards, world_size, **options)
    assert sorted(flat(steps)) == list(range(134))
    assert {len(step) for step in steps[:-1]} <= {batch_size * world_size}
    assert len(steps) == len(Loader(shards.path, world_size=world_size, **options))


@pytest.mark.parametrize("remainder", ["short", "drop"])
def test_ranks_change_nothing_but_who_gets_what(shards: ShardFolder, remainder: str) -> None:
    alone = steps_of(shards, 1, batch_size=12, remainder=remainder)
    for world_size in (2, 3, 4, 6, 12):
        assert steps_of(shards, world_size, batch_size=12 // world_size, remainder=remainder) == alone


def test_the_order_follows_from_seed_epoch_and_window(shards: ShardFolder) -> None:
    loader = Loader(shards.path, batch_size=16, seed=3, fields=IDS)
    first, second = flat(ids_of(loader)), flat(ids_of(loader))
    assert loader.epoch == 2
    other_seed = flat(ids_of(Loader(shards.path, batch_size=16, seed=4, fields=IDS)))
    other_window = flat(ids_of(Loader(shards.path, batch_size=16, seed=3, window_shards=2, fields=IDS)))
    orders = [first, second, other_seed, other_window, shards.splits["train"]["position_id"].tolist()]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    loader.set_epoch(0)
    assert flat(ids_of(loader)) == first
    assert flat(ids_of(Loader(shards.path, batch_size=5, seed=3, fields=IDS))) == first


def test_the_order_is_pinned(shards: ShardFolder) -> None:
    """A literal order: if it changes, runs cannot be repeated or resumed, and ORDER_VERSION must rise."""
    rows = np.argsort(shards.splits["train"]["position_id"])
    loader = Loader(shards.path, batch_size=8, seed=1, window_shards=2, fields=IDS)
    assert [rows[batch].tolist() for batch in itertools.islice(ids_of(loader), 3)] == [
        [35, 26, 39, 22, 24, 47, 34, 40],
        [33, 28, 16, 36, 30, 19, 21, 20],
        [18, 38, 43, 31, 17, 37, 27, 44],
    ]


def test_the_order_is_the_documented_one(shards: ShardFolder) -> None:
    stored = shards.splits["train"]["position_id"]
    per_shard = [stored[i : i + 16] for i in range(0, 134, 16)]
    order = Permutation(9, derive_key(5, "epoch", 2, "train", "shards"))
    expected = []
    for window, first in enumerate(range(0, 9, 4)):
        ids = np.concatenate([per_shard[order[place]] for place in range(first, min(first + 4, 9))])
        within = Permutation(len(ids), derive_key(5, "epoch", 2, "train", "window", window))
        expected += [int(ids[within[place]]) for place in range(len(ids))]
    loader = Loader(shards.path, batch_size=10, seed=5, window_shards=4, fields=IDS)
    loader.set_epoch(2)
    assert flat(ids_of(loader)) == expected


def test_positions_of_one_window_mix_and_no_others(shards: ShardFolder) -> None:
    rows = np.argsort(shards.splits["train"]["position_id"])
    order = rows[flat(ids_of(Loader(shards.path, batch_size=7, window_shards=2, fields=IDS)))]
    shard_of_place = order // 16
    start = 0
    while start < len(order):
        seen = set(shard_of_place[start : start + 17].tolist())  # more than a shard: both are met
        size = int(np.isin(shard_of_place, list(seen)).sum())
        assert set(shard_of_place[start : start + size].tolist()) == seen
        assert len(seen) <= 2
        start += size


def test_validation_comes_in_stored_order_by_default(shards: ShardFolder) -> None:
    stored = shards.splits["val"]["position_id"].tolist()
    loader = Loader(shards.path, split="val", batch_size=6, fields=IDS)
    assert flat(ids_of(loader)) == flat(ids_of(loader)) == stored
    assert flat(ids_of(Loader(shards.path, split="val", shuffle=True, fields=IDS))) != stored


def test_the_last_batch_is_shared_out_or_dropped(shards: ShardFolder) -> None:
    sizes = [
        [len(b) for b in ids_of(Loader(shards.path, batch_size=33, rank=r, world_size=4, fields=IDS))]
        for r in range(4)
    ]
    assert sizes == [[33, 1], [33, 1], [33, 0], [33, 0]]  # 134 = 4 * 33 + 2
    dropped = steps_of(shards, 4, batch_size=33, remainder="drop")
    assert [len(step) for step in dropped] == [132]
    empty = list(Loader(shards.path, batch_size=33, rank=3, world_size=4))[-1]
    assert [(array.dtype, array.shape) for array in empty.values()] == [
        (np.float32, (0, 2, 5, 5)),
        (np.float32, (0, 25)),
        (np.float32, (0,)),
    ]


def test_a_split_without_positions_has_no_batches(make_shards: MakeShards) -> None:
    loader = Loader(make_shards(train=0).path)
    assert (len(loader), list(loader), loader.epoch) == (0, [], 1)


# --- content ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("batch_size", [5, 50, 500])
def test_batches_hold_what_was_stored(make_shards: MakeShards, dense: bool, batch_size: int) -> None:
    folder = make_shards(train=70, dense=dense)
    source = folder.splits["train"]
    rows = np.argsort(source["position_id"])
    loader = Loader(folder.path, batch_size=batch_size, window_shards=2, fields=FIELDS)
    for batch in loader:
        chosen = rows[batch["position_id"]]
        bits = np.unpackbits(source["board"][chosen], axis=1, count=50)
        np.testing.assert_array_equal(batch.pop("board"), bits.reshape(-1, 2, 5, 5).astype("f4"), strict=True)
        assert batch.keys() == set(FIELDS) - {"board"}
        for name, array in batch.items():
            np.testing.assert_array_equal(array, source[name][chosen], strict=True, err_msg=name)


def test_a_store_and_its_folder_of_shards_are_the_same(shards: ShardFolder) -> None:
    assert ids_of(Loader(shards.path.parent, fields=IDS)) == ids_of(Loader(shards.path, fields=IDS))


def test_batches_are_the_callers_to_change(shards: ShardFolder) -> None:
    loader = Loader(shards.path, split="val", batch_size=20, fields=FIELDS)
    for array in next(iter(loader)).values():
        assert array.flags.writeable
        array[...] = 0
    loader.set_epoch(0)
    assert next(iter(loader))["board"].any()


# --- resuming -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("remainder", ["short", "drop"])
def test_resuming_after_each_batch_gives_the_rest(
    shards: ShardFolder, world_size: int, remainder: str
) -> None:
    options: dict[str, Any] = {"window_shards": 3, "remainder": remainder, "fields": IDS}
    alone = Loader(shards.path, batch_size=12, **options)
    expected = [ids_of(alone), ids_of(alone)]
    for stop in range(len(expected[1]) + 1):
        loader = Loader(shards.path, batch_size=12, **options)
        loader.set_epoch(1)
        assert [b["position_id"].tolist() for b in itertools.islice(loader, stop)] == expected[1][:stop]
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["epoch"], state["batch"]) == (1, stop)
        rest = []
        for rank in range(world_size):
            other = Loader(
                shards.path, batch_size=12 // world_size, rank=rank, world_size=world_size, **options
            )
            other.load_state_dict(state)
            rest.append(ids_of(other))
            assert other.epoch == 2
        assert [flat(list(step)) for step in zip(*rest, strict=True)] == expected[1][stop:]


def test_a_loop_that_was_left_goes_on(shards: ShardFolder) -> None:
    whole = ids_of(Loader(shards.path, batch_size=20, fields=IDS))
    loader = Loader(shards.path, batch_size=20, fields=IDS)
    assert [next(iter(loader))["position_id"].tolist() for _ in range(3)] == whole[:3]
    assert ids_of(loader) == whole[3:]
    assert loader.epoch == 1


def test_resuming_reads_no_window_before_the_stop(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    options: dict[str, Any] = {"batch_size": 16, "window_shards": 1, "shuffle": False, "fields": IDS}
    loader = Loader(folder.path, **options)
    state = loader.state_dict() | {"batch": 2}
    resumed = Loader(folder.path, **options)
    for number in (0, 1):
        (folder.path / f"train-{number:06d}.tar").unlink()
    resumed.load_state_dict(state)
    assert flat(ids_of(resumed)) == folder.splits["train"]["position_id"][32:].tolist()


def test_changing_the_epoch_under_an_iteration_is_an_error(shards: ShardFolder) -> None:
    loader = Loader(shards.path, batch_size=20)
    batches = iter(loader)
    next(batches)
    loader.set_epoch(5)
    with pytest.raises(ConfigError, match="changed while iterating"):
        next(batches)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, r"another seed; found {'seed': 0}; expected {'seed': 1}"),
        ({"batch_size": 8}, "another global_batch"),
        ({"window_shards": 3, "shuffle": False}, "another shuffle, window_shards"),
        ({"remainder": "drop"}, "another remainder"),
        ({"split": "val", "shuffle": True}, "another split"),
    ],
)
def test_a_state_of_other_options_is_refused(
    shards: ShardFolder, options: dict[str, Any], message: str
) -> None:
    state = Loader(shards.path, batch_size=16).state_dict()
    with pytest.raises(ConfigError, match=message):
        Loader(shards.path, **{"batch_size": 16, **options}).load_state_dict(state)


def test_a_state_of_other_shards_or_versions_is_refused(shards: ShardFolder, make_shards: MakeShards) -> None:
    loader = Loader(shards.path)
    state = loader.state_dict()
    with pytest.raises(StoreError, match="other shards"):
        Loader(make_shards(train=134, val=20, seed=8).path).load_state_dict(state)
    for name in ("version", "order_version"):
        with pytest.raises(StoreError, match=f"another {name}; found 99; expected 1"):
            loader.load_state_dict({**state, name: 99})
    for broken in ({}, {**state, "batch": 10_000}, {**state, "epoch": -1}, {**state, "batch": "2"}):
        with pytest.raises(ConfigError, match="state"):
            loader.load_state_dict(broken)
    assert loader.state_dict() == state


# --- shards that are not what they should be ----------------------------------------------------------


def test_a_missing_or_cut_shard_is_named_before_the_epoch(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    path = folder.path / "train-000002.tar"
    data = path.read_bytes()
    path.write_bytes(data[:-512])
    with pytest.raises(StoreError, match=r"train-000002\.tar: a shard is cut or altered; found 19968 bytes"):
        Loader(folder.path)
    path.unlink()
    with pytest.raises(StoreError, match=r"train-000002\.tar: a shard is missing"):
        Loader(folder.path)


def cut_at_a_member(data: bytes) -> bytes:
    cut = data.index(b"000003.board.npy")
    return data[:cut] + bytes(len(data) - cut)


def lose_a_member(data: bytes) -> bytes:
    """Rename a member under a valid header."""
    place = data.index(b"000003.move.npy")
    info = tarfile.TarInfo.frombuf(data[place : place + 512], "ascii", "strict")
    info.name = "000003.moved.npy"
    return data[:place] + info.tobuf(tarfile.USTAR_FORMAT) + data[place + 512 :]


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (cut_at_a_member, "end of the shard: .*found 1 blocks; expected 2"),
        (lose_a_member, r"000003\.move\.npy: .*no such member"),
        (lambda data: data.replace(b"000003.board", b"000003.boart"), "found 1 blocks; expected 2"),
        (lambda data: data.replace(b"000003.", b"000002."), "found 1 blocks; expected 2"),
        (lambda data: data.replace(b"\x93NUMPY", b"\x93NUMPI"), "magic"),
        (lambda data: data.replace(b"'<u2'", b"'<i2'"), "found <i2 of shape"),
        (lambda data: data.replace(b"(8,)", b"(4,)"), r"64 bytes of numbers; expected 32 for \(4,\)"),
        (lambda data: b"\x1f\x8b" + data[2:], "tar structure"),
        (lambda data: bytes(len(data)), "found 0 blocks"),
    ],
)
def test_an_altered_shard_of_the_right_size_is_named(
    make_shards: MakeShards, alter: Any, message: str
) -> None:
    folder = make_shards(train=64)
    path = folder.path / "train-000001.tar"
    data = path.read_bytes()
    altered = alter(data)
    assert len(altered) == len(data)
    assert altered != data
    path.write_bytes(altered)
    loader = Loader(folder.path, batch_size=16, window_shards=1, shuffle=False, fields=FIELDS)
    batches = iter(loader)
    next(batches)
    with pytest.raises(FormatError, match=message) as caught:
        next(batches)
    assert caught.value.path == str(path)
    assert loader.state_dict()["batch"] == 1  # the batch that failed was not delivered


def test_one_shard_in_place_of_another_is_found(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    (folder.path / "train-000001.tar").write_bytes((folder.path / "train-000002.tar").read_bytes())
    with pytest.raises(FormatError, match=r"train-000001\.tar: block 0.*found key 000004; expected 000002"):
        list(Loader(folder.path))


def test_webdataset_alone_would_end_silently_short(make_shards: MakeShards) -> None:
    """The reason for counting blocks: if this fails, webdataset has learnt it, and we may forget it."""
    tariterators = pytest.importorskip("webdataset.tariterators")
    folder = make_shards(train=16)
    path = folder.path / "train-000000.tar"
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"000001.board.npy")])
    with path.open("rb") as stream:
        files = tariterators.tar_file_expander([{"url": "x", "stream": stream}])
        assert len(list(tariterators.group_by_keys(files))) == 1


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size cannot be used; found 0; expected at least 1"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"window_shards": 0}, "window_shards"),
        ({"world_size": 2, "rank": 2}, "rank outside the world; found 2"),
        ({"rank": -1}, "rank"),
        ({"seed": "7"}, "seed"),
        ({"remainder": "pad"}, "remainder"),
        ({"fields": ("board", "policies")}, "policies"),
        ({"fields": ()}, "fields"),
        ({"split": "training"}, "no such split in the shards; found training; expected train, val"),
    ],
)
def test_options_without_meaning_are_refused(
    shards: ShardFolder, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(shards.path, **options)


def test_other_folders_and_layouts_are_refused(make_shards: MakeShards) -> None:
    folder = make_shards(train=20)
    manifest = ShardManifest.load(folder.path)
    facts = {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}
    facts |= {"layout": "samples", "splits": {}}
    (folder.path / "manifest.json").write_bytes(ShardManifest(**facts).dumps())
    with pytest.raises(ConfigError, match="layout samples"):
        Loader(folder.path)
    with pytest.raises(HexdataError, match="no shard manifest"):
        Loader(folder.path / "elsewhere")
    with pytest.raises(ConfigError, match="epochs count from 0"):
        Loader(make_shards("other", train=20).path).set_epoch(-1)
