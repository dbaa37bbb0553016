"""The pool: draws, window, reuse, and resuming with the files of a state."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.errors import FormatError
from hexdata.live.chunk import SCANNED, Chunk, ChunkSource
from hexdata.live.pipeline import Pipeline
from hexdata.live.shuffling_chunk_pool import ShufflingChunkPool
from hexdata.live.state import decode_state
from tests.live.made import TIMEOUT, Given, piped, rest, until

pytestmark = pytest.mark.usefixtures("no_thread_survives")


class Sources(Given):
    """Emits sources of the given sizes, where None is the end of the first scan; then ends or waits.

    Each is a file that contains the number of its games, from which ``read`` makes the source again.
    """

    def __init__(self, folder: Path, sizes: list[int | None], ends: bool) -> None:
        super().__init__([], ends=ends)
        self.folder = folder
        self.add(*sizes)

    def add(self, *sizes: int | None) -> None:
        for size in sizes:
            name = f"{len(self.items) + 1:03d}"
            (self.folder / name).write_text(str(size))
            self.items = [*self.items, SCANNED if size is None else self.read(name)]
        self.coordinator.wake()

    def read(self, name: str) -> ChunkSource:
        text = (self.folder / name).read_text()
        if not text.isdecimal():
            raise FormatError("no number", path=name)
        moves = np.arange(3, dtype=np.uint16)
        return ChunkSource(name, [Chunk(3, name, i, bytes(16), moves) for i in range(int(text))])


Make = Callable[..., Pipeline]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return ``make(sizes, ends=True, capacity=2, **pool)``."""

    def made(sizes: list[int | None], ends: bool = True, capacity: int = 2, **options: Any) -> Pipeline:
        pool = ShufflingChunkPool(**{"seed": 1, "game_batch_size": 4, **options})
        return piped(Sources(tmp_path, sizes, ends), pool, capacity=capacity)

    return made


def numbers(batch: Any) -> list[int]:
    return [chunk.number for chunk in batch]


def take(pipeline: Pipeline) -> list[int]:
    batch = pipeline.take(TIMEOUT)
    assert batch, "the pool hangs"
    return numbers(batch)


def add(pipeline: Pipeline, *sizes: int | None) -> None:
    pipeline.stages[0].add(*sizes)  # type: ignore[attr-defined]


def pool(pipeline: Pipeline) -> dict[str, float]:
    return pipeline.metrics()["ShufflingChunkPool"]


def test_the_newest_games_are_drawn_once_per_pass(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), make([5, 0, 7, 3, 6], pool_size=11, passes=3) as pipeline:
        pipeline.start()
        batches = [numbers(batch) for batch in rest(pipeline)]
        found = pool(pipeline)
        assert pipeline.notes()["ShufflingChunkPool"] == {"newest": "005"}
    assert [sorted(chain(*batches[i : i + 3])) for i in (0, 3, 6)] == [list(range(10, 21))] * 3
    assert {len(batch) for batch in batches} == {4, 3}
    assert len(caplog.records) == 1, "the reset of the exhausted shuffler"
    names = ("chunks", "sources", "entered", "evicted", "draws", "passes", "uses")
    assert [found[name] for name in names] == [11, 3, 21, 10, 33, 3, 33 / 21]


def test_drawing_waits_for_the_first_scan_and_min_chunks(make: Make) -> None:
    with make([6], ends=False, min_chunks=9) as pipeline:
        pipeline.start()
        assert pipeline.take(0.02) is None
        add(pipeline, None)
        until(lambda: pool(pipeline)["chunks"])
        assert pipeline.take(0.02) is None
        assert "6 games and waits for min_chunks = 9" in str(pipeline.wait_reason())
        add(pipeline, 3)
        assert len(take(pipeline)) == 4


def test_missing_or_changed_files_of_a_state_are_left_out(make: Make, tmp_path: Path) -> None:
    with make([4, 5, 6, 7], passes=4) as pipeline:
        pipeline.start()
        drawn = 0
        while drawn < 12:
            drawn += len(take(pipeline))
        state = pipeline.state()
        after = [numbers(batch) for batch in rest(pipeline)]
    with make([4, 5, 6, 7], passes=4) as other:
        (tmp_path / "002").unlink()
        (tmp_path / "003").write_text("not a number")
        other.load_state(state)
        other.start()
        resumed = [numbers(batch) for batch in rest(other)]
        found, notes = pool(other), other.notes()["ShufflingChunkPool"]
    existing = {*range(4), *range(15, 22)}
    assert [n for n in chain(*resumed) if n in existing] == [n for n in chain(*after) if n in existing]
    in_flight = len(decode_state(state)["stages"]["ShufflingChunkPool"]["items"])  # drawn before
    assert resumed[:in_flight] == after[:in_flight]
    assert set(chain(*resumed[in_flight:])) == existing
    assert (found["missing"], found["chunks"]) == (2, len(existing))
    assert [name for name, _ in notes["missing"]] == ["002", "003"]


def test_games_are_not_drawn_more_often_than_reuse_allows(make: Make) -> None:
    with make([6, None], ends=False, reuse=1.5, capacity=1) as pipeline:
        pipeline.start()
        assert sum(len(take(pipeline)) for _ in range(3)) == 9
        assert pipeline.take(0.05) is None
        assert [pool(pipeline)[name] for name in ("draws", "uses", "allowed_draws")] == [9, 1.5, 0]
        assert "drawn 1.50 times (reuse = 1.5)" in str(pipeline.wait_reason())
        add(pipeline, 1)
        assert len(take(pipeline)) == 1
        assert pipeline.take(0.05) is None
        add(pipeline, 5)
        assert sum(len(take(pipeline)) for _ in range(2)) == 8
        assert (pool(pipeline)["draws"], pool(pipeline)["allowed_draws"]) == (18, 0)
    with make([5, 3], pool_size=4, reuse=2, passes=100) as pipeline:
        pipeline.start()
        drawn = Counter(chain(*map(numbers, rest(pipeline))))
    assert drawn == dict.fromkeys(range(4, 8), 4), "8 games have entered, 4 are in the window"
