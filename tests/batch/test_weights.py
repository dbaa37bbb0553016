"""Value weights by tier: frequency and dependence on (seed, epoch, position)."""

from __future__ import annotations

import numpy as np
import pytest

from hexdata.batch.weights import draw_value_weights
from hexdata.order import derive_key, sort_key
from hexdata.schema import NO_TIER

TIERS = (1.0, 0.8, 0.4, 0.1)


def test_the_draws_are_pinned() -> None:
    """If these literals change, runs with tiers cannot be repeated, and ORDER_VERSION must be increased."""
    weights = draw_value_weights(np.arange(16), np.arange(16) % 4, TIERS, 1, 2)
    assert weights.tolist() == [1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 0]
    assert weights.dtype == np.float32
    assert derive_key(1, "value", 2) == 0xBBEF9A803125882B


def test_the_draws_are_as_documented() -> None:
    ids = np.array([0, 5, 2**40, 7, 9, 11], np.int64)
    tiers = np.array([0, 1, 2, 3, 2, 1], np.uint8)
    keys = [int(key) for key in sort_key(ids, derive_key(7, "value", 3))]
    expected = [float(key / 2**64 < TIERS[tier]) for key, tier in zip(keys, tiers, strict=True)]
    assert draw_value_weights(ids, tiers, TIERS, 7, 3).tolist() == expected


def test_the_frequency_equals_the_probability_of_the_tier() -> None:
    size = 40_000
    ids = np.arange(4 * size)
    tiers = np.repeat(np.arange(4, dtype=np.uint8), size)
    first, second = (draw_value_weights(ids, tiers, TIERS, 42, epoch) for epoch in (0, 1))
    for tier, probability in enumerate(TIERS):
        selected = tiers == tier
        for weights, expected in ((first, probability), (first * second, probability**2)):
            deviation = np.sqrt(size * expected * (1 - expected))
            assert abs(weights[selected].sum(dtype=np.float64) - size * expected) <= 5 * deviation
    assert set(np.unique(first).tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_never_and_always_are_exact(probability: float) -> None:
    ids = np.arange(100_000)
    weights = draw_value_weights(ids, np.zeros(len(ids), np.uint8), (probability,) * 4, 3, 0)
    assert (weights == probability).all()


def test_a_draw_must_fall_below_the_probability() -> None:
    key = derive_key(7, "value", 3)
    for identity in range(20):
        draw = int(sort_key([identity], key)[0] >> np.uint64(11)) / 2**53
        for limit, weight in ((draw, 0.0), (np.nextafter(draw, 1), 1.0)):
            weights = draw_value_weights(np.array([identity]), np.zeros(1, np.uint8), (limit,) * 4, 7, 3)
            assert weights.tolist() == [weight]


def test_an_unknown_tier_always_has_weight() -> None:
    tiers = np.full(1_000, NO_TIER, np.uint8)
    assert draw_value_weights(np.arange(1_000), tiers, (0, 0, 0, 0), 1, 0).all()


def test_an_empty_batch_has_no_weights() -> None:
    assert draw_value_weights(np.zeros(0, np.int64), np.zeros(0, np.uint8), TIERS, 1, 0).shape == (0,)
