"""Sparse policies of the rows of a split, with random access.

They are four arrays of a table of games. Row r has the entries from start(r) to start(r + 1), exclusive, of
``policy_cell`` and ``policy_probability``; start(r) is the sum of ``policy_group[r // 64]`` and
``policy_offset[r]``. A row without entries has no policy. A policy of zeros has one entry, whose probability
is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.policy import SparsePolicies
from hexdata.shards.blocks import Block

__all__ = ["GROUP_SHIFT", "POLICY_ARRAYS", "RowPolicies", "cell_dtype", "count_entries", "find_ranges"]

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]

GROUP_SHIFT: Final = 6
"""Groups have 64 rows: on boards of up to 32 x 32 cells, the offset of the last one fits into two bytes."""
_GROUP: Final = 1 << GROUP_SHIFT
_GROUPS_AT_ONCE: Final = 1 << 14
_ROWS_AT_ONCE: Final = 1 << 20
POLICY_ARRAYS: Final = ("policy_group", "policy_offset", "policy_cell", "policy_probability")
"""Names of the arrays. The last two are absent if only the rows with a policy are known."""


def cell_dtype(cells: int) -> np.dtype[Any]:
    """Return the dtype of ``policy_cell`` for boards with this number of cells: uint8 up to 16 x 16."""
    return np.min_scalar_type(cells - 1)


def count_entries(policies: SparsePolicies) -> Int64Array:
    """Return the number of entries of each policy, at least one."""
    return np.maximum(np.diff(policies.starts), 1)


def find_ranges(starts: Array, lengths: Array) -> Int64Array:
    """Return the concatenated ranges [start, start + length)."""
    ends = np.cumsum(lengths)
    found: Int64Array = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(
        starts - (ends - lengths), lengths
    )
    return found


class RowPolicies:
    """The policies of the rows of a split.

    Args:
        arrays: The arrays ``POLICY_ARRAYS``; see the module.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._group, self._offset = arrays["policy_group"], arrays["policy_offset"]
        self._cells, self._probabilities = arrays.get("policy_cell"), arrays.get("policy_probability")

    @classmethod
    def allocate(cls, counts: npt.NDArray[np.uint16], cells: int, *, contents: bool) -> dict[str, Array]:
        """Return arrays for policies, whose entries are to be set with :meth:`put`.

        Args:
            counts: Number of entries of each row (N,), 0 for rows without a policy.
            cells: Number of cells of the board.
            contents: Whether to allocate the entries, too.
        """
        rows = len(counts)
        offset = np.zeros(-(-(rows + 1) // _GROUP) * _GROUP, np.uint16)
        offset[:rows] = counts
        groups = offset.reshape(-1, _GROUP)
        totals = np.zeros(len(groups) + 1, np.int64)
        for first in range(0, len(groups), _GROUPS_AT_ONCE):
            part = groups[first : first + _GROUPS_AT_ONCE]
            ends = np.cumsum(part, axis=1, dtype=np.int32)
            totals[first + 1 : first + 1 + len(part)] = ends[:, -1]
            part[:] = ends - part
        starts = np.cumsum(totals)
        arrays: dict[str, Array] = {"policy_group": starts[:-1], "policy_offset": offset[: rows + 1]}
        if contents:
            arrays["policy_cell"] = np.zeros(int(starts[-1]), cell_dtype(cells))
            arrays["policy_probability"] = np.zeros(int(starts[-1]), np.float32)
        return arrays

    @staticmethod
    def bytes_of(rows: int, entries: int, cells: int, *, contents: bool) -> int:
        """Return the size of the arrays of :meth:`allocate` in bytes."""
        index = 2 * (rows + _GROUP) + 8 * (rows // _GROUP + 2)
        return index + contents * entries * (cell_dtype(cells).itemsize + 4)

    @property
    def entries_per_row(self) -> float:
        """Mean number of entries of a row, including rows without a policy."""
        rows = len(self._offset) - 1
        return int(self._starts(np.array([rows]))[0]) / max(rows, 1)

    @property
    def largest(self) -> int:
        """Largest number of entries of a row."""
        last = len(self._offset) - 1
        firsts = range(0, last, _ROWS_AT_ONCE)
        parts = (np.arange(first, min(first + _ROWS_AT_ONCE, last)) for first in firsts)
        return max((int(self.counts(part).max()) for part in parts), default=0)

    def counts(self, rows: Int64Array) -> Int64Array:
        """Return the number of entries of rows (B,): int64 (B,), 0 for rows without a policy."""
        return self._starts(rows + 1) - self._starts(rows)

    def has_policy(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Return whether each row (B,) has a policy: bool (B,)."""
        return self.counts(rows) > 0

    def rows_in(self, start: int, stop: int) -> npt.NDArray[np.uint32]:
        """Return the rows with a policy among the rows [start, stop), counted from ``start``."""
        return np.flatnonzero(np.diff(self._starts(np.arange(start, stop + 1)))).astype(np.uint32)

    def take(self, rows: Int64Array) -> Block:
        """Return the policies of rows (B,) as ``SPARSE_FIELDS`` of a block with B rows."""
        assert self._cells is not None
        assert self._probabilities is not None
        counts = self.counts(rows)
        found = np.flatnonzero(counts)
        counts = counts[found]
        entries = find_ranges(self._starts(rows[found]), counts)
        return {
            "policy_row": found.astype(np.uint32),
            "policy_count": counts.astype(np.uint16),
            "policy_cell": self._cells.take(entries).astype(np.uint16, copy=False),
            "policy_probability": self._probabilities.take(entries),
        }

    def put(self, rows: Int64Array, policies: SparsePolicies) -> bool:
        """Set the policies of rows (k,), and return whether their numbers of entries are as allocated."""
        assert self._cells is not None
        assert self._probabilities is not None
        if not np.array_equal(self.counts(rows), count_entries(policies)):
            return False
        entries = find_ranges(self._starts(rows), np.diff(policies.starts))
        self._cells[entries] = policies.cells
        self._probabilities[entries] = policies.probabilities
        return True

    def _starts(self, rows: Int64Array) -> Int64Array:
        return self._group.take(rows >> GROUP_SHIFT) + self._offset.take(rows)
