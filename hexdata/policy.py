"""Sparse policies: the cells of each policy whose probability is not 0, in Arrow and in NumPy.

A policy is what a search or a player prefers: one number per cell, not negative, usually with the sum 1. A
policy that is one-hot is stored as a move, not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import StoreError
from hexdata.schema import POLICY_TYPE

__all__ = ["SparsePolicies"]


@dataclass(frozen=True)
class SparsePolicies:
    """k policies. The cells of policy i have the indices ``starts[i]`` to ``starts[i + 1]`` (exclusive)."""

    starts: npt.NDArray[np.int64]
    """Ascending, (k + 1,). ``starts[0]`` is 0."""
    cells: npt.NDArray[np.uint16]
    """Cells, row · n + column, strictly ascending within a policy."""
    probabilities: npt.NDArray[np.float32]
    """Probability of each cell, as given by the source; the sum may differ from 1."""

    def __len__(self) -> int:
        """Return the number of policies."""
        return len(self.starts) - 1

    @classmethod
    def from_dense(cls, policies: npt.NDArray[np.float32]) -> SparsePolicies:
        """Return dense policies (k, cells) as sparse ones. A cell with -0.0 is kept, so no bit is lost."""
        rows, cells = np.nonzero(np.ascontiguousarray(policies, np.float32).view(np.uint32))
        # Rows ascend, so the cells of policy i begin where i would be inserted, also if it has none.
        starts = np.searchsorted(rows, np.arange(len(policies) + 1))
        return cls(starts.astype(np.int64), cells.astype(np.uint16), policies[rows, cells].astype(np.float32))

    @classmethod
    def join(cls, parts: Sequence[SparsePolicies]) -> SparsePolicies:
        """Return the policies of all parts, in order."""
        counts = [np.empty(0, np.int64), *(np.diff(part.starts) for part in parts)]
        cells = [np.empty(0, np.uint16), *(part.cells for part in parts)]
        probabilities = [np.empty(0, np.float32), *(part.probabilities for part in parts)]
        starts = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        return cls(starts, np.concatenate(cells), np.concatenate(probabilities))

    def to_dense(self, cells: int) -> npt.NDArray[np.float32]:
        """Return the policies as float32 (k, cells).

        Args:
            cells: Number of cells of the board; all cells are below it.
        """
        dense = np.zeros((len(self), cells), np.float32)
        rows = np.repeat(np.arange(len(self)), np.diff(self.starts))
        dense[rows, self.cells] = self.probabilities
        return dense

    def take(self, indices: npt.NDArray[np.integer]) -> SparsePolicies:
        """Return the policies with these indices, (m,), in their order."""
        lengths = np.diff(self.starts)[indices]
        starts = np.zeros(len(indices) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        # The index of a cell differs from that in the result by the distance of the two starts of its policy.
        chosen = np.repeat(self.starts[indices] - starts[:-1], lengths)
        chosen += np.arange(starts[-1])
        return SparsePolicies(starts, self.cells[chosen], self.probabilities[chosen])

    def to_arrow(self, valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
        """Return an array of ``schema.POLICY_TYPE``.

        Args:
            valid: (n,) with k values True: the rows that have a policy. The others are null. Default None:
                every row has one.
        """
        items = pa.StructArray.from_arrays(
            [pa.array(self.cells), pa.array(self.probabilities)], fields=list(POLICY_TYPE.value_type)
        )
        starts, mask = self.starts, None
        if valid is not None:
            starts = np.zeros(len(valid) + 1, np.int64)
            # A null needs an offset, too: it has no cells and ends where the policy before it does.
            starts[1:] = self.starts[np.cumsum(valid)]
            mask = pa.array(~valid)
        # ``pa.list_`` has offsets of 32 bits.
        offsets = pa.array(starts.astype(np.int32))
        return pa.ListArray.from_arrays(offsets, items, type=POLICY_TYPE, mask=mask)

    @classmethod
    def from_arrow(
        cls, column: pa.Array | pa.ChunkedArray, cells: int
    ) -> tuple[npt.NDArray[np.int64], SparsePolicies]:
        """Return the rows of a column that have a policy, (k,), and their policies.

        Args:
            column: Array of ``schema.POLICY_TYPE``.
            cells: Number of cells of the board.

        Raises:
            StoreError: A policy contains a null, a cell that is not on the board, cells that do not ascend,
                or a probability that is negative, infinite or NaN.
        """
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        given = column.drop_null()
        items = given.flatten()
        starts = np.zeros(len(given) + 1, np.int64)
        np.cumsum(given.value_lengths().to_numpy(), out=starts[1:])
        cell, probability = items.field("cell"), items.field("probability")
        parts = items, cell, probability
        if any(part.null_count for part in parts):
            # The error names the first row with a null, on any of the three levels.
            known = np.all([part.is_valid().to_numpy(zero_copy_only=False) for part in parts], axis=0)
            policy = np.searchsorted(starts, known.argmin(), side="right") - 1
            raise StoreError("a policy contains a null", record=f"row {rows[policy]}", expected="numbers")
        policies = cls(starts, cell.to_numpy(), probability.to_numpy())
        policies._check(rows, cells)
        return rows, policies

    def _check(self, rows: npt.NDArray[np.int64], cells: int) -> None:
        """Check cells and probabilities; ``rows`` (k,) are named in errors."""
        first = np.zeros(len(self.cells), bool)
        # Cells ascend within a policy only. The start of an empty policy is a cell of the next one.
        first[self.starts[:-1][np.diff(self.starts) > 0]] = True
        ascending = np.ones(len(self.cells), bool)
        # Signed numbers, as differences of uint16 are never negative.
        ascending[1:] = np.diff(self.cells.astype(np.int32)) > 0
        positive = np.isfinite(self.probabilities) & (self.probabilities >= 0)
        for valid, what in (
            (self.cells < cells, f"a cell from 0 to {cells - 1}"),
            (ascending | first, "cells in ascending order"),
            (positive, "probabilities that are finite and not negative"),
        ):
            if not valid.all():
                item = int(np.flatnonzero(~valid)[0])
                record = f"row {rows[np.searchsorted(self.starts, item, side='right') - 1]}"
                found = f"cell {self.cells[item]} with {self.probabilities[item]}"
                raise StoreError("a policy is not valid", record=record, found=found, expected=what)
