"""Shuffles a store, as a script of its own that a test may stop: ``running.py STORE OPTIONS``.

``OPTIONS`` is JSON: ``options`` of the shuffle, ``most_rows`` that are taken into memory at a time,
``file_size``, the size in bytes that no file may exceed, and ``units``: it says ``at work`` when so many are
done, and does not come to its end before its standard input has.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

from hexdata.errors import HexdataError
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, layout, shuffle_store

AHEAD = 3
"""Units that are done after the word, before it waits: so that it may be stopped anywhere in them."""


class Speaker(Silent):
    """Says that work is under way, and a little later waits for what is to come; workers go on meanwhile."""

    def __init__(self, units: int) -> None:
        self.units, self.done = units, 0

    def advance(self, amount: int) -> None:
        self.done += bool(amount)
        if amount and self.done == self.units:
            print("at work", flush=True)
        elif amount and self.done == self.units + AHEAD:
            sys.stdin.read()


def main(store: str, asked: dict[str, Any]) -> None:
    layout.MAX_ROWS = asked.get("most_rows", layout.MAX_ROWS)  # type: ignore[misc]
    if size := asked.get("file_size"):
        sys.dont_write_bytecode = True  # or cut files of it would break every later import
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    speaker = Speaker(asked["units"]) if "units" in asked else Silent()
    try:
        resumed = shuffle_store(store, ShuffleOptions(**asked["options"]), speaker).resumed
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as from now on there is nothing to interrupt
        print(resumed)
    except HexdataError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
