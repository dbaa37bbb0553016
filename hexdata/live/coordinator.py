"""Synchronisation of the threads of a live pipeline: waiting, pausing and stopping.

All queues of a pipeline share one lock. Items are whole hands of chunks and whole blocks of positions, so the
lock is taken a few hundred times per second. One lock also makes it simple to read the state of the whole
pipeline.
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
    """Raised in a waiting thread when the pipeline has stopped or a queue is closed; the thread then ends."""


class Hub:
    """Lock, pauses, stop signal and warnings shared by the threads of a pipeline.

    A worker thread is either working or resting. It rests only while it is inside :meth:`wait_for`.
    :meth:`paused` waits until all workers rest and keeps them resting, so that the contents of stages and
    queues can be read or replaced consistently.
    """

    def __init__(self) -> None:
        self.stopping = threading.Event()
        """Set when the pipeline stops for any reason. Threads that wait for something outside the pipeline
        watch it."""
        self.error: BaseException | None = None
        """First error that a stage raised, for the trainer."""
        self.warnings: deque[str] = deque()
        """Warnings of stages that the trainer has not received yet."""
        # Used directly: Ctrl-C inside a condition's own Python code could leave the lock held.
        self._lock = threading.RLock()
        self._channels: list[threading.Condition] = []
        self._common = self.channel()
        self._workers: set[int] = set()
        self._working = 0
        self._pauses: set[object] = set()
        self._process = os.getpid()

    @property
    def elsewhere(self) -> bool:
        """True in a fork of the process that runs the threads; nothing can be waited for there.

        The lock may have been held when the process forked; then it is never released in the fork.
        """
        return os.getpid() != self._process

    def channel(self) -> threading.Condition:
        """Return a condition on the hub's lock, so that a change wakes only the threads it concerns."""
        channel = threading.Condition(self._lock)
        self._channels.append(channel)
        return channel

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count this thread as a worker during a ``with`` block; an error in the block stops the pipeline.

        The block does not start during a pause.
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
        """Stop the pipeline: threads that wait, now or later, get :class:`Stopped`.

        Does nothing in a fork of the process.

        Args:
            error: Error for the trainer; kept if it is the first stop. Default None.
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
        """Rest until ``attempt()`` returns something other than None, and return that.

        During a pause a worker keeps resting, even after its timeout, because it must not work while the
        pipeline is read.

        Args:
            attempt: Function that takes or puts an item if it can. It runs under the hub's lock and must not
                wait.
            timeout: Seconds after which None is returned. None (default) for no limit.
            channel: Condition that is notified when another attempt may succeed. By default, :meth:`change`
                notifies.

        Raises:
            Stopped: The pipeline has stopped, or ``attempt`` raised it.
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
        """Queue a warning. It is issued in the trainer's thread when that takes the next item or its wait
        ends.
        """
        self.warnings.append(message)

    def change(self, action: Callable[[], Found]) -> Found:
        """Run a short action under the hub's lock, notify waiting threads, and return its result.

        Args:
            action: Function that changes something other threads wait for; it must not wait itself.
        """
        with self._lock:
            try:
                return action()
            finally:
                self._common.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep all workers resting during a ``with`` block. A worker must not call this.

        Raises:
            Stopped: The pipeline has stopped, before or during the block; state read in the block may be
                inconsistent.
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
            except BaseException:  # else a Ctrl-C here would leave the workers resting
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
