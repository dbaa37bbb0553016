"""One run of the shuffle on a locked store: ledger, both phases and manifest.

The selection determines the rows, the layout their division into work, and the engine where the work is done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Final

from hexdata.engine import Engine
from hexdata.errors import BudgetError, StoreError
from hexdata.progress import Progress
from hexdata.retry import RetryPolicy
from hexdata.selection import BalanceRow, Duplicates
from hexdata.shuffle.layout import Job, ShuffleLayout, Slice, group_jobs, jobs_per_group
from hexdata.shuffle.options import ShuffleOptions
from hexdata.shuffle.plan import FOLDERS, ShufflePlan, estimate_shuffle, free_space
from hexdata.shuffle.prepare import Prepared, is_same_shuffle, prepare
from hexdata.shuffle.runs import MergedRunIndex, RunIndex
from hexdata.shuffle.tasks import (
    ShuffleTasks,
    SortedBucket,
    TaskReport,
    ThreadMonitor,
    WrittenBucket,
    scatter_slice,
    sort_jobs,
)
from hexdata.shuffle.thread_pool import ThreadPool
from hexdata.storage import AnyPath, is_disk_full, storage_of
from hexdata.store import Store
from hexdata.store.arrow_memory import arrow_system_memory
from hexdata.store.files import FileFacts
from hexdata.store.integrity import find_damage, require_intact
from hexdata.store.ledger import Ledger
from hexdata.store.stage_log import StageLog
from hexdata.strict_json import Count
from hexdata.units import format_bytes

__all__ = ["LEDGER_NAME", "ShuffleResult", "ShuffleRun", "open_ledger"]

LEDGER_NAME: Final = "shuffling_progress.json"
_DERIVED_STAGES: Final = ("export", "pickles-shuffled")
"""Stages that are made from the shuffled positions."""
_INPUTS: Final = ("positions", "games", "sources")
"""Folders of the tables that a shuffle reads."""
_RECORD_SUFFIX: Final = ".json"
"""Suffix of the record of a task. Its name before the suffix is the number of the task's first unit."""
_LAYOUT: Final = "layout"
"""First entry of the ledger: the layout at the start of the shuffle. It is kept if the limits change."""

_SortTask = tuple[RunIndex, list[Job], set[str]]
"""Arguments of a task of phase 2: pieces of the jobs' units, the jobs, and their buckets that are written."""


@dataclass(frozen=True)
class _ScatteredSlice:
    """Ledger entry of a slice: the size in bytes of each of its runs."""

    bytes: list[Count]


def open_ledger(path: AnyPath, plan: object, *, read_only: bool = False) -> Ledger:
    """Open the ledger of a shuffle, with entries for its layout, slices and buckets.

    Args:
        path: Path of the file.
        plan: Plan of the units, as a JSON value.
        read_only: Whether to leave the file of another plan unchanged (default: False).
    """
    return Ledger(path, "shuffle", plan, unit_of=_unit_kind, read_only=read_only)


def _unit_kind(name: str) -> object:
    if name == _LAYOUT:
        return ShuffleLayout
    return _ScatteredSlice if name.startswith("slice ") else SortedBucket


@dataclass(frozen=True)
class ShuffleResult:
    """Result of ``shuffle_store``.

    Attributes:
        seed: Seed that determines the order.
        positions: Number of shuffled positions.
        splits: Number of positions by split.
        buckets: Number of buckets by split.
        left_out: Number of excluded positions by the option that excludes them.
        bytes: Size of all buckets.
        resumed: Number of units that an earlier run of the same command had finished.
        already_done: Whether the store already contained this shuffle.
        duplicates: Games that occur more than once in the store; None if there was nothing to do, because
            they are then not counted.
        balance: Effect of ``balance_by`` on each group.
        notes: Remarks on the selection options for the user.
    """

    seed: int
    positions: int
    splits: dict[str, int]
    buckets: dict[str, int]
    left_out: dict[str, int]
    bytes: int
    resumed: int
    already_done: bool = False
    duplicates: Duplicates | None = None
    balance: tuple[BalanceRow, ...] = ()
    notes: tuple[str, ...] = ()


class ShuffleRun:
    """One run of the shuffle. The caller must hold the store's lock."""

    def __init__(
        self,
        store: Store,
        options: ShuffleOptions,
        progress: Progress,
        retry: RetryPolicy,
        engine: Engine,
        restore: bool = True,
    ) -> None:
        self.store = store
        self.options = options
        self.progress = progress
        self.retry = retry
        self.engine = engine
        self.restore = restore
        self.machines = engine.machines
        self.work = store.work / "shuffle"
        self.tables = self.work / "selection"
        self.runs = self.work / "runs"
        self.records = self.work / "sorted"
        """Folder for the records of tasks, of which the ledger does not yet contain the buckets."""
        self.spill = storage_of(self.work / "spill").local
        self.target = store.path
        """Folder in which the buckets are written, with their names in the store."""
        self.intact: dict[str, FileFacts] = {}
        """Published buckets whose bytes match the manifest, as checked by this run."""
        for folder in (self.tables, self.work / "spill"):
            storage_of(folder).remove_tree()

    def shuffle(self) -> ShuffleResult:
        """Do all work that is not finished, and publish the result.

        Raises:
            StoreError: An input is damaged, or the buckets do not contain every position.
            ConfigError: An option cannot be used with this store.
            BudgetError: The memory or the disk is too small.
        """
        damage = self._damage()
        if damage is not None and not damage:
            self._list_restored()
            storage_of(self.work).remove_tree()  # a run may have been killed after publishing its manifest
            return replace(self._result(resumed=0), already_done=True)
        if damage is None:
            self.target = self.store.target_of("shuffle", replace=self.options.replace)
        require_intact(self.store, _INPUTS, engine=self.engine, progress=self.progress)
        plan: ShufflePlan | None = None
        self.progress.begin("select", None, "positions")
        try:
            prepared = prepare(self.store, self.options, self.tables, self.spill, self.machines)
            ledger = partial(open_ledger, self.work / LEDGER_NAME, prepared.ledger_plan)
            plan = estimate_shuffle(self.store, self.options, prepared, ledger(read_only=True))
            plan.require_disk()
            log = StageLog(self.store.path, "shuffle")
            log.line(f"plan: {json.dumps(asdict(plan))}")
            done = self._begin(prepared, ledger(), damage)
            resumed = len(done) - 1
            with arrow_system_memory():
                buckets = _Phases(self, prepared, done, log).write()
            self._publish(buckets, prepared.lineage)
            log.line(f"done: {resumed:,} units were finished by an earlier run")
            log.publish()
        except MemoryError as error:
            raise BudgetError(
                "out of memory",
                path=self.store.path,
                found=str(error) or None,
                expected=f"{format_bytes(self.options.memory)} (--memory)",
                hint="Lower --memory or close other programs, and run the command again to resume.",
            ) from error
        except OSError as error:
            if plan is None or not is_disk_full(error):
                raise  # without a plan, the store reports a full disk
            path = error.filename or self.store.path
            raise plan.disk_full("the disk is full", path, free_space(self.store), error) from error
        made = prepared.selection
        return replace(
            self._result(resumed), duplicates=made.duplicates, balance=made.balance, notes=made.notes
        )

    def _damage(self) -> dict[str, StoreError] | None:
        """Return the damaged buckets of the requested shuffle; None if the store does not contain it.

        Buckets that were removed are included if they are to be restored.
        """
        if not is_same_shuffle(self.store, self.options):
            return None
        if self.store.manifest.removed_buckets and not self.restore:
            return {}
        self.progress.begin("check files", None, "bytes")
        return find_damage(self.store, self.store.manifest.buckets(), engine=self.engine)

    def _list_restored(self) -> None:
        """List removed buckets in the manifest again if all of them exist, because none was removed yet."""
        manifest = self.store.manifest
        if self.restore and manifest.removed_buckets:
            manifest.files |= manifest.removed_buckets
            lineage = manifest.stages["shuffle"]
            manifest.stages["shuffle"] = {name: lineage[name] for name in lineage if name != "removed"}
            manifest.save(self.store.path)

    def _begin(self, prepared: Prepared, ledger: Ledger, damage: dict[str, StoreError] | None) -> Ledger:
        """Resume from the ledger, or keep the intact buckets, or start from the beginning."""
        if _LAYOUT in ledger:
            self._adopt_records(prepared, ledger)
            return ledger
        storage_of(self.records).remove_tree()
        if damage is None:
            self._begin_new()
        else:
            storage_of(self.runs).remove_tree()
            published = self.store.manifest.buckets()
            self.intact = {name: facts for name, facts in published.items() if name not in damage}
            if self.store.manifest.removed_buckets:
                self.progress.note(
                    f"writing {len(damage):,} of {len(published):,} buckets again, which `hexdata export "
                    "--free-buckets` removed; existing shards are kept"
                )
            else:
                self.progress.note(f"writing {len(damage):,} damaged of {len(published):,} buckets again")
        kept = {name: facts.to_json() for name, facts in self.intact.items()}
        ledger.finish_all({_LAYOUT: prepared.layout.to_json(), **kept})
        return ledger

    def _adopt_records(self, prepared: Prepared, ledger: Ledger) -> None:
        """Add the buckets that the tasks of a killed run have recorded to the ledger."""
        jobs = prepared.layout.parse_recorded(ledger[_LAYOUT], ledger.path).jobs
        found: dict[str, object] = {}
        for name in storage_of(self.records).files():
            if name.endswith(_RECORD_SUFFIX):
                record = open_ledger(self.records / name, prepared.ledger_plan, read_only=True)
                first = int(name.rpartition("/")[2].removesuffix(_RECORD_SUFFIX))
                names = (bucket.name for job in jobs if job.units.start >= first for bucket in job.buckets)
                recorded = islice((name for name in names if name in record), len(record))
                found |= {name: record[name] for name in recorded}
        if found:
            ledger.finish_all(found)
        storage_of(self.records).remove_tree()

    def _begin_new(self) -> None:
        """Remove unfinished buckets, or with ``replace`` an old shuffle and the files made from it.

        The old shuffle is removed first from the manifest, then from the disk.
        """
        manifest = self.store.manifest
        if "shuffle" in manifest.stages:
            seed, freed = manifest.stages["shuffle"]["seed"], self.options.replace
            exports = "and its exports" if freed else "once the new one is complete"
            self.progress.note(f"replacing the shuffle with seed {seed} {exports}")
        if self.target != self.store.path:
            for folder in (self.target, self.runs):
                storage_of(folder).remove_tree()
            return
        manifest.stages = {
            name: s for name, s in manifest.stages.items() if name not in ("shuffle", *_DERIVED_STAGES)
        }
        self.store.unpublish(*FOLDERS)
        storage_of(self.runs).remove_tree()

    def _publish(self, buckets: dict[str, SortedBucket], lineage: dict[str, Any]) -> None:
        expected: dict[str, int] = lineage["splits"]
        found = dict.fromkeys(expected, 0)
        for name, bucket in buckets.items():
            found[name.split("/")[1]] += bucket.rows
        if found != expected:
            storage_of(self.work).remove_tree()  # the runs and the ledger are unreliable
            raise StoreError(
                "the buckets do not contain every position",
                path=self.store.path,
                found=", ".join(f"{rows:,} in {split}" for split, rows in found.items()),
                expected=", ".join(f"{rows:,} in {split}" for split, rows in expected.items()),
                hint="Run the shuffle again; it starts from the beginning. If the error repeats, run "
                "`hexdata verify`.",
            )
        manifest = self.store.manifest
        repaired = manifest.stages.get("shuffle", {}) if self.target == self.store.path else {}
        policies = _count_policies(buckets) or repaired.get("policies")
        before = manifest.digest("shuffled")
        kept = {name: f for name, f in manifest.files.items() if not name.startswith("shuffled/")}
        manifest.files = kept | {name: _file_facts(bucket) for name, bucket in buckets.items()}
        manifest.stages["shuffle"] = lineage | ({} if policies is None else {"policies": policies})
        self.store.publish(self.target)
        if "export" in manifest.stages and manifest.digest("shuffled") != before:
            again = self.store.next_command("export")
            self.progress.note(f"the shards are of another shuffle; run `{again}` to replace them")
        storage_of(self.work).remove_tree()

    def _result(self, resumed: int) -> ShuffleResult:
        files = self.store.manifest.files_in("shuffled")
        lineage = self.store.manifest.stages["shuffle"]
        return ShuffleResult(
            seed=lineage["seed"],
            positions=lineage["positions"],
            splits=lineage["splits"],
            buckets=lineage["buckets"],
            left_out=lineage["left_out"],
            bytes=sum(f.bytes for f in files.values()),
            resumed=resumed,
        )


def _count_policies(buckets: dict[str, SortedBucket]) -> dict[str, int] | None:
    """Return the number of rows with a policy by split; None if that of some bucket is not known."""
    counts: dict[str, int] = {}
    for name, bucket in buckets.items():
        if bucket.policies is None:
            return None
        split = name.split("/")[1]
        counts[split] = counts.get(split, 0) + bucket.policies
    return counts


def _file_facts(bucket: SortedBucket) -> FileFacts:
    return FileFacts(bucket.rows, bucket.bytes, bucket.sha256)


class _Bookkeeping:
    """The ledger, progress and log of a shuffle. Used only by the calling thread."""

    def __init__(self, ledger: Ledger, progress: Progress, log: StageLog) -> None:
        self.ledger = ledger
        self.progress = progress
        self._log = log
        self._reported: dict[str, int] = {}
        """Number of rows of each bucket that have been reported to the progress."""

    def log(self, line: str) -> None:
        """Append a line to the log."""
        self._log.line(line)

    def advance(self, name: str, rows: int) -> None:
        """Report the rows of a bucket. If it is written again, already reported rows are not counted."""
        before = self._reported.get(name, 0)
        self._reported[name] = max(rows, before)
        self.progress.advance(max(rows - before, 0))

    def finish_slice(self, slice_: Slice, sizes: list[int]) -> None:
        """Record a finished slice."""
        self.ledger.finish_buffered(slice_.name, {"bytes": sizes})
        self.progress.advance(slice_.stop - slice_.start)

    def finish(self, written: WrittenBucket) -> None:
        """Record a finished bucket."""
        self.ledger.finish_buffered(written.name, written.facts.to_json())
        self.advance(written.name, written.facts.rows)
        if written.seconds is not None:
            rows, seconds = written.facts.rows, written.seconds
            self._log.line(
                f"{written.name}: {rows:,} rows in {seconds:.2f} s, {rows / max(seconds, 1e-9):,.0f} rows/s, "
                f"{format_bytes(written.peak)} peak resident memory"
            )


class _Phases:
    """Runs both phases: passes the units missing from the ledger to threads or to other machines."""

    def __init__(self, run: ShuffleRun, prepared: Prepared, ledger: Ledger, log: StageLog) -> None:
        assert run.store.manifest.board_size is not None
        self.run = run
        self.prepared = prepared
        self.ledger = ledger
        self.bookkeeping = _Bookkeeping(ledger, run.progress, log)
        self.layout = prepared.layout.parse_recorded(ledger[_LAYOUT], ledger.path)
        self.tasks = ShuffleTasks(
            store=run.target,
            folder=run.runs,
            spill=run.spill,
            key=prepared.selection.key,
            board_size=run.store.manifest.board_size,
            targets=prepared.selection.targets,
            layout=self.layout,
            limits=prepared.limits,
            retry=run.retry,
            shares_runs=run.machines.separate,
            plan=prepared.ledger_plan,
        )
        self.records = run.records / os.urandom(8).hex()
        """Folder for the records of this run, which are never those of tasks of a killed run."""

    def write(self) -> dict[str, SortedBucket]:
        """Write all missing runs and buckets, and return the facts of each bucket."""
        self._scatter()
        self._sort()
        names = [bucket.name for job in self.layout.jobs for bucket in job.buckets]
        return {name: SortedBucket(**self.ledger[name]) for name in names}

    def _run_remotely(
        self, function: Callable[..., TaskReport], tasks: Iterator[tuple[Any, ...]], *, cores: int = 1
    ) -> Iterator[TaskReport]:
        """Run tasks in separate processes, and yield each report after its lines are logged."""
        threads = self.prepared.limits.threads
        results = self.run.engine.run(
            partial(function, self.tasks),
            tasks,
            workers=threads // cores,
            memory=self.run.options.memory // threads * cores,
            cores=cores,
        )
        for _, report in results:
            for line in report.lines:
                self.bookkeeping.log(line)
            yield report

    # --- phase 1 --------------------------------------------------------------------------------------

    def _scatter(self) -> None:
        """Write the missing runs."""
        sizes = storage_of(self.run.runs).files()
        todo = [slice_ for slice_ in self.layout.slices if not self._is_scattered(slice_, sizes)]
        self.run.progress.begin("scatter", self.layout.positions, "positions")
        remaining = sum(slice_.stop - slice_.start for slice_ in todo)
        self.run.progress.advance(self.layout.positions - remaining)
        placement = self.prepared.placement
        tasks = ((slice_, placement.slice_sql(slice_.start, slice_.stop)) for slice_ in todo)
        try:
            if self.run.machines.separate:
                for report in self._run_remotely(scatter_slice, tasks):
                    assert report.slice_ is not None
                    self.bookkeeping.finish_slice(report.slice_, report.sizes)
            else:
                self._scatter_in_threads(tasks)
        finally:
            self.ledger.save()

    def _scatter_in_threads(self, tasks: Iterator[tuple[Slice, str]]) -> None:
        threads = ThreadPool(self.prepared.limits.threads)
        monitor = ThreadMonitor(threads, self.bookkeeping)

        def scatter(task: tuple[Slice, str]) -> None:
            sizes = self.tasks.scatter(*task, monitor)
            threads.call_in_caller(self.bookkeeping.finish_slice, task[0], sizes)

        threads.run(tasks, scatter)

    def _runs(self, slice_: Slice) -> Iterator[tuple[str, int]]:
        """Yield the name and size of each run of a finished slice."""
        for number, size in enumerate(self.ledger[slice_.name]["bytes"]):
            yield slice_.run_name(number), size

    def _is_scattered(self, slice_: Slice, sizes: dict[str, int]) -> bool:
        """Return whether a slice is finished and its runs are among the files with these sizes."""
        return slice_.name in self.ledger and all(
            sizes.get(name) == size for name, size in self._runs(slice_)
        )

    # --- phase 2 --------------------------------------------------------------------------------------

    def _sort(self) -> None:
        """Write the missing buckets."""
        jobs = self.layout.jobs
        done = self._finished([bucket.name for job in jobs for bucket in job.buckets])
        todo = [job for job in jobs if not all(bucket.name in done for bucket in job.buckets)]
        self.run.store.keep_only("shuffled", done)
        self.run.progress.begin("sort", sum(self.prepared.selection.rows.values()), "positions")
        self.run.progress.advance(sum(self.ledger[name]["rows"] for name in done))
        names = (name for slice_ in self.layout.slices for name, _ in self._runs(slice_))
        group = self._jobs_per_group(len(todo))
        try:
            with closing(MergedRunIndex((self.run.runs / name for name in names), self.run.spill)) as runs:
                tasks = (
                    (
                        runs.only(range(jobs[0].units.start, jobs[-1].units.stop)),
                        jobs,
                        done.intersection(bucket.name for job in jobs for bucket in job.buckets),
                    )
                    for jobs in group_jobs(todo, group)
                )
                if self.run.machines.separate:
                    self._sort_remotely(tasks, min(group, self.prepared.threads_per_task))
                else:
                    self._sort_in_threads(tasks)
        finally:
            self.ledger.save()

    def _jobs_per_group(self, jobs: int) -> int:
        """Return the number of jobs that are sorted in one task."""
        if storage_of(self.run.runs).local is not None:
            return 1
        sizes = [size for slice_ in self.layout.slices for _, size in self._runs(slice_)]
        job_bytes = sum(sizes) / len(self.layout.jobs)
        if not job_bytes:
            return 1
        made = self.prepared
        return jobs_per_group(jobs, len(sizes), job_bytes, made.sort_tasks, made.threads_per_task)

    def _sort_in_threads(self, tasks: Iterator[_SortTask]) -> None:
        threads = ThreadPool(self.prepared.limits.threads)
        monitor = ThreadMonitor(threads, self.bookkeeping)
        threads.run(tasks, lambda task: self.tasks.sort(*task, monitor))

    def _sort_remotely(self, tasks: Iterator[_SortTask], threads: int) -> None:
        """Run tasks that sort their jobs with a number of threads each."""
        arguments = ((*task, self._record_of(task[1]), threads) for task in tasks)
        for report in self._run_remotely(sort_jobs, arguments, cores=threads):
            for written in report.written:
                self.bookkeeping.finish(written)

    def _record_of(self, jobs: list[Job]) -> AnyPath | None:
        """Return the path of the record of a task; None if the task has a single job."""
        return self.records / f"{jobs[0].units.start}{_RECORD_SUFFIX}" if len(jobs) > 1 else None

    def _finished(self, names: list[str]) -> set[str]:
        """Return the finished buckets. Those of an earlier run are included only if their digests match."""
        done = {name: _file_facts(SortedBucket(**self.ledger[name])) for name in names if name in self.ledger}
        unchecked = {name: facts for name, facts in done.items() if name not in self.run.intact}
        run = self.run
        return done.keys() - find_damage(run.store, unchecked, engine=run.engine, root=run.target).keys()
