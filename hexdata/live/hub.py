"""What the threads of a live pipeline share: when they rest, when they stop, and why.

One condition for all queues of a pipeline. Items are whole hands of chunks and blocks of positions, so it is
taken some hundreds of times a second, and one lock makes a state of the whole pipeline a plain matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["Hub", "Stopped"]

Found = TypeVar("Found")


class Stopped(Exception):  # noqa: N818 - no error: how a thread learns that there is nothing more to do
    """The pipeline has stopped, or a queue is closed: the thread that waits for it ends."""


class Hub:
    """The meeting point of a pipeline's threads.

    A worker thread is either at work or at rest: it rests while it is in :meth:`wait_for`, and nowhere
    else. :meth:`paused` brings every worker to rest and keeps it there, so that what the stages and queues
    hold can be read, or replaced, in one piece.
    """

    def __init__(self) -> None:
        self.stopping = threading.Event()
        """Set as soon as the pipeline stops, in whatever way; for threads that wait for the outer world."""
        self.error: BaseException | None = None
        """What a stage raised first: the trainer is to see it."""
        self._condition = threading.Condition()
        self._workers: set[int] = set()
        self._working = 0
        self._pauses = 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count this thread among the workers until it leaves; an error that leaves it stops the pipeline."""
        with self._condition:
            self._workers.add(threading.get_ident())
            self._working += 1
        try:
            yield
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self.stop(error)
        finally:
            with self._condition:
                self._workers.discard(threading.get_ident())
                self._working -= 1
                self._condition.notify_all()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop the pipeline at once: whoever waits, or waits from now on, gets :class:`Stopped`."""
        with self._condition:
            if not self.stopping.is_set():
                self.error = error
            self.stopping.set()
            self._condition.notify_all()

    def wait_for(self, attempt: Callable[[], Found | None], timeout: float | None = None) -> Found | None:
        """Rest until ``attempt()`` gives something other than None, and return that.

        Args:
            attempt: takes or puts if it can, and must not wait. It runs under the hub's lock.
            timeout: seconds after which None is returned; None for no such limit.

        Raises:
            Stopped: the pipeline has stopped; or ``attempt`` says that there is nothing more.
        """
        worker = threading.get_ident() in self._workers
        found: list[Found] = []

        def succeed() -> bool:
            if self.stopping.is_set():
                raise Stopped
            if worker and self._pauses:
                return False
            result = attempt()
            if result is not None:
                found.append(result)
            return bool(found)

        with self._condition:
            self._working -= worker
            self._condition.notify_all()
            try:
                self._condition.wait_for(succeed, timeout)
            finally:
                self._working += worker
                self._condition.notify_all()
        return found[0] if found else None

    def change(self, action: Callable[[], Found]) -> Found:
        """Do something to the queues that never waits, under the hub's lock."""
        with self._condition:
            try:
                return action()
            finally:
                self._condition.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Bring all workers to rest for the time of a ``with`` block. Not to be called by a worker.

        Raises:
            Stopped: the pipeline has stopped.
        """
        with self._condition:
            self._pauses += 1
            self._condition.wait_for(lambda: not self._working or self.stopping.is_set())
        try:
            if self.stopping.is_set():
                raise Stopped
            yield
        finally:
            with self._condition:
                self._pauses -= 1
                self._condition.notify_all()
