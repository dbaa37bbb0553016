"""An hour of ``live``, the command and a loader, beside a writer of games.

    python tests/simulation/long_runs.py --minutes 60

A proof for before a release, not a test of the suite. It ends with status 1 if a promise is broken: memory or
the number of file descriptors, threads or processes grows, or a game is lost or repeated.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import pickle
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hexdata.demo.games import make_games
from hexdata.errors import HexdataError
from hexdata.formats.trmph import write_trmph
from hexdata.live import LiveLoader

BOARD_SIZE: Final = 5
GAMES: Final = 5
"""Games in a file."""
KEPT: Final = 300
"""Files that exist at the same time."""
BATCH: Final = 128
CONFIG: Final = f"""
seed = 1
val = 0
test = 0
pool_size = 500
reservoir = 2000
reuse = 4
batch_size = {BATCH}
"""


USAGE: Final = ("memory in MB", "descriptors", "threads", "processes")
"""What a process and its children use at one moment; memory that belongs to no other process."""


def measure(process: psutil.Process) -> list[float]:
    """Return what a process and its children use now, without the command that is watched beside it."""
    found = [process] if process == psutil.Process() else [process, *process.children(recursive=True)]
    memory = sum(each.memory_full_info().uss for each in found) / 1e6
    return [memory, sum(p.num_fds() for p in found), sum(p.num_threads() for p in found), len(found)]


def find_growth(name: str, usages: list[list[float]]) -> list[str]:
    """Print what was used in the third and fourth quarter of a run, and return what grows.

    The median of memory may grow by 1 %, or by 1 MB if that is more; the highest of the other numbers by 1.
    """
    earlier, later = np.array_split(np.array(usages[len(usages) // 2 :]), 2)
    wrong = []
    for column, what in enumerate(USAGE):
        of = np.median if column == 0 else np.max
        before, after = float(of(earlier[:, column])), float(of(later[:, column]))
        print(f"{name}: {what}: {before:.1f}, then {after:.1f}")
        if after - before > max(1.0, 0.01 * before * (column == 0)):
            wrong.append(f"{name}: {what} grow from {before:.1f} to {after:.1f}")
    return wrong


class Writer:
    """Writes games as self-play does, in all the ways that the loader promises to understand."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.random = folder, random.Random(1)
        self.games = self.files = 0
        """Games in complete lines, and files."""
        self.paths: deque[Path] = deque()
        self.growing = 0
        """Games that the file that grows still gets."""

    def text(self, count: int) -> bytes:
        """Return the lines of the next games."""
        text = io.StringIO()
        write_trmph(text, make_games(count, 1, BOARD_SIZE, self.games), BOARD_SIZE)
        self.games += count
        return text.getvalue().encode()

    def write(self) -> None:
        """Write one file, or add a game to the one that grows; remove the oldest if there are too many."""
        if self.growing:
            self.growing -= 1
            with self.path.open("ab") as file:
                file.write(self.text(1))
            return
        way = self.random.choices(("renamed", "gzip", "in place", "grows", "truncated"), (8, 4, 2, 2, 1))[0]
        packed = way in ("gzip", "truncated")
        self.path = self.folder / f"games-{self.files:07d}.trmph{'.gz' if packed else ''}"
        self.files += 1
        # Half of a compressed file is what a crash leaves. None of its games can be used.
        raw = b"#5," if way == "truncated" else self.text(GAMES)
        raw = gzip.compress(raw) if packed else raw
        written = self.path if way == "in place" else self.path.with_name(f".{self.path.name}.tmp")
        written.write_bytes(raw[:12] if way == "truncated" else raw)
        written.rename(self.path)
        self.growing = 9 if way == "grows" else 0
        self.paths.append(self.path)
        if len(self.paths) > KEPT:  # after minutes: all readers have read it
            self.paths.popleft().unlink()


def take(loader: LiveLoader) -> None:
    """Take one batch and check it, or wait for five seconds."""
    try:
        batch = next(iter(loader))
    except HexdataError as error:
        if "no batch for" not in str(error):
            raise
        return
    assert batch["board"].shape == (BATCH, 2, BOARD_SIZE, BOARD_SIZE)
    assert ((batch["value"] == 0) | (batch["value"] == 1)).all()
    assert (batch["board"].sum(axis=1) <= 1).all()


def entered(stages: Any) -> int:
    """Return the games that entered the pool, from the metrics of a loader or of the command."""
    counts = stages if isinstance(stages, dict) else {stage["name"]: stage["counts"] for stage in stages}
    return int(counts["ShufflingChunkPool"]["entered"])


def run(minutes: float, rate: float, cycle: float) -> list[str]:
    """Run the command and a loader beside a writer; return the promises that are broken."""
    begin, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="hexdata-live-"))
    config, writer, last, state = folder.with_suffix(".toml"), Writer(folder), dict[str, Any](), None
    config.write_text(CONFIG)
    writer.write()
    command = [sys.executable, "-m", "hexdata", "live", str(folder), "--json", "--config", str(config)]
    live = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    processes = {"hexdata live": psutil.Process(live.pid), "LiveLoader": psutil.Process()}
    usages: dict[str, list[list[float]]] = {name: [] for name in processes}
    is_over = threading.Event()

    def read() -> None:
        assert live.stdout is not None
        for line in live.stdout:
            last["hexdata live"] = entered(json.loads(line)["stages"])

    def write() -> None:
        while not is_over.wait(1 / rate):
            writer.write()

    others = [threading.Thread(target=each, daemon=True) for each in (read, write)]
    for thread in others:
        thread.start()
    warnings.simplefilter("ignore")  # that no batch was delivered for a while
    written = quiet = begin + 60 * minutes
    # After the end, until no game has entered for a minute: a file that grows is read with a delay.
    while time.monotonic() < quiet + 60:
        with LiveLoader(folder, config=config, timeout=5.0) as loader:
            if state is not None:
                loader.load_state_dict(pickle.loads(state))
            due = time.monotonic() + cycle
            while (now := time.monotonic()) < min(due, quiet + 60):
                take(loader)
                if now > written:
                    is_over.set()
                elif now > begin + len(usages["LiveLoader"]) * minutes / 6:  # 360 samples
                    for name, process in processes.items():
                        usages[name].append(measure(process))
                if (count := entered(loader.metrics())) != last.get("LiveLoader"):
                    last["LiveLoader"], quiet = count, max(written, now)
            state = pickle.dumps(loader.state_dict())
    live.terminate()
    live.wait()
    wrong = [each for name, found in usages.items() for each in find_growth(name, found)]
    print(f"written: {writer.files:,} files, {writer.games:,} games; entered: {last}")
    return wrong + [f"{name}: {last[name]} games entered" for name in usages if last[name] != writer.games]


def main() -> None:
    """Run, and print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=4.0, help="files per second")
    parser.add_argument("--cycle", type=float, default=60, help="seconds between saved states")
    wrong = run(**vars(parser.parse_args()))
    print("\n".join([f"FAILED: {each}" for each in wrong] or ["all promises kept"]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
