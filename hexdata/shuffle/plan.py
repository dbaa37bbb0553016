"""The plan of a shuffle: the number of buckets and of passes, and the disk space that they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from hexdata.errors import BudgetError
from hexdata.options import BASE_MEMORY, ShuffleOptions
from hexdata.schema import board_bytes
from hexdata.selection import BalanceRow, Duplicates
from hexdata.storage.errors import RUN_AGAIN
from hexdata.store.parquet import ROW_GROUP_BYTES, ROW_GROUP_ROWS
from hexdata.units import format_bytes

# A bucket is the unit of resuming and of repairs. With assign "game", the order depends on this number.
_BUCKET_ROWS: Final = 1 << 20
"""Rows per bucket of the largest split, if the number of buckets is not given."""
_ROW_OVERHEAD: Final = 52
"""Bytes of a row in DuckDB's sort besides its board, lists and texts: twelve columns and the keys."""
_STORED_SHARE: Final = 0.5
"""Bytes of a row in a bucket per byte in the sort, without lists and texts: 0.33 to 0.45 for real games."""
_MEMORY_SHARE: Final = 0.6
"""Largest part of DuckDB's memory that rows take in a sort without temporary files."""
_FILE_BYTES: Final = 1.4
"""Bytes of DuckDB's temporary files per byte of rows in its sort: 1.33 for 97 million positions."""
_MERGE_BYTES: Final = 1 << 24
"""Bytes in this formula: a sort merges rows of up to memory**2 / (threads * _MERGE_BYTES) bytes.

Each thread pins blocks of every sorted run to merge them, and the runs are as long as the memory allows.
Measured with DuckDB 2.0.1: 880 MB of rows fail with 85 MB of memory for one thread, 120 MB for two and 170 MB
for four, and are sorted with 120, 170 and 240 MB.
"""
_THREAD_MEMORY: Final = 125_000_000
"""Bytes of DuckDB's memory for each of its threads, as its documentation advises."""
_LEAST_MEMORY: Final = 90_000_000
"""Bytes of DuckDB's memory below which it cannot sort, or needs a query for every few rows."""
_MERGED_ROWS: Final = 150_000
"""Rows, with their lists and texts, for which each thread of a merge needs memory.

It merges 122,880 rows at a time. Measured for policies of 19 * 19: a thread fails with memory for 136,000
rows of the size that ``row_bytes`` estimates, and not with memory for 149,000.
"""
_WRITER_COPIES: Final = 3
"""Bytes that writing a row group takes per byte of its lists and texts: 2.9 for policies of 19 * 19."""
_WRITER_MEMORY: Final = 80_000_000
"""Part of ``BASE_MEMORY`` for the row group that is written."""
# DuckDB itself leaves a tenth of the free disk unused, so the estimate may be a tenth too low.
_SPILL_SHARE: Final = 0.8
"""Largest part of the free disk, besides the buckets, that a pass may use for DuckDB's temporary files."""


def bucket_counts(options: ShuffleOptions, rows: dict[str, int]) -> dict[str, int]:
    """Return the number of buckets by split. Smaller splits get proportionally fewer buckets.

    If the number is not given in the options, it depends only on the rows, so that the files are the same on
    any machine.
    """
    largest = max(rows.values())
    buckets = options.buckets or -(-largest // _BUCKET_ROWS)
    # Rounded up, so that every split with positions has a bucket.
    return {split: -(-count * buckets // largest) for split, count in rows.items()}


def row_bytes(board_size: int, targets: int, varying: int) -> tuple[int, int]:
    """Return the bytes of a mean row in DuckDB's sort and, rather too many, in a bucket.

    Args:
        board_size: Board size n.
        targets: Number of optional columns.
        varying: Mean size of the policy and the metadata.
    """
    fixed = board_bytes(board_size) + _ROW_OVERHEAD + 4 * targets
    return fixed + varying, int(fixed * _STORED_SHARE) + varying


@dataclass(frozen=True)
class ShufflePlan:
    """The work and the disk space of a shuffle. Sizes are in bytes; those of files to write are estimates.

    Attributes:
        store: Path or address of the store.
        seed: Seed that determines the order.
        choices: Selection options that differ from their defaults.
        positions: Number of positions in the store.
        rows: Number of selected positions by split.
        left_out: Number of excluded positions by the option that excludes them.
        buckets: Number of buckets by split.
        buckets_done: Number of buckets that are already written.
        passes: Number of times that the positions are read to sort the missing buckets.
        memory: Memory limit.
        threads: Number of threads.
        bucket_bytes: Size of the missing buckets.
        spill_bytes: Size of the temporary files of a pass.
        disk_free: Free space on the disk that is written to.
        disk_freed: Space that the option ``replace`` frees first.
        already_done: Whether the store already contains this shuffle, so that there is nothing to do.
        replaces: Description of the shuffle that this one replaces; None if there is none.
        duplicates: Games that occur more than once in the whole store.
        balance: Effect of ``balance_by`` on each group.
        notes: Remarks on the selection options for the user.
    """

    store: str
    seed: int
    choices: dict[str, Any]
    positions: int
    rows: dict[str, int]
    left_out: dict[str, int]
    buckets: dict[str, int]
    buckets_done: int
    passes: int
    memory: int
    threads: int
    bucket_bytes: int
    spill_bytes: int
    disk_free: int
    disk_freed: int
    already_done: bool
    replaces: str | None
    duplicates: Duplicates
    balance: tuple[BalanceRow, ...]
    notes: tuple[str, ...]

    @property
    def disk_needed(self) -> int:
        """Bytes for the missing buckets and the temporary files."""
        return self.bucket_bytes + self.spill_bytes

    def require_disk(self) -> None:
        """Check that there is enough disk space.

        Raises:
            BudgetError: There is not.
        """
        free = self.disk_free + self.disk_freed
        if self.disk_needed > free:
            needed = (
                f"{format_bytes(self.disk_needed)}: {format_bytes(self.bucket_bytes)} of buckets and "
                f"{format_bytes(self.spill_bytes)} of temporary files"
            )
            if self.replaces and not self.disk_freed:
                needed += "; with --replace, the present shuffle and its exports are removed first"
            found, hint = f"{format_bytes(free)} free", RUN_AGAIN
            reason = "too little disk space for a shuffle"
            raise BudgetError(reason, path=self.store, found=found, expected=needed, hint=hint)


@dataclass(frozen=True)
class SortLimits:
    """DuckDB's limits for the sort of a shuffle, and what follows from them.

    Attributes:
        memory: Bytes of DuckDB's memory.
        threads: Number of DuckDB's threads.
        row: Bytes of a mean row in the sort.
    """

    memory: int
    threads: int
    row: int

    @classmethod
    def of(cls, memory: int, threads: int, row: int = 0, varying: int = 0) -> SortLimits:
        """Return the limits within the memory of a process.

        Args:
            memory: Bytes for the process.
            threads: Maximum number of threads.
            row: Bytes of a mean row in the sort. Default 0: narrow rows.
            varying: Bytes of its lists and texts. Default 0.

        Raises:
            BudgetError: The memory is too small for such rows.
        """
        written = _WRITER_COPIES * min(ROW_GROUP_ROWS * varying, ROW_GROUP_BYTES)
        others = BASE_MEMORY + max(written - _WRITER_MEMORY, 0)
        if memory < (least := others + _LEAST_MEMORY):
            reason = "too little memory for a shuffle of rows of this size"
            raise BudgetError.of_memory(reason, found=memory, expected=least, hint="Raise --memory.")
        memory -= others
        return cls(memory, max(min(threads, memory // max(_THREAD_MEMORY, _MERGED_ROWS * row)), 1), row)

    @property
    def most_rows(self) -> int | None:
        """Maximum number of rows of one query; None for any number, as it can merge temporary files."""
        is_mergeable = self.threads * _MERGED_ROWS * self.row <= self.memory
        return None if is_mergeable else max(int(self.memory * _MEMORY_SHARE) // self.row, 1)

    def count_passes(self, rows: int, free: int, buckets: int) -> int:
        """Return the number of passes of a sort.

        There are as few as the free disk and the memory for merging allow, since reading the positions again
        takes longer than temporary files, and at most as many as let the rows of each pass fit into memory.

        Args:
            rows: Number of rows.
            free: Bytes of free disk space besides the buckets.
            buckets: Number of buckets, which limits the number of passes. Only if temporary files cannot be
                merged, a bucket is sorted in several passes.
        """
        if self.most_rows is not None:
            return max(-(-rows // self.most_rows), 1)
        # Passes whose rows fit into the memory, into the free disk, and into the memory for merging.
        size = rows * self.row
        in_memory = -(-size // int(self.memory * _MEMORY_SHARE))
        # The free space may be below zero if the buckets alone exceed it, which ``require_disk`` reports.
        on_disk = -(-int(size * _FILE_BYTES) // max(int(free * _SPILL_SHARE), 1))
        merged = -(-size * self.threads * _MERGE_BYTES // self.memory**2)
        return max(min(in_memory, max(on_disk, merged), buckets), 1)

    def temporary_bytes(self, rows: int) -> int:
        """Return the bytes of the temporary files of a pass with this number of rows."""
        size = rows * self.row
        return 0 if size <= self.memory * _MEMORY_SHARE else int(size * _FILE_BYTES)
