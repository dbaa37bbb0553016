"""What a command found, as a person reads it or as JSON: the one place that prints facts."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table

__all__ = ["Output"]


_PIPED_WIDTH: Final = 200
"""Columns of a table that goes into a file or a pipe: nothing is folded there."""


class Output:
    """Prints facts on standard output, notes and errors on standard error.

    Texts are printed as they are: brackets in them, of a path or a value, are no markup.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = Console(highlight=False, soft_wrap=True, markup=False)
        if not self.out.is_terminal:
            self.out.width = _PIPED_WIDTH
        self.err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

    def facts(self, result: Any) -> bool:
        """Print a result as one line of JSON if that is asked for; say whether it was."""
        if self.as_json:
            typer.echo(json.dumps(result, default=asdict))  # nowhere, where standard output is closed
        return self.as_json

    def line(self, text: str = "") -> None:
        """Print a line."""
        self.out.print(text)

    def table(self, columns: list[str], rows: list[list[str]]) -> None:
        """Print a table, numbers to the right."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index, name in enumerate(columns):
            numeric = all(row[index][:1].isdigit() or row[index] in ("", "-") for row in rows)
            table.add_column(name, justify="right" if numeric and rows else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.out.print(table)

    def error(self, message: str) -> None:
        """Print what went wrong, on standard error."""
        self.err.print(f"hexdata: {message}", style="bold red")

    def note(self, message: str) -> None:
        """Print a line for the person who watches, on standard error."""
        self.err.print(f"note: {message}")
