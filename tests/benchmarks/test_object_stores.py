"""The shuffle of a store in an object store, S3 on loopback."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from hexdata.storage import RemotePath

LEAST_RATIO = 0.5
"""Of the rate on the disk. The server is on the same two cores, which is what it costs most."""
READY = os.environ.get("HEXDATA_BENCH_STORE")
"""A store that is there already, instead of one made for the benchmarks; it is copied."""
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
