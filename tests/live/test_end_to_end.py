"""Tests of the whole pipeline with a process that writes games.

No test depends on a clock: the writer answers when a file exists, and tests wait for metrics of the pipeline.
"""

from __future__ import annotations

import gc
import pickle
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.batch import BatchOptions
from hexdata.demo.games import make_game
from hexdata.errors import HexdataError
from hexdata.live import Chunk, LiveLoader, LiveOptions, StageOptions, make_pipeline
from hexdata.live.chunk import PLY_STRIDE
from hexdata.live.chunk_source_loader import ChunkSourceLoader
from hexdata.live.files.provider import FilePathProvider
from hexdata.live.pipeline import Pipeline
from hexdata.live.queue import Overflow
from hexdata.live.shuffling_chunk_pool import ShufflingChunkPool
from hexdata.live.stream_shuffler import StreamShuffler
from hexdata.shards.blocks import Block

if TYPE_CHECKING:
    from .conftest import StartWriter

TIMEOUT = 120.0
"""Seconds after which a test gives up. Nothing takes that long."""
GAMES = 10
"""Of each file that the writer writes, unless it is told otherwise."""
BOARD_SIZE = 5
SEED = 1
SETTLE = 0.05
"""Seconds: the writer writes a whole file, or half of one, at once."""

STAGES = (
    "FilePathProvider",
    "ChunkSourceLoader",
    "ShufflingChunkPool",
    "ChunkUnpacker",
    "ShufflingFrameSampler",
    "TensorGenerator",
)


pytestmark = pytest.mark.usefixtures("no_thread_survives")


def options(**more: Any) -> LiveOptions:
    """Return options for small tests: all games are in train, and batches contain position ids."""
    fields = ("position_id", "game_id", "position_in_game", "total_positions", "value", "board")
    small = {"val": 0.0, "test": 0.0, "pool_size": 30, "reservoir": 100, "batch_size": 20, "seed": 3}
    small |= {"batch": BatchOptions(fields=fields), "stages": tuple(map(StageOptions, STAGES))}
    return LiveOptions(**{**small, **more}).with_stage("FilePathProvider", settle=SETTLE)


def start(directory: Path, live: LiveOptions) -> Pipeline:
    """Start a complete pipeline."""
    pipeline = make_pipeline(live, directory)
    pipeline.start()
    return pipeline


def start_pool(directory: Path, pool_size: int = 30, overflow: Overflow = "block", **more: Any) -> Pipeline:
    """Start a pipeline that ends with the pool and delivers game batches."""
    stages = [
        FilePathProvider(directory, settle=SETTLE),
        ChunkSourceLoader(),
        ShufflingChunkPool(seed=3, pool_size=pool_size, **more),
    ]
    pipeline = Pipeline(stages, [(4, "block"), (4, "block"), (2, overflow)])
    pipeline.start()
    return pipeline


def pool_of(pipeline: Pipeline) -> Any:
    return pipeline.stages[2]


def wait_until(pipeline: Pipeline, condition: Callable[[], bool]) -> None:
    """Wait until the metrics meet a condition."""
    end = time.monotonic() + TIMEOUT
    while not pipeline.coordinator.wait_for(lambda: condition() or None, 0.02):
        assert time.monotonic() < end, pipeline.metrics()


def wait_for_games(pipeline: Pipeline, games: int) -> None:
    """Wait until this number of games has entered the pool."""
    wait_until(pipeline, lambda: pool_of(pipeline).metrics()["entered"] >= games)
    assert pool_of(pipeline).metrics()["entered"] == games


def take(pipeline: Pipeline, count: int) -> list[Any]:
    items = [pipeline.take(TIMEOUT) for _ in range(count)]
    assert all(item is not None for item in items), pipeline.metrics()
    return items


def numbers(game_batches: list[Any]) -> list[int]:
    return [chunk.number for game_batch in game_batches for chunk in game_batch]


def in_flight(pipeline: Pipeline) -> int:
    """Return the maximum number of game batches drawn but not taken: those in the queue, and one pending."""
    return pipeline.queues[-1].capacity + 1


def test_the_window_moves_with_the_writer(tmp_path: Path, start_writer: StartWriter) -> None:
    """Once a file is in the pool, all draws are from the newest 30 games, and each is a written game."""
    writer = start_writer(tmp_path, seed=SEED)
    writer.write(4)
    with start_pool(tmp_path) as pipeline:
        for files in range(4, 9):
            wait_for_games(pipeline, files * GAMES)
            take(pipeline, in_flight(pipeline))
            window = range(files * GAMES - 30, files * GAMES)
            assert pool_of(pipeline).window == (window.start, window.stop)
            game_batches = take(pipeline, 60)
            assert set(numbers(game_batches)) == set(window), "two passes and more, and nothing that has left"
            for chunk in game_batches[-1]:
                game = make_game(chunk.number, SEED, BOARD_SIZE)
                assert (chunk.moves.tolist(), chunk.value) == (game.moves.tolist(), float(game.winner))
            writer.write(1)


def test_a_blocking_queue_stops_draws_but_not_new_games(tmp_path: Path, start_writer: StartWriter) -> None:
    """The trainer takes nothing: the pool draws until its queue is full, and its window still moves."""
    writer = start_writer(tmp_path, seed=SEED)
    writer.write(1)
    with start_pool(tmp_path, game_batch_size=5) as pipeline:
        wait_until(pipeline, lambda: len(pipeline.queues[-1]) == 2)
        writer.write(6)
        wait_for_games(pipeline, 70)
        figures = pool_of(pipeline).metrics()
        assert (figures["lower"], figures["upper"], figures["chunks"]) == (40, 70, 30)
        assert pipeline.queues[-1].dropped == 0
        take(pipeline, in_flight(pipeline))
        assert set(numbers(take(pipeline, 20))) == set(range(40, 70))


@pytest.mark.parametrize("overflow", ["drop-new", "keep-newest"])
def test_a_queue_that_drops_keeps_the_oldest_or_the_newest(
    tmp_path: Path, start_writer: StartWriter, overflow: Overflow
) -> None:
    """Games are drawn constantly. The first game batch of the queue is still there or was dropped long
    ago.
    """
    start_writer(tmp_path, seed=SEED).write(3)
    with start_pool(tmp_path, game_batch_size=1, overflow=overflow, passes=20) as pipeline:
        wait_until(pipeline, lambda: pipeline.queues[-1].dropped >= 300)
        with pipeline.coordinator.paused():
            held = numbers(pipeline.queues[-1].contents())
            drawn = int(pool_of(pipeline).metrics()["draws"]) - len(pool_of(pipeline).workers[0].pending)
        queue = pipeline.queues[-1]
        assert len(held) == queue.capacity
        assert queue.accepted - (queue.dropped if overflow == "keep-newest" else 0) == len(held)
    fixed = StreamShuffler(3)
    fixed.extend(30)
    order = [int(fixed.draw(1)[0]) for _ in range(drawn)]
    assert held == (order[:2] if overflow == "drop-new" else order[-2:])


def test_a_slow_trainer_receives_new_games(tmp_path: Path, start_writer: StartWriter) -> None:
    """The trainer pauses until the window contains only other games; soon all batches are from these."""
    writer = start_writer(tmp_path, seed=SEED)
    writer.write(3)
    with start(tmp_path, options()) as pipeline:
        first = take(pipeline, 1)[0]
        assert set(first["game_id"]) <= set(range(30))
        writer.write(5)
        wait_for_games(pipeline, 80)
        assert all(len(queue) <= queue.capacity for queue in pipeline.queues)
        found = np.concatenate([batch["game_id"] for batch in take(pipeline, 600)])
        old = np.flatnonzero(found < 50)
        assert set(found[-2000:]) == set(range(50, 80))
        assert old[-1] < 10_000, "a reservoir of 100 and full queues hold the old for so long at most"


def test_positions_are_those_of_the_games_written(tmp_path: Path, start_writer: StartWriter) -> None:
    """Compares boards, values and lengths in batches with the generated games."""
    start_writer(tmp_path, seed=SEED).write(3)
    games = [make_game(number, SEED, BOARD_SIZE) for number in range(30)]
    with start(tmp_path, options()) as pipeline:
        for batch in take(pipeline, 40):
            assert (batch["position_id"] == batch["game_id"] * PLY_STRIDE + batch["position_in_game"]).all()
            for row, (number, ply) in enumerate(
                zip(batch["game_id"].tolist(), batch["position_in_game"].tolist(), strict=True)
            ):
                game = games[number]
                stones = np.zeros((2, BOARD_SIZE * BOARD_SIZE), np.float32)
                stones[0, game.moves[:ply:2]] = 1
                stones[1, game.moves[1:ply:2]] = 1
                assert (batch["board"][row].reshape(2, -1) == stones).all()
                assert batch["value"][row] == game.winner
                assert batch["total_positions"][row] == len(game.moves) + 1


# Killed writers and deleted files.


def test_a_writer_killed_before_its_rename_leaves_nothing(tmp_path: Path, start_writer: StartWriter) -> None:
    writer = start_writer(tmp_path, seed=SEED)
    writer.write(2)
    with start_pool(tmp_path) as pipeline:
        wait_for_games(pipeline, 20)
        assert writer.half().startswith(".")
        writer.kill()
        start_writer(tmp_path, seed=SEED, first=20).write(2)
        wait_for_games(pipeline, 40)
        assert pipeline.metrics()["ChunkSourceLoader"].get("bad_files", 0) == 0
        assert pipeline.metrics()["FilePathProvider"]["files"] == 4


def test_complete_games_of_a_killed_writers_file_are_used(tmp_path: Path, start_writer: StartWriter) -> None:
    """Five and a half games: the half one has no winner and is rejected; the next writer's games are read."""
    writer = start_writer(tmp_path, seed=SEED, in_place=True)
    writer.write(1)
    with start_pool(tmp_path) as pipeline:
        wait_for_games(pipeline, 10)
        assert writer.half() == "games-00000010.trmph"
        writer.kill()
        wait_for_games(pipeline, 15)
        start_writer(tmp_path, seed=SEED, in_place=True, first=20).write(1)
        wait_for_games(pipeline, 25)
        counts = pipeline.metrics()["ChunkSourceLoader"]
        assert (counts["files"], counts.get("bad_files", 0)) == (3, 0)
        written = [
            make_game(number, SEED, BOARD_SIZE).moves.tolist() for number in (*range(15), *range(20, 30))
        ]
        take(pipeline, in_flight(pipeline))
        found = {
            chunk.number: chunk.moves.tolist() for game_batch in take(pipeline, 4) for chunk in game_batch
        }
        assert [found[number] for number in range(25)] == written


def test_deleted_files_change_nothing(tmp_path: Path, start_writer: StartWriter) -> None:
    """The games of the pool are in memory, and new files are still read."""
    writer = start_writer(tmp_path, seed=SEED)
    names = writer.write(2)
    with start_pool(tmp_path) as pipeline:
        wait_for_games(pipeline, 20)
        for name in names:
            (tmp_path / name).unlink()
        take(pipeline, in_flight(pipeline))
        assert set(numbers(take(pipeline, 4))) == set(range(20))
        names = writer.write(1)
        wait_for_games(pipeline, 30)
        take(pipeline, in_flight(pipeline))
        assert set(numbers(take(pipeline, 4))) == set(range(30))


def test_a_killed_writer_can_be_continued_by_another(tmp_path: Path, start_writer: StartWriter) -> None:
    """At 600 games per second: every file with its final name is read once, and no other file."""
    writer = start_writer(tmp_path, seed=SEED, rate=600)
    writer.run()
    with start_pool(tmp_path) as pipeline:
        for _ in range(30):
            writer.answer()
            take(pipeline, 1)
        writer.kill()
        renamed = len(list(tmp_path.glob("*.trmph")))
        assert renamed >= 30
        other = start_writer(tmp_path, seed=SEED, rate=600, first=1_000_000)
        other.write(3)
        wait_for_games(pipeline, GAMES * (renamed + 3))
        assert pipeline.metrics()["FilePathProvider"]["files"] == renamed + 3


# Shutdown.


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_a_pipeline_closed_in_the_middle_ends(tmp_path: Path, start_writer: StartWriter, taken: int) -> None:
    """Before, at and after the first batch, while a writer runs. It cannot be used afterwards."""
    writer = start_writer(tmp_path, seed=SEED, rate=600)
    writer.run()
    with LiveLoader(tmp_path, config=options()) as loader:
        batches = iter(loader)
        first = [next(batches) for _ in range(taken)]
    assert len(first) == taken
    with pytest.raises(HexdataError, match="the loader is closed"):
        next(iter(loader))


def test_closing_ends_a_wait_for_games(tmp_path: Path) -> None:
    """Another thread closes the loader after the first stage has started; the loop ends as with its input."""
    found: list[Any] = []
    with LiveLoader(tmp_path, config=options()) as loader:
        trainer = threading.Thread(target=lambda: found.extend(loader))
        trainer.start()
        end = time.monotonic() + TIMEOUT
        while "FilePathProvider-watch" not in [thread.name for thread in threading.enumerate()]:
            assert time.monotonic() < end
            trainer.join(0.01)
    trainer.join(TIMEOUT)
    assert not trainer.is_alive()
    assert found == []


class BrokenGameError(Exception):
    """Error of the relabelling function below."""


def test_an_error_reaches_the_trainer_while_files_are_written(
    tmp_path: Path, start_writer: StartWriter
) -> None:
    def refuse(chunk: Chunk, block: Block) -> None:
        if chunk.number >= 50:
            raise BrokenGameError(chunk.number)

    relabeller = StageOptions("ChunkRelabeller", {"relabel": refuse})
    live = options()
    live = replace(live, stages=(*live.stages[:3], relabeller, *live.stages[3:]))
    writer = start_writer(tmp_path, seed=SEED)
    writer.write(3)
    with LiveLoader(tmp_path, config=live) as loader:
        batches = iter(loader)
        next(batches)
        writer.write(6)
        with pytest.raises(HexdataError, match=r"games-000000[3-8]0\.trmph: game .* BrokenGame") as caught:
            for _ in batches:
                pass
        assert isinstance(caught.value.__cause__, BrokenGameError)
        with pytest.raises(HexdataError, match="BrokenGame"):
            next(iter(loader))


def test_a_loader_can_resume_while_files_are_written(tmp_path: Path, start_writer: StartWriter) -> None:
    """New files are found, and known files are not read again."""
    writer = start_writer(tmp_path, seed=SEED)
    writer.write(4)
    with LiveLoader(tmp_path, config=options()) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = pickle.dumps(loader.state_dict())
    writer.write(1)
    with LiveLoader(tmp_path, config=options()) as resumed:
        resumed.load_state_dict(pickle.loads(state))
        batches = iter(resumed)
        assert set(next(batches)["game_id"]) <= set(range(10, 40)), "the pending batches are delivered first"
        writer.write(1)
        found: set[int] = set()
        while not found >= set(range(40, 60)):
            found |= set(next(batches)["game_id"])
        assert resumed.metrics()["ShufflingChunkPool"]["entered"] == 60
        assert resumed.metrics()["FilePathProvider"]["files"] == 2, "since it was resumed"


def test_memory_stays_constant(tmp_path: Path, start_writer: StartWriter) -> None:
    """Memory of Python and NumPy: some files fill pool and reservoir, thirty more replace their content."""
    writer = start_writer(tmp_path, seed=SEED, games=100)

    def held(pipeline: Pipeline, files: int) -> int:
        for _ in range(files):
            writer.write(1)
            take(pipeline, 5)
        wait_for_games(pipeline, 100 * (known + files))
        take(pipeline, 200)  # so that no queue contains games that have left the pool
        wait_until(pipeline, lambda: all(len(queue) == queue.capacity for queue in pipeline.queues[2:]))
        with pipeline.coordinator.paused():
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

    known = 1
    writer.write(known)
    tracemalloc.start()
    try:
        with start(tmp_path, options(pool_size=100, reservoir=1000, batch_size=100)) as pipeline:
            before = held(pipeline, 8)
            known += 8
            reservoir = pipeline.metrics()["ShufflingFrameSampler"]["bytes"]
            after = held(pipeline, 30)
            assert pipeline.metrics()["ShufflingFrameSampler"]["bytes"] == reservoir
            assert pool_of(pipeline).metrics()["sources"] <= 2
    finally:
        tracemalloc.stop()
    assert after - before < 200 * 3000, "of 3,000 games not even the moves are left; queues differ by less"
