"""A pickle interpreter that runs no code.

Handlers of Python's own ``pickle._Unpickler`` build plain values and placeholders from the opcodes of
protocols 2 to 5, and the items of one list, such as ``examples``, are yielded while the list is being built.
Nothing that the pickle names is imported or called: ``find_class`` returns placeholders, the handlers that
call or change objects are replaced, and opcodes that are not listed here are refused. No handler is
recursive.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable, Iterator
from sys import getsizeof
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import FormatError, Reason
from hexdata.formats.legacy import allowlist
from hexdata.formats.legacy.allowlist import EnumValue, PickledArray, PickledDtype, PickledScalar, kind_of
from hexdata.formats.legacy.limits import LegacyLimits
from hexdata.formats.legacy.stream import PickleStream

Int64Array = npt.NDArray[np.int64]

_PLAIN_OPCODES: Final = b"JKMGN\x88\x89)t\x85\x86\x87\x80}jh\x8a\x8bX\x8c\x8dBC\x8eqrc\x93("
"""Opcodes whose handlers in ``pickle._Unpickler`` are used as they are."""
_COMPLETING: Final = frozenset(b"t\x87u\x94qr")
"""Opcodes after which an example may be complete."""
_MEMO_OPCODES: Final = (b"\x94", b"q", b"r")
_OPCODE_WEIGHT: Final = 64
"""Bytes of memory per byte of opcodes, approximately, as for small containers."""
_CHECK_EVERY: Final = 1 << 16
"""Bytes of the file between two checks of the limits."""

_KEPT_TYPES: Final = frozenset([str, EnumValue, PickledDtype, PickledScalar, allowlist.AllowedGlobal])
"""Types of objects that are kept after their example. Arrays, dicts and tuples are dropped, except pairs of
integers: all positions of a game may share the tuple of its id."""
_ENTRY_COST: Final = 150
"""Approximate size in memory of a kept object without its characters, in bytes."""


class ExamplesPlaceholder:
    """Placeholder on the stack for the list of examples."""


def _is_pair(value: Any) -> bool:
    """Return whether a value is a tuple of two integers of at most 64 bits, such as a legacy game id."""
    is_pair = type(value) is tuple and len(value) == 2
    return is_pair and all(type(part) is int and part.bit_length() <= 63 for part in value)


class Memo:
    """Objects of a pickle by memo number, as the handlers of ``pickle._Unpickler`` use a dict.

    All objects of the current example are kept until its end. Of finished examples, and of what precedes
    them, only small immutable objects are kept: texts, pairs of integers and so on, and single bytes, which
    Python shares (``b"b"`` is an argument of NumPy in every array). An example that shared a mutable object
    could change after it was returned. If the objects exceed twice ``limits.memo_bytes``, those that were not
    used for the longest time are dropped: examples may have objects of their own that they do not share.

    Args:
        limits: Limits of the file.

    Attributes:
        next: Number of the next object.
        explicit: True if the pickle has explicit memo numbers, as in protocols before 4.
        find_pairs: Returns the pairs of integers, (n, 2), with memo numbers, (n,), that are not here; None
            unless it knows all of them.
        shares: True if later examples may refer to an object of the last example other than a pair.
        keeps_arrays: Whether to keep arrays of finished examples too.
        current: Objects of the current example, or of what precedes the examples.
    """

    def __init__(self, limits: LegacyLimits) -> None:
        self.next = 0
        self.explicit = False
        self.find_pairs: Callable[[Int64Array], Int64Array | None] = lambda _: None
        self.shares = False
        self.keeps_arrays = False
        self._limits = limits
        self.current: dict[int, object] = {}
        self._kept: dict[int, object] = {}  # in the order of their last use
        self._cost = 0

    def put(self, value: object) -> None:
        """Store an object under the next number; the list of examples must not be referred to."""
        if not isinstance(value, ExamplesPlaceholder):
            self.current[self.next] = value
        self.next += 1

    def __setitem__(self, index: int, value: object) -> None:
        """Store an object under an explicit number, as in protocols before 4.

        Raises:
            FormatError: "corrupt-pickle", if the number is not higher than all numbers before, or if earlier
                objects have implicit numbers.
        """
        # Picklers number objects in ascending order, so another number is damage or a trick.
        if index < self.next or (self.next and not self.explicit):
            raise FormatError(f"the memo number {index} is used twice", Reason.CORRUPT_PICKLE)
        self.explicit, self.next = True, index
        self.put(value)

    def __getitem__(self, index: int) -> object:
        """Return the object with the number ``index``.

        Raises:
            FormatError: "corrupt-pickle", if no object has the number yet; "shared-payload", if the object
                was dropped.
        """
        if index >= self.next:
            reason = f"a reference to the object {index}, which is not defined yet"
            raise FormatError(reason, Reason.CORRUPT_PICKLE)
        if index in self.current:
            return self.current[index]
        if index in self._kept:
            value = self._kept[index] = self._kept.pop(index)  # now the last one
            return value
        if (pairs := self.find_pairs(np.array([index]))) is not None:
            return tuple(pairs[0].tolist())
        reason = (
            "an object of an example, or the list of examples, is used again, which hexdata does not support"
        )
        expected = "examples that share only texts, enum members, NumPy scalars, dtypes and pairs of ints"
        hint = "Write the pickle again with a separate copy.deepcopy of each example."
        raise FormatError(reason, Reason.SHARED_PAYLOAD, f"memo number {index}", expected, hint=hint)

    def end_example(self) -> None:
        """Drop the objects of an example that just ended, or of what precedes all, except small ones."""
        self.shares = False
        for index, value in self.current.items():
            is_small = type(value) in _KEPT_TYPES or (type(value) is bytes and len(value) == 1)
            self.shares = self.shares or is_small
            if is_small or _is_pair(value) or (self.keeps_arrays and type(value) is PickledArray):
                self._kept[index] = value
                self._cost += _cost(value)
        self.current.clear()
        if self._cost > 2 * self._limits.memo_bytes:
            # Not the first one again and again: to find it, a dict passes all places that became free.
            for index in [*self._kept]:
                self._cost -= _cost(self._kept.pop(index))
                if self._cost <= self._limits.memo_bytes:
                    break


def _cost(value: object) -> int:
    content = value.payload if isinstance(value, PickledArray) else value
    return _ENTRY_COST + (getsizeof(content) if isinstance(content, str | bytes) else 0)


_MARKS_OF_EXAMPLES: Final = {"examples": "board", "games": "moves"}
"""For each top-level key whose list is yielded item by item: a key of each dict in that list."""


def _irregular_error() -> FormatError:
    return FormatError("examples nested in each other", code=Reason.IRREGULAR_EXAMPLES)


_Base: Any = pickle._Unpickler


class Unpickler(_Base):  # type: ignore[misc]
    """Reads one pickle from a stream.

    An example is yielded as soon as it is complete, before its batch is appended to the list. What was on the
    stack is then gone, so a pickle that uses the example in another way is refused.

    Args:
        stream: The bytes of the pickle.

    Attributes:
        memo: The objects that the pickle may refer to.
        key: The top-level key of the list: "examples" or "games", the first one. None before it begins.
        result: The object in the pickle, after :meth:`run`; None if that raises.
        is_taken: Whether examples of the current batch were yielded, or skipped by the caller of :meth:`run`.
        weight: Approximate size in memory of what was yielded last, in bytes.
    """

    def __init__(self, stream: PickleStream) -> None:
        self.stream = stream
        self.memo = Memo(stream.limits)
        self.key: str | None = None
        self.result: object = None
        self.is_taken = False
        self.weight = 0
        # Of the base class:
        self.read, self.readline = stream.read, stream.readline
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []  # for each open mark, the objects below it
        self.append = self.stack.append
        self._limits = stream.limits
        self._examples: ExamplesPlaceholder | None = None
        self._batch = -1  # number of open marks between two examples of a batch
        self._held_from = 0  # offset when examples were last yielded
        self._is_done = False

    @property
    def between(self) -> bool:
        """True while the next object is an example of a batch, or the end of the batch."""
        return len(self.metastack) == self._batch and not self.stack

    def run(self) -> Iterator[list[Any]]:
        """Read the pickle.

        Yields:
            The next items of the list, possibly none: at its beginning, after each example that is complete,
            and after each batch that is appended.

        Raises:
            FormatError: The pickle is truncated, corrupt or of another layout, or exceeds a limit.
            UnsafePickleError: The pickle uses a name, call or opcode that is not allowed.
        """
        stream, check_at = self.stream, 0
        while not self._is_done:
            try:
                position = stream.tell()
                # Not for each opcode, since the check sums over all stacks.
                if position > check_at:
                    check_at = position + _CHECK_EVERY
                    self._check_limits()
                items = self.step()
            except FormatError as error:
                error.record = error.record or f"byte {stream.offset}"
                raise
            if items is not None:
                self.weight = stream.payload + _OPCODE_WEIGHT * self._opcodes
                stream.payload = 0
                # Before the yield, as ``RunFinder`` asks the memo what later examples may refer to.
                self.memo.end_example()
                yield items
                self._held_from = stream.offset  # ``RunFinder`` may have skipped examples

    def step(self) -> list[Any] | None:
        """Read and run one opcode; return items of the list if it completes some.

        Raises:
            FormatError: As for :meth:`run`.
        """
        opcode = self.stream.read_opcode()
        handler = _HANDLERS.get(opcode)
        if handler is None:
            known = pickletools.code2op.get(chr(opcode))  # type: ignore[attr-defined]
            if known is None:
                raise self.stream.corrupt("an unknown opcode", opcode)
            reason = "uses a pickle operation that is not allowed"
            raise allowlist.unsafe(reason, known.name, Reason.UNSAFE_OPCODE)
        try:
            items: list[Any] | None = handler(self)
        except FormatError:
            raise
        except IndexError:
            if self.is_taken and len(self.metastack) == self._batch:
                raise _irregular_error() from None
            raise self.stream.corrupt("an opcode needs more objects than are on the stack") from None
        except Exception as error:  # noqa: BLE001 - of the handlers, which expect valid pickles
            raise self.stream.corrupt("an invalid argument", str(error)[:80]) from None
        if items is None and len(self.metastack) == self._batch and opcode in _COMPLETING:
            return self._completed()
        return items

    @property
    def _opcodes(self) -> int:
        """Bytes of opcodes since examples were last yielded, without arrays and texts."""
        return self.stream.offset - self._held_from - self.stream.payload

    def _check_limits(self) -> None:
        stacked = max(len(self.metastack), sum(map(len, [*self.metastack, self.stack])))
        self._limits.check(Reason.LIMIT_STACK, stacked)
        self._limits.check(Reason.LIMIT_HELD, self.stream.payload)
        self._limits.check(Reason.LIMIT_ITEMS, self._opcodes)
        self._limits.check(Reason.LIMIT_MEMO, len(self.memo.current))

    def _opens_examples(self) -> bool:
        """Return whether the list being created is that of examples or games."""
        top = self.metastack[0] if self.metastack else self.stack[:1]
        items = len(self.stack) - (0 if self.metastack else 1)
        if len(self.metastack) > 1 or len(top) != 1 or not isinstance(top[0], dict) or items % 2 == 0:
            return False
        return self._examples is None and self.stack[-1] in ("examples", "games")

    def _completed(self) -> list[Any] | None:
        """Take the object at the top of the stack and return it in a list, if it is a complete example."""
        if len(self.stack) != 1:
            return None
        top = self.stack[0]
        if not (len(top) == 3 if isinstance(top, tuple) else isinstance(top, dict) and self._mark_key in top):
            return None
        # A memo opcode that follows needs the example on the stack, and completes it then.
        if self.stream.peek() in _MEMO_OPCODES:
            return None
        self.stack.clear()
        self.is_taken = True
        return [top]

    def pop_mark(self) -> list[Any]:
        """Return the objects above the last mark, and remove them and the mark."""
        if len(self.metastack) == self._batch:
            if self.is_taken:
                raise _irregular_error()
            self._batch = -1  # it is the mark of a tuple that is appended alone
        items: list[Any] = _Base.pop_mark(self)
        return items

    # Handlers of opcodes that differ from those of the base class. They return items of the list, or None.

    def find_class(self, module: str, name: str) -> allowlist.AllowedGlobal:
        """Return the placeholder of a global."""
        return allowlist.find_global(module, name)

    def _stop(self) -> None:
        if len(self.stack) != 1 or self.metastack:
            raise self.stream.corrupt("the pickle ends with more than one object on the stack")
        self.result, self._is_done = self.stack.pop(), True
        self.stream.finish()

    def _mark(self) -> list[Any] | None:
        opens_batch = self._batch < 0 and self._examples is not None and self.stack[-1:] == [self._examples]
        self.load_mark()
        if not opens_batch:
            return None
        self._batch = len(self.metastack)
        return []

    def _empty_list(self) -> list[Any] | None:
        if not self._opens_examples():
            self.append([])
            return None
        self.key = self.stack[-1]
        self._mark_key = _MARKS_OF_EXAMPLES[self.stack[-1]]
        self._examples = ExamplesPlaceholder()
        # The network of self-play was called through a cache, so games share arrays.
        self.memo.keeps_arrays = self.key == "games"
        self.append(self._examples)
        return []

    def _appends(self) -> list[Any] | None:
        self.is_taken = self.is_taken and len(self.metastack) != self._batch
        return self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> list[Any] | None:
        target = self.stack[-1]
        # The examples are returned, not kept in a list, so that memory does not grow with the file.
        if isinstance(target, ExamplesPlaceholder):
            return items
        if not isinstance(target, list):
            raise self.stream.corrupt("appends to an object that is not a list", kind_of(target))
        target.extend(items)
        return None

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, ExamplesPlaceholder):
            raise _irregular_error()
        if not isinstance(target, dict) or len(items) % 2:
            raise self.stream.corrupt("sets items of an object that is not a dict", kind_of(target))
        for key in items[::2]:
            # Other keys can make hashing very slow: deeply shared tuples, or long integers that collide.
            if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < 1 << 60):
                raise self.stream.corrupt("a dict key that is neither a text nor an integer", kind_of(key))
        target.update(zip(items[::2], items[1::2], strict=True))

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = allowlist.call(self.stack[-1], args)

    def _memoize(self) -> None:
        if self.memo.explicit:
            raise FormatError("a mix of explicit and implicit memo numbers", Reason.CORRUPT_PICKLE)
        self.memo.put(self.stack[-1])


_HANDLERS: Final[dict[int, Callable[[Unpickler], list[Any] | None]]] = {
    **{opcode: _Base.dispatch[opcode] for opcode in _PLAIN_OPCODES},
    ord("\x96"): lambda self: self.append(
        allowlist.ByteArray(self.read(int.from_bytes(self.read(8), "little")))
    ),
    ord("\x95"): lambda self: self.stream.enter_frame(),
    ord("."): Unpickler._stop,
    ord("("): Unpickler._mark,
    ord("]"): Unpickler._empty_list,
    ord("a"): lambda self: self._extend([self.stack.pop()]),
    ord("e"): Unpickler._appends,
    ord("s"): lambda self: self._set([self.stack.pop(-2), self.stack.pop()]),  # key, value
    ord("u"): lambda self: self._set(self.pop_mark()),
    ord("R"): Unpickler._reduce,
    ord("b"): lambda self: allowlist.build(self.stack[-2], self.stack.pop()),
    ord("\x94"): Unpickler._memoize,
}
"""Handler of each allowed opcode."""
