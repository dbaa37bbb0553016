"""The shuffle of a store in an object store, S3 on loopback, and ways to read the pieces of its units."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hexdata.shuffle.prepare import prepare
from hexdata.shuffle.runs import PARALLEL_READS, RunCopy, RunIndex, as_run, read_pieces, write_run

from hexdata.engine.local import LocalEngine
from hexdata.engine.protocol import Machines
from hexdata.order import sort_key
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, layout, shuffle_store
from hexdata.storage import RemotePath
from hexdata.store import Store
from hexdata.store.session import duckdb_session
from tests.object_store import Fault, ObjectStore

LEAST_RATIO = 0.5
"""Of the rate on the disk. The server is on the same two cores, which is what it costs most."""
LEAST_PIECE_RATIO = 4.0
"""Of the rate of reading pieces one after the other: at least this for a copy of each group of units."""
RUNS, UNITS, GROUP, PIECE_ROWS = 24, 48, 12, 800
"""Runs and units of the pieces that are read, units of a group, and rows of a piece."""
ANSWER = 0.03
"""Seconds until the server answers. S3 takes 0.1 to 0.2 s."""
READY = os.environ.get("HEXDATA_BENCH_STORE")
"""A store that is there already, instead of one made for the benchmarks; it is copied."""
THREADS = 2
"""Threads of the shuffles on a machine."""
SHUFFLE = """
import sys
from hexdata.shuffle import ShuffleOptions, shuffle_store
shuffle_store(sys.argv[1], ShuffleOptions(memory=int(sys.argv[2]), threads=2))
"""


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Path:
    """The store to shuffle."""
    found: Path = Path(READY) if READY else request.getfixturevalue("store")
    return found


def server_seconds() -> float:
    """Return the CPU time of the child processes of this process: those of the server."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times)


def put_store(local: Path, remote: RemotePath) -> None:
    """Put what a manifest names, and the manifest."""
    for path in (local / "manifest.json", *local.glob("*/part-*.parquet")):
        remote.fs.put_file(str(path), (remote / path.relative_to(local).as_posix()).path)


def digests(buckets: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in buckets.items()}


def test_shuffle_on_s3(
    benchmark: Any,
    bucket: RemotePath,
    source: Path,
    tmp_path: Path,
    watch: Any,
    memory: int,
    report: Callable[[str], None],
) -> None:
    positions = sum(pq.read_metadata(part).num_rows for part in (source / "positions").iterdir())
    remote = bucket / "store"
    put_store(source, remote)
    local = Path(shutil.copytree(source, tmp_path / "store", ignore=shutil.ignore_patterns("shuffled")))
    here = watch("-c", SHUFFLE, local, memory)
    before = server_seconds()
    there = benchmark.pedantic(watch, args=("-c", SHUFFLE, remote, memory), rounds=1)
    server = server_seconds() - before
    folder = (remote / "shuffled").path
    found = {name[len(folder) :]: remote.fs.cat_file(name) for name in remote.fs.find(folder)}
    start = len(str(local / "shuffled"))
    assert digests(found) == digests({str(p)[start:]: p.read_bytes() for p in local.rglob("bucket-*")})
    ratio = here.seconds / there.seconds
    for name, done in (("disk", here), ("S3", there)):
        report(
            f"{name}: {done.seconds:.1f} s, {done.processor_seconds:.1f} CPU s at {done.peak / 1e6:,.0f} MB"
        )
    own = here.processor_seconds / there.processor_seconds
    report(f"{ratio:.2f} x the rate, of {positions:,} positions, same bytes")
    report(f"{own:.2f} x the positions per CPU second, without the {server:.1f} CPU s of the server")
    benchmark.extra_info.update(ratio=ratio, peak=there.peak, units=positions)
    assert there.peak < memory
    assert ratio >= LEAST_RATIO


def write_runs(source: Path, folder: RemotePath, temporary: Path) -> tuple[RunIndex, pa.Schema]:
    """Write runs of small pieces from the rows of a store."""
    store = Store.open(source)
    prepared = prepare(store, ShuffleOptions(memory=1_000_000_000), temporary, None)
    assert store.manifest.board_size is not None
    rows, paths = UNITS * PIECE_ROWS, []
    for number in range(RUNS):
        with duckdb_session(memory=256 << 20, threads=1) as con:
            query = prepared.placement.rows_sql(number * rows, (number + 1) * rows)
            table = as_run(con.sql(query).to_arrow_reader(1 << 14).read_all(), store.manifest.board_size)
        key = sort_key(table.column("position_id").to_numpy(), prepared.selection.key)
        paths.append(folder / f"run-{number:06d}-000.arrow")
        write_run(paths[-1], table, (key % np.uint64(UNITS)).astype(np.uint32))
    return RunIndex.read(paths), table.schema


def test_pieces_on_s3(
    benchmark: Any,
    bucket: RemotePath,
    object_store: ObjectStore,
    source: Path,
    tmp_path: Path,
    report: Callable[[str], None],
) -> None:
    """One after the other, several at a time, and from copies of groups of units with one request per run."""
    runs, schema = write_runs(source, bucket / "runs", tmp_path)

    def read(parallel: int) -> Iterator[pa.RecordBatch]:
        for unit in range(UNITS):
            yield from read_pieces(runs.pieces(unit), schema, parallel=parallel)

    def read_copies() -> Iterator[pa.RecordBatch]:
        for start in range(0, UNITS, GROUP):
            units = range(start, start + GROUP)
            with closing(RunCopy(runs.only(units), tmp_path, PARALLEL_READS)) as copy:
                for unit in units:
                    yield from read_pieces(copy.pieces(unit), schema)

    def measure(batches: Iterator[pa.RecordBatch]) -> tuple[float, int, str]:
        object_store.requests()
        begin, rows = time.perf_counter(), hashlib.sha256()
        for batch in batches:
            rows.update(batch.column("position_id").to_numpy())
        return time.perf_counter() - begin, len(object_store.requests()), rows.hexdigest()

    object_store.fail(Fault("GET", "/runs/", delay=ANSWER, count=10**9))
    serial, parallel = measure(read(1)), measure(read(PARALLEL_READS))
    copied = benchmark.pedantic(measure, setup=lambda: ((read_copies(),), {}), rounds=1)
    object_store.fail()
    assert serial[2] == parallel[2] == copied[2]
    for name, (seconds, requests, _) in (
        ("one after the other", serial),
        (f"{PARALLEL_READS} at a time", parallel),
        (f"copies of {GROUP} units", copied),
    ):
        report(f"{name}: {requests:,} requests in {seconds:.1f} s, {serial[0] / seconds:.1f} x the rate")
    benchmark.extra_info.update(ratio=serial[0] / copied[0], units=RUNS * UNITS)
    assert (serial[1], copied[1]) == (RUNS * UNITS, RUNS * UNITS // GROUP)
    assert serial[0] / copied[0] >= LEAST_PIECE_RATIO


class SeparateEngine(LocalEngine):
    """The local engine with the interface of a remote one: its tasks share the work in the store.

    Args:
        cores: Cores of a task that sorts a group of units.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores

    @property
    def machines(self) -> Machines:
        return Machines(1, THREADS, separate=True, sizes=((self._cores, inf),) * (THREADS // self._cores))


class SortClock(Silent):
    """Records when the second phase begins."""

    begin_sort = 0.0

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        if stage == "sort":
            self.begin_sort = time.perf_counter()


def test_groups_of_a_machine_on_s3(
    benchmark: Any,
    bucket: RemotePath,
    object_store: ObjectStore,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    report: Callable[[str], None],
) -> None:
    """The second phase of the shuffle with a group for each task of one core, and for all cores."""
    monkeypatch.setattr(layout, "MAX_ROWS", 1 << 15)  # as many pieces as in a much larger store
    found = []

    def shuffle(store: RemotePath, cores: int) -> None:
        clock, options = SortClock(), ShuffleOptions(threads=THREADS, buckets=UNITS)
        shuffle_store(store, options, clock, engine=SeparateEngine(cores))
        found.append(time.perf_counter() - clock.begin_sort)

    def measure(cores: int, run: Callable[..., Any]) -> tuple[float, int, int, dict[str, str]]:
        store = bucket / f"store-{cores}"
        put_store(source, store)
        object_store.requests()
        run(store, cores)
        paths = object_store.requests()
        reads = sum(method == "GET" and "/run-" in path for method, path in paths)
        files = store.fs.find((store / "shuffled").path)
        data = {name.partition("/shuffled/")[2]: store.fs.cat_file(name) for name in files}
        return found[-1], reads, len(paths), digests(data)

    object_store.fail(Fault("GET", "/runs/", delay=ANSWER, count=10**9))
    each = measure(1, shuffle)
    whole = measure(THREADS, lambda *arguments: benchmark.pedantic(shuffle, args=arguments, rounds=1))
    object_store.fail()
    for name, (seconds, reads, requests, _) in (("a core", each), ("a machine", whole)):
        report(
            f"groups of {name}: {reads:,} reads of runs, {requests:,} requests, phase 2 in {seconds:.1f} s"
        )
    benchmark.extra_info.update(ratio=each[0] / whole[0], reads=each[1] / whole[1])
    assert each[3] == whole[3]
    assert whole[1] < each[1]
