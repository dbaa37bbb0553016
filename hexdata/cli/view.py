"""The console view of a live pipeline, for terminals of any width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hexdata.cli.render import number_text
from hexdata.live.trial import LiveMetrics
from hexdata.text import printable

_WIDE: Final = 72
"""Minimum width of the terminal for bars and busy threads."""
_BAR: Final = 8
"""Width of a bar."""
_BAD_FILES: Final = 3
"""Maximum number of bad files shown."""


class View:
    """A printable summary of a live pipeline, laid out for the current width of the terminal."""

    def __init__(self, title: str, facts: LiveMetrics) -> None:
        self._title = title
        self._facts = facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the title, the key numbers, a table of the stages, their counts and notes."""
        facts = self._facts
        title = f"{printable(self._title)}  {timedelta(seconds=int(facts.seconds))}"
        yield Text(title, style="bold", no_wrap=True, overflow="ellipsis")
        yield _headlines(facts)
        if facts.waiting is not None:
            yield Text(printable(f"no batch: {facts.waiting}"), style="yellow", overflow="fold")
        yield Text()
        yield _stages(facts.stages, wide=options.max_width >= _WIDE)
        yield from _counts(facts.stages)
        yield from _notes(facts.notes)


def _headlines(facts: LiveMetrics) -> Table:
    """Return the key numbers: one name with its numbers per line."""
    name = "ShufflingChunkPool"
    pool = next((stage["counts"] for stage in facts.stages if stage["name"] == name), None)
    text = "{entered:,} seen, {chunks:,} in the pool, each used {uses:.2f} times"
    games = text.format(**pool) if pool else ""
    pairs = "" if facts.pairs is None else f", {facts.pairs:.2f} same-game pairs in each"
    lines = {
        "positions": f"{facts.positions_per_second:,.0f}/s, {facts.positions:,} so far",
        "batches": f"{facts.batches:,}{pairs}",
        "games": games,
        "newest file": facts.notes.get(name, {}).get("newest") or "none yet",
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, figures in lines.items():
        if figures:
            grid.add_row(name, Text(printable(figures)))
    return grid


def _stages(stages: list[dict[str, Any]], *, wide: bool) -> Table:
    """Return a table of the stages and their output queues."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2 if wide else 1, 0, 0))
    table.add_column("stage", no_wrap=True, overflow="ellipsis")
    for name in ("items/s", "queue", *(("", "busy") if wide else ())):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for stage in stages:
        # After a resume, a queue may exceed its capacity.
        full = min(stage["queued"], stage["capacity"])
        row: list[RenderableType] = [
            Text(printable(stage["name"])),
            f"{stage['per_second']:,.1f}",
            f"{stage['queued']}/{stage['capacity']}",
            ProgressBar(stage["capacity"], full, width=_BAR),
            f"{stage['busy']:.1f} of {stage['threads']}",
        ]
        table.add_row(*(row if wide else row[:3]))
    return table


def _counts(stages: list[dict[str, Any]]) -> Iterator[Text]:
    """Yield a line for each stage that has counts."""
    for stage in stages:
        counts = [f"{name.replace('_', ' ')} {number_text(value)}" for name, value in stage["counts"].items()]
        if counts:
            yield Text(printable(f"{stage['name']}: {', '.join(counts)}"), style="dim", overflow="fold")


def _notes(notes: Mapping[str, Mapping[str, Any]]) -> Iterator[Text]:
    """Yield a line for a missing directory, and for each of the last bad files."""
    for note in notes.values():
        if "unavailable" in note:
            text = f"waiting for the missing directory: {note['unavailable']}"
            yield Text(printable(text), style="yellow", overflow="fold")
        for name, reason in note.get("bad", [])[-_BAD_FILES:]:
            yield Text(printable(f"bad file {name}: {reason}"), style="yellow", overflow="fold")
