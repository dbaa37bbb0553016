"""The global shuffle: against DuckDB's own external sort of the same files, and against SIGKILL."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow.parquet as pq

from hexdata.order import derive_key, sort_key_sql, uniform_draw
from hexdata.pool import default_workers
from hexdata.store.session import duckdb_session, read_parquet_sql

LEAST_RATIO = 0.4
"""Of the rival's rate; 1 / 1.5 is the aim. The shuffle writes everything twice, and syncs, digests and
publishes bucket by bucket; the rival does one unsafe COPY."""
MOST_WRITTEN = 5.0
"""Times the size of the result."""
THREADS = str(min(2, default_workers()))
KILLS = int(os.environ.get("HEXDATA_BENCH_KILLS", "50"))
SAMPLE_SECONDS = 0.02


class Watched(NamedTuple):
    """A process that has ended: its time, its peak memory and the bytes that it wrote."""

    seconds: float
    peak: int
    written: int


def watch(*arguments: str | Path) -> Watched:
    """Run Python with these arguments and look at the process again and again."""
    begin = time.perf_counter()
    process = psutil.Popen([sys.executable, *map(str, arguments)], stdout=subprocess.DEVNULL)
    peak = written = 0
    while process.poll() is None:
        try:
            peak = max(peak, process.memory_info().rss)
            written = process.io_counters().write_bytes
        except psutil.NoSuchProcess:
            break
        time.sleep(SAMPLE_SECONDS)
    assert process.wait() == 0
    return Watched(time.perf_counter() - begin, peak, written)


def sort_by_duckdb(positions: Path, target: Path, memory: int) -> None:
    """The rival: one external sort, to one file."""
    files = read_parquet_sql(sorted(positions.iterdir()))
    order = sort_key_sql("position_id", derive_key(0, "shuffle"))
    with duckdb_session(memory=memory, threads=int(THREADS), spill=target.parent / "spill") as con:
        con.sql(f"COPY (SELECT * FROM {files} ORDER BY {order}) TO '{target}' (COMPRESSION zstd)")


def test_shuffle_against_one_sort(benchmark, store, tmp_path, memory, report):
    positions = sum(pq.read_metadata(part).num_rows for part in (store / "positions").iterdir())
    rival = watch(__file__, store / "positions", tmp_path / "sorted.parquet", str(memory))
    assert pq.read_metadata(tmp_path / "sorted.parquet").num_rows == positions
    copy = shutil.copytree(store, tmp_path / "store")
    command = ["-m", "hexdata", "shuffle", copy, "--threads", THREADS, "--memory", f"{memory}B"]
    ours = benchmark.pedantic(watch, args=command, rounds=1)
    ratio = rival.seconds / ours.seconds
    written = ours.written / sum(path.stat().st_size for path in (copy / "shuffled").rglob("*.parquet"))
    for name, done in (("shuffle", ours), ("one sort", rival)):
        report(f"{name}: {positions / done.seconds:,.0f} positions/s at {done.peak / 1e6:,.0f} MB")
    report(f"{ratio:.2f} x, of {positions:,} positions; written {written:.2f} x the result")
    benchmark.extra_info.update(
        ratio=ratio, peak=ours.peak, rival_peak=rival.peak, written=written, units=positions
    )
    assert ours.peak < memory
    assert written < MOST_WRITTEN
    assert ratio > LEAST_RATIO


def digests(store: Path) -> dict[str, str]:
    """The SHA-256 of the manifest and of each bucket."""
    files = [store / "manifest.json", *sorted((store / "shuffled").rglob("*"))]
    return {
        path.relative_to(store).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.is_file()
    }


def test_killed_at_random_moments(store, tmp_path, report):
    """From the first import to the last rename, again and again, until a run comes through; then anew."""
    options = ["--threads", THREADS, "--buckets", "23"]
    undisturbed = shutil.copytree(store, tmp_path / "undisturbed")
    seconds = watch("-m", "hexdata", "shuffle", undisturbed, *options).seconds
    expected = digests(undisturbed)
    kills = runs = 0
    copy = tmp_path / "killed"
    for delay in uniform_draw(range(10 * KILLS), 1) * seconds:
        if not copy.exists():
            shutil.copytree(store, copy)
        command = [sys.executable, "-m", "hexdata", "shuffle", str(copy), *options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert process.wait(delay) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
        if kills >= KILLS:
            watch("-m", "hexdata", "shuffle", copy, *options)
        if kills >= KILLS or process.returncode == 0:
            assert digests(copy) == expected
            shutil.rmtree(copy)
            runs += 1
        if kills >= KILLS:
            break
    report(f"{kills} kills survived, {runs} shuffles of {seconds:.1f} s with identical bytes")
    assert kills >= KILLS


if __name__ == "__main__":
    sort_by_duckdb(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
