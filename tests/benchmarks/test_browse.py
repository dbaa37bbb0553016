"""The page of ``hexdata browse`` over a large store: time of the index, time of each view, memory.

``HEXDATA_BENCH_STORE`` names a shuffled store to browse; without it, one is made.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from hexdata.shuffle import ShuffleOptions, shuffle_store

REQUESTS = 40
"""Requests of each view, each for another part of the store."""
SECONDS = 0.3
"""Processor time that 95 % of the requests of each view may take: a loaded machine delays the answers."""


class Served:
    """A page, its process, and the facts of its store."""

    def __init__(self, process: psutil.Process, address: str) -> None:
        self.process, self.address = process, address
        self.peak = 0
        begin = time.perf_counter()
        while (facts := self.ask("api/store")) is None:
            time.sleep(0.1)
        self.index_seconds = time.perf_counter() - begin
        self.facts = facts

    @property
    def processor_seconds(self) -> float:
        """Processor time of the server."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def ask(self, path: str, **parameters: object) -> dict | None:
        """Return the answer to a request; None while the index is built."""
        try:
            with urllib.request.urlopen(
                f"{self.address}{path}?{urllib.parse.urlencode(parameters)}"
            ) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 503:
                    raise
            return None
        finally:
            self.peak = max(self.peak, self.process.memory_info().rss)
        return {} if path == "board.svg" else json.loads(body)

    def complete(self, **parameters: object) -> None:
        """Ask for a list until it is complete."""
        while not (self.ask("api/list", **parameters) or {})["complete"]:
            time.sleep(0.1)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if given := os.environ.get("HEXDATA_BENCH_STORE"):
        store = Path(given)
    else:
        store = tmp_path_factory.mktemp("browse") / "store"
        shutil.copytree(request.getfixturevalue("store"), store)
        shuffle_store(store, ShuffleOptions(threads=1))
    environment = {**os.environ, "HEXDATA_CACHE": str(tmp_path_factory.mktemp("cache"))}
    command = [sys.executable, "-m", "hexdata", "browse", str(store), "--port", "0", "--no-open", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["address"]
            yield Served(psutil.Process(process.pid), address)
        finally:
            process.terminate()


def test_index(served: Served, report, memory) -> None:
    positions = served.facts["counts"]["positions"]
    report(f"index: {served.index_seconds:.1f} s, {served.peak / 1e6:,.0f} MB, {positions:,} positions")
    assert served.peak < memory


SPARSE = "position_in_game = 30"
VIEWS = {
    "games": ("api/list", {"table": "games", "count": 50}, "start", "games"),
    "games, filtered": ("api/list", {"table": "games", "filter": "winner = 'RED'", "count": 50}, None, None),
    "games, sorted": ("api/list", {"table": "games", "sort": "len(moves)", "count": 50}, "start", "games"),
    "positions": ("api/list", {"table": "positions", "count": 24}, "start", "positions"),
    "positions, filtered": (
        "api/list",
        {"table": "positions", "filter": SPARSE, "count": 24},
        "start",
        "games",
    ),
    "game": ("api/game", {}, "game", "games"),
    "position": ("api/position", {}, "position", "positions"),
    "board": ("board.svg", {}, "position", "positions"),
    "openings": ("api/openings", {}, None, None),
    "flags": ("api/flagged", {}, None, None),
    "sheet before": ("api/sheet", {"order": "before", "count": 64}, "start", "positions"),
    "sheet after": ("api/sheet", {"order": "after", "count": 64}, "start", "train"),
}
"""Each view: address, parameters, the parameter that varies, and what it counts."""


@pytest.mark.parametrize("view", VIEWS)
def test_view(view: str, served: Served, report, memory) -> None:
    path, parameters, varied, counted = VIEWS[view]
    if path == "api/list":
        begin = time.perf_counter()
        served.complete(**parameters)
        report(f"{view}: complete after {time.perf_counter() - begin:.2f} s")
    limits = {**served.facts["counts"], **served.facts["splits"]}
    random = np.random.default_rng(1)
    seconds, busy = [], []
    for _ in range(REQUESTS):
        if varied:
            parameters = {**parameters, varied: int(random.integers(0, limits[counted] - 64))}
        before, begin = served.processor_seconds, time.perf_counter()
        assert served.ask(path, **parameters) is not None
        seconds.append(time.perf_counter() - begin)
        busy.append(served.processor_seconds - before)
    wall, used = (1e3 * np.quantile(times, [0.5, 0.95]) for times in (seconds, busy))
    report(
        f"{view}: p50 {wall[0]:.0f} ms, p95 {wall[1]:.0f} ms, of the processor {used[0]:.0f} and "
        f"{used[1]:.0f} ms; peak {served.peak / 1e6:,.0f} MB"
    )
    assert used[1] < 1e3 * SECONDS
    assert served.peak < memory
