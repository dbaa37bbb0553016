"""Workers for pure tasks: results come back as they finish, errors and deaths surface.

The processes are loky's, which do not import the caller's main module, so that a stage may be called
from any script or notebook. One worker means this process, without a pool.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import psutil

from hexdata.errors import BudgetError, ConfigError, HexdataError

__all__ = ["WorkerOptions", "default_workers", "resident_bytes", "run_in_threads", "run_tasks"]

Result = TypeVar("Result")


def default_workers() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resident_bytes() -> int:
    """Return the resident memory of this process and its children; pages that they share count in each."""
    this = psutil.Process()
    total = 0
    for process in [this, *this.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:  # it ended between the two calls
            continue
    return total


@dataclass(frozen=True)
class WorkerOptions:
    """The options of a stage that runs in worker processes.

    Attributes:
        workers: processes, at most one a task; None for one a core, as far as ``memory`` allows.
        memory: bytes for all processes together.

    Raises:
        ConfigError: on a value out of range.
        BudgetError: so many workers do not fit into the memory, or not even one does.
    """

    WORKER_MEMORY: ClassVar[int]
    """Bytes that one process of the stage holds at its peak, the parent too, as measured."""
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, not a field

    workers: int | None = None
    memory: int = 1_000_000_000

    def __post_init__(self) -> None:
        asked = 1 if self.workers is None else self.workers
        if asked < 1:
            raise ConfigError("workers must be at least 1", found=asked)
        if asked * self.WORKER_MEMORY > self.memory:
            raise BudgetError(
                f"too little memory for {asked} worker{'s' if asked > 1 else ''}",
                found=f"{self.memory / 1e6:,.0f} MB",
                expected=f"at least {asked * self.WORKER_MEMORY / 1e6:,.0f} MB",
                cure="Raise --memory, or lower --workers.",
            )

    def processes(self) -> int:
        """Return how many worker processes to run."""
        return self.workers or max(1, min(default_workers(), self.memory // self.WORKER_MEMORY - 1))


def run_tasks(
    function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], *, workers: int
) -> Iterator[tuple[int, Result]]:
    """Run ``function(*task)`` for each task; yield (index of the task, result) in order of completion.

    An exception in a task, or one thrown into the caller between results (Ctrl-C among them), ends the
    workers at once and comes out here. Tasks therefore publish their files atomically.

    Raises:
        HexdataError: a worker process died (killed, or out of memory).
    """
    listed = list(tasks)
    if workers <= 1 or len(listed) <= 1:
        for index, task in enumerate(listed):
            yield index, function(*task)
        return
    from loky import ProcessPoolExecutor
    from loky.process_executor import TerminatedWorkerError

    with _children_ignore_interrupts():  # it starts a tracker of resources
        executor = ProcessPoolExecutor(
            max_workers=min(workers, len(listed)),
            initializer=_start_worker,
            initargs=(os.getpid(),),
            env={"ARROW_DEFAULT_MEMORY_POOL": "system"},  # mimalloc holds some 30 MB more, a worker
        )
    finished = False
    try:
        with _children_ignore_interrupts():
            futures = {executor.submit(function, *task): index for index, task in enumerate(listed)}
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
        finished = True
    except TerminatedWorkerError as error:
        raise HexdataError(
            "a worker process died",
            found=f"exit codes {str(error).rpartition('workers are ')[2].splitlines()[0]}",
            cure="If memory ran out, use fewer workers; then run the command again: it goes on from there.",
        ) from error
    finally:
        executor.shutdown(wait=True, kill_workers=not finished)


def run_in_threads(
    function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], *, workers: int
) -> Iterator[tuple[int, Result]]:
    """Do as :func:`run_tasks`, in threads: for tasks that wait for the disk or hash, which need no process.

    An exception leaves the tasks that have not begun undone; those that have are waited for.
    """
    with ThreadPoolExecutor(max_workers=workers) as executor:
        futures = {executor.submit(function, *task): index for index, task in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                yield futures.pop(future), future.result()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


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
