"""What a shuffle will do, computed before anything is written: buckets, units of work, limits.

Does no work and reads no file. The buckets follow from the rows alone; how they are cut into units, and
what each thread may hold, from the memory.
"""

from __future__ import annotations

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
from hexdata.remote import CLIENT_MEMORY
from hexdata.schema import SPLITS, board_bytes
from hexdata.shuffle.options import ShuffleOptions, too_little_memory
from hexdata.store.parquet import ROW_GROUP_ROWS
from hexdata.strict_json import Matching, Within, check_value

__all__ = [
    "BUCKET_ROWS",
    "Bucket",
    "Grouping",
    "Job",
    "Layout",
    "Limits",
    "Slice",
    "bucket_counts",
    "make_layout",
    "make_limits",
]

BUCKET_ROWS: Final = 1 << 20
"""Rows of a bucket of the largest split, where their number is not given."""
MOST_UNITS: Final = 1_000_000
"""Slices, and units, of a shuffle; its buckets are at most as many."""
_Number = Annotated[int, Within(1, MOST_UNITS)]
_Split = Annotated[str, Matching("train|val|test", "train, val or test")]
BASE_MEMORY: Final = 312 << 20
"""Bytes held besides DuckDB's buffers and the rows at hand: interpreter and libraries, as measured."""
TRANSFER_MEMORY: Final = 24 << 20
"""Bytes that a thread holds of objects that it reads or sends: two parts and what is read ahead."""
MOST_ROWS: Final = 1 << 21
"""Rows that a thread takes into memory at a time; more is no faster, as long as pieces are large enough."""
MANY_POSITIONS: Final = 1 << 32
"""Of a store from which on more rows are taken at a time: pieces would have fewer than ``PIECE_ROWS``."""
PIECE_ROWS: Final = 1 << 10
"""Rows of a piece, in the mean, that a plan aims at. A piece costs some 0.2 ms and 2 kB to write and to read,
whatever it holds: at 1,000 rows about as much time as the rows do, and a tenth of the bytes."""
MOST_BYTES: Final = 1 << 31
"""Of rows that are joined in memory: Arrow counts the bytes of a column's texts in 32 bits."""
FEWEST_ROWS: Final = 1 << 15
"""Fewer at a time make too many pieces."""
ROW_OVERHEAD: Final = 52
"""Bytes that a row takes in memory besides its board and what varies: twelve columns and the bucket."""
KEY_BYTES: Final = 24
"""Bytes of a row's key, its place and its bucket while a unit is sorted."""
SCATTER_COPIES: Final = 3.0
"""How often a row stands in memory while it is scattered: as DuckDB gave it, in order of units, and a column
more, which may be most of a row."""
SORT_COPIES: Final = 2.0
"""How often while it is sorted: a unit is joined column by column, but one may be most of a row."""
WRITER_COPIES: Final = 5
"""How many row groups stand in memory while one is encoded."""
DUCKDB_SHARE: Final = 0.3
"""Part of a thread's memory that is DuckDB's while it scatters."""
DUCKDB_LEAST: Final = 32 << 20
DUCKDB_ROW_GROUPS: Final = 1.5
"""Row groups that DuckDB holds besides while it reads."""
DUCKDB_MOST: Final = 256 << 20
SLICES_PER_THREAD: Final = 4
"""Of a store that is small, so that no thread waits for another."""

UInt64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Slice:
    """Phase 1's unit: a range of position ids, scattered into runs of their own."""

    index: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """What the ledger and the log call it."""
        return f"slice {self.index}"

    def run_name(self, number: int) -> str:
        """File name of one of its runs."""
        return f"run-{self.index:06d}-{number:03d}.arrow"


@dataclass(frozen=True)
class Bucket:
    """One file of the result."""

    split: str
    index: int

    @property
    def name(self) -> str:
        """Path of its file, relative to the store."""
        return f"shuffled/{self.split}/bucket-{self.index:06d}.parquet"


@dataclass(frozen=True)
class Job:
    """Phase 2's unit: consecutive buckets, and the units of rows that they are made of."""

    buckets: list[Bucket]
    units: range


@dataclass(frozen=True)
class Grouping:
    """How the buckets of a split make units: several buckets one, or a bucket several parts.

    Attributes:
        buckets: of the split.
        group: buckets in a unit.
        parts: units in a bucket, ranges of its keys; 1 unless ``group`` is.
    """

    buckets: _Number
    group: _Number
    parts: _Number

    @property
    def units(self) -> int:
        """Their number."""
        return -(-self.buckets // self.group) * self.parts


@dataclass(frozen=True)
class Layout:
    """How rows are cut into slices and units. It decides what the runs hold, but no byte of a bucket.

    Attributes:
        positions: of the store; slices are ranges of their ids.
        slice_rows: ids in a slice.
        by_key: whether buckets are, but for few rows, ranges of keys; or else each has keys from all over.
        groups: the splits that have rows, in the order of ``SPLITS``.
    """

    positions: Annotated[int, Within(1, 1 << 62)]
    slice_rows: Annotated[int, Within(1, 1 << 62)]
    by_key: bool
    groups: dict[_Split, Grouping]

    def to_json(self) -> dict[str, Any]:
        """Return the layout as the ledger keeps it."""
        return asdict(self)

    def recorded(self, content: dict[str, Any], path: object) -> Layout:
        """Return the layout that the ledger at ``path`` keeps: this one, cut for other limits.

        Raises:
            StoreError: it is of other rows, or cut into more slices or units than any plan makes.
        """
        found = check_value(Layout, content, path, what="the layout of the shuffle")
        buckets, expected = (
            {split: group.buckets for split, group in layout.groups.items()} for layout in (found, self)
        )
        slices = -(-found.positions // found.slice_rows)
        if (found.positions, buckets) != (self.positions, expected) or max(slices, found.units) > MOST_UNITS:
            raise StoreError(
                "the layout of the shuffle is not of this store",
                path=path,
                found=f"{found.positions:,} positions, {slices:,} slices, {found.units:,} units",
                expected=f"{self.positions:,} positions, at most {MOST_UNITS:,} slices and units",
                hint="Remove the file; the shuffle then starts from its beginning.",
            )
        return found

    @property
    def slices(self) -> list[Slice]:
        """Ranges of ids that cover the store."""
        starts = range(0, self.positions, self.slice_rows)
        return [Slice(i, s, min(s + self.slice_rows, self.positions)) for i, s in enumerate(starts)]

    @property
    def units(self) -> int:
        """Their number, over all splits."""
        return sum(group.units for group in self.groups.values())

    @property
    def jobs(self) -> list[Job]:
        """The buckets in order, with the units that each is made of."""
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
        """Return the unit of each row, from 0; ascending in (split, bucket, key)."""
        unit = np.empty(len(split), np.min_scalar_type(self.units))
        for name, first in self._first_units().items():
            own = np.flatnonzero(split == SPLITS.index(name))
            grouping = self.groups[name]
            number = (bucket[own] // grouping.group).astype(np.int64)
            if grouping.parts > 1:
                number = number * grouping.parts + self._parts(bucket[own], key[own], grouping)
            unit[own] = first + number
        return unit

    def _parts(
        self, bucket: npt.NDArray[np.uint32], key: UInt64Array, grouping: Grouping
    ) -> npt.NDArray[np.int64]:
        """Return which part of its bucket each row belongs to, by its key: equal ranges of the bucket's.

        Keys outside of the bucket's range go to the part that is nearest.
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
class Limits:
    """What each thread may hold. It decides no byte of the result.

    Attributes:
        threads: that work at a time.
        duckdb_memory: bytes for the DuckDB of each, while it scatters.
        chunk_rows: rows that each scatters at a time, at most.
        chunk_bytes: bytes that these and their copies may take.
        sort_rows: rows that each sorts at a time, at most.
        sort_bytes: bytes that these and their copies may take.
    """

    threads: int
    duckdb_memory: int
    chunk_rows: int
    chunk_bytes: int
    sort_rows: int
    sort_bytes: int

    def may_scatter(self, rows: int, size: int) -> bool:
        """Say whether so many rows, of ``size`` bytes in memory, are scattered at a time."""
        return rows <= self.chunk_rows and scatter_cost(rows, size) <= self.chunk_bytes

    def may_sort(self, rows: int, size: int) -> bool:
        """Say whether so many rows, of ``size`` bytes in memory, are sorted at a time."""
        return rows <= self.sort_rows and sort_cost(rows, size) <= self.sort_bytes


def scatter_cost(rows: int, size: int) -> int:
    """Return the bytes that it takes to scatter so many rows, of ``size`` bytes in memory."""
    return int(size * SCATTER_COPIES) + rows * KEY_BYTES


def sort_cost(rows: int, size: int) -> int:
    """Return the bytes that the sort of so many rows, of ``size`` bytes in memory, takes."""
    return int(size * SORT_COPIES) + rows * KEY_BYTES


def row_bytes(board_size: int, varying_bytes: float) -> int:
    """Return the bytes of a row in memory; ``varying_bytes`` are those of its lists and texts."""
    return board_bytes(board_size) + ROW_OVERHEAD + ceil(varying_bytes)


def make_limits(
    options: ShuffleOptions,
    positions: int,
    row: int,
    widest: int,
    machines: Machines | None = None,
    *,
    remote: bool = False,
) -> Limits:
    """Share out the memory of a machine: as many threads as are asked for and find room for some rows.

    Args:
        options: with the memory and the threads.
        positions: of the store.
        row: bytes of a row that takes part, in the mean.
        widest: bytes of a row in the row group of the store that has the widest, in the mean.
        machines: that work; None for this one alone. Where each thread is a process of its own, it holds the
            interpreter and the libraries too.
        remote: whether the store lies in an object store, whose client holds memory too.

    Raises:
        BudgetError: there is no room for even one thread.
    """
    machines = machines or Machines(1, default_workers(), separate=False)
    held = BASE_MEMORY + (CLIENT_MEMORY if remote else 0)
    base, own = (0, held) if machines.separate else (held, 0)
    own += TRANSFER_MEMORY if remote else 0
    group, fewest = min(ROW_GROUP_ROWS, positions), min(FEWEST_ROWS, positions)
    writer = WRITER_COPIES * group * row
    least = scatter_cost(fewest, fewest * row)
    least_duckdb = DUCKDB_LEAST + int(DUCKDB_ROW_GROUPS * group * widest)
    needed = own + writer + least + least_duckdb
    room = options.memory - base
    if room < needed:
        raise too_little_memory(options.memory, base + needed)
    threads = min(options.threads or machines.cores, room // needed)
    share = room // threads - own - writer
    duckdb_memory = min(max(int(share * DUCKDB_SHARE), least_duckdb), max(DUCKDB_MOST, least_duckdb))
    chunk_bytes = min(share + writer - duckdb_memory, scatter_cost(0, MOST_BYTES))
    sort_bytes = min(share, sort_cost(0, MOST_BYTES))
    most = MOST_ROWS * max(isqrt((positions << 16) // MANY_POSITIONS), 1 << 8) >> 8
    return Limits(
        threads=threads,
        duckdb_memory=duckdb_memory,
        chunk_rows=min(chunk_bytes // scatter_cost(1, row), most),
        chunk_bytes=chunk_bytes,
        sort_rows=min(sort_bytes // sort_cost(1, row), most),
        sort_bytes=sort_bytes,
    )


def bucket_counts(options: ShuffleOptions, rows: dict[str, int]) -> dict[str, int]:
    """Return the number of buckets by split: smaller splits get fewer, in proportion.

    Where it is not given it follows from the rows alone, so that the files are the same on any machine.
    """
    largest = max(rows.values())
    buckets = options.buckets or -(-largest // BUCKET_ROWS)
    return {split: -(-count * buckets // largest) for split, count in rows.items()}


def make_layout(
    positions: int,
    rows: dict[str, int],
    buckets: dict[str, int],
    limits: Limits,
    *,
    by_key: bool = True,
    machines: int = 1,
) -> Layout:
    """Cut a store into slices, and its buckets into units that one thread can sort.

    Each slice has a piece of each unit, so both are as few as keep all threads busy where pieces would be
    small: slices and units alike where a store is large.

    Args:
        positions: of the store.
        rows: that take part, by split; at least one.
        buckets: by split.
        limits: what a thread may hold.
        by_key: whether buckets are ranges of keys.
        machines: that work, each with so many threads.
    """
    at_work = machines * limits.threads
    shares = max(min(at_work * SLICES_PER_THREAD, isqrt(positions // PIECE_ROWS)), at_work)
    expected = _expected_rows(limits.sort_rows)
    groups = {}
    for split, count in rows.items():
        bucket_rows = -(-count // buckets[split])
        parts = -(-bucket_rows // expected)
        most = max(expected // bucket_rows, 1)
        group = min(most, max(sum(buckets.values()) // shares, 1)) if parts == 1 else 1
        groups[split] = Grouping(buckets[split], group, parts)
    units = sum(grouping.units for grouping in groups.values())
    slices = max(min(at_work * SLICES_PER_THREAD, positions // (PIECE_ROWS * units)), at_work)
    slice_rows = min(limits.chunk_rows, max(-(-positions // slices), ROW_GROUP_ROWS))
    return Layout(positions, slice_rows, by_key, groups)


def _expected_rows(most: int) -> int:
    """Return how many rows a unit may be planned for, so that at six deviations it has ``most``.

    The number of rows in a range of keys is binomial, with a variance below its mean.
    """
    return max(int((sqrt(most + 9) - 3) ** 2), 1)
