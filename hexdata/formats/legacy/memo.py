"""What a pickle may refer back to, in memory that does not grow with the number of examples.

A writer gives a number to nearly everything: some seventeen objects an example, of which a handful (the
texts, the dtype, the enum members) are ever named again. Never reads bytes and never builds objects.
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
from hexdata.formats.legacy.limits import Limits
from hexdata.formats.legacy.standins import Dtype, EnumValue, Name, Scalar

__all__ = ["ENTRY_COST", "Memo", "PendingPairs", "is_kept", "is_pair", "mixed_numbers"]

Int64Array = npt.NDArray[np.int64]

_SMALL: Final = frozenset([str, EnumValue, Dtype, Name])
"""Kept of a finished example. Arrays, dicts and tuples are forgotten, but for pairs of integers: a game's
id is one tuple, which all its positions share."""

ENTRY_COST: Final = 150
"""Bytes that a kept object takes beside its characters, roughly."""

_NEW_PAIRS: Final = 1 << 18
"""Pairs that are kept as Python objects until they are settled; the oldest half is forgotten first."""
_PAIRS: Final = 1 << 21
"""Settled pairs that are kept, 24 bytes each; the oldest are forgotten first."""
_PLAIN: Final = frozenset([str, bytes, int, float, bool, type(None), EnumValue, Scalar, Dtype, Name])
"""Types of values that nothing can change later."""


def is_kept(value: object) -> bool:
    """Say whether it outlives its example on its own; ``b"b"`` is an argument of NumPy's in every array."""
    kind = type(value)
    return kind in _SMALL or (kind is bytes and value == b"b")


def is_pair(value: object) -> bool:
    """Say whether it is a tuple of two integers of at most 64 bits, as a legacy game id is."""
    return type(value) is tuple and len(value) == 2 and _is_int64(value[0]) and _is_int64(value[1])


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63


class PendingPairs(Protocol):
    """Examples that are recognised but not yet taken apart: their pairs can be asked for."""

    def pair(self, index: int) -> tuple[int, int] | None:
        """Return the pair with that memo number, None if it is no pair of theirs."""


class Memo:
    """Numbers to objects: for ever outside the examples, and just the small things of finished ones."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.next = 0
        """The number that the next object gets."""
        self.lasting: dict[int, object] = {}
        self.current: dict[int, object] = {}
        self.into = self.lasting
        """Where new objects go: ``lasting``, or ``current`` once the examples have begun."""
        self.skipped = 0
        """Numbers below ``next`` that were never given: a pickle that names its numbers may leave gaps."""
        self.pending: PendingPairs | None = None
        self.explicit = False
        """The pickle names its memo numbers, as protocols before 4 do."""
        self._kept: dict[int, object] = {}
        self._kept_cost = 0
        self._referred_cost = 0
        self.header: dict[int, object] = {}
        """What came before the examples and may change later: for what follows them, not for examples."""
        self._pairs: dict[int, tuple[int, int]] = {}
        self._more_pairs: list[tuple[Int64Array, Int64Array]] = []
        self._settled: deque[tuple[Int64Array, Int64Array]] = deque()
        self._settled_pairs = 0

    def branch(self, first: int) -> Memo:
        """Return a memo whose next number is ``first`` and that sees this one, to examine one example."""
        return _Branch(self, first)

    def put(self, value: object) -> None:
        """Give ``value`` the next number."""
        self.into[self.next] = value
        self.next += 1

    def put_at(self, index: int, value: object) -> None:
        """Give ``value`` the number ``index``, as protocols before 4 do.

        Raises:
            FormatError: "corrupt-pickle", if a number that high has been given before, or numbers without
                naming them: then what a number means depends on how many were skipped.
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
        """Return the object with that number.

        Raises:
            FormatError: "corrupt-pickle", if there is none yet; "shared-payload", if it was forgotten.
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
        """Put aside what was read before the examples and may change later: an example that shared it
        could change after it was handed out.
        """
        for index in [index for index, value in self.lasting.items() if not _is_settled(value)]:
            self.header[index] = self.lasting.pop(index)
        self.into = self.current

    def forget(self, value: object) -> None:
        """Forget what was just put, if it is ``value``: a text whose bytes are all that counts."""
        for index in [*islice(reversed(self.current), 4)]:
            if self.current[index] is value:
                del self.current[index]

    def end_example(self) -> None:
        """Forget the example that was just completed, but for the small things in it."""
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
        """Forget small objects that were never referred to, oldest first, until the rest fits the limit."""
        for index in [*self._kept]:
            if self._kept_cost <= self._limits.memo_bytes:
                break
            self._kept_cost -= _cost(self._kept.pop(index))

    def put_pairs(self, indices: Int64Array, values: Int64Array) -> None:
        """Take in pairs that did not come through :meth:`end_example`.

        Args:
            indices: their numbers (m,).
            values: their two integers each (m, 2).
        """
        self._more_pairs.append((indices, values))

    def settle(self) -> None:
        """Between two blocks of examples: put the pairs in order, and forget what is too old."""
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
        """See that no more objects are kept than the limit allows.

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
    """Writes of its own, above another memo that it only reads."""

    def __init__(self, trunk: Memo, first: int) -> None:
        super().__init__(trunk._limits)
        self._trunk = trunk
        self._first = self.next = first
        self.into = self.current

    def get(self, index: int) -> object:
        if index in self.current:
            return self.current[index]
        if index >= self._first:  # the trunk may be further on
            raise _not_there(index)
        return self._trunk.get(index)


def _not_there(index: int) -> FormatError:
    return FormatError("refers to an object that is not there yet", code="corrupt-pickle", found=index)


def mixed_numbers() -> FormatError:
    """Make the error for a pickle that names some memo numbers and counts others."""
    return FormatError("memo numbers both named and counted", code="corrupt-pickle")


def _is_settled(value: object) -> bool:
    """Say whether nothing that follows can change a value."""
    return type(value) in _PLAIN or (type(value) is tuple and all(type(part) in _PLAIN for part in value))


def _cost(value: object) -> int:
    return ENTRY_COST + (getsizeof(value) if isinstance(value, str) else 0)
