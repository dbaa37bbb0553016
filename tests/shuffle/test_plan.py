"""The plan of a shuffle: everything covered once, nothing larger than the memory has room for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.errors import BudgetError, ConfigError
from hexdata.order import derive_key
from hexdata.pool import default_workers
from hexdata.shuffle import ShuffleOptions, make_plan
from hexdata.shuffle.plan import MINIMUM_MEMORY

ROWS = st.dictionaries(st.sampled_from(("train", "val", "test")), st.integers(1, 10**9), min_size=1)
OPTIONS = st.builds(
    ShuffleOptions,
    seed=st.integers(),
    buckets=st.none() | st.integers(1, 600),
    memory=st.integers(MINIMUM_MEMORY, 10**11),
    threads=st.none() | st.integers(1, 128),
)


@given(OPTIONS, ROWS)
def test_slices_and_buckets_cover_everything_once(options: ShuffleOptions, rows: dict[str, int]) -> None:
    plan = make_plan(options, 13, rows)
    bounds = [0, *(part.stop for part in plan.slices)]
    assert [part.start for part in plan.slices] == bounds[:-1]
    assert bounds[-1] == sum(rows.values())
    assert len({part.name for part in plan.slices}) == len(plan.slices)
    assert len({bucket.name for bucket in plan.buckets}) == len(plan.buckets)
    for split in rows:
        own = [bucket for bucket in plan.buckets if bucket.split == split]
        assert (own[0].low, own[-1].high) == (0, 1 << 64)
        assert all(left.high == right.low for left, right in pairwise(own))


@given(OPTIONS, ROWS)
def test_nothing_is_sorted_that_does_not_fit(options: ShuffleOptions, rows: dict[str, int]) -> None:
    plan = make_plan(options, 13, rows)
    assert max(part.stop - part.start for part in plan.slices) <= plan.sort_rows
    for split, count in rows.items():
        ranges = plan.ranges(split)
        assert (ranges[0][0], ranges[-1][1]) == (0, 1 << 64)
        assert all(left[1] == right[0] for left, right in pairwise(ranges))
        assert count <= plan.sort_rows * len(ranges) < count + plan.sort_rows
    assert plan.sort_rows * 153 < plan.duckdb_memory < options.memory
    assert 1 <= plan.threads <= (options.threads or default_workers())


@given(st.integers(1, 600), ROWS)
def test_the_largest_split_has_the_buckets_asked_for(buckets: int, rows: dict[str, int]) -> None:
    plan = make_plan(ShuffleOptions(buckets=buckets), 13, rows)
    counts = {split: sum(bucket.split == split for bucket in plan.buckets) for split in rows}
    assert counts[max(rows, key=lambda split: rows[split])] == buckets
    for split, count in counts.items():
        assert (count - 1) * max(rows.values()) < rows[split] * buckets <= count * max(rows.values())


def test_limits_do_not_decide_the_files() -> None:
    rows = {"train": 10_000}
    few, many = (make_plan(ShuffleOptions(seed=3, threads=threads), 13, rows) for threads in (1, 2))
    assert few.identity() == many.identity()
    assert few.identity() != make_plan(ShuffleOptions(seed=4), 13, rows).identity()
    assert few.identity() != make_plan(ShuffleOptions(seed=3, buckets=2), 13, rows).identity()
    assert few.key == derive_key(3, "shuffle")


def test_wide_rows_are_sorted_in_smaller_parts() -> None:
    rows = {"train": 10**7}
    narrow = make_plan(ShuffleOptions(), 13, rows)
    wide = make_plan(ShuffleOptions(), 13, rows, varying_bytes=4 * 169 * 10**7)
    assert len(wide.buckets) > 4 * len(narrow.buckets)
    assert wide.threads <= narrow.threads


def test_rows_too_wide_for_the_memory_are_refused() -> None:
    with pytest.raises(BudgetError, match=r"found 450 MB; expected at least \d+ MB.*--memory"):
        make_plan(ShuffleOptions(memory=450_000_000), 13, {"train": 10}, varying_bytes=4 * 169 * 10)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"buckets": 0}, ConfigError, "buckets"),
        ({"buckets": 100_001}, ConfigError, "buckets"),
        ({"threads": 0}, ConfigError, "threads"),
        ({"memory": MINIMUM_MEMORY - 1}, BudgetError, "memory"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ShuffleOptions(**options)
