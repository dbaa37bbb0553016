"""Tests of ``hexdata.loader.schedule`` against plain definitions, written out as lists."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import ConfigError
from hexdata.loader.options import LoaderOptions, Remainder
from hexdata.loader.schedule import EpochSchedule, StepSlice, StreamSchedule, StreamWindow
from hexdata.order import Permutation, derive_key

BLOCK = 4
Row = tuple[int, int]
"""A position: the index of its shard in the split, and its row in the shard."""
Step = list[list[Row]]
"""The positions of each part of a global batch."""
RankIndices = tuple[list[int], list[int]]
"""Indices that a rank delivers at a step: its own, and those repeated as padding."""


# --- exact mode -----------------------------------------------------------------------------------------


def plain_epoch(
    positions: int, batch_size: int, world_size: int, remainder: Remainder
) -> list[list[RankIndices]]:
    """Return the indices of each rank at each step, dealt one at a time as the documentation defines."""
    global_batch = batch_size * world_size
    steps = []
    for first in range(0, positions, global_batch):
        size = min(global_batch, positions - first)
        if size < global_batch and remainder == "drop":
            break
        counts = [0] * world_size
        for number in range(size):
            counts[number % world_size if size < global_batch else number // batch_size] += 1
        indices, repeats = iter(range(first, first + size)), itertools.cycle(range(positions))
        steps.append(
            [
                (
                    list(itertools.islice(indices, count)),
                    list(itertools.islice(repeats, batch_size - count if remainder == "pad" else 0)),
                )
                for count in counts
            ]
        )
    return steps


@given(
    positions=st.integers(0, 60),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 6),
    remainder=st.sampled_from(["short", "drop", "pad"]),
)
def test_slices_match_the_plain_definition(positions, batch_size, world_size, remainder):
    expected = plain_epoch(positions, batch_size, world_size, remainder)
    for rank in range(world_size):
        options = LoaderOptions(batch_size=batch_size, world_size=world_size, rank=rank, remainder=remainder)
        schedule = EpochSchedule(positions, options)
        assert schedule.steps == len(expected)
        for step, ranks in enumerate(expected):
            own_slice, (own, repeats) = schedule.slice_at(step), ranks[rank]
            assert own_slice.indices(positions).tolist() == own + repeats
            mask = own_slice.padding_mask()
            assert (mask is None) == (not repeats)
            assert mask is None or mask.tolist() == [False] * len(own) + [True] * len(repeats)


def test_the_last_step_is_pinned():
    """If these literals change, runs cannot be resumed on other ranks."""
    options = [LoaderOptions(batch_size=4, rank=rank, world_size=3, remainder="pad") for rank in range(3)]
    assert [EpochSchedule(29, each).slice_at(2) for each in options] == [
        StepSlice(24, 26, range(2)),
        StepSlice(26, 28, range(2, 4)),
        StepSlice(28, 29, range(4, 7)),
    ]


@pytest.mark.parametrize(("remainder", "steps"), [("short", 9_473), ("pad", 9_473), ("drop", 9_472)])
def test_a_large_epoch_is_computed_directly(remainder, steps):
    options = LoaderOptions(batch_size=1_280, world_size=8, rank=7, remainder=remainder)
    schedule = EpochSchedule(97_000_000, options)
    assert schedule.steps == steps
    assert schedule.slice_at(5_000) == StepSlice(5_000 * 10_240 + 8_960, 5_001 * 10_240, range(0))


# --- stream mode ----------------------------------------------------------------------------------------


def stream_options(**chosen: Any) -> LoaderOptions:
    return LoaderOptions(**{"mode": "stream", "streams": (2, 3), "window": 10, "batch_size": 6, **chosen})


def rows_of_epoch(sizes: list[int], options: LoaderOptions, epoch: int) -> list[Row]:
    """Return the rows of all shards, in the epoch's order of shards."""
    order = list(range(len(sizes)))
    if options.shuffle:
        permutation = Permutation(
            len(sizes), derive_key(options.seed, "epoch", epoch, options.split, "shards")
        )
        order = [permutation[index] for index in order]
    return [(shard, i) for shard in order for i in range(sizes[shard])]


def plain_steps(sizes: list[int], options: LoaderOptions, epoch: int) -> list[Step]:
    """Return the steps by a plain definition: compute sizes, cut the epoch's rows, permute the windows."""
    parts, phases = options.streams
    batch, positions = options.global_batch, sum(sizes)
    batches = [batch] * (positions // batch)
    if positions % batch and options.remainder != "drop":
        batches.append(positions % batch)
    part_sizes = [[size // parts + (p < size % parts) for p in range(parts)] for size in batches]
    rows = rows_of_epoch(sizes, options, epoch)
    steps: list[Step] = [[[] for _ in range(parts)] for _ in batches]
    start = 0
    for part, phase in itertools.product(range(parts), range(phases)):
        stream_steps = range(phase, len(batches), phases)
        length = sum(part_sizes[step][part] for step in stream_steps)
        stream = iter(plain_stream(rows, start, length, options, epoch, part * phases + phase))
        for step in stream_steps:
            steps[step][part] = list(itertools.islice(stream, part_sizes[step][part]))
        start += length
    return steps


def plain_stream(
    rows: list[Row], start: int, length: int, options: LoaderOptions, epoch: int, stream: int
) -> list[Row]:
    """Return the rows of a stream: take the longest window, then go back to the last boundary in it."""
    delivered: list[Row] = []
    stop, window = start + length, 0
    while start < stop:
        end = limit = min(start + options.window, stop)
        if limit < stop:
            backwards = range(limit, start, -1)
            shards = [i for i in backwards if rows[i][1] == 0]
            blocks = [i for i in backwards if rows[i][1] % BLOCK == 0 and rows[i][0] == rows[limit][0]]
            end = [*shards, *blocks, limit][0]
        key = derive_key(options.seed, "epoch", epoch, options.split, "stream", stream, "window", window)
        order = Permutation(end - start, key)
        delivered += [rows[start + order[i]] for i in range(end - start)]
        start, window = end, window + 1
    return delivered


def scheduled_steps(sizes: list[int], options: LoaderOptions, epoch: int) -> list[Step]:
    """Return the steps of the schedule of a single rank."""
    schedule = StreamSchedule(sizes, BLOCK, options, epoch)
    rows = rows_of_epoch(sizes, options, epoch)
    return [
        [
            [rows[delivered_row(schedule, part.stream, row)] for row in range(part.start, part.stop)]
            for part in parts
        ]
        for parts in map(schedule.slices_at, range(schedule.steps))
    ]


def delivered_row(schedule: StreamSchedule, stream: int, row: int) -> int:
    window = schedule.window_at(stream, row)
    order = schedule.window_order(window)
    return row if order is None else window.start + order[row - window.start]


SIZES = st.lists(st.integers(1, 3 * BLOCK), max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    sizes=SIZES,
    parts=st.integers(1, 4),
    phases=st.integers(1, 4),
    part_size=st.integers(1, 5),
    window=st.integers(1, 40),
    remainder=st.sampled_from(["short", "drop", "pad"]),
    epoch=st.integers(0, 3),
)
def test_streams_match_the_plain_definition(
    sizes: list[int], parts: int, phases: int, part_size: int, window: int, remainder: Any, epoch: int
) -> None:
    options = stream_options(
        streams=(parts, phases), batch_size=parts * part_size, window=window, remainder=remainder, seed=5
    )
    steps = scheduled_steps(sizes, options, epoch)
    assert steps == plain_steps(sizes, options, epoch)
    rows = [row for step in steps for part in step for row in part]
    kept = len(rows) if remainder == "drop" else sum(sizes)
    assert len(rows) == len(set(rows)) == kept
    assert sum(sizes) - kept < options.global_batch


@pytest.mark.parametrize("remainder", ["short", "drop", "pad"])
@pytest.mark.parametrize("positions", [0, 1, 5, 6, 47, 48, 49, 96, 97, 130])
def test_ranks_divide_the_parts_of_a_single_rank(positions: int, remainder: Any) -> None:
    sizes = [12] * (positions // 12) + [positions % 12] * (positions % 12 > 0)
    alone = stream_options(streams=(6, 2), batch_size=24, remainder=remainder)
    whole = StreamSchedule(sizes, BLOCK, alone, 1)
    for world_size in (1, 2, 3, 6):
        schedules = [
            StreamSchedule(
                sizes, BLOCK, replace(alone, batch_size=24 // world_size, rank=r, world_size=world_size), 1
            )
            for r in range(world_size)
        ]
        assert {schedule.steps for schedule in schedules} == {whole.steps}
        for step in range(whole.steps):
            ranks = [schedule.slices_at(step) for schedule in schedules]
            assert sorted(itertools.chain(*ranks)) == sorted(whole.slices_at(step))
            lengths = [sum(part.stop - part.start for part in parts) for parts in ranks]
            assert max(lengths) - min(lengths) <= 1
            if remainder == "pad":
                padded = [sum(len(part.padding) for part in parts) for parts in ranks]
                assert {a + b for a, b in zip(lengths, padded, strict=True)} == {24 // world_size}


def test_padding_repeats_every_row_once_before_any_row_twice() -> None:
    options = stream_options(batch_size=24, streams=(4, 1), remainder="pad")
    schedule = StreamSchedule([12, 12, 3], BLOCK, options, 0)
    assert [part.padding for part in schedule.slices_at(0)] == [range(0)] * 4
    last = schedule.slices_at(1)  # 3 positions, 21 repeated
    assert [part.stop - part.start for part in last] == [1, 1, 1, 0]
    assert [row for part in last for row in part.padding] == list(range(21))


def test_without_shuffling_ranks_take_turns_in_stored_order() -> None:
    sizes = [12, 12, 12, 5]
    for world_size, remainder in itertools.product((1, 2, 3, 5), ("short", "drop", "pad")):
        rows = []
        schedules = [
            StreamSchedule(
                sizes,
                BLOCK,
                stream_options(
                    shuffle=False, rank=r, world_size=world_size, batch_size=4, remainder=remainder
                ),
                3,
            )
            for r in range(world_size)
        ]
        for step in range(schedules[0].steps):
            for schedule in schedules:
                (part,) = schedule.slices_at(step)
                assert part.stream == 0
                rows += range(part.start, part.stop)
                assert all(schedule.window_order(schedule.window_at(0, row)) is None for row in rows[-1:])
        assert rows == list(range(41 if remainder != "drop" else 41 - 41 % (4 * world_size)))


@pytest.mark.parametrize("streams", [(1, 1), (2, 3), (4, 4)])
def test_each_stream_has_one_rank_and_one_worker(streams: tuple[int, int]) -> None:
    sizes = [12] * 20
    parts, phases = streams
    readers: dict[int, set[tuple[int, int]]] = {}
    for world_size, workers in itertools.product(range(1, parts + 1), range(1, phases + 1)):
        if parts % world_size or phases % workers:
            continue
        readers.clear()
        for rank in range(world_size):
            options = stream_options(
                streams=streams, batch_size=12 // world_size, world_size=world_size, rank=rank
            )
            schedule = StreamSchedule(sizes, BLOCK, options, 0)
            schedule.check_workers(workers)
            for step in range(schedule.steps):
                for part in schedule.slices_at(step):
                    readers.setdefault(part.stream, set()).add((rank, step % workers))
        assert readers.keys() == set(range(parts * phases))
        assert {len(reader) for reader in readers.values()} == {1}


@given(sizes=SIZES, window=st.integers(1, 40), ends=st.tuples(st.integers(0, 150), st.integers(0, 150)))
def test_shard_slices_are_the_requested_rows(sizes: list[int], window: int, ends: tuple[int, int]) -> None:
    options = stream_options(window=window, seed=2)
    rows = rows_of_epoch(sizes, options, 0)
    start, stop = sorted(min(end, len(rows)) for end in ends)
    slices = list(StreamSchedule(sizes, BLOCK, options, 0).shard_slices(start, stop))
    assert [(each.shard, i) for each in slices for i in range(each.start, each.stop)] == rows[start:stop]
    assert all(each.start < each.stop for each in slices)


def test_windows_end_at_the_ends_of_shards_or_blocks() -> None:
    options = stream_options(streams=(1, 1), window=10, shuffle=False)
    schedule = StreamSchedule([4, 5, 22, 1, 30], BLOCK, options, 0)
    starts = sorted({schedule.window_at(0, row).start for row in range(62)})
    # Shards end at 4, 9, 31 and 32. 17 and 25 are ends of blocks in the shard of 22, 40 to 56 in the last.
    assert starts == [0, 9, 17, 25, 32, 40, 48, 56]


def test_the_order_of_streams_is_pinned() -> None:
    """If this literal changes, runs cannot be repeated or resumed, and ORDER_VERSION must be increased."""
    options = stream_options(streams=(2, 2), batch_size=4, window=5, seed=1)
    steps = scheduled_steps([4, 4, 4, 4, 3], options, 2)
    assert [[[4 * shard + row for shard, row in part] for part in step] for step in steps] == [
        [[16, 17], [10, 9]],
        [[2, 0], [14, 12]],
        [[18, 6], [11, 8]],
        [[1, 7], [15, 13]],
        [[4, 5], [3]],
    ]


def opened_windows(schedule: StreamSchedule, steps: range) -> list[StreamWindow]:
    """Return the windows in the order in which the rows of each slice need them."""
    opened: list[StreamWindow] = []
    current: dict[int, StreamWindow] = {}
    for part in itertools.chain.from_iterable(schedule.slices_at(step) for step in steps):
        for row in range(part.start, part.stop):
            window = schedule.window_at(part.stream, row)
            if current.get(part.stream) != window:
                opened.append(window)
            current[part.stream] = window
    return opened


@settings(max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    window=st.integers(1, 40),
    ranks=st.sampled_from([(1, 0), (2, 0), (2, 1)]),
    worker=st.sampled_from([(1, 0), (3, 0), (3, 2)]),
    start=st.integers(0, 12),
    shuffle=st.booleans(),
)
def test_windows_are_yielded_in_the_order_of_reading(
    sizes: list[int],
    window: int,
    ranks: tuple[int, int],
    worker: tuple[int, int],
    start: int,
    shuffle: bool,
) -> None:
    """For any rank and worker, beginning at any step."""
    options = stream_options(window=window, world_size=ranks[0], rank=ranks[1], shuffle=shuffle)
    schedule = StreamSchedule(sizes, BLOCK, options, 3)
    workers, number = worker
    first = min(start, schedule.steps)
    steps = range(first + (number - first) % workers, schedule.steps, workers)
    windows = list(schedule.windows(steps))
    assert windows == opened_windows(schedule, steps)
    assert schedule.count_streams(steps) >= len({each.stream for each in windows})


def test_epochs_and_seeds_read_other_shards_in_another_order() -> None:
    sizes = [12] * 16
    options = stream_options(streams=(4, 4), batch_size=8, window=12)
    orders = [
        scheduled_steps(sizes, replace(options, seed=seed), epoch) for seed in (0, 1) for epoch in (0, 1)
    ]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    first_parts = [{shard for step in steps for shard, _ in step[0]} for steps in orders]
    assert all(a != b for a, b in itertools.combinations(first_parts, 2))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"world_size": 3, "streams": (4, 4)},
            r"number of ranks must divide P .*found 3 ranks, streams=\(4, 4\).*streams=\(12, 4\)",
        ),
        (
            {"batch_size": 6, "streams": (4, 4)},
            r"must divide the global batch; found streams=\(4, 4\), batch_size 6 .*multiple of 4\.",
        ),
        ({"batch_size": 3, "streams": (4, 4), "world_size": 2}, r"batch_size that is a multiple of 2\."),
    ],
)
def test_ranks_and_batches_must_fit_the_streams(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamSchedule([12], BLOCK, stream_options(**chosen), 0)
    StreamSchedule([12], BLOCK, stream_options(**chosen, shuffle=False), 0)


def test_the_number_of_workers_must_fit_the_streams() -> None:
    schedule = StreamSchedule([12], BLOCK, stream_options(streams=(2, 4)), 0)
    with pytest.raises(ConfigError, match=r"found 3 workers, streams=\(2, 4\)\. Use streams=\(2, 12\)"):
        schedule.check_workers(3)
    StreamSchedule([12], BLOCK, stream_options(shuffle=False), 0).check_workers(3)
