"""The worker processes of an export: their number and the memory limit of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from hexdata.engine import Engine
from hexdata.pool import WorkerOptions
from hexdata.storage import client_memory
from hexdata.store import Store

__all__ = ["run_workers"]

Result = TypeVar("Result")


def run_workers(
    store: Store,
    options: WorkerOptions,
    engine: Engine,
    function: Callable[..., Result],
    tasks: Iterable[tuple[Any, ...]],
) -> Iterator[tuple[int, Result]]:
    """Run tasks that read and write a store with ``Engine.run``, within the limits of the options.

    Args:
        store: the store that the tasks read and write.
        options: number of workers and memory limit.
        engine: runs the tasks.
        function: called with the arguments of each task.
        tasks: arguments of each task.

    Yields:
        The index and the result of each task, as they finish.

    Raises:
        BudgetError: the workers do not fit into the memory.
    """
    more = client_memory(store.path)
    workers = options.processes(engine.machines.cores, more)
    return engine.run(function, tasks, workers=workers, memory=options.WORKER_MEMORY + more)
