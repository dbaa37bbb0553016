"""Tests of ``hexdata.loader.stream`` for many ranks, workers, batch sizes and starting points."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from hexdata.batch import BatchOptions
from hexdata.errors import ConfigError, FormatError, HexdataError, StoreError
from hexdata.loader import Loader
from hexdata.loader.options import LoaderOptions
from hexdata.loader.stream import StreamEpoch
from hexdata.shards.blocks import Block, block_fields, block_to_policy, fields_of_members, row_fields
from hexdata.shards.locate import make_source
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.sources import WHOLE_FILE, ByteRange, ByteStream, FolderSource, ShardSource
from tests.pairs import every_pair

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder

IDS = ("position_id",)
POSITIONS = 134


def epoch_of(
    folder: ShardFolder,
    epoch: int = 0,
    *,
    source: ShardSource | None = None,
    members: tuple[str, ...] = IDS,
    on_skip: Any = None,
    **chosen: Any,
) -> StreamEpoch:
    options = LoaderOptions(**{"mode": "stream", "window": 24, "streams": (4, 4), "batch_size": 12, **chosen})
    manifest = ShardManifest.load(folder.path)
    return StreamEpoch(source or FolderSource(folder.path), manifest, options, epoch, members, on_skip)


def ids_of(epoch: StreamEpoch, steps: range | None = None) -> list[list[int]]:
    """Return the position ids of each step, without padding."""
    delivered = []
    for block, padding in epoch.blocks(range(epoch.steps) if steps is None else steps):
        ids = block["position_id"]
        delivered.append(ids[~padding].tolist() if padding is not None else ids.tolist())
    return delivered


def flat(steps: list[list[int]]) -> list[int]:
    return list(itertools.chain(*steps))


def run_world(
    folder: ShardFolder, world_size: int, workers: int, batch: int, first: int = 0, **chosen: Any
) -> list[list[int]]:
    """Run all ranks and workers from step ``first`` on, and return the sorted ids of each step."""
    steps: dict[int, list[int]] = {}
    for rank in range(world_size):
        chosen |= {"rank": rank, "world_size": world_size, "batch_size": batch // world_size}
        total = epoch_of(folder, **chosen).steps
        for start in range(first, min(first + workers, total)):
            own = range(start, total, workers)
            for step, ids in zip(own, ids_of(epoch_of(folder, **chosen), own), strict=True):
                steps.setdefault(step, []).extend(ids)
    return [sorted(steps[step]) for step in sorted(steps)]


# --- order --------------------------------------------------------------------------------------------


@every_pair(batch=[4, 12, 36, 400], remainder=["short", "drop", "pad"], shuffle=[True, False])
def test_every_position_once_for_any_ranks_and_workers(
    shards: ShardFolder, batch: int, remainder: str, shuffle: bool
) -> None:
    chosen: dict[str, Any] = {"remainder": remainder, "shuffle": shuffle, "seed": 3}
    alone = run_world(shards, 1, 1, batch, **chosen)
    kept = POSITIONS - (POSITIONS % batch if remainder == "drop" else 0)
    assert len(flat(alone)) == len(set(flat(alone))) == kept
    assert [len(step) for step in alone[:-1]] == [batch] * (len(alone) - 1)
    for world_size, workers in ((1, 4), (2, 2), (4, 1), (4, 4)):
        assert run_world(shards, world_size, workers, batch, **chosen) == alone, (world_size, workers)


@pytest.mark.parametrize("streams", [(1, 1), (1, 6), (3, 2), (6, 1), (12, 2)])
def test_ranks_and_workers_may_be_any_divisors_of_the_streams(
    shards: ShardFolder, streams: tuple[int, int]
) -> None:
    divisors = [[d for d in range(1, count + 1) if count % d == 0] for count in streams]
    alone = run_world(shards, 1, 1, 12, streams=streams)
    assert sorted(flat(alone)) == list(range(POSITIONS))
    for world_size, workers in itertools.product(*divisors):
        assert run_world(shards, world_size, workers, 12, streams=streams) == alone


@pytest.mark.parametrize("remainder", ["short", "drop", "pad"])
def test_resuming_at_each_step_delivers_the_rest(shards: ShardFolder, remainder: str) -> None:
    whole = ids_of(epoch_of(shards, 2, remainder=remainder))
    for first in range(len(whole) + 1):
        rest = ids_of(epoch_of(shards, 2, remainder=remainder), range(first, len(whole)))
        assert rest == whole[first:]
    for first in (1, 6):
        elsewhere = run_world(shards, 2, 2, 12, first=first, remainder=remainder)
        assert elsewhere == run_world(shards, 1, 1, 12, remainder=remainder)[first:]


def test_epochs_and_seeds_have_different_orders(shards: ShardFolder) -> None:
    orders = [flat(ids_of(epoch_of(shards, e, seed=s))) for s in (0, 1) for e in (0, 1)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    assert flat(ids_of(epoch_of(shards, 1, seed=1))) == orders[3]
    first_batches = [set(ids_of(epoch_of(shards, e))[0]) for e in range(4)]
    assert all(a != b for a, b in itertools.combinations(first_batches, 2))


def test_the_order_is_pinned(shards: ShardFolder) -> None:
    """If this literal changes, runs cannot be repeated or resumed, and ORDER_VERSION must be increased."""
    rows = np.argsort(shards.splits["train"]["position_id"])
    steps = ids_of(epoch_of(shards, 1, seed=1, streams=(2, 2), batch_size=8), range(3))
    assert [rows[step].tolist() for step in steps] == [
        [38, 46, 36, 47, 78, 72, 74, 69],
        [54, 133, 59, 131, 102, 101, 107, 111],
        [34, 42, 45, 33, 125, 127, 71, 68],
    ]


def test_without_shuffling_the_order_is_the_stored_one(shards: ShardFolder) -> None:
    stored = shards.splits["train"]["position_id"].tolist()
    for chosen in ({}, {"batch_size": 7, "window": 1}, {"window": 1_000}, {"streams": (3, 5)}):
        assert flat(ids_of(epoch_of(shards, 5, shuffle=False, **chosen))) == stored
    ranks = [ids_of(epoch_of(shards, shuffle=False, world_size=3, rank=r)) for r in range(3)]
    assert [flat(list(step)) for step in zip(*ranks, strict=True)] == [
        stored[start : start + 36] for start in range(0, POSITIONS, 36)
    ]


def test_the_last_batch_is_divided_dropped_or_padded(shards: ShardFolder) -> None:
    def lengths(**chosen: Any) -> list[list[tuple[int, int]]]:
        """Return the number of positions and of padding at each step of each rank."""
        return [
            [
                (len(block["position_id"]), 0 if padding is None else int(padding.sum()))
                for block, padding in epoch.blocks(range(epoch.steps))
            ]
            for epoch in (epoch_of(shards, rank=r, world_size=4, batch_size=33, **chosen) for r in range(4))
        ]

    for shuffle in (True, False):  # 134 = 4 * 33 + 2
        assert lengths(shuffle=shuffle) == [[(33, 0), (n, 0)] for n in (1, 1, 0, 0)]
        assert lengths(shuffle=shuffle, remainder="drop") == [[(33, 0)]] * 4
        padded = lengths(shuffle=shuffle, remainder="pad")
        assert padded == [[(33, 0), (33, 33 - n)] for n in (1, 1, 0, 0)]


def test_padding_repeats_different_positions(shards: ShardFolder) -> None:
    members = ("position_id", "board")
    boards = shards.splits["train"]["board"][np.argsort(shards.splits["train"]["position_id"])]
    repeated: list[int] = []
    for rank in range(2):
        epoch = epoch_of(shards, remainder="pad", batch_size=60, rank=rank, world_size=2, members=members)
        *_, (block, padding) = epoch.blocks(range(epoch.steps))
        assert padding is not None
        assert len(padding) == len(block["position_id"]) == 60
        np.testing.assert_array_equal(block["board"], boards[block["position_id"]])
        repeated += block["position_id"][padding].tolist()
    assert len(repeated) == len(set(repeated)) == 240 - POSITIONS
    small = epoch_of(shards, split="val", remainder="pad", batch_size=64)  # 20 positions
    ((block, padding),) = small.blocks(range(1))
    assert padding is not None
    assert sorted(np.bincount(block["position_id"][padding]).tolist()) == [2] * 16 + [3] * 4


def test_a_split_without_positions_has_no_steps(make_shards: MakeShards) -> None:
    epoch = epoch_of(make_shards(train=0))
    assert (epoch.steps, list(epoch.blocks(range(0)))) == (0, [])


# --- content ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remainder", ["short", "pad"])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("dense", [False, True])
def test_blocks_contain_the_stored_values(
    make_shards: MakeShards, dense: bool, shuffle: bool, remainder: str
) -> None:
    folder = make_shards(train=98, dense=dense)
    source = folder.splits["train"]
    fields = block_fields(5, dense)
    rows = np.argsort(source["position_id"])
    chosen: dict[str, Any] = {"world_size": 4, "shuffle": shuffle, "remainder": remainder}
    lengths = []
    for rank in range(4):
        epoch = epoch_of(folder, rank=rank, members=fields_of_members(fields), **chosen)
        for block, _ in epoch.blocks(range(epoch.steps)):
            assert {name: array.dtype.str for name, array in block.items()} == {
                name: spec.dtype for name, spec in fields.items()
            }
            check_rows(block, {name: array[rows[block["position_id"]]] for name, array in source.items()})
            lengths.append(len(block["move"]))
    assert sum(lengths) == (98 if remainder == "short" else 144)
    assert (0 in lengths) == (remainder == "short")  # the last two positions are fewer than the ranks


def check_rows(block: Block, expected: Block) -> None:
    for name in row_fields(block):
        np.testing.assert_array_equal(block[name], expected[name], strict=True, err_msg=name)
    np.testing.assert_array_equal(block_to_policy(block, 25), expected["policy"])


def test_blocks_are_writable_and_refer_to_no_window(shards: ShardFolder) -> None:
    for chosen in ({}, {"shuffle": False}, {"streams": (1, 1)}):
        for block, _ in epoch_of(shards, members=("board", "value"), **chosen).blocks(range(3)):
            for array in block.values():
                assert array.flags.writeable
                assert array.base is None


# --- reads --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordingSource:
    """A folder that records which parts of its shards are opened."""

    folder: Path
    opened: list[tuple[str, ByteRange]] = field(default_factory=list)

    def address(self, name: str) -> str:
        return FolderSource(self.folder).address(name)

    def open(self, name: str, part: ByteRange = WHOLE_FILE) -> AbstractContextManager[ByteStream]:
        self.opened.append((name, part))
        return FolderSource(self.folder).open(name, part)


def test_an_epoch_reads_each_shard_about_once(make_shards: MakeShards) -> None:
    folder = make_shards(train=16 * 40)
    source = RecordingSource(folder.path)
    steps = ids_of(epoch_of(folder, source=source, window=32, batch_size=32))
    assert sorted(flat(steps)) == list(range(640))
    extra = 16 - 1  # a boundary of two streams may be within a shard
    assert 40 <= len(source.opened) <= 40 + extra


def test_resuming_reads_one_window_per_stream(make_shards: MakeShards) -> None:
    folder = make_shards(train=16 * 40)
    counts = []
    for first in range(0, 20, 3):
        source = RecordingSource(folder.path)
        epoch = epoch_of(folder, source=source, window=16, batch_size=32)
        next(iter(epoch.blocks(range(first, epoch.steps))))
        counts.append(len(source.opened))
    assert max(counts) <= 2 * 4  # four streams; a step may need two windows of each


def test_each_rank_and_worker_reads_its_own_part(make_shards: MakeShards) -> None:
    folder = make_shards(train=16 * 64)
    opened = 0
    for rank, worker in itertools.product(range(4), range(4)):
        source = RecordingSource(folder.path)
        epoch = epoch_of(folder, source=source, batch_size=8, world_size=4, rank=rank, window=16)
        ids_of(epoch, range(worker, epoch.steps, 4))
        assert len(source.opened) <= 64 // 16 + 1
        opened += len(source.opened)
    assert 64 <= opened <= 64 + 15


def test_resuming_reads_no_earlier_shards(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    for number in (0, 1):
        (folder.path / f"train-{number:06d}.tar").unlink()
    source = RecordingSource(folder.path)
    epoch = epoch_of(folder, source=source, shuffle=False, batch_size=16, window=16)
    assert flat(ids_of(epoch, range(2, 4))) == folder.splits["train"]["position_id"][32:].tolist()


@pytest.mark.parametrize("location", ["{folder}", "pipe:cat {folder}/{{name}}"])
@pytest.mark.parametrize("taken", [1, 5])
def test_no_file_or_process_is_open_between_batches(shards: ShardFolder, location: str, taken: int) -> None:
    def opened() -> set[Any]:
        """Return open file descriptors and child processes. Those of earlier tests may end at any time."""
        descriptors = {path.name for path in Path("/proc/self/fd").iterdir()}
        return descriptors | set(psutil.Process().children(recursive=True))

    source = make_source(location.format(folder=shards.path))
    before = opened()
    blocks: Iterator[Any] = iter(epoch_of(shards, source=source).blocks(range(12)))
    for _ in range(taken):
        next(blocks)
        assert opened() <= before
    blocks.close()
    assert opened() <= before


def test_an_epoch_can_be_pickled(shards: ShardFolder) -> None:
    epoch = epoch_of(shards, 1)
    assert ids_of(pickle.loads(pickle.dumps(epoch))) == ids_of(epoch)


# --- damaged shards -----------------------------------------------------------------------------------


def damage(folder: ShardFolder, number: int, how: str) -> tuple[str, set[int]]:
    """Damage a shard; return its name and the ids of its positions."""
    path = folder.path / f"train-{number:06d}.tar"
    data = path.read_bytes()
    offset = data.index(f"{2 * number + 1:06d}.position_id.npy".encode())
    damaged = {
        "missing": None,
        "cut": data[:offset],
        "overwritten": data[:offset] + bytes(len(data) - offset),
        "foreign": (folder.path / f"train-{number + 1:06d}.tar").read_bytes(),
        "changed": data[: offset + 640] + bytes([data[offset + 640] ^ 1]) + data[offset + 641 :],
    }[how]
    path.unlink() if damaged is None else path.write_bytes(damaged)
    ids = folder.splits["train"]["position_id"][16 * number : 16 * number + 16]
    return path.name, set(ids.tolist())


@pytest.mark.parametrize("how", ["missing", "cut"])
def test_missing_and_truncated_shards_are_detected_when_an_epoch_is_opened(
    make_shards: MakeShards, how: str
) -> None:
    folder = make_shards(train=POSITIONS)
    name, _ = damage(folder, 3, how)
    with pytest.raises(StoreError, match=name):
        epoch_of(folder)


FAULTS = ["missing", "cut", "overwritten", "foreign", "changed"]


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_no_position_of_a_window_with_a_damaged_shard_is_delivered(
    make_shards: MakeShards, how: str, shuffle: bool
) -> None:
    folder = make_shards(train=POSITIONS)
    chosen: dict[str, Any] = {"check": "digests", "window": 16, "shuffle": shuffle, "streams": (1, 1)}
    blocks = epoch_of(folder, batch_size=1, **chosen).blocks(range(POSITIONS))
    name, lost = damage(folder, 3, how)
    delivered: list[int] = []
    with pytest.raises((StoreError, FormatError), match=name):
        delivered.extend(int(block["position_id"][0]) for block, _ in blocks)
    assert not lost & set(delivered)


@every_pair(remainder=["short", "pad"], location=["{folder}", "pipe:cat {folder}/{{name}} 2>&-"], how=FAULTS)
def test_damaged_shards_are_skipped_and_reported(
    make_shards: MakeShards, how: str, location: str, remainder: str
) -> None:
    folder = make_shards(train=POSITIONS, dense=True)
    whole = [set(step) for step in ids_of(epoch_of(folder, 1))]
    name, lost = damage(folder, 3, how)
    skipped: list[tuple[str, range, HexdataError]] = []
    source = make_source(location.format(folder=folder.path))

    def steps_of(first: int, members: tuple[str, ...] = IDS) -> list[list[int]]:
        epoch = epoch_of(
            folder,
            1,
            source=source,
            check="digests",
            remainder=remainder,
            on_skip=lambda *facts: skipped.append(facts),
            members=members,
        )
        return ids_of(epoch, range(first, epoch.steps))

    steps = steps_of(0, ("position_id", "move", "policy", "policy_row"))
    assert [set(step) for step in steps] == [step - lost for step in whole]  # other positions do not change
    assert len(flat(steps)) == POSITIONS - 16
    assert {shard for shard, _, _ in skipped} == {name}
    assert sorted(row for _, rows, _ in skipped for row in rows) == list(range(16))
    assert all(name in str(error) for _, _, error in skipped)
    assert steps_of(5) == steps[5:]


def test_other_errors_are_not_skipped(make_shards: MakeShards) -> None:
    folder = make_shards(train=48)

    class FailingSource(RecordingSource):
        def open(self, name: str, part: ByteRange = WHOLE_FILE) -> AbstractContextManager[ByteStream]:
            raise MemoryError

    with pytest.raises(MemoryError):
        ids_of(epoch_of(folder, source=FailingSource(folder.path), on_skip=lambda *facts: None))


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"where": "value = 1"}, "cannot select positions; found where"),
        ({"newest": 3}, "cannot select positions; found newest"),
        ({"batch": BatchOptions(final_policy="skip")}, "cannot select positions; found final_policy='skip'"),
        ({"world_size": 3}, r"3 ranks, streams=\(4, 4\)"),
        ({"batch_size": 5}, "must divide the global batch"),
    ],
)
def test_invalid_options_are_refused(shards: ShardFolder, chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        epoch_of(shards, **chosen)


def test_an_invalid_number_of_workers_is_refused(shards: ShardFolder) -> None:
    with pytest.raises(ConfigError, match="found 3 workers"):
        next(iter(epoch_of(shards).blocks(range(0, 12, 3))))


# --- Loader -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remainder", ["short", "drop", "pad"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_both_modes_have_the_same_stored_order(shards: ShardFolder, remainder: Any, world_size: int) -> None:
    for rank in range(world_size):
        exact, stream = (
            Loader(
                shards.path,
                mode=mode,
                shuffle=False,
                batch_size=25,
                remainder=remainder,
                rank=rank,
                world_size=world_size,
                fields=("board", "policy", "position_id"),
            )
            for mode in ("exact", "stream")
        )
        for ours, theirs in zip(stream, exact, strict=True):
            assert ours.keys() == theirs.keys()
            for name, array in theirs.items():
                np.testing.assert_array_equal(ours[name], array, strict=True, err_msg=name)
        assert stream.epoch_digest == exact.epoch_digest


@pytest.mark.parametrize("stop", [0, 1, 4, 7])
def test_a_state_resumes_on_other_ranks(shards: ShardFolder, stop: int) -> None:
    def loader_of(rank: int = 0, world_size: int = 1) -> Loader:
        return Loader(
            shards.path,
            mode="stream",
            batch_size=16 // world_size,
            rank=rank,
            world_size=world_size,
            window=24,
            fields=IDS,
        )

    loader = loader_of()
    whole = [batch["position_id"].tolist() for batch in loader]
    loader.set_epoch(0)
    assert [b["position_id"].tolist() for b in itertools.islice(loader, stop)] == whole[:stop]
    state = json.loads(json.dumps(loader.state_dict()))
    for world_size in (1, 2, 4):
        ranks = [loader_of(rank, world_size) for rank in range(world_size)]
        for other in ranks:
            other.load_state_dict(state)
        steps = zip(*([b["position_id"].tolist() for b in other] for other in ranks), strict=True)
        assert [sorted(flat(list(step))) for step in steps] == [sorted(step) for step in whole[stop:]]


def test_a_loader_counts_skipped_positions_and_warns_once(make_shards: MakeShards) -> None:
    folder = make_shards(train=POSITIONS)
    name, lost = damage(folder, 3, "missing")
    loader = Loader(folder.path, mode="stream", on_error="skip", window=8, batch_size=8, fields=IDS)
    with pytest.warns(UserWarning, match=name) as warned:
        ids = flat([batch["position_id"].tolist() for batch in loader])
    assert len(warned) == 1
    assert sorted(ids) == sorted(set(range(POSITIONS)) - lost)
    assert loader.skipped == {name: 16}
