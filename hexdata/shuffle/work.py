"""The tasks of a shuffle, one per slice or job, run by a thread here or by a process on any machine.

The functions depend only on their arguments and on the files that these name. They report to a watch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa

from hexdata.schema import positions_schema
from hexdata.selection import Placement
from hexdata.shuffle.layout import Bucket, Job, Layout, Limits, Slice
from hexdata.shuffle.local import Mover
from hexdata.shuffle.log import peak_resident_bytes
from hexdata.shuffle.patience import Patience
from hexdata.shuffle.runs import Runs
from hexdata.storage import AnyPath
from hexdata.store.arrow_memory import release_memory
from hexdata.store.files import FileFacts
from hexdata.store.parquet import write_parquet
from hexdata.store.session import Interrupts, duckdb_session

__all__ = ["Report", "Watch", "Work", "Written", "scatter_alone", "scatter_slice", "sort_alone", "sort_job"]


@dataclass(frozen=True)
class Work:
    """Parameters shared by all tasks of a shuffle. They can be sent to another process.

    Attributes:
        store: Path or address of the store.
        folder: Folder or address in which runs are written.
        spill: Folder for data that does not fit in memory; None for the system's temporary folder.
        key: Key of ``sort_key``.
        board_size: Cells along an edge.
        layout: Slices and units.
        limits: Limits of one worker.
        placement: Selected rows and their destinations.
        patience: How to retry after temporary disk errors.
    """

    store: AnyPath
    folder: AnyPath
    spill: Path | None
    key: int
    board_size: int
    layout: Layout
    limits: Limits
    placement: Placement
    patience: Patience


class Written(NamedTuple):
    """A published bucket.

    Attributes:
        name: Path relative to the store.
        facts: Rows, size and digest of the file.
        seconds: Time taken to sort and write it.
        peak: Peak resident memory of the process so far, in bytes.
    """

    name: str
    facts: FileFacts
    seconds: float
    peak: int


class Watch(Protocol):
    """Receives the progress of a task. Each method may raise to stop the task."""

    @property
    def interrupts(self) -> Interrupts | None:
        """Lets another thread interrupt the task's queries; None if that is not possible."""

    def say(self, line: str) -> None:
        """Receive a line for the log."""

    def check(self) -> None:
        """Raise if the task must stop."""

    def sleep(self, seconds: float) -> None:
        """Wait for some seconds before the next attempt."""

    def advance(self, bucket: Bucket, rows: int) -> None:
        """Receive the number of rows of a bucket that have been written so far."""

    def finish(self, written: Written) -> None:
        """Receive a bucket that has been published."""


def scatter_slice(work: Work, part: Slice, watch: Watch) -> list[int]:
    """Phase 1: write the runs of a slice and return the size of each in bytes."""
    sizes: list[int] = []

    def attempt() -> None:
        sizes.clear()
        mover = _mover(work, watch)
        with duckdb_session(
            memory=work.limits.duckdb_memory,
            threads=1,
            spill=work.spill,
            interrupts=watch.interrupts,
            store=work.store,
        ) as con:
            for size in mover.scatter(con, work.placement, part):
                sizes.append(size)
                watch.check()

    _patiently(work, part.name, attempt, watch)
    return sizes


def sort_job(work: Work, runs: Runs, job: Job, done: set[str], watch: Watch) -> None:
    """Phase 2: write the buckets of a job that are not in ``done``, and add each of them to ``done``."""

    def attempt() -> None:
        begin = time.perf_counter()
        for bucket, rows in _mover(work, watch).sort(runs, job):
            if bucket.name in done:
                continue
            path = work.store / bucket.name
            watched = _watched(bucket, rows, watch)
            facts = write_parquet(path, positions_schema(work.board_size), watched, replace=False)
            watch.finish(Written(bucket.name, facts, time.perf_counter() - begin, peak_resident_bytes()))
            done.add(bucket.name)
            begin = time.perf_counter()

    _patiently(work, job.buckets[0].name, attempt, watch)


def _mover(work: Work, watch: Watch) -> Mover:
    return Mover(
        key=work.key,
        board_size=work.board_size,
        folder=work.folder,
        spill=work.spill,
        layout=work.layout,
        limits=work.limits,
        say=watch.say,
        check=watch.check,
    )


def _patiently(work: Work, name: str, attempt: Callable[[], None], watch: Watch) -> None:
    """Call ``attempt``, retry it after temporary disk errors, and release unused memory at the end."""
    work.patience.go_on(attempt, sleep=watch.sleep, say=lambda text: watch.say(f"{name}: {text}"))
    release_memory()


def _watched(bucket: Bucket, rows: Iterator[pa.Table], watch: Watch) -> Iterator[pa.Table]:
    seen = 0
    for table in rows:
        yield table
        seen += table.num_rows
        watch.advance(bucket, seen)


@dataclass
class Report:
    """The watch of a task in a separate process. It collects all reports and is the task's result.

    Attributes:
        part: Slice of the task; None if it sorts buckets.
        sizes: Size in bytes of each run of the slice.
        lines: Lines for the log.
        written: Published buckets.
    """

    part: Slice | None = None
    sizes: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)

    @property
    def interrupts(self) -> Interrupts | None:
        """None: the whole process is ended instead."""
        return None

    def say(self, line: str) -> None:
        """Add a line for the log."""
        self.lines.append(line)

    def check(self) -> None:
        """Do nothing: the task is stopped only with its process."""

    def sleep(self, seconds: float) -> None:
        """Wait for some seconds."""
        time.sleep(seconds)

    def advance(self, bucket: Bucket, rows: int) -> None:
        """Do nothing: only complete buckets are reported."""

    def finish(self, written: Written) -> None:
        """Add a published bucket."""
        self.written.append(written)


def scatter_alone(work: Work, part: Slice) -> Report:
    """Run :func:`scatter_slice` in a separate process and return its report."""
    report = Report(part)
    report.sizes = scatter_slice(work, part, report)
    return report


def sort_alone(work: Work, runs: Runs, job: Job, done: set[str]) -> Report:
    """Run :func:`sort_job` in a separate process and return its report."""
    report = Report()
    sort_job(work, runs, job, done, report)
    return report
