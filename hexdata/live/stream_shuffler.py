"""Seeded random draws from a range of numbers whose ends move: each number is drawn once per pass.

The module handles numbers only; callers map them to games.
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

    Each draw is uniform among the numbers of the range that the current pass has not drawn. Numbers that
    enter the range join the current pass; numbers that leave it are not drawn again. When no number is left
    to draw, the pass ends and the next one begins, over the range at that time.

    The result of a draw depends on the seed, on the number of earlier draws, and on the numbers left. A state
    therefore needs one bit per number. Memory is at most two bytes per number of the range. A call takes
    about one nanosecond per number of the range and one microsecond per number drawn.

    Args:
        seed: Any integer.
        lower: Start of the range, which is empty at first. Default 0.

    Attributes:
        lower: Start of the range.
        upper: End of the range, exclusive.
        draws: Numbers drawn so far.
        passes: Completed passes.
        left: Numbers that the current pass has not drawn yet.
    """

    def __init__(self, seed: int, lower: int = 0) -> None:
        self._key = derive_key(check_seed(seed), "live", "draws")
        self.lower = lower
        self.upper = lower
        self.draws = 0
        self.passes = 0
        self.left = 0
        self._base = lower
        """Number that the first entry of ``_undrawn`` represents."""
        self._undrawn: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def __len__(self) -> int:
        return self.upper - self.lower

    def extend(self, upper: int) -> None:
        """Move the end of the range up to ``upper`` (exclusive); the new numbers join the current pass.

        Raises:
            ValueError: ``upper`` is below the current end.
        """
        if upper < self.upper:
            raise ValueError(f"the range ends at {self.upper}; it cannot end at {upper}")
        stop = upper - self._base
        if stop > len(self._undrawn):
            self._reallocate(upper)
            stop = upper - self._base
        self._undrawn[self.upper - self._base : stop] = True
        self.left += upper - self.upper
        self.upper = upper

    def cut(self, lower: int) -> None:
        """Move the start of the range up to ``lower``; the numbers below are not drawn again.

        Raises:
            ValueError: ``lower`` is below the current start or above the end.
        """
        if not self.lower <= lower <= self.upper:
            raise ValueError(f"the range is [{self.lower}, {self.upper}); it cannot begin at {lower}")
        self.left -= int(np.count_nonzero(self._undrawn[self.lower - self._base : lower - self._base]))
        self.lower = lower
        self._end_pass()

    def draw(self, count: int) -> Int64Array:
        """Return up to ``count`` numbers of the current pass, int64 (k,); fewer if the pass has fewer left.

        All numbers of a call are from one pass. The result is empty only if the range is, or ``count`` is 0.
        """
        left = np.flatnonzero(self._undrawn[self.lower - self._base : self.upper - self._base])
        count = min(count, len(left))
        numbers = left[_distinct_indices(len(left), self._next_draws(count))] + self.lower
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

    def _reallocate(self, upper: int) -> None:
        """Remove the entries below the range, and allocate twice the size of the range up to ``upper``."""
        kept = self._undrawn[self.lower - self._base : self.upper - self._base]
        self._undrawn = np.zeros(2 * (upper - self.lower), np.bool_)
        self._undrawn[: len(kept)] = kept
        self._base = self.lower

    def state(self) -> dict[str, Any]:
        """Return the state to continue from: plain values, with one bit per number of the range."""
        undrawn = self._undrawn[self.lower - self._base : self.upper - self._base]
        return {
            "lower": self.lower,
            "upper": self.upper,
            "draws": self.draws,
            "passes": self.passes,
            "undrawn": np.packbits(undrawn).tobytes(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of a shuffler with the same seed."""
        self.lower, self.upper = state["lower"], state["upper"]
        self._base = self.lower
        self.draws, self.passes = state["draws"], state["passes"]
        bits = np.frombuffer(state["undrawn"], np.uint8)
        self._undrawn = np.unpackbits(bits, count=len(self)).astype(np.bool_)
        self.left = int(np.count_nonzero(self._undrawn))


def _distinct_indices(size: int, draws: npt.NDArray[np.float64]) -> Int64Array:
    """Return distinct indices below ``size``, one for each draw in [0, 1), in the order drawn.

    This is a partial Fisher-Yates shuffle that stores only the array entries that differ from their index.
    """
    moved: dict[int, int] = {}
    steps = np.arange(len(draws))
    chosen = (steps + (draws * (size - steps)).astype(np.int64)).tolist()
    result = []
    for step, index in enumerate(chosen):
        result.append(moved.get(index, index))
        moved[index] = moved.get(step, step)
    return np.array(result, dtype=np.int64)
