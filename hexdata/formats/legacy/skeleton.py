"""What a writer repeats for every example: a skeleton of opcodes, learned from one example of a file.

The example is run through the pickle machine with a tracer, which notes where in the bytes each value
stood. What may differ in the next example becomes a hole: the payloads of arrays, the numbers, and the
references to the memo; all else has to be the same to the last byte. Never decides what a value means.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from hexdata.errors import FormatError
from hexdata.formats.legacy.examples import ArrayKind, Layout, layout_of
from hexdata.formats.legacy.limits import Limits
from hexdata.formats.legacy.machine import Machine
from hexdata.formats.legacy.memo import Memo, is_kept, is_pair
from hexdata.formats.legacy.standins import Dtype, EnumValue, Name

__all__ = ["Reference", "Skeleton", "TracedFloat", "TracedInt", "TracedText", "is_traced_pair"]
__all__ += ["learn", "read_example"]


# Values that know where they stood. They act as what they are, so the machine takes no notice.


class TracedInt(int):
    """An integer, and the place of its bytes in the example."""

    at: slice


class TracedFloat(float):
    """A float, and the place of its bytes in the example."""

    at: slice


class _TracedBytes(bytes):
    at: slice


class TracedText(str):
    """A text that a reference gave, and the place of that in ``Skeleton.references``."""

    place: int


@dataclass(frozen=True, slots=True)
class Reference:
    """A memo number in an example; in a traced one, also what stands for an object that is no text."""

    place: int
    """In ``Skeleton.references``."""
    at: slice
    """The place of the number's bytes."""
    value: Any
    """What it referred to when the skeleton was learned."""


def is_traced_pair(value: object) -> bool:
    """Say whether a traced example has a tuple of two integers here, written out."""
    return type(value) is tuple and len(value) == 2 and all(isinstance(part, TracedInt) for part in value)


@dataclass(frozen=True, eq=False, slots=True)
class Skeleton:
    """The opcodes of one example, with holes. Any two matches have one length and one layout."""

    pattern: re.Pattern[bytes]
    """Matches one example or more, one after the other."""
    length: int
    """Bytes of one example."""
    starts: frozenset[int]
    """Where in it an opcode begins."""
    memoized: int
    """Objects in it that get a memo number."""
    payload: int
    """Bytes of arrays in it."""
    layout: Layout
    board: slice
    policy: slice | None
    fields: dict[str, Any]
    """"value", "player_to_move" and "metadata" of the example that was learned, traced."""
    references: tuple[Reference, ...]
    claimed: frozenset[int]
    """Which references are values of fields: any object will do. The others have to mean what they did."""
    pairs: tuple[tuple[int, Any], ...]
    """Pairs of integers that get a memo number: that, counted from the example's first, and the pair."""


def learn(raw: bytes, memo: Memo, limits: Limits) -> Skeleton | None:
    """Return the skeleton of one example; None if it has what the next ones cannot repeat.

    Args:
        raw: its opcodes, complete.
        memo: a branch of the file's memo, from the example's first number on.
        limits: as for the file.
    """
    tracer = _Tracer(raw, memo, limits)
    try:
        return _skeleton(tracer, tracer.example())
    except (_IrregularError, FormatError, IndexError):
        # FormatError: a reference stood where the object has to. IndexError: it needs more than itself.
        return None


def read_example(raw: bytes, memo: Memo, limits: Limits) -> Any:
    """Return the example in ``raw``, opcode by opcode; arguments as for :func:`learn`.

    Raises:
        FormatError: "shared-payload", if it refers to something that was forgotten.
    """
    return _OneExample(raw, memo, limits).example()


class _OneExample(Machine):
    """Reads one example out of its bytes, with the memo of the file around it."""

    def __init__(self, raw: bytes, memo: Memo, limits: Limits) -> None:
        super().__init__(io.BytesIO(), limits, memo)
        self.buf = raw

    def example(self) -> Any:
        while self.pos < len(self.buf):
            self._step()
        return self.stack[-1]

    def _step(self) -> None:
        opcode = self.buf[self.pos]
        self.pos += 1
        self._handlers[opcode]()


_LONGEST_PATTERN: Final = 1 << 12
"""Bytes of an example outside of its holes: real ones have 250, and each costs time and memory to learn."""


class _IrregularError(Exception):
    """The example is not what the next ones could repeat."""


_TRACED: Final = frozenset(b"KMJGCB\x8e\x96")
"""Numbers and bytes."""
_REFERRING: Final = frozenset(b"hj")
_REGULAR: Final = _TRACED | _REFERRING | frozenset(b"(N\x88\x89)t\x85\x86\x87}su\x94RbX\x8cc\x93")
"""Opcodes of skeletons. Texts and globals are part of them, byte for byte, unless they are memoized."""


class _Tracer(_OneExample):
    """Reads one example and notes where its values stood."""

    def __init__(self, raw: bytes, memo: Memo, limits: Limits) -> None:
        super().__init__(raw, memo, limits)
        self.first = memo.next
        self.references: list[Reference] = []
        self.starts: set[int] = set()

    def _step(self) -> None:
        start = self.pos
        opcode = self.buf[start]
        if opcode not in _REGULAR:
            raise _IrregularError
        self.starts.add(start)
        super()._step()
        if opcode in _REFERRING:
            self.stack[-1] = self._reference(self.stack[-1], slice(start + 1, self.pos))
        elif opcode in _TRACED:
            self.stack[-1] = _traced(self.stack[-1], slice(start + 1, self.pos))

    def _reference(self, value: Any, at: slice) -> Any:
        """Return what stands for an object that was just referred to."""
        if int.from_bytes(self.buf[at], "little") >= self.first:
            raise _IrregularError  # to a part of itself: the next example has that under another number
        reference = Reference(len(self.references), at, value)
        self.references.append(reference)
        if isinstance(value, str):  # it may be a key, so it has to stay a text
            text = TracedText(value)
            text.place = reference.place
            return text
        if isinstance(value, EnumValue) or is_pair(value):
            return reference
        if isinstance(value, (Name, Dtype)) or value == b"b":
            return value
        raise _IrregularError


def _traced(value: Any, at: slice) -> Any:
    traced: Any
    if isinstance(value, bytes):
        traced = _TracedBytes(value)
        at = slice(at.stop - len(value), at.stop)
    else:
        traced = TracedFloat(value) if isinstance(value, float) else TracedInt(value)
    traced.at = at
    return traced


def _skeleton(tracer: _Tracer, example: Any) -> Skeleton:
    layout = layout_of(example, tracer.limits)
    if not isinstance(layout, Layout) or len(tracer.stack) > 1 or tracer.marks:
        raise _IrregularError
    if layout.keys is None:
        board, policy, fields = example[0], example[1], {"value": example[2]}
    else:
        fields = dict(example)
        board, policy = fields.pop("board"), fields.pop("policy")
    arrays = [board] if policy is None else [board, policy]
    if not all(isinstance(getattr(array, "payload", None), _TracedBytes) for array in arrays):
        raise _IrregularError
    memoized = sorted(tracer.memo.current.items())
    if any(is_kept(item) for _, item in memoized):
        raise _IrregularError  # a name that later examples refer to: only the machine can introduce it
    leaves = [*_leaves(fields)]
    if any(isinstance(leaf, _TracedBytes) for leaf in leaves):
        raise _IrregularError  # no field has bytes, and a trace does not say whether they are a bytearray
    holes = [reference.at for reference in tracer.references]
    holes += [array.payload.at for array in arrays]
    holes += [leaf.at for leaf in leaves if isinstance(leaf, (TracedInt, TracedFloat))]
    if len(tracer.buf) - sum(hole.stop - hole.start for hole in holes) > _LONGEST_PATTERN:
        raise _IrregularError
    return Skeleton(
        pattern=_pattern(tracer.buf, holes),
        length=len(tracer.buf),
        starts=frozenset(tracer.starts),
        memoized=tracer.memo.next - tracer.first,
        payload=sum(len(array.payload) for array in arrays),
        layout=_untraced(layout),
        board=board.payload.at,
        policy=None if policy is None else policy.payload.at,
        fields=fields,
        references=tuple(tracer.references),
        claimed=frozenset(leaf.place for leaf in leaves if isinstance(leaf, (TracedText, Reference))),
        pairs=tuple((index - tracer.first, item) for index, item in memoized if is_pair(item)),
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Give the single values of an example's fields, a pair of integers one by one."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif is_traced_pair(value):
        yield from value
    else:
        yield value


def _untraced(layout: Layout) -> Layout:
    """Return the same layout out of plain texts and integers."""

    def keys(traced: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if traced is None else tuple(map(str, traced))

    def kind(traced: ArrayKind | str) -> ArrayKind | str:
        return traced if isinstance(traced, str) else replace(traced, shape=tuple(map(int, traced.shape)))

    return Layout(keys(layout.keys), keys(layout.metadata_keys), kind(layout.board), kind(layout.policy))


def _pattern(raw: bytes, holes: list[slice]) -> re.Pattern[bytes]:
    """Return what matches ``raw`` with anything in the holes, once or more."""
    parts, end = [], 0
    for hole in sorted(holes, key=lambda hole: int(hole.start)):
        parts += [re.escape(raw[end : hole.start]), b".{%d}" % (hole.stop - hole.start)]
        end = hole.stop
    parts.append(re.escape(raw[end:]))
    # Possessive: it never goes back into an example it has taken, so it keeps no trail.
    return re.compile(b"(?:" + b"".join(parts) + b")++", re.DOTALL)
