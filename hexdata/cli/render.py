"""Printing of results, as tables and lines or as JSON, and of notes and errors.

Control characters and line feeds in texts are escaped with ``printable``, because texts may contain names of
files.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, TextIO

import typer
from rich.console import Console

from hexdata.cli.tables import lay_out
from hexdata.text import printable, wrap

__all__ = ["Output", "console", "is_terminal"]


def console(*, stderr: bool = False, soft_wrap: bool = True) -> Console:
    """Return a console that prints texts as they are, without rich's markup and emoji codes.

    Args:
        stderr: Print to standard error. Default False: to standard output.
        soft_wrap: Do not wrap long lines. Default True.
    """
    return Console(
        force_terminal=is_terminal(sys.stderr if stderr else sys.stdout),
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
    """Prints results to standard output, and notes and errors to standard error.

    Args:
        as_json: Print results as JSON.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = console()
        self.err = console(stderr=True)

    def print_json(self, result: Any) -> bool:
        """Print a result as one line of JSON, if the option --json was given. Return whether it was."""
        if self.as_json:
            typer.echo(json.dumps(result, default=asdict))  # does nothing if standard output is closed
        return self.as_json

    def line(self, text: str = "") -> None:
        """Print a line of text. On a terminal, it is wrapped at spaces, except for indented commands."""
        text = printable(text)
        if self.out.is_terminal and not text.startswith(" "):
            text = "\n".join(wrap(text, self.out.width))
        self.out.print(text)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        optional: Sequence[str] = (),
        numeric: Sequence[bool] | None = None,
        shorten: bool = False,
        most_vertical: int | None = None,
    ) -> int:
        """Print a table that fits the terminal. A file or a pipe receives tab-separated lines.

        Args:
            columns: Names of the columns.
            rows: Texts of the rows.
            optional: Columns that a narrow terminal does not show, the least important first.
            numeric: Whether each column contains numbers. Default None: determined from the texts.
            shorten: Cut long texts on a terminal instead of wrapping them. Default False.
            most_vertical: Maximum number of rows in the vertical layout. Default None: all.

        Returns:
            The number of rows printed.
        """
        columns = [printable(name) for name in columns]
        rows = [[printable(text) for text in row] for row in rows]
        if not self.out.is_terminal:
            self.tabbed([columns, *rows])
            return len(rows)
        table = lay_out(
            columns,
            rows,
            self.out.width,
            numeric=numeric,
            optional=optional,
            shorten=shorten,
            most_vertical=most_vertical,
        )
        for line in table.header:
            self.out.print(line, style="bold")
        for line in table.body:
            self.out.print(line)
        return table.rows

    def tabbed(self, rows: Iterable[Sequence[str]]) -> None:
        """Print rows without padding, with tabs between the fields."""
        for row in rows:
            typer.echo("\t".join(map(printable, row)))

    def error(self, message: str) -> None:
        """Print an error message to standard error."""
        self.err.print(f"hexdata: {printable(message)}", style="bold red")

    def note(self, message: str) -> None:
        """Print a note to standard error. On a terminal, it is wrapped at spaces."""
        text = f"note: {printable(message)}"
        self.err.print("\n".join(wrap(text, self.err.width)) if self.err.is_terminal else text)

    def note_line(self, message: str, *, is_command: bool = False) -> None:
        """Print a further line of a note or an error, indented, to standard error.

        Args:
            message: The line. If it begins with spaces, it is an item of a list, and a terminal shows only
                what fits on one line.
            is_command: The line is a command that can be copied. A terminal shows other lines wrapped at
                spaces. Default False.
        """
        text = f"  {printable(message)}"
        if not self.err.is_terminal or is_command:
            self.err.print(text)
        elif message.startswith("  "):
            self.err.print(text, no_wrap=True, soft_wrap=False, overflow="ellipsis")
        else:
            self.err.print("\n".join(wrap(text, self.err.width)))
