"""Order statistics compared with sorting, and segments compared with a search."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.selection import ranks
from hexdata.selection.ranks import cell_shifts, keys_at_ranks, segments

WORD = (1 << 64) - 1
SPREADS = {"uniform": 64, "dense at the low end": 20, "dense": 0}


@pytest.fixture(scope="module", autouse=True)
def small_cells():
    """Use many histogram cells for small groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "CELL_ROWS", 4)
        patch.setattr(ranks, "_BATCH_ROWS", 3)
        yield


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.sampled_from(sorted(SPREADS)), st.data())
def test_keys_at_are_those_of_a_sort(con, sizes, spread, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    bits = SPREADS[spread]
    groups = [
        rng.choice(1 << 16, size, replace=False).astype(np.uint64) << np.uint64(bits - 16)
        if bits >= 16
        else np.arange(size, dtype=np.uint64)
        for size in sizes
    ]
    wanted = [
        np.array(sorted(data.draw(st.sets(st.integers(0, size - 1), max_size=8))), np.int64) for size in sizes
    ]
    shifts = cell_shifts(np.array(sizes), 64)
    number = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    order = rng.permutation(len(number))
    rows = pa.table(
        {"number": number[order], "key": np.concatenate(groups)[order], "shift": shifts[number][order]}
    )
    con.register("keyed_rows", rows)
    found = keys_at_ranks(con, "SELECT * FROM keyed_rows", wanted)
    con.unregister("keyed_rows")
    for group, ask, keys in zip(groups, wanted, found, strict=True):
        assert keys.tolist() == np.sort(group)[ask].tolist()


def test_large_groups_have_more_cells_within_the_total():
    sizes = np.array([1, 4, 5, 1000, 1 << 20])
    cells = 1 << (64 - cell_shifts(sizes, 64).astype(int))
    assert cells.tolist() == [2, 2, 2, 256, 1 << 18]
    many = np.full(10_000, 10_000)
    assert (1 << (64 - cell_shifts(many, 64).astype(int))).sum() <= 4 * ranks.MAX_CELLS
    assert cell_shifts(np.array([1 << 40]), 5).tolist() == [0]


@given(st.sets(st.integers(1, WORD), max_size=20), st.integers(58, 63), st.data())
def test_each_key_is_in_one_segment_of_its_range(lows, shift, data):
    starts = np.array([0, *sorted(lows)], dtype=np.uint64)
    cell, low, high, which = segments(starts, WORD, shift)
    near = [int(s) + d for s in starts for d in (-1, 0, 1) if 0 <= int(s) + d <= WORD]
    for key in [*near, WORD, *data.draw(st.lists(st.integers(0, WORD), max_size=5))]:
        key = np.uint64(key)
        (found,) = np.flatnonzero((cell == key >> np.uint64(shift)) & (low <= key) & (key <= high))
        assert which[found] == np.searchsorted(starts, key, side="right") - 1
    assert len(cell) <= len(starts) + (1 << (64 - shift))
