"""Epochs of exact and games mode: every epoch is a permutation of all selected positions."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import HexdataError
from hexdata.loader.map_ahead import map_ahead
from hexdata.loader.options import LoaderOptions
from hexdata.loader.row_filter import OpenStore, RowSubset, select_rows
from hexdata.loader.row_source import GatheredRows, RowSource
from hexdata.loader.schedule import EpochSchedule, PackedStep, StepSlice
from hexdata.loader.weights import WEIGHT_UNIT, RowWeights, WeightedRows
from hexdata.order import Permutation, derive_key
from hexdata.shards.blocks import Block

__all__ = ["ExactEpoch", "SelectedRows"]

_FIRST_CHUNK: Final = 1 << 10
"""Number of positions in the first chunk. A small chunk makes the first batch fast."""
_LARGEST_CHUNK: Final = 1 << 16
"""Number of positions in the largest chunks. Larger chunks leave the CPU cache before they are delivered."""
_GROWTH: Final = 4
_CHUNK_BYTES: Final = 64 << 20
"""Maximum size of a chunk, which limits chunks with dense policies."""


class SelectedRows:
    """The selected rows of a split, shared by all epochs.

    Args:
        source: The rows of the split.
        members: Names of the members to read.
        options: Options of the loader.
        faults: Skipped shards, each with its name, number of positions and error (default: none).
        weights: Weights from ``align_weights`` (default None: an epoch delivers every selected row once).
        open_store: Opens the store of the games (default None: there is none).

    Attributes:
        positions: Number of selected positions.
        digest: Digest of the selection, of the names of skipped shards and of the weights; None if all rows
            are selected without weights.
        faults: The skipped shards.
        subset: The selected rows; None if all rows are selected.
        weighted: The rows of each epoch, if there are weights; otherwise None.

    Raises:
        ConfigError: The condition ``where`` is invalid, or no position is selected.
        BudgetError: The positions of an epoch with weights do not fit into memory.
    """

    def __init__(
        self,
        source: RowSource,
        members: Sequence[str],
        options: LoaderOptions,
        faults: Sequence[tuple[str, int, HexdataError]] = (),
        weights: RowWeights | None = None,
        open_store: OpenStore | None = None,
    ) -> None:
        self.source = source
        self.faults = faults
        self._members = members
        self._options = options
        self._open_store = open_store
        self.subset = select_rows(source, options, open_store)
        self.positions = source.positions if self.subset is None else len(self.subset)
        self._weights = weights
        self.weighted = (
            None if weights is None else WeightedRows(source, self.subset, weights, options.seed, open_store)
        )
        self.digest = self._find_digest()

    def take(self, indices: npt.NDArray[np.int64]) -> Block:
        """Return positions by their indices (B,) among the selected positions in stored order."""
        rows = indices if self.subset is None else self.subset.rows(indices)
        self.source.wait_until_ready()
        return self.source.take(rows, self._members)

    def chunk_sizes(self) -> Iterator[int]:
        """Yield, endlessly, how many positions to gather at once: few at first, later more."""
        return _chunk_sizes(self.source, self._members)

    def epoch(self, epoch: int) -> ExactEpoch:
        """Return an epoch of the rank in the options."""
        subset = self.subset if self.weighted is None else self.weighted.rows(epoch)
        return ExactEpoch(self.source, subset, self._members, self._options, epoch)

    def size(self, epoch: int) -> int:
        """Return the number of positions of an epoch, counting each repetition."""
        return self.positions if self.weighted is None else self.weighted.size(epoch)

    def first(self, epoch: int) -> int:
        """Return the number of positions of all epochs before ``epoch``."""
        return epoch * self.positions if self.weighted is None else self.weighted.first(epoch)

    @property
    def smallest_size(self) -> int:
        """The smallest number of positions that an epoch can have."""
        return self.positions if self.weighted is None else self.weighted.smallest_size

    @property
    def mean_size(self) -> Fraction:
        """Mean number of positions of an epoch: that of the selected rows, or the sum of their weights."""
        return (
            Fraction(self.positions)
            if self.weighted is None
            else Fraction(self.weighted.unit_sum, WEIGHT_UNIT)
        )

    def split_range(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Divide a range of the concatenation of all epochs: yield (epoch, first, last) for each epoch."""
        epoch = int(start // self.mean_size) if start < stop else 0  # an estimate: sizes may differ by one
        while epoch and self.first(epoch) > start:
            epoch -= 1
        while start < stop:
            base, end = self.first(epoch), self.first(epoch + 1)
            if start < end:
                last = min(stop, end)
                yield epoch, start - base, last - base
                start = last
            epoch += 1

    def steps(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        return EpochSchedule(self.size(epoch), self._options).steps

    def select(self, options: LoaderOptions) -> SelectedRows:
        """Return the rows of the same split that other options select.

        Raises:
            ConfigError: The condition ``where`` is invalid, or no position is selected.
        """
        return SelectedRows(self.source, self._members, options, self.faults, self._weights, self._open_store)

    def for_rank(self, rank: int, world_size: int) -> SelectedRows:
        """Return the epochs of another rank, over the same rows."""
        other = copy.copy(self)
        other._options = replace(self._options, rank=rank, world_size=world_size)
        return other

    def _find_digest(self) -> str | None:
        if self.subset is None and not self.faults and self.weighted is None:
            return None
        rows = "all" if self.subset is None else self.subset.digest
        facts: list[Any] = [rows, [name for name, _, _ in self.faults]]
        if self.weighted is not None:
            facts.append(self.weighted.digest)
        return hashlib.sha256(json.dumps(facts).encode("ascii")).hexdigest()


class ExactEpoch:
    """One epoch of one rank: ``Permutation(n, derive_key(seed, "epoch", epoch))`` of its n positions.

    This is the order of ``shuffle_indices(range(n), seed, epoch)``. Without shuffling it is the stored order.

    Args:
        source: The rows of the split.
        subset: Rows of the epoch, of which some may be repeated; None: all rows.
        members: Names of the fields to read.
        options: Options of the loader.
        epoch: The epoch.

    Attributes:
        subset: The rows.
    """

    def __init__(
        self,
        source: RowSource,
        subset: RowSubset | None,
        members: Sequence[str],
        options: LoaderOptions,
        epoch: int,
    ) -> None:
        self.subset = subset
        self._source = source
        self._members = members
        self._threads = options.threads
        self._schedule = EpochSchedule(source.positions if subset is None else len(subset), options)
        self._order: Permutation | None = None
        if options.shuffle:
            self._order = Permutation(self._schedule.positions, derive_key(options.seed, "epoch", epoch))

    @property
    def steps(self) -> int:
        """Number of batches, which is the same for every rank."""
        return self._schedule.steps

    def blocks(self, steps: range, pool: ThreadPoolExecutor | None = None) -> Iterator[PackedStep]:
        """Yield the positions of this rank at each of the given steps; see ``Epoch``."""
        self._source.wait_until_ready()
        read = map_ahead(self._read_chunk, self._chunks(steps), pool, self._threads)
        for chunk, gathered in read:
            start = 0
            for own in chunk:
                stop = start + own.stop - own.start + len(own.padding)
                yield gathered.take(start, stop), own.padding_mask()
                start = stop

    def _chunks(self, steps: range) -> Iterator[list[StepSlice]]:
        """Yield the slices of several steps that are read together."""
        chunk: list[StepSlice] = []
        sizes = _chunk_sizes(self._source, self._members)
        count, size = 0, next(sizes)
        for step in steps:
            own = self._schedule.slice_at(step)
            chunk.append(own)
            count += own.stop - own.start
            if count >= size:
                yield chunk
                chunk, count, size = [], 0, next(sizes)
        if chunk:
            yield chunk

    def _read_chunk(self, chunk: list[StepSlice]) -> tuple[list[StepSlice], GatheredRows]:
        """Read the slices of several steps together."""
        indices = [own.indices(self._schedule.positions) for own in chunk]
        return chunk, self._gather(np.concatenate(indices))

    def take(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Block]:
        """Yield one block for each range [start, stop) of indices in the epoch's order, over all ranks.

        All ranges are gathered together; ``SelectedRows.chunk_sizes`` gives suitable total lengths.
        """
        if not ranges:
            return
        self._source.wait_until_ready()
        gathered = self._gather(np.concatenate([np.arange(start, stop) for start, stop in ranges]))
        done = 0
        for start, stop in ranges:
            yield gathered.take(done, done + stop - start)
            done += stop - start

    def _gather(self, indices: npt.NDArray[np.int64]) -> GatheredRows:
        rows = indices if self._order is None else self._order[indices]
        if self.subset is not None:
            rows = self.subset.rows(rows)
        return self._source.gather(rows, self._members)


def _chunk_sizes(source: RowSource, members: Sequence[str]) -> Iterator[int]:
    """Yield numbers of positions that grow up to the largest chunk."""
    largest = min(_LARGEST_CHUNK, _CHUNK_BYTES // source.bytes_per_row(members))
    size = min(_FIRST_CHUNK, largest)
    while True:
        yield size
        size = min(_GROWTH * size, largest)
