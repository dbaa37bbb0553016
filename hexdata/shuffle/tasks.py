"""The tasks of a shuffle: scatter a slice of the input into a run, sort the runs' rows into buckets.

A task depends only on its arguments and on the files that these name, so any thread, process or machine can
run it. The content of a bucket is a pure function of the store and the options: memory limits, layout and
order of work do not affect it. DuckDB selects the rows and their destinations; Arrow moves the data.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import StoreError
from hexdata.order import sort_key
from hexdata.retry import RetryPolicy
from hexdata.schema import positions_schema
from hexdata.shards.position_check import find_bad_position
from hexdata.shuffle.layout import Bucket, Job, ShuffleLayout, Slice, ThreadLimits, sort_cost
from hexdata.shuffle.runs import (
    PARALLEL_READS,
    RANGE_BYTES,
    RunCopy,
    RunIndex,
    RunPiece,
    as_run,
    join_columns,
    read_pieces,
    run_schema,
    write_run,
)
from hexdata.shuffle.thread_pool import ThreadPool
from hexdata.storage import AnyPath, is_disk_full, storage_of
from hexdata.store.arrow_memory import release_memory
from hexdata.store.files import FileFacts
from hexdata.store.ledger import Ledger
from hexdata.store.parquet import ROW_GROUP_ROWS, write_parquet
from hexdata.store.session import Interrupts, duckdb_session
from hexdata.strict_json import Count
from hexdata.system import peak_resident_bytes
from hexdata.temporary import temporary_folder

__all__ = [
    "ShuffleTasks",
    "SortedBucket",
    "TaskMonitor",
    "TaskReceiver",
    "TaskReport",
    "ThreadMonitor",
    "WrittenBucket",
    "scatter_slice",
    "sort_jobs",
]

SAMPLED_KEYS: Final = 1 << 17
"""Maximum number of keys sampled to split a unit: enough for parts of equal size within a few percent."""
MORE_PARTS: Final = 1.25
"""Factor for the number of parts over the minimum for parts of exactly equal size."""
BATCH_ROWS: Final = 1 << 14
"""Maximum rows per batch from DuckDB. It is small so that even batches of wide rows take little memory."""

COPY_SHARE: Final = 0.5
"""Maximum fraction of the free disk that a copy of runs may take."""

Rows = Iterator[pa.Table]
UInt64Array = npt.NDArray[np.uint64]
UnitNumbers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class SortedBucket(FileFacts):
    """Rows, size and digest of a bucket, and the number of its rows that have a policy.

    This number is None if an earlier release or an earlier shuffle wrote the bucket.
    """

    policies: Count | None = None


class WrittenBucket(NamedTuple):
    """A published bucket.

    Attributes:
        name: Path relative to the store.
        facts: Facts of the file.
        seconds: Time taken to sort and write it; None if an earlier attempt of the task has written it.
        peak: Peak resident memory of the process so far, in bytes.
    """

    name: str
    facts: SortedBucket
    seconds: float | None
    peak: int


class TaskReceiver(Protocol):
    """Receives the reports of a task. Each method may raise to stop the task."""

    def log(self, line: str) -> None:
        """Receive a line for the log."""

    def advance(self, name: str, rows: int) -> None:
        """Receive the number of rows of a bucket that have been written so far."""

    def finish(self, written: WrittenBucket) -> None:
        """Receive a bucket that has been published."""


class TaskMonitor(TaskReceiver, Protocol):
    """Receives the reports of a task and can stop it."""

    @property
    def interrupts(self) -> Interrupts | None:
        """Lets another thread interrupt the task's queries; None if that is not possible."""

    def check(self) -> None:
        """Raise if the task must stop."""

    def sleep(self, seconds: float) -> None:
        """Wait for some seconds before the next attempt."""


class ThreadMonitor:
    """The monitor of tasks in the threads of a pool. It passes their reports to the calling thread.

    Args:
        threads: Pool that runs the tasks.
        receiver: Receives the reports, in the thread that called ``threads.run``.
    """

    def __init__(self, threads: ThreadPool, receiver: TaskReceiver) -> None:
        self._call = threads.call_in_caller
        self._receiver = receiver
        self.interrupts: Interrupts | None = threads.interrupts
        self.check = threads.check
        self.sleep = threads.sleep

    def log(self, line: str) -> None:
        """Pass on a line for the log."""
        self._call(self._receiver.log, line)

    def advance(self, name: str, rows: int) -> None:
        """Pass on the number of rows of a bucket."""
        self._call(self._receiver.advance, name, rows)

    def finish(self, written: WrittenBucket) -> None:
        """Pass on a published bucket."""
        self._call(self._receiver.finish, written)


@dataclass(frozen=True)
class ShuffleTasks:
    """Runs the tasks of one shuffle. It can be sent to another process.

    Attributes:
        store: Path or address of the store.
        folder: Folder or address in which runs are written.
        spill: Folder for copies of runs and data that does not fit in memory; None for the system's temporary
            folder.
        key: Key of ``sort_key``.
        board_size: Cells along an edge.
        targets: Optional columns of the shuffled positions.
        layout: Slices and units.
        limits: Limits of one thread.
        retry: How to retry after temporary disk errors.
        shares_runs: Whether machines share the runs, so that each read waits for a file system or an object
            store on the network (default: False).
        plan: Plan of the shuffle's ledger, as a JSON value (default: None).
    """

    store: AnyPath
    folder: AnyPath
    spill: Path | None
    key: int
    board_size: int
    targets: tuple[str, ...]
    layout: ShuffleLayout
    limits: ThreadLimits
    retry: RetryPolicy
    shares_runs: bool = False
    plan: object = None

    @property
    def _schema(self) -> pa.Schema:
        return positions_schema(self.board_size, self.targets)

    @property
    def _run_schema(self) -> pa.Schema:
        return run_schema(self.board_size, self.targets)

    def _run(self, name: str, attempt: Callable[[], None], monitor: TaskMonitor) -> None:
        """Call ``attempt``, retry it after temporary disk errors, and release unused memory at the end."""
        self.retry.call(attempt, sleep=monitor.sleep, log=lambda text: monitor.log(f"{name}: {text}"))
        release_memory()

    # --- phase 1 --------------------------------------------------------------------------------------

    def scatter(self, slice_: Slice, query: str, monitor: TaskMonitor) -> list[int]:
        """Phase 1: write a slice as runs, one per chunk, and return the size of each run in bytes.

        Args:
            slice_: Range of position ids.
            query: Query for the slice's rows and their destinations, from ``Placement.slice_sql``.
            monitor: Receives the progress.
        """
        sizes: list[int] = []

        def attempt() -> None:
            sizes.clear()
            with duckdb_session(
                memory=self.limits.duckdb_memory,
                threads=1,
                spill=self.spill,
                interrupts=monitor.interrupts,
                store=self.store,
                build_right=True,  # the tables that are joined are on the right, restricted to few games
            ) as con:
                reader = con.sql(query).to_arrow_reader(min(self.limits.chunk_rows, BATCH_ROWS))
                for number, batches in enumerate(self._chunks(reader)):
                    sizes.append(self._scatter_rows(batches, self.folder / slice_.run_name(number)))
                    monitor.check()

        self._run(slice_.name, attempt, monitor)
        return sizes

    def _scatter_rows(self, batches: list[pa.RecordBatch], run: AnyPath) -> int:
        """Write rows as a run and return its size in bytes. ``batches`` is emptied to free memory."""
        table = pa.Table.from_batches(batches)
        batches.clear()
        rows = as_run(table, self.board_size, self.targets)
        _check_positions(rows)
        split, bucket, key = (table.column(name).to_numpy() for name in ("split", "bucket", "sort_key"))
        return write_run(run, rows, self.layout.unit_numbers(split, bucket, key))

    def _chunks(self, batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
        """Group batches into lists that fit into memory. Their sizes vary with the width of the rows."""
        chunk: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in batches:
            rows, size = rows + len(batch), size + batch.nbytes
            if chunk and not self.limits.may_scatter(rows, size):
                yield chunk
                chunk, rows, size = [], len(batch), batch.nbytes
            chunk.append(batch)
        if chunk:
            yield chunk

    # --- phase 2 --------------------------------------------------------------------------------------

    def sort(
        self, runs: RunIndex, jobs: Sequence[Job], done: set[str], monitor: TaskMonitor, threads: int = 1
    ) -> None:
        """Phase 2: write the buckets of jobs that are not in ``done``, and add each of them to ``done``.

        Args:
            runs: Runs with the units of the jobs.
            jobs: Buckets and their units, which are consecutive.
            done: Names of the buckets that are already written.
            monitor: Receives the progress.
            threads: Number of threads that sort, from one copy of the pieces (default: 1, this thread).

        Raises:
            StoreError: A run is missing or damaged.
        """
        todo = [job for job in jobs if not all(bucket.name in done for bucket in job.buckets)]
        while todo:
            count = self._jobs_to_copy(runs, todo, monitor, threads)
            batch = todo[: count or len(todo)]
            todo = todo[len(batch) :]
            pieces = runs.only(_units_of(batch))
            if count:
                with self._copied(pieces, batch[0].buckets[0].name, monitor, threads) as copy:
                    self._sort_batch(copy, batch, done, monitor, threads)
            else:
                self._sort_batch(pieces, batch, done, monitor, threads)

    def _sort_batch(
        self, runs: RunIndex | RunCopy, jobs: list[Job], done: set[str], monitor: TaskMonitor, threads: int
    ) -> None:
        if threads == 1 or len(jobs) == 1:
            for job in jobs:
                self._sort_job(runs, job, done, monitor)
            return
        pool = ThreadPool(min(threads, len(jobs)))
        thread_monitor = ThreadMonitor(pool, monitor)
        pool.run(jobs, lambda job: self._sort_job(runs, job, done, thread_monitor))

    def _jobs_to_copy(self, runs: RunIndex, jobs: list[Job], monitor: TaskMonitor, threads: int) -> int:
        """Return the number of first jobs whose pieces are to be copied to this machine; 0 for none.

        Pieces on a disk of this machine, those of a single unit and large pieces are not copied. If the disk
        is too full for all jobs, their pieces are copied one part after the other.
        """
        units = _units_of(jobs)
        if storage_of(self.folder).local is not None or len(units) == 1:
            return 0
        sizes = [runs.stored_bytes(range(units.start, job.units.stop)) for job in jobs]
        if sizes[-1] >= len(runs.names) * len(units) * RANGE_BYTES:
            return 0
        free = self._free_space()
        count = bisect_right(sizes, free * COPY_SHARE)
        if count == len(jobs):
            return count
        count -= count % threads if count > threads else 0
        name = jobs[0].buckets[0].name
        if not count or jobs[count - 1].units.stop - units.start == 1:
            reason = f"are not copied: {os.strerror(errno.ENOSPC)}"
            count = 0
        else:
            reason = f"are copied in parts, {sizes[count - 1]:,} bytes now"
        monitor.log(f"{name}: {sizes[-1]:,} bytes of pieces {reason}; {free:,} bytes free")
        return count

    def _free_space(self) -> int:
        """Return the number of free bytes on the disk for copies of runs."""
        return storage_of(self.spill or Path(tempfile.gettempdir())).free_space() or 0

    @contextmanager
    def _copied(
        self, runs: RunIndex, name: str, monitor: TaskMonitor, threads: int
    ) -> Iterator[RunIndex | RunCopy]:
        """Copy the pieces of several units from an object store to this machine.

        If the disk becomes full, the runs themselves are yielded.
        """
        copies: list[RunCopy] = []

        def attempt() -> None:
            copies.append(RunCopy(runs, self.spill, PARALLEL_READS * threads, monitor.check))

        try:
            self._run(name, attempt, monitor)
        except OSError as error:
            if not is_disk_full(error):
                raise
            free = self._free_space()
            monitor.log(f"{name}: its pieces are not copied: {error}; {free:,} bytes free")
        try:
            yield copies[0] if copies else runs
        finally:
            for copy in copies:
                copy.close()

    def _sort_job(self, runs: RunIndex | RunCopy, job: Job, done: set[str], monitor: TaskMonitor) -> None:
        def attempt() -> None:
            begin = time.perf_counter()
            for bucket, rows in self._sorted_buckets(runs, job, monitor):
                if bucket.name in done:
                    continue
                path, schema = self.store / bucket.name, self._schema
                counted = _CountedRows(bucket, rows, monitor)
                facts = write_parquet(path, schema, counted, replace=False)
                seconds = time.perf_counter() - begin
                bucket_facts = SortedBucket(facts.rows, facts.bytes, facts.sha256, counted.policies)
                monitor.finish(WrittenBucket(bucket.name, bucket_facts, seconds, peak_resident_bytes()))
                done.add(bucket.name)
                begin = time.perf_counter()

        self._run(job.buckets[0].name, attempt, monitor)

    def _sorted_buckets(
        self, runs: RunIndex | RunCopy, job: Job, monitor: TaskMonitor
    ) -> Iterator[tuple[Bucket, Rows]]:
        """Yield each bucket of a job with its sorted rows, to be read before the next bucket is requested."""
        units = [self._sort_unit(runs.pieces(unit), job.buckets, monitor) for unit in job.units]
        if len(units) == 1:
            yield from units[0]
        else:
            yield job.buckets[0], chain.from_iterable(rows for unit in units for _, rows in unit)

    def _sort_unit(
        self, pieces: list[RunPiece], buckets: list[Bucket], monitor: TaskMonitor
    ) -> Iterator[tuple[Bucket, Rows]]:
        """Sort the rows of several buckets, or of a part of one bucket."""
        rows, size = sum(piece.rows for piece in pieces), sum(piece.bytes for piece in pieces)
        if rows <= 1 or self.limits.may_sort(rows, size):
            yield from self._sort_in_memory(pieces, buckets, monitor)
            return
        monitor.log(f"{buckets[0].name}: {rows:,} rows of {size:,} bytes exceed the limits: split further")
        if len(buckets) > 1:

            def bucket_number(rows: pa.Table) -> UnitNumbers:
                number: UnitNumbers = rows.column("bucket").to_numpy() - buckets[0].index
                return number

            with self._split(pieces, bucket_number, monitor) as runs:
                for index, bucket in enumerate(buckets):
                    yield from self._sort_unit(runs.pieces(index), [bucket], monitor)
        else:
            bounds = self._part_bounds(pieces, rows, size)

            def part_number(rows: pa.Table) -> UnitNumbers:
                number: UnitNumbers = np.searchsorted(bounds, self._keys(rows), "right")
                return number

            with self._split(pieces, part_number, monitor) as runs:
                parts = (self._sort_unit(runs.pieces(i), buckets, monitor) for i in range(len(bounds) + 1))
                yield buckets[0], chain.from_iterable(rows for part in parts for _, rows in part)

    def _sort_in_memory(
        self, pieces: list[RunPiece], buckets: list[Bucket], monitor: TaskMonitor
    ) -> Iterator[tuple[Bucket, Rows]]:
        """Sort rows that fit into memory, which is the usual case."""
        batches = list(self._read(pieces, monitor))
        if not batches:
            yield from ((bucket, iter(())) for bucket in buckets)
            return
        table = join_columns(batches, self._run_schema)
        if len(buckets) == 1:
            order, bounds = np.argsort(self._keys(table)), np.array([0, table.num_rows])
        else:
            number = table.column("bucket").to_numpy()
            order = np.lexsort((self._keys(table), number))
            first = buckets[0].index
            bounds = np.searchsorted(number[order], range(first, first + len(buckets) + 1))
        schema = self._schema
        table = table.select(schema.names)
        for bucket, (start, stop) in zip(buckets, pairwise(bounds.tolist()), strict=True):
            yield bucket, _take(table, order[start:stop], schema)

    def _read(self, pieces: list[RunPiece], monitor: TaskMonitor) -> Iterator[pa.RecordBatch]:
        with closing(read_pieces(pieces, self._run_schema, parallel=self._parallel(pieces))) as batches:
            for batch in batches:
                monitor.check()
                yield batch

    def _parallel(self, pieces: list[RunPiece]) -> int:
        """Return how many pieces to read at a time: one if they are on this machine's disk."""
        is_shared = self.shares_runs and pieces and pieces[0].path.parent == self.folder
        return PARALLEL_READS if is_shared and pieces[0].copy is None else 1

    def _keys(self, rows: pa.Table) -> UInt64Array:
        return sort_key(rows.column("position_id").to_numpy(), self.key)

    def _part_bounds(self, pieces: list[RunPiece], rows: int, size: int) -> UInt64Array:
        """Return the keys at which to split a unit, estimated from a sample of its keys."""
        step = -(-rows // SAMPLED_KEYS)
        batches = read_pieces(pieces, self._run_schema, parallel=self._parallel(pieces))
        ids = np.concatenate([batch.column("position_id").to_numpy()[::step].copy() for batch in batches])
        keys = np.sort(sort_key(ids, self.key))
        excess = max(rows / self.limits.sort_rows, sort_cost(rows, size) / self.limits.sort_bytes)
        parts = math.ceil(MORE_PARTS * excess)
        return keys[np.arange(1, parts) * len(keys) // parts]

    @contextmanager
    def _split(
        self, pieces: list[RunPiece], unit_of: Callable[[pa.Table], UnitNumbers], monitor: TaskMonitor
    ) -> Iterator[RunIndex]:
        """Scatter the rows of a unit again into temporary runs, which are removed at the end."""
        with temporary_folder("cut", self.spill) as folder:
            paths: list[Path] = []
            for batches in self._chunks(self._read(pieces, monitor)):
                rows = join_columns(batches, self._run_schema)
                paths.append(folder / f"run-{len(paths):06d}.arrow")
                write_run(paths[-1], rows, unit_of(rows))
            yield RunIndex.read(paths)


def _units_of(jobs: Sequence[Job]) -> range:
    """Return the units of consecutive jobs, and those between them."""
    return range(jobs[0].units.start, jobs[-1].units.stop)


def _check_positions(rows: pa.Table) -> None:
    """Check that the positions are valid for the readers of shards.

    Raises:
        StoreError: A position is not valid.
    """
    bad = find_bad_position(rows, texts=False)
    if bad is not None:
        raise StoreError(
            "the store contains an invalid position",
            record=f"position {rows.column('position_id')[bad.row]}",
            found=bad.found,
            expected=bad.expected,
            hint="Run `hexdata verify` to find the damaged file.",
        )


def _take(table: pa.Table, order: npt.NDArray[np.int64], schema: pa.Schema) -> Rows:
    """Yield the rows in the given order, one row group at a time."""
    for start in range(0, len(order), ROW_GROUP_ROWS):
        yield table.take(pa.array(order[start : start + ROW_GROUP_ROWS])).cast(schema)


@dataclass
class _CountedRows:
    """The rows of a bucket, which reports how many have been read and counts those with a policy."""

    bucket: Bucket
    rows: Rows
    monitor: TaskMonitor
    policies: int = 0

    def __iter__(self) -> Rows:
        count = 0
        for table in self.rows:
            yield table
            count += table.num_rows
            self.policies += table.num_rows - table.column("policy").null_count
            self.monitor.advance(self.bucket.name, count)


@dataclass
class TaskReport:
    """The monitor of a task in a separate process. It collects all reports and is the task's result.

    Attributes:
        slice_: Slice of the task; None if it sorts buckets.
        sizes: Size in bytes of each run of the slice.
        lines: Lines for the log.
        written: Published buckets.
    """

    slice_: Slice | None = None
    sizes: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    written: list[WrittenBucket] = field(default_factory=list)

    @property
    def interrupts(self) -> Interrupts | None:
        """None: the whole process is ended instead."""
        return None

    def log(self, line: str) -> None:
        """Add a line for the log."""
        self.lines.append(line)

    def check(self) -> None:
        """Do nothing: the task is stopped only with its process."""

    def sleep(self, seconds: float) -> None:
        """Wait for some seconds."""
        time.sleep(seconds)

    def advance(self, name: str, rows: int) -> None:
        """Do nothing: only complete buckets are reported."""

    def finish(self, written: WrittenBucket) -> None:
        """Add a published bucket."""
        self.written.append(written)


def scatter_slice(tasks: ShuffleTasks, slice_: Slice, query: str) -> TaskReport:
    """Run :meth:`ShuffleTasks.scatter` in a separate process and return its report."""
    report = TaskReport(slice_)
    report.sizes = tasks.scatter(slice_, query, report)
    return report


@dataclass
class _RecordingReport(TaskReport):
    """A report that also records each published bucket in a file."""

    ledger: Ledger | None = None

    def finish(self, written: WrittenBucket) -> None:
        """Add a published bucket and record it."""
        super().finish(written)
        if self.ledger is not None:
            self.ledger.finish(written.name, written.facts.to_json())


def sort_jobs(
    tasks: ShuffleTasks,
    runs: RunIndex,
    jobs: list[Job],
    done: set[str],
    record: AnyPath | None,
    threads: int = 1,
) -> TaskReport:
    """Run :meth:`ShuffleTasks.sort` in a separate process and return its report.

    Args:
        tasks: Tasks of the shuffle.
        runs: Runs with the units of the jobs.
        jobs: Buckets and their units.
        done: Names of the buckets that are already written.
        record: Ledger of the buckets that this task writes, which are not written again if it is repeated;
            None for no record.
        threads: Number of threads that sort (default: 1).
    """
    ledger = None if record is None else Ledger(record, "shuffle", tasks.plan, SortedBucket)
    report = _RecordingReport(ledger=ledger)
    for name in (bucket.name for job in jobs for bucket in job.buckets):
        if ledger is not None and name in ledger and name not in done:
            report.log(f"{name}: written by an earlier attempt")
            report.written.append(WrittenBucket(name, SortedBucket(**ledger[name]), None, 0))
            done.add(name)
    tasks.sort(runs, jobs, done, report, threads)
    return TaskReport(lines=report.lines, written=report.written)
