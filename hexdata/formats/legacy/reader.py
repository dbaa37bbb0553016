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
import pyarrow.compute as pc

from hexdata.errors import FormatError
from hexdata.formats.gunzip import GunzipFile
from hexdata.formats.legacy.allowlist import kind_of, shortened
from hexdata.formats.legacy.dialect import Dialect, header_json, with_spellings
from hexdata.formats.legacy.examples import ExampleGroup, ExampleLayout, group_examples, layout_of
from hexdata.formats.legacy.fastpath import ExampleRun, FastPath, convert_runs
from hexdata.formats.legacy.limits import DEFAULT_LIMITS, LegacyLimits
from hexdata.formats.legacy.template import ExampleTemplate
from hexdata.formats.legacy.unpickler import Event, ExamplesPlaceholder, Unpickler, irregular_error
from hexdata.formats.legacy.validate import BlockValidator
from hexdata.formats.source import BATCH_ROWS, SALVAGEABLE, RawBatch
from hexdata.storage import AnyPath, as_path, storage_of

__all__ = ["LegacyReader"]

_BLOCK: Final = 7168
"""Number of examples at which they are converted to columns: after eight batches of 1,000."""
_BLOCK_WEIGHT: Final = 64 << 20
"""Sum of ``Unpickler.batch_weight`` in bytes at which fewer examples are converted too. A block of 13 x 13
boards has at most 55 MB."""


class LegacyReader:
    """Reader of one legacy pickle, gzipped or plain: a SourceReader and a context manager.

    Args:
        path: The file.
        fast: If False, every example is read opcode by opcode, which is slower and has the same result. A
            file with an error is read again in this way. Default True.
        limits: Limits on the resources that the file may use.
        salvage: If True, a damaged file yields the complete examples before the damage instead of raising.
            Default False.

    Attributes:
        format: "legacy-tuples", "legacy-dicts" or "legacy-shuffled". Final once ``batches`` is exhausted, as
            "legacy-shuffled" is detected from a key after the examples.
        board_size: Cells along an edge, from the first usable board; None before it.
        targets: (): raw batches keep the numbers of a search in ``metadata``.
        header: All top-level keys except ``examples``, and ``dialect``: the spellings of the fields, with
            which the file can be written back. Empty until ``batches`` is exhausted.
        damage: The error at which salvaging stopped; None if there was none.
    """

    targets: tuple[str, ...] = ()

    def __init__(
        self,
        path: str | AnyPath,
        *,
        fast: bool = True,
        limits: LegacyLimits = DEFAULT_LIMITS,
        salvage: bool = False,
    ) -> None:
        self.path = as_path(path)
        self.damage: FormatError | None = None
        self._salvage = salvage
        self.format = "legacy-dicts"
        self.board_size: int | None = None
        self.header: dict[str, object] = {}
        self._limits = limits
        self._open(fast=fast)

    def _open(self, *, fast: bool) -> None:
        self._file = GunzipFile(storage_of(self.path).open(), self._limits, salvage=self._salvage)
        self._unpickler = Unpickler(self._file, self._limits)
        self._fast = FastPath(self._unpickler) if fast else None
        self._dialect = Dialect(self._limits)
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
            try:
                yield from self._batches()
            except FormatError:
                if self._fast is None:
                    raise
                yield from self._read_again(self._records)
        except FormatError as error:
            raise error.at(self.path) from None

    def _read_again(self, done: int) -> Iterator[RawBatch]:
        """Read the file opcode by opcode, which finds the exact place of damage.

        Args:
            done: Number of records at the beginning that are not returned.
        """
        self.close()
        self._open(fast=False)
        for batch in self._batches():
            rows, rejected = batch.positions, batch.rejected
            rows = rows.filter(pc.greater_equal(rows.column("record"), done))
            rejected = [each for each in rejected if each.record >= done]
            if rows.num_rows or rejected:
                yield RawBatch(rows, rejected)

    def _batches(self) -> Iterator[RawBatch]:
        pending: list[Any] = []
        count = weight = 0
        while (event := self._next_event()) not in (Event.STOP, None):
            if event is Event.BATCH:
                items = self._unpickler.items
                count += self._count(items)
                pending += items
                weight += self._unpickler.batch_weight
                if count >= _BLOCK or weight >= _BLOCK_WEIGHT:
                    yield from self._convert(pending)
                    pending, count, weight = [], 0, 0
        if self.damage is not None:
            pending += self._complete_examples()
        top = self._top_level()
        yield from self._convert(pending)
        self._finish(top)

    def _next_event(self) -> Event | None:
        """Read up to the next event and return it; None at damage, if the file is opened for salvage."""
        try:
            event = self._unpickler.run()
            if event is Event.BOUNDARY and self._fast is not None:
                self._fast.advance()
        except FormatError as error:
            if self._fast is not None or not self._salvage or error.code not in SALVAGEABLE:
                raise
            self.damage = error
            return None
        return event

    def _complete_examples(self) -> list[Any]:
        """Return the complete examples of the batch in which the damage is."""
        items = self._unpickler.unfinished()
        if items and not _is_complete(self._limits, *items[-2:]):
            items.pop()
        self._count(items)
        return items

    def _count(self, items: list[Any]) -> int:
        """Return the number of examples in a batch, and reset the number of examples in runs.

        Raises:
            FormatError: "irregular-examples", if a run of examples is missing from the batch.
        """
        unpickler = self._unpickler
        runs = [item for item in items if isinstance(item, ExampleRun)]
        if sum(run.count for run in runs) != unpickler.examples_in_runs:
            raise irregular_error()
        count = len(items) - len(runs) + unpickler.examples_in_runs
        unpickler.examples_in_runs = 0
        return count

    def _top_level(self) -> dict[Any, Any]:
        """Return the outermost dict of the pickle; an empty dict if it is lost due to damage.

        Raises:
            FormatError: The pickle is not a dict with a list of examples.
        """
        top = self._unpickler.result
        if self.damage is not None and top is None:
            return {}
        if not isinstance(top, dict):
            raise FormatError(
                "not a legacy file", found=f"{kind_of(top)} at the top level", expected="a dict of examples"
            )
        if not isinstance(top.get("examples"), ExamplesPlaceholder):
            raise FormatError(
                "not a legacy file of examples",
                found=f"top-level keys {[shortened(key) for key in top if isinstance(key, str)][:10]}",
                expected='a list under "examples"',
            )
        return top

    def _finish(self, top: dict[Any, Any]) -> None:
        if "shuffling_stats" in top:
            self.format = "legacy-shuffled"
        keys_before = [*top, "examples"].index("examples")
        header = header_json(top, self._limits)
        dialect = self._dialect.as_json() | ({"examples": keys_before} if keys_before else {})
        self.header = header | {"dialect": dialect}

    def _convert(self, items: list[Any]) -> Iterator[RawBatch]:
        for block, count in _blocks(items):
            yield self._convert_block(block, count)
        if self._fast is not None:
            self._fast.clear()
        self._unpickler.memo.compact()

    def _convert_block(self, items: list[Any], count: int) -> RawBatch:
        validator = BlockValidator(self._records, count, self.board_size, self._limits)
        groups, singles = self._convert_runs(items)
        groups += group_examples(singles, validator.reject, self._limits, self._layouts)
        validator.fill(groups)
        if self._records == 0 and groups:
            first = min(groups, key=lambda group: int(group.indices[0]))
            self.format = "legacy-tuples" if first.layout.keys is None else "legacy-dicts"
        batch, rejected = validator.finish()
        different = self._dialect.add(groups, validator.accepted)
        if different:
            rows = np.cumsum(validator.accepted) - 1
            batch = with_spellings(batch, {int(rows[index]): different[index] for index in different})
        self._records += count
        self.board_size = validator.board_size
        return RawBatch(batch, rejected)

    def _convert_runs(self, items: list[Any]) -> tuple[list[ExampleGroup], list[tuple[int, Any]]]:
        """Convert the runs among ``items`` to groups.

        Returns:
            The groups, and the remaining examples with their index in the block.
        """
        singles: list[tuple[int, Any]] = []
        runs: dict[ExampleTemplate, list[tuple[int, ExampleRun]]] = {}
        index = 0
        for item in items:
            if isinstance(item, ExampleRun):
                runs.setdefault(item.template, []).append((index, item))
            else:
                singles.append((index, item))
            index += _size(item)
        groups = []
        for indexed_runs in runs.values():
            group, others = convert_runs(indexed_runs, self._unpickler.memo, self._limits)
            singles += others
            if len(group.indices):
                groups.append(group)
        singles.sort(key=itemgetter(0))
        return groups, singles


def _is_complete(limits: LegacyLimits, *items: object) -> bool:
    """Return whether the last of these examples is complete: its layout is valid and has all earlier keys."""
    keys = [set(item) for item in items if isinstance(item, dict)]
    return isinstance(items[-1], ExampleRun) or (
        isinstance(layout_of(items[-1], limits), ExampleLayout) and all(keys[-1] >= before for before in keys)
    )


def _size(item: object) -> int:
    """Return the number of examples that an object on the stack of the unpickler represents."""
    return item.count if isinstance(item, ExampleRun) else 1


def _blocks(items: list[Any]) -> Iterator[tuple[list[Any], int]]:
    """Split examples and runs into blocks of ``BATCH_ROWS`` examples; the last block may have fewer.

    Yields:
        The items of each block, and the number of examples in it.
    """
    block: list[Any] = []
    free = BATCH_ROWS
    for item in items:
        while (size := _size(item)) > free:
            if free:
                head, item = item.split(free)
                block.append(head)
            yield block, BATCH_ROWS
            block, free = [], BATCH_ROWS
        block.append(item)
        free -= size
    if block:
        yield block, BATCH_ROWS - free
