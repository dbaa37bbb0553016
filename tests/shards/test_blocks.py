"""Row operations on blocks, compared with the same operations on one policy per position."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.errors import StoreError
from hexdata.shards.blocks import (
    Block,
    block_length,
    block_to_members,
    block_to_policy,
    join_blocks,
    members_to_block,
    row_fields,
    slice_rows,
    take_rows,
)
from tests.shard_folder import CELLS, cut_block, synthetic_policies, synthetic_positions

ROWS = 40
RNG = np.random.default_rng(3)
ARRAYS = synthetic_positions(ROWS, RNG)
POLICIES = synthetic_policies(ROWS, RNG)
BLOCK: Block = ARRAYS | POLICIES
SPARSE: Block = block_to_members(BLOCK)
POLICY = block_to_policy(BLOCK, CELLS)


def check(block: Block, rows: list[int]) -> None:
    """Compare a block with rows of the arrays, and its policies with one policy per position."""
    assert row_fields(block) == sorted(ARRAYS)
    assert block_length(block) == len(rows)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(block[name], array[rows], strict=True)
    np.testing.assert_array_equal(block_to_policy(block, CELLS), POLICY[rows])
    assert ("policy" in block or "policy_cell" in block) == ("policy_row" in block)
    if "policy_row" in block:
        assert block["policy_row"].dtype == np.uint32
        assert (np.diff(block["policy_row"].astype(np.int64)) > 0).all()


@given(st.lists(st.integers(0, ROWS - 1), max_size=60))
def test_rows_are_taken_in_any_order(rows: list[int]) -> None:
    check(take_rows(SPARSE, np.array(rows, np.int64)), rows)
    taken = take_rows(BLOCK, np.array(rows, np.int64))
    check(taken, rows)
    assert ("policy" in taken) == any(row % 3 == 0 for row in rows)
    assert not any(np.shares_memory(array, BLOCK[name]) for name, array in taken.items())


@given(st.integers(0, ROWS), st.integers(0, ROWS))
def test_slices_are_views(first: int, second: int) -> None:
    start, stop = sorted((first, second))
    check(slice_rows(SPARSE, start, stop), list(range(start, stop)))
    part = slice_rows(BLOCK, start, stop)
    check(part, list(range(start, stop)))
    if stop > start:
        assert all(np.shares_memory(part[name], BLOCK[name]) for name in row_fields(part))


@given(st.lists(st.integers(0, ROWS), max_size=6))
def test_joining_slices_restores_the_block(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), ROWS]
    for block in (BLOCK, SPARSE):
        parts = [slice_rows(block, start, stop) for start, stop in itertools.pairwise(ends)]
        check(join_blocks(parts), list(range(ROWS)))


def test_sparse_members_become_the_same_dense_block() -> None:
    dense = members_to_block(SPARSE, CELLS)
    assert dense.keys() == BLOCK.keys()
    assert all(dense[name].tobytes() == BLOCK[name].tobytes() for name in BLOCK)
    assert block_to_members(SPARSE) is SPARSE


def test_joining_keeps_policy_fields_without_policies() -> None:
    """Stream mode joins an empty block with all fields, so that every batch has them."""
    empty = {name: array[:0] for name, array in BLOCK.items()}
    joined = join_blocks([empty, cut_block(ARRAYS, {}, 1, 3)])
    check(joined, [1, 2])
    assert joined["policy"].shape == (0, CELLS)
    assert not np.shares_memory(joined["board"], ARRAYS["board"])


def test_joining_blocks_with_different_fields_raises_an_error() -> None:
    with pytest.raises(StoreError, match="blocks have different fields"):
        join_blocks([BLOCK, {name: array for name, array in BLOCK.items() if name != "value"}])
