"""``python -m hexdata`` and the command ``hexdata``: the command line in a process of its own."""

import os
import sys

from hexdata.cli import main
from hexdata.cli.app import interrupted_by_termination
from hexdata.extras import hide_pandas


def run() -> None:
    """Run the command line. Exit status: that of ``main``, 143 for SIGTERM, 129 for SIGHUP."""
    hide_pandas()
    try:
        with interrupted_by_termination():
            main()
    except SystemExit as end:
        if sys.argv[1:2] == ["browse"] and not end.code:
            # A query that cannot be interrupted may still run in a thread, and DuckDB would abort the exit.
            sys.stdout.flush()
            os._exit(0)
        raise


if __name__ == "__main__":
    run()
