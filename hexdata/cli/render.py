"""Printing of results, as tables and lines or as JSON, and of notes and errors.

Control characters and line feeds in texts are escaped with ``printable``, because texts may contain names of
files.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, TextIO

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hexdata.cli.messages import print_stderr
from hexdata.text import is_number, printable, wrap
from hexdata.units import format_bytes

_GAP: Final = 2
"""Blanks between two columns of a table."""
_MIN_TEXT: Final = 16
"""Width to which a column of texts may shrink before columns are left out, in characters."""


def console(*, stderr: bool = False, soft_wrap: bool = True) -> Console:
    """Return a console that prints texts as they are, without rich's markup and emoji codes.

    Args:
        stderr: Print to standard error. Default False: to standard output.
        soft_wrap: Do not wrap long lines. Default True.
    """
    return Console(
        force_terminal=is_terminal(sys.stderr if stderr else sys.stdout),
        # rich finds no colours without a terminal, so those that FORCE_COLOR requests are set here.
        color_system="256" if os.environ.get("FORCE_COLOR") else "auto",
        stderr=stderr,
        soft_wrap=soft_wrap,
        highlight=False,
        markup=False,
        emoji=False,
    )


def is_terminal(*streams: TextIO | None) -> bool:
    """Return whether all streams are terminals. Unlike rich, ignores ``FORCE_COLOR``."""
    try:
        return all(stream is not None and stream.isatty() for stream in streams)
    except ValueError:  # the stream is closed
        return False


class Output:
    """Prints results to standard output, and notes to standard error.

    Args:
        as_json: Print results as JSON.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = console()

    def print_json(self, result: Any) -> bool:
        """Print a result as one line of JSON, if the option --json was given. Return whether it was."""
        if self.as_json:
            from msgspec import to_builtins  # not loaded for --help

            typer.echo(json.dumps(result, default=to_builtins))  # does nothing if standard output is closed
        return self.as_json

    def line(self, text: str = "") -> None:
        """Print a line of text. On a terminal, it is wrapped at spaces, except for indented commands."""
        text = printable(text)
        if self.out.is_terminal and not text.startswith(" "):
            text = "\n".join(wrap(text, self.out.width))
        self.out.print(text)

    def records(self, rows: Iterable[object], names: Sequence[str], optional: Sequence[str] = ()) -> None:
        """Print a table with one row per object, whose columns are attributes with these names."""
        texts = [[_text(name, getattr(row, name)) for name in names] for row in rows]
        self.table([*map(_title, names)], texts, optional=[*map(_title, optional)])

    def splits(self, positions: dict[str, int], name: str, counts: dict[str, int]) -> None:
        """Print a table of the splits with their positions and another count."""
        rows = [[split, f"{n:,}", f"{counts[split]:,}"] for split, n in positions.items()]
        self.table(["split", "positions", name], rows)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        optional: Sequence[str] = (),
        numeric: Sequence[bool] | None = None,
        shorten: bool = False,
    ) -> None:
        """Print a table that fits the terminal. A file or a pipe receives tab-separated lines.

        Args:
            columns: Names of the columns.
            rows: Texts of the rows.
            optional: Columns that a narrow terminal does not show, the least important first.
            numeric: Whether each column contains numbers. Default None: determined from the texts.
            shorten: Cut long texts on a terminal instead of wrapping them. Default False.
        """
        columns = [printable(name) for name in columns]
        rows = [[printable(text) for text in row] for row in rows]
        if not self.out.is_terminal:
            self.tabbed([columns, *rows])
            return
        every = range(len(columns))
        numeric = numeric or [all(is_number(row[k]) for row in rows) for k in every]
        ranges = [_widths([columns[k], *(row[k] for row in rows)], numeric[k], shorten) for k in every]
        shown, left_out = [*every], [columns.index(name) for name in optional]
        while (room := self.out.width - _GAP * (len(shown) - 1)) < sum(ranges[k][0] for k in shown):
            if not left_out:
                self._vertical(columns, rows, shorten)
                return
            shown.remove(left_out.pop(0))

        def widths(most: int) -> list[int]:
            return [max(low, min(high, most)) for low, high in (ranges[k] for k in shown)]

        # The widest columns are narrowed first.
        # With the limit 0, each column has its lowest width, and the loop above has made these fit.
        fitting = next(each for each in map(widths, range(room, -1, -1)) if sum(each) <= room)
        grid = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for k, width in zip(shown, fitting, strict=True):
            grid.add_column(
                Text(columns[k]),
                justify="right" if numeric[k] else "left",
                width=width,
                overflow="ellipsis" if shorten else "fold",
                no_wrap=shorten,
            )
        for row in rows:
            grid.add_row(*(Text(row[k]) for k in shown))
        self._print_rows(grid)

    def _vertical(self, columns: Sequence[str], rows: Sequence[Sequence[str]], shorten: bool) -> None:
        """Print one line per column and row, with an empty line between two rows."""
        grid = Table.grid(padding=(0, _GAP, 0, 0))
        names = min(max(map(cell_len, columns)), self.out.width // 2)
        grid.add_column(width=names)
        grid.add_column(
            width=self.out.width - names - _GAP, overflow="ellipsis" if shorten else "fold", no_wrap=shorten
        )
        for number, row in enumerate(rows):
            if number:
                grid.add_row("", "")
            for name, text in zip(columns, row, strict=True):
                grid.add_row(Text(name), Text(text))
        self._print_rows(grid)

    def _print_rows(self, grid: Table) -> None:
        """Print a table without blanks at the ends of lines."""
        options = self.out.options.update(no_wrap=False, overflow="fold")
        # rich fills each line with blanks, which would be copied with the text and wrapped by a narrower
        # terminal.
        for line in self.out.render_lines(grid, options, pad=False):
            text = Text.assemble(*((part.text, part.style or "") for part in line if not part.control))
            text.rstrip()
            self.out.print(text)

    def steps(self, steps: Iterable[tuple[str, str]]) -> None:
        """Print what to do next: each purpose, and below it the command, which is not wrapped."""
        self.line("Next:")
        for purpose, command in steps:
            self.line(f"  {purpose}:")
            self.line(f"    {command}")

    def tabbed(self, rows: Iterable[Sequence[str]]) -> None:
        """Print rows without padding, with tabs between the fields."""
        for row in rows:
            typer.echo("\t".join(map(printable, row)))

    def note(self, message: str) -> None:
        """Print a note to standard error."""
        print_stderr(f"note: {message}")


def _widths(cells: Sequence[str], numeric: bool, shorten: bool) -> tuple[int, int]:
    """Return the lowest and the highest useful width of a column with these texts, its name first.

    Names and numbers are never cut, and words are never broken.
    """
    name, *others = cells
    longest = max(map(cell_len, others), default=0)
    high = max(cell_len(name), longest)
    if shorten:
        return max(cell_len(name), longest if numeric else min(longest, _MIN_TEXT)), high
    if numeric:
        return max(map(cell_len, [*name.split(" "), *others])), high
    words = [word for text in cells for word in text.split(" ")]
    return max(*map(cell_len, words), min(high, _MIN_TEXT)), high


def _title(name: str) -> str:
    return name.replace("_per_second", "/s").replace("_", " ")


def _text(name: str, value: Any) -> str:
    """Return the value of an attribute as text."""
    if value is None:
        return ""
    if name == "bytes":
        return format_bytes(value)
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value if isinstance(value, str) else number_text(value)


def number_text(value: float) -> str:
    """Return a number with four digits, or rounded from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 1_000 or value == int(value) else f"{value:.4g}"
