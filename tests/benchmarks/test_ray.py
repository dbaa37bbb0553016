"""The shuffle on Ray, on one machine with two workers, against the local engine in the same run."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

MOST_RATIO = 1.5
"""Times the local engine's time, the start of a cluster not counted."""
MOST_RATIO_STARTED = 3.0
"""The same with it, which a few seconds of work do not make up for."""
WORKERS = "2"
READY = os.environ.get("HEXDATA_BENCH_STORE")
"""A store that is there already, instead of one made for the benchmarks; it is copied."""


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Path:
    """The store to shuffle."""
    found: Path = Path(READY) if READY else request.getfixturevalue("store")
    return found


def digests(store: Path) -> dict[str, str]:
    """The SHA-256 of the manifest and of each bucket."""
    files = [store / "manifest.json", *sorted((store / "shuffled").rglob("*.parquet"))]
    return {
        path.relative_to(store).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def test_ray_against_local(
    benchmark: Any, source: Path, tmp_path: Path, watch: Any, memory: int, report: Callable[[str], None]
) -> None:
    """The command, with a cluster of its own; its start is timed by a shuffle that is done already."""
    pytest.importorskip("ray")
    positions = sum(pq.read_metadata(part).num_rows for part in (source / "positions").iterdir())
    stores = {name: Path(shutil.copytree(source, tmp_path / name)) for name in ("local", "ray")}
    options = ["--threads", WORKERS, "--memory", f"{2 * memory}B", "--engine"]
    local = watch("-m", "hexdata", "shuffle", stores["local"], *options, "local")
    again = watch("-m", "hexdata", "shuffle", stores["local"], *options, "local")
    command = ["-m", "hexdata", "shuffle", stores["ray"], *options, "ray"]
    ours = benchmark.pedantic(watch, args=command, rounds=1)
    start = watch(*command)
    assert digests(stores["ray"]) == digests(stores["local"])
    whole = ours.seconds / local.seconds
    work = (ours.seconds - start.seconds) / (local.seconds - again.seconds)
    report(f"local {local.seconds:.1f} s, Ray {ours.seconds:.1f} s, of which {start.seconds:.1f} s to start")
    report(f"{whole:.2f} x the time, {work:.2f} x without the start, of {positions:,} positions, same bytes")
    benchmark.extra_info.update(ratio=whole, work=work, start=start.seconds, units=positions)
    assert work <= MOST_RATIO
    assert whole <= MOST_RATIO_STARTED
