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

from hexdata.errors import FormatError, Reason
from hexdata.formats.legacy.allowlist import (
    AllowedGlobal,
    EnumValue,
    PickledArray,
    PickledDtype,
    PickledScalar,
)
from hexdata.formats.legacy.limits import LegacyLimits

__all__ = ["ENTRY_COST", "Memo", "PendingPairs", "is_kept", "is_pair", "mixed_numbers_error", "shared_error"]

Int64Array = npt.NDArray[np.int64]

_KEPT_TYPES: Final = frozenset([str, EnumValue, PickledDtype, PickledScalar, AllowedGlobal])
"""Types of objects that are kept after their example. Arrays, dicts and tuples are dropped, except pairs of
integers: all positions of a game may share the tuple of its id."""

ENTRY_COST: Final = 150
"""Approximate size in memory of a kept object without its characters, in bytes."""

_NEW_PAIRS: Final = 1 << 18
"""Maximum number of pairs kept as Python objects between two calls of ``compact``. Above it, the oldest half
is dropped."""
_MAX_STORED_PAIRS: Final = 1 << 21
"""Number of pairs kept as arrays, 24 bytes each. Above it, the oldest block of pairs is dropped."""
_PLAIN: Final = frozenset(
    [str, bytes, int, float, bool, type(None), EnumValue, PickledScalar, PickledDtype, AllowedGlobal]
)
"""Types of values that later opcodes cannot change."""


def is_kept(value: object) -> bool:
    """Return whether an object is kept after its example.

    That includes single bytes, which Python shares: ``b"b"`` is an argument of NumPy in every array, and
    scalars such as ``np.True_`` consist of one byte.
    """
    kind = type(value)
    return kind in _KEPT_TYPES or (kind is bytes and len(value) == 1)  # type: ignore[arg-type]


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
        keep_arrays: Whether to keep arrays of finished examples too, as far as ``limits.memo_bytes`` allows.
            Default False.
    """

    def __init__(self, limits: LegacyLimits, *, keep_arrays: bool = False) -> None:
        self._limits = limits
        self._keep_arrays = keep_arrays
        self.next = 0
        """Number of the next object."""
        self.permanent: dict[int, object] = {}
        self.current: dict[int, object] = {}
        self.into = self.permanent
        """The dict for new objects: ``permanent``, or ``current`` after the start of the examples."""
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
        self._run_pairs: list[tuple[Int64Array, Int64Array]] = []
        self._pair_blocks: deque[tuple[Int64Array, Int64Array]] = deque()
        self._stored_pairs = 0

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
            raise mixed_numbers_error()
        self.explicit = True
        if index < self.next:
            raise FormatError("a memo number is used twice", code=Reason.CORRUPT_PICKLE, found=index)
        self.skipped += index - self.next
        self.next = index
        self.put(value)

    def get(self, index: int) -> object:
        """Return the object with the number ``index``.

        Raises:
            FormatError: "corrupt-pickle", if no object has the number yet; "shared-payload", if the object
                was dropped.
        """
        if index in self.permanent:
            return self.permanent[index]
        if index in self.current:
            return self.current[index]
        if index in self._kept:
            value = self.permanent[index] = self._kept.pop(index)
            self._kept_cost -= _cost(value)
            self._referred_cost += _cost(value)
            return value
        pair = self._pairs.get(index) or self._find_pair(index)
        if pair is None and self.pending is not None:
            pair = self.pending.pair(index)
        if pair is not None:
            return pair
        if index >= self.next:
            raise _undefined_error(index)
        raise shared_error(index)

    def begin_examples(self) -> None:
        """Start the examples: move mutable objects from before them to ``header``.

        An example that shared such an object could change after it was returned.
        """
        for index in [index for index, value in self.permanent.items() if not _is_immutable(value)]:
            self.header[index] = self.permanent.pop(index)
        self.into = self.current

    def drop(self, value: object) -> None:
        """Drop one of the last four objects if it is ``value``: a text that was converted to bytes."""
        for index in [*islice(reversed(self.current), 4)]:
            if self.current[index] is value:
                del self.current[index]

    def end_example(self) -> None:
        """Drop the objects of the example that just ended, except small objects and pairs of integers."""
        for index, value in self.current.items():
            if is_kept(value) or (self._keep_arrays and type(value) is PickledArray):
                self._kept[index] = value
                self._kept_cost += _cost(value)
            elif is_pair(value):
                self._pairs[index] = value  # type: ignore[assignment]  # is_pair says so
        self.current.clear()
        if self._kept_cost > 2 * self._limits.memo_bytes:
            self._drop_oldest()
        if len(self._pairs) > _NEW_PAIRS:
            for index in [*islice(self._pairs, _NEW_PAIRS // 2)]:
                del self._pairs[index]

    def _drop_oldest(self) -> None:
        """Drop small objects that were never referred to, down to the limit: scalars first, then the oldest.

        Examples may have many scalars of their own, which would otherwise replace texts that they share.
        """
        for index in sorted(self._kept, key=lambda index: type(self._kept[index]) is not PickledScalar):
            if self._kept_cost <= self._limits.memo_bytes:
                break
            self._kept_cost -= _cost(self._kept.pop(index))

    def put_pairs(self, indices: Int64Array, values: Int64Array) -> None:
        """Add pairs from runs of examples, which do not pass through :meth:`end_example`.

        Args:
            indices: Memo numbers, int64 (m,).
            values: The two integers of each pair, int64 (m, 2).
        """
        self._run_pairs.append((indices, values))

    def compact(self) -> None:
        """Move new pairs to arrays and drop the oldest objects. Called between blocks."""
        if self._pairs:
            numbers = np.fromiter(self._pairs, np.int64, len(self._pairs))
            self.put_pairs(numbers, np.array([*self._pairs.values()], np.int64))
            self._pairs.clear()
        if self._run_pairs:
            indices, values = (np.concatenate(parts) for parts in zip(*self._run_pairs, strict=True))
            order = np.argsort(indices)
            self._pair_blocks.append((indices[order], values[order]))
            self._stored_pairs += len(order)
            self._run_pairs.clear()
        while self._stored_pairs > _MAX_STORED_PAIRS and len(self._pair_blocks) > 1:
            self._stored_pairs -= len(self._pair_blocks.popleft()[0])
        if self._kept_cost > self._limits.memo_bytes:
            self._drop_oldest()

    def check(self) -> None:
        """Check the number and size of the objects against the limits.

        Raises:
            FormatError: "limit-memo".
        """
        limits = self._limits
        if len(self.permanent) + len(self.current) + len(self.header) > limits.memo:
            raise FormatError(
                "more objects in the memo than the limit",
                code=Reason.LIMIT_MEMO,
                expected=f"at most {limits.memo:,}",
            )
        if self._referred_cost > limits.memo_bytes:
            raise FormatError(
                "larger objects in the memo than the limit",
                code=Reason.LIMIT_MEMO,
                expected=f"at most {limits.memo_bytes:,} bytes",
            )

    def _find_pair(self, index: int) -> tuple[int, int] | None:
        block = bisect_right(self._pair_blocks, index, key=lambda pairs: int(pairs[0][0])) - 1
        if block < 0:
            return None
        indices, values = self._pair_blocks[block]
        row = int(np.searchsorted(indices, index))
        if row == len(indices) or indices[row] != index:
            return None
        return int(values[row, 0]), int(values[row, 1])


class _Branch(Memo):
    """A memo for one example. It reads objects from the memo of the file but does not change it."""

    def __init__(self, parent: Memo, first: int) -> None:
        super().__init__(parent._limits)
        self._parent = parent
        self._first = self.next = first
        self.into = self.current

    def get(self, index: int) -> object:
        if index in self.current:
            return self.current[index]
        if index >= self._first:  # the parent may already have later numbers
            raise _undefined_error(index)
        return self._parent.get(index)


def shared_error(index: int) -> FormatError:
    """Return the error for a reference to an object that was returned as part of an example."""
    return FormatError(
        "an object of an example, or the list of examples, is used again, which hexdata does not support",
        code=Reason.SHARED_PAYLOAD,
        found=f"memo number {index}",
        expected="examples that share only texts, enum members, NumPy scalars, dtypes and pairs of ints",
        hint="Write the pickle again with a separate copy.deepcopy of each example.",
    )


def _undefined_error(index: int) -> FormatError:
    return FormatError(
        "a reference to an object that is not defined yet",
        code=Reason.CORRUPT_PICKLE,
        found=f"memo number {index}",
    )


def mixed_numbers_error() -> FormatError:
    """Return the error for a pickle with both explicit and implicit memo numbers."""
    return FormatError("a mix of explicit and implicit memo numbers", code=Reason.CORRUPT_PICKLE)


def _is_immutable(value: object) -> bool:
    """Return whether later opcodes cannot change a value."""
    return type(value) in _PLAIN or (type(value) is tuple and all(type(part) in _PLAIN for part in value))


def _cost(value: object) -> int:
    content = value.payload if isinstance(value, PickledArray) else value
    return ENTRY_COST + (getsizeof(content) if isinstance(content, str | bytes) else 0)
