"""``python -m hexdata`` and the command ``hexdata``: the command line in a process of its own."""

from hexdata.cli import main
from hexdata.extras import hide_pandas

__all__ = ["run"]


def run() -> None:
    """Run the command line."""
    hide_pandas()
    main()


if __name__ == "__main__":
    run()
