"""Shuffles a store, as a script of its own that a test may stop: ``running.py STORE OPTIONS``.

``OPTIONS`` is JSON: ``options`` of the shuffle, ``most_rows`` that are taken into memory at a time, and
``file_size``, the size in bytes that no file may exceed. It says ``at work`` when the first unit is done.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

from hexdata.errors import HexdataError
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, plan, shuffle_store


class Speaker(Silent):
    """Says once that work is under way."""

    def __init__(self) -> None:
        self.silent = False

    def advance(self, amount: int) -> None:
        if not self.silent:
            print("at work", flush=True)
            self.silent = True


def main(store: str, asked: dict[str, Any]) -> None:
    plan.MOST_ROWS = asked.get("most_rows", plan.MOST_ROWS)  # type: ignore[misc]
    if size := asked.get("file_size"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        resumed = shuffle_store(store, ShuffleOptions(**asked["options"]), Speaker()).resumed
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as from now on there is nothing to interrupt
        print(resumed)
    except HexdataError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
