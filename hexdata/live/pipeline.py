"""Stages in a row, joined by queues: started, read from, paused for a state, and ended together."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from hexdata.errors import ConfigError, HexdataError
from hexdata.live.hub import Hub, Stopped
from hexdata.live.queue import Overflow, Queue
from hexdata.live.stage import Stage

__all__ = ["Pipeline"]

_TRAINER: Final = 4
"""How many calls above ``Pipeline.take`` a warning is about: that of who iterates over a ``LiveLoader``."""


class Pipeline:
    """Some stages, the first of which needs no input; what the last one puts is taken with :meth:`take`.

    It is to be closed. One that nobody holds any more stops too, but nobody waits for its threads.

    Args:
        stages: in order; each belongs to this pipeline alone.
        queues: the capacity and the overflow behaviour of the queue behind each stage.

    Raises:
        ConfigError: there are no stages, the first needs an input, a later one has none, or two have one
            name.
    """

    def __init__(self, stages: Sequence[Stage], queues: Sequence[tuple[int, Overflow]]) -> None:
        _check_order(stages)
        self.hub = Hub()
        self.stages = list(stages)
        self.queues: list[Queue[Any]] = []
        source: Queue[Any] | None = None
        for stage, (capacity, overflow) in zip(stages, queues, strict=True):
            sink: Queue[Any] = Queue(self.hub, capacity, overflow)
            stage.connect(self.hub, source, sink)
            self.queues.append(sink)
            source = sink
        for stage in self.stages:
            stage.meet(self.stages)
        self._started = False
        self._turns = threading.RLock()
        """Held while threads start, so that none does after ``close``, and while they are waited for, which
        two threads cannot do at once in every Python; a signal may close in between."""
        weakref.finalize(self, self.hub.stop)

    def start(self) -> None:
        """Start all stages, the last first, so that nothing is made before it can be taken. Once only.

        One that was closed, by another thread or a signal meanwhile, starts no more of them.

        Raises:
            HexdataError: this is a fork of the process that the pipeline was made in.
        """
        self._check_process()
        with self._turns:
            assert not self._started
            self._started = True
            for stage in reversed(self.stages):
                if not self.hub.stopping.is_set():
                    stage.start()

    def take(self, timeout: float | None = None) -> Any:
        """Return the next item of the last stage; None after ``timeout`` seconds without one.

        What a stage warned of since the last call is told as a Python warning.

        Raises:
            StopIteration: there is nothing more.
            HexdataError: this is a fork of the process that it was made in.
            Exception: what a stage raised.
        """
        self._check_process()
        while self.hub.warnings:
            warnings.warn(self.hub.warnings.popleft(), stacklevel=_TRAINER)
        try:
            return self.queues[-1].take(timeout)
        except Stopped:
            pass
        if self.hub.error is not None:
            raise self.hub.error  # from here, so that its own cause stays
        raise StopIteration

    def state(self) -> dict[str, Any]:
        """Return what all stages and queues hold, by name of the stage: a copy.

        The workers come to rest first, each after the item it is at. Where the input has ended and all is
        done, what is left in the last queue is the state.

        Raises:
            HexdataError: the pipeline has stopped, or stops meanwhile; or this is a fork of its process.
        """
        self._check_process()
        try:
            with self.hub.paused():
                return {
                    stage.name: {
                        "stage": stage.state(),
                        "hands": [list(worker.hand) for worker in stage.workers],
                        "queue": queue.contents(),
                    }
                    for stage, queue in zip(self.stages, self.queues, strict=True)
                }
        except Stopped:
            raise HexdataError("a pipeline that has stopped has no state") from self.hub.error

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state of a pipeline of the same stages. It is not started yet."""
        assert not self._started
        for stage, queue in zip(self.stages, self.queues, strict=True):
            kept = state[stage.name]
            stage.load_state(kept["stage"])
            for number, hand in enumerate(kept["hands"]):  # with fewer threads than then, some hold more
                stage.workers[number % len(stage.workers)].hand.extend(hand)
            queue.restore(kept["queue"])

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each stage with those of the queue behind it, by the stage's name.

        Raises:
            HexdataError: this is a fork of the process that the pipeline was made in.
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
        """Return what each stage says besides numbers, by its name; those that say nothing are left out."""
        said = {stage.name: stage.notes() for stage in self.stages}
        return {name: notes for name, notes in said.items() if notes}

    def close(self) -> None:
        """Stop all stages and wait for their threads. What a stage raised is not raised again.

        In a fork of its process there are none, and it does nothing.

        Raises:
            HexdataError: a thread has not ended.
        """
        if self.hub.elsewhere:
            return
        with self._turns:
            self.hub.stop()
            left = [name for stage in self.stages for name in stage.join()]
        if left:
            raise HexdataError("threads of the pipeline do not end", found=", ".join(left))

    def _check_process(self) -> None:
        if self.hub.elsewhere:
            raise HexdataError(
                "the threads of the pipeline are in another process",
                found=f"process {os.getpid()}, a fork",
                hint="Make one in this process, or use it where it was made.",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_order(stages: Sequence[Stage]) -> None:
    if not stages:
        raise ConfigError("a pipeline needs stages")
    for place, stage in enumerate(stages):
        if stage.first != (place == 0):
            raise ConfigError(
                f"{stage.name} cannot be stage {place} of a pipeline",
                expected="one that needs no input at the beginning"
                if place == 0
                else "one that has an input",
            )
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise ConfigError("two stages have one name", found=names)
