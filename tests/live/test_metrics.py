"""What is shown of a pipeline: rates between two moments, drops, busy threads; and theory of pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.live.expected_pairs import expected_pairs

from hexdata.errors import ConfigError
from hexdata.live.metrics import stage_metrics
from hexdata.live.pipeline import Pipeline
from hexdata.live.stage import Stage, Transform, Worker


class Numbers(Stage):
    """Puts 0 … count - 1."""

    first = True

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def work(self, worker: Worker) -> None:
        for number in range(self._count):
            self.put(worker, [number])


class OddOnes(Transform):
    """Lets odd numbers through, and counts the others."""

    def process(self, item: Any) -> list[int]:
        if item % 2 == 0:
            self.count("even")
            return []
        return [item]


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    """20 numbers, the ten odd ones of which get through; there is room for 3 of them."""
    with Pipeline([Numbers(20), OddOnes(threads=2)], [(4, "block"), (3, "drop-new")]) as made:
        yield made


def test_rates_and_drops_are_those_of_the_queues(pipeline: Pipeline) -> None:
    start = pipeline.metrics()
    pipeline.start()
    assert [stage.join() for stage in pipeline.stages] == [[], []]
    numbers, odd = stage_metrics(start, pipeline.metrics(), 2.0)
    assert (numbers.name, numbers.threads, numbers.out, numbers.per_second) == ("Numbers", 1, 20, 10.0)
    assert (numbers.queued, numbers.capacity, numbers.dropped, numbers.counts) == (0, 4, 0, {})
    assert (odd.name, odd.threads, odd.out, odd.per_second) == ("OddOnes", 2, 3, 1.5)
    assert (odd.queued, odd.capacity, odd.dropped, odd.counts) == (3, 3, 7, {"even": 10})
    between = pipeline.metrics()
    pipeline.take()
    later = stage_metrics(between, pipeline.metrics(), 0.5)[1]
    assert (later.out, later.per_second, later.queued) == (3, 0.0, 2)


def metrics(**changed: float) -> dict[str, dict[str, float]]:
    common = {"threads": 2, "busy": 1, "busy_seconds": 5.0, "out": 8}
    return {"A": {**common, "dropped": 0, "queued": 1, "capacity": 4, **changed}}


@pytest.mark.parametrize(("seconds", "busy"), [(6.0, 0.5), (8.0, 1.5), (5.0, 0.0), (10.0, 2.0), (4.9, 0.0)])
def test_busy_threads_are_seconds_of_work_a_second(seconds: float, busy: float) -> None:
    """Two clocks are read, so that a bit more than all threads, or less than none, may come out."""
    (facts,) = stage_metrics(metrics(), metrics(busy_seconds=seconds), 2.0)
    assert facts.busy == pytest.approx(busy)


def test_what_there_is_no_place_for_is_a_count() -> None:
    (facts,) = stage_metrics({}, metrics(bad_files=3, average_uses=1.5), 4.0)
    assert facts.counts == {"bad_files": 3, "average_uses": 1.5}
    assert facts.per_second == 2.0, "with nothing before, all that ever came counts"


def simulated_pairs(batch: int, reservoir: int, pool: int, visit: int, batches: int, seed: int) -> float:
    """Play a pool and a reservoir by their definitions, a position a step, and count."""
    rng = np.random.default_rng(seed)
    steps = 3 * reservoir + batches * batch
    passes = -(-(reservoir + steps) // (pool * visit))
    games = np.concatenate([np.repeat(rng.permutation(pool), visit) for _ in range(passes)]).tolist()
    held, out = games[:reservoir], []
    for place, game in zip(rng.integers(0, reservoir, steps).tolist(), games[reservoir:], strict=False):
        out.append(held[place])
        held[place] = game
    rows = np.array(out[3 * reservoir :]).reshape(batches, batch)
    return float(np.mean([sum(math.comb(int(c), 2) for c in np.bincount(row)) for row in rows]))


@pytest.mark.parametrize(
    ("batch", "reservoir", "pool", "visit"),
    [(64, 4096, 500, 8), (64, 1024, 500, 16), (64, 8192, 200, 8), (32, 2000, 2000, 5), (64, 2000, 100, 1)],
)
def test_expected_pairs_are_what_comes_of_a_simulation(
    batch: int, reservoir: int, pool: int, visit: int
) -> None:
    """Each counts thousands of pairs; batches of 64 are not all that far below a reservoir of 1024."""
    found = simulated_pairs(batch, reservoir, pool, visit, batches=1500, seed=3)
    assert found == pytest.approx(expected_pairs(batch, reservoir, pool, visit), rel=0.05)


def test_expected_pairs_at_the_limits() -> None:
    """One position a visit and a pool without end: none. A reservoir without end: the pool at random."""
    assert expected_pairs(1024, 10**6, 10**12, 1) == pytest.approx(0.0, abs=1e-3)
    assert expected_pairs(256, 10**12, 1000, 70) == pytest.approx(math.comb(256, 2) / 1000, rel=1e-3)
    assert expected_pairs(1, 1000, 10, 5) == 0


@pytest.mark.parametrize(
    "sizes", [(0, 9, 9, 1), (9, 0, 9, 1), (9, 9, 0, 1), (9, 9, 9, 0.5), (9, 9, 9, math.nan)]
)
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int, float]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        expected_pairs(*sizes)
