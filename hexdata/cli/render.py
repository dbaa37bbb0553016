"""Printing of results, as tables and lines or as JSON, and of notes and errors.

Control characters and line feeds in texts are escaped with ``printable``, because texts may contain names of
files.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from textwrap import wrap as wrap_text
from typing import Any, Final, TextIO

import typer
from rich.console import Console
from rich.table import Table

from hexdata.text import printable

__all__ = ["Output", "console"]


_PIPED_WIDTH: Final = 200
"""Width of tables in characters, if standard output is a file or a pipe."""


def console(*, stderr: bool = False, soft_wrap: bool = True) -> Console:
    """Return a console that prints texts as they are, without rich's markup and emoji codes.

    Args:
        stderr: print to standard error. Default False: to standard output.
        soft_wrap: do not wrap long lines. Default True.
    """
    return Console(
        force_terminal=_is_terminal(sys.stderr if stderr else sys.stdout),
        color_system="256" if os.environ.get("FORCE_COLOR") else "auto",
        stderr=stderr,
        soft_wrap=soft_wrap,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal. Unlike rich, ignores ``FORCE_COLOR``."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # the stream is closed
        return False


class Output:
    """Prints results to standard output, and notes and errors to standard error.

    Args:
        as_json: print results as JSON.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = console()
        if not self.out.is_terminal:
            self.out.width = _PIPED_WIDTH
        self.err = console(stderr=True)

    def print_json(self, result: Any) -> bool:
        """Print a result as one line of JSON, if the option --json was given. Return whether it was."""
        if self.as_json:
            typer.echo(json.dumps(result, default=asdict))  # does nothing if standard output is closed
        return self.as_json

    def line(self, text: str = "") -> None:
        """Print a line of text."""
        self.out.print(printable(text))

    def table(self, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table. Columns of numbers are aligned right."""
        rows = [[printable(text) for text in row] for row in rows]
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index, name in enumerate(columns):
            numeric = all(row[index][:1].isdigit() or row[index] in ("", "-") for row in rows)
            table.add_column(
                printable(name), justify="right" if numeric and rows else "left", overflow="fold"
            )
        for row in rows:
            table.add_row(*row)
        self.out.print(table)

    def error(self, message: str) -> None:
        """Print an error message to standard error."""
        self.err.print(f"hexdata: {printable(message)}", style="bold red")

    def note(self, message: str) -> None:
        """Print a note to standard error."""
        self.err.print(f"note: {printable(message)}")

    def note_line(self, message: str, *, wrap: bool = True) -> None:
        """Print a further line of a note or an error, indented, to standard error.

        Args:
            message: the line. If it begins with spaces, it is an item of a list, and a terminal shows only
                what fits on one line.
            wrap: wrap another line at spaces on a terminal. False for commands that can be copied.
        """
        text = f"  {printable(message)}"
        if not self.err.is_terminal or not (wrap or message.startswith("  ")):
            self.err.print(text)
        elif message.startswith("  "):
            self.err.print(text, no_wrap=True, soft_wrap=False, overflow="ellipsis")
        else:
            lines = wrap_text(text, self.err.width, subsequent_indent="  ", break_long_words=False)
            self.err.print("\n".join(lines))
