"""How many workers a stage may have, by the cores and the memory. Starts none: that is the engine's duty."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

import psutil

from hexdata.errors import BudgetError, ConfigError

__all__ = ["WorkerOptions", "default_workers", "resident_bytes"]


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
        if self.workers is not None and self.workers < 1:
            raise ConfigError("workers must be at least 1", found=self.workers)
        self._require_room(self.WORKER_MEMORY)

    def _require_room(self, each: int) -> None:
        asked = 1 if self.workers is None else self.workers
        if asked * each > self.memory:
            raise BudgetError(
                f"too little memory for {asked} worker{'s' if asked > 1 else ''}",
                found=f"{self.memory / 1e6:,.0f} MB",
                expected=f"at least {asked * each / 1e6:,.0f} MB",
                hint="Raise --memory, or lower --workers.",
            )

    def processes(self, cores: int, more: int = 0) -> int:
        """Return how many worker processes to run on a machine with so many cores.

        Args:
            cores: of the machine.
            more: bytes that each of them holds above ``WORKER_MEMORY``.

        Raises:
            BudgetError: those asked for do not fit into the memory.
        """
        each = self.WORKER_MEMORY + more
        self._require_room(each)
        return self.workers or max(1, min(cores, self.memory // each - 1))
