"""Reader of legacy pickles of training examples, which yields raw batches while it decompresses.

The variant is detected from the content. No code of the pickle is run, and only a few thousand examples are
in memory at a time. Rejected records are returned with a reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar, Final

import numpy as np

from hexdata.errors import FormatError
from hexdata.formats.gunzip import GunzipFile
from hexdata.formats.legacy.allowlist import layout_of
from hexdata.formats.legacy.dialect import Dialect, header_json, with_spellings
from hexdata.formats.legacy.examples import group_examples
from hexdata.formats.legacy.limits import DEFAULT_LIMITS, LegacyLimits
from hexdata.formats.legacy.runs import ExampleRun, ExampleTemplate, RunFinder, convert_runs
from hexdata.formats.legacy.stream import PickleStream
from hexdata.formats.legacy.unpickler import ExamplesPlaceholder, Unpickler
from hexdata.formats.legacy.validate import BlockValidator
from hexdata.formats.source import BATCH_ROWS, OWN_READER, FileReader, RawBatch
from hexdata.storage import AnyPath, storage_of

_BLOCK_WEIGHT: Final = 64 << 20
"""Approximate size in bytes at which fewer than ``BATCH_ROWS`` examples are converted to columns. So many of
13 x 13 boards have 18 MB, or 62 MB if they are read one by one."""


class LegacyReader(FileReader):
    """Reader of one legacy pickle, gzipped or plain: a SourceReader and a context manager.

    Args:
        path: The file.
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

    limits: ClassVar[LegacyLimits] = DEFAULT_LIMITS

    def __init__(self, path: str | AnyPath, *, salvage: bool = False) -> None:
        super().__init__(path, salvage=salvage)
        self.format = "legacy-dicts"
        file = GunzipFile(storage_of(self.path).open(), self.limits, salvage=salvage)
        self._opened.enter_context(file)
        self._unpickler = Unpickler(PickleStream(file, self.limits))
        self._runs = RunFinder(self._unpickler)
        self._dialect = Dialect()
        self._layouts: set[int] = set()
        self._records = 0

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
            for count, items in self._blocks():
                yield self._convert(count, items)
                if self.damage is not None:
                    break
            top = self._top_level()
            header = header_json(top)
        except FormatError as error:
            raise error.at(self.path) from None
        # This key follows the examples, so the format is only known now.
        if "shuffling_stats" in top:
            self.format = "legacy-shuffled"
        # The writer puts as many keys before the examples again. A damaged file may lack the list.
        keys_before = [*top, "examples"].index("examples")
        dialect = self._dialect.as_json() | ({"examples": keys_before} if keys_before else {})
        self.header = header | {"dialect": dialect}

    def _blocks(self) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
        """Yield the examples and runs of the file in order, at most ``BATCH_ROWS`` records together.

        Yields:
            The number of records, and each example or run with the index of its first record in the block.
        """
        pending: list[tuple[int, Any]] = []
        count = weight = 0
        for item, size, item_weight in self._items():
            if count + size > BATCH_ROWS or weight >= _BLOCK_WEIGHT:
                yield count, pending
                pending, count, weight = [], 0, 0
            pending.append((count, item))
            count += size
            weight += item_weight
        if pending:
            self._top_level()  # a file of another layout has no records
            yield count, pending

    def _items(self) -> Iterator[tuple[Any, int, int]]:
        """Yield the examples and runs of the file in order; up to the damage, if it is opened for salvage.

        Yields:
            An example or a run, its number of examples, and its approximate size in memory in bytes.
        """
        try:
            for examples in self._unpickler.run():
                for example in examples:
                    yield example, 1, self._unpickler.weight // len(examples)
                for run in self._runs.advance():
                    yield run, len(run.rows), run.rows.nbytes
        except FormatError as error:
            self._stop_at(error)

    def _top_level(self) -> dict[Any, Any]:
        """Return the outermost dict of the pickle; an empty dict if it is lost due to damage.

        Raises:
            FormatError: The pickle is not a dict with a list of examples.
        """
        top: Any = self._unpickler.result
        if self.damage is not None and top is None:
            return {}
        has_examples = isinstance(top, dict) and isinstance(top.get("examples"), ExamplesPlaceholder)
        if not has_examples or isinstance(top.get("games"), list):
            expected = f'a dict with a list under "examples"; {OWN_READER}'
            raise FormatError("not a legacy file", found=layout_of(top, 2), expected=expected)
        return dict(top)

    def _convert(self, count: int, items: list[tuple[int, Any]]) -> RawBatch:
        """Convert the next records, as of :meth:`_blocks`, to a batch, which ends before a damaged one."""
        # Runs of one template become one group, whatever is between them, as many are short.
        runs: dict[ExampleTemplate, list[tuple[int, ExampleRun]]] = defaultdict(list)
        for index, item in items:
            if isinstance(item, ExampleRun):
                runs[item.template].append((index, item))
        singles = [(index, item) for index, item in items if not isinstance(item, ExampleRun)]
        self._runs.keep_pairs()
        memo = self._unpickler.memo
        try:
            groups = [convert_runs(indexed, memo) for indexed in runs.values()]
        except FormatError:  # examples that cannot be columns, or that are damaged
            groups, singles = [], [*enumerate(self._read_singly(items))]
            count = len(singles)
        validator = BlockValidator(self._records, count, self.board_size)
        groups += group_examples(singles, validator.reject, self._layouts)
        validator.fill(groups)
        # The first example names the format of the file; others may differ, as their spellings record.
        if self._records == 0 and groups:
            group = min(groups, key=lambda group: int(group.indices[0]))
            self.format = "legacy-tuples" if group.layout.keys is None else "legacy-dicts"
        batch, rejected = validator.finish()
        different = self._dialect.add(validator.spelled, validator.accepted)
        if different:
            # Rows of the batch, which lacks the rejected examples.
            rows = np.cumsum(validator.accepted) - 1
            batch = with_spellings(batch, {int(rows[index]): different[index] for index in different})
        self._records += count
        self.board_size = validator.board_size
        return RawBatch(batch, rejected)

    def _read_singly(self, items: list[tuple[int, Any]]) -> Iterator[Any]:
        """Yield the examples of the next records; up to the damage, if the file is opened for salvage."""
        read = 0
        try:
            for _, item in items:
                is_run = isinstance(item, ExampleRun)
                for example in item.read_singly(self._unpickler.memo) if is_run else [item]:
                    yield example
                    read += 1
        except FormatError as error:
            error.record = self._records + read
            self._stop_at(error)
