"""Fast path of the legacy reader: recognises runs of similar examples and converts them to columns.

The result is the same as from the unpickler. References of a run are looked up in the same memo, and an
example whose references mean something else than in the template is read opcode by opcode.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import FormatError
from hexdata.formats.legacy.examples import CodedColumn, Column, ExampleGroup, NumberColumn
from hexdata.formats.legacy.limits import LegacyLimits
from hexdata.formats.legacy.memo import Memo
from hexdata.formats.legacy.payloads import PORTION, PackedBoards, PackedPolicies, PayloadPacker
from hexdata.formats.legacy.template import (
    ExampleTemplate,
    Reference,
    TracedFloat,
    TracedInt,
    TracedText,
    is_traced_pair,
    learn,
    read_example,
)
from hexdata.formats.legacy.unpickler import FRAME_BYTES, ExamplesPlaceholder, Unpickler

__all__ = ["ExampleRun", "FastPath", "convert_runs"]

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

_MOST_KNOWN: Final = 64
"""Maximum number of templates to try, most recently matched first. A new one replaces the last."""
_MOST_LEARNED: Final = 512
"""Maximum number of templates learned per file. Each takes a millisecond; more of them would not pay off."""
_FRAME: Final = 0x95


@dataclass(eq=False, slots=True)
class ExampleRun(ExamplesPlaceholder):
    """Consecutive examples of one template, represented by a single object on the stack of the unpickler."""

    template: ExampleTemplate
    raw: bytes | memoryview
    """Bytes of the examples, usually a view of a buffer of the unpickler."""
    count: int
    first: int
    """Memo number of the first object of the first example."""

    def split(self, count: int) -> tuple[ExampleRun, ExampleRun]:
        """Return the first ``count`` examples and the remaining ones as two runs."""
        template = self.template
        size = count * template.length
        first = self.first + count * template.memoized
        return (
            ExampleRun(template, self.raw[:size], count, self.first),
            ExampleRun(template, self.raw[size:], self.count - count, first),
        )


class FastPath:
    """Recognises runs of examples. Called when the unpickler pauses between two examples.

    Args:
        unpickler: The unpickler that reads the file. Its memo gets access to the pairs of runs.
    """

    def __init__(self, unpickler: Unpickler) -> None:
        self._unpickler = unpickler
        self._memo = unpickler.memo
        self._memo.pending = self
        self._known: list[ExampleTemplate] = []
        self._longest = 0  # maximum length in bytes of one example of these
        self._learned = 0
        self._pending: list[ExampleRun] = []  # since the last clear, in order

    def advance(self) -> None:
        """Learn the last example, and push all runs that follow onto the stack of the unpickler.

        Raises:
            FormatError: As for :meth:`Unpickler.more`.
        """
        unpickler = self._unpickler
        self._learn()
        while self._known and not self._memo.explicit:  # runs need implicit memo numbers
            if self._match_across_frame() or self._match() or self._skip_frame():
                continue
            unpickler.begin_example()
            if len(unpickler.buf) - unpickler.pos >= self._longest + FRAME_BYTES or not unpickler.more():
                return

    def pair(self, index: int) -> tuple[int, int] | None:
        """Return the pair with memo number ``index`` in a run since the last :meth:`clear`; else None."""
        run_index = bisect_right(self._pending, index, key=lambda run: run.first) - 1
        if run_index < 0 or not self._pending[run_index].template.memoized:
            return None
        run = self._pending[run_index]
        template = run.template
        row, number = divmod(index - run.first, template.memoized)
        pair = dict(template.pairs).get(number)
        if pair is None or row >= run.count:
            return None
        start = row * template.length
        rest = _rest(_rows(run.raw[start : start + template.length], template), template)
        return int(_numbers(rest, template, pair[0])[0]), int(_numbers(rest, template, pair[1])[0])

    def clear(self) -> None:
        """Drop the runs so far. Call this after :func:`convert_runs`, which adds their pairs to the memo."""
        self._pending.clear()

    def _learn(self) -> None:
        """Learn the template of the example just read, if its start is still in the buffer."""
        unpickler = self._unpickler
        if unpickler.anchor < 0 or self._learned == _MOST_LEARNED or self._memo.explicit:
            return
        raw = unpickler.buf[unpickler.anchor : unpickler.pos]
        template = learn(raw, self._memo.branch(unpickler.example_memo), unpickler.limits)
        if template is not None:
            self._learned += 1
            self._known = [template, *self._known[: _MOST_KNOWN - 1]]
            self._longest = max(known.length for known in self._known)

    def _match(self) -> bool:
        """Push the consecutive runs that begin here; return False if there is none.

        The last one may end before an example in which the frame ends, as few such examples match.
        """
        unpickler, known = self._unpickler, self._known
        buf, start = unpickler.buf, unpickler.pos
        cut = unpickler.frame_end - unpickler.origin
        view, pos = memoryview(buf), start
        while True:
            for template in known:
                match = template.pattern.match(buf, pos)
                if match is not None:
                    break
            else:
                return pos > start
            end = match.end()
            self._push(template, view[pos:end])
            unpickler.pos = pos = end
            if pos < cut < pos + template.length:
                return True

    def _skip_frame(self) -> bool:
        unpickler = self._unpickler
        is_frame = (
            unpickler.pos + FRAME_BYTES <= len(unpickler.buf) and unpickler.buf[unpickler.pos] == _FRAME
        )
        if is_frame:
            unpickler.skip_frame()
        return is_frame

    def _match_across_frame(self) -> bool:
        """Push one example that the end of a frame and the next FRAME interrupt; return False if none."""
        unpickler = self._unpickler
        buf, pos, cut = unpickler.buf, unpickler.pos, unpickler.frame_end - unpickler.origin
        if not pos < cut <= min(len(buf) - FRAME_BYTES, pos + self._longest) or buf[cut] != _FRAME:
            return False
        joined = buf[pos:cut] + buf[cut + FRAME_BYTES : pos + self._longest + FRAME_BYTES]
        for template in self._known:
            length = template.length
            if cut - pos in template.starts and template.pattern.fullmatch(joined, 0, length):
                self._push(template, joined[:length])
                unpickler.pos = cut
                unpickler.skip_frame()
                unpickler.pos = pos + length + FRAME_BYTES
                return True
        return False

    def _push(self, template: ExampleTemplate, raw: bytes | memoryview) -> None:
        unpickler, memo = self._unpickler, self._memo
        count = len(raw) // template.length
        start = unpickler.origin + unpickler.pos
        if start <= unpickler.frame_end < start + len(raw) and isinstance(raw, memoryview):
            within = (unpickler.frame_end - start) % template.length
            unpickler.leave_frame(unpickler.frame_end if within in template.starts else -1)
        run = ExampleRun(template, raw, count, memo.next)
        self._pending.append(run)
        unpickler.stack.append(run)
        unpickler.examples_in_runs += count
        unpickler.payload += count * template.payload
        memo.next += count * template.memoized
        if template is not self._known[0]:
            self._known.remove(template)
            self._known.insert(0, template)


def convert_runs(
    indexed_runs: list[tuple[int, ExampleRun]], memo: Memo, limits: LegacyLimits
) -> tuple[ExampleGroup, list[tuple[int, Any]]]:
    """Convert runs of one template to a group, and add their pairs of integers to the memo.

    Args:
        indexed_runs: At least one run, each with the index in the block of its first example.
        memo: Memo of the file, complete up to the last of these examples.
        limits: Limits of the file.

    Returns:
        The group, and the remaining examples with their index in the block. These have references that mean
        something else than in the template, so they are read opcode by opcode.

    Raises:
        FormatError: "shared-payload", if an example refers to an object that was dropped.
    """
    template = indexed_runs[0][1].template
    counts = np.array([run.count for _, run in indexed_runs])
    rest, boards, policies = _split_payloads([run.raw for _, run in indexed_runs], template)
    indices = _spread([position for position, _ in indexed_runs], counts, 1)
    firsts = _spread([run.first for _, run in indexed_runs], counts, template.memoized)
    for number, pair in template.pairs:
        memo.put_pairs(firsts + number, _pairs(rest, template, pair))
    columns, regular = _resolve(template, rest, firsts, memo)
    others = []
    if not regular.all():
        ends = np.cumsum(counts)
        for row in np.flatnonzero(~regular).tolist():
            position, run = indexed_runs[int(np.searchsorted(ends, row, "right"))]
            start = (int(indices[row]) - position) * template.length
            raw = bytes(run.raw[start : start + template.length])
            example = read_example(raw, memo.branch(int(firsts[row])), limits)
            others.append((int(indices[row]), example))
        rest, indices = rest[regular], indices[regular]
        boards = boards and boards[regular]
        policies = policies and policies[regular]
        columns = {
            slot: CodedColumn(column.codes[regular], column.values) for slot, column in columns.items()
        }
    return _group(template, rest, indices, columns, boards, policies), others


def _split_payloads(
    raws: list[bytes | memoryview], template: ExampleTemplate
) -> tuple[UInt8Array, PackedBoards | None, PackedPolicies | None]:
    """Return the bytes of all examples without the payloads of arrays, and the packed payloads.

    Args:
        raws: Bytes of the examples; each item has one or more.
        template: Template of the examples.

    Returns:
        The other bytes, (n, k), as of :func:`_rest`; the boards and the policies.
    """
    packer = PayloadPacker(template.layout.board, template.layout.policy)
    rests, portion, size = [], [], 0
    for number, raw in enumerate(raws, 1):
        portion.append(raw)
        size += len(raw)
        if size >= PORTION or number == len(raws):
            rows = _rows(b"".join(portion), template)
            rests.append(_rest(rows, template))
            packer.add(rows[:, template.board], None if template.policy is None else rows[:, template.policy])
            portion, size = [], 0
    return np.concatenate(rests), *packer.finish()


def _group(
    template: ExampleTemplate,
    rest: UInt8Array,
    indices: Int64Array,
    columns: dict[int, CodedColumn],
    boards: PackedBoards | None,
    policies: PackedPolicies | None,
) -> ExampleGroup:
    """Return a group of examples.

    Args:
        template: Template of the examples.
        rest: Bytes of the examples, as of :func:`_rest`, (n, k).
        indices: Index of each example in the block, (n,).
        columns: Columns of values given by references, by index in ``template.references``.
        boards: The boards.
        policies: The policies.
    """

    def column(leaf: Any) -> Column:
        if isinstance(leaf, (TracedText, Reference)):
            return columns[leaf.slot]
        if isinstance(leaf, (TracedInt, TracedFloat)):
            return NumberColumn(_numbers(rest, template, leaf))
        if is_traced_pair(leaf):
            return NumberColumn(_pairs(rest, template, leaf))
        if isinstance(leaf, dict) and leaf:  # metadata in metadata
            keys = [str(key) if isinstance(key, str) else key for key in leaf]
            parts = CodedColumn.zipped([column(part) for part in leaf.values()])
            return CodedColumn(parts.codes, [dict(zip(keys, part, strict=True)) for part in parts.values])
        return CodedColumn(np.zeros(len(rest), np.intp), [leaf])  # not a hole, so the value is constant

    fields = template.fields
    return ExampleGroup(
        layout=template.layout,
        indices=indices,
        board=boards,
        policy=policies,
        value=column(fields["value"]),
        player_to_move=column(fields["player_to_move"]) if "player_to_move" in fields else None,
        metadata={str(key): column(leaf) for key, leaf in fields.get("metadata", {}).items()},
        numbers={key: column(fields[key]) for key in template.layout.number_keys},
    )


def _resolve(
    template: ExampleTemplate, rest: UInt8Array, firsts: Int64Array, memo: Memo
) -> tuple[dict[int, CodedColumn], npt.NDArray[np.bool_]]:
    """Look up the references of all rows, each distinct memo number once.

    Returns:
        The columns of the references that are values of fields, by index in ``template.references``; and
        which rows are regular, (n,): their other references mean the same as in the template.
    """
    columns: dict[int, CodedColumn] = {}
    regular = np.ones(len(rest), dtype=bool)
    for reference in template.references:
        indices = _unsigned(rest, template, reference.span)
        regular &= indices < firsts
        column = CodedColumn.of_numbers(indices)
        values = [_get(memo, index) for index in column.values]
        if reference.slot in template.field_references:
            columns[reference.slot] = CodedColumn(column.codes, values)
            unchanged = [value is not _DROPPED for value in values]
        else:
            unchanged = [_same(value, reference.value) for value in values]
        if not all(unchanged):
            regular &= np.array(unchanged)[column.codes]
    return columns, regular


_DROPPED: Final = object()


def _get(memo: Memo, index: int) -> object:
    try:
        return memo.get(index)
    except FormatError:
        return _DROPPED  # the example is then read opcode by opcode, which raises


def _same(value: object, other: object) -> bool:
    """Return whether type and value of two objects are equal. ``other`` is from a template and small."""
    return type(value) is type(other) and value == other


def _rows(raw: bytes | memoryview, template: ExampleTemplate) -> UInt8Array:
    """Return the bytes of examples as rows, uint8 (n, length)."""
    return np.frombuffer(raw, np.uint8).reshape(-1, template.length)


def _rest(rows: UInt8Array, template: ExampleTemplate) -> UInt8Array:
    """Return the columns of ``rows`` that are not in the payload of an array, (n, k)."""
    return np.concatenate([rows[:, part] for part in template.rest], axis=1)


def _spread(starts: list[int], counts: npt.NDArray[Any], step: int) -> Int64Array:
    """Return the concatenated ranges ``starts[i] + step * arange(counts[i])``, int64 (sum(counts),)."""
    before = np.repeat(np.cumsum(counts) - counts, counts)
    spread: Int64Array = np.repeat(np.array(starts, np.int64), counts)
    spread += step * (np.arange(len(spread)) - before)
    return spread


def _columns(rest: UInt8Array, template: ExampleTemplate, span: slice) -> UInt8Array:
    """Return the bytes of all examples at ``span``, (n, size of the span), contiguous."""
    before = sum(part.stop - part.start for part in template.rest if part.stop <= span.start)
    start = next(part.start for part in template.rest if part.stop > span.start)
    shift = before - start
    return np.ascontiguousarray(rest[:, span.start + shift : span.stop + shift])


def _unsigned(rest: UInt8Array, template: ExampleTemplate, span: slice) -> npt.NDArray[Any]:
    """Return the little-endian unsigned integers of all examples at ``span``, (n,)."""
    return _columns(rest, template, span).view(f"<u{span.stop - span.start}")[:, 0]


def _pairs(rest: UInt8Array, template: ExampleTemplate, pair: Any) -> Int64Array:
    """Return a pair of integers of all examples, int64 (n, 2)."""
    return np.stack([_numbers(rest, template, part).astype(np.int64) for part in pair], axis=1)


def _numbers(rest: UInt8Array, template: ExampleTemplate, leaf: TracedInt | TracedFloat) -> npt.NDArray[Any]:
    """Return the numbers of all examples at the bytes of ``leaf``, (n,)."""
    if isinstance(leaf, TracedFloat):
        return _columns(rest, template, leaf.span).view(">f8")[:, 0].astype(np.float64)
    numbers = _unsigned(rest, template, leaf.span)
    return numbers.view("<i4") if numbers.itemsize == 4 else numbers  # BININT is signed, BININT2 is not
