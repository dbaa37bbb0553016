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

from hexdata.cli import (
    browse,
    convert,
    demo,
    export,
    info,
    live,
    load,
    report,
    run,
    show,
    shuffle,
    sql,
    verify,
)
from hexdata.cli.app import INTERRUPTED, Command, app, print_error, print_stderr
from hexdata.errors import ConfigError, HexdataError

__all__ = ["app", "main"]

for _verb in (
    demo.demo,
    run.run,
    convert.convert,
    info.info,
    shuffle.shuffle,
    export.export,
    verify.verify,
    sql.sql,
    show.show,
    browse.browse,
    report.report,
    load.load,
    live.live,
):
    app.command(_verb.__name__, cls=Command)(_verb)


def main() -> None:
    """Run the command line. Exit status: 0 for success, 1 for failure, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _as_note
            _create(next(iter(sys.argv[1:]), None))(prog_name="hexdata")
    except ConfigError as error:
        print_error(error)
        sys.exit(2)
    except HexdataError as error:
        print_error(error)
        sys.exit(1)
    except KeyboardInterrupt:  # before the command has started
        print_stderr(f"hexdata: {INTERRUPTED}")
        sys.exit(130)
    except OSError as error:
        from hexdata.store.disk_space import disk_error_hint

        where = f"{error.filename}: " if error.filename else ""
        hint = disk_error_hint(error)
        print_stderr(f"hexdata: {where}{error.strerror or error}{f'. {hint}' if hint else ''}")
        sys.exit(1)
    except Exception as error:  # noqa: BLE001  # Python would print the message without escaping it
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
        is_frame = part.startswith("  ")  # only frames are split: a message may contain line feeds
        for line in part.splitlines() if is_frame else [part.rstrip("\n")]:
            print_stderr(line)


def _as_note(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning like a note, without the line of code that raised it."""
    print_stderr(f"note: {message}")
