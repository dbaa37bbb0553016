"""What the threads of a live pipeline share: when they rest, when they stop, and why.

One lock for all queues of a pipeline. Items are whole hands of chunks and blocks of positions, so it is
taken some hundreds of times a second, and one lock makes a state of the whole pipeline a plain matter.
"""

from __future__ import annotations

import os
import threading
from collections import deque
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
        self.warnings: deque[str] = deque()
        """What stages warn of, and the trainer has not been told yet."""
        # Entered itself, not through a condition, whose own code Ctrl-C can interrupt with the lock taken.
        self._lock = threading.RLock()
        self._channels: list[threading.Condition] = []
        self._common = self.channel()
        self._workers: set[int] = set()
        self._working = 0
        self._pauses: set[object] = set()
        self._process = os.getpid()

    @property
    def elsewhere(self) -> bool:
        """Whether this is a fork of the process that the threads are in: there is nobody to wait for here.

        The lock may have been taken when the process forked, and would never be given back.
        """
        return os.getpid() != self._process

    def channel(self) -> threading.Condition:
        """Return a condition on the hub's lock, so that a change wakes only those whom it concerns."""
        channel = threading.Condition(self._lock)
        self._channels.append(channel)
        return channel

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count this thread among the workers until it leaves; an error that leaves it stops the pipeline.

        During a pause it does not even begin.
        """
        with self._lock:
            self._workers.add(threading.get_ident())
            self._common.wait_for(self._may_work)
            self._working += 1
        try:
            yield
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self.stop(error)
        finally:
            with self._lock:
                self._workers.discard(threading.get_ident())
                self._working -= 1
                self._common.notify_all()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop the pipeline at once: whoever waits, or waits from now on, gets :class:`Stopped`.

        In a fork of its process it does nothing.
        """
        if self.elsewhere:
            return
        with self._lock:
            if not self.stopping.is_set():
                self.error = error
            self.stopping.set()
            self._wake_all()

    def wait_for(
        self,
        attempt: Callable[[], Found | None],
        timeout: float | None = None,
        channel: threading.Condition | None = None,
    ) -> Found | None:
        """Rest until ``attempt()`` gives something other than None, and return that.

        During a pause a worker rests on, whatever its timeout: it must not work while the pipeline is read.

        Args:
            attempt: takes or puts if it can, and must not wait. It runs under the hub's lock.
            timeout: seconds after which None is returned; None for no such limit.
            channel: what is notified when another attempt may succeed; without it, :meth:`change` is.

        Raises:
            Stopped: the pipeline has stopped; or ``attempt`` says that there is nothing more.
        """
        worker = threading.get_ident() in self._workers
        channel = channel or self._common
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

        with self._lock:
            self._working -= worker
            if self._pauses:
                self._common.notify_all()
            try:
                channel.wait_for(succeed, timeout)
                if worker and not found:
                    channel.wait_for(self._may_work)
            finally:
                self._working += worker
        return found[0] if found else None

    def warn(self, message: str) -> None:
        """Let the trainer be warned, in its own thread, when it takes the next item or has waited for one."""
        self.warnings.append(message)

    def change(self, action: Callable[[], Found]) -> Found:
        """Do something that others may wait for, under the hub's lock; it must not wait itself."""
        with self._lock:
            try:
                return action()
            finally:
                self._common.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Bring all workers to rest for the time of a ``with`` block. Not to be called by a worker.

        Raises:
            Stopped: the pipeline has stopped, before or meanwhile: what was read may be in pieces.
        """
        assert threading.get_ident() not in self._workers, "a worker would wait for itself"
        pause = object()
        try:
            with self._lock:
                self._pauses.add(pause)
                self._common.wait_for(lambda: not self._working or self.stopping.is_set())
            self._raise_if_stopping()
            yield
            self._raise_if_stopping()
        finally:
            try:
                self._end(pause)
            except BaseException:  # Ctrl-C just here would leave the workers at rest for ever
                self._end(pause)
                raise

    def _end(self, pause: object) -> None:
        with self._lock:
            self._pauses.discard(pause)
            self._wake_all()

    def _may_work(self) -> bool:
        return not self._pauses or self.stopping.is_set()

    def _raise_if_stopping(self) -> None:
        if self.stopping.is_set():
            raise Stopped

    def _wake_all(self) -> None:
        for channel in self._channels:
            channel.notify_all()
