"""Synchronisation of the threads of a live pipeline: waiting, pausing and stopping.

All queues of a pipeline share one lock. Each item contains many games or positions, so the lock is taken only
a few hundred times per second. With a single lock, the state of the whole pipeline can be read consistently.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["Coordinator", "Stopped"]

Result = TypeVar("Result")


class Stopped(Exception):  # noqa: N818 - ends a thread, reports no error
    """Raised in a waiting thread when the pipeline has stopped or a queue is closed; the thread then ends."""


class Coordinator:
    """Lock, pauses, stop signal and warnings shared by the threads of a pipeline.

    A worker thread is either working or idle. It is idle only inside :meth:`wait_for`. :meth:`paused` waits
    until all workers are idle and keeps them idle, so that the contents of stages and queues can be read or
    replaced consistently.
    """

    def __init__(self) -> None:
        self.stopping = threading.Event()
        """Set when the pipeline stops for any reason. Threads that wait for something outside the pipeline
        check it."""
        self.error: BaseException | None = None
        """First error that a stage raised, for the trainer."""
        self.warnings: deque[str] = deque()
        """Warnings of stages that the trainer has not received yet."""
        # Acquired directly: Ctrl-C in the Python code of a condition could leave the lock held.
        self._lock = threading.RLock()
        self._conditions: list[threading.Condition] = []
        self._changed = self.new_condition()
        self._worker_threads: set[int] = set()
        self._working_count = 0
        self._pauses: set[object] = set()
        self._process_id = os.getpid()

    @property
    def in_fork(self) -> bool:
        """True in a fork of the process that runs the threads; nothing can be waited for there.

        The lock may have been held when the process forked; then it is never released in the fork.
        """
        return os.getpid() != self._process_id

    def new_condition(self) -> threading.Condition:
        """Return a condition on the shared lock, so that a change wakes only the threads it concerns."""
        condition = threading.Condition(self._lock)
        self._conditions.append(condition)
        return condition

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count this thread as a worker during a ``with`` block; an error in the block stops the pipeline.

        The block does not start during a pause.
        """
        with self._lock:
            self._worker_threads.add(threading.get_ident())
            self._changed.wait_for(self._may_work)
            self._working_count += 1
        try:
            yield
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self.stop(error)
        finally:
            with self._lock:
                self._worker_threads.discard(threading.get_ident())
                self._working_count -= 1
                self._changed.notify_all()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop the pipeline: threads that wait, now or later, get :class:`Stopped`.

        Does nothing in a fork of the process.

        Args:
            error: Error for the trainer; kept if it is the first stop. Default None.
        """
        if self.in_fork:
            return
        with self._lock:
            if not self.stopping.is_set():
                self.error = error
            self.stopping.set()
            self._wake_all()

    def wait_for(
        self,
        attempt: Callable[[], Result | None],
        timeout: float | None = None,
        condition: threading.Condition | None = None,
    ) -> Result | None:
        """Wait until ``attempt()`` returns something other than None, and return that.

        During a pause a worker stays idle, even after its timeout, because it must not work while the
        pipeline is read.

        Args:
            attempt: Function that takes or puts an item if it can. It runs under the coordinator's lock and
                must not wait.
            timeout: Seconds after which None is returned. None (default) for no limit.
            condition: Condition that is notified when another attempt may succeed. By default, :meth:`change`
                notifies.

        Raises:
            Stopped: The pipeline has stopped, or ``attempt`` raised it.
        """
        worker = threading.get_ident() in self._worker_threads
        condition = condition or self._changed
        results: list[Result] = []

        def try_attempt() -> bool:
            if self.stopping.is_set():
                raise Stopped
            if worker and self._pauses:
                return False
            result = attempt()
            if result is not None:
                results.append(result)
            return bool(results)

        with self._lock:
            self._working_count -= worker
            if self._pauses:
                self._changed.notify_all()
            try:
                condition.wait_for(try_attempt, timeout)
                if worker and not results:
                    condition.wait_for(self._may_work)
            finally:
                self._working_count += worker
        return results[0] if results else None

    def warn(self, message: str) -> None:
        """Queue a warning. It is issued in the trainer's thread, when that thread takes the next item or its
        wait ends.
        """
        self.warnings.append(message)

    def change(self, action: Callable[[], Result]) -> Result:
        """Run a short action under the coordinator's lock, notify waiting threads, and return its result.

        Args:
            action: Function that changes something other threads wait for; it must not wait itself.
        """
        with self._lock:
            try:
                return action()
            finally:
                self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep all workers idle during a ``with`` block. A worker must not call this.

        Raises:
            Stopped: The pipeline has stopped, before or during the block; state read in the block may be
                inconsistent.
        """
        assert threading.get_ident() not in self._worker_threads, "a worker would wait for itself"
        pause = object()
        try:
            with self._lock:
                self._pauses.add(pause)
                self._changed.wait_for(lambda: not self._working_count or self.stopping.is_set())
            self._raise_if_stopping()
            yield
            self._raise_if_stopping()
        finally:
            try:
                self._end_pause(pause)
            except BaseException:  # otherwise Ctrl-C here would leave the workers idle
                self._end_pause(pause)
                raise

    def _end_pause(self, pause: object) -> None:
        with self._lock:
            self._pauses.discard(pause)
            self._wake_all()

    def _may_work(self) -> bool:
        return not self._pauses or self.stopping.is_set()

    def _raise_if_stopping(self) -> None:
        if self.stopping.is_set():
            raise Stopped

    def _wake_all(self) -> None:
        for condition in self._conditions:
            condition.notify_all()
