"""The fast path of the legacy reader: recognises runs of similar examples and converts them to columns.

The result is the same as from the pickle machine. References of a run are looked up in the same memo, and an
example whose references mean something else than in the skeleton is read opcode by opcode.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import FormatError
from hexdata.formats.legacy.examples import Coded, Group
from hexdata.formats.legacy.limits import Limits
from hexdata.formats.legacy.memo import Memo
from hexdata.formats.legacy.template import (
    Reference,
    Skeleton,
    TracedFloat,
    TracedInt,
    TracedText,
    is_traced_pair,
    learn,
    read_example,
)
from hexdata.formats.legacy.unpickler import FRAME_BYTES, Examples, Machine

__all__ = ["FastPath", "Run", "take_apart"]

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

_MOST_KNOWN: Final = 64
"""Maximum number of skeletons to try, most recently matched first. A new one replaces the last."""
_MOST_LEARNED: Final = 512
"""Maximum number of skeletons learned per file. Each takes a millisecond; more of them would not pay off."""
_FRAME: Final = 0x95


@dataclass(eq=False, slots=True)
class Run(Examples):
    """Consecutive examples of one skeleton, represented by a single object on the stack of the machine."""

    skeleton: Skeleton
    raw: bytes | memoryview
    """Bytes of the examples, usually a view of a buffer of the machine."""
    count: int
    first: int
    """Memo number of the first object of the first example."""
    offset: int
    """Offset of the first example in the pickle."""

    def split(self, count: int) -> tuple[Run, Run]:
        """Return the first ``count`` examples and the remaining ones as two runs."""
        skeleton = self.skeleton
        at = count * skeleton.length
        first, offset = self.first + count * skeleton.memoized, self.offset + at
        return (
            Run(skeleton, self.raw[:at], count, self.first, self.offset),
            Run(skeleton, self.raw[at:], self.count - count, first, offset),
        )


class FastPath:
    """Recognises runs of examples. Called when the machine pauses between two examples.

    Args:
        machine: The machine that reads the file. Its memo gets access to the pairs of runs.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._memo = machine.memo
        self._memo.pending = self
        self._known: list[Skeleton] = []
        self._longest = 0  # maximum length in bytes of one example of these
        self._learned = 0
        self._pending: list[Run] = []  # since the last settle, in order

    def advance(self) -> None:
        """Learn the last example, and push all runs that follow onto the stack of the machine.

        Raises:
            FormatError: As for :meth:`Machine.more`.
        """
        machine = self._machine
        self._learn()
        while self._known and not self._memo.explicit:  # runs need implicit memo numbers
            if self._match() or self._skip_frame() or self._match_across_frame():
                continue
            machine.begin_example()
            if len(machine.buf) - machine.pos >= self._longest + FRAME_BYTES or not machine.more():
                return

    def pair(self, index: int) -> tuple[int, int] | None:
        """Return the pair with memo number ``index`` in a run since the last :meth:`settle`; else None."""
        place = bisect_right(self._pending, index, key=lambda run: run.first) - 1
        if place < 0 or not self._pending[place].skeleton.memoized:
            return None
        run = self._pending[place]
        skeleton = run.skeleton
        row, number = divmod(index - run.first, skeleton.memoized)
        pair = dict(skeleton.pairs).get(number)
        if pair is None or row >= run.count:
            return None
        rows = _rows(run.raw, skeleton)[row : row + 1]
        return int(_numbers(rows, pair[0])[0]), int(_numbers(rows, pair[1])[0])

    def verify(self) -> None:
        """Check that the runs since the last :meth:`settle` do not refer to objects that were dropped.

        Raises:
            FormatError: "shared-payload": They do.
        """
        for run in self._pending:
            take_apart([(0, run)], self._memo, self._machine.limits)

    def settle(self) -> None:
        """Drop the runs so far. Call this after :func:`take_apart`, which adds their pairs to the memo."""
        self._pending.clear()

    def _learn(self) -> None:
        """Learn the skeleton of the example that the machine has just read, if its start is in the buffer."""
        machine = self._machine
        if machine.anchor < 0 or self._learned == _MOST_LEARNED or self._memo.explicit:
            return
        raw = machine.buf[machine.anchor : machine.pos]
        skeleton = learn(raw, self._memo.branch(machine.example_memo), machine.limits)
        if skeleton is not None:
            self._learned += 1
            self._known = [skeleton, *self._known[: _MOST_KNOWN - 1]]
            self._longest = max(known.length for known in self._known)

    def _match(self) -> bool:
        """Push all consecutive runs that begin here; return False if there is none."""
        machine, known = self._machine, self._known
        buf, start = machine.buf, machine.pos
        view = memoryview(buf)
        going = True
        while going:
            going = False
            for rank, skeleton in enumerate(known):
                match = skeleton.pattern.match(buf, machine.pos)
                if match is not None:
                    end = match.end()
                    self._push(rank, view[machine.pos : end])
                    machine.pos = end
                    going = True
                    break
        return machine.pos > start

    def _skip_frame(self) -> bool:
        machine = self._machine
        here = machine.pos + FRAME_BYTES <= len(machine.buf) and machine.buf[machine.pos] == _FRAME
        if here:
            machine.skip_frame()
        return here

    def _match_across_frame(self) -> bool:
        """Push one example that the end of a frame and the next FRAME interrupt; return False if none."""
        machine = self._machine
        buf, pos, cut = machine.buf, machine.pos, machine.frame_end - machine.origin
        if not pos < cut <= len(buf) - FRAME_BYTES or buf[cut] != _FRAME:
            return False
        for rank, skeleton in enumerate(self._known):
            end = pos + skeleton.length + FRAME_BYTES
            if cut - pos in skeleton.starts and end <= len(buf):
                raw = buf[pos:cut] + buf[cut + FRAME_BYTES : end]
                if skeleton.pattern.fullmatch(raw):
                    self._push(rank, raw)
                    machine.pos = cut
                    machine.skip_frame()
                    machine.pos = end
                    return True
        return False

    def _push(self, rank: int, raw: bytes | memoryview) -> None:
        machine, memo, skeleton = self._machine, self._memo, self._known[rank]
        count = len(raw) // skeleton.length
        start = machine.origin + machine.pos
        if start <= machine.frame_end < start + len(raw) and isinstance(raw, memoryview):
            within = (machine.frame_end - start) % skeleton.length
            machine.leave_frame(machine.frame_end if within in skeleton.starts else -1)
        run = Run(skeleton, raw, count, memo.next, start)
        self._pending.append(run)
        machine.stack.append(run)
        machine.recognised += count
        machine.payload += count * skeleton.payload
        memo.next += count * skeleton.memoized
        if rank:
            self._known.insert(0, self._known.pop(rank))


def take_apart(
    placed: list[tuple[int, Run]], memo: Memo, limits: Limits
) -> tuple[Group, list[tuple[int, Any]]]:
    """Convert runs of one skeleton to a group, and add their pairs of integers to the memo.

    Args:
        placed: At least one run, each with the index in the block of its first example.
        memo: Memo of the file, complete up to the last of these examples.
        limits: Limits of the file.

    Returns:
        The group, and the remaining examples with their index in the block. These have references that mean
        something else than in the skeleton, so they are read opcode by opcode.

    Raises:
        FormatError: "shared-payload", if an example refers to an object that was dropped.
    """
    skeleton = placed[0][1].skeleton
    counts = np.array([run.count for _, run in placed])
    rows = _rows(b"".join([run.raw for _, run in placed]), skeleton)
    places = _spread([place for place, _ in placed], counts, 1)
    firsts = _spread([run.first for _, run in placed], counts, skeleton.memoized)
    for number, pair in skeleton.pairs:
        memo.put_pairs(firsts + number, np.stack([_numbers(rows, part) for part in pair], axis=1))
    columns, regular = _resolve(skeleton, rows, firsts, memo)
    others = []
    if not regular.all():
        offsets = _spread([run.offset for _, run in placed], counts, skeleton.length)
        for row in np.flatnonzero(~regular).tolist():
            branch = memo.branch(int(firsts[row]))
            try:
                others.append((int(places[row]), read_example(rows[row].tobytes(), branch, limits)))
            except FormatError as error:
                error.record = f"byte {offsets[row]}"
                raise
        rows, places = rows[regular], places[regular]
        columns = {place: Coded(column.codes[regular], column.values) for place, column in columns.items()}
    return _group(skeleton, rows, places, columns), others


def _group(skeleton: Skeleton, rows: UInt8Array, places: Int64Array, columns: dict[int, Coded]) -> Group:
    """Return the group of the examples in ``rows``.

    Args:
        skeleton: Skeleton of the examples.
        rows: Bytes of the examples, (n, length).
        places: Index of each example in the block, (n,).
        columns: Columns of values given by references, by index in ``skeleton.references``.
    """

    def column(leaf: Any) -> Coded:
        if isinstance(leaf, (TracedText, Reference)):
            return columns[leaf.place]
        if isinstance(leaf, (TracedInt, TracedFloat)):
            return Coded.of_numbers(_numbers(rows, leaf))
        if is_traced_pair(leaf):
            return Coded.zipped([column(part) for part in leaf])
        return Coded(np.zeros(len(rows), np.intp), [leaf])  # not a hole, so the value is constant

    fields = skeleton.fields
    return Group(
        layout=skeleton.layout,
        places=places,
        board=np.ascontiguousarray(rows[:, skeleton.board]),
        policy=None if skeleton.policy is None else np.ascontiguousarray(rows[:, skeleton.policy]),
        value=column(fields["value"]),
        player_to_move=column(fields["player_to_move"]) if "player_to_move" in fields else None,
        metadata={str(key): column(leaf) for key, leaf in fields.get("metadata", {}).items()},
    )


def _resolve(
    skeleton: Skeleton, rows: UInt8Array, firsts: Int64Array, memo: Memo
) -> tuple[dict[int, Coded], npt.NDArray[np.bool_]]:
    """Look up the references of all rows, each distinct memo number once.

    Returns:
        The columns of the references that are values of fields, by index in ``skeleton.references``; and
        which rows are regular, (n,): their other references mean the same as in the skeleton.
    """
    columns: dict[int, Coded] = {}
    regular = np.ones(len(rows), dtype=bool)
    for reference in skeleton.references:
        indices = _unsigned(rows, reference.at)
        regular &= indices < firsts
        column = Coded.of_numbers(indices)
        values = [_get(memo, index) for index in column.values]
        if reference.place in skeleton.claimed:
            columns[reference.place] = Coded(column.codes, values)
            sound = [value is not _FORGOTTEN for value in values]
        else:
            sound = [_same(value, reference.value) for value in values]
        if not all(sound):
            regular &= np.array(sound)[column.codes]
    return columns, regular


_FORGOTTEN: Final = object()


def _get(memo: Memo, index: int) -> object:
    try:
        return memo.get(index)
    except FormatError:
        return _FORGOTTEN  # the example is then read opcode by opcode, which raises with its offset


def _same(value: object, other: object) -> bool:
    """Return whether type and value of two objects are equal. ``other`` is from a skeleton and small."""
    return type(value) is type(other) and value == other


def _rows(raw: bytes | memoryview, skeleton: Skeleton) -> UInt8Array:
    """Return the bytes of examples as rows, uint8 (n, length)."""
    return np.frombuffer(raw, np.uint8).reshape(-1, skeleton.length)


def _spread(starts: list[int], counts: npt.NDArray[Any], step: int) -> Int64Array:
    """Return the concatenated ranges ``starts[i] + step * arange(counts[i])``, int64 (sum(counts),)."""
    before = np.repeat(np.cumsum(counts) - counts, counts)
    spread: Int64Array = np.repeat(np.array(starts, np.int64), counts)
    spread += step * (np.arange(len(spread)) - before)
    return spread


def _unsigned(rows: UInt8Array, at: slice) -> npt.NDArray[Any]:
    """Return the little-endian unsigned integers in the columns ``at``, (n,)."""
    return np.ascontiguousarray(rows[:, at]).view(f"<u{at.stop - at.start}")[:, 0]


def _numbers(rows: UInt8Array, leaf: TracedInt | TracedFloat) -> npt.NDArray[Any]:
    """Return the numbers of all rows at the bytes of ``leaf``, (n,)."""
    if isinstance(leaf, TracedFloat):
        return np.ascontiguousarray(rows[:, leaf.at]).view(">f8")[:, 0].astype(np.float64)
    numbers = _unsigned(rows, leaf.at)
    return numbers.view("<i4") if numbers.itemsize == 4 else numbers  # BININT is signed, BININT2 is not
