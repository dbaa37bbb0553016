"""What a command found, as a person reads it or as JSON: the one place that prints facts.

Every text passes through ``printable`` here: names out of files neither reach the terminal as control
characters nor begin a line of their own.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any, Final, TextIO

import typer
from rich.console import Console
from rich.table import Table

from hexdata.text import printable

__all__ = ["Output", "console"]


_PIPED_WIDTH: Final = 200
"""Columns of a table that goes into a file or a pipe: nothing is folded there."""


def console(*, stderr: bool = False, soft_wrap: bool = True) -> Console:
    """Return a console to which brackets are no markup and ``:smile:`` is no picture: they may be of a name.

    Args:
        stderr: print on standard error. Default: standard output.
        soft_wrap: leave lines as long as they are.
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
    """Return whether a stream is a terminal, whatever ``FORCE_COLOR`` says of colours."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


class Output:
    """Prints facts on standard output, notes and errors on standard error."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = console()
        if not self.out.is_terminal:
            self.out.width = _PIPED_WIDTH
        self.err = console(stderr=True)

    def facts(self, result: Any) -> bool:
        """Print a result as one line of JSON if that is asked for; say whether it was."""
        if self.as_json:
            typer.echo(json.dumps(result, default=asdict))  # nowhere, where standard output is closed
        return self.as_json

    def line(self, text: str = "") -> None:
        """Print a line."""
        self.out.print(printable(text))

    def table(self, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table, numbers to the right."""
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
        """Print what went wrong, on standard error."""
        self.err.print(f"hexdata: {printable(message)}", style="bold red")

    def note(self, message: str) -> None:
        """Print a line for the person who watches, on standard error."""
        self.err.print(f"note: {printable(message)}")
