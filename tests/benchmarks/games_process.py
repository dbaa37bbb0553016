"""Measurements of games mode in a separate process, printed as JSON.

Run as a script:

- ``games_process.py first STORE [MODE]``: the time from the start of Python to the first batch.
- ``games_process.py epoch STORE``: the time to the first batch after a resume at several points of an epoch,
  and the memory over an epoch.
- ``games_process.py workers STORE NUMBER METHOD``: the rate of ``TorchLoader`` with a number of workers, and
  the memory of all processes.
- ``games_process.py fill STORE``: positions per second, by the clock and of CPU time, of large batches of
  fill rows with one and two threads: the median and the best.
- ``games_process.py search STORE``: positions per second, by the clock and of CPU time, of exact and games
  mode with policies, root values and visits, in turn: the medians; and bytes per position of the table.
- ``games_process.py rates STORE``: positions per second of CPU time of exact mode and forms of games mode,
  which other processes slow less than rates by the clock. The store needs shards.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import psutil

BATCH = 1_024
LARGE_BATCH = 16_384
ROUNDS = 5
FILL: dict[str, Any] = {"mode": "games", "board": "fill", "fields": ("board", "value")}
FILL_ROUNDS, FILL_WARM_BATCHES, FILL_BATCHES = 12, 8, 300
MOVES = ("board", "move", "value")
RATED: dict[str, dict[str, Any]] = {
    "exact": {"mode": "exact", "planes": 3},
    "games": {"mode": "games", "planes": 3},
    "games-uint8": {"mode": "games", "planes": 3, "board": "uint8"},
    "games-uint8-moves": {"mode": "games", "planes": 3, "board": "uint8", "fields": MOVES},
    "games-fill": FILL,
    "games-fill-large": {**FILL, "batch_size": LARGE_BATCH},
}
"""Options of the loaders. Batches of float32 boards by default, with policies and values."""
SEARCH_FIELDS = ("board", "policy", "value", "root_value", "visits")
SEARCHED: dict[str, dict[str, Any]] = {
    "exact": {"mode": "exact", "fields": SEARCH_FIELDS},
    "games": {"mode": "games", "fields": SEARCH_FIELDS},
    "exact-symmetry": {"mode": "exact", "fields": SEARCH_FIELDS, "symmetry": True},
    "games-symmetry": {"mode": "games", "fields": SEARCH_FIELDS, "symmetry": True},
    "games-without-targets": {"mode": "games"},
}
"""Options of the loaders of a store with results of a search."""
SEARCH_ROUNDS, SEARCH_BATCHES = 7, 150
SHARES = (0.0, 0.5, 0.99)
RESUMES = 7
LOOKS = 20
"""Number of points of an epoch at which the memory is read."""
WARM_BATCHES = 512
MOST_POSITIONS = 4_000_000
"""Number of positions over which the rate of workers is measured."""


def proportional_bytes() -> int:
    """Return the memory of this process and its children; a page that k of them map counts 1/k in each."""
    process = psutil.Process()
    processes = (process, *process.children(recursive=True))
    return sum(read_bytes(f"/proc/{each.pid}/smaps_rollup", "Pss") for each in processes)


def read_bytes(path: str, name: str) -> int:
    """Return a size from a file of /proc."""
    text = Path(path).read_text(encoding="ascii")
    return 1024 * sum(int(size) for size in re.findall(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE))


def resident_bytes() -> int:
    """Return the resident memory of this process and its children; shared pages count in each."""
    process = psutil.Process()
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


def first(store: Path, mode: Any = "games") -> dict[str, Any]:
    from hexdata.loader import Loader

    imported = time.perf_counter()
    loader = Loader(store, batch_size=BATCH, planes=3, mode=mode)
    opened = time.perf_counter()
    next(iter(loader))
    return {
        "positions": loader.positions,
        "seconds": time.time() - psutil.Process().create_time(),
        "cpu": time.process_time(),
        "open": opened - imported,
        "first batch": time.perf_counter() - opened,
        "torch": "torch" in sys.modules,
        "peak": read_bytes("/proc/self/status", "VmHWM"),
    }


def epoch(store: Path) -> dict[str, Any]:
    from hexdata.loader import Loader

    loader = Loader(store, batch_size=BATCH, board="fill", fields=("board", "value"), mode="games")
    for _ in islice(loader, WARM_BATCHES):
        pass

    def resume(share: float) -> float:
        start = time.perf_counter()
        loader.load_state_dict({**loader.state_dict(), "batch": int(share * len(loader))})
        next(iter(loader))
        return time.perf_counter() - start

    resumes = [[resume(share) for share in SHARES] for _ in range(RESUMES)]
    loader.set_epoch(1)
    memory = []
    for step, _ in enumerate(loader):
        if step % max(1, len(loader) // LOOKS) == 0 and step >= WARM_BATCHES:
            memory.append(resident_bytes())
    return {
        "positions": loader.positions,
        "first batch": [median(times) for times in zip(*resumes, strict=True)],
        "memory": memory,
    }


def search(store: Path) -> dict[str, Any]:
    from hexdata.loader import Loader

    loaders = {name: Loader(store, batch_size=BATCH, **options) for name, options in SEARCHED.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
    for _ in range(SEARCH_ROUNDS):
        for name, loader in loaders.items():
            batches = endless(loader)
            next(batches)
            start, cpu = time.perf_counter(), time.process_time()
            positions = sum(len(batch["value"]) for batch in islice(batches, SEARCH_BATCHES))
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            found[name].append((positions / seconds, positions / cpu))
    sizes = {
        array: values.nbytes / loaders["games"].positions
        for array, values in loaders["games"].games.arrays.items()
    }
    return {
        "positions": loaders["games"].positions,
        "bytes": {name: round(size, 3) for name, size in sizes.items() if size},
        "clock": {name: median(clock for clock, _ in rates) for name, rates in found.items()},
        "cpu": {name: median(cpu for _, cpu in rates) for name, rates in found.items()},
    }


def fill(store: Path) -> dict[str, Any]:
    from hexdata.loader import Loader

    loaders = {
        threads: Loader(store, **{**FILL, "batch_size": LARGE_BATCH, "threads": threads})
        for threads in (1, 2)
    }
    found: dict[int, list[tuple[float, float]]] = {threads: [] for threads in loaders}
    for _ in range(FILL_ROUNDS):
        for threads, loader in loaders.items():
            batches = endless(loader)
            for _ in islice(batches, FILL_WARM_BATCHES):
                pass
            start, cpu = time.perf_counter(), time.process_time()
            positions = sum(len(batch["value"]) for batch in islice(batches, FILL_BATCHES))
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            found[threads].append((positions / seconds, positions / cpu))
    return {
        f"{threads} threads": {
            name: {"median": median(rates), "best": max(rates)}
            for name, rates in zip(("clock", "cpu"), zip(*runs, strict=True), strict=True)
        }
        for threads, runs in found.items()
    }


def rates(store: Path) -> dict[str, Any]:
    from hexdata.loader import Loader

    loaders = {name: Loader(store, **{"batch_size": BATCH, **options}) for name, options in RATED.items()}
    found: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(ROUNDS):
        for name, loader in loaders.items():
            start = time.process_time()
            positions = sum(len(batch["value"]) for batch in loader)
            found[name].append(positions / (time.process_time() - start))
    return {name: median(each) for name, each in found.items()}


def workers(store: Path, number: str, method: str) -> dict[str, Any]:
    from hexdata.loader import Loader
    from hexdata.torch import TorchLoader

    fields = ("board", "value")
    loader = Loader(store, batch_size=BATCH, board="fill", fields=fields, mode="games")
    before = proportional_bytes()
    batches = TorchLoader(
        loader, num_workers=int(number), multiprocessing_context=method if number != "0" else None
    )
    stream = endless(batches)
    for _ in islice(stream, WARM_BATCHES):
        pass
    start = time.perf_counter()
    positions = sum(len(batch["value"]) for batch in islice(stream, MOST_POSITIONS // BATCH))
    seconds = time.perf_counter() - start
    return {
        "positions": loader.positions,
        "rate": positions / seconds,
        "before": before,
        "proportional": proportional_bytes(),
        "resident": resident_bytes(),
    }


def endless(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def main(task: str, store: Path, *options: str) -> None:
    tasks: dict[str, Callable[..., dict[str, Any]]]
    tasks = {
        "first": first,
        "epoch": epoch,
        "fill": fill,
        "rates": rates,
        "search": search,
        "workers": workers,
    }
    print(json.dumps(tasks[task](store, *options)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
