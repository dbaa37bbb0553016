"""What is done with one slice and with one unit, wherever that is: by a thread here, by a process elsewhere.

Pure functions of their arguments and of the files these name. They keep no books: a watch is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa

from hexdata.remote import AnyPath
from hexdata.schema import positions_schema
from hexdata.selection import Placement
from hexdata.shuffle.local import Mover
from hexdata.shuffle.log import peak_resident_bytes
from hexdata.shuffle.patience import Patience
from hexdata.shuffle.plan import Bucket, Job, Layout, Limits, Slice
from hexdata.shuffle.runs import Runs
from hexdata.store.arrow_memory import release_memory
from hexdata.store.files import FileFacts
from hexdata.store.parquet import write_parquet
from hexdata.store.session import Interrupts, duckdb_session

__all__ = ["Report", "Watch", "Work", "Written", "scatter_alone", "scatter_slice", "sort_alone", "sort_job"]


@dataclass(frozen=True)
class Work:
    """What all work of a shuffle needs to know; it may travel to another process.

    Attributes:
        store: its path.
        folder: where runs are written.
        spill: where what is too large for the memory may lie; None for the system's temporary folder.
        key: of ``sort_key``.
        board_size: n.
        layout: slices and units.
        limits: of one worker.
        placement: which rows there are and where they go.
        patience: with errors of the disk that may pass.
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
    """A bucket that lies under its name: its path below the store, how long it took, and the peak memory."""

    name: str
    facts: FileFacts
    seconds: float
    peak: int


class Watch(Protocol):
    """Who is told of the work, and may stop it: each call may raise."""

    @property
    def interrupts(self) -> Interrupts | None:
        """By which queries are ended from elsewhere."""

    def say(self, line: str) -> None:
        """Take a line for the log."""

    def check(self) -> None:
        """Go on, or raise."""

    def sleep(self, seconds: float) -> None:
        """Wait before another attempt."""

    def advance(self, bucket: Bucket, rows: int) -> None:
        """Of this bucket, so many rows are written."""

    def finish(self, written: Written) -> None:
        """A bucket is written."""


def scatter_slice(work: Work, part: Slice, watch: Watch) -> list[int]:
    """Phase 1: write the runs of a slice; return the bytes of each."""
    sizes: list[int] = []

    def attempt() -> None:
        sizes.clear()
        mover = _mover(work, watch)
        with duckdb_session(
            memory=work.limits.duckdb_memory,
            threads=1,
            spill=work.spill,
            interrupts=watch.interrupts,
            place=work.store,
        ) as con:
            for size in mover.scatter(con, work.placement, part):
                sizes.append(size)
                watch.check()

    _patiently(work, part.name, attempt, watch)
    return sizes


def sort_job(work: Work, runs: Runs, job: Job, done: set[str], watch: Watch) -> None:
    """Phase 2: write the buckets of a job, but for those that are done; each is added to these."""

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
    """Make an attempt, and more if a disk fails it in passing; give memory back that it used."""
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
    """The watch of a task in a process of its own: it keeps what it is told, and comes back as the result.

    Attributes:
        part: the slice, if it was one.
        sizes: of the runs of a slice, in bytes.
        lines: for the log.
        written: the buckets.
    """

    part: Slice | None = None
    sizes: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)

    @property
    def interrupts(self) -> Interrupts | None:
        """Nobody's: the process is ended as a whole."""
        return None

    def say(self, line: str) -> None:
        """Keep it."""
        self.lines.append(line)

    def check(self) -> None:
        """Go on."""

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def advance(self, bucket: Bucket, rows: int) -> None:
        """Tell nobody before the bucket is whole."""

    def finish(self, written: Written) -> None:
        """Keep it."""
        self.written.append(written)


def scatter_alone(work: Work, part: Slice) -> Report:
    """Worker: :func:`scatter_slice` as a task."""
    report = Report(part)
    report.sizes = scatter_slice(work, part, report)
    return report


def sort_alone(work: Work, runs: Runs, job: Job, done: set[str]) -> Report:
    """Worker: :func:`sort_job` as a task."""
    report = Report()
    sort_job(work, runs, job, done, report)
    return report
