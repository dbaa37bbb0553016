"""The worker processes of an export: how many there are, and what memory each is given. Writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from hexdata.engine import Engine
from hexdata.pool import WorkerOptions
from hexdata.remote import client_memory
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
    """Run tasks that read a store and write into it, as ``Engine.run`` does, with what the options allow.

    Raises:
        BudgetError: the workers asked for do not fit into the memory.
    """
    more = client_memory(store.path)
    workers = options.processes(engine.machines.cores, more)
    return engine.run(function, tasks, workers=workers, memory=options.WORKER_MEMORY + more)
