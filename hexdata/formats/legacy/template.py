"""Templates: the opcodes that a pickler repeats for every example, learned from one example of a file.

A tracer runs the example through the unpickler and records the location of each value. The bytes that
may differ in other examples become holes: payloads of arrays, numbers, and references to the memo. All other
bytes must be identical.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from hexdata.errors import FormatError
from hexdata.formats.legacy.allowlist import AllowedGlobal, EnumValue, PickledDtype
from hexdata.formats.legacy.examples import ExampleLayout, layout_of
from hexdata.formats.legacy.limits import LegacyLimits
from hexdata.formats.legacy.memo import Memo, is_kept, is_pair
from hexdata.formats.legacy.payloads import ArrayKind
from hexdata.formats.legacy.unpickler import Unpickler

__all__ = ["ExampleTemplate", "Reference", "TracedFloat", "TracedInt", "TracedText", "is_traced_pair"]
__all__ += ["learn", "read_example"]


# Values with the location of their bytes. They behave as plain values, so the unpickler needs no changes.


class TracedInt(int):
    """An integer, with the location ``span`` of its bytes in the example."""

    span: slice


class TracedFloat(float):
    """A float, with the location ``span`` of its bytes in the example."""

    span: slice


class _TracedBytes(bytes):
    span: slice


class TracedText(str):
    """A text from a reference, with the index ``slot`` of the reference in ``ExampleTemplate.references``."""

    slot: int


@dataclass(frozen=True, slots=True)
class Reference:
    """A memo number in an example. In a traced example it also replaces an object that is not text."""

    slot: int
    """Index in ``ExampleTemplate.references``."""
    span: slice
    """Location of the bytes of the number."""
    value: Any
    """The object it referred to in the example that was learned."""


def is_traced_pair(value: object) -> bool:
    """Return whether a traced value is a tuple of two integers that is written in the example itself."""
    return type(value) is tuple and len(value) == 2 and all(isinstance(part, TracedInt) for part in value)


@dataclass(frozen=True, eq=False, slots=True)
class ExampleTemplate:
    """The opcodes of one example, with holes. All matching examples have the same length and layout."""

    pattern: re.Pattern[bytes]
    """Matches one or more consecutive examples."""
    length: int
    """Length of one example in bytes."""
    rest: tuple[slice, ...]
    """Location of the bytes of an example that are not in ``board`` or ``policy``."""
    starts: frozenset[int]
    """Offsets in the example at which an opcode begins."""
    memoized: int
    """Number of objects in the example that get a memo number."""
    payload: int
    """Bytes of the arrays in the example."""
    layout: ExampleLayout
    board: slice
    """Location of the payload of the board in an example."""
    policy: slice | None
    """Location of the payload of the policy; None if the policies are None."""
    fields: dict[str, Any]
    """The traced values of the example that was learned, except "board" and "policy"."""
    references: tuple[Reference, ...]
    field_references: frozenset[int]
    """Indices of the references that are values of fields and may be any object. All others must refer to the
    same value as in the example that was learned."""
    pairs: tuple[tuple[int, Any], ...]
    """Pairs of integers with a memo number: (number relative to the first of the example, traced pair)."""


def learn(raw: bytes, memo: Memo, limits: LegacyLimits) -> ExampleTemplate | None:
    """Return the template of one example; None if later examples cannot have the same opcodes.

    Args:
        raw: All opcodes of the example.
        memo: A branch of the memo of the file, which begins at the first number of the example.
        limits: Limits of the file.
    """
    tracer = _Tracer(raw, memo, limits)
    try:
        return _template(tracer, tracer.example())
    except (_IrregularError, FormatError, IndexError):
        # FormatError: a traced reference cannot replace its object. IndexError: raw is not self-contained.
        return None


def read_example(raw: bytes, memo: Memo, limits: LegacyLimits) -> Any:
    """Read one example opcode by opcode and return it.

    Args:
        raw: All opcodes of the example.
        memo: A branch of the memo of the file, which begins at the first number of the example.
        limits: Limits of the file.

    Raises:
        FormatError: "shared-payload", if the example refers to an object that was dropped.
    """
    return _OneExample(raw, memo, limits).example()


class _OneExample(Unpickler):
    """Reads one example from its bytes, with a branch of the memo of the file."""

    def __init__(self, raw: bytes, memo: Memo, limits: LegacyLimits) -> None:
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
"""Maximum number of bytes outside of holes, as each takes time and memory. Real examples have 250."""


class _IrregularError(Exception):
    """Later examples cannot have the same opcodes as this example."""


_TRACED: Final = frozenset(b"KMJGCB\x8e\x96")
"""Opcodes of numbers and bytes."""
_REFERRING: Final = frozenset(b"hj")
_REGULAR: Final = _TRACED | _REFERRING | frozenset(b"(N\x88\x89)t\x85\x86\x87}su\x94RbX\x8cc\x93")
"""Opcodes allowed in a template. Texts and globals written in full must be identical in all examples."""


class _Tracer(_OneExample):
    """Reads one example and records the location of its values."""

    def __init__(self, raw: bytes, memo: Memo, limits: LegacyLimits) -> None:
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

    def _reference(self, value: Any, span: slice) -> Any:
        """Record a reference, and return the traced value that replaces its object on the stack."""
        if int.from_bytes(self.buf[span], "little") >= self.first:
            raise _IrregularError  # refers to the example itself: the number differs in the next one
        reference = Reference(len(self.references), span, value)
        self.references.append(reference)
        if isinstance(value, str):  # may be a key, so it must remain a text
            text = TracedText(value)
            text.slot = reference.slot
            return text
        if isinstance(value, EnumValue) or is_pair(value):
            return reference
        if isinstance(value, (AllowedGlobal, PickledDtype)) or value == b"b":
            return value
        raise _IrregularError


def _traced(value: Any, span: slice) -> Any:
    traced: Any
    if isinstance(value, bytes):
        traced = _TracedBytes(value)
        span = slice(span.stop - len(value), span.stop)
    else:
        traced = TracedFloat(value) if isinstance(value, float) else TracedInt(value)
    traced.span = span
    return traced


def _template(tracer: _Tracer, example: Any) -> ExampleTemplate:
    layout = layout_of(example, tracer.limits)
    if not isinstance(layout, ExampleLayout) or len(tracer.stack) > 1 or tracer.marks:
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
        raise _IrregularError  # later examples may refer to it; only the unpickler adds it to the memo
    leaves = [*_leaves(fields)]
    if any(isinstance(leaf, _TracedBytes) for leaf in leaves):
        raise _IrregularError  # no field has bytes, and a traced value may be a bytearray
    holes = [reference.span for reference in tracer.references]
    holes += [array.payload.span for array in arrays]
    holes += [leaf.span for leaf in leaves if isinstance(leaf, (TracedInt, TracedFloat))]
    if len(tracer.buf) - sum(hole.stop - hole.start for hole in holes) > _LONGEST_PATTERN:
        raise _IrregularError
    return ExampleTemplate(
        pattern=_pattern(tracer.buf, holes),
        length=len(tracer.buf),
        rest=_between([array.payload.span for array in arrays], len(tracer.buf)),
        starts=frozenset(tracer.starts),
        memoized=tracer.memo.next - tracer.first,
        payload=sum(len(array.payload) for array in arrays),
        layout=_untraced(layout),
        board=board.payload.span,
        policy=None if policy is None else policy.payload.span,
        fields=fields,
        references=tuple(tracer.references),
        field_references=frozenset(leaf.slot for leaf in leaves if isinstance(leaf, (TracedText, Reference))),
        pairs=tuple((index - tracer.first, item) for index, item in memoized if is_pair(item)),
    )


def _between(spans: list[slice], length: int) -> tuple[slice, ...]:
    """Return the locations between ``spans``, which do not overlap, from 0 to ``length``."""
    spans = sorted(spans, key=lambda span: int(span.start))
    starts = [0, *(span.stop for span in spans)]
    stops = [*(span.start for span in spans), length]
    return tuple(map(slice, starts, stops))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the single values in the fields of an example; a pair of integers yields both."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif is_traced_pair(value):
        yield from value
    else:
        yield value


def _untraced(layout: ExampleLayout) -> ExampleLayout:
    """Return the same layout with plain texts and integers instead of traced ones."""

    def keys(traced: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if traced is None else tuple(map(str, traced))

    def kind(traced: ArrayKind | str) -> ArrayKind | str:
        return traced if isinstance(traced, str) else replace(traced, shape=tuple(map(int, traced.shape)))

    return ExampleLayout(
        keys(layout.keys), keys(layout.metadata_keys), kind(layout.board), kind(layout.policy)
    )


def _pattern(raw: bytes, holes: list[slice]) -> re.Pattern[bytes]:
    """Return a pattern that matches ``raw``, with any bytes in the holes, one or more times."""
    parts, end = [], 0
    for hole in sorted(holes, key=lambda hole: int(hole.start)):
        parts += [re.escape(raw[end : hole.start]), b".{%d}" % (hole.stop - hole.start)]
        end = hole.stop
    parts.append(re.escape(raw[end:]))
    # The possessive ++ never backtracks into a matched example, so it needs no memory per example.
    return re.compile(b"(?:" + b"".join(parts) + b")++", re.DOTALL)
