"""The named queries over a large store, and the report that is made of them: time and memory of each.

``HEXDATA_BENCH_STORE`` names a shuffled store to ask; without it, one is made.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.sql import named_queries
from hexdata.store import Store

QUERY_SECONDS = 30.0
REPORT_SECONDS = 90.0
"""At 97 million positions."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory, store) -> Path:
    named = os.environ.get("HEXDATA_BENCH_STORE")
    if named:
        return Path(named)
    copy = shutil.copytree(store, tmp_path_factory.mktemp("asked") / "store")
    shuffle_store(copy, ShuffleOptions())
    return copy


@pytest.fixture
def run(benchmark, asked, memory, report, watch):
    """Return ``run(name, seconds, *command)``, a command that is held to its time and memory."""
    positions = Store.open(asked).manifest.counts["positions"]

    def timed(name, seconds, *command):
        command = ["-m", "hexdata", *command, "--memory", f"{memory}B"]
        done = benchmark.pedantic(watch, args=command, rounds=1)
        report(f"{name}: {done.seconds:.1f} s at {done.peak / 1e6:,.0f} MB, {positions:,} positions")
        benchmark.extra_info.update(peak=done.peak, units=positions)
        assert done.peak < memory
        assert done.seconds < seconds * max(1.0, positions / 97_000_000)

    return timed


@pytest.mark.parametrize("name", sorted(named_queries()))
def test_named_query(asked, run, name):
    run(f"@{name}", QUERY_SECONDS, "sql", asked, f"@{name}")


def test_report(asked, run, tmp_path):
    run("report", REPORT_SECONDS, "report", asked, "--output", tmp_path / "page.html")
