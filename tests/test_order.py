"""The seeded order: pinned values, bijections and tests of randomness.

Every statistic is expressed in standard deviations (sigmas) of its distribution for a uniformly random
permutation. ``ALARM`` sigmas are exceeded by chance once in 1.7 million draws, so another set of seeds would
fail the two thousand statistics of this file about once in a thousand runs. The seeds are fixed, so the
results never change.
"""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Iterator

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata import order
from hexdata.order import (
    Permutation,
    bucket_bounds,
    derive_key,
    shuffle_indices,
    sort_key,
    sort_key_sql,
    uniform_draw,
)
from tests.pairs import FULL

ALARM = 5.0
WORD = (1 << 64) - 1
SHUFFLE = derive_key(42, "shuffle")
EPOCH = derive_key(42, "epoch", 0)
MILLION = 1_000_000
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


@pytest.mark.parametrize("purpose", KEYS)
def test_derive_key_is_pinned(purpose):
    assert derive_key(*purpose) == KEYS[purpose]


@pytest.mark.parametrize("identity", SORT_KEYS)
def test_sort_key_is_pinned(identity):
    assert int(sort_key(np.uint64(identity), SHUFFLE)) == SORT_KEYS[identity]


@pytest.mark.parametrize("n", FIRST_ELEMENTS)
def test_permutation_is_pinned(n):
    first = FIRST_ELEMENTS[n]
    assert Permutation(n, EPOCH).slice(0, len(first)).tolist() == first


@pytest.mark.parametrize("epoch", range(3))
def test_shuffle_indices_is_pinned(epoch):
    assert shuffle_indices(range(10), 7, epoch) == EPOCHS[epoch]


# Keys.


def test_derive_key_differs_for_equal_sums_and_concatenations():
    purposes = [
        (42, "epoch", 1),
        (43, "epoch", 0),
        (42, "epoch", "1"),
        (42, "epoch1"),
        (42, "epoch", 1, ""),
        (42, 'epoch",1'),
        (42, "epoch,1"),
        (-42, "epoch", 1),
        (42,),
    ]
    assert len({derive_key(*purpose) for purpose in purposes}) == len(purposes)


@pytest.mark.parametrize("bad", [(True,), (1.0,), ("42",), (None,), (42, 1.0), (42, False), (42, b"epoch")])
def test_derive_key_refuses_values_without_a_canonical_text(bad):
    with pytest.raises(TypeError):
        derive_key(*bad)


# The sort key.


def unsort(value: int, key: int) -> int:
    """Undo ``sort_key`` step by step: xorshifts by repeating them, products by the inverse mod 2^64."""

    def unshift(x: int, shift: int) -> int:
        result = x
        for _ in range(64 // shift):
            result = x ^ (result >> shift)
        return result

    keys = order._subkeys(key, len(order.MIX_STEPS) + 1)
    x = unshift(value, order.MIX_LAST_SHIFT)
    for (shift, multiplier), subkey in zip(reversed(order.MIX_STEPS), reversed(keys[1:]), strict=True):
        x = unshift((x ^ subkey) * pow(multiplier, -1, 1 << 64) & WORD, shift)
    return x ^ keys[0]


@given(words, words)
def test_sort_key_can_be_undone(identity, key):
    assert unsort(int(sort_key(np.uint64(identity), key)), key) == identity


def test_sort_key_keeps_shape_and_input():
    ids = np.arange(12, dtype=np.int64).reshape(3, 4)
    keys = sort_key(ids, SHUFFLE)
    assert keys.dtype == np.uint64
    assert (keys.ravel() == sort_key(range(12), SHUFFLE)).all()
    assert (ids.ravel() == np.arange(12)).all()
    assert sort_key([], SHUFFLE).shape == (0,)


def test_sort_key_refuses_floats():
    with pytest.raises(TypeError, match="float64"):
        sort_key([0, 2**64 - 1], SHUFFLE)  # NumPy reads this list as floats


@pytest.fixture(scope="module")
def engine() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(config={"threads": 2}) as connection:
        yield connection


def test_sql_equals_numpy(engine):
    ids = np.random.default_rng(1).integers(0, 1 << 64, size=MILLION, dtype=np.uint64)
    ids[:5] = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
    engine.register("identities", {"id": ids})
    got = engine.sql(f"SELECT id, {sort_key_sql('id', SHUFFLE)} AS key FROM identities").fetchnumpy()
    assert (got["key"] == sort_key(got["id"], SHUFFLE)).all()
    assert (np.sort(got["id"]) == np.sort(ids)).all()


def test_sql_order_is_numpy_order(engine):
    sql = sort_key_sql("range", SHUFFLE)
    got = engine.sql(f"SELECT range AS id FROM range(200000) ORDER BY {sql}").fetchnumpy()["id"]
    assert (got == np.argsort(sort_key(np.arange(200_000), SHUFFLE))).all()


def test_sql_refuses_negative_ids(engine):
    with pytest.raises(duckdb.ConversionException):
        engine.sql(f"SELECT {sort_key_sql('-1', SHUFFLE)}").fetchall()


@pytest.mark.parametrize("buckets", [1, 2, 7, 500, 65_537])
def test_bucket_bounds_are_equal_ranges(buckets):
    bounds = bucket_bounds(buckets)
    widths = {high - low for low, high in itertools.pairwise(bounds)}
    assert (bounds[0], bounds[-1], len(bounds)) == (0, 1 << 64, buckets + 1)
    assert max(widths) - min(widths) <= 1


@pytest.mark.parametrize("buckets", [1, 7, 500])
def test_concatenated_buckets_are_the_global_order(buckets):
    keys = sort_key(np.arange(50_000), SHUFFLE)
    inner = np.array(bucket_bounds(buckets)[1:-1], dtype=np.uint64)
    bucket = np.searchsorted(inner, keys, side="right")
    in_buckets = [np.flatnonzero(bucket == i) for i in range(buckets)]
    read = np.concatenate([members[np.argsort(keys[members])] for members in in_buckets])
    assert (read == np.argsort(keys)).all()


def test_bucket_bounds_needs_a_bucket():
    with pytest.raises(ValueError, match="at least one"):
        bucket_bounds(0)


def test_uniform_draw_stays_below_one(monkeypatch):
    monkeypatch.setattr(order, "sort_key", lambda ids, key: np.array([0, WORD], dtype=np.uint64))
    assert uniform_draw([0, 1], SHUFFLE).tolist() == [0.0, 1 - 2**-53]


# The permutation.


@pytest.mark.parametrize(
    "n",
    [0, 1, 2, 3, 10, 997, 65_535, 65_536, 65_537, 70_001, 2**17 - 1, 2**17, 2**17 + 1, 999_983, 2**20 + 7],
)
def test_permutation_contains_each_element_once(n):
    elements = Permutation(n, EPOCH).slice(0, n)
    assert elements.dtype == np.int64
    assert (np.sort(elements) == np.arange(n)).all()


def test_permutation_of_a_large_dataset_contains_each_element_once():
    size = REAL if FULL else 20 * MILLION
    permutation, seen = Permutation(size, EPOCH), np.zeros(size, dtype=bool)
    for start in range(0, size, MILLION):
        seen[permutation.slice(start, start + MILLION)] = True
    assert seen.all()  # n writes covered n places, so none fell on another


@settings(max_examples=50)
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


@pytest.mark.parametrize("n", [70_001, 2**32, 2**40 + 1])
def test_permutation_equals_its_definition(n):
    """The same rounds in plain Python integers, one index at a time."""
    bits = (n - 1).bit_length()
    modulus = 1 << bits
    subkeys = order._subkeys(EPOCH, 2 * order._ROUNDS)

    def element(x: int) -> int:
        for odd, addend in zip(subkeys[::2], subkeys[1::2], strict=True):
            x = (x * (2 * x + (odd | 1)) + addend) % modulus
            x ^= x >> ((bits + 1) // 2)
        return x if x < n else element(x)

    assert Permutation(n, EPOCH).slice(0, 100).tolist() == [element(place) for place in range(100)]


@pytest.mark.parametrize("n", [0, 10, 70_001, 2**40])
def test_permutation_refuses_indices_outside_its_range(n):
    permutation = Permutation(n, EPOCH)
    assert len(permutation) == n
    for place in (-1, n, np.array([0, n]), np.array([[-1]])):
        with pytest.raises(IndexError):
            permutation[place]
    assert permutation.slice(n, n).shape == (0,)


@pytest.mark.parametrize("n", [10, 70_001])
def test_permutation_refuses_indices_that_are_not_integers(n):
    for place in (0.5, True, np.array([0.0]), np.array([True])):
        with pytest.raises(TypeError, match="integers"):
            Permutation(n, EPOCH)[place]


@pytest.mark.parametrize("n", [-1, (1 << 62) + 1])
def test_permutation_refuses_lengths(n):
    with pytest.raises(ValueError, match=r"2\^62"):
        Permutation(n, EPOCH)


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
    assert (names, array.tolist()) == (["a", "b", "c", "d"], [100, 101, 102, 103])
    assert shuffle_indices([], 1) == []


def test_shuffle_indices_can_be_turned_off():
    array = np.arange(5)
    same = shuffle_indices(array, 1, 3, enabled=False)
    same[0] = 9  # a copy, as the caller may change what it gets
    assert array[0] == 0
    assert shuffle_indices(range(5), 1, 3, enabled=False) == [0, 1, 2, 3, 4]


# Tests of randomness.


def sigmas(counts: np.ndarray, expected: np.ndarray | float | None = None) -> float:
    """Return the χ² of the counts in sigmas (Wilson & Hilferty 1931), against equal cells by default."""
    expected = counts.sum() / counts.size if expected is None else expected
    chi2, freedom = ((counts - expected) ** 2 / expected).sum(), counts.size - 1
    return float(((chi2 / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom)))


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return the correlation of two samples in sigmas."""
    return float(np.corrcoef(x.astype(np.float64), y.astype(np.float64))[0, 1] * math.sqrt(x.size))


def cells(values: np.ndarray, n: int, count: int) -> np.ndarray:
    """Divide [0, n) into ``count`` ranges and return the range of each value; n is far above ``count``."""
    return (values.astype(np.float64) * (count / n)).astype(np.int64)


def together(x: np.ndarray, y: np.ndarray, n: int) -> float:
    """Return the deviation of (x, y) from a uniform distribution over 16 by 16 cells, in sigmas."""
    return sigmas(np.bincount(cells(x, n, 16) * 16 + cells(y, n, 16), minlength=256))


def pattern_statistics(n: int, key: int) -> dict[str, float]:
    """Yield statistics of a permutation for many strides and lags, mainly powers of two and halves."""
    permutation, bits = Permutation(n, key), (n - 1).bit_length()
    sample = min(1 << 15, n // 16)  # few of all, or the counts would be evener than chance
    rng = np.random.default_rng(n)
    found = {}
    for lag in {1 << k for k in range(bits - 1)} | {3, n // 2, n // 3}:
        start = int(rng.integers(0, n - lag - sample + 1))
        x, y = permutation.slice(start, start + sample), permutation.slice(start + lag, start + lag + sample)
        found[f"pairs at lag {lag}"] = together(x, y, n)
        found[f"differences at lag {lag}"] = sigmas(np.bincount(cells((y - x) % n, n, 256), minlength=256))
        found[f"serial correlation at lag {lag}"] = correlation(x, y)
    for stride in {1 << k for k in range(bits - 11)} | {n // 4096, n // 5000}:
        values = permutation[np.arange(min(sample, n // stride), dtype=np.int64) * stride]
        found[f"elements at stride {stride}"] = sigmas(np.bincount(cells(values, n, 64), minlength=64))
        found[f"correlation at stride {stride}"] = correlation(values[:-1], values[1:])
        found[f"low bits at stride {stride}"] = sigmas(np.bincount(values % 64, minlength=64))
    places = np.arange(sample, dtype=np.int64) * n // sample
    found["rank correlation with the input"] = correlation(places, permutation[places])
    found["places with elements"] = together(places, permutation[places], n)
    return found


def loud(statistics: dict[str, float]) -> dict[str, float]:
    return {name: z for name, z in statistics.items() if abs(z) > ALARM}


LARGE = [65_537, 70_001, 2**17, 2**17 + 1, MILLION, 2**20, 2**20 + 1, REAL, 2**27 + 1, 2**32, 2**40]


@pytest.mark.parametrize("n", LARGE)
def test_large_permutation_shows_no_pattern(n):
    assert loud(pattern_statistics(n, EPOCH)) == {}


def test_the_statistics_detect_a_weak_permutation(monkeypatch):
    monkeypatch.setattr(order, "_ROUNDS", 2)
    assert len(loud(pattern_statistics(2**20, EPOCH))) > 20


def test_no_key_is_weak():
    """All differences over half the length are tested for each key, because weak mixing shows there first.

    Rounds that multiply by a keyed odd number and no more leave one key in 250 at 30 to 130 sigmas.
    """
    n = 2**17
    statistics = {}
    for seed in range(250):
        low, high = Permutation(n, derive_key(seed, "weak")).slice(0, n).reshape(2, n // 2)
        statistics[f"difference, seed {seed}"] = sigmas(np.bincount((high - low) % n >> 9, minlength=256))
        statistics[f"xor, seed {seed}"] = sigmas(np.bincount((high ^ low) >> 9, minlength=256))
    assert loud(statistics) == {}
    spread = np.array(list(statistics.values()))
    assert abs(spread.mean()) * math.sqrt(spread.size) < ALARM
    assert abs(spread.std() - 1) < 0.15  # 1 ± 0.03: an excess of loud keys would widen it


@pytest.mark.parametrize("n", [70_001, REAL])
def test_close_keys_give_unrelated_permutations(n):
    places = np.random.default_rng(2).choice(n, 8192, replace=False)
    elements = Permutation(n, EPOCH)[places]
    close = {f"bit {bit}": EPOCH ^ 1 << bit for bit in range(64)}
    close |= {f"epoch {epoch}": derive_key(42, "epoch", epoch) for epoch in range(1, 9)}
    close |= {f"seed {seed}": derive_key(seed, "epoch", 0) for seed in (41, 43, -42)}
    statistics = {}
    for name, key in close.items():
        others = Permutation(n, key)[places]
        statistics[name] = together(elements, others, n)
        statistics[f"{name}, difference"] = sigmas(
            np.bincount(cells((others - elements) % n, n, 256), minlength=256)
        )
    assert loud(statistics) == {}


@pytest.fixture(scope="module")
def small() -> np.ndarray:
    """Permutations of 6 elements under 30,000 seeds, shape (30000, 6)."""
    return np.array([Permutation(6, derive_key(seed, "epoch", 0)).slice(0, 6) for seed in range(30_000)])


def test_small_permutations_are_all_equally_likely(small):
    names = small @ 6 ** np.arange(6)
    _, counts = np.unique(names, return_counts=True)
    assert counts.size == math.factorial(6)
    assert abs(sigmas(counts)) < ALARM


def test_each_element_is_equally_likely_at_each_index(small):
    for place in range(6):
        assert abs(sigmas(np.bincount(small[:, place], minlength=6))) < ALARM


def test_each_ordered_pair_of_neighbours_is_equally_likely(small):
    for place in range(5):
        pairs = np.bincount(small[:, place] * 6 + small[:, place + 1], minlength=36).reshape(6, 6)
        assert not pairs.diagonal().any()
        assert abs(sigmas(pairs[~np.eye(6, dtype=bool)])) < ALARM


def test_sort_keys_fill_buckets_evenly_and_forget_the_input_order():
    ids = np.arange(1 << 17)
    places = np.empty_like(ids)
    statistics = {}
    for seed in range(20):
        keys = sort_key(ids, derive_key(seed, "shuffle"))
        places[np.argsort(keys)] = ids
        statistics[f"buckets, seed {seed}"] = sigmas(np.bincount(keys >> np.uint64(54), minlength=1024))
        statistics[f"low bits, seed {seed}"] = sigmas(np.bincount(keys & np.uint64(1023), minlength=1024))
        statistics[f"rank correlation, seed {seed}"] = correlation(ids, places)
        for lag in (1, 2, 64, 4096, 1 << 16):
            low, high = keys.reshape(-1, 2, lag).transpose(1, 0, 2).reshape(2, -1)
            statistics[f"lag {lag}, seed {seed}"] = sigmas(
                np.bincount((high - low) >> np.uint64(56), minlength=256)
            )
    assert loud(statistics) == {}


def flipped_share(changed: np.ndarray) -> np.ndarray:
    """Return how often each of the 64 bits is set, float64 of shape (64,)."""
    return np.unpackbits(changed.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)


@pytest.mark.parametrize("bit", range(64))
def test_one_bit_changes_half_of_the_sort_key(bit):
    """Dense ids, as a store has them. 20,000 draws: 0.02 are 5.7 sigmas, a false alarm in 80 million."""
    ids = np.arange(MILLION, MILLION + 20_000, dtype=np.uint64)
    keys = sort_key(ids, SHUFFLE)
    other_ids = sort_key(ids ^ np.uint64(1 << bit), SHUFFLE)
    other_key = sort_key(ids, SHUFFLE ^ 1 << bit)
    assert np.abs(flipped_share(keys ^ other_ids) - 0.5).max() < 0.02
    assert np.abs(flipped_share(keys ^ other_key) - 0.5).max() < 0.02
