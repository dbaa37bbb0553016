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

from hexdata.checks import check_count
from hexdata.errors import ConfigError
from hexdata.live.metrics import LiveMetrics, MetricsByStage, stage_metrics
from hexdata.live.options import LiveOptions, make_pipeline
from hexdata.live.pipeline import Pipeline
from hexdata.live.wait_reason import find_wait_reason

__all__ = ["LiveTrialOptions", "run_live_trial", "same_game_pairs"]

_GAME_FIELD: Final = "game_id"
"""The field that identifies the game of each position in a batch."""


@dataclass(frozen=True)
class LiveTrialOptions:
    """Limits of a trial run, and the interval between reports.

    Raises:
        ConfigError: A limit is not a number above 0.
    """

    batches: int | None = None
    """Number of batches after which the run ends. None for no limit."""
    seconds: float | None = None
    """Seconds after which the run ends, counted from its start. None for no limit."""
    every: float = 1.0
    """Seconds between two reports."""

    def __post_init__(self) -> None:
        if self.batches is not None:
            check_count("batches", self.batches, 1)
        for name, value in (("seconds", self.seconds), ("every", self.every)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} cannot be used", found=value, expected="a number above 0")


def run_live_trial(
    directory: str | Path,
    live: LiveOptions | None = None,
    options: LiveTrialOptions | None = None,
    show: Callable[[LiveMetrics], None] | None = None,
    serve: Callable[[Callable[[], MetricsByStage]], AbstractContextManager[object]] | None = None,
) -> LiveMetrics:
    """Take batches as fast as possible until a limit, the end of the input, or Ctrl-C.

    Args:
        directory: Directory with the games.
        live: Options of the pipeline. Default ``LiveOptions()``. The field ``game_id`` is added to its
            batches.
        options: Limits and report interval. Default ``LiveTrialOptions()``.
        show: Called after each report interval with the metrics since the last report. Default None.
        serve: Function that receives the pipeline's ``metrics`` and returns a context manager, which is
            entered for the duration of the run, such as ``serve_metrics``. Default None.

    Returns:
        The metrics of the whole run, with the reason for its end.

    Raises:
        HexdataError: An option cannot be used, or a stage failed.
    """
    live, options = live or LiveOptions(), options or LiveTrialOptions()
    if _GAME_FIELD not in live.batch.fields:
        live = replace(live, batch=replace(live.batch, fields=(*live.batch.fields, _GAME_FIELD)))
    pipeline = make_pipeline(live, directory)
    with pipeline, serve(pipeline.metrics) if serve else nullcontext():
        trial = _LiveTrial(pipeline, live)
        ended = trial.run(options, show)
        return trial.measure(trial.start, trial.now(), ended)


def same_game_pairs(games: npt.NDArray[np.int64]) -> int:
    """Return the number of pairs of positions from one game in a batch.

    Args:
        games: ``game_id`` of each position of the batch, int64 (B,).
    """
    counts = np.unique(games, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


@dataclass(frozen=True)
class _Moment:
    """Time, delivered positions and metrics at one moment."""

    time: float
    positions: int
    metrics: MetricsByStage


class _LiveTrial:
    """A trial run and its totals so far."""

    def __init__(self, pipeline: Pipeline, options: LiveOptions) -> None:
        self._pipeline = pipeline
        self._options = options
        self._batches = 0
        self._positions = 0
        self._pairs = 0
        self.start = self.now()

    def run(self, options: LiveTrialOptions, show: Callable[[LiveMetrics], None] | None) -> str:
        """Start the pipeline and take batches until the run ends; return the reason for its end."""
        end = math.inf if options.seconds is None else self.start.time + options.seconds
        last = self.start
        try:
            self._pipeline.start()
            while True:
                due = last.time + options.every
                batch = self._pipeline.take(max(0.0, min(due, end) - time.monotonic()))
                if batch is not None:
                    self._count_batch(batch[_GAME_FIELD])
                if self._batches == options.batches:
                    return "batches"
                if time.monotonic() >= end:
                    return "seconds"
                if time.monotonic() >= due:
                    now = self.now()
                    if show is not None:
                        show(self.measure(last, now))
                    last = now
        except StopIteration:
            return "input"
        except KeyboardInterrupt:
            return "interrupted"

    def measure(self, since: _Moment, now: _Moment, ended: str | None = None) -> LiveMetrics:
        """Return the metrics between two moments, the later of which is the present."""
        seconds = max(now.time - since.time, 1e-9)
        notes = self._pipeline.notes()
        delivered = now.positions > since.positions
        games, pool = _first_value(now.metrics, "entered"), _first_value(now.metrics, "chunks")
        return LiveMetrics(
            seconds=now.time - self.start.time,
            batches=self._batches,
            positions=self._positions,
            positions_per_second=(self._positions - since.positions) / seconds,
            games=None if games is None else int(games),
            pool=None if pool is None else int(pool),
            newest_file=_first_value(notes, "newest") or None,
            average_uses=_first_value(now.metrics, "uses"),
            pairs=self._pairs / self._batches if self._batches else None,
            waiting=None if delivered else find_wait_reason(now.metrics, notes, self._options),
            stages=stage_metrics(since.metrics, now.metrics, seconds),
            notes=notes,
            ended=ended,
        )

    def _count_batch(self, games: npt.NDArray[np.int64]) -> None:
        self._batches += 1
        self._positions += len(games)
        self._pairs += same_game_pairs(games)

    def now(self) -> _Moment:
        """Return time, positions and metrics of the present moment."""
        return _Moment(time.monotonic(), self._positions, self._pipeline.metrics())


def _first_value(by_stage: Any, name: str) -> Any:
    """Return the first value with this name in the metrics or notes of any stage; None if there is none."""
    return next((found[name] for found in by_stage.values() if name in found), None)
