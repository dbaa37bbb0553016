"""Expected spread of games, compared with an enumeration of all orders and with a formula."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.report.spread import LONGEST_GAME, reached_by_chance, spread_of


def test_expected_spread_is_the_mean_over_all_orders() -> None:
    """Games of 3, 2 and 1 positions in three pieces of two: all 720 orders are enumerated."""
    games = "aaabbc"
    found = Counter[int]()
    orders = list(permutations(range(6)))
    for order in orders:
        for game in set(games):
            pieces = {place // 2 for place, position in enumerate(order) if games[position] == game}
            found[len(pieces)] += 1
    expected = reached_by_chance({3: 1, 2: 1, 1: 1}, pieces=3, positions=6)
    assert expected == pytest.approx([found[k] / len(orders) for k in range(4)])


@given(
    sizes=st.dictionaries(st.integers(1, 20), st.integers(1, 9), min_size=1, max_size=3),
    pieces=st.integers(1, 30),
    places=st.integers(1, 30),
)
def test_the_mean_equals_that_of_draws_without_replacement(
    sizes: dict[int, int], pieces: int, places: int
) -> None:
    """A game of n positions misses a piece of m positions with probability C(N - m, n) / C(N, n)."""
    positions = max(pieces * places, sum(n * games for n, games in sizes.items()))
    positions += -positions % pieces
    places = positions // pieces
    chance = reached_by_chance(sizes, pieces=pieces, positions=positions)
    hit = {n: 1 - comb(positions - places, n) / comb(positions, n) for n in sizes}
    mean = sum(games * pieces * hit[n] for n, games in sizes.items())
    assert (chance * np.arange(pieces + 1)).sum() == pytest.approx(mean)
    assert chance.sum() == pytest.approx(sum(sizes.values()))
    assert (chance >= 0).all()


def test_rows_are_gathered() -> None:
    rows = [
        {"pieces": 4, "positions": 3, "before": 1, "after": 2, "games": 5},
        {"pieces": 4, "positions": 3, "before": 1, "after": 3, "games": 1},
        {"pieces": 4, "positions": 2, "before": 2, "after": 2, "games": 4},
        {"pieces": 4, "positions": LONGEST_GAME + 1, "before": 4, "after": 4, "games": 1},
    ]
    spread = spread_of(rows, buckets=4, positions=5000)
    assert spread is not None
    assert (spread.games, spread.pieces, spread.by_bucket) == (10, 4, True)
    assert spread.before == [0, 6, 4, 0, 0]
    assert spread.after == [0, 0, 9, 1, 0]
    assert spread.mean(spread.before) == 1.4
    assert spread.mean(spread.after) == 2.1
    assert sum(spread.chance) == pytest.approx(10)
    fewer = spread_of(rows, buckets=2, positions=5000)
    assert fewer is not None
    assert not fewer.by_bucket


def test_without_games_there_is_no_spread() -> None:
    assert spread_of([], buckets=8, positions=100) is None
