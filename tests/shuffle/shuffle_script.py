"""Script that shuffles a store and that a test can stop: ``shuffle_script.py STORE SETTINGS``.

``SETTINGS`` is JSON: the ``options`` of the shuffle, ``max_rows`` loaded at a time, ``file_size``, the
maximum size in bytes of any file, and ``units``: the number of units after which the script prints
``at work``. It then waits for the end of its standard input before it finishes.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

from hexdata.errors import HexdataError
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, layout, shuffle_store

AHEAD = 3
"""Units finished between printing and waiting, so that the script can be stopped during any of them."""


class PausingProgress(Silent):
    """Prints a line after some units, and waits after some more; worker threads continue meanwhile."""

    def __init__(self, units: int) -> None:
        self.units, self.done = units, 0

    def advance(self, amount: int) -> None:
        self.done += bool(amount)
        if amount and self.done == self.units:
            print("at work", flush=True)
        elif amount and self.done == self.units + AHEAD:
            sys.stdin.read()


def main(store: str, settings: dict[str, Any]) -> None:
    layout.MAX_ROWS = settings.get("max_rows", layout.MAX_ROWS)  # type: ignore[misc]
    if size := settings.get("file_size"):
        import resource

        sys.dont_write_bytecode = True  # truncated bytecode files would break later imports
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    progress = PausingProgress(settings["units"]) if "units" in settings else Silent()
    try:
        resumed = shuffle_store(store, ShuffleOptions(**settings["options"]), progress).resumed
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the shuffle is finished
        print(resumed)
    except HexdataError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
