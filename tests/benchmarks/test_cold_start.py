"""The first batch of a loader when nothing is in the page cache, and the rate when everything is.

The rival of the first batch is reading the shards from front to back. The rival of the rate at a size is the
rate at the smallest size. Every measurement runs in a new process, in turns.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

HERE = Path(__file__).parent
SIZES = [
    int(size)
    for size in os.environ.get("HEXDATA_BENCH_COLD_POSITIONS", "1000000,20000000,97000000").split(",")
]
BYTES_PER_POSITION = 75
MODES = ("exact", "stream")
ROUNDS = 3
SECONDS = 4.0
"""Seconds of one measurement of a rate."""
WARM_UP = 16_000_000
"""Positions after which exact mode has checked the blocks of 97 million positions."""
DROP_CACHES = Path("/proc/sys/vm/drop_caches")

MOST_OF_READING = {"exact": 1.2}
"""Maximum ratio of opening and the first batch to reading the shards, from ``LARGE`` positions on."""
LARGE = 20_000_000
LEAST_OF_SMALLEST = {"exact": 0.6}
"""Minimum ratio of the rate at any size to the rate at the smallest; the target is 0.8 on an idle machine."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write shards of each size that fits on the disk, and delete them afterwards."""
    path = tmp_path_factory.mktemp("shards")
    found = {}
    for size in SIZES:
        if shutil.disk_usage(path).free < 2 * BYTES_PER_POSITION * size:
            continue
        found[size] = path / str(size)
        found[size].mkdir()
        command = [sys.executable, HERE / "positions.py", found[size], str(size), "repeated"]
        subprocess.run(command, check=True)
    yield found
    shutil.rmtree(path)


def drop_caches() -> None:
    """Empty the page cache, or skip the test."""
    os.sync()
    try:
        DROP_CACHES.write_text("3", encoding="ascii")
    except OSError:
        pytest.skip("only root on Linux can empty the page cache")


def read_seconds(folder: Path) -> float:
    """Return the seconds that ``cat`` takes to read the shards."""
    start = time.perf_counter()
    subprocess.run(["cat", *sorted(folder.glob("*.tar"))], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def start_loader(folder: Path, mode: str, seconds: float = 0, least: int = 0) -> dict[str, float]:
    command = [sys.executable, HERE / "cold_start.py", folder, mode, str(seconds), str(least)]
    facts: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return facts


@pytest.mark.parametrize("mode", MODES)
def test_the_first_batch_from_the_disk(folders, report, mode):
    for size, folder in folders.items():
        ratios, reading, waiting = [], [], []
        for _ in range(ROUNDS):
            drop_caches()
            reading.append(read_seconds(folder))
            drop_caches()
            facts = start_loader(folder, mode)
            waiting.append(facts["open"] + facts["first batch"])
            ratios.append(waiting[-1] / reading[-1])
        report(
            f"{mode}, {size:,} positions: first batch after {median(waiting):.2f} s, reading the shards "
            f"{median(reading):.2f} s: {median(ratios):.2f} x (median of {ROUNDS} pairs)"
        )
        if size >= LARGE:
            assert median(ratios) < MOST_OF_READING.get(mode, float("inf"))


@pytest.mark.parametrize("mode", MODES)
def test_the_rate_from_the_page_cache(folders, report, mode):
    rates: dict[int, list[dict[str, float]]] = {size: [] for size in folders}
    for folder in folders.values():
        read_seconds(folder)
    for _ in range(ROUNDS):
        for size, folder in folders.items():
            rates[size].append(start_loader(folder, mode, SECONDS, min(WARM_UP, size)))
    smallest = rates[min(rates)]
    for size, found in rates.items():
        ratio = median(each["rate"] / rival["rate"] for each, rival in zip(found, smallest, strict=True))
        first, early, rate = (
            median(each[name] for each in found) for name in ("first batch", "rate after the start", "rate")
        )
        report(
            f"{mode}, {size:,} positions: first batch after {first:.2f} s, then {early:,.0f} positions/s, "
            f"later {rate:,.0f}, {ratio:.2f} x of {min(rates):,} (median of {ROUNDS} rounds)"
        )
        assert ratio > LEAST_OF_SMALLEST.get(mode, 0)
