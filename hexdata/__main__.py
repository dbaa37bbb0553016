"""``python -m hexdata`` and the command ``hexdata``: the command line in a process of its own."""

from hexdata.cli import main
from hexdata.cli.app import interrupted_by_termination
from hexdata.extras import hide_pandas

__all__ = ["run"]


def run() -> None:
    """Run the command line. Exit status: that of ``main``, 143 for SIGTERM, 129 for SIGHUP."""
    hide_pandas()
    with interrupted_by_termination():
        main()


if __name__ == "__main__":
    run()
