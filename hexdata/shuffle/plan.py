"""The plan of a shuffle: the number of buckets and of passes, and the disk space that they need."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

from hexdata.errors import BudgetError
from hexdata.schema import board_bytes
from hexdata.selection import BalanceRow, Duplicates
from hexdata.shuffle.options import ShuffleOptions
from hexdata.storage import AnyPath, storage_of
from hexdata.store import Store
from hexdata.store.disk_space import disk_full, system_message
from hexdata.units import format_bytes

__all__ = ["FOLDERS", "RowSize", "ShufflePlan", "bucket_counts", "count_passes", "free_space"]

FOLDERS: Final = ("shuffled", "shards", "pickles/shuffled")
"""Folders with the shuffled positions in any format. The option ``replace`` removes all of them first."""
_BUCKET_ROWS: Final = 1 << 20
"""Rows per bucket of the largest split, if the number of buckets is not given."""
_ROW_OVERHEAD: Final = 52
"""Bytes of a row in DuckDB's sort besides its board, lists and texts: twelve columns and the keys."""
_STORED_SHARE: Final = 0.5
"""Bytes of a row in a bucket per byte in the sort, without lists and texts: 0.33 to 0.45 for real games."""
_SPILL_SHARE: Final = 0.8
"""Largest part of the free disk, besides the buckets, that a pass may use for DuckDB's temporary files."""


def bucket_counts(options: ShuffleOptions, rows: dict[str, int]) -> dict[str, int]:
    """Return the number of buckets by split. Smaller splits get proportionally fewer buckets.

    If the number is not given in the options, it depends only on the rows, so that the files are the same on
    any machine.
    """
    largest = max(rows.values())
    buckets = options.buckets or -(-largest // _BUCKET_ROWS)
    return {split: -(-count * buckets // largest) for split, count in rows.items()}


@dataclass(frozen=True)
class RowSize:
    """Mean size of a row in bytes.

    Attributes:
        fixed: Its board and its numbers.
        varying: Its policy and its metadata.
    """

    fixed: int
    varying: int

    @classmethod
    def of(cls, board_size: int, targets: int, varying: int) -> RowSize:
        """Return the size for a board size, a number of optional columns and the size of lists and texts."""
        return cls(board_bytes(board_size) + _ROW_OVERHEAD + 4 * targets, varying)

    @property
    def sorted(self) -> int:
        """Bytes in DuckDB's sort."""
        return self.fixed + self.varying

    @property
    def stored(self) -> int:
        """Bytes in a bucket, rather too many."""
        return int(self.fixed * _STORED_SHARE) + self.varying


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
            raise self.disk_full("too little disk space for a shuffle", self.store, free)

    def disk_full(
        self, reason: str, path: AnyPath | str, free: int, error: OSError | None = None
    ) -> BudgetError:
        """Return the error for insufficient disk space, with the space that the plan needs.

        Args:
            reason: Text of the error.
            path: File or folder that could not be written.
            free: Free space in bytes.
            error: The system's error; None if there was none (default). For example, a quota may be used up
                although the disk has free space.
        """
        needed = (
            f"{format_bytes(self.disk_needed)}: {format_bytes(self.bucket_bytes)} of buckets and "
            f"{format_bytes(self.spill_bytes)} of temporary files"
        )
        if self.replaces and not self.disk_freed:
            needed += "; with --replace, the present shuffle and its exports are removed first"
        found = f"{format_bytes(free)} free"
        return disk_full(reason, path, f"{system_message(error)}, {found}" if error else found, needed=needed)


def count_passes(spill: int, free: int, memory: int, buckets: int) -> int:
    """Return the number of passes with which the temporary files of each fit on the disk.

    Args:
        spill: Bytes of all rows in DuckDB's sort.
        free: Bytes of free disk space besides the buckets.
        memory: Bytes of DuckDB's memory; rows that fit into half of it are not spilled.
        buckets: Number of buckets, which limits the number of passes.
    """
    if spill <= memory // 2:
        return 1
    room = max(int(free * _SPILL_SHARE), 1)
    return min(-(-spill // room), max(buckets, 1))


def free_space(store: Store) -> int:
    """Return the free space in bytes on the disk that a shuffle writes to.

    For an object store this is the disk of its unfinished work.
    """
    free = storage_of(store.work_disk).free_space()
    return sys.maxsize if free is None else free
