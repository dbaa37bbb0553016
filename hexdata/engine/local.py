"""The local engine: processes for tasks that compute, threads for tasks that wait for the disk or hash.

The processes are loky's, which do not import the caller's main module, so that a stage may be called
from any script or notebook. One worker means this process, without a pool. Nothing is repeated here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from itertools import chain, islice
from typing import Any, Final, TypeVar

from hexdata.engine.protocol import Machines
from hexdata.errors import HexdataError
from hexdata.extras import hide_pandas
from hexdata.pool import default_workers
from hexdata.storage import AnyPath
from hexdata.system import block_interrupts, has_ended
from hexdata.temporary import temporary_path

__all__ = ["LOCAL", "LocalEngine"]

Result = TypeVar("Result")
Task = tuple[Any, ...]

_QUEUED: Final = 2
"""Tasks submitted per worker: one that runs, and one to start as soon as it ends."""


class LocalEngine:
    """Runs tasks on this machine."""

    @property
    def machines(self) -> Machines:
        """This machine."""
        return Machines(1, default_workers(), separate=False)

    def require(self, paths: Sequence[AnyPath], folder: AnyPath | None = None) -> None:
        """Do nothing: workers on this machine see the same code and files."""

    def run(
        self,
        function: Callable[..., Result],
        tasks: Iterable[Task],
        *,
        workers: int,
        memory: int,
        cores: int = 1,
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks in processes. See :meth:`hexdata.engine.protocol.Engine.run` for the arguments.

        ``memory`` and ``cores`` are not enforced.

        Raises:
            HexdataError: A worker process died, for example because it was killed or memory ran out.
        """
        del memory, cores
        todo = iter(tasks)
        first = list(islice(todo, max(workers, 1)))
        if len(first) <= 1:
            for index, task in enumerate(chain(first, todo)):
                yield index, function(*task)
            return
        from loky import ProcessPoolExecutor
        from loky.backend.synchronize import SemLock
        from loky.process_executor import TerminatedWorkerError

        if sys.platform == "linux":  # where semaphores are files; elsewhere their names must be short
            SemLock._make_name = lambda: f"/{temporary_path('semaphore').name}"

        with block_interrupts():  # it starts a resource tracker process
            executor = ProcessPoolExecutor(
                max_workers=len(first),
                initializer=_start_worker,
                initargs=(os.getpid(),),
                env={"ARROW_DEFAULT_MEMORY_POOL": "system"},  # mimalloc needs some 30 MB more per worker
            )
        finished = False
        try:
            yield from _run_in(executor, function, chain(first, todo), _QUEUED * len(first))
            finished = True
        except TerminatedWorkerError as error:
            raise HexdataError(
                "a worker process died",
                found=f"exit codes {str(error).rpartition('workers are ')[2].splitlines()[0]}",
                hint="If memory ran out, use fewer workers. Run the command again to resume.",
            ) from error
        finally:
            executor.shutdown(wait=True, kill_workers=not finished)

    def run_light(
        self, function: Callable[..., Result], tasks: Iterable[Task], *, workers: int
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks in threads.

        After an exception, running tasks are completed and the others are not started.
        """
        with ThreadPoolExecutor(max_workers=workers) as executor:
            try:
                yield from _run_in(executor, function, tasks, _QUEUED * workers)
            finally:
                executor.shutdown(wait=False, cancel_futures=True)


LOCAL: Final = LocalEngine()


def _run_in(
    executor: Executor, function: Callable[..., Result], tasks: Iterable[Task], limit: int
) -> Iterator[tuple[int, Result]]:
    """Submit up to ``limit`` tasks at a time and yield results in order of completion."""
    todo = enumerate(tasks)
    futures: dict[Future[Result], int] = {}
    while True:
        with block_interrupts():  # a worker may be started here
            for index, task in islice(todo, limit - len(futures)):
                futures[executor.submit(function, *task)] = index
        if not futures:
            return
        for future in wait(futures, return_when=FIRST_COMPLETED).done:
            yield futures.pop(future), future.result()


def _start_worker(parent: int) -> None:
    """Initialize a worker: ignore Ctrl-C, and exit when the parent has exited."""
    hide_pandas()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers started later do not inherit the mask
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: int) -> None:
    while not has_ended(parent):
        time.sleep(0.2)
    os._exit(1)
