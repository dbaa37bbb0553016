"""The plan of a shuffle: an estimate of its work, disk space and time, for users and for the disk check."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

from hexdata.errors import BudgetError
from hexdata.selection import BalanceRow, Duplicates
from hexdata.shuffle.layout import jobs_per_group
from hexdata.shuffle.options import ShuffleOptions
from hexdata.shuffle.prepare import Prepared, is_same_shuffle
from hexdata.storage import AnyPath, storage_of
from hexdata.store import Store
from hexdata.store.disk_space import disk_full, system_message
from hexdata.store.ledger import Ledger
from hexdata.store.parquet import ROW_GROUP_ROWS
from hexdata.units import format_bytes

__all__ = ["FOLDERS", "ShufflePlan", "estimate_shuffle", "free_space"]

FOLDERS: Final = ("shuffled", "shards", "pickles/shuffled")
"""Folders with the shuffled positions in any format. The option ``replace`` removes all of them first."""
DISK_MARGIN: Final = 1.1
"""Factor for the required disk space over the estimate from a sample."""


@dataclass(frozen=True)
class ShufflePlan:
    """The work and the resources of a shuffle. Sizes are in bytes; estimates are from a sample of rows.

    Attributes:
        store: Path or address of the store.
        seed: Seed that determines the order.
        choices: Selection options that differ from their defaults.
        positions: Number of positions in the store.
        rows: Number of selected positions by split.
        left_out: Number of excluded positions by the option that excludes them.
        buckets: Number of buckets by split.
        slices: Number of input slices. Each thread scatters one at a time.
        units: Number of units that are sorted. Each thread sorts one at a time.
        row_group_rows: Rows per row group in the resulting files.
        threads: Number of threads on each machine.
        memory: Total memory on each machine.
        duckdb_memory: Part of it that is the limit of each thread's DuckDB session while it scatters.
        chunk_rows: Maximum rows that a thread scatters at a time.
        sort_rows: Maximum rows that a thread sorts at a time.
        run_bytes: Estimated size of the runs, which are deleted at the end.
        bucket_bytes: Estimated size of the buckets.
        spill_bytes: Space reserved for units that are larger than planned and are split further, and for
            local copies of runs in an object store.
        disk_done: Size of the runs and buckets that an interrupted run has already written.
        disk_needed: Space for all remaining files, with a margin.
        disk_freed: Space freed before the shuffle starts, by removing unfinished files and, with the option
            ``replace``, an older shuffle and the files made from it.
        disk_free: Free space on the disk that is written to.
        units_done: Number of slices and buckets that an interrupted run has finished.
        seconds: Estimated duration at the current load of this machine.
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
    slices: int
    units: int
    row_group_rows: int
    threads: int
    memory: int
    duckdb_memory: int
    chunk_rows: int
    sort_rows: int
    run_bytes: int
    bucket_bytes: int
    spill_bytes: int
    disk_done: int
    disk_needed: int
    disk_freed: int
    disk_free: int
    units_done: int
    seconds: float
    already_done: bool
    replaces: str | None
    duplicates: Duplicates
    balance: tuple[BalanceRow, ...]
    notes: tuple[str, ...]

    def require_disk(self) -> None:
        """Check that there is enough disk space.

        Raises:
            BudgetError: There is not.
        """
        if self.disk_needed > self.disk_free + self.disk_freed:
            raise self.disk_full(
                "too little disk space for a shuffle", self.store, self.disk_free + self.disk_freed
            )

    def disk_full(
        self, reason: str, path: AnyPath | str, free: int, error: OSError | None = None
    ) -> BudgetError:
        """Return the error for insufficient disk space, with the space that the whole plan needs.

        Args:
            reason: Text of the error.
            path: File or folder that could not be written.
            free: Free space in bytes.
            error: The system's error; None if there was none (default). For example, a quota may be used up
                although the disk has free space.
        """
        needed = (
            f"{format_bytes(self.disk_needed)}: {format_bytes(self.run_bytes)} of temporary runs, "
            f"{format_bytes(self.bucket_bytes)} of buckets and a reserve, minus "
            f"{format_bytes(self.disk_done)} that an interrupted shuffle has already written"
        )
        found = f"{format_bytes(free)} free"
        if self.replaces and not self.disk_freed:
            needed += "; with --replace, the present shuffle and its exports are removed first"
        return disk_full(reason, path, f"{system_message(error)}, {found}" if error else found, needed=needed)


def estimate_shuffle(
    store: Store,
    options: ShuffleOptions,
    prepared: Prepared,
    ledger: Ledger,
    *,
    already_done: bool = False,
) -> ShufflePlan:
    """Return the plan of a shuffle, less the work that its ledger lists as finished."""
    layout = prepared.layout
    if "layout" in ledger:
        layout = layout.parse_recorded(ledger["layout"], ledger.path)
    limits, cost = prepared.limits, prepared.cost
    rows = sum(prepared.selection.rows.values())
    runs, buckets = int(rows * cost.run_bytes), int(rows * cost.bucket_bytes)
    workers = limits.threads * prepared.machines
    spill = int(workers * min(limits.sort_rows, rows) * cost.run_bytes)
    if storage_of(store.work).local is None:
        jobs = len(layout.jobs)
        tasks = prepared.sort_tasks
        group = jobs_per_group(
            jobs, len(layout.slices), max(runs / jobs, 1), tasks, prepared.threads_per_task
        )
        spill += tasks * runs * group // jobs
    done_slices = [slice_ for slice_ in layout.slices if slice_.name in ledger]
    done_buckets = [b.name for job in layout.jobs for b in job.buckets if b.name in ledger]
    done_runs = sum(sum(ledger[slice_.name]["bytes"]) for slice_ in done_slices)
    done_rows = sum(ledger[name]["rows"] for name in done_buckets)
    done = done_runs + sum(ledger[name]["bytes"] for name in done_buckets)
    remaining_ids = layout.positions - sum(slice_.stop - slice_.start for slice_ in done_slices)
    remaining_bytes = remaining_ids / layout.positions * runs + (rows - done_rows) * cost.bucket_bytes
    seconds = remaining_ids * cost.scatter_seconds + (rows - done_rows) * cost.sort_seconds
    return ShufflePlan(
        store=str(store.path),
        seed=prepared.lineage["seed"],
        choices=options.non_default(),
        positions=layout.positions,
        rows=prepared.selection.rows,
        left_out=prepared.selection.left_out,
        buckets=prepared.buckets,
        slices=len(layout.slices),
        units=layout.units,
        row_group_rows=ROW_GROUP_ROWS,
        threads=limits.threads,
        memory=options.memory,
        duckdb_memory=limits.duckdb_memory,
        chunk_rows=limits.chunk_rows,
        sort_rows=limits.sort_rows,
        run_bytes=runs,
        bucket_bytes=buckets,
        spill_bytes=spill,
        disk_done=done,
        disk_needed=0 if already_done else int(DISK_MARGIN * remaining_bytes) + spill,
        disk_freed=0 if already_done or "layout" in ledger else _bytes_to_free(store, options),
        disk_free=free_space(store),
        units_done=len(done_slices) + len(done_buckets),
        seconds=0.0 if already_done else prepared.seconds + seconds / workers,
        already_done=already_done,
        replaces=_replaced(store, options),
        duplicates=prepared.selection.duplicates,
        balance=prepared.selection.balance,
        notes=prepared.selection.notes,
    )


def free_space(store: Store) -> int:
    """Return the free space in bytes on the disk that a shuffle writes to.

    For an object store this is the disk of its unfinished work.
    """
    free = storage_of(store.work_disk).free_space()
    return sys.maxsize if free is None else free


def _replaced(store: Store, options: ShuffleOptions) -> str | None:
    done = store.manifest.stages.get("shuffle")
    if done is None or is_same_shuffle(store, options):
        return None
    size = format_bytes(sum(facts.bytes for facts in store.manifest.files_in("shuffled").values()))
    text = f"the shuffle with seed {done['seed']}, {done['positions']:,} positions, {size}"
    return f"{text}, {'and its exports, first' if options.replace else 'when this one is complete'}"


def _bytes_to_free(store: Store, options: ShuffleOptions) -> int:
    """Return the size in bytes of the files that a shuffle removes at its start.

    If only damaged or removed buckets are written again, the files made from the shuffle are kept.
    """
    replaced = FOLDERS if options.replace and not is_same_shuffle(store, options) else ()
    folders = [*(store.path / folder for folder in replaced), store.work / "shuffle" / "runs"]
    return sum(size for folder in folders for size in storage_of(folder).files().values())
