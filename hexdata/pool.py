"""Number of worker processes of a stage, from cores and memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import psutil

from hexdata.errors import BudgetError, ConfigError
from hexdata.system import data_limit, has_children

__all__ = [
    "LEADER_MEMORY",
    "WorkerOptions",
    "available_memory",
    "default_workers",
    "memory_limit",
    "resident_bytes",
]

LEADER_MEMORY: Final = 128 << 20
"""Memory in bytes of a process while its workers do the work."""

_STACK: Final = 8 << 20
"""Bytes that the system counts for the stack of a thread, whether used or not."""
_OTHER_THREADS: Final = 4
_CGROUP: Final = Path("/sys/fs/cgroup")
"""The control group of a Linux container, as processes in it see it."""


def default_workers() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Return the bytes of memory that are free, or that the system can free, such as its page cache.

    The memory limit of a Linux container counts.
    """
    available: int = psutil.virtual_memory().available
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        used = {name: int(size) for name, _, size in (line.partition(" ") for line in lines)}
    except (OSError, ValueError):  # no container, or no limit: "max"
        return available
    return max(0, min(available, limit - used.get("anon", 0)))


def resident_bytes() -> int:
    """Return the resident bytes of this process and its children; shared pages count in each."""
    this = psutil.Process()
    total = 0
    children = this.children(recursive=True) if has_children() else []  # reads all processes of the machine
    for process in [this, *children]:
        try:
            total += process.memory_info().rss
        except psutil.Error:  # the process ended between the two calls
            continue
    return total


@contextmanager
def memory_limit(memory: int, threads: int | None = None) -> Iterator[None]:
    """Limit the memory of this process while a ``with`` block runs.

    The limit is Linux's ``RLIMIT_DATA``; other systems have none. A process that already uses most of
    ``memory``, such as a notebook, may still allocate half of it.

    Args:
        memory: Bytes for the whole process, including the memory that it uses now.
        threads: Number of threads that the block starts; their stacks are added to the limit. Default None:
            one per core.

    Raises:
        BudgetError: An allocation was refused.
    """
    usage = psutil.Process().memory_info()
    stacks = _STACK * ((threads or default_workers()) + _OTHER_THREADS)
    limit = getattr(usage, "data", 0) + max(memory - usage.rss, memory // 2) + stacks
    try:
        with data_limit(limit):
            yield
    except MemoryError as error:
        raise BudgetError(
            "out of memory", expected=f"at most {memory / 1e6:,.0f} MB", hint="Raise --memory."
        ) from error


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a stage that runs in worker processes.

    Attributes:
        workers: Number of processes. Default None: 1 for little data, else one per core, as far as ``memory``
            allows.
        memory: Memory limit in bytes for all processes together. Default 1 GB.

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The workers, or even one worker, do not fit into the memory.
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
        workers = 1 if self.workers is None else self.workers
        least = workers * each + (LEADER_MEMORY if workers > 1 else 0)
        if least > self.memory:
            raise BudgetError.of_memory(
                f"too little memory for {workers} worker{'s' if workers > 1 else ''}",
                found=self.memory,
                expected=least,
                hint="Raise --memory, or lower --workers.",
            )

    def processes(self, cores: int, extra: int = 0) -> int:
        """Return the number of worker processes to run: the requested one, or as many as fit into the memory.

        Args:
            cores: Maximum number of processes if none was requested.
            extra: Bytes that each process needs in addition to ``WORKER_MEMORY``. Default 0.

        Raises:
            BudgetError: The requested workers do not fit into the memory.
        """
        each = self.WORKER_MEMORY + extra
        self._require_memory(each)
        return self.workers or max(1, min(cores, (self.memory - LEADER_MEMORY) // each))
