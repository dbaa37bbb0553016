"""Runs of similar examples, which are converted to columns at once.

A pickler repeats the same opcodes for every example. A template is made of the opcodes of one example that
the unpickler has read: its numbers, payloads of arrays and references to the memo become holes, and all other
bytes must be identical in other examples. A regular expression finds the examples that follow.

The opcodes of a template are then interpreted once for all examples of a run: the values of a hole are a
column if they differ, and a plain value if they do not. The result is an example with columns as its values.
Where examples of a run differ in what cannot be a column, such as a key or a global, the unpickler reads them
one by one.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pickletools import genops
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import FormatError, Reason
from hexdata.formats.legacy import examples as columns
from hexdata.formats.legacy.allowlist import ByteArray, PickledDtype
from hexdata.formats.legacy.examples import Column, ExampleGroup
from hexdata.formats.legacy.stream import PickleStream
from hexdata.formats.legacy.unpickler import Memo, Unpickler
from hexdata.formats.source import BATCH_ROWS

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

_PORTION: Final = 1 << 20
"""Bytes of examples, approximately, whose arrays are packed at a time. Payloads are 50 times as large as the
result, so a portion should fit into the CPU cache."""
_MOST_KNOWN: Final = 64
"""Maximum number of templates to try, most recently matched first. A new one replaces the last."""
_MOST_LEARNED: Final = 512
"""Maximum number of templates per file. Each takes a millisecond; more of them would not pay off."""
_MOST_PAIRS: Final = 1 << 21
"""Number of pairs of integers that are kept, 24 bytes each. Above it, older ones are dropped. Each example of
a real file has a game id of its own, so objects of Python would take hundreds of megabytes."""
_MORE_PAIRS: Final = 1 << 18
"""Maximum number of pairs for which memory is reserved at a time, so that they are seldom copied."""
_LONGEST_PATTERN: Final = 1 << 12
"""Maximum number of bytes outside of holes, as each takes time and memory. Real examples have 250."""
_SHORTEST_PAYLOAD: Final = 9
"""Minimum number of bytes that are a hole. The bytes of a NumPy scalar are a value, so they stay."""

_REFERENCES: Final = {ord("h"): "<u1", ord("j"): "<u4"}
_NUMBERS: Final = {ord("K"): "<u1", ord("M"): "<u2", ord("J"): "<i4", ord("G"): ">f8", **_REFERENCES}
"""NumPy type of the argument of each opcode of a number or a reference."""
_MEMOIZE: Final = 0x94
_PAYLOADS: Final = frozenset(b"CB\x8e\x96")
_PLAIN: Final = _PAYLOADS | frozenset(b"(N\x88\x89)t\x85\x86\x87}su\x94RbX\x8cc\x93")
"""Other opcodes allowed in a template. Texts and globals written in full are identical in all examples."""
_PAIR: Final = re.compile(rb"[KMJ]{2}\x86")
"""The opcodes before the MEMOIZE of a pair of integers."""
_MOST_CONTAINERS: Final = 100
"""Maximum number of dicts and tuples in an example, which limits how deeply they are nested."""


class _Payload(bytes):
    """Bytes of an array of a template; ``span`` is their location in the example."""

    span: slice


class ExampleTemplate:
    """The opcodes of one example, with holes. All matching examples have the same length.

    Args:
        raw: All opcodes of the example.
        first: Memo number of its first object.

    Raises:
        FormatError: Other examples cannot have the same opcodes.

    Attributes:
        length: Length of an example in bytes.
        steps: For each opcode, its offset and hole: the field of its argument in :meth:`numbers`, its
            payload, or None.
        starts: The offsets of the opcodes.
        pattern: Matches one or more consecutive examples.
        memoized: Number of objects in the example that get a memo number.
        pairs: Pairs of integers with a memo number, such as a game id: this number less ``first``, and the
            fields of the two integers in :meth:`numbers`.
    """

    def __init__(self, raw: bytes, first: int) -> None:
        self._raw, self.length, self.memoized = raw, len(raw), 0
        self.steps: list[tuple[int, Any]] = []
        self.pairs: list[tuple[int, str, str]] = []
        spans: dict[str, slice] = {}  # of the numbers
        payloads = [slice(0, 0)]
        pattern, outside, containers, after = b"", 0, 0, 0
        # ``genops`` needs a STOP at the end, and two opcodes in sequence give the end of the first.
        opcodes: Iterator[Any] = pairwise(genops(raw + b"."))
        for (_, argument, start), (_, _, end) in opcodes:
            code, span = raw[start], slice(end, end)
            hole: Any = None
            # What differs between examples becomes a hole: bytes of arrays, numbers and references.
            if code in _PAYLOADS and len(argument) >= _SHORTEST_PAYLOAD:
                hole = (ByteArray if isinstance(argument, bytearray) else _Payload)(argument)
                hole.span = span = slice(end - len(argument), end)
                payloads.append(span)
            elif code in _NUMBERS:
                hole = str(start)
                spans[hole] = span = slice(start + 1, end)
            # Bytes outside of holes are equal in all examples, so one interpretation holds for all.
            elif code not in _PLAIN:
                raise FormatError("an opcode whose argument may differ")
            if code in _REFERENCES and argument >= first:
                raise FormatError("a reference to the example itself: the number differs in the next one")
            if hole is not None:
                size = span.stop - span.start
                # A counted repeat takes as long as ten dots.
                dots = b"." * size if size < _SHORTEST_PAYLOAD else b".{%d}" % size
                pattern += re.escape(raw[after : span.start]) + dots
                outside, after = outside + span.start - after, span.stop
            self.steps.append((start, hole))
            containers += code in b"}t\x85\x86\x87"
            if code == _MEMOIZE:
                # Pairs of integers, such as game ids, are kept for later examples, which refer to them.
                before = [at for at, _ in self.steps[-4:-1]]
                if _PAIR.fullmatch(bytes(raw[at] for at in before)):
                    self.pairs.append((self.memoized, str(before[0]), str(before[1])))
                self.memoized += 1
        outside += len(raw) - after
        if outside > _LONGEST_PATTERN or containers > _MOST_CONTAINERS or not spans:
            raise FormatError("an example that is too long or has no numbers")
        # The possessive ++ never backtracks into a matched example, so it needs no memory per example.
        self.pattern = re.compile(b"(?:" + pattern + re.escape(raw[after:]) + b")++", re.DOTALL)
        self.starts = frozenset(start for start, _ in self.steps)
        # All numbers of an example are gathered with one index, from the bytes between the payloads, and
        # viewed as a record.
        ends = [*(span.start for span in payloads[1:]), len(raw)]
        self._rest = [slice(span.stop, end) for span, end in zip(payloads, ends, strict=True)]
        offsets = np.concatenate([np.arange(span.start, span.stop) for span in self._rest])
        taken = np.concatenate([np.arange(span.start, span.stop) for span in spans.values()])
        self._taken = np.searchsorted(offsets, taken)
        self._dtype = np.dtype([(name, _NUMBERS[raw[int(name)]]) for name in spans])

    def numbers(self, runs: Sequence[UInt8Array]) -> npt.NDArray[np.void]:
        """Return the numbers and references in the examples of runs, (n,).

        Args:
            runs: Bytes of the examples of each run, (count, length).
        """
        rest = np.concatenate([join_columns(runs, span) for span in self._rest], axis=1)
        return rest.take(self._taken, axis=1).view(self._dtype)[:, 0]

    def interpret(
        self,
        numbers: npt.NDArray[np.void],
        firsts: Int64Array,
        memo: Memo,
        row: UInt8Array | None = None,
    ) -> Any:
        """Return the example that the opcodes describe, with columns where examples differ.

        Args:
            numbers: As :meth:`numbers` returns them, (n,).
            firsts: Memo number of the first object of each example, (n,).
            memo: Memo of the file.
            row: Bytes of a single example, with its arrays. Default None: the arrays are those of the
                template, and show only where they are.

        Raises:
            FormatError: At least one example is not valid, or the examples differ in what cannot be a column.
            IndexError: The opcodes are more or less than an example.
        """
        unpickler = Unpickler(PickleStream(io.BytesIO(self._raw)))
        stream = unpickler.stream
        stream.fill()
        for start, hole in self.steps:
            if hole is None:
                stream.pos = start
                unpickler.step()
            elif self._raw[start] in _PAYLOADS:
                unpickler.append(hole if row is None else type(hole)(row[hole.span]))
            elif self._raw[start] in _REFERENCES:
                unpickler.append(_referred(numbers[hole].astype(np.int64), firsts, memo))
            else:
                # The opcodes differ in byte order; columns have that of the machine.
                values = numbers[hole].astype(numbers[hole].dtype.newbyteorder("="))
                column = Column.of_numbers(values)
                unpickler.append(column if len(column.values) > 1 else column.values[0])
        return unpickler.stack[-1]


def join_columns(runs: Sequence[UInt8Array], span: slice) -> UInt8Array:
    """Return some bytes of each example of runs, (n, bytes)."""
    return np.concatenate([rows[:, span] for rows in runs])


def _referred(indices: Int64Array, firsts: Int64Array, memo: Memo) -> Any:
    """Return the object with these memo numbers, or a column if they are several.

    Raises:
        FormatError: An object is unknown, or in the same or a later example.
    """
    if (indices >= firsts).any():
        raise FormatError("a reference within an example", Reason.SHARED_PAYLOAD)
    column = Column.of_numbers(indices)
    if len(column.values) == 1:
        return memo[column.values[0]]
    pairs = memo.find_pairs(np.array(column.values))
    if pairs is not None:
        return Column(column.codes, [*map(tuple, pairs.tolist())])
    values: list[Any] = []
    numbers: dict[str, int] = {}
    codes = []
    for value in map(memo.__getitem__, column.values):
        # Each file of examples has its own texts, so objects with different numbers may be equal.
        key = value.name if isinstance(value, PickledDtype) else repr(value)
        codes.append(numbers.setdefault(key, len(values)))
        if codes[-1] == len(values):
            values.append(value)
    return Column(np.array(codes)[column.codes], values) if len(values) > 1 else values[0]


@dataclass(eq=False, slots=True)
class ExampleRun:
    """Consecutive examples of one template."""

    template: ExampleTemplate
    rows: UInt8Array
    """Bytes of the examples, (count, length), a view of a buffer of the stream."""
    first: int
    """Memo number of the first object of the first example."""

    def read_singly(self, memo: Memo) -> Iterator[Any]:
        """Yield the examples.

        Raises:
            FormatError: An example is not valid, although its opcodes are: it refers to an object that was
                dropped, for instance.
        """
        numbers, firsts = self.template.numbers([self.rows]), _firsts([self])
        for at, row in enumerate(self.rows):
            one = slice(at, at + 1)
            yield self.template.interpret(numbers[one], firsts[one], memo, row)


class RunFinder:
    """Finds runs of examples. Called whenever the unpickler yields.

    Args:
        unpickler: The unpickler that reads the file. Its memo gets access to the pairs of integers of runs.
    """

    def __init__(self, unpickler: Unpickler) -> None:
        self._unpickler = unpickler
        self._known: list[ExampleTemplate] = []
        self._learned = 0
        self._begun = -1  # beginning of the next example, as ``stream.tell`` returns it; -1 if unknown
        self._first = 0  # memo number of its first object
        self._with_pairs: list[ExampleRun] = []  # runs whose pairs are not in _pairs yet
        self._pairs = np.empty((3, 0), np.int64)  # memo numbers, ascending, and pairs; with unused columns
        self._used = 0  # columns of _pairs that are used
        unpickler.memo.find_pairs = self._find_pairs

    def advance(self) -> Iterator[ExampleRun]:
        """Make a template of the last example, and yield the runs that follow, which the stream skips.

        Raises:
            FormatError: As for :meth:`PickleStream.fill`.
        """
        stream, memo = self._unpickler.stream, self._unpickler.memo
        begun, self._begun = self._begun, -1
        if memo.explicit or not self._unpickler.between:  # runs need implicit memo numbers
            return
        # Later examples may refer to the objects of one that shares some, which only the unpickler keeps.
        if not memo.shares and self._learned < _MOST_LEARNED and (raw := stream.since(begun)):
            self._learn(raw)
        while self._known:
            while (run := self._match()) is not None:
                self._unpickler.is_taken = True
                yield run
            # The next example may be cut at the end of the buffer.
            is_enough = len(stream.buf) - stream.pos >= max(known.length for known in self._known)
            if is_enough or not stream.fill():
                break
        self._begun, self._first = stream.tell(), memo.next

    def _learn(self, raw: bytes) -> None:
        """Add the template of an example, unless other examples cannot have the same opcodes."""
        try:
            # Interpreting the example itself shows whether the template works; else each run would fail.
            template = ExampleTemplate(raw, self._first)
            run = ExampleRun(template, np.frombuffer(raw, np.uint8)[np.newaxis], self._first)
            convert_runs([(0, run)], self._unpickler.memo)
        except (FormatError, IndexError):
            return
        self._learned += 1
        self._known = [template, *self._known[: _MOST_KNOWN - 1]]

    def _match(self) -> ExampleRun | None:
        """Skip the examples of one template that begin here, up to the end of the buffer, and return them."""
        stream, memo, known = self._unpickler.stream, self._unpickler.memo, self._known
        start = stream.pos
        for template in known:
            # No more than a batch, so that a run is never divided between two.
            match = template.pattern.match(stream.buf, start, start + BATCH_ROWS * template.length)
            if match is not None:
                break
        else:
            return None
        size = stream.skip(match.end() - start, template.length, template.starts)
        if not size:
            return None  # the unpickler finds the error in the next example
        rows = np.frombuffer(stream.buf, np.uint8, size, start).reshape(-1, template.length)
        run = ExampleRun(template, rows, memo.next)
        memo.next += len(rows) * template.memoized
        if template.pairs:
            self._with_pairs.append(run)
        if template is not known[0]:
            known.remove(template)
            known.insert(0, template)
        return run

    def keep_pairs(self) -> None:
        """Keep the pairs of integers of the runs so far, before the bytes of these runs are dropped."""
        runs: dict[ExampleTemplate, list[ExampleRun]] = defaultdict(list)
        for run in self._with_pairs:
            runs[run.template].append(run)
        self._with_pairs.clear()
        parts = []
        for template, same in runs.items():
            numbers = template.numbers([run.rows for run in same])
            for number, one, other in template.pairs:
                numbered = _firsts(same) + number, numbers[one], numbers[other]
                parts.append(np.stack(numbered).astype(np.int64))
        if not parts:
            return
        added = np.concatenate(parts, axis=1)
        count = added.shape[1]
        if self._used + count > self._pairs.shape[1]:
            kept = self._pairs[:, max(0, self._used - _MOST_PAIRS) : self._used]
            self._used = kept.shape[1]
            # Twice as many in a small file, whose pairs would take less time than the memory for more.
            more = count + min(self._used, _MORE_PAIRS)
            self._pairs = np.concatenate([kept, np.empty((3, more), np.int64)], axis=1)
        # Later blocks have higher memo numbers, so with the new ones sorted, all are.
        self._pairs[:, self._used : self._used + count] = added[:, np.argsort(added[0])]
        self._used += count

    def _find_pairs(self, indices: Int64Array) -> Int64Array | None:
        """Return the pairs with these memo numbers, (n, 2); None unless all are known."""
        self.keep_pairs()
        if not self._used:
            return None
        known = self._pairs[:, : self._used]
        # An index beyond the end wraps around; the number there differs, so the pair is unknown.
        found = known[:, np.searchsorted(known[0], indices) % self._used]
        return found[1:].T if (found[0] == indices).all() else None


def _spread(starts: list[int], runs: list[ExampleRun], step: int) -> Int64Array:
    """Return a number for each example of some runs, (n,): from its start in steps of ``step``."""
    counts = np.array([len(run.rows) for run in runs])
    rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.asarray(np.repeat(np.array(starts, np.int64), counts) + step * rows)


def _firsts(runs: list[ExampleRun]) -> Int64Array:
    """Return the memo number of the first object of each example of some runs of one template, (n,)."""
    return _spread([run.first for run in runs], runs, runs[0].template.memoized)


# Conversion


def convert_runs(indexed_runs: list[tuple[int, ExampleRun]], memo: Memo) -> ExampleGroup:
    """Convert runs of one template to a group.

    Args:
        indexed_runs: At least one run, each with the index in the block of its first example.
        memo: Memo of the file, complete up to the last of these examples, with their pairs of integers.

    Raises:
        FormatError: At least one example is not valid, or the examples differ in what cannot be a column.
    """
    runs = [run for _, run in indexed_runs]
    indices = _spread([index for index, _ in indexed_runs], runs, 1)
    template, rows = runs[0].template, [run.rows for run in runs]
    example = template.interpret(template.numbers(rows), _firsts(runs), memo)
    layout = columns.layout_of(example)
    if not isinstance(layout, columns.ExampleLayout):
        raise FormatError("examples without a common layout")
    fields = example if layout.keys else dict(zip(columns.REQUIRED, example, strict=True))
    # Arrays must be at the same bytes in all examples, so that they can be cut out of the rows.
    spans: dict[str, Any] = {key: getattr(fields[key].payload, "span", None) for key in layout.packed}
    if None in spans.values() or any(isinstance(fields.get(key), Column) for key in columns.ARRAYS):
        raise FormatError("examples that differ in whether there is an array")
    cuts = np.flatnonzero(np.diff(np.cumsum([each.nbytes for each in rows]) // _PORTION)) + 1
    portions = (
        {key: join_columns(rows[start:stop], span) for key, span in spans.items()}
        for start, stop in pairwise([0, *cuts, len(rows)])
    )
    return columns.make_group(layout, indices, fields, portions)
