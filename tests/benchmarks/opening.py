"""Opens a loader in a new process, resumes at several positions of the epoch, and prints the times.

Run as a script: ``opening.py FOLDER ROUNDS`` prints JSON: seconds to open, seconds until the first batch
after each resume, and memory besides the mapped files. It never delivers a whole epoch.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median

from hexdata.batch import Batch
from hexdata.loader import Loader

SHARES = (0.0, 0.5, 0.99)
BATCHES = 512
"""Batches over which the memory is measured, enough to gather the largest chunks ahead."""


def own_bytes() -> int:
    """Return the resident memory of this process that is not mapped from files."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * sum(int(size) for size in re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE))


def go_on_at(folder: Path, share: float) -> tuple[float, float, Iterator[Batch]]:
    """Return the seconds to open, those until the first batch after a resume, and the batches after it."""
    start = time.perf_counter()
    loader = Loader(folder, planes=3)
    opened = time.perf_counter()
    loader.load_state_dict({**loader.state_dict(), "batch": int(share * len(loader))})
    batches = iter(loader)
    next(batches)
    return opened - start, time.perf_counter() - opened, batches


def main(folder: Path, rounds: int) -> None:
    before, most = own_bytes(), 0
    for share in SHARES:  # brings headers into the page cache that were written just now
        _, _, batches = go_on_at(folder, share)
        most = max(most, *(own_bytes() for _ in islice(batches, BATCHES)))
    runs = [[go_on_at(folder, share)[:2] for share in SHARES] for _ in range(rounds)]
    facts = {
        "positions": Loader(folder).positions,
        "open": median(opened for run in runs for opened, _ in run),
        "first batch": [median(resumed for _, resumed in at_share) for at_share in zip(*runs, strict=True)],
        "memory": most,
        "before": before,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
