"""What every benchmark uses: games out of the demo as files and stores, a timed pair, a watched process.

Rates are compared with a rival's in the same run, turn about, so that a loaded machine slows both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from hexdata.demo.games import make_games
from hexdata.formats.trmph import write_trmph

N = 13
POSITIONS = int(os.environ.get("HEXDATA_BENCH_POSITIONS", 2_000_000))
"""Of the store that is shuffled. A demo game has some 69."""
POSITIONS_PER_GAME = 68
GAMES_PER_FILE = 4_000
MEMORY = 1_000_000_000
SAMPLE_SECONDS = 0.02
ROOT = Path(__file__).parents[2]

Report = Callable[[str], None]
Versus = Callable[..., float]
Watch = Callable[..., "Watched"]
WriteGames = Callable[[Path, int], Path]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Return ``report(line)``: prints a figure, whatever pytest captures."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\n    {line}")

    return show


@pytest.fixture
def versus(benchmark: Any, report: Report) -> Versus:
    """Return ``versus(ours, rival, units, rounds=5)``: the median over the rounds of ours / rival, as rates.

    Before each timed call of ``ours`` the rival is called and timed, over ``rival_units`` where it does not
    do the same amount. Both rates, in units a second, and the ratio are printed and kept in the
    benchmark's ``extra_info``.
    """

    def compare(
        ours: Callable[[], object],
        rival: Callable[[], object],
        units: int,
        rounds: int = 5,
        rival_units: int | None = None,
    ) -> float:
        rival_units = rival_units or units
        rival_seconds: list[float] = []

        def run_rival() -> None:
            start = time.perf_counter()
            rival()
            rival_seconds.append(time.perf_counter() - start)

        benchmark.pedantic(ours, setup=run_rival, rounds=rounds)
        seconds = benchmark.stats.stats.data
        pairs = zip(rival_seconds, seconds, strict=True)
        ratio: float = median(theirs / rival_units / (own / units) for theirs, own in pairs)
        rates = {
            "ours": units / median(seconds),
            "rival": rival_units / median(rival_seconds),
            "ratio": ratio,
        }
        benchmark.extra_info.update(rates, units=units)
        report(
            f"{rates['ours']:,.0f} positions/s, the rival {rates['rival']:,.0f}: {ratio:.2f} x "
            f"(median of {rounds} pairs, {units:,} positions)"
        )
        return ratio

    return compare


@dataclass(frozen=True)
class Watched:
    """A process that has ended: how long it took, and its peak resident memory with its children's."""

    seconds: float
    peak: int


@pytest.fixture(scope="session")
def watch() -> Watch:
    """Return ``watch(*arguments)``: runs Python with these, and says how long it took and its peak memory."""
    return _watch


def _watch(*arguments: str | Path) -> Watched:
    """Sum the resident memory of a process and its children again and again.

    Pages that processes share are counted in each, so the peak is an upper bound.
    """
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *map(str, arguments)], cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = 0
    while True:
        peak = max(peak, _resident(process.pid))
        try:
            status = process.wait(SAMPLE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        assert status == 0
        return Watched(time.perf_counter() - start, peak)


def _resident(pid: int) -> int:
    try:
        parent = psutil.Process(pid)
        processes = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(map(_own_resident, processes))


def _own_resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


@pytest.fixture(scope="session")
def write_games() -> WriteGames:
    """Return ``write_games(folder, positions)``: writes TRMPH files of about so many, returns the folder."""
    return _write_games


def _write_games(folder: Path, positions: int) -> Path:
    folder.mkdir()
    games = -(-positions // POSITIONS_PER_GAME)
    for start in range(0, games, GAMES_PER_FILE):
        count = min(GAMES_PER_FILE, games - start)
        write_trmph(folder / f"games-{start:07d}.trmph", make_games(count, 1, N, start), N)
    return folder


@pytest.fixture(scope="session")
def memory() -> int:
    """The budget of every stage, all its processes together, in bytes."""
    return MEMORY


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of some ``POSITIONS`` positions, converted. Read only: copy it."""
    folder = tmp_path_factory.mktemp("store")
    games = _write_games(folder / "games", POSITIONS)
    _watch("-m", "hexdata", "convert", games, folder / "store", "--workers", "1")
    return folder / "store"
