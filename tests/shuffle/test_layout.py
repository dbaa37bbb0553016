"""Layouts: each row is in one slice and one unit, and no unit exceeds the memory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hexdata.shuffle.layout import (
    BUCKET_ROWS,
    ShuffleLayout,
    ThreadLimits,
    bucket_counts,
    make_layout,
    make_limits,
    row_bytes,
    sort_cost,
)
from hypothesis import given
from hypothesis import strategies as st

from hexdata.engine.protocol import Machines
from hexdata.errors import BudgetError, ConfigError
from hexdata.order import sort_key
from hexdata.pool import default_workers
from hexdata.schema import SPLITS
from hexdata.shuffle import ShuffleOptions
from hexdata.shuffle.options import MINIMUM_MEMORY

ROWS = st.dictionaries(st.sampled_from(SPLITS), st.integers(1, 10**9), min_size=1).map(
    lambda rows: {split: rows[split] for split in SPLITS if split in rows}
)
OPTIONS = st.builds(
    ShuffleOptions,
    seed=st.integers(),
    buckets=st.none() | st.integers(1, 600),
    memory=st.integers(MINIMUM_MEMORY, 10**11),
    threads=st.none() | st.integers(1, 128),
)
NARROW = row_bytes(13, 0)
DENSE = row_bytes(13, 4 * 169)


def planned(options: ShuffleOptions, rows: dict[str, int]) -> tuple[ThreadLimits, ShuffleLayout]:
    limits = make_limits(options, sum(rows.values()), NARROW, NARROW)
    return limits, make_layout(sum(rows.values()), rows, bucket_counts(options, rows), limits)


@given(OPTIONS, ROWS)
def test_slices_and_jobs_cover_everything_once(options: ShuffleOptions, rows: dict[str, int]) -> None:
    limits, layout = planned(options, rows)
    bounds = [0, *(part.stop for part in layout.slices)]
    assert [part.start for part in layout.slices] == bounds[:-1]
    assert bounds[-1] == sum(rows.values())
    assert len({part.name for part in layout.slices}) == len(layout.slices)
    assert max(part.stop - part.start for part in layout.slices) <= limits.chunk_rows
    units = [unit for job in layout.jobs for unit in job.units]
    assert units == list(range(layout.units))
    counts = bucket_counts(options, rows)
    buckets = [(bucket.split, bucket.index) for job in layout.jobs for bucket in job.buckets]
    assert buckets == [(split, i) for split in rows for i in range(counts[split])]
    assert all(len(job.buckets) == 1 or len(job.units) == 1 for job in layout.jobs)


@given(OPTIONS, ROWS)
def test_units_fit_into_the_memory(options: ShuffleOptions, rows: dict[str, int]) -> None:
    limits, layout = planned(options, rows)
    for split, count in rows.items():
        grouping = layout.groups[split]
        unit = -(-count // grouping.buckets) * grouping.group / grouping.parts
        assert unit + 5.9 * unit**0.5 <= limits.sort_rows or unit <= 1
    assert limits.may_sort(limits.sort_rows, limits.sort_rows * NARROW)
    assert not limits.may_sort(limits.sort_rows + 1, 0)
    assert not limits.may_sort(1, limits.sort_bytes)
    assert 1 <= limits.threads <= (options.threads or default_workers())
    held = max(sort_cost(limits.sort_rows, limits.sort_rows * NARROW), limits.duckdb_memory)
    assert limits.threads * held < options.memory


@given(OPTIONS, ROWS)
def test_the_number_of_buckets_depends_only_on_the_rows(
    options: ShuffleOptions, rows: dict[str, int]
) -> None:
    counts = bucket_counts(options, rows)
    largest, most = max(rows.values()), max(counts.values())
    assert most == (options.buckets or -(-largest // BUCKET_ROWS))
    for split, count in counts.items():
        assert (count - 1) * largest < rows[split] * most <= count * largest


LAYOUTS = st.builds(
    lambda rows, buckets, sort_rows, by_key: make_layout(
        rows,
        {"train": rows, "test": rows // 3 + 1},
        buckets,
        ThreadLimits(2, 0, 500, 1 << 40, sort_rows, 1 << 40),
        by_key=by_key,
    ),
    st.integers(1, 2_000),
    st.fixed_dictionaries({"train": st.integers(1, 40), "test": st.integers(1, 9)}),
    st.integers(1, 3_000),
    st.booleans(),
)


@given(LAYOUTS, st.integers(0, 99))
def test_units_ascend_in_the_order_of_the_shuffle(layout: ShuffleLayout, key: int) -> None:
    """For any buckets: the ranges of keys determine only the number of rows per unit."""
    n = 300
    keys = sort_key(np.arange(n), key)
    split = np.where(np.arange(n) % 4 == 3, SPLITS.index("test"), 0).astype(np.uint8)
    counts = np.array([layout.groups["train"].buckets, 0, layout.groups["test"].buckets])
    bucket = (np.arange(n) * 7 % counts[split]).astype(np.uint32)
    order = np.lexsort((keys, bucket, split))
    unit = layout.unit_numbers(split, bucket, keys)[order].astype(int)
    assert (np.diff(unit) >= 0).all()
    of_unit = {unit: job for job in layout.jobs for unit in job.units}
    for row, number in zip(order, unit, strict=True):
        names = {(b.split, b.index) for b in of_unit[number].buckets}
        assert (SPLITS[split[row]], bucket[row]) in names


@pytest.mark.parametrize("by_key", [True, False])
def test_the_parts_of_a_bucket_are_equal(by_key: bool) -> None:
    """For buckets of positions, and for buckets of games, which have keys from the whole range."""
    n, buckets = 40_000, 4
    limits = ThreadLimits(1, 0, n, 1 << 40, 3_000, 1 << 40)
    layout = make_layout(n, {"train": n}, {"train": buckets}, limits, by_key=by_key)
    keys = sort_key(np.arange(n), 5)
    bucket = (keys >> np.uint64(62) if by_key else np.arange(n) % buckets).astype(np.uint32)
    sizes = np.bincount(layout.unit_numbers(np.zeros(n, np.uint8), bucket, keys), minlength=layout.units)
    assert layout.groups["train"].parts > 3
    assert len(sizes) == layout.units
    assert sizes.max() <= limits.sort_rows
    assert sizes.min() > 0.8 * sizes.max()


@given(LAYOUTS)
def test_layouts_survive_the_round_trip_through_json(layout: ShuffleLayout) -> None:
    assert layout.parse_recorded(json.loads(json.dumps(layout.to_json())), "shuffle.json") == layout


def test_the_lowest_and_highest_keys_have_units() -> None:
    keys = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1]
    for buckets in (1, 2, 3, 7, 100):
        for sort_rows in (1, 2, 20, 100):
            limits = ThreadLimits(1, 0, 6, 1 << 40, sort_rows, 1 << 40)
            layout = make_layout(6, {"val": 6}, {"val": buckets}, limits)
            bucket = [next(i for i in reversed(range(buckets)) if (i << 64) // buckets <= k) for k in keys]
            unit = layout.unit_numbers(
                np.ones(6, np.uint8), np.array(bucket, np.uint32), np.array(keys, np.uint64)
            )
            assert (np.diff(unit.astype(int)) >= 0).all()
            assert unit.max() < layout.units


def test_small_buckets_share_a_unit_and_large_ones_have_several() -> None:
    limits = make_limits(ShuffleOptions(threads=2), 10**8, NARROW, NARROW)
    small = make_layout(10**6, {"train": 10**6}, {"train": 10_000}, limits).groups["train"]
    large = make_layout(10**8, {"train": 10**8}, {"train": 2}, limits).groups["train"]
    assert (small.parts, large.group) == (1, 1)
    assert small.group > 100
    assert large.parts > 20


def test_a_small_store_has_work_for_every_thread() -> None:
    rows = {"train": 10**6}
    for threads in (1, 2, 8):
        _, layout = planned(ShuffleOptions(threads=threads, memory=10**10), rows)
        assert len(layout.slices) >= 2 * threads


def planned_on(positions: int, machines: Machines, memory: int) -> tuple[ThreadLimits, ShuffleLayout]:
    """Return the limits and layout of a store with nine tenths in train, the default of ``convert``."""
    held_out = positions // 20
    rows = {"train": positions - 2 * held_out, "val": held_out, "test": held_out}
    options = ShuffleOptions(memory=memory)
    limits = make_limits(options, positions, NARROW, NARROW, machines)
    counts = bucket_counts(options, rows)
    return limits, make_layout(positions, rows, counts, limits, machines=machines.count)


def piece_rows(layout: ShuffleLayout) -> float:
    """Return the mean number of rows per piece. Each slice has a piece of each unit."""
    return layout.positions / len(layout.slices) / layout.units


@pytest.mark.parametrize("positions", [10**9, 10**10, 10**11])
def test_pieces_stay_large_in_large_stores(positions: int) -> None:
    """With 4 GB per thread. Small pieces would be slow: a piece costs as much as hundreds of rows."""
    _, layout = planned_on(positions, Machines(16, 16, separate=True), 64 * 10**9)
    assert piece_rows(layout) > 800


def test_a_thousand_machines_have_work_for_every_core() -> None:
    """With many cores, their number determines the number of slices and units, and thus the piece size."""
    machines = Machines(1_000, 16, separate=True)
    limits, layout = planned_on(10**11, machines, 64 * 10**9)
    at_work = machines.count * limits.threads
    assert at_work <= len(layout.slices) < 1.2 * at_work
    assert at_work <= len(layout.jobs) < 1.3 * at_work
    assert piece_rows(layout) > 300
    assert sum(part.stop - part.start for part in layout.slices) == 10**11
    assert [unit for job in layout.jobs for unit in job.units] == list(range(layout.units))


def test_small_splits_have_the_same_number_of_buckets_per_unit() -> None:
    _, layout = planned_on(10**11, Machines(100, 16, separate=True), 64 * 10**9)
    assert {grouping.group for grouping in layout.groups.values()} == {layout.groups["train"].group}
    assert layout.groups["train"].group > 1


def test_rows_joined_in_memory_stay_below_two_gibibytes() -> None:
    """Arrow cannot join larger texts, with any amount of memory."""
    limits = make_limits(ShuffleOptions(memory=10**12, threads=1), 10**12, NARROW, NARROW)
    for may in (limits.may_scatter, limits.may_sort):
        assert may(1, (1 << 31) - 100)
        assert not may(1, 1 << 31)


def test_fewer_wide_rows_are_loaded_at_a_time() -> None:
    wide = make_limits(ShuffleOptions(memory=2 * 10**9), 10**8, DENSE, DENSE)
    narrow = make_limits(ShuffleOptions(memory=2 * 10**9), 10**8, NARROW, NARROW)
    assert wide.sort_rows < narrow.sort_rows / 4
    assert wide.chunk_rows < narrow.chunk_rows / 4
    assert wide.threads <= narrow.threads


def test_rows_too_wide_for_the_memory_are_refused() -> None:
    with pytest.raises(BudgetError, match=r"found 450 MB; expected at least \d+ MB.*--memory"):
        make_limits(ShuffleOptions(memory=450_000_000), 10**6, DENSE, DENSE)
    assert make_limits(ShuffleOptions(memory=450_000_000), 900, DENSE, DENSE).threads
    with pytest.raises(BudgetError, match="too little memory"):
        make_limits(ShuffleOptions(memory=420_000_000), 10**6, NARROW, DENSE)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"buckets": 0}, ConfigError, "buckets"),
        ({"buckets": 100_001}, ConfigError, "buckets"),
        ({"threads": 0}, ConfigError, "threads"),
        ({"memory": MINIMUM_MEMORY - 1}, BudgetError, "memory"),
        ({"assign": "group"}, ConfigError, "assign"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ShuffleOptions(**options)
