"""The memo of a pickle: objects that it may refer to by number, in bounded memory.

A pickler numbers nearly every object, about seventeen per example. Only a few of them are referred to again,
such as texts, dtypes and enum members. The memo drops the others, so its size does not grow with the number
of examples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import islice
from sys import getsizeof
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from hexdata.errors import FormatError
from hexdata.formats.legacy.allowlist import Dtype, EnumValue, Name, Scalar
from hexdata.formats.legacy.limits import Limits

__all__ = ["ENTRY_COST", "Memo", "PendingPairs", "is_kept", "is_pair", "mixed_numbers"]

Int64Array = npt.NDArray[np.int64]

_SMALL: Final = frozenset([str, EnumValue, Dtype, Name])
"""Types of objects that are kept after their example. Arrays, dicts and tuples are dropped, except pairs of
integers: all positions of a game may share the tuple of its id."""

ENTRY_COST: Final = 150
"""Approximate size in memory of a kept object without its characters, in bytes."""

_NEW_PAIRS: Final = 1 << 18
"""Maximum number of pairs kept as Python objects between two calls of ``settle``. Above it, the oldest half
is dropped."""
_PAIRS: Final = 1 << 21
"""Number of settled pairs that are kept, 24 bytes each. Above it, the oldest block of pairs is dropped."""
_PLAIN: Final = frozenset([str, bytes, int, float, bool, type(None), EnumValue, Scalar, Dtype, Name])
"""Types of values that later opcodes cannot change."""


def is_kept(value: object) -> bool:
    """Return whether an object is kept after its example.

    That includes ``b"b"``, an argument of NumPy in every array.
    """
    kind = type(value)
    return kind in _SMALL or (kind is bytes and value == b"b")


def is_pair(value: object) -> bool:
    """Return whether a value is a tuple of two integers of at most 64 bits, such as a legacy game id."""
    return type(value) is tuple and len(value) == 2 and _is_int64(value[0]) and _is_int64(value[1])


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63


class PendingPairs(Protocol):
    """Access to the pairs of examples in runs that have not been converted to columns yet."""

    def pair(self, index: int) -> tuple[int, int] | None:
        """Return the pair with memo number ``index``; None if these examples have no such pair."""


class Memo:
    """Objects of a pickle by memo number.

    Objects outside of examples are kept for the whole file, and all objects of the current example until its
    end. Of finished examples, only small objects and pairs of integers are kept, in limited number.

    Args:
        limits: Limits of the file.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.next = 0
        """Number of the next object."""
        self.lasting: dict[int, object] = {}
        self.current: dict[int, object] = {}
        self.into = self.lasting
        """The dict for new objects: ``lasting``, or ``current`` after the start of the examples."""
        self.skipped = 0
        """Count of unused numbers below ``next``. A pickle with explicit numbers may have gaps."""
        self.pending: PendingPairs | None = None
        self.explicit = False
        """True if the pickle has explicit memo numbers, as in protocols before 4."""
        self._kept: dict[int, object] = {}
        self._kept_cost = 0
        self._referred_cost = 0
        self.header: dict[int, object] = {}
        """Mutable objects from before the examples. Only objects after the examples may refer to them."""
        self._pairs: dict[int, tuple[int, int]] = {}
        self._more_pairs: list[tuple[Int64Array, Int64Array]] = []
        self._settled: deque[tuple[Int64Array, Int64Array]] = deque()
        self._settled_pairs = 0

    def branch(self, first: int) -> Memo:
        """Return a memo for reading one example again.

        Its next number is ``first``. It reads objects from this memo but does not add any to it.
        """
        return _Branch(self, first)

    def put(self, value: object) -> None:
        """Store an object under the next number."""
        self.into[self.next] = value
        self.next += 1

    def put_at(self, index: int, value: object) -> None:
        """Store an object under an explicit number, as in protocols before 4.

        Args:
            index: The number.
            value: The object.

        Raises:
            FormatError: "corrupt-pickle", if the number is not higher than all numbers before, or if earlier
                objects have implicit numbers.
        """
        if not self.explicit and self.next:
            raise mixed_numbers()
        self.explicit = True
        if index < self.next:
            raise FormatError("a memo number is given twice", code="corrupt-pickle", found=index)
        self.skipped += index - self.next
        self.next = index
        self.put(value)

    def get(self, index: int) -> object:
        """Return the object with the number ``index``.

        Raises:
            FormatError: "corrupt-pickle", if no object has the number yet; "shared-payload", if the object
                was dropped.
        """
        if index in self.lasting:
            return self.lasting[index]
        if index in self.current:
            return self.current[index]
        if index in self._kept:
            value = self.lasting[index] = self._kept.pop(index)
            self._kept_cost -= _cost(value)
            self._referred_cost += _cost(value)
            return value
        pair = self._pairs.get(index) or self._settled_pair(index)
        if pair is None and self.pending is not None:
            pair = self.pending.pair(index)
        if pair is not None:
            return pair
        if index >= self.next:
            raise _not_there(index)
        raise FormatError(
            "an example refers to a part of another one, which is not kept",
            code="shared-payload",
            found=f"memo number {index}",
            expected="examples that share nothing but texts, enum members, dtypes and pairs of integers",
            hint="Write the pickle again from copies: copy.deepcopy each example on its own.",
        )

    def begin_examples(self) -> None:
        """Start the examples: move mutable objects from before them to ``header``.

        An example that shared such an object could change after it was returned.
        """
        for index in [index for index, value in self.lasting.items() if not _is_settled(value)]:
            self.header[index] = self.lasting.pop(index)
        self.into = self.current

    def forget(self, value: object) -> None:
        """Drop one of the last four objects if it is ``value``: a text that was converted to bytes."""
        for index in [*islice(reversed(self.current), 4)]:
            if self.current[index] is value:
                del self.current[index]

    def end_example(self) -> None:
        """Drop the objects of the example that just ended, except small objects and pairs of integers."""
        for index, value in self.current.items():
            if is_kept(value):
                self._kept[index] = value
                self._kept_cost += _cost(value)
            elif is_pair(value):
                self._pairs[index] = value  # type: ignore[assignment]  # is_pair says so
        self.current.clear()
        if self._kept_cost > 2 * self._limits.memo_bytes:
            self._forget_oldest()
        if len(self._pairs) > _NEW_PAIRS:
            for index in [*islice(self._pairs, _NEW_PAIRS // 2)]:
                del self._pairs[index]

    def _forget_oldest(self) -> None:
        """Drop small objects that were never referred to, oldest first, down to the limit."""
        for index in [*self._kept]:
            if self._kept_cost <= self._limits.memo_bytes:
                break
            self._kept_cost -= _cost(self._kept.pop(index))

    def put_pairs(self, indices: Int64Array, values: Int64Array) -> None:
        """Add pairs from runs of examples, which do not pass through :meth:`end_example`.

        Args:
            indices: Memo numbers, int64 (m,).
            values: The two integers of each pair, int64 (m, 2).
        """
        self._more_pairs.append((indices, values))

    def settle(self) -> None:
        """Sort the pairs added since the last call and drop the oldest objects. Called between blocks."""
        if self._pairs:
            numbers = np.fromiter(self._pairs, np.int64, len(self._pairs))
            self.put_pairs(numbers, np.array([*self._pairs.values()], np.int64))
            self._pairs.clear()
        if self._more_pairs:
            indices, values = (np.concatenate(parts) for parts in zip(*self._more_pairs, strict=True))
            order = np.argsort(indices)
            self._settled.append((indices[order], values[order]))
            self._settled_pairs += len(order)
            self._more_pairs.clear()
        while self._settled_pairs > _PAIRS and len(self._settled) > 1:
            self._settled_pairs -= len(self._settled.popleft()[0])
        if self._kept_cost > self._limits.memo_bytes:
            self._forget_oldest()

    def check(self) -> None:
        """Check the number and size of the objects against the limits.

        Raises:
            FormatError: "limit-memo".
        """
        limits = self._limits
        if len(self.lasting) + len(self.current) + len(self.header) > limits.memo:
            raise FormatError(
                "more objects to refer back to than the limit",
                code="limit-memo",
                expected=f"at most {limits.memo:,}",
            )
        if self._referred_cost > limits.memo_bytes:
            raise FormatError(
                "larger objects to refer back to than the limit",
                code="limit-memo",
                expected=f"at most {limits.memo_bytes:,} bytes",
            )

    def _settled_pair(self, index: int) -> tuple[int, int] | None:
        block = bisect_right(self._settled, index, key=lambda settled: int(settled[0][0])) - 1
        if block < 0:
            return None
        indices, values = self._settled[block]
        place = int(np.searchsorted(indices, index))
        if place == len(indices) or indices[place] != index:
            return None
        return int(values[place, 0]), int(values[place, 1])


class _Branch(Memo):
    """A memo for one example on top of another memo, which it only reads."""

    def __init__(self, trunk: Memo, first: int) -> None:
        super().__init__(trunk._limits)
        self._trunk = trunk
        self._first = self.next = first
        self.into = self.current

    def get(self, index: int) -> object:
        if index in self.current:
            return self.current[index]
        if index >= self._first:  # the trunk may already have later numbers
            raise _not_there(index)
        return self._trunk.get(index)


def _not_there(index: int) -> FormatError:
    return FormatError("refers to an object that is not there yet", code="corrupt-pickle", found=index)


def mixed_numbers() -> FormatError:
    """Return the error for a pickle with both explicit and implicit memo numbers."""
    return FormatError("memo numbers both named and counted", code="corrupt-pickle")


def _is_settled(value: object) -> bool:
    """Return whether later opcodes cannot change a value."""
    return type(value) in _PLAIN or (type(value) is tuple and all(type(part) in _PLAIN for part in value))


def _cost(value: object) -> int:
    return ENTRY_COST + (getsizeof(value) if isinstance(value, str) else 0)
