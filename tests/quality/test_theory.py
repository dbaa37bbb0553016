"""Moments of a uniform order: formulas compared with all orders of a few rows and with seeded orders."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import accumulate, combinations, permutations

import numpy as np
import pytest

from hexdata.quality.theory import (
    DEVIATIONS,
    TAIL,
    Kernel,
    batch_slots,
    lag_slots,
    moments,
    product_kernel,
    same_game_kernel,
    tail_bound,
)

Pairs = list[tuple[int, int]]


def lag_pairs(runs, lag) -> Pairs:
    """Return all pairs of indices."""
    firsts = accumulate(runs, initial=0)
    return [
        (p, p + lag) for first, n in zip(firsts, runs, strict=False) for p in range(first, first + n - lag)
    ]


def batch_pairs(runs, size) -> Pairs:
    firsts = accumulate(runs, initial=0)
    return [
        (first + p, first + q)
        for first, n in zip(firsts, runs, strict=False)
        for p, q in combinations(range(n), 2)
        if p // size == q // size
    ]


def kernel_of_games(games) -> Kernel:
    sizes = Counter(games).values()
    return same_game_kernel(
        len(games), sum(n * (n - 1) for n in sizes), sum(n * (n - 1) * (n - 2) for n in sizes)
    )


def kernel_of_values(values) -> Kernel:
    centred = np.asarray(values) - np.mean(values)
    return product_kernel(len(values), *(float(np.sum(centred**k)) for k in (2, 3, 4)))


SLOTS = {
    "a batch and a rest": (lambda n: batch_slots([n], 4), lambda n: batch_pairs([n], 4)),
    "small batches": (lambda n: batch_slots([n], 2), lambda n: batch_pairs([n], 2)),
    "lag 2": (lambda n: lag_slots([n], 2), lambda n: lag_pairs([n], 2)),
    "batches of two runs": (lambda n: batch_slots([2, n - 2], 2), lambda n: batch_pairs([2, n - 2], 2)),
}


@pytest.mark.parametrize("case", SLOTS)
@pytest.mark.parametrize("games", ["AAABBC", "ABCDEF", "AAAAAA", "AABBCC", "AAAB", "AB", "AAB"])
def test_moments_of_pairs_equal_those_over_all_orders(case, games):
    formula, listed = SLOTS[case]
    pairs = listed(len(games))
    counts = [sum(order[p] == order[q] for p, q in pairs) for order in permutations(games)]
    mean = Fraction(sum(counts), len(counts))
    variance = Fraction(sum(c * c for c in counts), len(counts)) - mean * mean
    found = moments([(formula(len(games)), kernel_of_games(games))])
    assert (found.mean, found.variance) == (float(mean), float(variance))


@pytest.mark.parametrize("case", SLOTS)
@pytest.mark.parametrize("values", [(0, 0, 1, 1, 1, 0.25), (1, 0, 0, 0, 0, 0), (0.5, 2, -1), (0, 1)])
def test_moments_of_products_equal_those_over_all_orders(case, values):
    formula, listed = SLOTS[case]
    pairs = listed(len(values))
    orders = np.array(list(permutations(values))) - np.mean(values)
    sums = sum((orders[:, p] * orders[:, q] for p, q in pairs), np.zeros(len(orders)))
    found = moments([(formula(len(values)), kernel_of_values(values))])
    assert found.mean == pytest.approx(sums.mean(), abs=1e-12)
    assert found.variance == pytest.approx(sums.var(), abs=1e-12)


# --- bounds ---------------------------------------------------------------------------------------------


def poisson_beyond(mean: float, count: float) -> float:
    """Return the probability of more than ``count`` events."""
    numbers = range(math.floor(count) + 1, math.floor(count) + 200)
    return sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in numbers)


@pytest.mark.parametrize("mean", [0.1, 1, 3, 10, 300])
def test_the_bound_of_a_count_has_the_tail_of_five_deviations(mean):
    bound = tail_bound(1 / math.sqrt(mean))
    assert poisson_beyond(mean, mean + bound * math.sqrt(mean)) < 1.05 * TAIL
    assert bound < 2 * DEVIATIONS or mean < 1
    if mean >= 10:
        assert poisson_beyond(mean, mean + (bound - 1) * math.sqrt(mean)) > TAIL
