"""Trial run of a live pipeline, which takes batches as a trainer does and reports rates.

The batches are discarded. The run does not change which batches the pipeline delivers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.checks import check_count, check_positive
from hexdata.live.options import LiveOptions, make_pipeline
from hexdata.live.pipeline import MetricsByStage

_GAME_FIELD: Final = "game_id"
"""The field that identifies the game of each position in a batch."""
_QUEUE: Final = ("threads", "out", "queued", "capacity")
"""Metrics of every stage that are reported as they are. Beside them it has ``busy`` and ``busy_seconds``."""


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
    pairs: float | None
    """Pairs of positions from one game in a batch, on average since the start; None before the first batch.
    """
    waiting: str | None
    """Why no batch was delivered between the two moments, and what changes it. None if one was delivered, or
    the stages show no reason.
    """
    stages: list[dict[str, Any]]
    """For each stage: its ``name``; its ``threads``, and how many were ``busy`` on average; the items put
    into the queue behind it ``per_second`` and in total (``out``), those ``queued`` now, and its
    ``capacity``; and ``counts``, the stage's own metrics (docs/live.md)."""
    notes: dict[str, dict[str, Any]]
    """Text of the stages for people: ``Pipeline.notes``."""
    ended: str | None
    """Reason of the end: ``"batches"``, ``"seconds"``, ``"input"`` or ``"interrupted"``. None while running.
    """


def run_live_trial(
    directory: str | Path,
    live: LiveOptions | None = None,
    show: Callable[[LiveMetrics], None] | None = None,
    serve: Callable[[Callable[[], MetricsByStage]], AbstractContextManager[object]] | None = None,
    *,
    batches: int | None = None,
    seconds: float | None = None,
    every: float = 1.0,
) -> LiveMetrics:
    """Take batches as fast as possible until a limit, the end of the input, or Ctrl-C.

    Args:
        directory: Directory with the games.
        live: Options of the pipeline. Default ``LiveOptions()``. The field ``game_id`` is added to its
            batches.
        show: Called after each report interval with the metrics since the last report. Default None.
        serve: Function that receives the pipeline's ``metrics`` and returns a context manager, which is
            entered for the duration of the run, such as ``serve_metrics``. Default None.
        batches: Number of batches after which the run ends. None (default) for no limit.
        seconds: Seconds after which the run ends. None (default) for no limit.
        every: Seconds between two reports. Default 1.

    Returns:
        The metrics of the whole run, with the reason for its end.

    Raises:
        HexdataError: An option cannot be used, or a stage failed.
    """
    live = live or LiveOptions()
    if batches is not None:
        check_count("batches", batches, 1)
    if seconds is not None:
        check_positive("seconds", seconds)
    if _GAME_FIELD not in live.batch.fields:
        # To count the pairs of positions of one game in each batch.
        live = replace(live, batch=replace(live.batch, fields=(*live.batch.fields, _GAME_FIELD)))
    pipeline = make_pipeline(live, directory)
    taken = positions = pairs = 0
    ended: str | None = None

    def moment() -> tuple[float, int, MetricsByStage]:
        return time.monotonic(), positions, pipeline.metrics()

    def measure(since: tuple[float, int, MetricsByStage]) -> LiveMetrics:
        """Return the performance since a moment."""
        clock, _, metrics = moment()
        # The clock of some systems may not have advanced since the last report.
        passed = max(clock - since[0], 1e-9)
        stages = []
        for name, found in metrics.items():
            out, busy = ((found[each] - since[2][name][each]) / passed for each in ("out", "busy_seconds"))
            queue = {each: int(found[each]) for each in _QUEUE}
            counts = {each: found[each] for each in found if each not in (*_QUEUE, "busy", "busy_seconds")}
            # The threads work while their times are read, so the sum may be slightly out of range.
            busy = min(max(busy, 0.0), queue["threads"])
            stages.append({"name": name, "busy": busy, "per_second": out, **queue, "counts": counts})
        return LiveMetrics(
            seconds=clock - start[0],
            batches=taken,
            positions=positions,
            positions_per_second=(positions - since[1]) / passed,
            pairs=pairs / taken if taken else None,
            waiting=None if positions > since[1] else pipeline.wait_reason(),
            stages=stages,
            notes=pipeline.notes(),
            ended=ended,
        )

    # The server ends first, so that it never asks a closed pipeline for metrics.
    with pipeline, serve(pipeline.metrics) if serve else nullcontext():
        start = last = moment()
        end = math.inf if seconds is None else start[0] + seconds
        try:
            pipeline.start()
            while ended is None:
                due = last[0] + every
                # No longer than to the next report or the end, also if no batch arrives.
                batch = pipeline.take(max(0.0, min(due, end) - time.monotonic()))
                if batch is not None:
                    taken += 1
                    positions += len(batch[_GAME_FIELD])
                    pairs += same_game_pairs(batch[_GAME_FIELD])
                if taken == batches:
                    ended = "batches"
                elif time.monotonic() >= end:
                    ended = "seconds"
                elif time.monotonic() >= due:
                    if show is not None:
                        show(measure(last))
                    last = moment()
        except StopIteration:
            ended = "input"
        except KeyboardInterrupt:
            ended = "interrupted"
        return measure(start)


def same_game_pairs(games: npt.NDArray[np.int64]) -> int:
    """Return the number of pairs of positions from one game in a batch.

    Args:
        games: ``game_id`` of each position of the batch, int64 (B,).
    """
    counts = np.unique(games, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())
