"""Sparse policies: exact conversion to and from dense ones and Arrow, and refusal of invalid ones."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from hexdata.errors import StoreError
from hexdata.policy import SparsePolicies
from hexdata.schema import POLICY_TYPE

CELLS = 9


def dense_policies() -> np.ndarray:
    random = np.random.default_rng(0)
    policies = (random.random((6, CELLS)) * (random.random((6, CELLS)) < 0.4)).astype(np.float32)
    policies[2] = 0
    policies[0, 3] = -0.0
    return policies


def test_dense_policies_survive_bit_for_bit():
    dense = dense_policies()
    sparse = SparsePolicies.from_dense(dense)
    assert sparse.to_dense(CELLS).tobytes() == dense.tobytes()
    assert sparse.take(np.array([5, 2, 0])).to_dense(CELLS).tobytes() == dense[[5, 2, 0]].tobytes()
    assert len(SparsePolicies.from_dense(dense[:0])) == 0


def test_arrow_columns_survive_also_sliced_and_in_chunks():
    dense = dense_policies()
    valid = np.array([True, False, True, True, False, True, True, True])
    column = SparsePolicies.from_dense(dense).to_arrow(valid)
    assert column.type == POLICY_TYPE
    assert column.null_count == 2
    rows, read = SparsePolicies.from_arrow(column, CELLS)
    assert rows.tolist() == np.flatnonzero(valid).tolist()
    assert read.to_dense(CELLS).tobytes() == dense.tobytes()
    rows, read = SparsePolicies.from_arrow(column.slice(3, 3), CELLS)
    assert rows.tolist() == [0, 2]
    assert read.to_dense(CELLS).tobytes() == dense[2:4].tobytes()
    chunks = pa.chunked_array([column.slice(0, 2), column.slice(2)])
    assert SparsePolicies.from_arrow(chunks, CELLS)[1].to_dense(CELLS).tobytes() == dense.tobytes()


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
