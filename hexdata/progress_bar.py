"""A progress bar with rate, time left and memory, for terminals and notebooks."""

from __future__ import annotations

import io
import sys
import time
from typing import Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from hexdata.system import resident_bytes
from hexdata.text import printable, wrap
from hexdata.units import format_bytes, format_duration

__all__ = ["ProgressBar"]

_NARROW: Final = 80
"""Terminals below this width show the rate without its unit."""
_STAGE: Final = 14
"""Minimum width of the name of a stage, in characters."""
_FACTS: Final = {True: 46, False: 56}
"""Width of the percentage, rate, time left and memory, without and with the unit of the rate."""
_MIN_BAR: Final = 6
_MAX_BAR: Final = 40
_NOTEBOOK_WIDTH: Final = 100
_NOTEBOOK_SECONDS: Final = 0.5
"""Minimum time between two updates in a notebook."""


class _Labelled(ProgressColumn):
    """A text that is never wrapped."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True))


class _Rate(_Labelled):
    """Units per second."""

    def __init__(self, *, narrow: bool) -> None:
        super().__init__()
        self._narrow = narrow

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        unit = task.fields["unit"]
        amount = format_bytes(speed) if unit == "bytes" else f"{speed:,.0f}"
        name = "" if unit == "bytes" or self._narrow else f" {unit}"
        return Text(f"{amount}{name}/s", style="progress.data.speed")


class _TimeLeft(_Labelled):
    """Estimated time until the end of the stage."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.fields.get("stopped") and not task.finished:
            return Text("stopped", style="progress.remaining")
        if task.finished or task.time_remaining is None:
            return Text("")
        return Text(f"{format_duration(task.time_remaining)} left", style="progress.remaining")


class _Memory(_Labelled):
    """Resident memory of this process and its workers, while the stage runs."""

    # Measuring the memory of all workers takes time, so a drawing within this time shows the last number.
    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.finished or task.fields.get("stopped"):
            return Text("")
        return Text(f"memory {format_bytes(resident_bytes())}", style="cyan")


class ProgressBar:
    """Shows the progress of a stage: share done, rate, time left and memory.

    Pass it to a stage as ``progress``:

        with ProgressBar() as bar:
            hexdata.shuffle_store("store", progress=bar)

    A notebook shows it below the cell, and the lines remain. A terminal shows it on standard error until the
    end of the ``with`` block. Without a terminal, only notes are printed.

    Args:
        console: Console of rich to draw on. Default None: standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(
            stderr=True, highlight=False, markup=False, emoji=False, force_jupyter=False
        )
        self._notebook = _Notebook() if console is None and _in_notebook() else None
        drawn_on = self._notebook.console if self._notebook else self._console
        width = drawn_on.width
        narrow = width < _NARROW
        stage_width = max(width - _FACTS[narrow], _STAGE)
        bar = []
        # A narrow terminal shows the numbers without a bar.
        if stage_width >= _STAGE + 1 + _MIN_BAR:
            bar_width = min(max(stage_width // 2 - 6, _MIN_BAR), _MAX_BAR)
            bar, stage_width = [BarColumn(bar_width)], stage_width - 1 - bar_width
        stage = Column(no_wrap=True, overflow="ellipsis", max_width=stage_width)
        self._bar = Progress(
            TextColumn(f"{{task.description:<{_STAGE}}}", markup=False, table_column=stage),
            *bar,
            TextColumn("{task.percentage:>3.0f}%"),
            _Rate(narrow=narrow),
            _TimeLeft(),
            _Memory(),
            console=drawn_on,
            disable=not drawn_on.is_terminal,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._end_task()
        elif self._task is not None:
            self._bar.update(self._task, stopped=True)
        # The last lines of a notebook remain, so they are drawn again after the bar has stopped.
        self._bar.stop()
        self._update(force=True)

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        """Add a line for a new stage. The lines of finished stages remain.

        Args:
            stage: Name of the stage or step.
            total: Number of units; None if unknown.
            unit: Unit of the numbers, such as "positions" or "bytes".
        """
        self._end_task()
        # A stage without units has no total, so that its end shows 100 % and not 0 %.
        self._task = self._bar.add_task(printable(stage), total=total or None, unit=unit)
        self._update(force=True)

    def _end_task(self) -> None:
        """Complete the line of the previous stage, if its length was unknown."""
        for task in self._bar.tasks:
            if task.id == self._task and task.total is None:
                done = task.completed or 1
                self._bar.update(task.id, total=done, completed=done)

    def advance(self, amount: int) -> None:
        """Advance the bar of the current stage by a number of units."""
        if self._task is not None:
            self._bar.advance(self._task, amount)
            self._update()

    def note(self, message: str) -> None:
        """Print a note above the bar."""
        text = f"note: {printable(message)}"
        if self._console.is_terminal:
            text = "\n".join(wrap(text, self._console.width))
        self._console.print(text, soft_wrap=True)

    def _update(self, *, force: bool = False) -> None:
        if self._notebook is not None:
            self._notebook.show(self._bar, force=force)


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class _Notebook:
    """An output of a notebook cell that is replaced by each update. It needs no widgets."""

    def __init__(self) -> None:
        self.console = Console(
            file=io.StringIO(),
            width=_NOTEBOOK_WIDTH,
            color_system=None,
            legacy_windows=False,
            force_jupyter=False,  # rich would display each line as an output of its own
        )
        self._handle: Any = None
        self._shown = 0.0

    def show(self, bar: Progress, *, force: bool) -> None:
        """Replace the output, unless it was replaced a moment ago and ``force`` is False."""
        now = time.monotonic()
        if not bar.tasks or not (force or now - self._shown >= _NOTEBOOK_SECONDS):
            return
        self._shown = now
        with self.console.capture() as captured:
            self.console.print(bar.get_renderable())
        text = "\n".join(line.rstrip() for line in captured.get().splitlines())
        data = {"text/plain": text}
        if self._handle is None:
            show: Any = sys.modules["IPython"].display.display
            self._handle = show(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
