"""Tests of the pool: draws, window, resuming, and independent queues."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.errors import ConfigError, FormatError
from hexdata.live.chunk import SCANNED, Chunk, ChunkSource, FoundFile
from hexdata.live.pipeline import Pipeline
from hexdata.live.shuffling_chunk_pool import ShufflingChunkPool
from hexdata.live.stage import Stage, Worker
from tests.live import number_stages

TIMEOUT = 60.0


pytestmark = pytest.mark.usefixtures("no_thread_survives")


class Sources(Stage):
    """Emits sources of the given sizes, where None is the end of the first scan; then ends or waits.

    Its ``read`` returns such a source again: file ``name`` in ``folder`` contains the number of its chunks.
    """

    first = True

    def __init__(self, folder: Path, sizes: list[int | None], ends: bool = True) -> None:
        super().__init__()
        self.folder = folder
        self.sizes = sizes
        self.ends = ends
        self.given = 0

    def work(self, worker: Worker) -> None:
        while True:
            self.wait_for(worker, lambda: True if self.ends or self.given < len(self.sizes) else None)
            if self.given == len(self.sizes):
                return
            size, self.given = self.sizes[self.given], self.given + 1
            self.put(worker, [ChunkSource(SCANNED) if size is None else self.make_source(size)])

    def more(self, *sizes: int | None) -> None:
        self.coordinator.change(lambda: self.sizes.extend(sizes))

    def make_source(self, size: int) -> ChunkSource:
        path = self.folder / f"{self.given:03d}"
        path.write_text(str(size))
        return self.read(FoundFile(path, path.name, path.stat().st_size))

    def read(self, file: FoundFile) -> ChunkSource:
        assert file.path is not None
        text = file.path.read_text()
        if not text.isdecimal():
            raise FormatError("no number", path=file.path)
        moves = np.arange(3, dtype=np.uint16)
        chunks = [Chunk(3, file.name, index, bytes(16), moves) for index in range(int(text))]
        return ChunkSource(file, chunks)

    def state(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


Make = Callable[..., Pipeline]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return ``make(sizes, ends=True, capacity=2, **pool)``."""

    def made(sizes: list[int | None], ends: bool = True, capacity: int = 2, **options: Any) -> Pipeline:
        pool = ShufflingChunkPool(**{"seed": 1, "directory": tmp_path, "game_batch_size": 4, **options})
        return Pipeline([Sources(tmp_path, list(sizes), ends), pool], [(3, "block"), (capacity, "block")])

    return made


def pool_of(pipeline: Pipeline) -> ShufflingChunkPool:
    (pool,) = [stage for stage in pipeline.stages if isinstance(stage, ShufflingChunkPool)]
    return pool


def sources_of(pipeline: Pipeline) -> Sources:
    (sources,) = [stage for stage in pipeline.stages if isinstance(stage, Sources)]
    return sources


def take(pipeline: Pipeline) -> list[int]:
    game_batch = pipeline.take(TIMEOUT)
    assert game_batch, "the pool hangs"
    return [chunk.number for chunk in game_batch]


def rest(pipeline: Pipeline) -> list[list[int]]:
    game_batches = []
    while True:
        try:
            game_batches.append(take(pipeline))
        except StopIteration:
            return game_batches


def until(pipeline: Pipeline, condition: Callable[[dict[str, float]], bool]) -> None:
    """Take items until the metrics of the pool meet a condition."""
    for _ in range(100_000):
        if condition(pipeline.metrics()["ShufflingChunkPool"]):
            return
        take(pipeline)
    raise AssertionError("it never comes to that")


def test_the_newest_games_are_drawn_once_per_pass(make: Make) -> None:
    with make([5, 0, 7, 3, 6], pool_size=11, passes=3) as pipeline:
        pipeline.start()
        game_batches = rest(pipeline)
    assert Counter(number for game_batch in game_batches for number in game_batch) == dict.fromkeys(
        range(10, 21), 3
    )
    for index in range(3):
        assert sorted(chain(*game_batches[3 * index : 3 * index + 3])) == list(range(10, 21))
    assert {len(game_batch) for game_batch in game_batches} == {4, 3}


def test_a_number_always_identifies_the_same_game(make: Make) -> None:
    with make([5, 4, 3], pool_size=10, passes=2) as pipeline:
        pipeline.start()
        origins = {}
        while True:
            try:
                game_batch = pipeline.take(TIMEOUT)
            except StopIteration:
                break
            for chunk in game_batch:
                assert origins.setdefault(chunk.number, (chunk.source, chunk.index)) == (
                    chunk.source,
                    chunk.index,
                )
    expected = [(f"{f:03d}", index) for f, size in enumerate([5, 4, 3], start=1) for index in range(size)]
    assert origins == dict(list(enumerate(expected))[2:])


def test_the_same_seed_draws_the_same(make: Make) -> None:
    drawn = []
    for seed in (1, 1, 2):
        with make([20, 20], pool_size=30, passes=2, seed=seed) as pipeline:
            pipeline.start()
            drawn.append(rest(pipeline))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("sizes", [[], [0], [None], [None, 0]])
def test_a_pool_without_games_ends(make: Make, sizes: list[int | None]) -> None:
    with make(sizes) as pipeline:
        pipeline.start()
        assert rest(pipeline) == []


def test_drawing_waits_for_the_first_scan_and_min_chunks(make: Make) -> None:
    with make([6], ends=False, min_chunks=9) as pipeline:
        sources = sources_of(pipeline)
        pipeline.start()
        assert pipeline.take(0.02) is None
        sources.more(None)
        assert pipeline.take(0.02) is None
        sources.more(3)
        assert len(take(pipeline)) == 4


def test_too_few_games_are_drawn_once_the_input_has_ended(make: Make) -> None:
    with make([2], min_chunks=9, passes=2) as pipeline:
        pipeline.start()
        assert sorted(map(sorted, rest(pipeline))) == [[0, 1], [0, 1]]


def test_games_outside_the_window_are_not_drawn(make: Make) -> None:
    with make([8, None], ends=False, pool_size=10, capacity=1) as pipeline:
        pipeline.start()
        take(pipeline)
        pool, sources = pool_of(pipeline), sources_of(pipeline)
        upper = 8
        for more in (3, 1, 7, 12, 2):
            sources.more(more)
            upper += more
            until(pipeline, lambda metrics, upper=upper: metrics["upper"] == upper)
            for _ in range(3):  # in the queue, pending, and being drawn
                take(pipeline)
            lower = max(0, upper - 10)
            assert pool.window == (lower, upper)
            drawn_numbers = {number for _ in range(8) for number in take(pipeline)}
            assert drawn_numbers <= set(range(lower, upper))
            assert len(drawn_numbers) > 5


def test_games_are_received_while_none_are_taken(make: Make) -> None:
    with make([8, None], ends=False, capacity=1) as pipeline:
        pipeline.start()
        take(pipeline)
        sources = sources_of(pipeline)
        sources.more(*[5] * 40)
        number_stages.until(lambda: pool_of(pipeline).window[1] == 208)
        number_stages.until(lambda: len(pipeline.queues[-1]) == 1)


def test_the_metrics_match_the_draws(make: Make) -> None:
    with make([6, 5, 9], pool_size=12, passes=2) as pipeline:
        pipeline.start()
        game_batches = rest(pipeline)
        metrics = pipeline.metrics()["ShufflingChunkPool"]
        notes = pipeline.notes()["ShufflingChunkPool"]
    assert (metrics["chunks"], metrics["lower"], metrics["upper"], metrics["sources"]) == (12, 8, 20, 2)
    assert (metrics["entered"], metrics["evicted"], metrics["passes"]) == (20, 8, 2)
    assert metrics["draws"] == sum(map(len, game_batches)) == 24
    assert (metrics["uses"], metrics["window_uses"]) == (24 / 20, 2.0)
    assert notes == {"newest": "003"}


def test_average_uses_count_games_from_their_arrival(make: Make) -> None:
    with make([6, None], ends=False, pool_size=100, capacity=1) as pipeline:
        pipeline.start()
        drawn: Counter[int] = Counter()
        pool = pool_of(pipeline)
        for more in (4, 0, 7):
            for _ in range(9):
                drawn.update(take(pipeline))
            sources_of(pipeline).more(more)
        while pool.window[1] < 17:
            drawn.update(take(pipeline))
        for _ in range(20):
            drawn.update(take(pipeline))
        with pipeline.coordinator.paused():
            metrics = pool.metrics()
            in_flight = [
                *pipeline.queues[-1].contents(),
                *(game_batch for worker in pool.workers for game_batch in worker.pending),
            ]
        drawn.update(chunk.number for game_batch in in_flight for chunk in game_batch)
    assert metrics["draws"] == sum(drawn.values())
    assert metrics["window_uses"] == pytest.approx(sum(drawn.values()) / 17)


# --- states -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 3])
def test_resuming_after_any_game_batch_continues_identically(make: Make, capacity: int) -> None:
    options: dict[str, Any] = {"pool_size": 11, "passes": 3, "capacity": capacity}
    sizes = [5, 0, 7, 3, 6]
    with make(sizes, **options) as pipeline:
        pipeline.start()
        expected = rest(pipeline)
    for count in range(len(expected) + 1):
        with make(sizes, **options) as pipeline:
            pipeline.start()
            before = [take(pipeline) for _ in range(count)]
            state = pickle.loads(pickle.dumps(pipeline.state()))
        with make(sizes, **options) as other:
            other.load_state(state)
            other.start()
            assert before + rest(other) == expected


def test_the_state_of_the_pool_is_small_and_plain(make: Make) -> None:
    with make([500] * 4, passes=1, game_batch_size=50) as pipeline:
        pipeline.start()
        take(pipeline)
        state = pool_of(pipeline).state()
    assert len(pickle.dumps(state)) < 1000
    plain = (int, str, bytes, bool, list, dict)
    values = [*state.values(), *state["shuffler"].values(), *(x for row in state["sources"] for x in row)]
    assert all(type(value) in plain for value in values)


def test_missing_or_changed_files_of_a_state_are_left_out(make: Make, tmp_path: Path) -> None:
    sizes: list[int | None] = [4, 5, 6, 7]
    with make(sizes, passes=4) as pipeline:
        pipeline.start()
        until(pipeline, lambda metrics: metrics["draws"] >= 12)
        state = pipeline.state()
        after = rest(pipeline)
    (tmp_path / "002").unlink()
    (tmp_path / "003").write_text("not a number")
    with make(sizes, passes=4) as other:
        other.load_state(state)
        other.start()
        resumed = rest(other)
        metrics, notes = other.metrics()["ShufflingChunkPool"], other.notes()["ShufflingChunkPool"]
    existing = {*range(4), *range(15, 22)}
    assert [n for n in chain(*resumed) if n in existing] == [n for n in chain(*after) if n in existing]
    kept = state["ShufflingChunkPool"]  # it contains game batches drawn before
    in_flight = len(kept["queue"]) + sum(map(len, kept["hands"]))
    assert resumed[:in_flight] == after[:in_flight]
    assert set(chain(*resumed[in_flight:])) == existing
    assert metrics["missing"] == 2
    assert [name for name, _ in notes["missing"]] == ["002", "003"]
    assert metrics["chunks"] == len(existing)


def test_a_state_whose_files_are_all_missing_continues_with_new_files(make: Make, tmp_path: Path) -> None:
    with make([4, 5, None], ends=False) as pipeline:
        pipeline.start()
        take(pipeline)
        state = pipeline.state()
    for path in tmp_path.iterdir():
        path.unlink()
    with make([4, 5, None], ends=False) as other:
        other.load_state(state)
        assert pool_of(other).window == (9, 9), "no draw is spent on numbers that nothing can come of"
        other.start()
        before = state["ShufflingChunkPool"]
        for game_batch in [*before["queue"], *chain(*before["hands"])]:
            assert take(other) == [chunk.number for chunk in game_batch]
        assert other.take(0.02) is None
        with other.coordinator.paused():
            pass  # a waiting thread can be paused
        sources_of(other).more(3)
        assert {n for _ in range(9) for n in take(other)} == set(range(9, 12))


def test_a_state_whose_files_are_all_missing_ends_without_input(make: Make, tmp_path: Path) -> None:
    with make([4, 5], passes=9) as pipeline:
        pipeline.start()
        take(pipeline)
        state = pipeline.state()
    for path in tmp_path.iterdir():
        path.unlink()
    with make([4, 5], passes=9) as other:
        other.load_state(state)
        other.start()
        before = state["ShufflingChunkPool"]
        assert len(rest(other)) == len(before["queue"]) + sum(map(len, before["hands"]))


def test_a_file_of_equal_size_with_other_games_is_left_out(make: Make, tmp_path: Path) -> None:
    with make([4, 5], passes=2) as pipeline:
        pipeline.start()
        take(pipeline)
        state = pipeline.state()
    (tmp_path / "002").write_text("6")
    with make([4, 5], passes=2) as other:
        other.load_state(state)
        assert other.notes()["ShufflingChunkPool"]["missing"][0][0] == "002"


def test_a_resumed_pool_continues_its_numbers_with_new_files(make: Make) -> None:
    with make([4, 5, None], ends=False, pool_size=8) as pipeline:
        pipeline.start()
        take(pipeline)
        state = pipeline.state()
    with make([4, 5, None], ends=False, pool_size=8) as other:
        other.load_state(state)
        other.start()
        sources_of(other).more(3)
        until(other, lambda metrics: metrics["upper"] == 12)
        assert pool_of(other).window == (4, 12)
        for _ in range(4):
            take(other)
        assert {n for _ in range(20) for n in take(other)} == set(range(4, 12))


def test_a_state_needs_a_stage_that_reads_its_files(make: Make) -> None:
    with make([4], passes=2) as pipeline:
        pipeline.start()
        take(pipeline)
        state = pipeline.state()
    with pytest.raises(ConfigError, match="files of a state cannot be read again"):
        make([4], directory=None).load_state(state)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pool_size": 0},
        {"game_batch_size": 0},
        {"min_chunks": 0},
        {"min_chunks": 5, "pool_size": 4},
        {"passes": 0},
        {"seed": "1"},
    ],
)
def test_invalid_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ShufflingChunkPool(**{"seed": 1, **wrong})


# --- reuse and growth ---------------------------------------------------------------------------------


def test_games_are_not_drawn_more_often_than_reuse_allows(make: Make) -> None:
    with make([6, None], ends=False, reuse=1.5, capacity=1) as pipeline:
        sources = sources_of(pipeline)
        pipeline.start()
        drawn = [take(pipeline) for _ in range(3)]
        assert sum(map(len, drawn)) == 9
        assert pipeline.take(0.05) is None
        metrics = pipeline.metrics()["ShufflingChunkPool"]
        assert (metrics["draws"], metrics["uses"], metrics["allowed_draws"]) == (9, 1.5, 0)
        sources.more(1)
        drawn.append(take(pipeline))
        assert len(drawn[-1]) == 1
        assert pipeline.take(0.05) is None
        sources.more(5)
        until(pipeline, lambda metrics: metrics["draws"] == 18)
        assert pipeline.metrics()["ShufflingChunkPool"]["allowed_draws"] == 0


def test_a_pool_ends_with_the_last_allowed_draw(make: Make) -> None:
    with make([5, 3], pool_size=4, reuse=2, passes=100) as pipeline:
        pipeline.start()
        drawn = Counter(chain(*rest(pipeline)))
    assert drawn == dict.fromkeys(range(4, 8), 4), "8 games have entered, 4 are in the window"


def test_reuse_holds_across_states(make: Make) -> None:
    options: dict[str, Any] = {"reuse": 3, "pool_size": 11}
    with make([5, 7, 3], **options) as pipeline:
        pipeline.start()
        expected = rest(pipeline)
    assert sum(map(len, expected)) == 45
    for count in (1, 6, len(expected) - 1):
        with make([5, 7, 3], **options) as pipeline:
            pipeline.start()
            before = [take(pipeline) for _ in range(count)]
            state = pipeline.state()
        with make([5, 7, 3], **options) as other:
            other.load_state(state)
            other.start()
            assert before + rest(other) == expected


def test_the_window_grows_by_the_formula_of_katago(make: Make) -> None:
    with make([10] * 50 + [None], ends=False, pool_size=60, window_start=20) as pipeline:
        pool = pool_of(pipeline)
        pipeline.start()
        number_stages.until(lambda: pool.window[1] == 500)
        lower, upper = pool.window
    grown = 20 * (1 + 0.4 * ((500 / 20) ** 0.75 - 1) / 0.75)
    assert upper - lower == min(60, int(grown)) == 60
    for entered, expected in [
        (1, 20),
        (20, 20),
        (40, int(20 * (1 + 0.4 * (2**0.75 - 1) / 0.75))),
        (10**9, 60),
    ]:
        assert pool._window_size(entered) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reuse": 0}, "reuse cannot be used; found 0; expected a number above 0"),
        ({"reuse": float("nan")}, "reuse cannot be used"),
        ({"reuse": True}, "reuse cannot be used"),
        ({"reuse": "8"}, "reuse cannot be used"),
        ({"window_exponent": 1.5}, "window_exponent cannot be used; found 1.5; expected .* at most 1"),
        ({"window_slope": 0}, "window_slope cannot be used"),
        ({"window_start": 0}, "window_start cannot be used"),
        ({"window_start": 12, "pool_size": 11}, "window_start exceeds pool_size"),
    ],
)
def test_invalid_reuse_and_growth_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShufflingChunkPool(seed=1, **options)
