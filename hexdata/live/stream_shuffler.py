"""Draws from a range of numbers that moves at both ends: each once a pass, in seeded random order.

Knows numbers only, not what they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hexdata.checks import check_seed
from hexdata.order import derive_key, uniform_draw

__all__ = ["StreamShuffler"]

Int64Array = npt.NDArray[np.int64]


class StreamShuffler:
    """Draws numbers of [``lower``, ``upper``) without repetition within a pass.

    Each draw is uniform among the numbers of the range that the present pass has not drawn. Numbers that
    join the range join the present pass; those that leave it are not drawn any more. As soon as nothing is
    left to draw, the pass is over and the next one begins, over the range as it is then.

    What is drawn is a function of the seed, of how many were drawn before, and of which numbers are left, so
    a state is one bit a number. Memory is two bytes a number of the range at most. To draw some takes about a
    nanosecond for each number of the range, and a microsecond for each that is drawn.

    Args:
        seed: any integer.
        lower: where the range begins; it is empty.

    Attributes:
        draws: numbers drawn so far.
        passes: passes that are over.
        left: how many numbers the present pass still has.
    """

    def __init__(self, seed: int, lower: int = 0) -> None:
        self._key = derive_key(check_seed(seed), "live", "draws")
        self.lower = lower
        self.upper = lower
        self.draws = 0
        self.passes = 0
        self.left = 0
        self._base = lower
        """The number that the first entry of ``_undrawn`` is about."""
        self._undrawn: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def __len__(self) -> int:
        return self.upper - self.lower

    def extend(self, upper: int) -> None:
        """Move the upper end of the range: the numbers up to ``upper``, it excluded, join the pass.

        Raises:
            ValueError: that would move it down.
        """
        if upper < self.upper:
            raise ValueError(f"the range ends at {self.upper}; it cannot end at {upper}")
        stop = upper - self._base
        if stop > len(self._undrawn):
            self._make_room(upper)
            stop = upper - self._base
        self._undrawn[self.upper - self._base : stop] = True
        self.left += upper - self.upper
        self.upper = upper

    def cut(self, lower: int) -> None:
        """Move the lower end of the range: the numbers below ``lower`` are not drawn any more.

        Raises:
            ValueError: that would move it down, or past the upper end.
        """
        if not self.lower <= lower <= self.upper:
            raise ValueError(f"the range is [{self.lower}, {self.upper}); it cannot begin at {lower}")
        self.left -= int(np.count_nonzero(self._undrawn[self.lower - self._base : lower - self._base]))
        self.lower = lower
        self._end_pass()

    def draw(self, count: int) -> Int64Array:
        """Draw numbers of the present pass: int64, ``count`` of them, or as many as are left if fewer.

        The numbers of one call stem from one pass. It is never empty unless the range is, or ``count`` is 0.
        """
        left = np.flatnonzero(self._undrawn[self.lower - self._base : self.upper - self._base])
        count = min(count, len(left))
        numbers = left[_distinct_places(len(left), self._next_draws(count))] + self.lower
        self._undrawn[numbers - self._base] = False
        self.left -= count
        if count:
            self._end_pass()
        return numbers

    def _next_draws(self, count: int) -> npt.NDArray[np.float64]:
        draws = uniform_draw(np.arange(self.draws, self.draws + count), self._key)
        self.draws += count
        return draws

    def _end_pass(self) -> None:
        if not self.left and self.lower < self.upper:
            self.passes += 1
            self._undrawn[self.lower - self._base : self.upper - self._base] = True
            self.left = len(self)

    def _make_room(self, upper: int) -> None:
        """Drop what is known of numbers below the range, and make room for as many again as are in it."""
        kept = self._undrawn[self.lower - self._base : self.upper - self._base]
        self._undrawn = np.zeros(2 * (upper - self.lower), np.bool_)
        self._undrawn[: len(kept)] = kept
        self._base = self.lower

    def state(self) -> dict[str, Any]:
        """Return what it needs to go on from here: plain values, one bit a number of the range."""
        undrawn = self._undrawn[self.lower - self._base : self.upper - self._base]
        return {
            "lower": self.lower,
            "upper": self.upper,
            "draws": self.draws,
            "passes": self.passes,
            "undrawn": np.packbits(undrawn).tobytes(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of one with the same seed."""
        self.lower, self.upper = state["lower"], state["upper"]
        self._base = self.lower
        self.draws, self.passes = state["draws"], state["passes"]
        bits = np.frombuffer(state["undrawn"], np.uint8)
        self._undrawn = np.unpackbits(bits, count=len(self)).astype(np.bool_)
        self.left = int(np.count_nonzero(self._undrawn))


def _distinct_places(size: int, draws: npt.NDArray[np.float64]) -> Int64Array:
    """Return distinct places below ``size``, one for each draw in [0, 1), in the order drawn.

    A Fisher-Yates shuffle, broken off; of its array, only the places that differ from their number are held.
    """
    moved: dict[int, int] = {}
    places = np.arange(len(draws))
    chosen = (places + (draws * (size - places)).astype(np.int64)).tolist()
    result = []
    for place, other in enumerate(chosen):
        result.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return np.array(result, dtype=np.int64)
