"""Metrics of a live pipeline between two moments: rates, fill levels, dropped items and busy threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["LiveMetrics", "MetricsByStage", "StageMetrics", "stage_metrics"]

MetricsByStage = Mapping[str, Mapping[str, float]]
"""Result of ``Pipeline.metrics``: metrics by stage name and metric name."""

COMMON_METRICS: Final = frozenset({"threads", "busy", "busy_seconds", "out", "dropped", "queued", "capacity"})
"""Metrics that every stage has."""


@dataclass(frozen=True)
class StageMetrics:
    """Performance of a stage and the queue behind it between two moments, and their state at the later
    one.
    """

    name: str
    threads: int
    busy: float
    """Average number of busy threads, from 0 to ``threads``."""
    per_second: float
    """Items put into the queue per second."""
    out: int
    """Total number of items put into the queue."""
    dropped: int
    """Total number of items dropped because the queue was full."""
    queued: int
    """Number of items in the queue."""
    capacity: int
    """Capacity of the queue in items."""
    counts: dict[str, float] = field(default_factory=dict)
    """Other metrics of the stage. docs/live.md defines them for each stage."""


def stage_metrics(before: MetricsByStage, after: MetricsByStage, seconds: float) -> list[StageMetrics]:
    """Return the metrics of each stage between two moments, in pipeline order.

    Args:
        before: Metrics of the earlier moment; empty for the start of the pipeline.
        after: Metrics of the later moment.
        seconds: Seconds between the two, above 0.
    """
    return [_measure(name, before.get(name, {}), found, seconds) for name, found in after.items()]


def _measure(
    name: str, before: Mapping[str, float], after: Mapping[str, float], seconds: float
) -> StageMetrics:
    def rate(metric: str) -> float:
        return (after[metric] - before.get(metric, 0)) / seconds

    return StageMetrics(
        name=name,
        threads=int(after["threads"]),
        busy=min(max(rate("busy_seconds"), 0.0), after["threads"]),
        per_second=rate("out"),
        out=int(after["out"]),
        dropped=int(after["dropped"]),
        queued=int(after["queued"]),
        capacity=int(after["capacity"]),
        counts={metric: value for metric, value in after.items() if metric not in COMMON_METRICS},
    )


@dataclass(frozen=True)
class LiveMetrics:
    """Performance of a live pipeline between two moments, and its state at the later one."""

    seconds: float
    """Seconds since the start."""
    batches: int
    """Batches delivered since the start."""
    positions: int
    """Positions in these batches."""
    positions_per_second: float
    """Positions delivered per second between the two moments."""
    games: int | None
    """Total number of games that entered the pool. This field and the next ones are None if no stage reports
    them."""
    pool: int | None
    """Number of games in the pool now."""
    newest_file: str | None
    """File whose games entered the pool last."""
    average_uses: float | None
    """Average number of draws per game that entered the pool."""
    pairs: float | None
    """Pairs of positions from one game in a batch, on average since the start; None before the first batch.
    """
    waiting: str | None = None
    """Why no batch was delivered between the two moments, and what changes it. None if one was delivered, or
    the stages show no reason.
    """
    stages: list[StageMetrics] = field(default_factory=list)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Text of the stages for people: ``Pipeline.notes``."""
    ended: str | None = None
    """Reason of the end: ``"batches"``, ``"seconds"``, ``"input"`` or ``"interrupted"``. None while running.
    """
