"""Moments of a uniform order: formulas compared with all orders of a few rows and with seeded orders."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.quality.theory import (
    DEVIATIONS,
    TAIL,
    Kernel,
    Moments,
    Slots,
    batch_slots,
    expected_games,
    lag_slots,
    moments,
    possible_share,
    product_kernel,
    same_game_kernel,
    tail_bound,
    total,
)

Pairs = list[tuple[int, int]]


def lag_pairs(runs, lag) -> Pairs:
    """Return all pairs of indices."""
    return [(p, p + lag) for start, stop in runs for p in range(start, stop - lag)]


def batch_pairs(runs, size) -> Pairs:
    return [
        (p, q)
        for start, stop in runs
        for p, q in combinations(range(start, stop), 2)
        if p // size == q // size
    ]


def touching(pairs: Pairs) -> int:
    degrees = Counter(place for pair in pairs for place in pair)
    return sum(d * (d - 1) for d in degrees.values())


RUNS = st.lists(st.integers(0, 9), min_size=2, max_size=8).map(
    lambda steps: [(a, b) for a, b in zip(*[iter(np.cumsum(steps).tolist())] * 2, strict=False)]
)


@given(RUNS, st.integers(1, 12))
def test_slots_count_the_listed_pairs(runs, n):
    for found, listed in (
        (lag_slots(runs, n), lag_pairs(runs, n)),
        (batch_slots(runs, n), batch_pairs(runs, n)),
    ):
        assert (found.pairs, found.touching) == (len(listed), touching(listed))


def kernel_of_games(games) -> Kernel:
    sizes = Counter(games).values()
    return same_game_kernel(
        len(games), sum(n * (n - 1) for n in sizes), sum(n * (n - 1) * (n - 2) for n in sizes)
    )


def kernel_of_values(values) -> Kernel:
    centred = np.asarray(values) - np.mean(values)
    return product_kernel(len(values), *(float(np.sum(centred**k)) for k in (2, 3, 4)))


SLOTS = {
    "a batch and a rest": (lambda n: lag_or_batch(batch_slots, n, 4), lambda n: batch_pairs([(0, n)], 4)),
    "small batches": (lambda n: lag_or_batch(batch_slots, n, 2), lambda n: batch_pairs([(0, n)], 2)),
    "neighbours": (lambda n: lag_or_batch(lag_slots, n, 1), lambda n: lag_pairs([(0, n)], 1)),
    "lag 2": (lambda n: lag_or_batch(lag_slots, n, 2), lambda n: lag_pairs([(0, n)], 2)),
}


def lag_or_batch(slots, n, size):
    return slots([(0, n)], size)


@pytest.mark.parametrize("case", SLOTS)
@pytest.mark.parametrize("games", ["AAABBC", "ABCDEF", "AAAAAA", "AABBCC", "AAAB", "AB", "AAB"])
def test_moments_of_pairs_equal_those_over_all_orders(case, games):
    formula, listed = SLOTS[case]
    pairs = listed(len(games))
    counts = [sum(order[p] == order[q] for p, q in pairs) for order in permutations(games)]
    mean = Fraction(sum(counts), len(counts))
    variance = Fraction(sum(c * c for c in counts), len(counts)) - mean * mean
    found = moments(formula(len(games)), kernel_of_games(games))
    assert (found.mean, found.variance) == (float(mean), float(variance))


@pytest.mark.parametrize("case", SLOTS)
@pytest.mark.parametrize("values", [(0, 0, 1, 1, 1, 0.25), (1, 0, 0, 0, 0, 0), (0.5, 2, -1), (0, 1)])
def test_moments_of_products_equal_those_over_all_orders(case, values):
    formula, listed = SLOTS[case]
    pairs = listed(len(values))
    orders = np.array(list(permutations(values))) - np.mean(values)
    sums = sum((orders[:, p] * orders[:, q] for p, q in pairs), np.zeros(len(orders)))
    found = moments(formula(len(values)), kernel_of_values(values))
    assert found.mean == pytest.approx(sums.mean(), abs=1e-12)
    assert found.variance == pytest.approx(sums.var(), abs=1e-12)


SEEDS = 400


def seeded_counts(games, values, batch, lag):
    """Yield two counts of pairs and a sum of products for each of ``SEEDS`` orders, by direct counting."""
    rng = np.random.default_rng(5)
    centred = values - values.mean()
    for _ in range(SEEDS):
        order = rng.permutation(len(games))
        g, v = games[order], centred[order]
        in_batch = sum(
            n * (n - 1) // 2
            for start in range(0, len(g), batch)
            for n in Counter(g[start : start + batch].tolist()).values()
        )
        yield in_batch, int((g[lag:] == g[:-lag]).sum()), float((v[lag:] * v[:-lag]).sum())


@pytest.mark.parametrize(
    ("sizes", "batch"), [([20] * 50, 100), ([1] * 300 + [7] * 100, 64), ([400, 300, 200, 100], 100)]
)
def test_seeded_orders_have_the_predicted_deviation(sizes, batch):
    """The mean square of z has a standard error of 7 %, so an error of 20 % in the deviation is detected."""
    games = np.repeat(np.arange(len(sizes)), sizes)
    values = (np.arange(len(games)) % 3 == 0).astype(float)
    run = [(0, len(games))]
    chances = (
        moments(batch_slots(run, batch), kernel_of_games(games.tolist())),
        moments(lag_slots(run, 3), kernel_of_games(games.tolist())),
        moments(lag_slots(run, 3), kernel_of_values(values)),
    )
    counts = np.array(list(seeded_counts(games, values, batch, 3)))
    for chance, found in zip(chances, counts.T, strict=True):
        z = (found - chance.mean) / chance.deviation
        assert abs(z.mean()) < 4 / math.sqrt(SEEDS)
        assert 0.8 < z.std() < 1.2
        assert -DEVIATIONS < z.min() < z.max() < chance.bound


def test_total_adds_independent_moments():
    one = Moments(3.0, 4.0, 1.0)
    assert total([one, one]) == Moments(6.0, 8.0, 2.0)
    assert total([one, one]).deviation == pytest.approx(math.sqrt(8))
    assert total([]) == Moments(0.0, 0.0, 0.0)


def test_constant_statistics_have_no_bound():
    everything = moments(Slots(6, 24, 4), same_game_kernel(4, 12, 24))  # one game: all pairs belong to it
    assert (everything.mean, everything.deviation, everything.bound) == (6, 0.0, None)
    one_batch = moments(batch_slots([(0, 7)], 7), kernel_of_games("AAABBBC"))  # independent of the order
    assert (one_batch.mean, one_batch.deviation) == (6, 0.0)


# Bounds


def poisson_beyond(mean: float, count: float) -> float:
    """Return the probability of more than ``count`` events."""
    below = sum(
        math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(math.floor(count) + 1)
    )
    upper = range(math.floor(count) + 1, math.floor(count) + 200)
    beyond = sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in upper)
    assert below + beyond == pytest.approx(1)
    return beyond


@pytest.mark.parametrize("mean", [0.1, 0.5, 1, 3, 10, 50, 300, 2000])
def test_the_bound_of_a_count_has_the_tail_of_five_deviations(mean):
    bound = tail_bound(1 / math.sqrt(mean))
    assert poisson_beyond(mean, mean + bound * math.sqrt(mean)) < 1.05 * TAIL
    assert bound < 2 * DEVIATIONS or mean < 1
    if mean >= 10:
        assert poisson_beyond(mean, mean + (bound - 1) * math.sqrt(mean)) > TAIL


def test_the_bound_is_five_without_skewness_and_none_for_rare_events():
    assert pytest.approx(2.866516e-7) == TAIL
    assert tail_bound(0.0) == DEVIATIONS
    assert tail_bound(0.001) == pytest.approx(DEVIATIONS, abs=0.01)
    assert tail_bound(5.0) is None
    # A sum of squares of normal deviates: the chi-square with two degrees of freedom is exponential.
    assert tail_bound(2.0) == pytest.approx(-math.log(TAIL) - 1, rel=0.15)


def hypergeometric_beyond(rows: int, game: int, bucket: int, count: int) -> float:
    """Return the probability that more than ``count`` rows of a game are in a bucket."""
    every = math.comb(rows, game)
    return (
        sum(math.comb(bucket, k) * math.comb(rows - bucket, game - k) for k in range(count + 1, game + 1))
        / every
    )


@pytest.mark.parametrize(
    ("sizes", "buckets"), [({20: 100}, 4), ({5: 40, 30: 10}, 3), ({1: 500}, 5), ({60: 200}, 6)]
)
def test_possible_share_is_exceeded_rarely(sizes, buckets):
    rows = sum(n * games for n, games in sizes.items())
    bucket = rows // buckets
    share = possible_share(sizes, rows, bucket, buckets, 0.02)

    def chance(share):
        count = math.floor(share * bucket + 1e-9)
        return sum(
            buckets * games * hypergeometric_beyond(rows, n, bucket, count) for n, games in sizes.items()
        )

    assert chance(share) <= TAIL
    assert share >= 0.02
    assert share == 0.02 or chance(share / 2) > TAIL


def test_two_per_cent_needs_many_games():
    assert possible_share({60: 2000}, 120_000, 12_000, 10, 0.02) == 0.02
    assert possible_share({60: 20}, 1_200, 300, 4, 0.02) > 0.05
    assert possible_share({1: 1_200}, 1_200, 30, 40, 0.02) == pytest.approx(1 / 30, abs=1e-4)


def test_expected_games_follow_the_hypergeometric_distribution():
    sizes, rows = {1: 5, 4: 10, 9: 3}, 72
    for bucket in (1, 18, 60, 72):
        exact = sum(
            games * (1 - math.comb(rows - n, bucket) / math.comb(rows, bucket)) for n, games in sizes.items()
        )
        assert expected_games(sizes, rows, [bucket]) == pytest.approx(exact)
    one, other = (expected_games(sizes, rows, [bucket]) for bucket in (10, 30))
    assert expected_games(sizes, rows, [10, 30, 30]) == pytest.approx((one + 2 * other) / 3)
