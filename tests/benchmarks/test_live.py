"""The live pipeline before a writer: what it delivers, how soon, and what memory it takes.

Boards of 13 x 13, a pool of 20,000 games and a reservoir of a million positions, as configs/live.toml has it.
Batches are those of training: 1,024 positions, float32 boards (2, 13, 13), policies (169,), values.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from hexdata.batch import BatchOptions, make_batch
from hexdata.live import LiveOptions, load_live_config, make_pipeline
from hexdata.live.pipeline import Pipeline

ROOT = Path(__file__).parents[2]
WRITER = ROOT / "tests" / "live" / "game_writer.py"
N = 13
GAMES = 20_000
POSITIONS_PER_GAME = 68
RESERVOIR = 1_000_000
RATE = 300
"""Games a second that the writer writes, ten a file."""
SECONDS = float(os.environ.get("HEXDATA_BENCH_SECONDS", 60))
"""That the writer writes."""
ROUNDS = 5
ROUND_BATCHES = 400

LEAST_RATE = 100_000
"""Positions a second; the aim is 200,000 on two cores with nothing else to do."""
MOST_SECONDS_TO_POOL = 1.0
MOST_SECONDS_TO_FIRST = 2.0
MOST_RESERVOIR = 120_000_000
MOST_GROWTH = 64_000_000
"""Bytes of resident memory from a third of the time to the end."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, write_games: Callable[[Path, int], Path]) -> Path:
    """A directory with games enough for the pool."""
    return write_games(tmp_path_factory.mktemp("live") / "games", GAMES * POSITIONS_PER_GAME)


@pytest.fixture
def options() -> LiveOptions:
    """Those of configs/live.toml, with a pool that is full from the start."""
    live = load_live_config(ROOT / "configs" / "live.toml")
    assert (live.reservoir, live.batch, live.batch_size) == (RESERVOIR, BatchOptions(), 1024)
    return LiveOptions(pool_size=GAMES - 2000, reservoir=RESERVOIR, stages=live.stages)


class Trainer:
    """Takes batches, and knows how long all took before the first one: seconds from the start."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._begun = time.perf_counter()
        self.scanned = self.filled = 0.0
        pipeline.start()
        watching = threading.Thread(target=self._watch)
        watching.start()
        self.take()
        self.first = self._now()
        watching.join()

    def take(self) -> int:
        """Take a batch; its positions."""
        batch = self.pipeline.take(120)
        assert batch is not None, self.pipeline.metrics()
        return len(batch["value"])

    def _watch(self) -> None:
        """Note when the pool began to draw, and when the reservoir was full."""
        pool, sampler = self.pipeline.stages[2], self.pipeline.stages[-2]
        while not pool.metrics()["draws"]:
            time.sleep(0.005)
        self.scanned = self._now()
        while sampler.metrics()["held"] < RESERVOIR:
            time.sleep(0.005)
        self.filled = self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._begun


def rate(take: Callable[[], int], batches: int) -> float:
    start = time.perf_counter()
    positions = sum(take() for _ in range(batches))
    return positions / (time.perf_counter() - start)


def plain_batches(trainer: Trainer) -> Callable[[], int]:
    """Return what makes the same batches out of positions in memory, with nothing around it: the rival."""
    reservoir = trainer.pipeline.stages[-2].reservoir  # type: ignore[attr-defined]
    fields = reservoir.state()["rows"]
    numbers = itertools.count()

    def take() -> int:
        number = next(numbers)
        start = number * 1024 % (RESERVOIR - 1024)
        block = {name: array[start : start + 1024] for name, array in fields.items()}
        return len(make_batch(block, BatchOptions(), N, seed=0, epoch=number)["value"])

    return take


def test_delivery(directory: Path, options: LiveOptions, report: Callable[[str], None]) -> None:
    """Nothing is written meanwhile. The rival runs before each round, on the same cores."""
    with make_pipeline(options, directory) as pipeline:
        trainer = Trainer(pipeline)
        with pipeline.coordinator.paused():
            plain = plain_batches(trainer)
        pairs = []
        for _ in range(ROUNDS):
            with pipeline.coordinator.paused():
                rival = rate(plain, ROUND_BATCHES)
            pairs.append((rate(trainer.take, ROUND_BATCHES), rival))
        metrics = pipeline.metrics()
        start = time.perf_counter()
        state = pipeline.state()
        paused = time.perf_counter() - start
        held = state["ShufflingFrameSampler"]["stage"]["rows"]
        assert sum(array.nbytes for array in held.values()) < MOST_RESERVOIR
    reservoir = metrics["ShufflingFrameSampler"]["bytes"]
    ours, rival = median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
    report(f"{ours:,.0f} positions/s; making batches alone {rival:,.0f}: {ours / rival:.3f} x")
    filling = trainer.filled - trainer.scanned
    report(
        f"first batch {trainer.first:.2f} s after the start: {trainer.scanned:.2f} s until all games were in "
        f"the pool, {filling:.2f} s until the reservoir was full; a state took {paused:.2f} s"
    )
    report(f"reservoir: {reservoir / 1e6:.1f} MB for {RESERVOIR:,} positions")
    for name, figures in metrics.items():
        report(f"{name:24} {figures['busy_seconds']:7.2f} s at work")
    assert ours >= LEAST_RATE
    assert trainer.first - trainer.filled <= MOST_SECONDS_TO_FIRST
    assert reservoir <= MOST_RESERVOIR


@pytest.fixture
def growing(tmp_path: Path, directory: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A directory with the same games, and a process that is ready to write more into it."""
    folder = tmp_path / "games"
    folder.mkdir()
    for path in directory.iterdir():
        (folder / path.name).hardlink_to(path)
    command = [sys.executable, WRITER, folder, "--board-size", N, "--rate", RATE, "--first", 10_000_000]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(list(map(str, command)), text=True, **pipes) as process:
        yield folder, process
        process.kill()


class Latencies(threading.Thread):
    """Measures, file by file, how long after its rename its games are in the pool."""

    def __init__(self, pool: Any, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self._pool = pool
        self._process = process
        self.seconds: list[float] = []

    def run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            start = time.perf_counter()
            while self._pool.notes()["newest"] < line.strip():
                time.sleep(0.005)
            self.seconds.append(time.perf_counter() - start)


def test_while_games_are_written(
    growing: tuple[Path, subprocess.Popen[str]], options: LiveOptions, report: Callable[[str], None]
) -> None:
    """A trainer that takes all it can, and a writer on the same cores."""
    folder, process = growing
    resident: list[int] = []
    positions = 0
    with make_pipeline(options, folder) as pipeline:
        trainer = Trainer(pipeline)
        pool = pipeline.stages[2]
        latencies = Latencies(pool, process)
        latencies.start()
        assert process.stdin is not None
        process.stdin.write("run\n")
        process.stdin.flush()
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < SECONDS:
            positions += trainer.take()
            if elapsed >= len(resident):
                resident.append(psutil.Process().memory_info().rss)
        process.stdin.close()
        latencies.join()
        figures, sampler = pool.metrics(), pipeline.metrics()["ShufflingFrameSampler"]
    written = 10 * len(latencies.seconds)
    growth = resident[-1] - resident[len(resident) // 3]
    report(f"{positions / SECONDS:,.0f} positions/s beside {written / SECONDS:,.0f} games/s written")
    slowest = sorted(latencies.seconds)[int(0.99 * len(latencies.seconds))]
    report(
        f"from rename to pool: median {median(latencies.seconds):.3f} s, 99 % within {slowest:.3f} s, "
        f"longest {max(latencies.seconds):.3f} s, of {len(latencies.seconds)} files"
    )
    report(
        f"pool [{figures['lower']:,.0f}, {figures['upper']:,.0f}), each game used {figures['uses']:.2f} times"
    )
    report(
        f"resident {resident[0] / 1e6:.0f} MB at the start, {resident[-1] / 1e6:.0f} MB at the end, "
        f"{growth / 1e6:+.0f} MB in the last two thirds; reservoir {sampler['bytes'] / 1e6:.1f} MB"
    )
    assert figures["lower"] > 0, "the window has moved"
    assert slowest <= MOST_SECONDS_TO_POOL
    assert growth <= MOST_GROWTH
    assert sampler["bytes"] <= MOST_RESERVOIR
