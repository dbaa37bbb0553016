"""A thread pool whose workers send their results to the calling thread.

Only the calling thread uses the ledger, the progress and the log; workers send it calls through a queue. An
exception in any thread, including Ctrl-C, stops all workers before it is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from hexdata.store.session import Interrupts

__all__ = ["StoppedError", "ThreadPool"]

Task = TypeVar("Task")
_JOIN_SECONDS: Final = 0.05
"""Seconds between two attempts to interrupt the queries of workers that must stop."""


class StoppedError(Exception):
    """Raised in a worker that must stop; never raised outside this module's threads."""


class ThreadPool:
    """A pool of threads that can be stopped together.

    Args:
        threads: Maximum number of threads.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.interrupts = Interrupts()
        """Interrupts the DuckDB sessions that the workers open."""
        self._stopped = threading.Event()
        self._taking = threading.Lock()
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def call_in_caller(self, function: Callable[..., object], *args: Any) -> None:
        """From a worker, queue a call for the calling thread. Calls run in queue order.

        Raises:
            StoppedError: The worker must stop.
        """
        self.check()
        self._calls.put(lambda: function(*args))

    def check(self) -> None:
        """From a worker, raise ``StoppedError`` if it must stop."""
        if self._stopped.is_set():
            raise StoppedError

    def sleep(self, seconds: float) -> None:
        """From a worker, wait for some seconds. Raise ``StoppedError`` as soon as the worker must stop."""
        self._stopped.wait(seconds)
        self.check()

    def run(self, tasks: Iterable[Task], function: Callable[[Task], None]) -> None:
        """Call ``function`` on each task in the threads, and return when all tasks are done.

        A worker takes the next task when it is free, and only one worker at a time uses the iterator.
        An exception in a task or in the calling thread interrupts the running queries and stops each worker
        at its next check. It is raised here after all workers have stopped.
        """
        todo = iter(tasks)
        workers = [
            threading.Thread(target=self._run_worker, args=(todo, function), name=f"worker {number}")
            for number in range(self.threads)
        ]
        try:
            for worker in workers:
                worker.start()
            running = len(workers)
            while running:
                call = self._calls.get()
                if call is None:
                    running -= 1
                else:
                    call()
        finally:
            self._stopped.set()
            self._wait_for(workers)

    def _run_worker(self, todo: Iterator[Task], function: Callable[[Task], None]) -> None:
        try:
            while True:
                with self._taking:
                    self.check()
                    try:
                        task = next(todo)
                    except StopIteration:
                        break
                function(task)
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised again in the calling thread
            self._calls.put(_raiser(error))
        finally:
            self._calls.put(None)

    def _wait_for(self, workers: list[threading.Thread]) -> None:
        """Wait for the workers to stop. Interrupts are repeated because DuckDB may miss one."""
        for worker in workers:
            while worker.is_alive():
                self.interrupts.interrupt()
                worker.join(_JOIN_SECONDS)


def _raiser(error: BaseException) -> Callable[[], object]:
    def call() -> None:
        raise error

    return call
