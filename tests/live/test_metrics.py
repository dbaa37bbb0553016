"""Tests of the metrics of a live pipeline: rates between two moments, drops and busy threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hexdata.live.metrics import stage_metrics
from hexdata.live.pipeline import Pipeline
from hexdata.live.stage import Stage, Transform, Worker


class Numbers(Stage):
    """Emits the numbers below ``count``."""

    first = True

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def work(self, worker: Worker) -> None:
        for number in range(self._count):
            self.put(worker, [number])


class OddOnes(Transform):
    """Passes on odd numbers and counts the others."""

    def process(self, item: Any) -> list[int]:
        if item % 2 == 0:
            self.count("even")
            return []
        return [item]


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    """A pipeline of 20 numbers, 10 of which are odd, with space for 3 in the last queue."""
    with Pipeline([Numbers(20), OddOnes(threads=2)], [(4, "block"), (3, "drop-new")]) as made:
        yield made


def test_rates_and_drops_match_the_queues(pipeline: Pipeline) -> None:
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
def test_busy_threads_are_seconds_of_work_per_second(seconds: float, busy: float) -> None:
    """Two clocks are read, so the result may slightly exceed the number of threads or fall below 0."""
    (stage,) = stage_metrics(metrics(), metrics(busy_seconds=seconds), 2.0)
    assert stage.busy == pytest.approx(busy)


def test_other_metrics_are_counts() -> None:
    (stage,) = stage_metrics({}, metrics(bad_files=3, average_uses=1.5), 4.0)
    assert stage.counts == {"bad_files": 3, "average_uses": 1.5}
    assert stage.per_second == 2.0, "with nothing before, all that ever came counts"
