"""Copies of runs in an object store: one request per run and group, the same rows, and no file left."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hexdata.shuffle.layout import Bucket, Job, group_jobs, jobs_per_group
from hexdata.shuffle.runs import (
    PARALLEL_READS,
    RunCopy,
    RunIndex,
    read_ahead,
    read_pieces,
    run_schema,
    write_run,
)

from hexdata.engine.local import LocalEngine
from hexdata.engine.protocol import Machines
from hexdata.errors import StoreError
from hexdata.shuffle import ShuffleOptions, layout, shuffle_store
from hexdata.shuffle import tasks as tasks_module
from hexdata.storage import storage_of
from tests.conftest import BOARD_SIZE, DERIVED
from tests.object_store import Fault
from tests.pairs import FULL
from tests.shuffle.test_objects import bytes_of, put_store
from tests.shuffle.test_runs import ROWS, run_rows

if TYPE_CHECKING:
    from upath import UPath

    from tests.conftest import StoreBytes
    from tests.object_store import ObjectStore

RUNS, UNITS = 5, 12
SCHEMA = run_schema(BOARD_SIZE)
SHUFFLE = ShuffleOptions(seed=5, buckets=4, threads=1)
DISK = 1 << 40


class SeparateEngine(LocalEngine):
    """The local engine with the interface of a remote one. Its tasks share the work in the store."""

    def __init__(self, cores: int = 1) -> None:
        self.cores = cores

    @property
    def machines(self) -> Machines:
        return Machines(1, self.cores, separate=True)


@pytest.fixture
def paths(bucket: UPath) -> list[UPath]:
    """Runs in an object store."""
    found = [bucket / "runs" / f"run-{number:06d}-000.arrow" for number in range(RUNS)]
    for number, path in enumerate(found):
        write_run(path, run_rows(ROWS), (np.arange(ROWS) + number) % UNITS)
    return found


def read_units(source: RunIndex | RunCopy, units: range, parallel: int = 1) -> list[Any]:
    return [
        [
            row
            for batch in read_pieces(source.pieces(unit), SCHEMA, parallel=parallel)
            for row in batch.to_pylist()
        ]
        for unit in units
    ]


def run_requests(object_store: ObjectStore) -> int:
    return sum(method == "GET" and "/run-" in path for method, path in object_store.requests())


def test_a_group_is_copied_with_one_request_per_run(
    paths: list[UPath], object_store: ObjectStore, tmp_path: Path
) -> None:
    units = range(2, 9)
    runs = RunIndex.read(paths).only(units)
    object_store.requests()
    expected = read_units(runs, units, PARALLEL_READS)
    assert run_requests(object_store) == RUNS * len(units)
    object_store.fail(Fault("GET", "/run-000002", status=503), Fault("GET", "/run-000003", cut=100))
    copy = RunCopy(runs, tmp_path / "spill", PARALLEL_READS)
    assert run_requests(object_store) == RUNS + 2  # a failed read is repeated alone
    assert object_store.all_met()
    assert list((tmp_path / "spill").iterdir()) == []  # the file has no name, so it ends with the process
    assert read_units(copy, units) == expected
    assert run_requests(object_store) == 0
    copy.close()


def test_a_copy_of_a_damaged_run_is_refused(paths: list[UPath], tmp_path: Path) -> None:
    runs, spill = RunIndex.read(paths), tmp_path / "spill"
    content = bytearray(paths[3].read_bytes())
    content[runs.pieces(4)[3].offset + 40] ^= 1
    paths[3].write_bytes(bytes(content))
    copy = RunCopy(runs, spill, PARALLEL_READS)
    with pytest.raises(StoreError, match=r"run-000003.*missing or damaged.*checksum"):
        read_units(copy, range(UNITS))
    copy.close()
    paths[3].write_bytes(bytes(content[:500]))
    with pytest.raises(StoreError, match=r"run-000003.*missing or damaged"):
        RunCopy(runs, spill, PARALLEL_READS)
    storage_of(paths[1]).remove()
    with pytest.raises(StoreError, match=r"run-00000[13].*missing or damaged"):
        RunCopy(runs, spill, PARALLEL_READS)
    assert list(spill.iterdir()) == []


@pytest.fixture(scope="module")
def expected(
    trmph_store: Path, tmp_path_factory: pytest.TempPathFactory, store_bytes: StoreBytes
) -> dict[str, str]:
    """The bytes of a shuffle on a disk."""
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("expected") / "store")
    shuffle_store(store, SHUFFLE)
    return {name: digest for name, digest in store_bytes(store).items() if name not in DERIVED}


COPIES = [(1, 0), (2, DISK), (2, 30_000)]


@pytest.mark.parametrize(("threads", "free"), [*COPIES, (1, DISK), (2, 0)] if FULL else COPIES)
def test_a_shuffle_with_copies_gives_the_same_bytes(
    trmph_store: Path,
    bucket: UPath,
    expected: dict[str, str],
    object_store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    free: int,
) -> None:
    """With one thread or with all threads of a machine, also if the disk has no space for them, or little."""
    monkeypatch.setattr(layout, "MAX_ROWS", 700)
    monkeypatch.setattr(layout, "PIECE_ROWS", 1)
    put_store(trmph_store, bucket / "store")
    sorted_jobs: list[int] = []
    parts: list[int] = []
    original = tasks_module.sort_jobs

    def sort_jobs(
        tasks: Any, runs: Any, jobs: list[Job], done: set[str], record: Any, threads_: int = 1
    ) -> Any:
        object_store.requests()
        report = original(tasks, runs, jobs, set(done), record, threads_)
        units, named = len({job.units.start for job in jobs}), len(runs.names)
        sorted_jobs.append(len(jobs))
        parts.append(1 + sum("are copied in parts" in line for line in report.lines))
        assert threads_ == min(threads, max(sorted_jobs))
        assert run_requests(object_store) <= (named * parts[-1] if free else units * named)
        assert any("are not copied" in line for line in report.lines) == (not free and units > 1)
        if len(jobs) > 1:  # as an engine repeats the task of a dead worker
            again = original(tasks, runs, jobs, done, record, threads_)
            assert run_requests(object_store) == 0
            assert {(one.name, one.facts) for one in again.written} == {
                (one.name, one.facts) for one in report.written
            }
        return report

    monkeypatch.setattr("hexdata.shuffle.stage.sort_jobs", sort_jobs)
    monkeypatch.setattr("hexdata.storage.local.LocalStorage.free_space", lambda self: free)
    shuffle_store(bucket / "store", replace(SHUFFLE, threads=threads), engine=SeparateEngine(threads))
    assert bytes_of(bucket / "store") == expected
    assert max(sorted_jobs) >= max(threads, 2)
    assert (max(parts) > 1) == (0 < free < DISK)


@pytest.mark.parametrize("threads", [1, 2] if FULL else [2])
def test_buckets_of_a_group_are_recorded_one_by_one(
    trmph_store: Path, bucket: UPath, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """A run that is killed within a group is resumed after its last published bucket."""
    options, engine = replace(SHUFFLE, threads=threads), SeparateEngine(threads)
    monkeypatch.setattr(layout, "MAX_ROWS", 700)
    monkeypatch.setattr(layout, "PIECE_ROWS", 1)
    store = bucket / "store"
    put_store(trmph_store, store)
    original, written, lock = tasks_module.write_parquet, [], threading.Lock()

    def write_parquet(path: Any, *arguments: Any, **keywords: Any) -> Any:
        with lock:
            if len(written) == 2:
                raise SystemExit  # the driver has received no report
            facts = original(path, *arguments, **keywords)
            written.append(path)
            return facts

    monkeypatch.setattr(tasks_module, "write_parquet", write_parquet)
    with pytest.raises(SystemExit):
        shuffle_store(store, options, engine=engine)
    published = {path: path.fs.modified(path.path) for path in written}
    monkeypatch.setattr(tasks_module, "write_parquet", original)
    result = shuffle_store(store, options, engine=engine)
    slices = -(-result.positions // 700)
    assert result.resumed >= slices + len(published)
    assert {path: path.fs.modified(path.path) for path in written} == published


def test_groups_are_consecutive_and_keep_all_threads_busy() -> None:
    jobs = [Job([Bucket("train", number)], range(2 * number, 2 * number + 2)) for number in range(10)]
    groups = list(group_jobs([*jobs[:4], *jobs[5:]], 3))
    assert [job for group in groups for job in group] == [*jobs[:4], *jobs[5:]]
    assert [len(group) for group in groups] == [3, 1, 3, 2]
    assert jobs_per_group(1_000, 500, 15e6, 100, 1) == 5  # two groups per thread
    assert jobs_per_group(1_000, 500, 15e6, 1, 1) == 125  # at most 4 MiB of each run, all the same size
    assert jobs_per_group(1_000, 5_000, 300e6, 1, 1) == 14  # 4 GiB on the disk
    assert jobs_per_group(10, 1, 1e9, 8, 1) == 1
    assert jobs_per_group(10_000, 5_000, 15e6, 10, 16) == 32 * 16  # two groups per machine
    assert jobs_per_group(10_000, 500, 15e6, 10, 16) == 8 * 16  # 4 MiB of each run
    assert jobs_per_group(10_000, 50_000, 300e6, 10, 16) == 13 * 16  # 4 GiB on the disk per thread
    assert jobs_per_group(3_180, 5_000, 95e6, 10, 16) == 10 * 16  # exactly two groups per machine
    assert jobs_per_group(200, 500, 15e6, 10, 16) == 16  # one job per thread
    assert jobs_per_group(75, 500, 15e6, 10, 16) == 8  # one group per machine
    assert jobs_per_group(0, 500, 15e6, 10, 16) == 1


def test_reads_are_bounded_and_in_order() -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def read(item: int) -> int:
        with lock:
            running[0] += item
            most[0] = max(most[0], running[0])
        with lock:
            running[0] -= item
        return -item

    items = [3, 9, 1, 1, 4, 20, 2, 7] * 5
    found = list(read_ahead(read, iter(items), 4, size_of=lambda item: item, max_bytes=10))
    assert found == [(item, -item) for item in items]
    assert most[0] <= 20


def test_an_error_or_a_stop_begins_no_further_read() -> None:
    begun: list[int] = []

    def read(item: int) -> int:
        begun.append(item)
        if item == 3:
            raise OSError("no")
        return item

    with pytest.raises(OSError, match="no"):
        list(read_ahead(read, range(100), 2))
    assert max(begun) <= 5
    begun.clear()
    reads = read_ahead(read, range(10, 100), 2)
    assert next(reads) == (10, 10)
    reads.close()
    assert max(begun) <= 13
