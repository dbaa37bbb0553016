"""Interface of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final, Protocol, TypeVar

from hexdata.storage import AnyPath

__all__ = ["DIGEST_MEMORY", "ENGINES", "Engine", "Machines", "function_name"]

ENGINES: Final = ("local", "ray")
DIGEST_MEMORY: Final = 200 << 20
"""Memory in bytes of a process that only reads files: interpreter, libraries and a buffer."""

LITTLE_WORK: Final = 2.0
"""CPU seconds of work for which it takes longer to start two workers, each for a second, than to do it."""
MOST_CORES: Final = 0.8
"""Fraction of all cores that tasks of several cores must be able to use."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Machines:
    """The machines that run tasks.

    Attributes:
        count: Number of machines.
        cores: Number of cores that tasks may use on each machine; the maximum if they differ.
        separate: Whether the tasks of a shuffle run in separate processes rather than in threads.
        sizes: Cores and bytes of memory that tasks may use on each machine. Default none: as many cores as
            ``cores``, and any memory.
    """

    count: int
    cores: int
    separate: bool
    sizes: tuple[tuple[int, float], ...] = ()

    def cores_for(self, work: float) -> int:
        """Return the number of cores of each machine to use: 1 for little work that runs in this process.

        Args:
            work: Approximate CPU seconds of all tasks together.
        """
        return 1 if work < LITTLE_WORK and not self.separate else self.cores

    def cores_per_task(self, most: int, memory: int) -> int:
        """Return the largest number of cores per task for which tasks can use almost all cores.

        Machines that are too small for such tasks remain unused, up to a fifth of all cores.

        Args:
            most: Number of cores to use on each machine.
            memory: Bytes of memory that a task uses per core.
        """
        sizes = self.sizes or ((self.cores, inf),) * self.count

        def usable(cores: int) -> int:
            tasks = (min(own // cores, most // cores, size / (memory * cores)) for own, size in sizes)
            return sum(max(int(count), 0) for count in tasks) * cores

        enough = max(MOST_CORES * usable(1), 1)
        return next((cores for cores in range(most, 1, -1) if usable(cores) >= enough), 1)


class Engine(Protocol):
    """Runs tasks. A remote engine must see the same files under the same paths."""

    @property
    def machines(self) -> Machines:
        """The machines that are available now."""

    def require(self, paths: Sequence[AnyPath], folder: AnyPath | None = None) -> None:
        """Check that every machine runs the same code and sees the same files.

        Args:
            paths: Files and folders that tasks will read.
            folder: Existing folder that tasks will write to. Default None.

        Raises:
            EngineError: A machine differs.
        """

    def run(
        self,
        function: Callable[..., Result],
        tasks: Iterable[tuple[Any, ...]],
        *,
        workers: int,
        memory: int,
        cores: int = 1,
    ) -> Iterator[tuple[int, Result]]:
        """Run ``function(*task)`` for each task; yield (index of the task, result) in order of completion.

        Tasks are taken from the iterable as workers become free. An exception in a task, or in the caller
        between results (such as Ctrl-C), ends all tasks and is raised.

        Args:
            function: Function at module level, so that workers can import it; or a ``functools.partial`` of
                one, with arguments that all tasks share. They are sent to each machine once.
            tasks: Arguments of each task.
            workers: Number of tasks to run at a time on each machine.
            memory: Memory that a task may use, in bytes.
            cores: Number of cores that a task uses. Default 1.

        Raises:
            HexdataError: A worker died, also when its task was repeated, if the engine repeats tasks.
        """

    def run_light(
        self, function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], *, workers: int
    ) -> Iterator[tuple[int, Result]]:
        """Run tasks that mostly wait for the disk or hash, like :meth:`run`, possibly in threads."""


def function_name(function: Callable[..., object]) -> str:
    """Return the name of a function passed to :meth:`Engine.run`, without leading underscores."""
    named = function.func if isinstance(function, partial) else function
    return named.__name__.lstrip("_")
