"""Runs commands on a disk that fails or loses power at one operation, then runs them again.

    python tests/simulation/disk.py convert --at 57 --fault torn --seed 3
    python tests/simulation/disk.py convert shuffle
    python tests/simulation/disk.py all --every 23 --first 9

A proof for before a release, not a test of the suite. The first line is one case: a command, an operation,
a fault and a seed. Without ``--at``, all operations are taken in turn, without ``--fault`` all faults.
Operations are those on files below the folder of the run, numbered from 0. ``shim.c`` counts them below
Python, Arrow and DuckDB, so it needs Linux and a C compiler.

Errors (``eio``, ``enospc``, ``eintr``, ``short``, and ``...-lasting`` for all operations from then on) are
returned by the shim, in a run of its own each. Crashes (see ``replay.CRASHES``) are built from the record of
one undisturbed run.

After each fault: (1) the store has no half-published file; (2) an error is one of hexdata that names a file
and a remedy; (3) the same command again gives the files of an undisturbed run, and leaves nothing behind. The
command runs again only on disks that were not seen before.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

from typer.main import get_command

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from hexdata import retry, temporary  # noqa: E402
from hexdata import store as stores  # noqa: E402
from hexdata.cards import CARDS  # noqa: E402
from hexdata.cli import app  # noqa: E402
from hexdata.demo import DemoOptions, make_legacy  # noqa: E402
from hexdata.demo.games import make_games  # noqa: E402
from hexdata.errors import HexdataError  # noqa: E402
from hexdata.extras import hide_pandas  # noqa: E402
from hexdata.formats.trmph import write_trmph  # noqa: E402
from hexdata.sql.database import DATABASE_NAME  # noqa: E402
from tests.simulation import replay  # noqa: E402
from tests.simulation.replay import Disk, Tree, digest, read_tree, write_tree  # noqa: E402

_SPLITS: Final = "--val 0.15 --test 0.1 --workers 1"
_CONVERT: Final = f"convert games store {_SPLITS}"
_SHUFFLE: Final = "shuffle store --seed 1 --buckets 2 --threads 1"
_EXPORT: Final = "export store --block-size 32 --shard-size 64 --workers 1"
_ALL: Final = (_CONVERT, _SHUFFLE, _EXPORT)
COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "convert": (_CONVERT,),
    "legacy": (f"convert legacy store {_SPLITS}",),
    "append": (_CONVERT, f"convert games more store {_SPLITS}"),
    "shuffle": (_CONVERT, _SHUFFLE),
    "reshuffle": (*_ALL, "shuffle store --seed 2 --buckets 3 --threads 1"),
    "export": _ALL,
    "reexport": (*_ALL, "export store --block-size 64 --shard-size 128 --workers 1"),
    "free": (_CONVERT, _SHUFFLE, f"{_EXPORT} --free-buckets"),
    "pickles": (_CONVERT, "export store --format pickle --order original --workers 1"),
    "pickles-shuffled": (_CONVERT, _SHUFFLE, "export store --format pickle --workers 1"),
    "verify": (*_ALL, "verify store --round-trip games"),
    "report": (_CONVERT, _SHUFFLE, "report store"),
    "sql": (_CONVERT, "sql store 'SELECT count(*), sum(positions), min(winner) FROM games'"),
    "show": (_CONVERT, "show store --game 1"),
    "load": (*_ALL, "load store --mode stream --batch-size 16"),
    "info": (*_ALL, "info store"),
    "demo": ("demo demo --games 2",),
}
"""By name, a command line, after those of which it needs the results. Each uses one process and one thread,
so that each run has the same operations in the same order."""
ERRORS: Final = {"eio": 1, "enospc": 2, "eintr": 3, "short": 4, "estale": 5, "etimedout": 6, "eagain": 7}
FAULTS: Final = ("eio", "enospc", "eintr", "short", "eio-lasting", "enospc-lasting", *replay.CRASHES)
SEEDS: Final = 2
"""Number of seeds that are tried."""
_SPACE: Final = ("create", "write", "mkdir", "rename", "sync", "link")
REACHED: Final = {
    "enospc": _SPACE,
    "eintr": ("open", "create", "read", "write", "sync", "truncate"),
    "short": ("read", "write"),
    "eio-lasting": tuple(replay.CHANGES),
    "enospc-lasting": _SPACE,
}
"""Kinds of operations that an error may concern, if not all."""
_CHUNK: Final = 50
"""Largest number of cases that a process takes at a time."""
_SECONDS: Final = 300
"""Seconds after which a run is ended as one that hangs."""
_TOKEN: Final = re.compile(r"[0-9a-z_]{8}(?=\.tmp$)|[0-9a-f]{16}")
"""Random parts of the names of temporary files."""


class Case(NamedTuple):
    """One run, which these fields determine."""

    command: str
    at: int
    fault: str
    seed: int = 0


class Outcome(NamedTuple):
    """How a run ended: "done", "error", "bare" (no error of hexdata) or "died"; and the faults it met."""

    ending: str
    text: str = ""
    faults: int = 0


def build_shim(folder: Path) -> Path | None:
    """Compile the shim, or return None without a C compiler or outside of Linux."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    folder.mkdir(parents=True, exist_ok=True)
    built, source = folder / "shim.so", Path(__file__).with_name("shim.c")
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(built), str(source), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return built


def environment(shim: Path) -> dict[str, str]:
    """Return the variables with which a script runs on the simulated disk."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    changed = {"LD_PRELOAD": str(shim), "ARROW_DEFAULT_MEMORY_POOL": "system", "PYTHONPATH": path}
    return os.environ | changed


# --- one run -------------------------------------------------------------------------------------------


def run_lines(*lines: str) -> None:
    """Run command lines in this process; errors of hexdata are raised."""
    hide_pandas()  # as ``hexdata`` does
    group: Any = get_command(app)
    for line in lines:
        words = shlex.split(line)
        sys.argv = ["hexdata", *words]
        group.main(args=words, prog_name="hexdata", standalone_mode=False)


def prepare(name: str) -> None:
    """Write the files that a command finds into the working directory."""
    if name == "legacy":
        make_legacy("legacy", DemoOptions(games=2))
    for seed, folder in enumerate(("games", "more"), 1):
        Path(folder).mkdir()
        write_trmph(Path(folder, f"games-{seed}.trmph"), make_games(6, seed, 7), 7)
    run_lines(*COMMANDS[name][:-1])
    for folder in ("tmp", "store/logs"):
        shutil.rmtree(folder, ignore_errors=True)
    Path("tmp").mkdir()


def run_in(
    folder: Path,
    action: Callable[[], Any],
    log: Path | None = None,
    at: int | None = None,
    fault: str | None = None,
) -> Outcome:
    """Run an action in a child process whose working directory is ``folder``, and return its outcome.

    Args:
        folder: The folder whose operations are counted.
        action: What to run.
        log: File for the record of its operations; None for none.
        at: Number of the operation that fails; None for none.
        fault: One of ``ERRORS``, or one of these with "-lasting".
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.close(writing)
        with os.fdopen(reading) as answers:
            text = answers.read()
        _, status = os.waitpid(child, 0)
        return Outcome(*json.loads(text)) if text else Outcome("died", f"status {status}")
    try:
        signal.alarm(_SECONDS)
        # No output, no waits, one core, and all randomness below the folder.
        temporary.remove_abandoned.cache_clear()
        retry._DISK = replace(retry._DISK, first_wait=0.0)
        os.chdir(folder)
        os.environ["TMPDIR"] = str(folder / "tmp")
        tempfile.tempdir = None
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        warnings.simplefilter("ignore")
        library = ctypes.CDLL(None)
        library.disk_injected.restype = ctypes.c_long
        library.disk_start(os.fsencode(folder), None if log is None else os.fsencode(log))
        if at is not None and fault is not None:
            kind, _, lasting = fault.partition("-")
            library.disk_arm(ctypes.c_long(at), ERRORS[kind], int(bool(lasting)))
        ending, text = _ending(folder, action)
        library.disk_pause(1)
        os.write(writing, json.dumps((ending, text, library.disk_injected())).encode())
    finally:
        os._exit(0)


def _ending(folder: Path, action: Callable[[], Any]) -> tuple[str, str]:
    try:
        action()
    except HexdataError as error:
        text = str(error)
        names_file = error.path is not None or "store/" in text or f"{folder}/" in text
        if names_file and (error.hint or "Check the disk" in text or "Run `hexdata" in text):
            return "error", text
        return "bare", f"names no file or no remedy: {text}"
    except BaseException:  # noqa: BLE001 - the caller reports it
        return "bare", traceback.format_exc()[-6000:]
    return "done", ""


# --- what must be true ---------------------------------------------------------------------------------


def published(tree: Tree) -> dict[str, str]:
    """Return the digests of the results: of no hidden files and logs, and of the end of a report, as its
    beginning contains times.
    """
    found = {}
    for path, content in tree.items():
        parts = path.split("/")
        is_result = parts[0] in ("store", "demo") and "logs" not in parts
        if content is not None and is_result and not any(part[0] == "." for part in parts):
            found[path] = digest(content[-8:] if path.endswith(".html") else content)
    return found


def tree_key(tree: Tree) -> str:
    """Return a digest of all that can influence a command: not of temporary files, and not of times."""
    facts = []
    for path, content in tree.items():
        if content is not None and "/logs/" in path:
            content = re.sub(rb"[0-9][-+.0-9e]*", b"0", content)
        elif content is not None and path.endswith((".html", ".lock", ".lock.json")):  # with process numbers
            content = content[-8:] if path.endswith(".html") else b""
        if not path.startswith("tmp/"):
            facts.append(f"{_TOKEN.sub('', path)} {'-' if content is None else digest(content)}")
    return digest("\n".join(sorted(facts)).encode())


def half_published(tree: Tree, versions: dict[str, set[str]] | None = None) -> str:
    """Return what is half-published in a tree, or an empty text.

    Args:
        tree: Files below the working directory.
        versions: Digests that the content of each published file may have. Default: not compared.
    """
    ready = "store/.work/ready/"
    if f"{ready}manifest.json" in tree:  # the next command finishes this replacement (see format.md)
        new = {path.replace(ready, "store/"): data for path, data in tree.items() if path.startswith(ready)}
        folders = (f"store/{folder}" for listed in stores.STAGES.values() for folder in listed)
        old = tuple(f"{folder}/" for folder in folders if folder in new)
        tree = {path: data for path, data in tree.items() if not path.startswith((ready, *old))} | new
    found = published(tree)
    for path in found:
        content = tree[path] or b""
        if versions is not None and digest(content) not in versions.get(path, set()):
            return f"{path} has a content that was never complete ({len(content)} bytes)"
    manifest = json.loads(tree.get("store/manifest.json") or b'{"files": {}}')
    for name, facts in manifest["files"].items():
        if found.get(f"store/{name}") != facts["sha256"]:
            return f"the manifest lists {name}, which is missing or another file"
    return ""


def _difference(tree: Tree, end: Tree, optional: tuple[str, ...] = ()) -> str:
    found, expected = published(tree), published(end)
    names = [n for n in sorted(found.keys() | expected.keys()) if found.get(n) != expected.get(n)]
    names = [name for name in names if name.rpartition("/")[2] not in optional]
    return f"other files than after an undisturbed run: {', '.join(names[:5])}" if names else ""


class Simulation:
    """A command with its start, and the record and the files of its undisturbed run.

    Args:
        command: Name of a command.
        folder: Folder for the files of all runs.
    """

    def __init__(self, command: str, folder: Path) -> None:
        self.command, self.folder = command, folder
        self.seen: set[str] = set()
        """Disks on which the command was run again with success."""
        begin, log = folder / "begin", folder / "log"
        begin.mkdir(parents=True)
        made = run_in(begin, lambda: prepare(command))
        assert made.ending == "done", made.text
        self.start = read_tree(begin)
        names = folder / "modules"
        outcome = run_in(begin, lambda: (self.action(), names.write_text(" ".join(sys.modules))), log)
        assert outcome.ending == "done", outcome.text
        for name in names.read_text().split():  # once here, in place of once in each child
            with contextlib.suppress(ImportError):
                import_module(name)
        self.end, self.operations = read_tree(begin), replay.read_log(log)
        shutil.rmtree(begin)
        disk = Disk(self.start)
        for operation in self.operations:
            disk.apply(operation)
        assert disk.after_crash("killed", "") == self.end, "the record does not give the files of the run"
        self.versions = disk.versions

    def action(self) -> None:
        """Run the command."""
        run_lines(COMMANDS[self.command][-1])

    def cases(self, faults: Iterable[str] = FAULTS, seeds: Iterable[int] = range(SEEDS)) -> Iterator[Case]:
        """Yield all cases of the given faults, one fault after another."""
        for fault in faults:
            reached = replay.CHANGES if fault in replay.CRASHES else REACHED.get(fault, replay.KINDS)
            for operation in self.operations:
                if operation.kind in reached:
                    for seed in seeds if fault in replay.SEEDED else [0]:
                        yield Case(self.command, operation.number, fault, seed)
            if fault in replay.CRASHES:  # after the last operation
                yield Case(self.command, len(self.operations), fault)

    def check(self, cases: Iterable[Case]) -> list[tuple[Case, str]]:
        """Try cases in the order of their operations; return each with what is wrong, or an empty text."""
        work, disk, done, found = self.folder / f"work-{os.getpid()}", Disk(self.start), 0, []
        for case in sorted(cases, key=lambda case: case.at):
            if case.fault in replay.CRASHES:
                for operation in self.operations[done : case.at]:
                    disk.apply(operation)
                done = case.at
                running = self.operations[case.at] if case.at < len(self.operations) else None
                write_tree(disk.after_crash(case.fault, f"{case.seed} {case.at}", running), work)
                wrong = half_published(read_tree(work), self.versions)
            else:
                wrong = self._run_with_error(case, work)
            found.append((case, wrong or self._run_again(work)))
        return found

    def _run_with_error(self, case: Case, work: Path) -> str:
        write_tree(self.start, work)
        outcome = run_in(work, self.action, at=case.at, fault=case.fault)
        if outcome.ending in ("bare", "died"):
            return f"{outcome.ending}: {outcome.text}"
        wrong = half_published(tree := read_tree(work))
        # A note says which derived files a run could not write.
        if not wrong and outcome.ending == "done":
            wrong = _difference(tree, self.end, (DATABASE_NAME, *CARDS))
        return wrong and f"after {outcome}: {wrong}"

    def _run_again(self, work: Path) -> str:
        if (key := tree_key(read_tree(work))) in self.seen:
            return ""
        outcome = run_in(work, self.action)
        tree = read_tree(work)
        wrong = outcome.text if outcome.ending != "done" else _difference(tree, self.end)
        # ``report`` has no lock, so it must not remove the unfinished page of another run.
        left = [path for path in tree if path.endswith(".tmp") and not path.startswith("tmp/")]
        left = [path for path in left if self.command != "report" or ".report.html." not in path]
        if wrong or left:
            return f"the command again: {wrong or f'leaves {left}'}"
        self.seen.add(key)
        return ""


# --- many cases ----------------------------------------------------------------------------------------


def _run_command(name: str, options: argparse.Namespace) -> int:
    """Try the chosen cases of a command, print each that fails, and return their number."""
    global _simulation
    folder = options.folder / f"{name}-{os.getpid()}"
    failed, counts = 0, Counter[str]()
    try:
        _simulation = Simulation(name, folder)
        seeds = range(SEEDS) if options.seed is None else [options.seed]
        cases = list(_simulation.cases(options.fault or FAULTS, seeds))
        cases = [case for case in cases if options.at in (None, case.at)][options.first :: options.every]
        chunks = [cases[start : start + _CHUNK] for start in range(0, len(cases), _CHUNK)]
        with get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
            for answer in pool.imap_unordered(_check_chunk, chunks):
                for case, wrong in answer:
                    counts[case.fault] += 1
                    if wrong:
                        failed += 1
                        print(f"FAILED {case}\n    " + wrong[-3000:].replace("\n", "\n    "), flush=True)
        print(f"{name}: {len(_simulation.operations)} operations, {failed} failed of {dict(counts)}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return failed


_simulation: Simulation
"""The command whose cases the processes try; they are forked."""


def _check_chunk(cases: list[Case]) -> list[tuple[Case, str]]:
    return _simulation.check(cases)


def main() -> None:
    """Run the cases that the command line selects; exit with status 1 if one fails."""
    # In memory, if possible: a run syncs nothing, but makes and removes many files.
    memory = Path("/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", nargs="+", choices=[*COMMANDS, "all"])
    parser.add_argument("--at", type=int, help="number of the operation; default: each")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="default: each")
    parser.add_argument("--seed", type=int, help="seed of torn and disordered; default: 0 and 1")
    parser.add_argument("--every", type=int, default=1, help="try every k-th case only")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each command")
    options = parser.parse_args(namespace=argparse.Namespace(folder=memory / f"hexdata-disk-{os.getuid()}"))
    if not hasattr(ctypes.CDLL(None), "disk_start"):  # start again with the shim
        shim = build_shim(options.folder)
        if shim is None:
            sys.exit("the simulated disk needs Linux and a C compiler")
        os.execve(sys.executable, [sys.executable, *sys.argv], environment(shim))
    names = list(COMMANDS) if "all" in options.command else options.command
    sys.exit(sum(_run_command(name, options) for name in names) > 0)


if __name__ == "__main__":
    main()
