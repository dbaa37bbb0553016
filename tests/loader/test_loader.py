"""Tests of ``Loader``: every position once per epoch, for any ranks and workers, resumable anywhere."""

from __future__ import annotations

import itertools
import json
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.batch import FIELDS
from hexdata.errors import ConfigError
from hexdata.loader import Loader, combine_digests
from hexdata.order import shuffle_indices
from tests.pairs import FULL

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder

Steps = list[list[int]]

IDS = ("position_id",)
SMALL_WINDOWS: dict[str, Any] = {"mode": "stream", "streams": (12, 6), "window": 8}
"""Stream mode for the numbers of ranks and workers in these tests."""
WORLDS = {
    "exact": list(itertools.product((1, 2, 3, 4), (1, 2, 3))),
    "stream": [(1, 1), (2, 2), (3, 3), (4, 1)],
}
"""Numbers of ranks and workers. ``test_stream`` has more for stream mode, which is slower."""
MODES: list[dict[str, Any]] = [{"mode": "exact"}, {"mode": "exact", "shuffle": False}, SMALL_WINDOWS]


def ids_of(loader: Loader) -> Steps:
    """Run the rest of the epoch and return the position ids of each batch."""
    return [batch["position_id"].tolist() for batch in loader]


def flat(steps: Steps) -> list[int]:
    return list(itertools.chain(*steps))


def run_rank(loader: Loader, workers: int) -> Steps:
    """Run the rest of a rank's epoch with workers that take turns, as in PyTorch."""
    first = loader.state_dict()["batch"]
    of_worker = [loader.batches(worker, workers) for worker in range(workers)]
    steps = []
    for step in range(first, len(loader)):
        batch = next(of_worker[step % workers])
        ids = batch["position_id"]
        steps.append(ids[~batch["padding"]].tolist() if "padding" in batch else ids.tolist())
    assert [list(rest) for rest in of_worker] == [[]] * workers
    return steps


def run_world(
    folder: ShardFolder, world_size: int, workers: int = 1, state: Any = None, epoch: int = 0, **options: Any
) -> Steps:
    """Run the rest of an epoch on every rank, and return the sorted ids of each step."""
    ranks = []
    for rank in range(world_size):
        loader = Loader(folder.path, rank=rank, world_size=world_size, fields=IDS, **options)
        loader.set_epoch(epoch)
        if state is not None:
            loader.load_state_dict(state)
        ranks.append(run_rank(loader, workers))
    return [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


# --- every position once ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize(
    ("remainder", "global_batch"),
    [(remainder, size) for remainder in ("short", "pad", "drop") for size in (12, 60)]
    + [("short", 144), ("pad", 144)],
)
def test_ranks_and_workers_deliver_the_same_steps(
    shards: ShardFolder, options: dict[str, Any], remainder: Any, global_batch: int
) -> None:
    """Every position once, and the same positions at each step, for 1 to 4 ranks with 1 to 3 workers.

    The plain run tries half of the worlds of exact mode with each case: the others without the shuffle.
    """
    alone = run_world(shards, 1, batch_size=global_batch, remainder=remainder, **options)
    full, rest = divmod(134, global_batch)
    assert [len(step) for step in alone] == [global_batch] * full + [rest] * (remainder != "drop")
    ids = flat(alone)
    assert len(set(ids)) == len(ids)
    assert remainder == "drop" or sorted(ids) == list(range(134))
    is_half = options["mode"] == "exact" and not FULL
    half = (global_batch // 12 + len(remainder) + options.get("shuffle", True)) % 2
    for world_size, workers in WORLDS[options["mode"]][half::2] if is_half else WORLDS[options["mode"]]:
        batch_size = global_batch // world_size
        found = run_world(shards, world_size, workers, batch_size=batch_size, remainder=remainder, **options)
        assert found == alone


@pytest.mark.parametrize("batch_size", [1, 5, 16, 200])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_any_batch_size_delivers_every_position_once(
    shards: ShardFolder, batch_size: int, world_size: int
) -> None:
    steps = run_world(shards, world_size, 2, batch_size=batch_size)
    assert sorted(flat(steps)) == list(range(134))
    assert {len(step) for step in steps[:-1]} <= {batch_size * world_size}


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("remainder", ["short", "pad", "drop"])
def test_resuming_after_each_batch_delivers_the_rest(
    shards: ShardFolder, options: dict[str, Any], remainder: Any
) -> None:
    """With the same and with other numbers of ranks and workers.

    The plain run resumes each batch in each world with one of the three remainders.
    """
    shift = ("short", "pad", "drop").index(remainder)
    options = {**options, "remainder": remainder}
    expected = run_world(shards, 1, epoch=1, batch_size=24, **options)
    for stop in range(len(expected)):
        loader = Loader(shards.path, batch_size=24, fields=IDS, **options)
        loader.set_epoch(1)
        for _ in itertools.islice(loader, stop):
            pass
        state = json.loads(json.dumps(loader.state_dict()))
        assert (state["epoch"], state["batch"]) == (1, stop)
        for number, (world_size, workers) in enumerate(WORLDS[options["mode"]][::2]):
            if (number + stop + shift) % 3 and not FULL:
                continue
            batch_size = 24 // world_size
            rest = run_world(shards, world_size, workers, state, batch_size=batch_size, **options)
            assert rest == expected[stop:]


# --- order --------------------------------------------------------------------------------------------


def test_the_order_equals_shuffle_indices(shards: ShardFolder) -> None:
    ids = shards.splits["train"]["position_id"].tolist()
    loader = Loader(shards.path, batch_size=10, seed=5, fields=IDS)
    for epoch in range(3):
        assert loader.epoch == epoch
        assert flat(ids_of(loader)) == shuffle_indices(ids, 5, epoch)


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_every_epoch_and_seed_has_another_order(shards: ShardFolder, mode: Any) -> None:
    loader = Loader(shards.path, batch_size=16, seed=3, mode=mode, fields=IDS)
    first, second = flat(ids_of(loader)), flat(ids_of(loader))
    other_seed = flat(ids_of(Loader(shards.path, batch_size=16, seed=4, mode=mode, fields=IDS)))
    orders = [first, second, other_seed, shards.splits["train"]["position_id"].tolist()]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    loader.set_epoch(0)
    assert flat(ids_of(loader)) == first


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_validation_has_stored_order_by_default(shards: ShardFolder, mode: Any) -> None:
    stored = shards.splits["val"]["position_id"].tolist()
    loader = Loader(shards.path, split="val", batch_size=6, mode=mode, fields=IDS)
    assert flat(ids_of(loader)) == flat(ids_of(loader)) == stored
    shuffled = Loader(shards.path, split="val", batch_size=8, shuffle=True, mode=mode, fields=IDS)
    assert flat(ids_of(shuffled)) != stored


def test_the_last_batch_is_divided_padded_or_dropped(shards: ShardFolder) -> None:
    def sizes(remainder: Any) -> list[list[int]]:
        ranks = range(4)
        options: dict[str, Any] = {"batch_size": 33, "world_size": 4, "remainder": remainder, "fields": IDS}
        return [[len(ids) for ids in ids_of(Loader(shards.path, rank=rank, **options))] for rank in ranks]

    assert sizes("short") == [[33, 1], [33, 1], [33, 0], [33, 0]]  # 134 = 4 * 33 + 2
    assert sizes("pad") == [[33, 33]] * 4
    assert sizes("drop") == [[33]] * 4
    empty = list(Loader(shards.path, batch_size=33, rank=3, world_size=4))[-1]
    assert [(array.dtype, array.shape) for array in empty.values()] == [
        (np.float32, (0, 2, 5, 5)),
        (np.float32, (0, 25)),
        (np.float32, (0,)),
    ]


@pytest.mark.parametrize("options", MODES)
def test_padding_is_flagged_in_every_batch(shards: ShardFolder, options: dict[str, Any]) -> None:
    loader = Loader(shards.path, batch_size=36, remainder="pad", fields=IDS, **options)
    batches = list(loader)
    assert [int(batch["padding"].sum()) for batch in batches] == [0, 0, 0, 10]
    assert {batch["padding"].shape for batch in batches} == {(36,)}
    assert "padding" not in next(iter(Loader(shards.path, batch_size=36, fields=IDS, **options)))


@pytest.mark.parametrize("options", MODES)
def test_an_epoch_without_batches_is_refused(shards: ShardFolder, options: dict[str, Any]) -> None:
    options = {**options, "remainder": "drop"}
    message = "drop' leaves no batch; found 134 positions; expected at least 144, a full batch"
    with pytest.raises(ConfigError, match=message):
        Loader(shards.path, batch_size=144, **options)
    alone = Loader(shards.path, batch_size=72, **options)
    assert len(alone) == 1
    with pytest.raises(ConfigError, match=message):
        alone.for_rank(0, 2)


def test_a_split_without_positions_has_no_batches(make_shards: MakeShards) -> None:
    loader = Loader(make_shards(train=0).path)
    assert (len(loader), list(loader), loader.epoch) == (0, [], 1)


# --- content ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exact", "stream"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("batch_size", [4, 52, 500])
def test_batches_contain_the_stored_values(
    make_shards: MakeShards, mode: Any, dense: bool, batch_size: int
) -> None:
    folder = make_shards(train=70, dense=dense)
    source = folder.splits["train"]
    rows = np.argsort(source["position_id"])
    fields = [name for name in FIELDS if name not in ("policy_mask", "value_weight")]
    for batch in Loader(folder.path, batch_size=batch_size, mode=mode, fields=fields):
        chosen = rows[batch["position_id"]]
        bits = np.unpackbits(source["board"][chosen], axis=1, count=50)
        np.testing.assert_array_equal(batch.pop("board"), bits.reshape(-1, 2, 5, 5).astype("f4"), strict=True)
        assert batch.keys() == set(fields) - {"board"}
        for name, array in batch.items():
            np.testing.assert_array_equal(array, source[name][chosen], strict=True, err_msg=name)


def test_batch_options_are_applied(shards: ShardFolder) -> None:
    batch = next(iter(Loader(shards.path, planes=3, board="float16", tier_probability=(1, 1, 0, 0))))
    assert (batch["board"].shape[1:], batch["board"].dtype) == ((3, 5, 5), np.float16)
    assert set(np.unique(batch["value_weight"])) == {0, 1}


def test_a_store_and_its_shards_are_equivalent(shards: ShardFolder) -> None:
    assert ids_of(Loader(shards.path.parent, fields=IDS)) == ids_of(Loader(shards.path, fields=IDS))
    assert ids_of(Loader(str(shards.path), fields=IDS)) == ids_of(Loader(shards.path, fields=IDS))


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_batches_may_be_modified(shards: ShardFolder, mode: Any) -> None:
    loader = Loader(shards.path, split="val", batch_size=8, mode=mode, fields=FIELDS)
    expected = list(loader)
    loader.set_epoch(0)
    for batch, untouched in zip(loader, expected, strict=True):
        for name, array in batch.items():
            np.testing.assert_array_equal(array, untouched[name])
            assert array.flags.writeable
            array[...] = 0


def test_take_ignores_the_rank(shards: ShardFolder) -> None:
    ids = shards.splits["train"]["position_id"].tolist()
    loader = Loader(shards.path, batch_size=7, rank=1, world_size=2, remainder="pad", fields=IDS)
    before = loader.state_dict()
    for ranges, epoch in (
        ([(0, 134)], 0),
        ([(3, 20), (20, 20), (60, 70), (0, 4)], 0),
        ([(20, 90), (90, 134)], 1),
        ([], 2),
    ):
        batches = list(loader.take(ranges, epoch))
        order = shuffle_indices(ids, 0, epoch)
        assert [batch["position_id"].tolist() for batch in batches] == [order[a:b] for a, b in ranges]
        assert all(batch.keys() == {"position_id"} for batch in batches)
    assert loader.state_dict() == before
    for start, stop in ((-1, 3), (4, 3), (0, 135)):
        with pytest.raises(ConfigError, match="a range is outside the epoch"):
            loader.take([(0, 1), (start, stop)], 0)
    with pytest.raises(ConfigError, match="stream mode cannot deliver ranges"):
        Loader(shards.path, mode="stream").take([(0, 1)], 0)
    with pytest.raises(ConfigError, match="stream mode cannot deliver ranges"):
        Loader(shards.path, mode="stream").chunk_sizes()


@pytest.mark.parametrize("options", MODES)
def test_a_pickled_loader_continues_at_its_position(shards: ShardFolder, options: dict[str, Any]) -> None:
    loader = Loader(shards.path, batch_size=12, fields=IDS, **options)
    whole = ids_of(loader)
    loader.set_epoch(0)
    assert next(iter(loader))["position_id"].tolist() == whole[0]
    copy = pickle.loads(pickle.dumps(loader))
    assert ids_of(copy) == whole[1:]
    assert loader.state_dict()["batch"] == 1
    assert ids_of(loader) == whole[1:]
    assert copy.epoch_digest == loader.epoch_digest


# --- position -----------------------------------------------------------------------------------------


def test_the_next_loop_continues(shards: ShardFolder) -> None:
    whole = ids_of(Loader(shards.path, batch_size=20, fields=IDS))
    loader = Loader(shards.path, batch_size=20, fields=IDS)
    assert [next(iter(loader))["position_id"].tolist() for _ in range(3)] == whole[:3]
    assert ids_of(loader) == whole[3:]
    assert loader.epoch == 1


def test_changing_the_position_during_an_iteration_is_an_error(shards: ShardFolder) -> None:
    loader = Loader(shards.path, batch_size=20)
    start = loader.state_dict()
    for change in (
        lambda: loader.set_epoch(5),
        lambda: loader.load_state_dict(start),
        lambda: next(iter(loader)),
    ):
        loader.set_epoch(0)
        batches = iter(loader)
        next(batches)
        change()
        with pytest.raises(ConfigError, match="position of the loader was changed while iterating"):
            next(batches)
    with pytest.raises(ConfigError, match="epoch cannot be used; found -1"):
        loader.set_epoch(-1)


@pytest.mark.parametrize("options", MODES)
def test_for_rank_equals_a_loader_made_for_the_rank(shards: ShardFolder, options: dict[str, Any]) -> None:
    first = Loader(shards.path, batch_size=12, fields=IDS, **options)
    for rank in range(3):
        made = Loader(shards.path, batch_size=12, rank=rank, world_size=3, fields=IDS, **options)
        other = first.for_rank(rank, 3)
        assert other.options == made.options
        assert ids_of(other) == ids_of(made)
        assert other.epoch_digest == made.epoch_digest
    next(iter(first))
    assert (first.epoch, first.batch) == (0, 1)
    assert ids_of(first.for_rank(0, 1)) == ids_of(first)
    next(iter(first))
    with pytest.raises(ConfigError, match=r"world size .* cannot change within an epoch; found world size 2"):
        first.for_rank(0, 2)


def test_an_epoch_can_start_at_any_batch(shards: ShardFolder) -> None:
    loader = Loader(shards.path, batch_size=20, fields=IDS)
    loader.set_epoch(3)
    whole = ids_of(loader)
    for batch in range(len(whole)):
        loader.set_epoch(3, batch)
        assert ids_of(loader) == whole[batch:]
        assert (loader.epoch_digest is None) == (batch > 0)
    epoch_4 = ids_of(loader)
    loader.set_epoch(3, len(whole))
    assert ids_of(loader) == epoch_4
    with pytest.raises(ConfigError, match=f"batch is beyond the end of the epoch; found {len(whole) + 1}"):
        loader.set_epoch(3, len(whole) + 1)
    for epoch, batch, name in ((3, -1, "batch"), (3, 2.0, "batch"), (3, True, "batch"), (-1, 0, "epoch")):
        with pytest.raises(ConfigError, match=f"{name} cannot be used"):
            loader.set_epoch(epoch, batch)  # type: ignore[arg-type]


def test_numpy_integers_and_lists_are_accepted(shards: ShardFolder) -> None:
    """The state is nevertheless valid JSON."""
    options: dict[str, Any] = {
        "batch_size": 12,
        "seed": 3,
        "mode": "stream",
        "streams": (2, 3),
        "fields": ("position_id", "value"),
        "tier_probability": (1.0, 0.5, 0.5, 0.1),
    }
    given = {
        **options,
        "batch_size": np.int64(12),
        "seed": np.uint8(3),
        "streams": [2, np.int32(3)],
        "fields": ["position_id", "value"],
        "tier_probability": [1.0, 0.5, 0.5, 0.1],
    }
    loader, plain = Loader(shards.path, **given), Loader(shards.path, **options)
    loader.set_epoch(np.int64(2), np.int64(1))
    plain.set_epoch(2, 1)
    assert json.dumps(loader.state_dict()) == json.dumps(plain.state_dict())
    assert ids_of(loader) == ids_of(plain)
    for fields in ("value", None, 7):
        with pytest.raises(ConfigError, match="fields cannot be used"):
            Loader(shards.path, fields=fields)  # type: ignore[arg-type]


def test_steps_must_be_recorded_in_order(shards: ShardFolder) -> None:
    alone = Loader(shards.path, batch_size=20, remainder="pad")
    for _ in alone:
        pass
    loader = Loader(shards.path, batch_size=20, remainder="pad")
    of_worker = [loader.deliveries(worker, 2) for worker in range(2)]
    for number in range(len(loader)):
        step, ids, _ = next(of_worker[number % 2])
        loader.record(step, ids)
        assert loader.state_dict()["batch"] == step + 1
        with pytest.raises(ConfigError, match="steps must be recorded in order"):
            loader.record(step, ids)
    loader.end_epoch()
    assert loader.state_dict() == alone.state_dict()
    assert loader.epoch_digest == alone.epoch_digest
    for worker, workers in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match="worker must be below workers"):
            next(loader.deliveries(worker, workers))


def test_resuming_reads_no_earlier_shards(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    options: dict[str, Any] = {"batch_size": 16, "shuffle": False, "fields": IDS}
    state = Loader(folder.path, **options).state_dict() | {"batch": 2}
    resumed = Loader(folder.path, **options)
    for number in (0, 1):
        path = folder.path / f"train-{number:06d}.tar"
        path.write_bytes(bytes(path.stat().st_size))
    resumed.load_state_dict(state)
    assert flat(ids_of(resumed)) == folder.splits["train"]["position_id"][32:].tolist()


# --- the epoch digest ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MODES)
def test_digests_of_ranks_combine_to_that_of_one_process(
    shards: ShardFolder, options: dict[str, Any]
) -> None:
    digests = {}
    for remainder in ("short", "pad"):
        for world_size in (1, 2, 3, 4):
            ranks = []
            for rank in range(world_size):
                loader = Loader(
                    shards.path,
                    batch_size=24 // world_size,
                    rank=rank,
                    world_size=world_size,
                    remainder=remainder,  # type: ignore[arg-type]
                    **options,
                )
                assert loader.epoch_digest is None
                for _ in loader:
                    pass
                ranks.append(str(loader.epoch_digest))
            digests[remainder, world_size] = combine_digests(ranks)
    assert len(set(digests.values())) == 1  # padding does not count


def test_a_resumed_epoch_has_the_digest_of_an_uninterrupted_one(shards: ShardFolder) -> None:
    options: dict[str, Any] = {"batch_size": 10, "world_size": 2, "rank": 1}
    whole = Loader(shards.path, **options)
    digests = []
    for _ in range(2):
        list(whole)
        digests.append(whole.epoch_digest)
    assert digests[0] != digests[1]
    for stop in range(len(whole) + 1):
        left = iter(loader := Loader(shards.path, **options))
        list(itertools.islice(left, stop))
        resumed = Loader(shards.path, **options)
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        if stop == len(whole):
            assert resumed.epoch_digest == digests[0]
        for digest in digests[resumed.epoch :]:
            list(resumed)
            assert resumed.epoch_digest == digest


def test_an_epoch_resumed_on_another_rank_has_no_digest(shards: ShardFolder) -> None:
    left = Loader(shards.path, batch_size=10, world_size=2)
    next(iter(left))
    other = Loader(shards.path, batch_size=20)
    other.load_state_dict(left.state_dict())
    digests = []
    for _ in range(2):
        list(other)
        digests.append(other.epoch_digest)
    assert digests[0] is None
    assert digests[1] is not None
    other.load_state_dict(left.state_dict())
    assert other.state_dict()["epoch_digest"] is None
