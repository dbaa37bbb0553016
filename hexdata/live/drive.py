"""Driving a live pipeline as a trainer would, and telling what it delivers while it does.

Takes batches and throws them away. Never changes which come.
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
from hexdata.live.options import LiveOptions, make_pipeline
from hexdata.live.pipeline import Pipeline
from hexdata.live.watch import LiveFacts, Metrics, stage_facts

__all__ = ["DriveOptions", "drive_live", "same_game_pairs"]

_GAME: Final = "game_id"
"""The field that tells the games of a batch apart."""


@dataclass(frozen=True)
class DriveOptions:
    """How long to drive a pipeline, and how often to look at it.

    Raises:
        ConfigError: a limit is no number above 0.
    """

    batches: int | None = None
    """To end after."""
    seconds: float | None = None
    """To end after, from the start."""
    every: float = 1.0
    """Seconds between two looks."""

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
    """Take batches as fast as they come, until a limit, the end of the input, or Ctrl-C.

    Args:
        directory: of the games.
        live: the pipeline. Its batches get the field ``game_id`` if they have not got it.
        options: how long.
        show: called every so often, with the facts since the last time.
        serve: given what gives the metrics, it gives a context that is open meanwhile: an endpoint.

    Returns:
        The facts of the whole time, with the reason why it ended.

    Raises:
        HexdataError: an option cannot be used, or a stage failed.
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
    """Return how many pairs of the positions of a batch are of one game, from their ``game_id`` (B,)."""
    counts = np.unique(games, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


@dataclass(frozen=True)
class _Moment:
    """What a look back compares with: the time, and what there was by then."""

    time: float
    positions: int
    metrics: Metrics


class _Drive:
    """One run, and what came of it so far."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._batches = 0
        self._positions = 0
        self._pairs = 0
        self.start = self.now()

    def run(self, options: DriveOptions, show: Callable[[LiveFacts], None] | None) -> str:
        """Start the pipeline and take what comes, until something ends it; return what."""
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
        """Return how it did between two moments, the later of which is the present."""
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
        """Return the present moment."""
        return _Moment(time.monotonic(), self._positions, self._pipeline.metrics())


def _tell(said: Any, name: str) -> Any:
    """Return what a stage tells under a name, whichever does; None if none does."""
    return next((found[name] for found in said.values() if name in found), None)
