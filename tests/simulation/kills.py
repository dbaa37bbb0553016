"""Kills a random process of a command at a random moment, and runs the command again.

A seed chooses the command, the number of its worker processes, which process is killed (the first one, a
worker, or all), and the moment: a share of the CPU time of an undisturbed run, from 0 to 1.1. The machine
decides which instruction runs at that moment, so the same seed may strike at a different one.

After the kill, the store must have no half-published file. The same command again, at once, while workers of
the killed run may still run, must give the files of an undisturbed run and leave no temporary file.

A tenth of the commands that can have workers has two; these import all libraries, which takes longer than
their work. The script needs Linux.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from hexdata.errors import HexdataError
from tests.simulation import commands
from tests.simulation.disk import half_published, leftovers, load_libraries, published
from tests.simulation.replay import Tree, read_tree, write_tree

WEIGHTS: Final = {
    "convert": 4,
    "legacy": 4,
    "append": 3,
    "shuffle": 4,
    "reshuffle": 2,
    "export": 4,
    "reexport": 2,
    "free": 2,
    "pickles": 2,
    "pickles-shuffled": 2,
    "demo": 3,
    "run": 3,
    "report": 1,
}
"""How often each command is chosen."""
_WITHOUT_WORKERS: Final = ("shuffle", "reshuffle", "report")
"""Commands that use threads only."""
_LONGEST: Final = 1800.0
"""Seconds after which a command hangs."""


@dataclass(frozen=True)
class Kill:
    """One case, which its seed determines."""

    seed: int
    command: str
    start: str
    """"none" for one process; "loky" for two workers."""
    target: str
    """"first", "worker" or "all"."""
    share: float
    """Of the CPU time of an undisturbed run."""

    @staticmethod
    def of(seed: int) -> Kill:
        """Return the case of a seed."""
        draw = random.Random(f"kill {seed}")
        command = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        start = "none" if command in _WITHOUT_WORKERS else draw.choices(["none", "loky"], [9, 1])[0]
        target = "first" if start == "none" else draw.choice(["first", "worker", "all"])
        return Kill(seed, command, start, target, round(1.1 * draw.random(), 4))


@dataclass(frozen=True)
class Struck:
    """What a kill struck."""

    share: float
    """CPU time used at the kill, as a share of that of an undisturbed run."""
    running: bool
    """Whether the target was still running."""
    workers: int
    """Number of running workers."""


class Kills:
    """The undisturbed runs of all commands, and the cases.

    Args:
        folder: Folder for the files of all runs, on a disk in memory.
        size: "small", or "medium" for commands that have several files of each kind.
    """

    def __init__(self, folder: Path, size: str) -> None:
        self.folder = folder
        self.size = size
        self.begin: dict[str, Tree] = {}
        self.end: dict[str, Tree] = {}
        self.cpu: dict[tuple[str, str], float] = {}
        self.counts: Counter[str] = Counter()
        self.struck: list[Struck] = []

    def check(self, case: Kill) -> str:
        """Run a case, and return what is wrong, or an empty text."""
        self._prepare(case)
        place = self.folder / "case"
        write_tree(self.begin[case.command], place)
        try:
            return self._check(case, place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _check(self, case: Kill, place: Path) -> str:
        child = self._start(case, place)
        struck, workers = self._strike(case, child)
        self.struck.append(struck)
        ending = self._wait(child)
        self.counts[f"then {ending.partition(':')[0]}"] += 1
        expected = ("killed", "done") if case.target != "worker" else ("error", "done")
        if not ending.startswith(expected):
            return ending
        if wrong := half_published(_read_while_written(place)):
            return f"after the kill ({ending}): {wrong}"
        again = self._wait(self._start(case, place))
        if again != "done":
            return f"after the kill ({ending}), the command again: {again}"
        if psutil.wait_procs(workers, timeout=_LONGEST)[1]:
            return "a worker of the killed command does not end"
        tree = read_tree(place)
        if difference := _difference(tree, self.end[case.command]):
            return f"after the kill ({ending}), the command again gives other files: {difference}"
        if left := leftovers(tree, case.command):
            return f"after the kill ({ending}), the command again leaves {left}"
        return ""

    def _prepare(self, case: Kill) -> None:
        """Make the files that a command finds, and run it undisturbed, if that is not done."""
        place = self.folder / "undisturbed"
        if case.command not in self.begin:
            place.mkdir()
            child = self._fork(place, lambda: commands.prepare(case.command, self.size))
            if (ending := self._wait(child)) != "done":
                raise RuntimeError(ending)
            self.begin[case.command] = read_tree(place)
            shutil.rmtree(place)
        if (case.command, case.start) not in self.cpu:
            write_tree(self.begin[case.command], place)
            child = self._start(case, place)
            used, _ = self._strike(replace(case, share=1e9, target="none"), child)
            if (ending := self._wait(child)) != "done":
                raise RuntimeError(ending)
            self.cpu[case.command, case.start] = used.share
            tree = read_tree(place)
            if difference := _difference(tree, self.end.setdefault(case.command, tree)):
                raise RuntimeError(f"two undisturbed runs differ: {difference}")
            shutil.rmtree(place)

    def _start(self, case: Kill, place: Path) -> int:
        """Start the command of a case, and return the id of its process."""

        def act() -> None:
            commands.PROCESSES[self.size] = 1 if case.start == "none" else 2
            if case.start == "none":
                os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            commands.COMMANDS[case.command].run(self.size)

        return self._fork(place, act)

    def _fork(self, place: Path, act: Callable[[], None]) -> int:
        ending = self.folder / "ending"
        ending.unlink(missing_ok=True)
        child = os.fork()
        if child:
            return child
        try:
            os.setpgid(0, 0)
            commands.forget_databases()
            os.chdir(place)
            os.environ["TMPDIR"] = str(place / "tmp")
            tempfile.tempdir = None
            silence = os.open(os.devnull, os.O_RDWR)
            for stream in (1, 2):
                os.dup2(silence, stream)
            warnings.simplefilter("ignore")
            act()
            text = "done"
        except HexdataError as error:
            text = f"error: {error}"
        except BaseException:  # noqa: BLE001 - the parent reports it
            text = f"bare: {traceback.format_exc()[-3000:]}"
        ending.write_text(text)
        os._exit(0)

    def _wait(self, child: int) -> str:
        """Wait for a process, and return "done", or how it ended."""
        limit = time.monotonic() + _LONGEST
        while True:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                break
            if time.monotonic() > limit:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "hangs"
            time.sleep(0.002)
        if status == signal.SIGKILL:
            return "killed"
        return (self.folder / "ending").read_text() if status == 0 else f"died: status {status}"

    def _strike(self, case: Kill, child: int) -> tuple[Struck, list[psutil.Process]]:
        """Wait for the moment, kill the target, and return what was struck, and the remaining workers."""
        cpu, total = 0.0, self.cpu.get((case.command, case.start), 1.0)
        first = psutil.Process(child)
        used: dict[int, float] = {}
        workers: list[psutil.Process] = []
        scanned = 0.0
        limit = time.monotonic() + _LONGEST
        while True:
            if case.start != "none" and time.monotonic() > scanned + 0.02:
                scanned = time.monotonic()
                with contextlib.suppress(psutil.NoSuchProcess):
                    workers = first.children(recursive=True)
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            for process in (first, *workers):
                with contextlib.suppress(OSError):
                    used[process.pid] = time.clock_gettime(_cpu_clock(process.pid))
            cpu = sum(used.values())
            if ended or cpu >= case.share * total:
                break
            if time.monotonic() > limit and case.target != "none":
                break
            time.sleep(0.0005)
        workers = [each for each in workers if each.is_running()]
        running = not ended
        if case.target == "worker" and not ended:
            running = bool(workers)
            targets = [random.Random(case.seed).choice(workers)] if workers else []
        else:
            chosen = {"all": [first, *workers], "first": [first]}.get(case.target, [])
            targets = [] if ended else chosen
        for process in targets:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return Struck(cpu / total, running and bool(targets), len(workers)), workers


def _read_while_written(place: Path) -> Tree:
    """Return the files of a folder to which workers of the killed command may still write."""
    while True:
        try:
            return read_tree(place)
        except FileNotFoundError:
            continue


def _cpu_clock(pid: int) -> int:
    """Return the clock of the CPU time of a process on Linux."""
    return (~pid << 3) | 2


def _difference(tree: Tree, end: Tree) -> str:
    """Return the names of the published files that differ, or an empty text."""
    found, expected = published(tree), published(end)
    names = sorted(found.keys() | expected.keys())
    return ", ".join(name for name in names if found.get(name) != expected.get(name))


def run_kills(folder: Path, size: str, seeds: Iterable[int], report: Callable[[Kill, str], None]) -> Kills:
    """Run the cases of seeds, and report each that fails."""
    load_libraries()
    kills = Kills(folder, size)
    for number, seed in enumerate(seeds, 1):
        case = Kill.of(seed)
        if wrong := kills.check(case):
            report(case, wrong)
        if number % 20 == 0:
            print_shares(kills.struck)
    return kills


def print_shares(struck: list[Struck]) -> None:
    """Print how many kills struck before the end, and at which share of the run."""
    before = [each.share for each in struck if each.running]
    print(f"{len(struck):,} kills, {len(before):,} before the end of the run")
    tenths = Counter(min(int(10 * share), 9) for share in before)
    print("share of the run: " + ", ".join(f"{tenth / 10:.1f}: {tenths[tenth]}" for tenth in range(10)))
