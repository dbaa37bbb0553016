"""The command line. Each command has one module, parses its options and calls one function of the library.

Heavy libraries are imported when a command runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import copy
import sys
import traceback
import warnings
from functools import cache
from typing import Any

from typer.main import get_command

from hexdata.cli import browse, convert, export, info, live, load, report, run, show, shuffle, sql, verify
from hexdata.cli.app import INTERRUPTED, add_command, app, print_usage
from hexdata.cli.messages import print_error, print_stderr
from hexdata.errors import ConfigError, HexdataError

__all__ = ["app", "main"]

if sys.flags.optimize > 1:
    sys.exit("hexdata: python -OO removes the docstrings that declare the commands; use -O, or neither")
add_command(run.demo)
for _module in (run, convert, info, shuffle, export, verify, sql, show, browse, report, load, live):
    add_command(vars(_module)[_module.__name__.rpartition(".")[2]])  # each is named after its command


def main() -> None:
    """Run the command line. Exit status: 0 for success, 1 for failure, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _as_note
            sys.exit(_create(next(iter(sys.argv[1:]), None))(prog_name="hexdata", standalone_mode=False))
    except HexdataError as error:
        print_error(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:  # before the command has started
        print_stderr(f"hexdata: {INTERRUPTED}")
        sys.exit(130)
    except MemoryError:  # more than ``memory_limit`` allows
        print_stderr("hexdata: out of memory. Raise --memory.")
        sys.exit(1)
    except OSError as error:
        from hexdata.storage.errors import disk_error_hint

        where = f"{error.filename}: " if error.filename else ""
        hint = disk_error_hint(error)
        print_stderr(f"hexdata: {where}{error.strerror or error}{f'. {hint}' if hint else ''}")
        sys.exit(1)
    except Exception as error:  # noqa: BLE001  # Python would print the message without escaping it
        if hasattr(error, "format_message"):
            print_usage(error)
            sys.exit(2)
        _print_traceback(error)
        sys.exit(1)


@cache
def _create(name: str | None) -> Any:
    """Return the command line with one command, or with all if there is none of this name.

    All commands take 50 ms to create.
    """
    chosen = [each for each in app.registered_commands if each.name == name]
    part = copy.copy(app)
    part.registered_commands = chosen or app.registered_commands
    return get_command(part)


def _print_traceback(error: Exception) -> None:
    """Print an unexpected error with its traceback, with file names in its message escaped."""
    for part in traceback.format_exception(error):
        # Only frames, which are indented, are split: a message may contain line feeds.
        for line in part.splitlines() if part.startswith("  ") else [part.rstrip("\n")]:
            print_stderr(line, whole=True)


def _as_note(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning like a note, without the line of code that raised it."""
    print_stderr(f"note: {message}")
