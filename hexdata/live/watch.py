"""What people watch of a live pipeline: rates, fill, drops, busy threads, from its metrics at two moments.

Reads metrics and counts; never slows a stage, takes an item, or prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["Metrics", "StageFacts", "stage_facts"]

Metrics = Mapping[str, Mapping[str, float]]
"""What ``Pipeline.metrics`` gives: by stage, by name."""

_SHOWN: Final = frozenset({"threads", "busy", "busy_seconds", "out", "dropped", "queued", "capacity"})
"""Metrics that every stage has, and that have a place of their own in the facts."""


@dataclass(frozen=True)
class StageFacts:
    """One stage and the queue behind it: how it did between two moments, and where it stands at the later."""

    name: str
    threads: int
    busy: float
    """How many of the threads were at work, on average: 0 … ``threads``."""
    per_second: float
    """Items that entered the queue, a second."""
    out: int
    """Items that ever entered the queue."""
    dropped: int
    """Items that never left it, as there was no room."""
    queued: int
    capacity: int
    counts: dict[str, float] = field(default_factory=dict)
    """What else the stage tells: docs/live.md names them, stage by stage."""


def stage_facts(before: Metrics, after: Metrics, seconds: float) -> list[StageFacts]:
    """Return the facts of each stage between two moments, in order of the pipeline.

    Args:
        before: metrics of the earlier moment; empty for the start of the pipeline.
        after: metrics of the later one.
        seconds: between the two, above 0.
    """
    return [_facts(name, before.get(name, {}), found, seconds) for name, found in after.items()]


def _facts(name: str, before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> StageFacts:
    def grown(metric: str) -> float:
        return (after[metric] - before.get(metric, 0)) / seconds

    return StageFacts(
        name=name,
        threads=int(after["threads"]),
        busy=min(max(grown("busy_seconds"), 0.0), after["threads"]),
        per_second=grown("out"),
        out=int(after["out"]),
        dropped=int(after["dropped"]),
        queued=int(after["queued"]),
        capacity=int(after["capacity"]),
        counts={metric: value for metric, value in after.items() if metric not in _SHOWN},
    )


@dataclass(frozen=True)
class LiveFacts:
    """How a live pipeline that is driven did between two moments, and where it stands at the later."""

    seconds: float
    """Since it was started."""
    batches: int
    """Delivered since then."""
    positions: int
    """In these."""
    positions_per_second: float
    """Delivered between the two moments."""
    games: int | None
    """That ever entered the pool; this and what follows is None where no stage tells it."""
    pool: int | None
    """Games in the pool now."""
    newest_file: str | None
    average_uses: float | None
    """How often the games that ever entered the pool were drawn."""
    pairs: float | None
    """Pairs of positions of one game in a batch, on average since the start; None before the first."""
    stages: list[StageFacts] = field(default_factory=list)
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What stages say besides numbers: ``Pipeline.notes``."""
    ended: str | None = None
    """Why nothing more comes: ``"batches"``, ``"seconds"``, ``"input"`` or ``"interrupted"``."""
