"""Legacy pickles of training examples as raw batches, read while they are being decompressed.

Tells the variant by content. Runs no code of the pickle, keeps no more of it than a few thousand
examples, and never decides what becomes of a record that it rejects.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from hexdata.errors import FormatError
from hexdata.formats.gunzip import GunzipFile
from hexdata.formats.legacy.dialect import Dialect, header_json, with_spellings
from hexdata.formats.legacy.examples import Group, Layout, group_examples, layout_of
from hexdata.formats.legacy.fastpath import FastPath, Run, take_apart
from hexdata.formats.legacy.limits import DEFAULT_LIMITS, Limits
from hexdata.formats.legacy.machine import Event, Examples, Machine, irregular
from hexdata.formats.legacy.sheet import Sheet
from hexdata.formats.legacy.skeleton import Skeleton
from hexdata.formats.legacy.standins import kind_of, shortened
from hexdata.formats.source import BATCH_ROWS, SALVAGEABLE, RawBatch
from hexdata.remote import AnyPath, as_path, open_binary

__all__ = ["LegacyReader"]

_BLOCK: Final = 7168
"""From so many examples on, those at hand are turned into columns: batches of a thousand then fill eight."""
_BLOCK_WEIGHT: Final = 64 << 20
"""The same for ``Machine.batch_weight``. Examples of a 13 x 13 board have 55 MB a block at most."""


class LegacyReader:
    """One legacy pickle, gzipped or plain: a SourceReader and a context manager.

    Args:
        path: the file.
        fast: False reads every example opcode by opcode, with the same result.
        limits: what the file may ask for.
        salvage: of a damaged file, give the whole examples before the damage, as far as it shows.

    Attributes:
        format: "legacy-tuples", "legacy-dicts" or "legacy-shuffled". What tells the last one comes after
            the examples, so this is final once ``batches`` is exhausted.
        board_size: from the first usable board on; None before.
        header: every top-level key but ``examples``, and ``dialect``: how the fields are spelled, so
            that the file can be written back. Empty until ``batches`` is exhausted.
        damage: what broke the file off, where it was salvaged.
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
        """Close the file; again does nothing."""
        self._file.close()

    def batches(self) -> Iterator[RawBatch]:
        """Read the file once, front to back, in memory that does not grow with it.

        Raises:
            FormatError: the file is no legacy pickle, damaged (and not to be salvaged), or past a limit;
                batches so far are void.
            UnsafePickleError: it asks for something that is not on the list of what is allowed.
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
        """Go on to the next event; None for damage that is to be survived."""
        try:
            event = self._machine.run()
            if event is Event.BOUNDARY and self._fast is not None:
                self._fast.advance()
        except FormatError as error:
            if self._fast is not None:
                self._fast.verify()  # an example before this place may be at fault: then say that
            if not self._salvage or error.code not in SALVAGEABLE:
                raise
            self.damage = error
            return None
        return event

    def _whole_examples(self) -> list[Any]:
        """Return what was read whole of the batch of examples that the damage broke off."""
        items = self._machine.unfinished()
        if items and not _is_whole(self._limits, *items[-2:]):
            items.pop()
        self._count(items)
        return items

    def _count(self, items: list[Any]) -> int:
        """Return how many examples were just handed out."""
        machine = self._machine
        runs = [item for item in items if isinstance(item, Run)]
        if sum(run.count for run in runs) != machine.recognised:
            raise irregular()
        count = len(items) - len(runs) + machine.recognised
        machine.recognised = 0
        return count

    def _top_level(self) -> dict[Any, Any]:
        """Return the outermost dict, as the pickle has it; an empty one if that is lost."""
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
        """Return groups out of the runs among ``items``, and the single examples with their places."""
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
    """Say whether the last one of these examples was read whole, judged by itself and the one before."""
    keys = [set(item) for item in items if isinstance(item, dict)]
    return isinstance(items[-1], Run) or (
        isinstance(layout_of(items[-1], limits), Layout) and all(keys[-1] >= before for before in keys)
    )


def _size(item: object) -> int:
    """Return how many examples an object on the machine's stack stands for."""
    return item.count if isinstance(item, Run) else 1


def _blocks(items: list[Any]) -> Iterator[tuple[list[Any], int]]:
    """Cut examples and runs into blocks of ``BATCH_ROWS`` examples, the last of fewer; say how many."""
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
