"""Messages of the commands on standard error: notes and errors. Loads no libraries."""

from __future__ import annotations

import shutil
import sys

from hexdata.errors import HexdataError, without_secrets
from hexdata.text import printable, wrap


def print_stderr(message: str, *, whole: bool = False) -> None:
    """Print one line to standard error, with control characters escaped.

    A terminal wraps it at spaces, and cuts an item of a list, which begins with four spaces.

    Args:
        message: The line.
        whole: Neither wrap nor cut it, such as a command that can be copied. Default False.
    """
    text = printable(without_secrets(message))
    if sys.stderr.isatty() and not whole:
        width = shutil.get_terminal_size().columns
        if not text.startswith("    "):
            text = "\n".join(wrap(text, width))
        elif len(text) > width:
            text = f"{text[: width - 1]}…"
    sys.stderr.write(f"{text}\n")


def print_error(error: HexdataError) -> None:
    """Print an error, its lines, hint and commands to standard error."""
    first, *others = error.report()
    print_stderr(f"hexdata: {first}")
    for line in others:
        print_stderr(f"  {line}", whole=line in error.commands)
