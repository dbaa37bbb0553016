"""Script that shuffles a store and that a test can stop: ``shuffle_script.py STORE SETTINGS``.

``SETTINGS`` is JSON: the ``options`` of the shuffle, the number of ``passes``, ``file_size``, the maximum
size in bytes of any file, and ``buckets``: the number of buckets after which the script prints ``at work``.
It then waits for the end of its standard input before it finishes.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import pytest

from hexdata.errors import HexdataError
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, shuffle_store, stage

AHEAD = 3
"""Buckets finished between printing and waiting, so that the script can be stopped during any of them."""


def sort_in_passes(monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    """Sort each shuffle in this number of passes, as a small disk needs them, or one for each bucket."""
    monkeypatch.setattr(stage, "count_passes", lambda spill, free, memory, buckets: min(passes, buckets or 1))


class PausingProgress(Silent):
    """Prints a line after some buckets, and waits after some more."""

    def __init__(self, buckets: int) -> None:
        self.buckets, self.done = buckets, 0

    def advance(self, amount: int) -> None:
        self.done += bool(amount)
        if amount and self.done == self.buckets:
            print("at work", flush=True)
        elif amount and self.done == self.buckets + AHEAD:
            sys.stdin.read()


def main(store: str, settings: dict[str, Any]) -> None:
    sort_in_passes(pytest.MonkeyPatch(), settings.get("passes", 1))
    if size := settings.get("file_size"):
        import resource

        sys.dont_write_bytecode = True  # truncated bytecode files would break later imports
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    progress = PausingProgress(settings["buckets"]) if "buckets" in settings else Silent()
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
