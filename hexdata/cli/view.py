"""The console view of a live pipeline, for terminals of any width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hexdata.cli.render import console
from hexdata.live.metrics import LiveMetrics, StageMetrics
from hexdata.text import printable

__all__ = ["LiveView", "View"]

_WIDE: Final = 72
"""Minimum width of the terminal for bars and busy threads."""
_BAR: Final = 8
"""Width of a bar."""
_BAD_FILES: Final = 3
"""Maximum number of bad files shown."""
_PARTS: Final = " ▏▎▍▌▋▊▉█"
"""Characters that fill a cell of a bar, by eighths."""


class View:
    """A printable summary of a live pipeline, laid out for the current width of the terminal."""

    def __init__(self, title: str, facts: LiveMetrics) -> None:
        self._title = title
        self._facts = facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the title, the key numbers, a table of the stages, their counts and notes."""
        facts = self._facts
        title = f"{printable(self._title)}  {_clock(facts.seconds)}"
        yield Text(title, style="bold", no_wrap=True, overflow="ellipsis")
        yield _headlines(facts)
        if facts.waiting is not None:
            yield Text(printable(f"no batch: {facts.waiting}"), style="yellow", overflow="fold")
        yield Text()
        yield _stages(facts.stages, wide=options.max_width >= _WIDE, ascii_only=options.ascii_only)
        yield from _counts(facts.stages)
        yield from _notes(facts.notes)


class LiveView:
    """A ``View`` on standard error, updated by each call and removed at the end of the ``with`` block."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._live = Live(console=console(stderr=True, soft_wrap=False), auto_refresh=False, transient=True)

    def __enter__(self) -> Callable[[LiveMetrics], None]:
        self._live.start()
        return self.show

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, facts: LiveMetrics) -> None:
        """Replace the view."""
        self._live.update(View(self._title, facts), refresh=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _headlines(facts: LiveMetrics) -> Table:
    """Return the key numbers: one name with its numbers per line."""
    lines = {
        "positions": [f"{facts.positions_per_second:,.0f}/s", f"{facts.positions:,} so far"],
        "batches": [f"{facts.batches:,}"],
        "games": [] if facts.games is None else [f"{facts.games:,} seen"],
        "newest file": [facts.newest_file or "none yet"],
    }
    if facts.pairs is not None:
        lines["batches"].append(f"{facts.pairs:.2f} same-game pairs in each")
    if facts.pool is not None:
        lines["games"].append(f"{facts.pool:,} in the pool")
    if facts.average_uses is not None:
        lines["games"].append(f"each used {facts.average_uses:.2f} times")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, figures in lines.items():
        if figures:
            grid.add_row(name, Text(printable(", ".join(figures))))
    return grid


def _stages(stages: list[StageMetrics], *, wide: bool, ascii_only: bool) -> Table:
    """Return a table of the stages and their output queues."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2 if wide else 1, 0, 0))
    table.add_column("stage", no_wrap=True, overflow="ellipsis")
    for name in ("items/s", "queue", *(("", "dropped", "busy") if wide else ("dropped",))):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for stage in stages:
        row: list[str | Text] = [
            Text(printable(stage.name)),
            f"{stage.per_second:,.1f}",
            f"{stage.queued}/{stage.capacity}",
        ]
        if wide:
            row.append(_bar(stage.queued / stage.capacity, ascii_only))
        row.append(Text(f"{stage.dropped:,}", style="yellow" if stage.dropped else ""))
        if wide:
            row.append(f"{stage.busy:.1f} of {stage.threads}")
        table.add_row(*row)
    return table


def _bar(share: float, ascii_only: bool) -> Text:
    """Return a bar. Shares above 1 are drawn as 1: after a resume, a queue may exceed its capacity."""
    style = "green on bright_black" if share < 1 else "yellow on bright_black"
    if ascii_only:
        return Text(("#" * round(min(share, 1.0) * _BAR)).ljust(_BAR, "."))
    eighths = round(min(share, 1.0) * _BAR * 8)
    cells = [_PARTS[min(8, max(0, eighths - 8 * cell))] for cell in range(_BAR)]
    return Text("".join(cells), style=style)


def _counts(stages: list[StageMetrics]) -> Iterator[Text]:
    """Yield a line for each stage that has counts."""
    for stage in stages:
        counts = [f"{name.replace('_', ' ')} {_number(value)}" for name, value in stage.counts.items()]
        if counts:
            yield Text(printable(f"{stage.name}: {', '.join(counts)}"), style="dim", overflow="fold")


def _notes(notes: Mapping[str, Mapping[str, Any]]) -> Iterator[Text]:
    """Yield a line for a missing directory, and for each of the last bad files."""
    for note in notes.values():
        if "unavailable" in note:
            text = f"waiting for the missing directory: {note['unavailable']}"
            yield Text(printable(text), style="yellow", overflow="fold")
        for name, reason in note.get("bad", [])[-_BAD_FILES:]:
            yield Text(printable(f"bad file {name}: {reason}"), style="yellow", overflow="fold")


def _number(value: float) -> str:
    return f"{value:,.2f}" if value % 1 else f"{int(value):,}"
