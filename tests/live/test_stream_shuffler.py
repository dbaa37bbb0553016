"""Tests of draws from a moving range: a simple model, uniformity, resuming, and bounded memory."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hexdata.errors import ConfigError
from hexdata.live.stream_shuffler import StreamShuffler


class MovingRange(RuleBasedStateMachine):
    """Compares the shuffler with a set of the numbers that the current pass has not drawn."""

    @initialize(seed=st.integers(0, 3), lower=st.integers(0, 5))
    def begin(self, seed: int, lower: int) -> None:
        self.seed = seed
        self.shuffler = StreamShuffler(seed, lower)
        self.lower = self.upper = lower
        self.left: set[int] = set()
        self.passes = self.draws = 0

    def end_pass(self) -> None:
        if not self.left and self.lower < self.upper:
            self.passes += 1
            self.left = set(range(self.lower, self.upper))

    @rule(more=st.integers(0, 40))
    def extend(self, more: int) -> None:
        self.shuffler.extend(self.upper + more)
        self.left |= set(range(self.upper, self.upper + more))
        self.upper += more

    @rule(share=st.floats(0, 1))
    def cut(self, share: float) -> None:
        self.lower += int(share * (self.upper - self.lower))
        self.shuffler.cut(self.lower)
        self.left -= set(range(self.lower))
        self.end_pass()

    @rule(count=st.integers(0, 30))
    def draw(self, count: int) -> None:
        before = len(self.left)
        drawn = self.shuffler.draw(count).tolist()
        assert len(drawn) == len(set(drawn)) == min(count, before)
        assert set(drawn) <= self.left
        self.left -= set(drawn)
        self.draws += len(drawn)
        if drawn:
            self.end_pass()

    @rule()
    def resume(self) -> None:
        state = pickle.loads(pickle.dumps(self.shuffler.state()))
        self.shuffler = StreamShuffler(self.seed)
        self.shuffler.load_state(state)

    @invariant()
    def agrees(self) -> None:
        shuffler = self.shuffler
        assert (shuffler.lower, shuffler.upper, len(shuffler)) == (
            self.lower,
            self.upper,
            self.upper - self.lower,
        )
        assert (shuffler.left, shuffler.passes, shuffler.draws) == (len(self.left), self.passes, self.draws)


TestMovingRange = MovingRange.TestCase
TestMovingRange.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def moved(seed: int = 1) -> StreamShuffler:
    shuffler = StreamShuffler(seed)
    shuffler.extend(100)
    shuffler.draw(30)
    shuffler.cut(20)
    shuffler.extend(130)
    return shuffler


@pytest.mark.parametrize("after", range(0, 200, 23))
def test_a_resumed_shuffler_continues_the_same_draws(after: int) -> None:
    one = moved()
    one.draw(after)
    other = StreamShuffler(1)
    other.load_state(one.state())
    for upper in (140, 170, 200):
        for shuffler in (one, other):
            shuffler.extend(upper)
            shuffler.cut(upper - 110)
        assert [one.draw(k).tolist() for k in (1, 7, 64, 64)] == [
            other.draw(k).tolist() for k in (1, 7, 64, 64)
        ]


def test_reading_the_state_changes_nothing() -> None:
    one, other = moved(), moved()
    one.state()
    assert one.draw(50).tolist() == other.draw(50).tolist()


def test_the_draws_depend_on_the_seed() -> None:
    # Pinned: another order would change how earlier states and runs continue.
    shuffler = StreamShuffler(42)
    shuffler.extend(10)
    assert shuffler.draw(10).tolist() == PINNED
    assert moved(1).draw(20).tolist() == moved(1).draw(20).tolist() != moved(2).draw(20).tolist()


PINNED = [9, 1, 5, 6, 2, 4, 7, 8, 0, 3]


def chi_square(counts: np.ndarray[Any, Any], expected: float) -> float:
    """Return by how many standard deviations chi-square exceeds its mean, for equally likely outcomes."""
    freedom = counts.size - 1
    return float(((counts - expected) ** 2).sum() / expected - freedom) / np.sqrt(2 * freedom)


def test_each_number_is_equally_likely_at_each_step_of_a_pass() -> None:
    size, rounds = 20, 4000
    shuffler = StreamShuffler(7)
    shuffler.extend(size)
    counts = np.zeros((size, size))
    for _ in range(rounds):
        counts[np.arange(size), np.concatenate([shuffler.draw(7), shuffler.draw(7), shuffler.draw(7)])] += 1
    assert shuffler.passes == rounds
    assert chi_square(counts, rounds / size) < 6


def test_new_numbers_are_as_likely_as_older_ones() -> None:
    rounds = 6000
    counts = np.zeros(30)
    for seed in range(rounds):
        shuffler = StreamShuffler(seed)
        shuffler.extend(20)
        shuffler.draw(12)
        left = np.flatnonzero(np.unpackbits(np.frombuffer(shuffler.state()["undrawn"], np.uint8)))
        shuffler.extend(30)
        step = np.searchsorted(np.append(left, np.arange(20, 30)), shuffler.draw(1)[0])
        counts[step] += 1
    assert counts[18:].sum() == 0
    assert chi_square(counts[:18], rounds / 18) < 6


def test_memory_and_states_are_proportional_to_the_range() -> None:
    shuffler = StreamShuffler(1)
    sizes = []
    for upper in range(1000, 200_000, 100):
        shuffler.extend(upper)
        shuffler.cut(upper - 1000)
        shuffler.draw(64)
        sizes.append(shuffler._undrawn.nbytes)
    assert max(sizes) <= 2 * 1100
    assert len(shuffler.state()["undrawn"]) == 1000 // 8


def test_an_empty_range_draws_nothing() -> None:
    shuffler = StreamShuffler(1, 5)
    assert shuffler.draw(3).tolist() == []
    shuffler.cut(5)
    assert (shuffler.passes, shuffler.draws) == (0, 0)


def test_the_range_only_moves_up() -> None:
    shuffler = moved()
    for wrong in (lambda: shuffler.extend(129), lambda: shuffler.cut(19), lambda: shuffler.cut(131)):
        with pytest.raises(ValueError, match="range"):
            wrong()
    with pytest.raises(ConfigError):
        StreamShuffler("1")  # type: ignore[arg-type]
