"""Number of worker processes of a stage, from cores and memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Final

import psutil

from hexdata.errors import BudgetError, ConfigError

__all__ = ["LEADER_MEMORY", "WorkerOptions", "default_workers", "memory_limit", "resident_bytes"]

LEADER_MEMORY: Final = 128 << 20
"""Bytes that a process holds while its workers do the work."""

_STACK: Final = 8 << 20
"""Bytes that the system counts for the stack of a thread, used or not."""
_OTHER_THREADS: Final = 4


def default_workers() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resident_bytes() -> int:
    """Return the resident bytes of this process and its children; shared pages count in each."""
    this = psutil.Process()
    total = 0
    for process in [this, *this.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:  # the process ended between the two calls
            continue
    return total


@contextmanager
def memory_limit(memory: int, threads: int | None = None) -> Iterator[None]:
    """Let the system refuse this process more memory than ``memory`` for the time of a ``with`` block.

    It has no effect where the system cannot do that (it is Linux's ``RLIMIT_DATA``). A process that
    holds most of ``memory`` already, such as a notebook, may still allocate half of it.

    Args:
        memory: bytes for the whole process, what it holds now included.
        threads: that the block starts, for whose stacks room is left. Default: one per core.

    Raises:
        BudgetError: an allocation was refused.
    """
    import resource

    held = psutil.Process().memory_info()
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    stacks = _STACK * ((threads or default_workers()) + _OTHER_THREADS)
    limit = getattr(held, "data", 0) + max(memory - held.rss, memory // 2) + stacks
    known = [bound for bound in (before, hard) if bound != resource.RLIM_INFINITY]
    if hasattr(held, "data"):
        resource.setrlimit(resource.RLIMIT_DATA, (min([limit, *known]), hard))
    try:
        yield
    except MemoryError as error:
        raise BudgetError(
            "the memory is used up", expected=f"at most {memory / 1e6:,.0f} MB", hint="Raise --memory."
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a stage that runs in worker processes.

    Attributes:
        workers: number of processes. Default None: one per core, as far as ``memory`` allows.
        memory: memory limit in bytes for all processes together. Default 1 GB.

    Raises:
        ConfigError: a value is out of range.
        BudgetError: the workers, or even one worker, do not fit into the memory.
    """

    WORKER_MEMORY: ClassVar[int]
    """Measured peak memory in bytes of a process of the stage: a worker, or the only process."""
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, not a field

    workers: int | None = None
    memory: int = 1_000_000_000

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigError("workers must be at least 1", found=self.workers)
        self._require_memory(self.WORKER_MEMORY)

    def _require_memory(self, each: int) -> None:
        asked = 1 if self.workers is None else self.workers
        least = asked * each + (LEADER_MEMORY if asked > 1 else 0)
        if least > self.memory:
            raise BudgetError.of_memory(
                f"too little memory for {asked} worker{'s' if asked > 1 else ''}",
                found=self.memory,
                expected=least,
                hint="Raise --memory, or lower --workers.",
            )

    def processes(self, cores: int, more: int = 0) -> int:
        """Return the number of worker processes to run.

        Args:
            cores: number of cores of the machine.
            more: bytes that each process needs in addition to ``WORKER_MEMORY``. Default 0.

        Raises:
            BudgetError: the requested workers do not fit into the memory.
        """
        each = self.WORKER_MEMORY + more
        self._require_memory(each)
        return self.workers or max(1, min(cores, (self.memory - LEADER_MEMORY) // each))
