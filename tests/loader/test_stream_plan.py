"""The arithmetic of stream mode against a plain definition of it, written out as lists."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import ConfigError
from hexdata.loader.options import LoaderOptions
from hexdata.loader.schedule import StreamPlan, Window
from hexdata.order import Permutation, derive_key

BLOCK = 4
Row = tuple[int, int]
"""A position: its shard's number in the split, and its place in the shard."""
Step = list[list[Row]]
"""The positions of each part of a global batch."""


def options_of(**chosen: Any) -> LoaderOptions:
    return LoaderOptions(**{"mode": "stream", "streams": (2, 3), "window": 10, "batch_size": 6, **chosen})


def rows_of_epoch(sizes: list[int], options: LoaderOptions, epoch: int) -> list[Row]:
    """Plain definition: the positions shard after shard, in the epoch's order of the shards."""
    order = list(range(len(sizes)))
    if options.shuffle:
        permutation = Permutation(
            len(sizes), derive_key(options.seed, "epoch", epoch, options.split, "shards")
        )
        order = [permutation[place] for place in order]
    return [(shard, i) for shard in order for i in range(sizes[shard])]


def plain_steps(sizes: list[int], options: LoaderOptions, epoch: int) -> list[Step]:
    """Plain definition: hand out sizes first, cut the epoch's rows by them, then permute the windows."""
    parts, phases = options.streams
    batch, positions = options.global_batch, sum(sizes)
    batches = [batch] * (positions // batch)
    if positions % batch and options.remainder != "drop":
        batches.append(positions % batch)
    shares = [[size // parts + (p < size % parts) for p in range(parts)] for size in batches]
    rows = rows_of_epoch(sizes, options, epoch)
    steps: list[Step] = [[[] for _ in range(parts)] for _ in batches]
    place = 0
    for part, phase in itertools.product(range(parts), range(phases)):
        turns = range(phase, len(batches), phases)
        length = sum(shares[step][part] for step in turns)
        stream = iter(plain_stream(rows, place, length, options, epoch, part * phases + phase))
        for step in turns:
            steps[step][part] = list(itertools.islice(stream, shares[step][part]))
        place += length
    return steps


def plain_stream(
    rows: list[Row], place: int, length: int, options: LoaderOptions, epoch: int, stream: int
) -> list[Row]:
    """Plain definition: reach as far as a window may, then step back to the last border within it."""
    delivered: list[Row] = []
    stop, window = place + length, 0
    while place < stop:
        end = reach = min(place + options.window, stop)
        if reach < stop:
            backwards = range(reach, place, -1)
            shards = [i for i in backwards if rows[i][1] == 0]
            blocks = [i for i in backwards if rows[i][1] % BLOCK == 0 and rows[i][0] == rows[reach][0]]
            end = [*shards, *blocks, reach][0]
        key = derive_key(options.seed, "epoch", epoch, options.split, "stream", stream, "window", window)
        order = Permutation(end - place, key)
        delivered += [rows[place + order[i]] for i in range(end - place)]
        place, window = end, window + 1
    return delivered


def planned_steps(sizes: list[int], options: LoaderOptions, epoch: int) -> list[Step]:
    """Return what the plan of a single rank gives."""
    plan = StreamPlan(sizes, BLOCK, options, epoch)
    rows = rows_of_epoch(sizes, options, epoch)
    return [
        [
            [rows[delivered_row(plan, share.stream, row)] for row in range(share.start, share.stop)]
            for share in shares
        ]
        for shares in map(plan.shares, range(plan.steps))
    ]


def delivered_row(plan: StreamPlan, stream: int, row: int) -> int:
    window = plan.window_at(stream, row)
    order = plan.window_order(window)
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
def test_the_plan_is_the_plain_one(
    sizes: list[int], parts: int, phases: int, part_size: int, window: int, remainder: Any, epoch: int
) -> None:
    options = options_of(
        streams=(parts, phases), batch_size=parts * part_size, window=window, remainder=remainder, seed=5
    )
    steps = planned_steps(sizes, options, epoch)
    assert steps == plain_steps(sizes, options, epoch)
    rows = [row for step in steps for part in step for row in part]
    kept = len(rows) if remainder == "drop" else sum(sizes)
    assert len(rows) == len(set(rows)) == kept
    assert sum(sizes) - kept < options.global_batch


@pytest.mark.parametrize("remainder", ["short", "drop", "pad"])
@pytest.mark.parametrize("positions", [0, 1, 5, 6, 47, 48, 49, 96, 97, 130])
def test_ranks_share_out_what_one_has(positions: int, remainder: Any) -> None:
    sizes = [12] * (positions // 12) + [positions % 12] * (positions % 12 > 0)
    alone = options_of(streams=(6, 2), batch_size=24, remainder=remainder)
    whole = StreamPlan(sizes, BLOCK, alone, 1)
    for world_size in (1, 2, 3, 6):
        plans = [
            StreamPlan(
                sizes, BLOCK, replace(alone, batch_size=24 // world_size, rank=r, world_size=world_size), 1
            )
            for r in range(world_size)
        ]
        assert {plan.steps for plan in plans} == {whole.steps}
        for step in range(whole.steps):
            ranks = [plan.shares(step) for plan in plans]
            assert sorted(itertools.chain(*ranks)) == sorted(whole.shares(step))
            sizes_of = [sum(share.stop - share.start for share in shares) for shares in ranks]
            assert max(sizes_of) - min(sizes_of) <= 1
            if remainder == "pad":
                padded = [sum(len(share.padding) for share in shares) for shares in ranks]
                assert {a + b for a, b in zip(sizes_of, padded, strict=True)} == {24 // world_size}


def test_padding_repeats_each_row_before_any_twice() -> None:
    plan = StreamPlan([12, 12, 3], BLOCK, options_of(batch_size=24, streams=(4, 1), remainder="pad"), 0)
    assert [share.padding for share in plan.shares(0)] == [range(0)] * 4
    last = plan.shares(1)  # 3 positions, 21 repeated
    assert [share.stop - share.start for share in last] == [1, 1, 1, 0]
    assert [row for share in last for row in share.padding] == list(range(21))


def test_without_shuffle_ranks_take_stored_order_in_turns() -> None:
    sizes = [12, 12, 12, 5]
    for world_size, remainder in itertools.product((1, 2, 3, 5), ("short", "drop", "pad")):
        rows = []
        plans = [
            StreamPlan(
                sizes,
                BLOCK,
                options_of(shuffle=False, rank=r, world_size=world_size, batch_size=4, remainder=remainder),
                3,
            )
            for r in range(world_size)
        ]
        for step in range(plans[0].steps):
            for plan in plans:
                (share,) = plan.shares(step)
                assert share.stream == 0
                rows += range(share.start, share.stop)
                assert all(plan.window_order(plan.window_at(0, row)) is None for row in rows[-1:])
        assert rows == list(range(41 if remainder != "drop" else 41 - 41 % (4 * world_size)))


@pytest.mark.parametrize("streams", [(1, 1), (2, 3), (4, 4)])
def test_each_stream_is_read_by_one_rank_and_one_worker(streams: tuple[int, int]) -> None:
    sizes = [12] * 20
    parts, phases = streams
    readers: dict[int, set[tuple[int, int]]] = {}
    for world_size, workers in itertools.product(range(1, parts + 1), range(1, phases + 1)):
        if parts % world_size or phases % workers:
            continue
        readers.clear()
        for rank in range(world_size):
            options = options_of(
                streams=streams, batch_size=12 // world_size, world_size=world_size, rank=rank
            )
            plan = StreamPlan(sizes, BLOCK, options, 0)
            plan.check_workers(workers)
            for step in range(plan.steps):
                for share in plan.shares(step):
                    readers.setdefault(share.stream, set()).add((rank, step % workers))
        assert readers.keys() == set(range(parts * phases))
        assert {len(reader) for reader in readers.values()} == {1}


@given(sizes=SIZES, window=st.integers(1, 40), place=st.tuples(st.integers(0, 150), st.integers(0, 150)))
def test_pieces_are_the_rows_asked_for(sizes: list[int], window: int, place: tuple[int, int]) -> None:
    options = options_of(window=window, seed=2)
    rows = rows_of_epoch(sizes, options, 0)
    start, stop = sorted(min(p, len(rows)) for p in place)
    pieces = list(StreamPlan(sizes, BLOCK, options, 0).pieces(start, stop))
    assert [(p.shard, i) for p in pieces for i in range(p.first, p.stop)] == rows[start:stop]
    assert all(p.first < p.stop for p in pieces)


def test_windows_end_with_shards_or_blocks() -> None:
    options = options_of(streams=(1, 1), window=10, shuffle=False)
    plan = StreamPlan([4, 5, 22, 1, 30], BLOCK, options, 0)
    starts = sorted({plan.window_at(0, row).start for row in range(62)})
    # 4 and 9 end shards; 9 + 8 is a block of the shard of 22, and so on; 31 ends it, 32 the shard of 1.
    assert starts == [0, 9, 17, 25, 32, 40, 48, 56]


def test_the_plan_is_pinned() -> None:
    """A literal order: if it changes, runs cannot be repeated or resumed, and ORDER_VERSION must rise."""
    options = options_of(streams=(2, 2), batch_size=4, window=5, seed=1)
    steps = planned_steps([4, 4, 4, 4, 3], options, 2)
    assert [[[4 * shard + place for shard, place in part] for part in step] for step in steps] == [
        [[16, 17], [10, 9]],
        [[2, 0], [14, 12]],
        [[18, 6], [11, 8]],
        [[1, 7], [15, 13]],
        [[4, 5], [3]],
    ]


def opened_windows(plan: StreamPlan, steps: range) -> list[Window]:
    """Plain definition: walk through every share, row by row, and open the window that a row lies in."""
    opened: list[Window] = []
    current: dict[int, Window] = {}
    for share in itertools.chain.from_iterable(plan.shares(step) for step in steps):
        for row in range(share.start, share.stop):
            window = plan.window_at(share.stream, row)
            if current.get(share.stream) != window:
                opened.append(window)
            current[share.stream] = window
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
def test_windows_are_told_beforehand_in_the_order_they_are_opened(
    sizes: list[int],
    window: int,
    ranks: tuple[int, int],
    worker: tuple[int, int],
    start: int,
    shuffle: bool,
) -> None:
    """For any rank and worker, from any step on."""
    options = options_of(window=window, world_size=ranks[0], rank=ranks[1], shuffle=shuffle)
    plan = StreamPlan(sizes, BLOCK, options, 3)
    workers, number = worker
    steps = range(min(start, plan.steps) + (number - min(start, plan.steps)) % workers, plan.steps, workers)
    assert list(plan.windows_of(steps)) == opened_windows(plan, steps)
    assert plan.streams_of(steps) >= len({one.stream for one in plan.windows_of(steps)})


def test_another_epoch_reads_other_shards_in_another_order() -> None:
    sizes = [12] * 16
    options = options_of(streams=(4, 4), batch_size=8, window=12)
    orders = [planned_steps(sizes, replace(options, seed=seed), epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    first_parts = [{shard for step in steps for shard, _ in step[0]} for steps in orders]
    assert all(a != b for a, b in itertools.combinations(first_parts, 2))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"world_size": 3, "streams": (4, 4)},
            r"number of ranks must divide.*found 3 ranks, streams=\(4, 4\).*streams=\(12, 4\)",
        ),
        (
            {"batch_size": 6, "streams": (4, 4)},
            r"positions a step.*found streams=\(4, 4\), 6 .*multiple of 4\.",
        ),
        ({"batch_size": 3, "streams": (4, 4), "world_size": 2}, r"batch_size that is a multiple of 2\."),
    ],
)
def test_what_does_not_fit_is_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamPlan([12], BLOCK, options_of(**chosen), 0)
    StreamPlan([12], BLOCK, options_of(**chosen, shuffle=False), 0)


def test_workers_that_do_not_fit_are_refused() -> None:
    plan = StreamPlan([12], BLOCK, options_of(streams=(2, 4)), 0)
    with pytest.raises(ConfigError, match=r"found 3 workers, streams=\(2, 4\)\. Give streams=\(2, 12\)"):
        plan.check_workers(3)
    StreamPlan([12], BLOCK, options_of(shuffle=False), 0).check_workers(3)
