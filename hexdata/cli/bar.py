"""The progress bar: drawn on standard error where that is a terminal, silent elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from hexdata.cli.render import Output, console
from hexdata.pool import resident_bytes
from hexdata.text import printable
from hexdata.units import format_bytes

__all__ = ["Bar"]


class _Rate(ProgressColumn):
    """Units a second, in the unit of the stage."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        unit = task.fields["unit"]
        amount = format_bytes(speed) if unit == "bytes" else f"{speed:,.0f} {unit}"
        return Text(f"{amount}/s", style="progress.data.speed")


class _Memory(ProgressColumn):
    """Resident memory of this process and its workers."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text("")
        return Text(format_bytes(resident_bytes()), style="cyan")


class Bar:
    """A ``Progress`` of the library, shown. A context manager: the bar goes when the work is done."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._bar = Progress(
            TextColumn("{task.description:<14}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            _Rate(),
            _Memory(),
            TimeRemainingColumn(compact=True),
            console=console(stderr=True, soft_wrap=False),
            disable=not output.err.is_terminal,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        """Show the next stage; the one before it stays as it ended."""
        self._end_task()
        self._task = self._bar.add_task(printable(stage), total=total or None, unit=unit)

    def _end_task(self) -> None:
        """Let the stage before stand still, if nobody knew how long it would be."""
        for task in self._bar.tasks:
            if task.id == self._task and task.total is None:
                done = task.completed or 1
                self._bar.update(task.id, total=done, completed=done)

    def advance(self, amount: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bar.advance(self._task, amount)

    def note(self, message: str) -> None:
        """Print a line above the bar."""
        if self._output.err.is_terminal:
            self._bar.console.print(f"note: {printable(message)}")
        else:
            self._output.note(message)
