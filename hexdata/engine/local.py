"""The local engine: runs the tasks of a stage in processes of this machine.

The processes are loky's, which do not import the caller's main module, so that a stage may be called
from any script or notebook. One worker means this process, without a pool. Nothing is repeated here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import Any, Final, TypeVar

from hexdata.errors import HexdataError
from hexdata.extras import hide_pandas
from hexdata.storage import AnyPath
from hexdata.system import block_interrupts, default_workers, has_ended
from hexdata.temporary import temporary_path

Result = TypeVar("Result")
Tasks = Iterable[tuple[Any, ...]]

_LITTLE_WORK: Final = 4.0
"""Estimated CPU seconds of work that two workers, which start for a second each, do not finish earlier."""
_QUEUED: Final = 2
"""Tasks submitted per worker: one that runs, and one to start as soon as it ends."""


class Engine:
    """Runs the tasks of a stage on this machine. A subclass may run them on others.

    A task is a pure function that writes its files atomically. Running it twice is harmless, and the bytes
    written do not depend on the engine.

    Attributes:
        remote: Whether tasks run on other machines. They must see the same files under the same paths.
    """

    remote: bool = False

    @property
    def machines(self) -> int:
        """Number of machines that run tasks."""
        return 1

    @property
    def cores(self) -> int:
        """Number of cores that tasks may use on each machine; the maximum if they differ."""
        return default_workers()

    def cores_for(self, work: float) -> int:
        """Return the number of cores of each machine to use: 1 for little work that runs in this process.

        Args:
            work: Approximate CPU seconds of all tasks together.
        """
        return 1 if work < _LITTLE_WORK and not self.remote else self.cores

    def sharing(self, folder: AnyPath) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context in which a task raises an ``EngineError`` on a machine that sees another folder.

        Args:
            folder: Folder for a small file while the context lasts.
        """
        return nullcontext()

    def run(
        self, function: Callable[..., Result], tasks: Tasks, *, workers: int, memory: int, cores: int = 1
    ) -> Iterator[tuple[int, Result]]:
        """Run ``function(*task)`` for each task; yield (index of the task, result) in order of completion.

        Tasks are taken from the iterable as workers become free. An exception in a task, or in the caller
        between results (such as Ctrl-C), ends all tasks and is raised.

        Args:
            function: Function at module level, so that workers can import it.
            tasks: Arguments of each task.
            workers: Number of tasks to run at a time on each machine.
            memory: Memory that a task may use, in bytes. Not enforced on this machine.
            cores: Number of cores that a task uses. Default 1. Not enforced on this machine.

        Raises:
            HexdataError: A worker process died, for example because it was killed or memory ran out.
        """
        del memory, cores
        todo = iter(tasks)
        # Taken before the pool exists: a single task, or a single worker, needs no other process.
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
        left, futures = enumerate(chain(first, todo)), dict[Future[Result], int]()
        try:
            while True:
                with block_interrupts():  # a worker may be started here
                    for index, task in islice(left, _QUEUED * len(first) - len(futures)):
                        futures[executor.submit(function, *task)] = index
                if not futures:
                    return
                for future in wait(futures, return_when=FIRST_COMPLETED).done:
                    yield futures.pop(future), future.result()
        except TerminatedWorkerError as error:
            raise HexdataError(
                "a worker process died",
                # loky's message has the exit codes after these words.
                found=f"exit codes {str(error).rpartition('workers are ')[2].splitlines()[0]}",
                hint="If memory ran out, use fewer workers. Run the command again to resume.",
            ) from error
        finally:  # after an error or if the caller takes no more results, tasks are left
            executor.shutdown(wait=True, kill_workers=bool(futures))


LOCAL: Final = Engine()


def _start_worker(parent: int) -> None:
    """Initialize a worker: ignore Ctrl-C, and exit when the parent has exited."""

    def exit_with_parent() -> None:
        # A parent that was killed cannot end its workers, which would wait for tasks forever.
        while not has_ended(parent):
            time.sleep(0.2)
        # ``sys.exit`` would end only this thread.
        os._exit(1)

    hide_pandas()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers started later do not inherit the mask
    threading.Thread(target=exit_with_parent, daemon=True).start()
