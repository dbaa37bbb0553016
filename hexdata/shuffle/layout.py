"""The layout of a shuffle: its buckets, its units of work and the limits of each thread.

The buckets depend only on the rows. How they are divided into units, and how many rows a thread holds,
depends on the memory. Nothing here reads or writes files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import ceil, isqrt, sqrt
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.engine.protocol import Machines
from hexdata.errors import StoreError
from hexdata.order import bucket_bounds
from hexdata.pool import default_workers
from hexdata.schema import SPLITS, board_bytes, target_type
from hexdata.shuffle.options import ShuffleOptions, too_little_memory
from hexdata.shuffle.runs import RANGE_BYTES
from hexdata.store.parquet import ROW_GROUP_ROWS
from hexdata.strict_json import Matching, Within, check_value

__all__ = [
    "BUCKET_ROWS",
    "Bucket",
    "Grouping",
    "Job",
    "ShuffleLayout",
    "Slice",
    "ThreadLimits",
    "bucket_counts",
    "group_jobs",
    "jobs_per_group",
    "make_layout",
    "make_limits",
]

BUCKET_ROWS: Final = 1 << 20
"""Rows per bucket of the largest split, if the number of buckets is not given."""
MAX_UNITS: Final = 1_000_000
"""Maximum number of slices, of units and of buckets of a shuffle."""
_Number = Annotated[int, Within(1, MAX_UNITS)]
_Split = Annotated[str, Matching("train|val|test", "train, val or test")]
BASE_MEMORY: Final = 312 << 20
"""Measured memory in bytes besides DuckDB's buffers and the rows: interpreter and libraries."""
TRANSFER_MEMORY: Final = 24 << 20
"""Bytes per thread for reading and uploading objects, and for several reads at a time from shared files."""
MAX_ROWS: Final = 1 << 21
"""Maximum rows that a thread loads at a time. More is not faster if pieces are large enough."""
MANY_POSITIONS: Final = 1 << 32
"""Above this number of positions, more rows are loaded at a time, so that pieces do not become too small."""
PIECE_ROWS: Final = 1 << 10
"""Target average rows per piece in a plan. Writing and reading a piece costs about 0.2 ms and 2 kB regardless
of its rows: at 1,000 rows, as much time as the rows themselves and a tenth of their bytes.
"""
MAX_JOINED_BYTES: Final = 1 << 31
"""Maximum bytes of rows joined in memory. Arrow uses 32-bit offsets into a column's texts."""
MIN_ROWS: Final = 1 << 15
"""Minimum rows that a thread loads at a time; fewer would make too many pieces."""
ROW_OVERHEAD: Final = 52
"""Bytes of a row in memory besides its board, lists and texts: twelve columns and the bucket."""
KEY_BYTES: Final = 24
"""Bytes per row for its key, index and bucket while a unit is sorted."""
SCATTER_COPIES: Final = 3.0
"""Copies of a row in memory while it is scattered: as read by DuckDB, in unit order, and one column.

That column may be most of a row.
"""
SORT_COPIES: Final = 2.0
"""Copies of a row in memory while it is sorted by column; a single column may be most of a row."""
WRITER_COPIES: Final = 5
"""Row groups in memory while one is encoded."""
DUCKDB_SHARE: Final = 0.3
"""Fraction of a thread's memory for DuckDB while it scatters."""
MIN_DUCKDB_MEMORY: Final = 32 << 20
DUCKDB_ROW_GROUPS: Final = 1.5
"""Additional row groups in DuckDB's memory while it reads."""
MAX_DUCKDB_MEMORY: Final = 256 << 20
GROUPS_PER_TASK: Final = 2
"""Minimum groups of jobs per task that runs at a time, so that all machines stay busy until the end."""
GROUP_BYTES: Final = 1 << 32
"""Maximum bytes of the pieces of a group per thread, which a machine copies to its own disk."""
SLICES_PER_THREAD: Final = 4
"""Slices per thread in a small store, so that all threads stay busy."""

UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Slice:
    """A range of position ids, the unit of work of phase 1. Its rows are scattered into separate runs."""

    index: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Name of the slice in the ledger and the log."""
        return f"slice {self.index}"

    def run_name(self, number: int) -> str:
        """Return the file name of one of the slice's runs."""
        return f"run-{self.index:06d}-{number:03d}.arrow"


@dataclass(frozen=True)
class Bucket:
    """One file of the result."""

    split: str
    index: int

    @property
    def name(self) -> str:
        """Path of the bucket's file, relative to the store."""
        return f"shuffled/{self.split}/bucket-{self.index:06d}.parquet"


@dataclass(frozen=True)
class Job:
    """The unit of work of phase 2: consecutive buckets and the units that contain their rows."""

    buckets: list[Bucket]
    units: range


@dataclass(frozen=True)
class Grouping:
    """The division of a split's buckets into units: several buckets per unit, or several units per bucket.

    Attributes:
        buckets: Number of buckets of the split.
        group: Buckets per unit.
        parts: Units per bucket, each a range of its keys; always 1 if ``group`` is above 1.
    """

    buckets: _Number
    group: _Number
    parts: _Number

    @property
    def units(self) -> int:
        """Number of units."""
        return -(-self.buckets // self.group) * self.parts


@dataclass(frozen=True)
class ShuffleLayout:
    """The division of rows into slices and units. It affects the runs, but not the content of the buckets.

    Attributes:
        positions: Number of positions in the store. Slices are ranges of their ids.
        slice_rows: Ids per slice.
        by_key: Whether buckets are ranges of keys, except for few rows. If False, each bucket has keys from
            the whole range.
        groups: Grouping of each split that has rows, in the order of ``SPLITS``.
    """

    positions: Annotated[int, Within(1, 1 << 62)]
    slice_rows: Annotated[int, Within(1, 1 << 62)]
    by_key: bool
    groups: dict[_Split, Grouping]

    def to_json(self) -> dict[str, Any]:
        """Return the layout in the form that the ledger stores."""
        return asdict(self)

    def parse_recorded(self, content: dict[str, Any], path: object) -> ShuffleLayout:
        """Return the layout stored in the ledger at ``path``, which may have been made under other limits.

        Args:
            content: JSON value of the layout, from :meth:`to_json`.
            path: Path of the ledger, for messages.

        Raises:
            StoreError: The stored layout is invalid, is for other rows, or has more slices or units than any
                plan.
        """
        found = check_value(ShuffleLayout, content, path, what="the layout of the shuffle")
        buckets, expected = (
            {split: group.buckets for split, group in layout.groups.items()} for layout in (found, self)
        )
        slices = -(-found.positions // found.slice_rows)
        if (found.positions, buckets) != (self.positions, expected) or max(slices, found.units) > MAX_UNITS:
            raise StoreError(
                "the ledger contains the layout of another shuffle",
                path=path,
                found=f"{found.positions:,} positions, {slices:,} slices, {found.units:,} units",
                expected=f"{self.positions:,} positions, at most {MAX_UNITS:,} slices and units",
                hint="Remove the file; the shuffle then starts from the beginning.",
            )
        return found

    @property
    def slices(self) -> list[Slice]:
        """Ranges of ids that cover the store."""
        starts = range(0, self.positions, self.slice_rows)
        return [Slice(i, s, min(s + self.slice_rows, self.positions)) for i, s in enumerate(starts)]

    @property
    def units(self) -> int:
        """Number of units over all splits."""
        return sum(group.units for group in self.groups.values())

    @property
    def jobs(self) -> list[Job]:
        """The buckets in order, with the units that contain their rows."""
        jobs = []
        for split, first in self._first_units().items():
            grouping = self.groups[split]
            for number, start in enumerate(range(0, grouping.buckets, grouping.group)):
                stop = min(start + grouping.group, grouping.buckets)
                unit = first + number * grouping.parts
                buckets = [Bucket(split, index) for index in range(start, stop)]
                jobs.append(Job(buckets, range(unit, unit + grouping.parts)))
        return jobs

    def unit_numbers(
        self, split: npt.NDArray[np.uint8], bucket: npt.NDArray[np.uint32], key: UInt64Array
    ) -> npt.NDArray[np.integer[Any]]:
        """Return the number of each row's unit, from 0, in ascending order of (split, bucket, key).

        Args:
            split: Index in ``SPLITS`` of each row, shape (N,).
            bucket: Bucket of each row within its split, shape (N,).
            key: Sort key of each row, shape (N,).
        """
        unit = np.empty(len(split), np.min_scalar_type(self.units))
        for name, first in self._first_units().items():
            rows = np.flatnonzero(split == SPLITS.index(name))
            grouping = self.groups[name]
            number = (bucket[rows] // grouping.group).astype(np.int64)
            if grouping.parts > 1:
                number = number * grouping.parts + self._parts(bucket[rows], key[rows], grouping)
            unit[rows] = first + number
        return unit

    def _parts(
        self, bucket: npt.NDArray[np.uint32], key: UInt64Array, grouping: Grouping
    ) -> npt.NDArray[np.int64]:
        """Return the part of its bucket to which each row belongs. Parts are equal ranges of its keys.

        Keys outside the bucket's range belong to the nearest part.
        """
        ranges = grouping.parts * (grouping.buckets if self.by_key else 1)
        part = np.searchsorted(np.array(bucket_bounds(ranges)[1:-1], dtype=np.uint64), key, side="right")
        if self.by_key:
            part = np.clip(part - bucket.astype(np.int64) * grouping.parts, 0, grouping.parts - 1)
        return part.astype(np.int64)

    def _first_units(self) -> dict[str, int]:
        counts = [group.units for group in self.groups.values()]
        return dict(zip(self.groups, accumulate(counts, initial=0), strict=False))


@dataclass(frozen=True)
class ThreadLimits:
    """ThreadLimits on the rows that each thread holds. They do not affect the result.

    Attributes:
        threads: Number of threads that work at the same time.
        duckdb_memory: Bytes for each thread's DuckDB session while it scatters.
        chunk_rows: Maximum rows that a thread scatters at a time.
        chunk_bytes: Maximum bytes of these rows and their copies.
        sort_rows: Maximum rows that a thread sorts at a time.
        sort_bytes: Maximum bytes of these rows and their copies.
    """

    threads: int
    duckdb_memory: int
    chunk_rows: int
    chunk_bytes: int
    sort_rows: int
    sort_bytes: int

    def may_scatter(self, rows: int, size: int) -> bool:
        """Return whether ``rows`` rows of ``size`` bytes in total may be scattered at a time."""
        return rows <= self.chunk_rows and scatter_cost(rows, size) <= self.chunk_bytes

    def may_sort(self, rows: int, size: int) -> bool:
        """Return whether ``rows`` rows of ``size`` bytes in total may be sorted at a time."""
        return rows <= self.sort_rows and sort_cost(rows, size) <= self.sort_bytes


def scatter_cost(rows: int, size: int) -> int:
    """Return the memory in bytes needed to scatter ``rows`` rows of ``size`` bytes in total."""
    return int(size * SCATTER_COPIES) + rows * KEY_BYTES


def sort_cost(rows: int, size: int) -> int:
    """Return the memory in bytes needed to sort ``rows`` rows of ``size`` bytes in total."""
    return int(size * SORT_COPIES) + rows * KEY_BYTES


def row_bytes(board_size: int, varying_bytes: float, targets: Sequence[str] = ()) -> int:
    """Return the size in bytes of a row in memory.

    Args:
        board_size: Cells along an edge.
        varying_bytes: Size of the lists and texts of the row.
        targets: Optional columns of the store's positions (default: none).
    """
    numbers = sum(int(target_type(name).bit_width) // 8 for name in targets)
    return board_bytes(board_size) + ROW_OVERHEAD + numbers + ceil(varying_bytes)


def make_limits(
    options: ShuffleOptions,
    positions: int,
    row: int,
    widest: int,
    machines: Machines | None = None,
    *,
    client: int = 0,
) -> ThreadLimits:
    """Divide the memory of a machine between threads.

    The number of threads is the requested one, or fewer if the memory does not suffice for it.

    Args:
        options: Options with the memory and the threads.
        positions: Number of positions in the store.
        row: Average bytes of a selected row.
        widest: Average bytes of a row in the row group with the widest rows.
        machines: Machines that do the work; None for this machine (default). If each thread is a separate
            process, each also holds the interpreter and the libraries.
        client: Bytes that the client library of the store's storage adds to a process (default: 0).

    Raises:
        BudgetError: The memory is too small for one thread.
    """
    machines = machines or Machines(1, default_workers(), separate=False)
    base = BASE_MEMORY + client
    shared, per_thread = (0, base) if machines.separate else (base, 0)
    per_thread += TRANSFER_MEMORY if client or machines.separate else 0
    group, min_rows = min(ROW_GROUP_ROWS, positions), min(MIN_ROWS, positions)
    writer = WRITER_COPIES * group * row
    min_scatter = scatter_cost(min_rows, min_rows * row)
    min_duckdb = MIN_DUCKDB_MEMORY + int(DUCKDB_ROW_GROUPS * group * widest)
    needed = per_thread + writer + min_scatter + min_duckdb
    available = options.memory - shared
    if available < needed:
        raise too_little_memory(options.memory, shared + needed)
    threads = min(options.threads or machines.cores, available // needed)
    share = available // threads - per_thread - writer
    duckdb_memory = min(max(int(share * DUCKDB_SHARE), min_duckdb), max(MAX_DUCKDB_MEMORY, min_duckdb))
    chunk_bytes = min(share + writer - duckdb_memory, scatter_cost(0, MAX_JOINED_BYTES))
    sort_bytes = min(share, sort_cost(0, MAX_JOINED_BYTES))
    max_rows = MAX_ROWS * max(isqrt((positions << 16) // MANY_POSITIONS), 1 << 8) >> 8
    return ThreadLimits(
        threads=threads,
        duckdb_memory=duckdb_memory,
        chunk_rows=min(chunk_bytes // scatter_cost(1, row), max_rows),
        chunk_bytes=chunk_bytes,
        sort_rows=min(sort_bytes // sort_cost(1, row), max_rows),
        sort_bytes=sort_bytes,
    )


def bucket_counts(options: ShuffleOptions, rows: dict[str, int]) -> dict[str, int]:
    """Return the number of buckets by split. Smaller splits get proportionally fewer buckets.

    If the number is not given in the options, it depends only on the rows, so that the files are the same on
    any machine.
    """
    largest = max(rows.values())
    buckets = options.buckets or -(-largest // BUCKET_ROWS)
    return {split: -(-count * buckets // largest) for split, count in rows.items()}


def make_layout(
    positions: int,
    rows: dict[str, int],
    buckets: dict[str, int],
    limits: ThreadLimits,
    *,
    by_key: bool = True,
    machines: int = 1,
) -> ShuffleLayout:
    """Divide a store into slices, and its buckets into units that one thread can sort.

    Each slice has a piece of each unit. If pieces would become small, the numbers of slices and units are
    therefore kept at the minimum that keeps all threads busy.

    Args:
        positions: Number of positions in the store.
        rows: Number of selected rows by split, at least 1 each.
        buckets: Number of buckets by split.
        limits: ThreadLimits of a thread.
        by_key: Whether buckets are ranges of keys (default: True).
        machines: Number of machines, each with ``limits.threads`` threads (default: 1).
    """
    workers = machines * limits.threads
    parallel_parts = max(min(workers * SLICES_PER_THREAD, isqrt(positions // PIECE_ROWS)), workers)
    expected = _expected_rows(limits.sort_rows)
    groups = {}
    for split, count in rows.items():
        bucket_rows = -(-count // buckets[split])
        parts = -(-bucket_rows // expected)
        max_group = max(expected // bucket_rows, 1)
        group = min(max_group, max(sum(buckets.values()) // parallel_parts, 1)) if parts == 1 else 1
        groups[split] = Grouping(buckets[split], group, parts)
    units = sum(grouping.units for grouping in groups.values())
    slices = max(min(workers * SLICES_PER_THREAD, positions // (PIECE_ROWS * units)), workers)
    slice_rows = min(limits.chunk_rows, max(-(-positions // slices), ROW_GROUP_ROWS))
    return ShuffleLayout(positions, slice_rows, by_key, groups)


def jobs_per_group(jobs: int, runs: int, job_bytes: float, tasks: int, threads: int) -> int:
    """Return the number of consecutive jobs whose pieces are read together from an object store.

    It is the minimum for which the pieces of a group take ``RANGE_BYTES`` of each run, or the maximum for
    which all machines stay busy and their disks hold the groups. All tasks sort the same number of groups,
    and all threads of a task the same number of jobs, as far as possible.

    Args:
        jobs: Number of jobs.
        runs: Number of runs.
        job_bytes: Average bytes of the pieces of a job, above 0.
        tasks: Number of tasks that run at a time on all machines together, each on one group.
        threads: Number of threads of a task.
    """
    share = -(-jobs // tasks)
    if share <= threads:
        return max(share, 1)
    most = max(int(min(runs * RANGE_BYTES, threads * GROUP_BYTES) / job_bytes / threads), 1)
    rounds = max(-(-jobs // (tasks * most * threads)), GROUPS_PER_TASK)
    per_thread = -(-jobs // (tasks * rounds * threads))
    return per_thread * threads


def group_jobs(jobs: Sequence[Job], most: int) -> Iterator[list[Job]]:
    """Yield lists of at most ``most`` jobs each, in order, whose units are consecutive."""
    group: list[Job] = []
    for job in jobs:
        if group and (len(group) == most or group[-1].units.stop != job.units.start):
            yield group
            group = []
        group.append(job)
    if group:
        yield group


def _expected_rows(limit: int) -> int:
    """Return the planned rows per unit such that ``limit`` is six standard deviations above it.

    The number of rows in a range of keys follows a binomial distribution, whose variance is below its mean.
    """
    return max(int((sqrt(limit + 9) - 3) ** 2), 1)
