"""Runs a command on a disk that fails or loses power at one operation, then runs it again.

    python tests/simulation/disk.py convert --at 57 --fault torn --seed 3
    python tests/simulation/disk.py convert
    python tests/simulation/disk.py all

The first line is one case: a run is named by command, size, operation, fault and seed. Without ``--at``, all
operations are taken in turn, without ``--fault`` all faults. Operations are those on files below the folder
of the run, numbered from 0. ``shim.c`` counts them below Python, Arrow and DuckDB, so it needs Linux and a C
compiler.

Errors (``eio``, ``enospc``, ``eintr``, ``short``, and ``...-lasting`` for all operations from then on) are
returned by the shim in a run of its own. Crashes (see ``replay.CRASHES``) are built from the record of one
undisturbed run.

After each fault: (1) the store has no half-published file; (2) an error is one of hexdata that names a file
and a remedy; (3) the same command again gives the files of an undisturbed run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))

from hexdata.cards import CARDS  # noqa: E402
from hexdata.errors import HexdataError  # noqa: E402
from hexdata.sql.database import DATABASE_NAME  # noqa: E402
from tests.simulation.commands import COMMANDS, prepare  # noqa: E402
from tests.simulation.replay import (  # noqa: E402
    CHANGES,
    CRASHES,
    Disk,
    Operation,
    Tree,
    digest,
    read_log,
    read_tree,
    tree_digest,
    write_tree,
)

SHIM: Final = Path(__file__).with_name("shim.c")
ERRORS: Final = {"eio": 1, "enospc": 2, "eintr": 3, "short": 4}
LASTING: Final = ("eio-lasting", "enospc-lasting")
FAULTS: Final = (*ERRORS, *LASTING, *CRASHES)
SEEDED: Final = ("torn", "disordered")
"""Crashes that depend on the seed."""
_REACHED: Final = {
    "enospc": ("create", "write", "mkdir", "rename", "sync", "link"),
    "eintr": ("open", "create", "read", "write", "sync", "truncate"),
    "short": ("read", "write"),
}
"""Kinds of operations that an error may concern, if not all."""


@dataclass(frozen=True)
class Case:
    """One run, which these fields determine."""

    command: str
    size: str
    at: int
    fault: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.command} --size {self.size} --at {self.at} --fault {self.fault} --seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What a run did: ``ending`` is "done", "error", "bare" (no error of hexdata) or "died"."""

    ending: str
    text: str = ""
    faults: int = 0


def build_shim(folder: Path) -> Path | None:
    """Compile the shim, or return None without a C compiler or outside of Linux."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    built = folder / f"shim-{digest(SHIM.read_bytes())[:16]}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = built.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(temporary), str(SHIM), "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
        temporary.replace(built)
    return built


def run_in(
    folder: Path, action: Callable[[], Any], at: int = -1, fault: str | None = None, log: Path | None = None
) -> Outcome:
    """Run an action in a child process whose working directory is ``folder``, and return its outcome."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.close(reading)
        outcome = Outcome("died")
        try:
            outcome = _run_here(folder, action, at, fault, log)
        finally:
            os.write(writing, json.dumps(asdict(outcome)).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return Outcome(**json.loads(answer)) if answer else Outcome("died", f"status {status}")


def _run_here(
    folder: Path, action: Callable[[], Any], at: int, fault: str | None, log: Path | None
) -> Outcome:
    os.chdir(folder)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(silence, stream)
    warnings.simplefilter("ignore")
    shim = ctypes.CDLL(None)
    if hasattr(shim, "disk_start"):
        record = -1 if log is None else os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        kind, _, lasting = (fault or "").partition("-")
        shim.disk_injected.restype = ctypes.c_long
        shim.disk_start(
            os.fsencode(folder), ctypes.c_long(at), ERRORS.get(kind, 0), int(bool(lasting)), record
        )
    try:
        action()
        ending, text = "done", ""
    except HexdataError as error:
        ending, text = "error", str(error)
        if error.path is None and "store/" not in text:
            ending, text = "bare", f"names no file: {text}"
        elif not error.hint and not any(remedy in text for remedy in ("Check the disk", "Run `hexdata")):
            ending, text = "bare", f"names no remedy: {text}"
    except BaseException:  # noqa: BLE001 - the caller reports it
        ending, text = "bare", traceback.format_exc()
    faults = 0
    if hasattr(shim, "disk_stop"):
        shim.disk_stop()
        faults = shim.disk_injected()
    return Outcome(ending, text[-6000:], faults)


# --- what must be true ---------------------------------------------------------------------------------


def _is_published(path: str) -> bool:
    """Return whether a file below the working directory is a result: not hidden and no log."""
    parts = path.split("/")
    return (
        parts[0] in ("store", "demo", "run") and "logs" not in parts and not any(p[0] == "." for p in parts)
    )


def published(tree: Tree) -> dict[str, str]:
    """Return the digests of the published files. A report contains times, so only its end is compared."""
    return {
        path: digest(content[-8:] if path.endswith(".html") else content)
        for path, content in tree.items()
        if content is not None and _is_published(path)
    }


def half_published(tree: Tree, versions: dict[str, set[str]] | None = None) -> str:
    """Return what is half-published in a tree, or an empty text.

    Args:
        tree: files below the working directory.
        versions: digests that the content of each published file may have. Default: not compared.
    """
    for path, content in tree.items():
        if content is None or not _is_published(path):
            continue
        if versions is not None and digest(content) not in versions.get(path, set()):
            return f"{path} has a content that was never complete ({len(content)} bytes)"
        if path.endswith("store/manifest.json"):
            manifest = json.loads(content)
            folder = path.removesuffix("manifest.json")
            for name, facts in manifest["files"].items():
                listed = tree.get(folder + name)
                if listed is None or digest(listed) != facts["sha256"]:
                    return f"{path} lists {name}, which is {'missing' if listed is None else 'another file'}"
    return ""


def leftovers(tree: Tree) -> list[str]:
    """Return temporary files that a finished command must not leave."""
    return [path for path in tree if path.endswith(".tmp") or path.startswith("tmp/")]


# --- one command ---------------------------------------------------------------------------------------


class Simulation:
    """A command with its start, and the record and the files of its undisturbed run.

    Args:
        command: name of a command.
        size: "small" or "medium".
        folder: folder for the files of all runs.
    """

    def __init__(self, command: str, size: str, folder: Path) -> None:
        self.command, self.size, self.folder = command, size, folder
        folder.mkdir(parents=True, exist_ok=True)
        begin = folder / "begin"
        prepared = run_in(folder, lambda: prepare(command, size, begin))
        assert prepared.ending == "done", prepared.text
        self.start = read_tree(begin)
        log = folder / "log"
        outcome = run_in(begin, self.action, log=log)
        assert outcome.ending == "done", outcome.text
        self.end = read_tree(begin)
        self.operations = read_log(log)
        log.unlink()
        shutil.rmtree(begin)
        disk = Disk(self.start)
        for operation in self.operations:
            disk.apply(operation)
        replayed = disk.after_crash("killed", "")
        assert replayed == self.end, "the record does not give the files of the run"
        self.versions = disk.versions
        self.counts: Counter[str] = Counter()
        self._seen: dict[str, str] = {}

    def action(self) -> None:
        """Run the command in the working directory."""
        COMMANDS[self.command].run(self.size)

    # --- cases ------------------------------------------------------------------------------------------

    def cases(self, faults: tuple[str, ...], seeds: int) -> Iterator[Case]:
        """Yield all cases of the given faults."""
        for operation in self.operations:
            at, kind = operation.number, operation.kind
            for fault in faults:
                if fault in CRASHES:
                    if kind in CHANGES:
                        for seed in range(seeds if fault in SEEDED else 1):
                            yield Case(self.command, self.size, at, fault, seed)
                elif kind in _REACHED.get(fault.removesuffix("-lasting"), (kind,)):
                    yield Case(self.command, self.size, at, fault)
        if set(faults) & set(CRASHES):  # after the last operation
            for fault in CRASHES:
                yield Case(self.command, self.size, len(self.operations), fault)

    def disk_at(self, at: int) -> tuple[Disk, Operation | None]:
        """Return the disk before operation ``at``, and that operation."""
        disk = Disk(self.start)
        for operation in self.operations[:at]:
            disk.apply(operation)
        return disk, self.operations[at] if at < len(self.operations) else None

    def check(self, case: Case, place: Path) -> str:
        """Run one case in a folder that does not exist, and return what is wrong, or an empty text."""
        try:
            if case.fault in CRASHES:
                return self._check_crash(case, *self.disk_at(case.at), place)
            return self._check_error(case, place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def check_crashes(self, cases: list[Case], place: Path) -> Iterator[tuple[Case, str]]:
        """Check crashes in ascending order of their operations, building each disk from the one before."""
        disk, at = Disk(self.start), 0
        for case in cases:
            while at < case.at:
                disk.apply(self.operations[at])
                at += 1
            running = self.operations[at] if at < len(self.operations) else None
            yield case, self._check_crash(case, disk, running, place)
            shutil.rmtree(place, ignore_errors=True)

    def _check_crash(self, case: Case, disk: Disk, running: Operation | None, place: Path) -> str:
        tree = disk.after_crash(case.fault, f"{case.seed} {case.at}", running)
        self.counts["crashes"] += 1
        name = tree_digest(tree)
        if name in self._seen:
            return self._seen[name]
        self.counts["disks"] += 1
        wrong = half_published(tree, self.versions)
        if not wrong:
            write_tree(tree, place)
            wrong = self._run_again(place)
        self._seen[name] = wrong
        return wrong

    def _check_error(self, case: Case, place: Path) -> str:
        write_tree(self.start, place)
        outcome = run_in(place, self.action, case.at, case.fault)
        self.counts["errors returned"] += bool(outcome.faults)
        self.counts[f"then {outcome.ending}"] += 1
        tree = read_tree(place)
        if outcome.ending in ("bare", "died"):
            return f"{outcome.ending}: {outcome.text}"
        if wrong := half_published(tree):
            return f"after {outcome}: {wrong}"
        if outcome.ending == "done" and (difference := _difference(tree, self.end, OPTIONAL)):
            return f"ends without an error, but there are {difference}"
        if wrong := self._run_again(place):
            return f"after {outcome}: {wrong}"
        return ""

    def _run_again(self, place: Path) -> str:
        outcome = run_in(place, self.action)
        if outcome.ending != "done":
            return f"the command again: {outcome.ending}: {outcome.text}"
        tree = read_tree(place)
        if difference := _difference(tree, self.end):
            return f"the command again: {difference}"
        if left := [path for path in leftovers(tree) if not path.startswith("tmp/")]:
            return f"the command again leaves {left}"
        return ""


OPTIONAL: Final = (DATABASE_NAME, *CARDS)
"""Files that a run without an error may not have written, which a note then says."""


def _difference(tree: Tree, end: Tree, optional: tuple[str, ...] = ()) -> str:
    found, expected = published(tree), published(end)
    names = [n for n in sorted(found.keys() | expected.keys()) if found.get(n) != expected.get(n)]
    names = [name for name in names if name.partition("store/")[2] not in optional]
    return f"other files than after an undisturbed run: {', '.join(names[:5])}" if names else ""


# --- many cases ----------------------------------------------------------------------------------------


def check_all(
    simulation: Simulation, cases: list[Case], jobs: int, report: Callable[[Case, str], None]
) -> Counter[str]:
    """Check cases in several processes, report each failure, and return counts."""
    reading, writing = os.pipe()
    children = []
    for job in range(jobs):
        child = os.fork()
        if not child:
            os.close(reading)
            _check_share(simulation, cases, job, jobs, writing)
            os._exit(0)
        children.append(child)
    os.close(writing)
    counts: Counter[str] = Counter()
    with os.fdopen(reading) as pipe:
        for line in pipe:
            answer = json.loads(line)
            if "counts" in answer:
                counts.update(answer["counts"])
            else:
                report(Case(**answer["case"]), answer["wrong"])
    for child in children:
        _, status = os.waitpid(child, 0)
        counts["failed workers"] += status != 0
    return counts


def _check_share(simulation: Simulation, cases: list[Case], job: int, jobs: int, writing: int) -> None:
    def answer(value: dict[str, Any]) -> None:
        os.write(writing, (json.dumps(value) + "\n").encode())  # the others write to this pipe too

    place = simulation.folder / f"job-{job}"
    simulation.counts.clear()
    try:
        # Neighbouring operations leave equal disks, so each process takes a range of the crashes.
        crashes = [case for case in cases if case.fault in CRASHES]
        mine = crashes[len(crashes) * job // jobs : len(crashes) * (job + 1) // jobs]
        for case, wrong in simulation.check_crashes(mine, place):
            if wrong:
                answer({"case": asdict(case), "wrong": wrong[-3000:]})
        for case in [case for case in cases if case.fault not in CRASHES][job::jobs]:
            if wrong := simulation.check(case, place):
                answer({"case": asdict(case), "wrong": wrong[-3000:]})
    except BaseException:  # noqa: BLE001 - the parent reports it
        traceback.print_exc()
        os._exit(1)
    answer({"counts": simulation.counts})


def load_libraries() -> None:
    """Import what the children need, and so would import each."""
    import duckdb  # noqa: F401
    import pandas  # noqa: F401
    import pyarrow.compute
    import pyarrow.dataset
    import pyarrow.parquet  # noqa: F401

    import hexdata.formats.legacy
    import hexdata.quality
    import hexdata.sql
    import hexdata.verify  # noqa: F401


def preload(folder: Path) -> None:
    """Start this script again with the shim, unless it is loaded already."""
    if hasattr(ctypes.CDLL(None), "disk_start"):
        return
    shim = build_shim(folder)
    if shim is None:
        sys.exit("the simulated disk needs Linux and a C compiler")
    os.execve(sys.executable, [sys.executable, *sys.argv], environment(shim))


def environment(shim: Path) -> dict[str, str]:
    """Return the variables with which this script runs on the simulated disk."""
    changed = {"LD_PRELOAD": str(shim), "ARROW_DEFAULT_MEMORY_POOL": "system"}
    changed["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | changed


def main() -> None:
    """Run the cases that the command line selects; exit with status 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=[*COMMANDS, "all"])
    parser.add_argument("--size", choices=["small", "medium"], default="small")
    parser.add_argument("--at", type=int, help="number of the operation; default: each")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="default: each")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of torn and disordered; default: 0 and 1"
    )
    parser.add_argument("--every", type=int, default=1, help="check every k-th case only")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / f"hexdata-disk-{os.getuid()}"
    )
    parser.add_argument("--list", action="store_true", help="print the operations and end")
    options = parser.parse_args()
    preload(options.folder)
    load_libraries()
    failed = 0
    for name in COMMANDS if options.command == "all" else [options.command]:
        failed += _check_command(name, options)
    sys.exit(failed > 0)


def _check_command(name: str, options: argparse.Namespace) -> int:
    begin = time.perf_counter()
    folder = options.folder / f"{name}-{options.size}-{os.getpid()}"
    failures: list[Case] = []

    def report(case: Case, wrong: str) -> None:
        failures.append(case)
        print(f"FAILED {case}\n    " + wrong.replace("\n", "\n    "), flush=True)

    try:
        simulation = Simulation(name, options.size, folder)
        if options.list:
            for operation in simulation.operations:
                print(operation.number, operation.kind, operation.path, operation.other, len(operation.data))
            return 0
        cases = list(simulation.cases(tuple(options.fault or FAULTS), 2))
        if options.seed is not None:
            kept = [case for case in cases if case.seed == 0]
            cases = [replace(case, seed=options.seed) if case.fault in SEEDED else case for case in kept]
        if options.at is not None:
            cases = [case for case in cases if case.at == options.at]
        if options.every > 1:
            cases = random.Random(0).sample(cases, -(-len(cases) // options.every))
            cases.sort(key=lambda case: case.at)
        counts = check_all(simulation, cases, min(options.jobs, len(cases)) or 1, report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures = {"operations": len(simulation.operations), "cases": len(cases), **dict(sorted(counts.items()))}
    seconds = time.perf_counter() - begin
    print(f"{name} {options.size}: {len(failures)} failed; {figures}; {seconds:.0f} s", flush=True)
    return len(failures) + counts["failed workers"]


if __name__ == "__main__":
    main()
