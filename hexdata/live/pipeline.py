"""A pipeline of stages joined by queues, which start, pause and stop together."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from hexdata.errors import ConfigError, HexdataError
from hexdata.live.coordinator import Coordinator, Stopped
from hexdata.live.queue import Overflow, Queue
from hexdata.live.stage import Stage

__all__ = ["Pipeline", "check_stage_order"]

_TRAINER: Final = 4
"""Stack level of warnings in ``Pipeline.take``: the code that iterates over a ``LiveLoader``."""


class Pipeline:
    """A sequence of stages, the first without input; :meth:`take` returns the outputs of the last.

    Close a pipeline after use. A pipeline without references stops by itself, but nothing waits for its
    threads.

    Args:
        stages: Stages in order, which belong to this pipeline alone.
        queues: Capacity and overflow behaviour of the queue behind each stage.

    Raises:
        ConfigError: There are no stages, the first one needs an input, a later one has none, or two have the
            same name.
    """

    def __init__(self, stages: Sequence[Stage], queues: Sequence[tuple[int, Overflow]]) -> None:
        check_stage_order([(stage.name, stage.first) for stage in stages])
        self.coordinator = Coordinator()
        self.stages = list(stages)
        self.queues: list[Queue[Any]] = []
        source: Queue[Any] | None = None
        for stage, (capacity, overflow) in zip(stages, queues, strict=True):
            sink: Queue[Any] = Queue(self.coordinator, capacity, overflow)
            stage.connect(self.coordinator, source, sink)
            self.queues.append(sink)
            source = sink
        for stage in self.stages:
            stage.link_stages(self.stages)
        self._started = False
        self._lifecycle_lock = threading.RLock()
        """Held while threads start, so that none starts after ``close``; and while they are joined, since two
        threads cannot join at once in every Python. Reentrant, so that a signal handler may close."""
        weakref.finalize(self, self.coordinator.stop)

    def start(self) -> None:
        """Start all stages, the last first, so that each stage finds its consumer running. Call this once.

        If another thread or a signal handler closes the pipeline meanwhile, the remaining stages are not
        started.

        Raises:
            HexdataError: This process is a fork of the one that created the pipeline.
        """
        self._check_process()
        with self._lifecycle_lock:
            assert not self._started
            self._started = True
            for stage in reversed(self.stages):
                if not self.coordinator.stopping.is_set():
                    stage.start()

    def take(self, timeout: float | None = None) -> Any:
        """Return the next item of the last stage; None after ``timeout`` seconds without one.

        Warnings of stages since the last call are issued as Python warnings.

        Args:
            timeout: Maximum wait in seconds. None (default) for no limit.

        Raises:
            StopIteration: The input has ended, or the pipeline is closed.
            HexdataError: This process is a fork of the one that created the pipeline.
            Exception: A stage raised it.
        """
        self._check_process()
        while self.coordinator.warnings:
            warnings.warn(self.coordinator.warnings.popleft(), stacklevel=_TRAINER)
        try:
            return self.queues[-1].take(timeout)
        except Stopped:
            pass
        if self.coordinator.error is not None:
            raise self.coordinator.error  # raised outside the except block, to keep its own cause
        raise StopIteration

    def state(self) -> dict[str, Any]:
        """Return a copy of the state of all stages and queues, by stage name.

        Each worker finishes its current item first. If the input has ended and all stages are done, the state
        contains the remaining items of the last queue.

        Raises:
            HexdataError: The pipeline has stopped, or stops meanwhile; or this process is a fork.
        """
        self._check_process()
        try:
            with self.coordinator.paused():
                return {
                    stage.name: {
                        "stage": stage.state(),
                        "hands": [list(worker.pending) for worker in stage.workers],
                        "queue": queue.contents(),
                    }
                    for stage, queue in zip(self.stages, self.queues, strict=True)
                }
        except Stopped:
            raise HexdataError("the state of a stopped pipeline cannot be read") from self.coordinator.error

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state of a pipeline with the same stages. The pipeline must not be started yet."""
        assert not self._started
        for stage, queue in zip(self.stages, self.queues, strict=True):
            kept = state[stage.name]
            stage.load_state(kept["stage"])
            for number, pending in enumerate(kept["hands"]):  # there may be fewer threads than before
                stage.workers[number % len(stage.workers)].pending.extend(pending)
            queue.restore(kept["queue"])

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each stage and of the queue behind it, by stage name.

        Raises:
            HexdataError: This process is a fork of the one that created the pipeline.
        """
        self._check_process()
        return {
            stage.name: {
                **stage.metrics(),
                "out": queue.accepted,
                "dropped": queue.dropped,
                "queued": len(queue),
                "capacity": queue.capacity,
            }
            for stage, queue in zip(self.stages, self.queues, strict=True)
        }

    def notes(self) -> dict[str, dict[str, Any]]:
        """Return the notes of each stage by stage name, without stages that have none."""
        notes = {stage.name: stage.notes() for stage in self.stages}
        return {name: text for name, text in notes.items() if text}

    def close(self) -> None:
        """Stop all stages and wait for their threads. Errors of stages are not raised again.

        Does nothing in a fork of the process, which has no such threads.

        Raises:
            HexdataError: A thread has not ended.
        """
        if self.coordinator.in_fork:
            return
        with self._lifecycle_lock:
            self.coordinator.stop()
            running = [name for stage in self.stages for name in stage.join()]
        if running:
            raise HexdataError("threads of the pipeline have not ended", found=", ".join(running))

    def _check_process(self) -> None:
        if self.coordinator.in_fork:
            raise HexdataError(
                "the threads of the pipeline run in another process",
                found=f"process {os.getpid()}, a fork of it",
                hint="Create the loader in the process that uses it.",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_stage_order(stages: Sequence[tuple[str, bool]]) -> None:
    """Check the order of stages.

    Args:
        stages: Name of each stage, and whether it has no input, in order.

    Raises:
        ConfigError: There are no stages, the first one needs an input, a later one has none, or two have the
            same name.
    """
    if not stages:
        raise ConfigError("a pipeline needs at least one stage")
    for index, (name, is_first) in enumerate(stages):
        if is_first != (index == 0):
            expected = (
                "the first position" if is_first else "a position after a stage that finds files or games"
            )
            raise ConfigError(f"{name} is at the wrong position in the pipeline", expected=expected)
    names = [name for name, _ in stages]
    if len(set(names)) < len(names):
        raise ConfigError("two stages have the same name", found=names)
