"""Threads that work tasks off while the calling thread keeps the books.

The workers never touch the ledger, the progress or the log: they hand calls to the calling thread. An
exception anywhere, Ctrl-C among them, stops all of them before it comes out.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from hexdata.store.session import Interrupts

__all__ = ["Crew", "StoppedError"]

Task = TypeVar("Task")
_JOIN_SECONDS: Final = 0.05
"""Between two attempts to interrupt the queries of threads that are to stop."""


class StoppedError(Exception):
    """Raised in a worker that is to stop; it never leaves this module's threads."""


class Crew:
    """Some threads, and how to stop them."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.interrupts = Interrupts()
        """For the DuckDB sessions that the workers open."""
        self._stopped = threading.Event()
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def tell(self, function: Callable[..., object], *args: Any) -> None:
        """In a worker: have the calling thread make a call, soon and in order.

        Raises:
            StoppedError: the worker is to stop.
        """
        self.check()
        self._calls.put(lambda: function(*args))

    def check(self) -> None:
        """In a worker: go on, or raise ``StoppedError``."""
        if self._stopped.is_set():
            raise StoppedError

    def sleep(self, seconds: float) -> None:
        """In a worker: wait, but not beyond the moment at which it is to stop."""
        self._stopped.wait(seconds)
        self.check()

    def work_off(self, tasks: Iterable[Task], work: Callable[[Task], None]) -> None:
        """Call ``work`` on each task, in threads; return when all are done.

        An exception in a task, or one that comes up in the calling thread, stops the others at their next
        word or query, and comes out here when all have stopped.
        """
        todo = deque(tasks)
        workers = [
            threading.Thread(target=self._work, args=(todo, work), name=f"worker {number}")
            for number in range(min(self.threads, len(todo)))
        ]
        try:
            for worker in workers:
                worker.start()
            at_work = len(workers)
            while at_work:
                call = self._calls.get()
                if call is None:
                    at_work -= 1
                else:
                    call()
        finally:
            self._stopped.set()
            self._wait_for(workers)

    def _work(self, todo: deque[Task], work: Callable[[Task], None]) -> None:
        try:
            while todo:
                try:
                    task = todo.popleft()
                except IndexError:  # another took the last one
                    break
                self.check()
                work(task)
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised again in the calling thread
            self._calls.put(_raiser(error))
        finally:
            self._calls.put(None)

    def _wait_for(self, workers: list[threading.Thread]) -> None:
        """Wait for workers to stop; DuckDB may lose an interrupt, so there is more than one."""
        for worker in workers:
            while worker.is_alive():
                self.interrupts.interrupt()
                worker.join(_JOIN_SECONDS)


def _raiser(error: BaseException) -> Callable[[], object]:
    def call() -> None:
        raise error

    return call
