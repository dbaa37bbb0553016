"""Reader of legacy pickles of training examples, which yields raw batches while it decompresses.

The variant is detected from the content. No code of the pickle is run, and only a few thousand examples are
in memory at a time. Rejected records are returned with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from hexdata.errors import FormatError
from hexdata.formats.gunzip import GunzipFile
from hexdata.formats.legacy.allowlist import kind_of, shortened
from hexdata.formats.legacy.dialect import Dialect, header_json, with_spellings
from hexdata.formats.legacy.examples import Group, Layout, group_examples, layout_of
from hexdata.formats.legacy.fastpath import FastPath, Run, take_apart
from hexdata.formats.legacy.limits import DEFAULT_LIMITS, Limits
from hexdata.formats.legacy.template import Skeleton
from hexdata.formats.legacy.unpickler import Event, Examples, Machine, irregular
from hexdata.formats.legacy.validate import Sheet
from hexdata.formats.source import BATCH_ROWS, SALVAGEABLE, RawBatch
from hexdata.storage import AnyPath, as_path, open_binary

__all__ = ["LegacyReader"]

_BLOCK: Final = 7168
"""Number of examples at which they are converted to columns: after eight batches of 1,000."""
_BLOCK_WEIGHT: Final = 64 << 20
"""Sum of ``Machine.batch_weight`` in bytes at which fewer examples are converted too. A block of 13 x 13
boards has at most 55 MB."""


class LegacyReader:
    """Reader of one legacy pickle, gzipped or plain: a SourceReader and a context manager.

    Args:
        path: The file.
        fast: If False, every example is read opcode by opcode, which is slower and has the same result.
            Default True.
        limits: Limits on the resources that the file may use.
        salvage: If True, a damaged file yields the complete examples before the damage instead of raising.
            Default False.

    Attributes:
        format: "legacy-tuples", "legacy-dicts" or "legacy-shuffled". Final once ``batches`` is exhausted, as
            "legacy-shuffled" is detected from a key after the examples.
        board_size: Cells along an edge, from the first usable board; None before it.
        header: All top-level keys except ``examples``, and ``dialect``: the spellings of the fields, with
            which the file can be written back. Empty until ``batches`` is exhausted.
        damage: The error at which salvaging stopped; None if there was none.
    """

    def __init__(
        self,
        path: str | AnyPath,
        *,
        fast: bool = True,
        limits: Limits = DEFAULT_LIMITS,
        salvage: bool = False,
    ) -> None:
        self.path = as_path(path)
        self.damage: FormatError | None = None
        self._salvage = salvage
        self.format = "legacy-dicts"
        self.board_size: int | None = None
        self.header: dict[str, object] = {}
        self._limits = limits
        self._file = GunzipFile(open_binary(self.path), limits, salvage=salvage)
        self._machine = Machine(self._file, limits)
        self._fast = FastPath(self._machine) if fast else None
        self._dialect = Dialect(limits)
        self._layouts: set[int] = set()
        self._records = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    def batches(self) -> Iterator[RawBatch]:
        """Read the file once, from front to back, in memory that does not grow with the file.

        Yields:
            The records of the file in order, at most ``BATCH_ROWS`` per batch.

        Raises:
            FormatError: The file is not a legacy pickle, exceeds a limit, or is damaged and was not opened
                for salvage. The batches yielded so far are then invalid.
            UnsafePickleError: The pickle uses a name, call or opcode that is not allowed.
        """
        try:
            yield from self._batches()
        except FormatError as error:
            raise error.at(self.path) from None

    def _batches(self) -> Iterator[RawBatch]:
        pending: list[Any] = []
        count = weight = 0
        while (event := self._next_event()) not in (Event.STOP, None):
            if event is Event.BATCH:
                items = self._machine.items
                count += self._count(items)
                pending += items
                weight += self._machine.batch_weight
                if count >= _BLOCK or weight >= _BLOCK_WEIGHT:
                    yield from self._convert(pending)
                    pending, count, weight = [], 0, 0
        if self.damage is not None:
            pending += self._whole_examples()
        top = self._top_level()
        yield from self._convert(pending)
        self._finish(top)

    def _next_event(self) -> Event | None:
        """Read up to the next event and return it; None at damage, if the file is opened for salvage."""
        try:
            event = self._machine.run()
            if event is Event.BOUNDARY and self._fast is not None:
                self._fast.advance()
        except FormatError as error:
            if self._fast is not None:
                self._fast.verify()  # report an earlier faulty example first
            if not self._salvage or error.code not in SALVAGEABLE:
                raise
            self.damage = error
            return None
        return event

    def _whole_examples(self) -> list[Any]:
        """Return the complete examples of the batch in which the damage is."""
        items = self._machine.unfinished()
        if items and not _is_whole(self._limits, *items[-2:]):
            items.pop()
        self._count(items)
        return items

    def _count(self, items: list[Any]) -> int:
        """Return the number of examples in a batch, and reset the number of recognised examples.

        Raises:
            FormatError: "irregular-examples", if a run of examples is missing from the batch.
        """
        machine = self._machine
        runs = [item for item in items if isinstance(item, Run)]
        if sum(run.count for run in runs) != machine.recognised:
            raise irregular()
        count = len(items) - len(runs) + machine.recognised
        machine.recognised = 0
        return count

    def _top_level(self) -> dict[Any, Any]:
        """Return the outermost dict of the pickle; an empty dict if it is lost due to damage.

        Raises:
            FormatError: The pickle is not a dict with a list of examples.
        """
        top = self._machine.result
        if self.damage is not None and top is None:
            return {}
        if not isinstance(top, dict):
            raise FormatError(
                "not a legacy file", found=f"{kind_of(top)} at the top level", expected="a dict of examples"
            )
        if not isinstance(top.get("examples"), Examples):
            raise FormatError(
                "not a legacy file of examples",
                found=f"top-level keys {[shortened(key) for key in top if isinstance(key, str)][:10]}",
                expected='"examples", a list written in its place',
            )
        return top

    def _finish(self, top: dict[Any, Any]) -> None:
        if "shuffling_stats" in top:
            self.format = "legacy-shuffled"
        place = [*top, "examples"].index("examples")
        header = header_json(top, self._limits)
        dialect = self._dialect.as_json() | ({"examples": place} if place else {})
        self.header = header | {"dialect": dialect}

    def _convert(self, items: list[Any]) -> Iterator[RawBatch]:
        for block, count in _blocks(items):
            yield self._convert_block(block, count)
        if self._fast is not None:
            self._fast.settle()
        self._machine.memo.settle()

    def _convert_block(self, items: list[Any], count: int) -> RawBatch:
        sheet = Sheet(self._records, count, self.board_size, self._limits)
        groups, singles = self._take_apart(items)
        groups += group_examples(singles, sheet.reject, self._limits, self._layouts)
        sheet.fill(groups)
        if self._records == 0 and groups:
            first = min(groups, key=lambda group: int(group.places[0]))
            self.format = "legacy-tuples" if first.layout.keys is None else "legacy-dicts"
        batch, rejected = sheet.finish()
        odd = self._dialect.add(groups, sheet.accepted)
        if odd:
            rows = np.cumsum(sheet.accepted) - 1
            batch = with_spellings(batch, {int(rows[place]): odd[place] for place in odd})
        self._records += count
        self.board_size = sheet.board_size
        return RawBatch(batch, rejected)

    def _take_apart(self, items: list[Any]) -> tuple[list[Group], list[tuple[int, Any]]]:
        """Convert the runs among ``items`` to groups.

        Returns:
            The groups, and the remaining examples with their index in the block.
        """
        singles: list[tuple[int, Any]] = []
        runs: dict[Skeleton, list[tuple[int, Run]]] = {}
        place = 0
        for item in items:
            if isinstance(item, Run):
                runs.setdefault(item.skeleton, []).append((place, item))
            else:
                singles.append((place, item))
            place += _size(item)
        groups = []
        for placed in runs.values():
            group, others = take_apart(placed, self._machine.memo, self._limits)
            singles += others
            if len(group.places):
                groups.append(group)
        singles.sort(key=itemgetter(0))
        return groups, singles


def _is_whole(limits: Limits, *items: object) -> bool:
    """Return whether the last of these examples is complete: its layout is valid and has all earlier keys."""
    keys = [set(item) for item in items if isinstance(item, dict)]
    return isinstance(items[-1], Run) or (
        isinstance(layout_of(items[-1], limits), Layout) and all(keys[-1] >= before for before in keys)
    )


def _size(item: object) -> int:
    """Return the number of examples that an object on the stack of the machine represents."""
    return item.count if isinstance(item, Run) else 1


def _blocks(items: list[Any]) -> Iterator[tuple[list[Any], int]]:
    """Split examples and runs into blocks of ``BATCH_ROWS`` examples; the last block may have fewer.

    Yields:
        The items of each block, and the number of examples in it.
    """
    block: list[Any] = []
    room = BATCH_ROWS
    for item in items:
        while (size := _size(item)) > room:
            if room:
                head, item = item.split(room)
                block.append(head)
            yield block, BATCH_ROWS
            block, room = [], BATCH_ROWS
        block.append(item)
        room -= size
    if block:
        yield block, BATCH_ROWS - room
