"""What a shuffle will do and need, for people and for the check before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hexdata.errors import BudgetError
from hexdata.remote import AnyPath
from hexdata.selection import BalanceRow, Duplicates
from hexdata.shuffle.options import ShuffleOptions
from hexdata.shuffle.prepare import Prepared
from hexdata.store import Store
from hexdata.store.files import size_of_tree
from hexdata.store.ledger import Ledger
from hexdata.store.parquet import ROW_GROUP_ROWS
from hexdata.store.room import disk_full, free_disk, system_text
from hexdata.units import format_bytes

__all__ = ["FOLDERS", "ShufflePlan", "free_room", "look_ahead"]

FOLDERS: Final = ("shuffled", "shards", "pickles/shuffled")
"""Where the shuffled positions lie, in every form: a new shuffle replaces all of it."""
DISK_MARGIN: Final = 1.1
"""The disk asked for over that expected from a sample of the rows."""


@dataclass(frozen=True)
class ShufflePlan:
    """What a shuffle will do and need. Sizes in bytes; what is expected is tried on a sample of the rows.

    Attributes:
        store: its path.
        seed: names the order.
        choices: what was chosen, but for the default.
        positions: of the store.
        rows: that take part, by split.
        left_out: positions that a choice leaves out, by the name of the choice.
        buckets: by split.
        slices: of the input, scattered one at a time by each thread.
        units: into which the buckets' rows are sorted, one at a time by each thread.
        row_group_rows: in the files of the result.
        threads: that work at a time, on each machine.
        memory: for everything together, on each machine.
        duckdb_memory: of that, the limit of each thread's DuckDB while it scatters.
        chunk_rows: rows that a thread scatters at a time, at most.
        sort_rows: rows that a thread sorts at a time, at most.
        run_bytes: of the runs, which are gone at the end.
        bucket_bytes: of the result.
        spill_bytes: set aside for units that turn out too large and are cut once more.
        disk_done: of these, what an interrupted run has already written.
        disk_needed: what is still to be written, and some more.
        disk_freed: what goes before: an older shuffle and what was made of it.
        disk_free: on the store's disk now.
        units_done: slices and buckets that an interrupted run has finished.
        seconds: expected, on this machine as busy as it was a moment ago.
        already_done: whether the store holds this very shuffle, so that nothing is to be done.
        duplicates: the games that the whole store holds more than once.
        balance: what ``balance_by`` does to each group.
        notes: what a person should know of the choices made.
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
    duplicates: Duplicates
    balance: tuple[BalanceRow, ...]
    notes: tuple[str, ...]

    def require_disk(self) -> None:
        """Check that the disk has room.

        Raises:
            BudgetError: it has not.
        """
        if self.disk_needed > self.disk_free + self.disk_freed:
            raise self.disk_full(
                "too little disk for a shuffle", self.store, self.disk_free + self.disk_freed
            )

    def disk_full(
        self, reason: str, path: AnyPath | str, free: int, error: OSError | None = None
    ) -> BudgetError:
        """Return the error for a disk without room, with what the whole plan needs.

        Args:
            reason: what is wrong.
            path: of the file or folder.
            free: bytes.
            error: of the system, if there was one: a quota may be used up where a disk has room.
        """
        needed = (
            f"{format_bytes(self.disk_needed)}: {format_bytes(self.run_bytes)} of runs, which go again, "
            f"{format_bytes(self.bucket_bytes)} of buckets and some to spare, less "
            f"{format_bytes(self.disk_done)} that an earlier run has written"
        )
        found = f"{format_bytes(free)} free"
        return disk_full(reason, path, f"{system_text(error)}, {found}" if error else found, needed=needed)


def look_ahead(
    store: Store, options: ShuffleOptions, prepared: Prepared, ledger: Ledger, already_done: bool
) -> ShufflePlan:
    """Return the plan of a shuffle, less what its ledger says is done."""
    layout = (
        prepared.layout.recorded(ledger["layout"], ledger.path) if "layout" in ledger else prepared.layout
    )
    limits, cost = prepared.limits, prepared.cost
    rows = sum(prepared.selection.rows.values())
    runs, buckets = int(rows * cost.run_bytes), int(rows * cost.bucket_bytes)
    at_work = limits.threads * prepared.machines
    spill = int(at_work * min(limits.sort_rows, rows) * cost.run_bytes)
    done_slices = [part for part in layout.slices if part.name in ledger]
    done_buckets = [b.name for job in layout.jobs for b in job.buckets if b.name in ledger]
    done_runs = sum(sum(ledger[part.name]["bytes"]) for part in done_slices)
    done_rows = sum(ledger[name]["rows"] for name in done_buckets)
    done = done_runs + sum(ledger[name]["bytes"] for name in done_buckets)
    left_ids = layout.positions - sum(part.stop - part.start for part in done_slices)
    left = left_ids / layout.positions * runs + (rows - done_rows) * cost.bucket_bytes
    seconds = left_ids * cost.scatter_seconds + (rows - done_rows) * cost.sort_seconds
    return ShufflePlan(
        store=str(store.path),
        seed=options.seed,
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
        disk_needed=0 if already_done else int(DISK_MARGIN * left) + spill,
        disk_freed=0 if already_done or "layout" in ledger else _bytes_to_free(store),
        disk_free=free_room(store),
        units_done=len(done_slices) + len(done_buckets),
        seconds=0.0 if already_done else prepared.seconds + seconds / at_work,
        already_done=already_done,
        duplicates=prepared.selection.duplicates,
        balance=prepared.selection.balance,
        notes=prepared.selection.notes,
    )


def free_room(store: Store) -> int:
    """Return the bytes that are free where a shuffle writes: of an object store, where its work lies."""
    return free_disk(store.path if isinstance(store.path, Path) else store.work)


def _bytes_to_free(store: Store) -> int:
    """Return the size of what a new shuffle removes before it begins."""
    folders = [*(store.path / folder for folder in FOLDERS), store.work / "shuffle" / "runs"]
    return sum(size_of_tree(folder) for folder in folders)
