"""The command line: flags, one library call, rendering, one file a command.

Heavy imports wait until a command runs.
"""

from __future__ import annotations

import sys
import traceback
import warnings

from hexdata.cli import convert, demo, export, live, load, report, run, show, shuffle, sql, verify
from hexdata.cli.app import INTERRUPTED, app, tell
from hexdata.errors import ConfigError, HexdataError

__all__ = ["app", "main"]

for _verb in (
    demo.demo,
    run.run,
    convert.convert,
    shuffle.shuffle,
    export.export,
    verify.verify,
    sql.sql,
    show.show,
    report.report,
    load.load,
    live.live,
):
    app.command()(_verb)


def main() -> None:
    """Run the command line; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _as_note
            app()
    except ConfigError as error:
        _fail(error, 2)
    except HexdataError as error:
        _fail(error, 1)
    except KeyboardInterrupt:  # while a command is still being loaded
        tell(f"hexdata: {INTERRUPTED}")
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        tell(f"hexdata: {where}{error.strerror or error}")
        sys.exit(1)
    except Exception as error:  # noqa: BLE001  # Python itself would print the message as it is
        _show_fault(error)
        sys.exit(1)


def _show_fault(error: Exception) -> None:
    """Show an error that nobody expected, with its traceback: its message may name a file as well."""
    for part in traceback.format_exception(error):
        is_frame = part.startswith("  ")  # a name in a message begins no line
        for line in part.splitlines() if is_frame else [part.rstrip("\n")]:
            tell(line)


def _as_note(message: Warning | str, *_: object, **__: object) -> None:
    """Show a warning as commands show their notes; the line of code that it came from helps nobody here."""
    tell(f"note: {message}")


def _fail(error: HexdataError, status: int) -> None:
    tell(f"hexdata: {error}")
    sys.exit(status)
