"""Runs of the first stages of a live pipeline: with threads, or step by step with a controlled clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hexdata.live.chunk import Chunk, FoundFile
from hexdata.live.chunk_source_loader import ChunkSourceLoader
from hexdata.live.files.provider import FilePathProvider
from hexdata.live.pipeline import Pipeline
from hexdata.live.shuffling_chunk_pool import ShufflingChunkPool
from hexdata.live.stage import Stage
from tests.demo_games import demo_games
from tests.live.number_stages import TIMEOUT


def watching(folder: Path, **options: Any) -> Pipeline:
    """Return a pipeline, not started, that scans again only when the system reports a change."""
    options = {"settle": 0.05, "rescan": 1000.0, **options}
    return Pipeline([FilePathProvider(folder, **options)], [(2, "block")])


def take(pipeline: Pipeline) -> FoundFile:
    """Return the next file, or the marker for the end of the first scan."""
    found = pipeline.take(TIMEOUT)
    assert found is not None, "no file was found"
    return found


def names(pipeline: Pipeline, count: int) -> list[str]:
    """Return the names of the next ``count`` files, in order."""
    return [take(pipeline).name for _ in range(count)]


class Clock:
    """Replacement of the ``time`` module that tests advance."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("hexdata.live.files.provider.time", clock)
    return clock


class Steps:
    """The first two stages without their threads, with a settle of one second."""

    def __init__(self, folder: Path, clock: Clock, **options: Any) -> None:
        self.folder = folder
        self.clock = clock
        self.provider = FilePathProvider(folder, settle=1.0)
        self.loader = ChunkSourceLoader(**options)
        stages: list[Stage] = [self.provider, self.loader]
        self.pipeline = Pipeline(stages, [(1000, "block"), (1000, "block")])
        self.games: list[Chunk] = []
        """All games read so far."""

    def find(self, seconds: float = 1e9) -> list[FoundFile]:
        """Scan the directory, advance the clock, and return the files that are complete."""
        self.provider._add_candidates(self.provider._names_below(self.folder), compare=True)
        self.clock.now += seconds
        self.provider._deliver_complete(self.provider.workers[0])
        queue = self.pipeline.queues[0]
        return [file for _ in range(len(queue)) if (file := queue.take(0)) is not None]

    def read(self, files: list[FoundFile]) -> list[Chunk]:
        """Read files, report how far they were read, and return their games."""
        sources = [source for file in files for source in self.loader.process(file)]
        self.provider._process_reports()
        new = [chunk for source in sources for chunk in source.chunks]
        self.games += new
        return new

    def step(self, seconds: float = 1e9) -> list[Chunk]:
        return self.read(self.find(seconds))

    def counts(self) -> dict[str, int]:
        return {**self.provider.counts, **self.loader.counts}


def text_of(count: int, *, end: str = "\n", seed: int = 1) -> bytes:
    """Return TRMPH lines of games on a board of size 5, with a comment and an invalid line."""
    games = demo_games(count, seed, 5)
    lines = []
    for number, game in enumerate(games):
        moves = "".join(f"{'abcde'[cell % 5]}{cell // 5 + 1}" for cell in game.moves.tolist())
        lines += ["# a comment", "#5,a1a1 b"] if number == 1 else []
        lines.append(f"#5,{moves}" + ("" if number % 3 == 2 else f" {'br'[game.winner]}"))
    return ("\n".join(lines) + end).encode()


def start_pool(folder: Path) -> Pipeline:
    """Return a pipeline that emits game batches, not started."""
    stages = [
        FilePathProvider(folder, settle=0.05, rescan=0.2, pool_size=1000),
        ChunkSourceLoader(),
        ShufflingChunkPool(seed=3, pool_size=1000, game_batch_size=5, directory=folder),
    ]
    return Pipeline(stages, [(4, "block"), (4, "block"), (2, "block")])


def wait_until(pipeline: Pipeline, condition: Callable[[dict[str, dict[str, float]]], bool]) -> None:
    def attempt() -> bool | None:
        return condition(pipeline.metrics()) or None

    for _ in range(int(TIMEOUT / 0.02)):
        if pipeline.coordinator.wait_for(attempt, 0.02):
            return
    raise AssertionError(pipeline.metrics())
