"""The engine of this machine: processes for pure tasks, threads for those that only wait or hash.

The processes are loky's, which do not import the caller's main module, so that a stage may be called
from any script or notebook. One worker means this process, without a pool. Nothing is repeated here.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, Final, TypeVar

from hexdata.engine.protocol import Machines
from hexdata.errors import HexdataError
from hexdata.pool import default_workers
from hexdata.remote import AnyPath

__all__ = ["LOCAL", "Local"]

Result = TypeVar("Result")
Task = tuple[Any, ...]

_QUEUED: Final = 2
"""Tasks handed over for each worker: one at work, and one that it finds when it is done."""


class Local:
    """Runs tasks on this machine."""

    @property
    def machines(self) -> Machines:
        """This one."""
        return Machines(1, default_workers(), separate=False)

    def require(self, paths: Sequence[AnyPath], folder: AnyPath | None = None) -> None:
        """Check nothing: workers are this machine's."""

    def run(
        self, function: Callable[..., Result], tasks: Iterable[Task], *, workers: int, memory: int
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks in processes, as :class:`hexdata.engine.protocol.Engine` has it.

        ``memory`` is the caller's promise; nobody holds the workers to it.

        Raises:
            HexdataError: a worker process died (killed, or out of memory).
        """
        del memory
        todo = iter(tasks)
        first = list(islice(todo, max(workers, 1)))
        if len(first) <= 1:
            for index, task in enumerate(chain(first, todo)):
                yield index, function(*task)
            return
        from loky import ProcessPoolExecutor
        from loky.process_executor import TerminatedWorkerError

        with _children_ignore_interrupts():  # it starts a tracker of resources
            executor = ProcessPoolExecutor(
                max_workers=len(first),
                initializer=_start_worker,
                initargs=(os.getpid(),),
                env={"ARROW_DEFAULT_MEMORY_POOL": "system"},  # mimalloc holds some 30 MB more, a worker
            )
        finished = False
        try:
            yield from _drive(executor, function, chain(first, todo), _QUEUED * len(first))
            finished = True
        except TerminatedWorkerError as error:
            raise HexdataError(
                "a worker process died",
                found=f"exit codes {str(error).rpartition('workers are ')[2].splitlines()[0]}",
                hint="If memory ran out, use fewer workers; then run the command again: it goes on from "
                "there.",
            ) from error
        finally:
            executor.shutdown(wait=True, kill_workers=not finished)

    def run_light(
        self, function: Callable[..., Result], tasks: Iterable[Task], *, workers: int
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks in threads.

        An exception leaves the tasks that have not begun undone; those that have are waited for.
        """
        with ThreadPoolExecutor(max_workers=workers) as executor:
            try:
                yield from _drive(executor, function, tasks, _QUEUED * workers)
            finally:
                executor.shutdown(wait=False, cancel_futures=True)


LOCAL: Final = Local()


def _drive(
    executor: Executor, function: Callable[..., Result], tasks: Iterable[Task], most: int
) -> Iterator[tuple[int, Result]]:
    """Keep up to ``most`` tasks handed over; yield results as they come."""
    todo = enumerate(tasks)
    futures: dict[Future[Result], int] = {}
    while True:
        with _children_ignore_interrupts():  # a worker may be started here
            for index, task in islice(todo, most - len(futures)):
                futures[executor.submit(function, *task)] = index
        if not futures:
            return
        for future in wait(futures, return_when=FIRST_COMPLETED).done:
            yield futures.pop(future), future.result()


@contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    """Let processes started here inherit a blocked SIGINT: Ctrl-C is the parent's alone from the first.

    One that comes meanwhile waits, and reaches the parent afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(parent: int) -> None:
    """Leave Ctrl-C to the parent, and end when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers that are started later inherit nothing
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)
