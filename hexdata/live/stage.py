"""Base classes of the stages of a live pipeline: queues, threads, counts and an orderly end.

A new stage is a subclass with ``process``; or with ``work``, if it does more than turn each item into others.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeVar

from hexdata.checks import check_count
from hexdata.errors import ConfigError, HexdataError
from hexdata.live.coordinator import Coordinator, Stopped
from hexdata.live.queue import Queue

__all__ = ["Stage", "Transform", "Worker", "check_seconds"]

Result = TypeVar("Result")

_JOIN_SECONDS: Final = 30.0
"""Seconds that :meth:`Stage.join` waits. A slow disk may delay a thread that has to end."""


@dataclass
class Worker:
    """A thread of a stage, with the outputs that its full output queue has not accepted yet."""

    number: int
    pending: deque[Any] = field(default_factory=deque)
    busy_since: float | None = None
    """Time of ``time.monotonic`` at which the current work began; None while the thread is idle."""
    busy_seconds: float = 0.0


class Stage(ABC):
    """One step of a pipeline, which runs on its own threads.

    A stage is created from its options, connected to its queues, and started. It ends when its input is
    closed and processed (then it closes its output), when the pipeline stops, or with an error, which stops
    the pipeline and is raised in the trainer.

    Args:
        threads: Number of worker threads, at least 1. Default 1.
    """

    first: ClassVar[bool] = False
    """True for a stage that begins a pipeline and has no input."""

    def __init__(self, *, threads: int = 1) -> None:
        self.name = type(self).__name__
        self.workers = [Worker(number) for number in range(check_count("threads", threads, 1))]
        self.counts: dict[str, int] = {}
        """Counts of the stage for monitoring, besides those of its queues: bad files, rejected games …"""
        self._lock = threading.Lock()
        self._running_workers = len(self.workers)
        self._threads: list[threading.Thread] = []

    def connect(self, coordinator: Coordinator, source: Queue[Any] | None, sink: Queue[Any]) -> None:
        """Connect the stage to its queues; ``source`` is None for the first stage."""
        self.coordinator = coordinator
        self.source = source
        self.sink = sink

    def link_stages(self, stages: Sequence[Stage]) -> None:  # noqa: B027 - a hook
        """Receive all stages of the pipeline, in order, after they are connected."""

    def start(self) -> None:
        """Start the threads."""
        for worker in self.workers:
            self.start_thread(str(worker.number), self._run, worker)

    def start_thread(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        """Start a thread that :meth:`join` waits for.

        A thread that is not a worker is never counted as busy. It has to end when ``coordinator.stopping`` is
        set, pass its findings to the workers with ``coordinator.change``, and pass its errors to
        ``coordinator.stop``.
        """
        thread = threading.Thread(target=target, args=arguments, name=f"{self.name}-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> list[str]:
        """Wait for the threads for up to 30 seconds; return the names of those that have not ended."""
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            if thread.ident is not None:  # else it could not be started
                thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    @abstractmethod
    def work(self, worker: Worker) -> None:
        """Do the work of one thread: take, process and put items until the input ends.

        Raises:
            Stopped: A queue raised it; the thread ends.
        """

    def finish(self) -> Iterable[Any]:
        """Return the items that the stage still holds. The last thread calls this once the input is
        processed.

        The returned items are no longer part of :meth:`state`: they are in ``Worker.pending``.
        """
        return ()

    def state(self) -> dict[str, Any]:
        """Return the state that the stage needs to continue: plain values, ``bytes`` and NumPy arrays.

        The pipeline is paused. The pipeline saves the pending outputs of the workers itself.
        """
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state. The stage is connected and not started."""
        assert not state, f"{self.name} has no state"

    def metrics(self) -> dict[str, float]:
        """Return the metrics: ``counts``, threads, busy threads, and seconds of work.

        This may be called while the stage is working.
        """
        now = time.monotonic()
        starts = [worker.busy_since for worker in self.workers]
        busy = [now - start for start in starts if start is not None]
        seconds = sum(worker.busy_seconds for worker in self.workers) + sum(busy)
        return {"threads": len(starts), "busy": len(busy), "busy_seconds": seconds, **self.counts}

    def notes(self) -> dict[str, Any]:
        """Return text for people, such as names of bad files and reasons; it can be stored as JSON."""
        return {}

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of the ``counts``. Any thread may call this."""
        with self._lock:
            self.counts[name] = self.counts.get(name, 0) + amount

    def take(self, worker: Worker, timeout: float | None = None) -> Any:
        """Return the next item of the input, waiting until one exists; None after ``timeout`` seconds.

        Raises:
            Stopped: The input has ended, or the pipeline has stopped.
        """
        assert self.source is not None
        return self.wait_for(worker, self.source.pop, timeout, self.source.filled)

    def wait_for(
        self,
        worker: Worker,
        attempt: Callable[[], Result | None],
        timeout: float | None = None,
        condition: threading.Condition | None = None,
    ) -> Result | None:
        """Wait until ``attempt()`` returns something other than None, and return that.

        The arguments are those of ``Coordinator.wait_for``.

        Raises:
            Stopped: The pipeline has stopped, or ``attempt`` raised it.
        """
        self._set_idle(worker)
        result = self.coordinator.wait_for(attempt, timeout, condition)
        worker.busy_since = time.monotonic()
        return result

    def put(self, worker: Worker, items: Iterable[Any]) -> None:
        """Put outputs, waiting while the queue is full. Outputs not put yet stay in ``worker.pending``.

        Raises:
            Stopped: The pipeline has stopped.
        """
        worker.pending.extend(items)
        while worker.pending:
            self.wait_for(worker, lambda: self._put_first(worker), condition=self.sink.emptied)

    def _put_first(self, worker: Worker) -> bool | None:
        """Move the first pending output to the queue; it is always in exactly one of the two."""
        accepted = self.sink.accept(worker.pending[0])
        if accepted:
            worker.pending.popleft()
        return accepted

    def _set_idle(self, worker: Worker) -> None:
        if worker.busy_since is not None:
            worker.busy_seconds += time.monotonic() - worker.busy_since
            worker.busy_since = None

    def _run(self, worker: Worker) -> None:
        with self.coordinator.working():
            try:
                self._work_and_finish(worker)
            except StopIteration as error:  # in the trainer's thread it would end the batches
                raise HexdataError(f"{self.name} raised StopIteration") from error
            finally:
                self._set_idle(worker)

    def _work_and_finish(self, worker: Worker) -> None:
        try:
            self.put(worker, ())  # outputs of a loaded state
            self.work(worker)
        except Stopped:
            pass
        if self._end_worker() and not self.coordinator.stopping.is_set():
            self.put(worker, self.finish())
            self.sink.close()

    def _end_worker(self) -> bool:
        with self._lock:
            self._running_workers -= 1
            return self._running_workers == 0


def check_seconds(name: str, value: Any, most: float = threading.TIMEOUT_MAX) -> float:
    """Return a number of seconds as a float.

    Args:
        name: Name of the option, for the message.
        value: Value to check.
        most: Largest allowed value. Default: the longest wait that Python supports.

    Raises:
        ConfigError: The value is not a number above 0 and at most ``most``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise ConfigError(f"{name} cannot be used", found=repr(value), expected="seconds, above 0")
    return float(value)


class Transform(Stage):
    """A stage that turns each item into zero or more others."""

    @abstractmethod
    def process(self, item: Any) -> Iterable[Any]:
        """Return the outputs for an item. With several threads, calls run concurrently."""

    def work(self, worker: Worker) -> None:
        """Take, process and put items until the input ends."""
        while True:
            item = self.take(worker)
            self.put(worker, self.process(item))
