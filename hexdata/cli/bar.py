"""The progress bar on standard error. It is shown only if standard error is a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from hexdata.cli.render import Output, console
from hexdata.pool import resident_bytes
from hexdata.text import printable
from hexdata.units import format_bytes

__all__ = ["ProgressBar"]


class _Rate(ProgressColumn):
    """Units per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        unit = task.fields["unit"]
        amount = format_bytes(speed) if unit == "bytes" else f"{speed:,.0f} {unit}"
        return Text(f"{amount}/s", style="progress.data.speed")


class _Memory(ProgressColumn):
    """Resident memory of this process and its workers, while the stage runs."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text("")
        return Text(format_bytes(resident_bytes()), style="cyan")


class ProgressBar:
    """Shows the library's progress reports (``Progress``). Removed at the end of the ``with`` block."""

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
        """Add a line for a new stage. The lines of finished stages remain."""
        self._end_task()
        self._task = self._bar.add_task(printable(stage), total=total or None, unit=unit)

    def _end_task(self) -> None:
        """Complete the line of the previous stage, if its length was unknown."""
        for task in self._bar.tasks:
            if task.id == self._task and task.total is None:
                done = task.completed or 1
                self._bar.update(task.id, total=done, completed=done)

    def advance(self, amount: int) -> None:
        """Advance the bar of the current stage."""
        if self._task is not None:
            self._bar.advance(self._task, amount)

    def note(self, message: str) -> None:
        """Print a note above the bar."""
        if self._output.err.is_terminal:
            self._bar.console.print(f"note: {printable(message)}")
        else:
            self._output.note(message)
