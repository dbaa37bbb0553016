"""Opens a loader in a new process and prints how long the first batch takes, and the rate afterwards.

Run as a script: ``cold_start.py FOLDER MODE SECONDS POSITIONS`` prints JSON: seconds to open, seconds from
then until the first batch, and two rates in positions per second, one after the other, each over at least
SECONDS and POSITIONS. No rates are measured if SECONDS is 0.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hexdata.batch import Batch
from hexdata.loader import Loader


def epochs(loader: Loader) -> Iterator[Batch]:
    """Yield batches of one epoch after another."""
    while True:
        yield from loader


def deliver(batches: Iterator[Batch], seconds: float, least: int) -> float:
    """Return positions per second over at least this number of seconds and of positions."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or count < least:
        count += len(next(batches)["value"])
    return count / (time.perf_counter() - start)


def main(folder: Path, mode: Any, seconds: float, least: int) -> None:
    start = time.perf_counter()
    loader = Loader(folder, mode=mode)
    opened = time.perf_counter()
    batches = epochs(loader)
    next(batches)
    first = time.perf_counter()
    facts = {"open": opened - start, "first batch": first - opened}
    if seconds:
        facts["rate after the start"] = deliver(batches, seconds, least)
        facts["rate"] = deliver(batches, seconds, least)
    print(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
