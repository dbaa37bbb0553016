"""The fast path: runs of examples recognised at once, and taken apart as columns of one array of bytes.

Never gives what the pickle machine would not: a run's references are looked up in the same memo, and an
example in which they mean something else than in the skeleton is read opcode by opcode after all.
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
from hexdata.formats.legacy.machine import FRAME_BYTES, Examples, Machine
from hexdata.formats.legacy.memo import Memo
from hexdata.formats.legacy.skeleton import (
    Reference,
    Skeleton,
    TracedFloat,
    TracedInt,
    TracedText,
    is_traced_pair,
    learn,
    read_example,
)

__all__ = ["FastPath", "Run", "take_apart"]

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

_MOST_KNOWN: Final = 64
"""Skeletons tried at each place, the last that matched first; the one that has not for longest goes."""
_MOST_LEARNED: Final = 512
"""Skeletons learned in one file: each costs a millisecond, and a file with more has no use for them."""
_FRAME: Final = 0x95


@dataclass(eq=False, slots=True)
class Run(Examples):
    """Examples of one skeleton, one after the other; on the machine's stack it stands for all of them."""

    skeleton: Skeleton
    raw: bytes | memoryview
    """Their bytes, mostly a view of what was the machine's buffer."""
    count: int
    first: int
    """Memo number of the first object of the first example."""
    offset: int
    """Where in the pickle they begin."""

    def split(self, count: int) -> tuple[Run, Run]:
        """Return the first ``count`` examples, and the others."""
        skeleton = self.skeleton
        at = count * skeleton.length
        first, offset = self.first + count * skeleton.memoized, self.offset + at
        return (
            Run(skeleton, self.raw[:at], count, self.first, self.offset),
            Run(skeleton, self.raw[at:], self.count - count, first, offset),
        )


class FastPath:
    """Recognises runs of examples where the machine pauses between two of them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._memo = machine.memo
        self._memo.pending = self
        self._known: list[Skeleton] = []
        self._longest = 0  # bytes of one example of these
        self._learned = 0
        self._pending: list[Run] = []  # since the last settle, in order

    def advance(self) -> None:
        """Put on the machine's stack as many runs as can be recognised from here on.

        Raises:
            FormatError: as :meth:`Machine.more` does.
        """
        machine = self._machine
        self._learn()
        while self._known and not self._memo.explicit:  # runs count their memo numbers
            if self._match() or self._skip_frame() or self._match_across_frame():
                continue
            machine.begin_example()
            if len(machine.buf) - machine.pos >= self._longest + FRAME_BYTES or not machine.more():
                return

    def pair(self, index: int) -> tuple[int, int] | None:
        """Return the pair that a run since the last :meth:`settle` has under that memo number."""
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
        """See that the runs since the last :meth:`settle` refer to nothing that was forgotten.

        Raises:
            FormatError: "shared-payload".
        """
        for run in self._pending:
            take_apart([(0, run)], self._memo, self._machine.limits)

    def settle(self) -> None:
        """Forget the runs so far: all have been taken apart, so the memo has their pairs."""
        self._pending.clear()

    def _learn(self) -> None:
        """Learn from the example that the machine has just read, if it is known where that began."""
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
        """Take the runs that follow one another from here on; False if there is none."""
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
        """Recognise one example with a FRAME between two of its opcodes, where the frame before ends."""
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
    """Turn runs of one skeleton into a group; the memo takes in the pairs of integers in them.

    Args:
        placed: at least one run, each with the place in the block of its first example.
        memo: of the file, with everything in it up to the last of these examples.
        limits: as for the file.

    Returns:
        The group; and the examples, with their places, whose references go elsewhere than the
        skeleton's did, read one by one.

    Raises:
        FormatError: "shared-payload", if one refers to something that was forgotten.
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
    """Return the group of ``rows`` (n, length), ``columns`` being those that references give."""

    def column(leaf: Any) -> Coded:
        if isinstance(leaf, (TracedText, Reference)):
            return columns[leaf.place]
        if isinstance(leaf, (TracedInt, TracedFloat)):
            return Coded.of_numbers(_numbers(rows, leaf))
        if is_traced_pair(leaf):
            return Coded.zipped([column(part) for part in leaf])
        return Coded(np.zeros(len(rows), np.intp), [leaf])  # no hole is in it, so all have the same

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
    """Look up the references of all rows, once for each that occurs.

    Returns:
        The columns of the references that are values, by their places in ``skeleton.references``; and
        which rows are regular (n,): their other references mean what they did in the skeleton.
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
        return _FORGOTTEN  # the example is then read on its own, which raises, and says where


def _same(value: object, other: object) -> bool:
    """Compare an object of any kind with one that a skeleton may refer to: those are small and flat."""
    return type(value) is type(other) and value == other


def _rows(raw: bytes | memoryview, skeleton: Skeleton) -> UInt8Array:
    """Return the bytes of examples, one a row: uint8 (n, length)."""
    return np.frombuffer(raw, np.uint8).reshape(-1, skeleton.length)


def _spread(starts: list[int], counts: npt.NDArray[Any], step: int) -> Int64Array:
    """Return, for each start, so many numbers from it on in steps of ``step``, all in one array."""
    before = np.repeat(np.cumsum(counts) - counts, counts)
    spread: Int64Array = np.repeat(np.array(starts, np.int64), counts)
    spread += step * (np.arange(len(spread)) - before)
    return spread


def _unsigned(rows: UInt8Array, at: slice) -> npt.NDArray[Any]:
    """Return the little-endian unsigned integers (n,) in the columns ``at``."""
    return np.ascontiguousarray(rows[:, at]).view(f"<u{at.stop - at.start}")[:, 0]


def _numbers(rows: UInt8Array, leaf: TracedInt | TracedFloat) -> npt.NDArray[Any]:
    """Return the numbers (n,) that stand where ``leaf`` stood."""
    if isinstance(leaf, TracedFloat):
        return np.ascontiguousarray(rows[:, leaf.at]).view(">f8")[:, 0].astype(np.float64)
    numbers = _unsigned(rows, leaf.at)
    return numbers.view("<i4") if numbers.itemsize == 4 else numbers  # BININT is signed, BININT2 is not
