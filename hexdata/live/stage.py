"""What a stage of a live pipeline is: an input queue, an output queue, threads, counts, and a way to end.

A new stage is a class with ``process``, or with ``work`` where items are not simply turned into others.
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
from hexdata.errors import HexdataError
from hexdata.live.hub import Hub, Stopped
from hexdata.live.queue import Queue

__all__ = ["Stage", "Transform", "Worker"]

Found = TypeVar("Found")

_JOIN_SECONDS: Final = 30.0
"""So long a disk may take to answer a thread that is to end."""


@dataclass
class Worker:
    """One thread of a stage, and what it has in hand: outputs for which there was no room yet."""

    number: int
    hand: deque[Any] = field(default_factory=deque)
    busy_since: float | None = None
    """On the clock of ``time.monotonic``, while it works on an item."""
    busy_seconds: float = 0.0


class Stage(ABC):
    """One step of a pipeline, on threads of its own.

    A stage is made from its options, connected to its queues, and started. It ends when its input is
    closed and all of it is done (its output is closed then), when the pipeline stops, or by an error,
    which stops the pipeline and reaches the trainer.
    """

    first: ClassVar[bool] = False
    """Whether the stage begins a pipeline, and so has no input."""

    def __init__(self, *, threads: int = 1) -> None:
        self.name = type(self).__name__
        self.workers = [Worker(number) for number in range(check_count("threads", threads, 1))]
        self.counts: dict[str, int] = {}
        """What the stage counts besides its queues, for people to see: bad files, rejected games …"""
        self._lock = threading.Lock()
        self._left = len(self.workers)
        self._threads: list[threading.Thread] = []

    def connect(self, hub: Hub, source: Queue[Any] | None, sink: Queue[Any]) -> None:
        """Give the stage its queues; ``source`` is None for the first."""
        self.hub = hub
        self.source = source
        self.sink = sink

    def meet(self, stages: Sequence[Stage]) -> None:  # noqa: B027 - a hook that most do not need
        """Get to know all stages of the pipeline, in order, once they are connected."""

    def start(self) -> None:
        """Start the threads."""
        for worker in self.workers:
            self.start_thread(str(worker.number), self._run, worker)

    def start_thread(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        """Start a thread that :meth:`join` waits for.

        One that is no worker never counts as at work: it ends when ``hub.stopping`` is set, tells the workers
        what it finds by ``hub.change``, and hands its errors to ``hub.stop``.
        """
        thread = threading.Thread(target=target, args=arguments, name=f"{self.name}-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> list[str]:
        """Wait for the threads, some seconds at most; return the names of those that have not ended."""
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            if thread.ident is not None:  # else it could not be started
                thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    @abstractmethod
    def work(self, worker: Worker) -> None:
        """Do the work of one thread: take, make, put, until there is nothing more to do.

        Raises:
            Stopped: out of a queue; the thread ends.
        """

    def finish(self) -> Iterable[Any]:
        """Give up what the stage still holds, once its input is closed and done; the last thread asks.

        What is given up is no longer in :meth:`state`: it is in the worker's hand.
        """
        return ()

    def state(self) -> dict[str, Any]:
        """Return what the stage needs to go on from here: plain values, ``bytes`` and NumPy arrays.

        The pipeline is paused. Outputs in a worker's hand are the pipeline's to keep.
        """
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state; the stage is connected and not started."""
        assert not state, f"{self.name} keeps no state"

    def metrics(self) -> dict[str, float]:
        """Return what people watch: ``counts``, threads and how many of them are busy, seconds of work.

        The stage may be at work.
        """
        now = time.monotonic()
        since = [worker.busy_since for worker in self.workers]
        busy = [now - start for start in since if start is not None]
        seconds = sum(worker.busy_seconds for worker in self.workers) + sum(busy)
        return {"threads": len(since), "busy": len(busy), "busy_seconds": seconds, **self.counts}

    def notes(self) -> dict[str, Any]:
        """Return what people read besides numbers, JSON-able: names of files and why they were left out."""
        return {}

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of the ``counts``, from any thread."""
        with self._lock:
            self.counts[name] = self.counts.get(name, 0) + amount

    def take(self, worker: Worker, timeout: float | None = None) -> Any:
        """Take the next item of the input, resting till there is one; None after ``timeout`` seconds.

        Raises:
            Stopped: there will be none.
        """
        assert self.source is not None
        return self.wait_for(worker, self.source.pop, timeout, self.source.filled)

    def wait_for(
        self,
        worker: Worker,
        attempt: Callable[[], Found | None],
        timeout: float | None = None,
        channel: threading.Condition | None = None,
    ) -> Found | None:
        """Rest until ``attempt()`` gives something, as ``Hub.wait_for`` has it.

        Raises:
            Stopped: the pipeline has stopped, or ``attempt`` says so.
        """
        self._rest(worker)
        found = self.hub.wait_for(attempt, timeout, channel)
        worker.busy_since = time.monotonic()
        return found

    def put(self, worker: Worker, items: Iterable[Any]) -> None:
        """Put outputs, resting where there is no room. What is not put yet is in the worker's hand.

        Raises:
            Stopped: the pipeline has stopped.
        """
        worker.hand.extend(items)
        while worker.hand:
            self.wait_for(worker, lambda: self._put_one(worker), channel=self.sink.emptied)

    def _put_one(self, worker: Worker) -> bool | None:
        """Put the first item of a hand, so that at no moment it is in neither place or in both."""
        accepted = self.sink.accept(worker.hand[0])
        if accepted:
            worker.hand.popleft()
        return accepted

    def _rest(self, worker: Worker) -> None:
        if worker.busy_since is not None:
            worker.busy_seconds += time.monotonic() - worker.busy_since
            worker.busy_since = None

    def _run(self, worker: Worker) -> None:
        with self.hub.working():
            try:
                self._work_to_the_end(worker)
            except StopIteration as error:  # in the trainer's thread it would be the end of the batches
                raise HexdataError(f"{self.name} raised StopIteration") from error
            finally:
                self._rest(worker)

    def _work_to_the_end(self, worker: Worker) -> None:
        try:
            self.put(worker, ())  # what a state left in its hand
            self.work(worker)
        except Stopped:
            pass
        if self._is_last() and not self.hub.stopping.is_set():
            self.put(worker, self.finish())
            self.sink.close()

    def _is_last(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0


class Transform(Stage):
    """A stage that turns each item into others."""

    @abstractmethod
    def process(self, item: Any) -> Iterable[Any]:
        """Return what comes of an item. With several threads it is called by all of them."""

    def work(self, worker: Worker) -> None:
        """Take, process, put."""
        while True:
            item = self.take(worker)
            self.put(worker, self.process(item))
