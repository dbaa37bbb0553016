"""The command line: flags, one library call, rendering, one file a command.

Heavy imports wait until a command runs.
"""

from __future__ import annotations

import sys
import warnings

from hexdata.cli import convert, demo, export, live, load, report, run, show, shuffle, sql, verify
from hexdata.cli.app import INTERRUPTED, app
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
        sys.stderr.write(f"hexdata: {INTERRUPTED}\n")
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        sys.stderr.write(f"hexdata: {where}{error.strerror or error}\n")
        sys.exit(1)


def _as_note(message: Warning | str, *_: object, **__: object) -> None:
    """Show a warning as commands show their notes; the line of code that it came from helps nobody here."""
    sys.stderr.write(f"note: {message}\n")


def _fail(error: HexdataError, status: int) -> None:
    sys.stderr.write(f"hexdata: {error}\n")
    sys.exit(status)
