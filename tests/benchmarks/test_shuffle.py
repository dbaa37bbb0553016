"""The global shuffle against DuckDB's own external sort of the same files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from hexdata.order import derive_key, sort_key_sql
from hexdata.store.session import duckdb_session, read_parquet_sql
from hexdata.system import default_workers
from tests.benchmarks.watched import MEMORY, watch, watch_hexdata

LEAST_RATIO = 0.4
"""Of the rival's rate. The shuffle writes everything twice, and syncs and publishes bucket by bucket;
the rival is one unsafe COPY."""
MOST_WRITTEN = 5.0
"""Times the size of the result."""
THREADS = str(min(2, default_workers()))


def sort_by_duckdb(positions: Path, target: Path) -> None:
    """The rival: one external sort, to one file."""
    files = read_parquet_sql(sorted(positions.iterdir()))
    order = sort_key_sql("position_id", derive_key(0, "shuffle"))
    with duckdb_session(memory=MEMORY, threads=int(THREADS), spill=target.parent / "spill") as con:
        con.sql(f"COPY (SELECT * FROM {files} ORDER BY {order}) TO '{target}' (COMPRESSION zstd)")


def test_shuffle_against_one_sort(store, tmp_path, report):
    positions = sum(pq.read_metadata(part).num_rows for part in (store / "positions").iterdir())
    places = [str(store / "positions"), str(tmp_path / "sorted.parquet")]
    command = [sys.executable, "-m", "tests.benchmarks.test_shuffle", *places]
    rival = watch(command, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[2])
    assert pq.read_metadata(tmp_path / "sorted.parquet").num_rows == positions
    copy = shutil.copytree(store, tmp_path / "store")
    ours = watch_hexdata("shuffle", copy, "--threads", THREADS, "--memory", f"{MEMORY}B")
    ratio = rival.seconds / ours.seconds
    written = ours.written / sum(path.stat().st_size for path in (copy / "shuffled").rglob("*.parquet"))
    for name, done in (("shuffle", ours), ("one sort", rival)):
        report(f"{name}: {positions / done.seconds:,.0f} positions/s at {done.peak / 1e6:,.0f} MB")
    report(f"{ratio:.2f} x, of {positions:,} positions; written {written:.2f} x the result")
    assert ours.peak < MEMORY
    assert written < MOST_WRITTEN
    assert ratio > LEAST_RATIO


if __name__ == "__main__":
    sort_by_duckdb(Path(sys.argv[1]), Path(sys.argv[2]))
