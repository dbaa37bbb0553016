"""A pickle interpreter that runs no code.

The unpickler reads opcodes and builds plain values and placeholders. It returns the items of one list, such
as ``examples``, in batches, while the list is being built. Nothing that the pickle names is imported or
called.

Opcodes are those of Python's ``pickletools``, protocols 0 to 5; opcodes without a handler in
``opcodes.HANDLERS`` are refused. No handler is recursive.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Collection
from enum import Enum
from functools import partial
from sys import getsizeof
from typing import Any, Final

from hexdata.errors import FormatError, Reason, UnsafePickleError
from hexdata.formats.legacy.allowlist import NOT_RUN, ByteArray, build, call, find_global, kind_of
from hexdata.formats.legacy.buffer import ReadBuffer
from hexdata.formats.legacy.limits import LegacyLimits
from hexdata.formats.legacy.memo import ENTRY_COST, Memo, mixed_numbers_error, shared_error
from hexdata.formats.legacy.opcodes import HANDLERS
from hexdata.formats.legacy.source import ByteSource

__all__ = ["FRAME_BYTES", "Event", "ExamplesPlaceholder", "Unpickler", "irregular_error"]

FRAME_BYTES: Final = 9
"""Bytes of a FRAME opcode, including its length argument."""

_LINE: Final = 1000
"""Maximum length in bytes of a number, module or name of protocol 0."""
_MEMO_OPCODES: Final = frozenset(b"\x94qrp")
_FLOAT: Final = struct.Struct(">d")
_DECIMAL: Final = re.compile(rb"0|-?[1-9][0-9]*")
"""Integers of protocol 0 as picklers write them. ``-0`` is False for one of Python's two unpicklers."""
_FLOAT_LINE: Final = re.compile(rb"-?([0-9]+(\.[0-9]*)?(e[-+]?[0-9]+)?|inf|nan)")
"""Floats of protocol 0 as picklers write them. Python accepts other notations too; they are refused here."""
_CONTAINER: Final = 96
"""Minimum size in memory of a list, dict, tuple or placeholder, in bytes."""


_OPCODE_WEIGHT: Final = 16
"""Bytes of memory per byte of opcodes, as for a short text or integer. Containers are counted separately."""


_SIZE_LIMITS: Final = {
    "array": Reason.LIMIT_ARRAY,
    "integer": Reason.LIMIT_INTEGER,
    "text": Reason.LIMIT_TEXT,
}


class Event(Enum):
    """Reason for which the unpickler paused."""

    BOUNDARY = "between two examples of a batch"
    BATCH = "examples were appended: `items` has them"
    STOP = "the pickle ended: `result` has it"


class ExamplesPlaceholder:
    """Placeholder on the stack: for the list of examples, for a run of examples, or for an example that was
    taken.
    """


_MARKS_OF_EXAMPLES: Final = {"examples": "board", "games": "moves"}
"""For each top-level key whose list can be returned in batches: a key of each dict in that list."""


def irregular_error() -> FormatError:
    """Return the error for an unsupported use of a run of examples, or of the list of examples."""
    return FormatError("examples nested in each other", code=Reason.IRREGULAR_EXAMPLES)


class Unpickler(ReadBuffer):
    """Reads one pickle from a source, and pauses at each :class:`Event`.

    ``anchor`` is the index in ``buf`` at which the current example began, -1 if there is none. The fast path
    also uses ``buf``, ``pos``, ``stack`` and ``memo``.

    Args:
        source: Source of the bytes.
        limits: Limits of the file.
        memo: Memo to use; a new one by default.
        keys: Top-level keys, of "examples" and "games", whose list is returned in batches: the first one in
            the pickle.

    Attributes:
        key: The top-level key of the list; None before the list begins.
        items: Examples of the last batch, after ``Event.BATCH``.
        result: The object in the pickle, after ``Event.STOP``.
    """

    def __init__(
        self,
        source: ByteSource,
        limits: LegacyLimits,
        memo: Memo | None = None,
        keys: Collection[str] = ("examples",),
    ) -> None:
        super().__init__(source, limits)
        self.key: str | None = None
        self._keys = keys
        self.memo = memo or Memo(limits)
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.items: list[Any] = []
        self.result: object = None
        self.frame_end = -1
        """Offset in the pickle at which the open frame ends; -1 if no frame is open."""
        self.payload = 0
        """Bytes of arrays and texts read since the last batch."""
        self.overhead = 0
        """Bytes of memory of containers since the last batch, and of texts that are not ASCII."""
        self.batch_weight = 0
        """Approximate size in memory of the last batch, in bytes."""
        self.examples_in_runs = 0
        """Number of examples in runs since the last batch. Each run is a single object on the stack."""
        self.example_memo = 0
        """Memo number of the first object of the current example."""
        self._fence = 0  # height of the stack at the last open mark; handlers use only objects above it
        self._held_from = 0
        self._numbers_before = 0  # number of memo entries when the last batch ended
        self._examples: ExamplesPlaceholder | None = None
        self._examples_done = False
        self._mark_key = ""
        self._batch_marks = -1  # number of open marks between two examples of a batch
        self._batch_height = -1  # height of the stack once the current example is complete
        self._event = Event.STOP
        self._handlers: list[Callable[[], object]] = [self._refuse] * 256
        for opcode, (name, *arguments) in HANDLERS.items():
            handler = getattr(self, name)
            self._handlers[opcode[0]] = partial(handler, *arguments) if arguments else handler

    def run(self) -> Event:
        """Run opcodes up to the next event, and return it.

        Raises:
            FormatError: The pickle is truncated, corrupt or of another layout, or exceeds a limit.
            UnsafePickleError: The pickle uses a name, call or opcode that is not allowed.
        """
        handlers = self._handlers
        try:
            self.begin_example()
            while True:
                while self.pos >= self._safe and self._refill():
                    pass
                opcode = self.buf[self.pos]
                self.pos += 1
                if handlers[opcode]():
                    return self._event
        except FormatError as error:
            error.record = error.record or f"byte {self.offset}"
            raise
        except IndexError:
            if self.pos >= len(self.buf):
                raise self.truncated() from None
            raise self.corrupt("an opcode needs more objects than are on the stack") from None

    def more(self) -> bool:
        """Append the next piece of the source to ``buf``; return False at the end of the source.

        Raises:
            FormatError: As for :meth:`ReadBuffer.more`.
        """
        more = super().more()
        self._stop_at_frame_end()
        return more

    def _refill(self) -> bool:
        """Close a frame that ends here, or read the next piece; return False at the end of the source."""
        if self.frame_end < 0 or self.offset < self.frame_end:
            return self.more()
        self.leave_frame(self.offset)
        return True

    def leave_frame(self, offset: int) -> None:
        """Close the open frame.

        Args:
            offset: Offset of the first opcode after the frame. It must be the end of the frame.

        Raises:
            FormatError: "corrupt-pickle": The frame ends within an opcode, which the two unpicklers of Python
                read differently.
        """
        if offset != self.frame_end:
            raise self.corrupt("a frame ends within an opcode")
        self.frame_end = -1
        self.refresh()

    def _stop_at_frame_end(self) -> None:
        if self.frame_end >= 0:
            self._safe = min(self._safe, self.frame_end - self.origin)

    def check_limits(self) -> None:
        """Check the sizes of the stack, the memo and the data since the last batch.

        Raises:
            FormatError: "limit-stack", "limit-held", "limit-items" or "limit-memo".
        """
        limits = self.limits
        if max(len(self.stack) + self.examples_in_runs, len(self.marks)) > limits.stack:
            raise self.limit_exceeded(Reason.LIMIT_STACK, "too many objects on the stack", limits.stack)
        if self.payload + self.overhead + self._memo_cost() > limits.held_bytes:
            raise self.limit_exceeded(
                Reason.LIMIT_HELD, "too many bytes before the next batch", limits.held_bytes
            )
        if self.offset - self._held_from - self.payload > limits.items:
            raise self.limit_exceeded(
                Reason.LIMIT_ITEMS, "too many objects before the next batch", limits.items
            )
        self.memo.check()

    def _memo_cost(self) -> int:
        """Return the approximate size in memory of the memo entries since the last batch, in bytes."""
        return ENTRY_COST * (self.memo.next - self.memo.skipped - self._numbers_before)

    def skip_frame(self) -> None:
        """Process the FRAME opcode at ``pos``. All its bytes must be in ``buf``."""
        self.pos += 1
        self._frame()

    # Examples

    def begin_example(self) -> None:
        """Set the anchor to ``pos`` if the next object is an example; else remove the anchor."""
        if len(self.marks) == self._batch_marks:
            self._batch_height = len(self.stack) + 1
            self.anchor = self.pos
            self.example_memo = self.memo.next
        else:
            self.anchor = -1

    def _opens_examples(self) -> bool:
        """Return whether the list being created is the value of a top-level key in ``keys``."""
        stack = self.stack
        if len(stack) < 2 or len(stack) % 2 or not isinstance(stack[0], dict) or self.marks not in ([], [1]):
            return False
        if stack[-1] == "games" and "games" not in self._keys:
            raise FormatError(
                "a self-play file of games (moves, policies, values, final_trmph) instead of examples",
                found='top-level key "games"',
                expected='"examples"',
                hint="Open it with hexdata.formats.open_source, which detects the layout.",
            )
        return isinstance(stack[-1], str) and stack[-1] in self._keys and self._examples is None

    def _completes_example(self) -> bool:
        """Return whether the top of the stack is a complete example; if so, pause before the next one."""
        if len(self.marks) != self._batch_marks or len(self.stack) != self._batch_height:
            return False
        top = self.stack[-1]
        if not (len(top) == 3 if isinstance(top, tuple) else isinstance(top, dict) and self._mark_key in top):
            return False
        if self.pos >= len(self.buf):
            self.more()
        if self.buf[self.pos] in _MEMO_OPCODES:
            return False
        self.memo.end_example()
        self._event = Event.BOUNDARY
        return True

    def _emit_batch(self, items: list[Any]) -> bool:
        if self._examples_done:
            raise irregular_error()
        self.items = items
        self.memo.end_example()
        self._batch_marks = -1
        opcodes = self.offset - self._held_from - self.payload
        self.batch_weight = self.payload + self.overhead + max(_OPCODE_WEIGHT * opcodes, self._memo_cost())
        self._release()
        self._event = Event.BATCH
        return True

    def _release(self) -> None:
        """Count the memory since the last batch from zero again."""
        self._held_from = self.offset
        self._numbers_before = self.memo.next - self.memo.skipped
        self.payload = self.overhead = 0

    def take_example(self) -> Any:
        """Return the complete example on the stack before its batch ends, and put a placeholder there.

        Call it after ``Event.BOUNDARY`` if examples are so large that a batch would not fit into the limits.

        Returns:
            The example; None if the batch has none yet.
        """
        if len(self.marks) != self._batch_marks or len(self.stack) != self._batch_height:
            return None
        example, self.stack[-1] = self.stack[-1], ExamplesPlaceholder()
        self._release()
        return example

    def unfinished(self) -> list[Any]:
        """Return the examples of the current batch. The last one may be incomplete."""
        in_batch = 0 < self._batch_marks <= len(self.marks)
        return self.stack[self.marks[self._batch_marks - 1] : self._batch_height] if in_batch else []

    # Handlers of opcodes, as named in opcodes.HANDLERS. The unpickler pauses if one returns True.

    def _refuse(self, name: str | None = None) -> None:
        if name is None:
            raise self.corrupt("an unknown opcode", f"{self.buf[self.pos - 1]:#04x}")
        raise UnsafePickleError(
            "uses a pickle operation that is not allowed",
            code=Reason.UNSAFE_OPCODE,
            found=name,
            hint=NOT_RUN,
        )

    def _inst(self) -> None:
        name = self.line(_LINE) + b"." + self.line(_LINE)
        self._refuse(f"INST of {name.decode('utf-8', 'replace')}")

    def _proto(self) -> None:
        protocol = self.uint(1)
        if protocol > 5:
            raise self.corrupt("an unknown protocol", protocol)

    def _frame(self) -> None:
        length = self.uint(8)
        if self.frame_end >= 0:
            self.leave_frame(self.offset - FRAME_BYTES)
        self.frame_end = self.offset + length
        self._stop_at_frame_end()

    def _stop(self) -> bool:
        if len(self.stack) != 1 or self.marks:
            raise self.corrupt("the pickle ends with more than one object on the stack")
        self.result = self.stack.pop()
        if not self.at_end():
            raise FormatError(
                "more data after the end of the pickle",
                code=Reason.TRAILING_DATA,
                record=f"byte {self.offset}",
                hint="hexdata reads one pickle per file. Split the file so that no data is lost.",
            )
        if self.frame_end >= 0:
            self.leave_frame(self.offset)
        self._event = Event.STOP
        return True

    def _need(self, count: int) -> None:
        """Raise if fewer than ``count`` objects are on the stack above the last mark."""
        if len(self.stack) - count < self._fence:
            raise self.corrupt("an opcode needs more objects than are on the stack")

    def _mark(self) -> bool:
        self._fence = len(self.stack)
        self.marks.append(self._fence)
        if self._batch_marks > 0 or self._examples is None or self.stack[-1:] != [self._examples]:
            return False
        self._batch_marks = len(self.marks)
        self._event = Event.BOUNDARY
        return True

    def _pop_mark(self) -> list[Any]:
        start = self.marks.pop()
        self._fence = self.marks[-1] if self.marks else 0
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def _push(self, value: object) -> None:
        self.stack.append(value)

    def _binint1(self) -> None:
        self.stack.append(self.buf[self.pos])
        self.pos += 1

    def _binint2(self) -> None:
        self.stack.append(self.uint(2))

    def _binint(self) -> None:
        value = self.uint(4)
        self.stack.append(value - ((value & 0x80000000) << 1))

    def _size(self, width: int, what: str, limit: int) -> int:
        """Read an integer of ``width`` bytes, the length of the next argument; check and return it."""
        size = self.uint(width)
        if size > limit:
            raise self.limit_exceeded(
                _SIZE_LIMITS[what], f"the size of one {what} exceeds the limit", limit, size
            )
        return size

    def _long(self, width: int) -> None:
        size = self._size(width, "integer", self.limits.integer_bytes)
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def _int_line(self) -> None:
        line = self.line(_LINE)
        if line in (b"00", b"01"):
            self.stack.append(line == b"01")
        else:
            self._decimal(line)

    def _long_line(self) -> None:
        self._decimal(self.line(_LINE).removesuffix(b"L"))

    def _decimal(self, line: bytes) -> None:
        if len(line) > 2 * self.limits.integer_bytes:
            raise self.limit_exceeded(
                Reason.LIMIT_INTEGER, "the size of one integer exceeds the limit", self.limits.integer_bytes
            )
        self._number(line, _DECIMAL, int)

    def _float_line(self) -> None:
        line = self.line(_LINE)
        self._number(line, _FLOAT_LINE, float)
        if math.isinf(self.stack[-1]) and not line.endswith(b"inf"):
            raise self.corrupt("a float that is too large", line[:20])

    def _number(self, line: bytes, form: re.Pattern[bytes], read: Callable[[bytes], float]) -> None:
        if form.fullmatch(line) is None:
            raise self.corrupt("a number in an unknown notation", line[:20])
        self.stack.append(read(line))

    def _binfloat(self) -> None:
        self.stack.append(_FLOAT.unpack(self.take(8))[0])

    def _bytes(self, width: int) -> None:
        size = self._size(width, "array", self.limits.array_bytes)
        self.payload += size
        self.stack.append(self.take(size))

    def _bytearray(self) -> None:
        self._bytes(8)
        self.stack[-1] = ByteArray(self.stack[-1])

    def _text(self, width: int) -> None:
        size = self._size(width, "text", self.limits.text_bytes)
        self._push_text(self.take(size), "utf-8", "surrogatepass")

    def _text_line(self) -> None:
        self._push_text(self.line(self.limits.text_bytes), "raw-unicode-escape", "strict")

    def _push_text(self, raw: bytes, codec: str, errors: str) -> None:
        self.payload += len(raw)
        try:
            text = raw.decode(codec, errors)
        except UnicodeDecodeError:
            raise self.corrupt(f"a text that is not {codec}") from None
        if not text.isascii():
            self.overhead += getsizeof(text)
        self.stack.append(text)

    def _empty_list(self) -> None:
        self.overhead += _CONTAINER
        if self._opens_examples():
            self.key = self.stack[-1]
            self._mark_key = _MARKS_OF_EXAMPLES[self.stack[-1]]
            self._examples = ExamplesPlaceholder()
            self.memo.begin_examples()
            self.stack.append(self._examples)
        else:
            self.stack.append([])

    def _list(self) -> bool:
        items = self._pop_mark()
        self._empty_list()
        return bool(items) and self._extend(items)

    def _append(self) -> bool:
        self._need(2)
        return self._extend([self.stack.pop()])

    def _appends(self) -> bool:
        return self._extend(self._pop_mark())

    def _extend(self, items: list[Any]) -> bool:
        self._need(1)
        target = self.stack[-1]
        if target is self._examples:
            return self._emit_batch(items)
        if not isinstance(target, list):
            raise self.corrupt("appends to an object that is not a list", kind_of(target))
        target.extend(items)
        return False

    def _empty_dict(self) -> None:
        self.overhead += 2 * _CONTAINER
        self.stack.append({})

    def _dict(self) -> None:
        items = self._pop_mark()
        self._empty_dict()
        self._set(items)

    def _set_item(self) -> bool:
        self._need(3)
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])
        return self._completes_example()

    def _set_items(self) -> bool:
        self._set(self._pop_mark())
        return self._completes_example()

    def _set(self, items: list[Any]) -> None:
        self._need(1)
        target = self.stack[-1]
        if isinstance(target, ExamplesPlaceholder):
            raise irregular_error()
        if not isinstance(target, dict) or len(items) % 2:
            raise self.corrupt("sets items of an object that is not a dict", kind_of(target))
        for key in items[::2]:
            # Other keys can make hashing very slow: deeply shared tuples, or long integers that collide.
            if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < 1 << 60):
                raise self.corrupt("a dict key that is neither a text nor an integer", kind_of(key))
        target.update(zip(items[::2], items[1::2], strict=True))
        if self._examples is not None and len(self.stack) == 1:
            self._examples_done = True

    def _tuple(self) -> bool:
        items = self._pop_mark()
        self.overhead += _CONTAINER
        self.stack.append(tuple(items))
        return self._completes_example()

    def _tuple1(self) -> None:
        self._need(1)
        self.overhead += _CONTAINER
        self.stack[-1] = (self.stack[-1],)

    def _tuple2(self) -> None:
        self._need(2)
        self.overhead += _CONTAINER
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def _tuple3(self) -> bool:
        self._need(3)
        self.overhead += _CONTAINER
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]
        return self._completes_example()

    def _global_line(self) -> None:
        module, name = self.line(_LINE), self.line(_LINE)
        self.stack.append(find_global(module.decode("utf-8", "replace"), name.decode("utf-8", "replace")))

    def _stack_global(self) -> None:
        self._need(2)
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(find_global(module, name))

    def _reduce(self) -> None:
        self._need(2)
        args = self.stack.pop()
        self.overhead += _CONTAINER
        self.stack[-1] = made = call(self.stack[-1], args)
        if isinstance(made, bytes) and len(args[0]) > 1:  # Python shares texts of one character
            self.memo.drop(args[0])  # the text of a payload is not kept for references

    def _build(self) -> None:
        self._need(2)
        state = self.stack.pop()
        build(self.stack[-1], state)

    def _memoize(self) -> bool:
        memo = self.memo
        if memo.explicit:
            raise mixed_numbers_error()
        self._need(1)
        memo.into[memo.next] = self.stack[-1]
        memo.next += 1
        return len(self.marks) == self._batch_marks and self._completes_example()

    def _binput(self, width: int) -> bool:
        return self._put(self.uint(width))

    def _put_line(self) -> bool:
        return self._put(self._index())

    def _put(self, index: int) -> bool:
        self._need(1)
        self.memo.put_at(index, self.stack[-1])
        return self._completes_example()

    def _binget1(self) -> None:
        self._get(self.buf[self.pos])
        self.pos += 1

    def _binget4(self) -> None:
        self._get(self.uint(4))

    def _get_line(self) -> None:
        self._get(self._index())

    def _get(self, index: int) -> None:
        header = self.memo.header
        if index in header and (self._examples_done or self._is_past_examples()):
            self._examples_done = True
            self.stack.append(header[index])
            return
        value = self.memo.get(index)
        if isinstance(value, ExamplesPlaceholder):
            raise shared_error(index)
        self.stack.append(value)

    def _is_past_examples(self) -> bool:
        """Return whether a top-level key after the list of examples is on the stack."""
        if self._batch_marks >= 0 or self._examples not in self.stack:
            return False
        after = self.stack.index(self._examples) + 1
        return after < len(self.stack) and isinstance(self.stack[after], str)

    def _index(self) -> int:
        line = self.line(_LINE)
        if not line.isdigit() or len(line) > 18:
            raise self.corrupt("not a memo number", line[:20])
        return int(line)
