"""Epochs of exact and games mode: every epoch is a permutation of all selected positions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.arrays import NUMPY
from hexdata.loader.game_table import GameTable
from hexdata.loader.opening import LoaderData
from hexdata.loader.options import LoaderOptions, SplitOptions, Weights
from hexdata.loader.row_filter import Rows, digest_of_rows, select_rows
from hexdata.loader.schedule import EpochSchedule, Part
from hexdata.loader.weights import WEIGHT_UNIT, WeightedRows
from hexdata.order import derive_key
from hexdata.shards.blocks import Block, slice_rows

_MOST_BYTES: Final = 64 << 20
"""Maximum size of positions that are taken together, which limits those with large policies."""


class SelectedRows:
    """The selected rows of a split, shared by all epochs and ranks.

    Args:
        data: The data, with a table.
        options: Options that select rows, and the seed of the weights.
        weights: Weights as given; None: an epoch delivers every selected row once.

    Attributes:
        positions: Number of selected positions.
        digest: Digest of the selection, of the names of skipped shards and of the weights; None if all rows
            are selected without weights.
        subset: The selected rows; None if all rows are selected.
        weighted: The rows of each epoch, if there are weights; otherwise None.

    Raises:
        ConfigError: The condition ``where`` is invalid, or no position is selected.
        BudgetError: The positions of an epoch with weights do not fit into memory.
    """

    def __init__(self, data: LoaderData, options: SplitOptions, weights: Weights | None) -> None:
        assert data.table is not None
        self._data, self._weights = data, weights
        self._source, self._members = data.table, data.members
        self.subset = select_rows(self._source, options)
        self.positions = self._source.positions if self.subset is None else len(self.subset)
        self.weighted = None
        if weights is not None:
            self.weighted = WeightedRows(self._source, self.subset, weights, options.seed)
        self.digest = None
        if self.subset is not None or data.skipped or self.weighted is not None:
            # Skipped shards are part of the selection: without them, the
            # same row numbers are other positions.
            facts: list[Any] = ["all" if self.subset is None else digest_of_rows(self.subset)]
            facts.append([name for name, _, _ in data.skipped])
            facts += [] if self.weighted is None else [self.weighted.digest]
            self.digest = hashlib.sha256(json.dumps(facts).encode("ascii")).hexdigest()

    def select(self, options: SplitOptions) -> SelectedRows:
        """Return the rows of the same split that other options select; raises the same errors."""
        return SelectedRows(self._data, options, self._weights)

    def take(self, indices: npt.NDArray[np.int64]) -> Block:
        """Return positions by their indices (B,) among the selected positions in stored order."""
        rows = indices if self.subset is None else self.subset[indices]
        return self._source.take(rows, self._members)

    def epoch(self, epoch: int, options: LoaderOptions) -> ExactEpoch:
        """Return an epoch of the rank in the options."""
        subset = self.subset if self.weighted is None else self.weighted.rows(epoch)
        return ExactEpoch(self._source, subset, self._members, options, epoch)

    def size(self, epoch: int) -> int:
        """Return the number of positions of an epoch, counting each repetition."""
        return self.positions if self.weighted is None else self.weighted.size(epoch)

    @property
    def mean_size(self) -> Fraction:
        """Mean number of positions of an epoch: that of the selected rows, or the sum of their weights.

        An epoch has this number rounded up or down.
        """
        if self.weighted is None:
            return Fraction(self.positions)
        return Fraction(self.weighted.unit_sum, WEIGHT_UNIT)

    def split_range(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Divide a range of the concatenation of all epochs: yield (epoch, first, last) for each epoch."""

        def first(epoch: int) -> int:
            return epoch * self.positions if self.weighted is None else self.weighted.first(epoch)

        epoch = int(start // self.mean_size) if start < stop else 0  # an estimate: sizes may differ by one
        while epoch and first(epoch) > start:
            epoch -= 1
        while start < stop:
            base, end = first(epoch), first(epoch + 1)
            if start < end:
                last = min(stop, end)
                yield epoch, start - base, last - base
                start = last
            epoch += 1


class ExactEpoch:
    """One epoch of one rank: ``Permutation(n, derive_key(seed, "epoch", epoch))`` of its n positions.

    This is the order of ``shuffle_indices(range(n), seed, epoch)``. Without shuffling it is the stored order.

    Args:
        table: The rows of the split, in the memory of the host or of a device.
        subset: Rows of the epoch, in the same memory, of which some may be repeated; None: all rows.
        members: Names of the fields to read.
        options: Options of the loader.
        epoch: The epoch.

    Attributes:
        subset: The rows.
    """

    def __init__(
        self,
        table: GameTable,
        subset: Rows | None,
        members: Sequence[str],
        options: LoaderOptions,
        epoch: int,
    ) -> None:
        self.subset = subset
        self._table = table
        self._members = members
        self._schedule = EpochSchedule(table.positions if subset is None else len(subset), options)
        # Elements of a large permutation are computed when they are asked for, so its order takes no memory.
        self._order: Any = None
        if options.shuffle:
            key = derive_key(options.seed, "epoch", epoch)
            self._order = table.ops.permutation(self._schedule.positions, key)

    @property
    def steps(self) -> int:
        """Number of batches, which is the same for every rank."""
        return self._schedule.steps

    def parts(self, steps: range) -> Iterator[Part]:
        """Yield the positions of this rank at the given steps, in order.

        The rows of many steps are found together, and the batches of fewer steps are made together.
        """
        ops, take = self._table.ops, partial(self._table.take, members=self._members)
        # Rows are found for many steps at once, batches are made for as many steps as fit into the CPU cache.
        most = _MOST_BYTES // self._table.bytes_per_row(self._members)
        together, at_once = min(ops.batch_rows, most), ops.rows_at_once
        # NumPy takes all these positions at once, so their size is limited
        # too; on a device only their row numbers are.
        if ops is NUMPY:
            at_once = min(at_once, most)
        for group, indices in self._schedule.groups(steps, ops, together, at_once):
            rows, size = self._rows(indices), len(indices) // len(group)
            last = self._schedule.slice_at(group[-1])
            padding = np.arange(size) >= last.stop - last.start if last.padding else None
            # NumPy takes all rows at once: its calls take longer than slices, and a large block on the heap
            # keeps malloc from returning the memory of each batch. Slices of policies wait for a device.
            taken = take(rows) if ops is NUMPY else None

            def read(start: int, stop: int, rows: Any = rows, taken: Any = taken) -> Mapping[str, Any]:
                return take(rows[start:stop]) if taken is None else slice_rows(taken, start, stop)

            # `size` is 0 if a rank has no position of the last step; it still delivers an empty batch.
            count = max(1, together // max(size, 1))
            for start in range(0, len(group), count):
                own = group[start : start + count]
                yield Part(own, partial(read, start * size, (start + len(own)) * size), padding)

    def take(self, ranges: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the positions at ranges [start, stop) of the epoch's order as one block, over all ranks."""
        indices = np.concatenate([np.empty(0, np.int64), *(np.arange(start, stop) for start, stop in ranges)])
        return self._table.take(self._rows(indices), self._members)

    def _rows(self, indices: Any) -> Any:
        rows = indices if self._order is None else self._order[indices]
        if self.subset is None:
            return rows
        return self._table.ops.cast(self._table.ops.take(self.subset, rows), "int64")
