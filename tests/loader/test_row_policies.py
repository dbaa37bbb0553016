"""Tests of the arrays in which games mode holds sparse policies."""

from __future__ import annotations

import numpy as np
import pytest

from hexdata.loader.row_policies import RowPolicies, cell_dtype, count_entries
from hexdata.policy import SparsePolicies
from hexdata.shards.blocks import members_to_policies


def allocate(counts: np.ndarray, cells: int) -> tuple[RowPolicies, dict[str, np.ndarray]]:
    arrays = RowPolicies.allocate(counts.astype(np.uint16), cells, contents=True)
    return RowPolicies(arrays), arrays


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("cells", [9, 256, 257])
def test_any_rows_are_taken(rows: int, cells: int) -> None:
    rng = np.random.default_rng(rows + cells)
    dense = (rng.random((rows, cells)) * (rng.random((rows, cells)) < 0.2)).astype(np.float32)
    with_policy = np.flatnonzero(rng.random(rows) < 0.7)
    dense[with_policy[: len(with_policy) // 5]] = 0  # policies of zeros
    sparse = SparsePolicies.from_dense(dense[with_policy])
    counts = np.zeros(rows, np.int64)
    counts[with_policy] = count_entries(sparse)
    policies, arrays = allocate(counts, cells)
    order = rng.permutation(len(with_policy))
    assert policies.put(with_policy[order], sparse.take(order))
    assert arrays["policy_cell"].dtype == cell_dtype(cells) == (np.uint8 if cells <= 256 else np.uint16)
    expected = RowPolicies.bytes_of(rows, int(counts.sum()), cells, contents=True)
    assert 0 <= expected - sum(array.nbytes for array in arrays.values()) <= 160
    wanted = rng.integers(0, rows, 2 * rows) if rows else np.empty(0, np.int64)
    block = policies.take(wanted)
    has_policy = np.isin(wanted, with_policy)
    assert np.array_equal(block["policy_row"], np.flatnonzero(has_policy))
    taken = members_to_policies(block).to_dense(cells)
    assert taken.tobytes() == dense[wanted[has_policy]].tobytes()
    assert np.array_equal(policies.has_policy(wanted), has_policy)
    assert np.array_equal(
        policies.rows_in(rows // 3, rows), with_policy[with_policy >= rows // 3] - rows // 3
    )
    assert policies.largest == counts.max(initial=0)


def test_dense_policies_on_the_largest_board() -> None:
    """64 policies of 1,024 cells each have more entries than an offset can count."""
    sparse = SparsePolicies.from_dense(np.random.default_rng(1).random((130, 1024), np.float32) + 1)
    policies, arrays = allocate(np.full(130, 1024), 1024)
    assert policies.put(np.arange(130), sparse)
    assert members_to_policies(policies.take(np.arange(130))).to_dense(1024).tobytes() == (
        sparse.to_dense(1024).tobytes()
    )
    assert policies.entries_per_row == 1024
    assert arrays["policy_offset"].max() == 63 * 1024


def test_policies_with_other_numbers_of_entries_are_refused() -> None:
    sparse = SparsePolicies.from_dense(np.eye(9, dtype=np.float32))
    policies, arrays = allocate(np.full(9, 2), 9)
    assert not policies.put(np.arange(9), sparse)
    assert not arrays["policy_probability"].any()
