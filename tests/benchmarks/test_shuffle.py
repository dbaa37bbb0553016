"""The global shuffle against DuckDB's own external sort of the same files by the same key."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq

from hexdata.order import derive_key, sort_key_sql
from hexdata.store.session import duckdb_session, read_parquet_sql

LEAST_RATIO = 0.2
"""Of the rival's rate. The shuffle reads everything twice, writes it twice, sorts each split on its own and
digests what it publishes; the rival does one unsafe COPY."""
THREADS = "1"


def sort_by_duckdb(positions: Path, target: Path, memory: int) -> None:
    """The rival: one external sort, to one file."""
    files = read_parquet_sql(sorted(positions.iterdir()))
    order = sort_key_sql("position_id", derive_key(0, "shuffle"))
    with duckdb_session(memory=memory, threads=int(THREADS), spill=target.parent / "spill") as con:
        con.sql(f"COPY (SELECT * FROM {files} ORDER BY {order}) TO '{target}' (COMPRESSION zstd)")


def test_shuffle_against_one_sort(benchmark, store, tmp_path, watch, memory, report):
    positions = sum(pq.read_metadata(part).num_rows for part in (store / "positions").iterdir())
    rival = watch(__file__, store / "positions", tmp_path / "sorted.parquet", str(memory))
    assert pq.read_metadata(tmp_path / "sorted.parquet").num_rows == positions
    copy = shutil.copytree(store, tmp_path / "store")
    command = ["-m", "hexdata", "shuffle", copy, "--threads", THREADS, "--memory", f"{memory}B"]
    ours = benchmark.pedantic(watch, args=command, rounds=1)
    ratio = rival.seconds / ours.seconds
    for name, done in (("shuffle", ours), ("one sort", rival)):
        report(f"{name}: {positions / done.seconds:,.0f} positions/s at {done.peak / 1e6:,.0f} MB")
    report(f"{ratio:.2f} x, of {positions:,} positions")
    benchmark.extra_info.update(ratio=ratio, peak=ours.peak, rival_peak=rival.peak, units=positions)
    assert ours.peak < memory
    assert ratio > LEAST_RATIO


if __name__ == "__main__":
    sort_by_duckdb(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
