"""The seeded order: pinned values, bijections and tests of randomness.

Every statistic is expressed in standard deviations (sigmas) of its distribution for a uniformly random
permutation. ``ALARM`` sigmas are exceeded by chance once in 1.7 million draws. The seeds are fixed, so the
results change only with the order, and then the statistics say whether it is still random.
"""

from __future__ import annotations

import math
import tracemalloc

import duckdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata import order
from hexdata.order import Permutation, derive_key, shuffle_indices, sort_key, sort_key_sql
from tests.pairs import FULL

ALARM = 5.0
WORD = (1 << 64) - 1
SHUFFLE = derive_key(42, "shuffle")
EPOCH = derive_key(42, "epoch", 0)
REAL = 97_000_000

words = st.integers(0, WORD)


# Pinned values. A change of any of them gives every user other shards and other epochs from the same seed,
# and breaks the resuming of a run that an older release began: raise ORDER_VERSION and say so in the
# changelog, or take the change back.

KEYS = {
    (0,): 0xDAB4CA03FF756C6B,
    (42, "shuffle"): 0x69E919BF9DECF2C8,
    (42, "epoch", 0): 0x1324F31530E3F0C8,
    (42, "epoch", 1): 0x3DE6F7FB703EBFED,
    (43, "epoch", 0): 0xA8DF510C24E01756,
    (-1, "augment", 3): 0x3BA756A79C9EB5C7,
    (2**80, "épreuve"): 0x067E1D9C42B24545,
}
SORT_KEYS = {
    0: 0x4BEA82D1B81FB6F5,
    1: 0xD005F3E180E9CC60,
    2: 0xAC3D2619B5CFA435,
    42: 0x617DA3C28DD07D1D,
    96_999_999: 0xC61F559DD265B88E,
    2**63: 0xE72BB25F2EC7CDAA,
    2**64 - 1: 0x8CDFE2BCC09F73AC,
}
FIRST_ELEMENTS = {
    10: [4, 3, 1, 2, 9, 6, 7, 8, 0, 5],
    1000: [342, 673, 119, 896, 274, 386, 426, 147],
    65_536: [10862, 64798, 31522, 39100, 57967, 6766, 32276, 56699],
    70_001: [36359, 12250, 67258, 69717, 4021, 39801, 3988, 68578],
    REAL: [44579788, 75546799, 96615579, 92545818, 56629787, 38036979, 95593231, 15293413],
    2**32: [2942979599, 3409973363, 1968294479, 1325696977, 962681630, 4058623257, 4053969618, 2691884681],
    2**40: [436865070191, 203556043106, 853959324854, 144860726232, 267517768630, 554415725075],
}
EPOCHS = [[0, 2, 5, 1, 9, 7, 8, 3, 4, 6], [4, 7, 2, 0, 6, 9, 3, 8, 5, 1], [1, 9, 4, 3, 5, 2, 8, 7, 0, 6]]


def test_keys_and_orders_are_pinned():
    assert {purpose: derive_key(*purpose) for purpose in KEYS} == KEYS
    assert {identity: int(sort_key(np.uint64(identity), SHUFFLE)) for identity in SORT_KEYS} == SORT_KEYS
    for n, first in FIRST_ELEMENTS.items():
        assert Permutation(n, EPOCH).slice(0, len(first)).tolist() == first
    assert [shuffle_indices(range(10), 7, epoch) for epoch in range(3)] == EPOCHS


# Keys.


def test_derive_key_refuses_values_without_a_canonical_text():
    for bad in ((True,), (1.0,), ("42",), (None,), (42, 1.0), (42, False), (42, b"epoch")):
        with pytest.raises(TypeError):
            derive_key(*bad)


# The sort key.


def test_sort_key_keeps_shape_and_input():
    ids = np.arange(12, dtype=np.int64).reshape(3, 4)
    keys = sort_key(ids, SHUFFLE)
    assert keys.dtype == np.uint64
    assert (keys.ravel() == sort_key(range(12), SHUFFLE)).all()
    assert (ids.ravel() == np.arange(12)).all()
    assert sort_key([], SHUFFLE).shape == (0,)


def test_sql_equals_numpy():
    ids = np.random.default_rng(1).integers(0, 1 << 64, size=100_000, dtype=np.uint64)
    ids[:5] = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
    sql = sort_key_sql("id", SHUFFLE)
    with duckdb.connect() as engine:
        engine.register("identities", {"id": ids})
        got = engine.sql(f"SELECT id, {sql} AS key FROM identities ORDER BY key").fetchnumpy()
        with pytest.raises(duckdb.ConversionException):
            engine.sql(f"SELECT {sort_key_sql('-1', SHUFFLE)}").fetchall()
    keys = sort_key(ids, SHUFFLE)
    assert (got["key"] == np.sort(keys)).all()
    assert (got["id"] == ids[np.argsort(keys)]).all()


# The permutation.


@pytest.mark.parametrize(
    "n", [0, 1, 2, 3, 997, 65_535, 65_536, 65_537, 2**17 - 1, 2**17, 2**17 + 1, 2**20 + 7, *[REAL] * FULL]
)
def test_permutation_contains_each_element_once(n):
    elements = Permutation(n, EPOCH).slice(0, n)
    assert elements.dtype == np.int64
    assert (np.sort(elements) == np.arange(n)).all()


@given(st.integers(1, 1 << 62), words, st.data())
def test_permutation_is_the_same_for_every_kind_of_index(n, key, data):
    permutation = Permutation(n, key)
    start = data.draw(st.integers(0, n - 1))
    run = permutation.slice(start, min(n, start + 6))
    assert ((run >= 0) & (run < n)).all()
    assert len(set(run.tolist())) == len(run) == min(6, n - start)
    assert [permutation[start + i] for i in range(len(run))] == run.tolist()
    assert type(permutation[start]) is type(permutation[np.int64(start)]) is int
    places = np.arange(start, start + len(run), dtype=np.uint64)[::-1].reshape(1, -1)
    assert (permutation[places] == run[::-1]).all()
    assert permutation[places].shape == places.shape


@pytest.mark.parametrize("n", [0, 10, 70_001, 2**40])
def test_permutation_refuses_indices_outside_its_range(n):
    permutation = Permutation(n, EPOCH)
    assert len(permutation) == n
    for place in (-1, n, np.array([0, n]), np.array([[-1]])):
        with pytest.raises(IndexError):
            permutation[place]
    assert permutation.slice(n, n).shape == (0,)


@pytest.mark.parametrize(("n", "bound"), [(65_536, 600_000), (REAL, 50_000), (2**62, 50_000)])
def test_permutation_memory_does_not_grow_with_its_length(n, bound):
    tracemalloc.start()
    try:
        permutation = Permutation(n, EPOCH)
        permutation.slice(0, 1000)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < bound


def test_shuffle_indices_keeps_type_and_input():
    names, array = ["a", "b", "c", "d"], np.arange(100, 104, dtype=np.int32)
    places = shuffle_indices(range(4), 1)
    assert shuffle_indices(names, 1) == [names[i] for i in places]
    shuffled = shuffle_indices(array, 1)
    assert (shuffled == array[places]).all()
    assert shuffled.dtype == np.int32
    same = shuffle_indices(array, 1, 3, enabled=False)
    same[0] = 9  # a copy, as the caller may change what it gets
    assert (names, array.tolist()) == (["a", "b", "c", "d"], [100, 101, 102, 103])
    assert shuffle_indices(range(5), 1, 3, enabled=False) == [0, 1, 2, 3, 4]
    assert shuffle_indices([], 1) == []


# Tests of randomness.


def sigmas(counts: np.ndarray) -> float:
    """Return the χ² of the counts against equal cells, in sigmas (Wilson & Hilferty 1931)."""
    expected = counts.sum() / counts.size
    chi2, freedom = ((counts - expected) ** 2 / expected).sum(), counts.size - 1
    return float(((chi2 / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom)))


def cells(values: np.ndarray, n: int, count: int) -> np.ndarray:
    """Divide [0, n) into ``count`` ranges and return the range of each value; n is far above ``count``."""
    return (values.astype(np.float64) * (count / n)).astype(np.int64)


def patterns(n: int, key: int) -> dict[str, float]:
    """Return the statistics beyond ``ALARM``, for strides and lags of powers of two and others."""
    permutation, bits, found = Permutation(n, key), (n - 1).bit_length(), {}
    sample = min(1 << 15, n // 16)  # few of all, or the counts would be evener than chance
    for lag in {1 << k for k in range(bits - 1)} | {3, n // 2, n // 3}:
        start = (n - lag - sample) // 3
        x, y = permutation.slice(start, start + sample), permutation.slice(start + lag, start + lag + sample)
        pairs = cells(x, n, 16) * 16 + cells(y, n, 16)
        found[f"pairs at lag {lag}"] = sigmas(np.bincount(pairs, minlength=256))
        found[f"differences at lag {lag}"] = sigmas(np.bincount(cells((y - x) % n, n, 256), minlength=256))
    for stride in {1 << k for k in range(bits - 11)} | {n // 4096, n // 5000}:
        values = permutation[np.arange(min(sample, n // stride), dtype=np.int64) * stride]
        found[f"elements at stride {stride}"] = sigmas(np.bincount(cells(values, n, 64), minlength=64))
        found[f"low bits at stride {stride}"] = sigmas(np.bincount(values % 64, minlength=64))
    return {name: z for name, z in found.items() if abs(z) > ALARM}


@pytest.mark.parametrize("n", [65_537, 70_001, 2**17 + 1, 2**20 + 1, REAL, 2**32, 2**40])
def test_large_permutation_shows_no_pattern(n):
    assert patterns(n, EPOCH) == {}


def test_the_statistics_detect_a_weak_permutation(monkeypatch):
    monkeypatch.setattr(order, "_ROUNDS", 2)
    assert len(patterns(2**20, EPOCH)) > 10
