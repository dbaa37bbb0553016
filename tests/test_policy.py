"""Sparse policies: exact conversion to and from dense ones and Arrow, and refusal of invalid ones."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from hexdata.errors import StoreError
from hexdata.policy import SparsePolicies
from hexdata.schema import POLICY_TYPE

CELLS = 9


def test_policies_survive_bit_for_bit():
    """As sparse policies, and in Arrow columns, also sliced and in chunks."""
    random = np.random.default_rng(0)
    dense = (random.random((6, CELLS)) * (random.random((6, CELLS)) < 0.4)).astype(np.float32)
    dense[2], dense[0, 3] = 0, -0.0
    sparse = SparsePolicies.from_dense(dense)
    assert sparse.to_dense(CELLS).tobytes() == dense.tobytes()
    assert sparse.take(np.array([5, 2, 0])).to_dense(CELLS).tobytes() == dense[[5, 2, 0]].tobytes()
    assert len(SparsePolicies.from_dense(dense[:0])) == 0

    valid = np.array([True, False, True, True, False, True, True, True])
    column = sparse.to_arrow(valid)
    assert (column.type, column.null_count) == (POLICY_TYPE, 2)
    chunks = pa.chunked_array([column.slice(0, 2), column.slice(2)])
    for part, rows, expected in (
        (column, np.flatnonzero(valid), dense),
        (chunks, np.flatnonzero(valid), dense),
        (column.slice(3, 3), [0, 2], dense[2:4]),
    ):
        found, read = SparsePolicies.from_arrow(part, CELLS)
        assert found.tolist() == list(rows)
        assert read.to_dense(CELLS).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ([(9, 0.5)], "from 0 to 8"),
        ([(3, 0.5), (3, 0.5)], "ascending"),
        ([(4, 0.5), (3, 0.5)], "ascending"),
        ([(3, -0.5)], "not negative"),
        ([(3, float("nan"))], "not negative"),
        ([(3, float("inf"))], "not negative"),
        ([(3, None)], "null"),
        ([None], "null"),
    ],
)
def test_an_invalid_policy_is_refused(policy: list[object], expected: str):
    items = [item and {"cell": item[0], "probability": item[1]} for item in policy]
    column = pa.array([[{"cell": 0, "probability": 1.0}], None, items], POLICY_TYPE)
    with pytest.raises(StoreError) as error:
        SparsePolicies.from_arrow(column, CELLS)
    assert expected in str(error.value)
