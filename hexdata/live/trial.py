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
from hexdata.live.metrics import LiveFacts, Metrics, stage_facts
from hexdata.live.options import LiveOptions, make_pipeline
from hexdata.live.pipeline import Pipeline

__all__ = ["DriveOptions", "drive_live", "same_game_pairs"]

_GAME: Final = "game_id"
"""The field that identifies the game of each position in a batch."""


@dataclass(frozen=True)
class DriveOptions:
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


def drive_live(
    directory: str | Path,
    live: LiveOptions | None = None,
    options: DriveOptions | None = None,
    show: Callable[[LiveFacts], None] | None = None,
    serve: Callable[[Callable[[], Metrics]], AbstractContextManager[object]] | None = None,
) -> LiveFacts:
    """Take batches as fast as possible until a limit, the end of the input, or Ctrl-C.

    Args:
        directory: Directory with the games.
        live: Options of the pipeline. Default ``LiveOptions()``. The field ``game_id`` is added to its
            batches.
        options: Limits and report interval. Default ``DriveOptions()``.
        show: Called after each report interval with the facts since the last report. Default None.
        serve: Function that receives the pipeline's ``metrics`` and returns a context manager, which is open
            during the run: an endpoint. Default None.

    Returns:
        The facts of the whole run, with the reason of its end.

    Raises:
        HexdataError: An option cannot be used, or a stage failed.
    """
    live, options = live or LiveOptions(), options or DriveOptions()
    if _GAME not in live.batch.fields:
        live = replace(live, batch=replace(live.batch, fields=(*live.batch.fields, _GAME)))
    pipeline = make_pipeline(live, directory)
    with pipeline, serve(pipeline.metrics) if serve else nullcontext():
        drive = _Drive(pipeline)
        ended = drive.run(options, show)
        return drive.facts(drive.start, drive.now(), ended)


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
    metrics: Metrics


class _Drive:
    """A trial run and its totals so far."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._batches = 0
        self._positions = 0
        self._pairs = 0
        self.start = self.now()

    def run(self, options: DriveOptions, show: Callable[[LiveFacts], None] | None) -> str:
        """Start the pipeline and take batches until the run ends; return the reason of the end."""
        end = math.inf if options.seconds is None else self.start.time + options.seconds
        last = self.start
        try:
            self._pipeline.start()
            while True:
                due = last.time + options.every
                batch = self._pipeline.take(max(0.0, min(due, end) - time.monotonic()))
                if batch is not None:
                    self._count(batch[_GAME])
                if self._batches == options.batches:
                    return "batches"
                if time.monotonic() >= end:
                    return "seconds"
                if time.monotonic() >= due:
                    now = self.now()
                    if show is not None:
                        show(self.facts(last, now))
                    last = now
        except StopIteration:
            return "input"
        except KeyboardInterrupt:
            return "interrupted"

    def facts(self, since: _Moment, now: _Moment, ended: str | None = None) -> LiveFacts:
        """Return the facts between two moments, the later of which is the present."""
        seconds = max(now.time - since.time, 1e-9)
        notes = self._pipeline.notes()
        games, pool = _tell(now.metrics, "entered"), _tell(now.metrics, "chunks")
        return LiveFacts(
            seconds=now.time - self.start.time,
            batches=self._batches,
            positions=self._positions,
            positions_per_second=(self._positions - since.positions) / seconds,
            games=None if games is None else int(games),
            pool=None if pool is None else int(pool),
            newest_file=_tell(notes, "newest") or None,
            average_uses=_tell(now.metrics, "uses"),
            pairs=self._pairs / self._batches if self._batches else None,
            stages=stage_facts(since.metrics, now.metrics, seconds),
            notes=notes,
            ended=ended,
        )

    def _count(self, games: npt.NDArray[np.int64]) -> None:
        self._batches += 1
        self._positions += len(games)
        self._pairs += same_game_pairs(games)

    def now(self) -> _Moment:
        """Return time, positions and metrics of the present moment."""
        return _Moment(time.monotonic(), self._positions, self._pipeline.metrics())


def _tell(said: Any, name: str) -> Any:
    """Return the first value with this name in the metrics or notes of any stage; None if there is none."""
    return next((found[name] for found in said.values() if name in found), None)
