"""What every engine can do, and what it says of its machines. No engine itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from hexdata.remote import AnyPath

__all__ = ["DIGEST_MEMORY", "ENGINES", "Engine", "Machines"]

ENGINES: Final = ("local", "ray")
DIGEST_MEMORY: Final = 200 << 20
"""Bytes that a process holds which only reads files through: interpreter, libraries and a buffer."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Machines:
    """What the tasks run on.

    Attributes:
        count: of machines.
        cores: that each may use; where they differ, those of the largest.
        separate: whether a shuffle's tasks are processes of their own, each with an interpreter, rather than
            threads of this one.
    """

    count: int
    cores: int
    separate: bool


class Engine(Protocol):
    """Runs tasks. An engine that is remote sees the same files under the same paths."""

    @property
    def machines(self) -> Machines:
        """What there is to run on now."""

    def require(self, paths: Sequence[AnyPath], folder: AnyPath | None = None) -> None:
        """Check that every machine runs this very code and sees these paths.

        Args:
            paths: of files and folders that tasks will read.
            folder: that tasks will write to; it is there.

        Raises:
            EngineError: one does not.
        """

    def run(
        self,
        function: Callable[..., Result],
        tasks: Iterable[tuple[Any, ...]],
        *,
        workers: int,
        memory: int,
    ) -> Iterator[tuple[int, Result]]:
        """Run ``function(*task)`` for each task; yield (index of the task, result) in order of completion.

        Tasks are taken from the iterable as there is room for them, so that neither many of them nor their
        results pile up. An exception in a task, or one thrown into the caller between results (Ctrl-C among
        them), ends the tasks at once and comes out here.

        Args:
            function: of a module, so that a worker can import it.
            tasks: its arguments, task by task.
            workers: tasks at a time on each machine.
            memory: bytes that each may take.

        Raises:
            HexdataError: a worker died, and again when its task was repeated, if this engine repeats tasks.
        """

    def run_light(
        self, function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]], *, workers: int
    ) -> Iterator[tuple[int, Result]]:
        """Do as :meth:`run` for tasks that wait for the disk or hash, which need no process of their own."""
