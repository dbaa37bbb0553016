"""The named queries over a large store: time and memory of each.

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

SECONDS_AT_97_MILLION = 30.0


@pytest.fixture(scope="module")
def asked(tmp_path_factory, store) -> Path:
    named = os.environ.get("HEXDATA_BENCH_STORE")
    if named:
        return Path(named)
    copy = shutil.copytree(store, tmp_path_factory.mktemp("asked") / "store")
    shuffle_store(copy, ShuffleOptions())
    return copy


@pytest.mark.parametrize("name", sorted(named_queries()))
def test_named_query(benchmark, asked, memory, report, watch, name):
    positions = Store.open(asked).manifest.counts["positions"]
    command = ["-m", "hexdata", "sql", asked, f"@{name}", "--memory", f"{memory}B"]
    done = benchmark.pedantic(watch, args=command, rounds=1)
    report(f"@{name}: {done.seconds:.1f} s at {done.peak / 1e6:,.0f} MB, {positions:,} positions")
    benchmark.extra_info.update(peak=done.peak, units=positions)
    assert done.peak < memory
    assert done.seconds < SECONDS_AT_97_MILLION * max(1.0, positions / 97_000_000)
