"""``python -m hexdata``: the command line."""

from hexdata.cli import main

main()
