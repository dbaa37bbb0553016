"""Runs a command on a disk that fails or loses power at one operation, then runs it again.

    python tests/simulation/disk.py convert --at 57 --fault torn --seed 3
    python tests/simulation/disk.py convert
    python tests/simulation/disk.py all

The first line is one case: a run is named by command, size, operation, fault and seed. Without ``--at``, all
operations are taken in turn, without ``--fault`` all faults. Operations are those on files below the folder
of the run, numbered from 0. ``shim.c`` counts them below Python, Arrow and DuckDB, so it needs Linux and a C
compiler. ``matrix.py`` runs all cases of all commands and can be stopped and continued.

Errors (``eio``, ``enospc``, ``eintr``, ``short``, and ``...-lasting`` for all operations from then on) are
returned by the shim in a run of its own. Crashes (see ``replay.CRASHES``) are built from the record of one
undisturbed run.

After each fault: (1) the store has no half-published file; (2) an error is one of hexdata that names a file
and a remedy; (3) the same command again gives the files of an undisturbed run.

A case takes a few hundredths of a second of CPU time, because each run is a fork of a process that has run
the command before; of ``run``, it is forked at the beginning of the stage with the fault. The command runs
again only on disks that were not seen before. ``eintr`` and ``short``, which a run should not notice, are
returned at many operations of one run; if it ends in another way than an undisturbed run, each is tried in a
run of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))

import duckdb  # noqa: E402

from hexdata import temporary  # noqa: E402
from hexdata.cards import CARDS  # noqa: E402
from hexdata.errors import HexdataError  # noqa: E402
from hexdata.sql.database import DATABASE_NAME  # noqa: E402
from hexdata.store import STAGES  # noqa: E402
from tests.simulation.commands import COMMANDS, forget_databases, points_announced, prepare  # noqa: E402
from tests.simulation.replay import (  # noqa: E402
    CHANGES,
    CRASHES,
    KINDS,
    Disk,
    Operation,
    Tree,
    digest,
    read_log,
    read_tree,
    write_tree,
)
from tests.simulation.sharing import Group, share_tasks  # noqa: E402

SHIM: Final = Path(__file__).with_name("shim.c")
ERRORS: Final = {"eio": 1, "enospc": 2, "eintr": 3, "short": 4, "estale": 5, "etimedout": 6, "eagain": 7}
LASTING: Final = ("eio-lasting", "enospc-lasting")
FAULTS: Final = (*("eio", "enospc", "eintr", "short"), *LASTING, *CRASHES)
UNNOTICED: Final = ("eintr", "short")
"""Errors after which a run should repeat the operation."""
SEEDED: Final = ("torn", "disordered")
"""Crashes that depend on the seed."""
SEEDS: Final = 2
"""Number of seeds that are tried."""
_REACHED: Final = {
    "enospc": ("create", "write", "mkdir", "rename", "sync", "link"),
    "eintr": ("open", "create", "read", "write", "sync", "truncate"),
    "short": ("read", "write"),
}
"""Kinds of operations that an error may concern, if not all."""
_LASTING_REACHED: Final = {"eio": CHANGES, "enospc": frozenset(_REACHED["enospc"])}
"""The same for an error that lasts, which is tried also at the first operation on each path."""
_CHUNK: Final = {"small": 96, "medium": 8}
"""Largest number of cases that a worker takes at a time."""


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
    """What a run did: ``ending`` is "done", "error", "bare" (no error of hexdata) or "died".

    Attributes:
        ending: See above.
        text: The message or traceback.
        faults: Number of operations that failed.
        operations: Number of operations.
        hits: Number of operations of a group that failed.
        passed: Points of a recorded run, each with the number of the next operation and a digest of the
            files; otherwise only the point at which the run was ended, because its files were those of the
            undisturbed run.
    """

    ending: str
    text: str = ""
    faults: int = 0
    operations: int = 0
    hits: int = 0
    passed: Sequence[tuple[str, int, str]] = ()


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


# --- one run -------------------------------------------------------------------------------------------


class _Shim:
    """The functions of ``shim.c`` in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("disk_count", "disk_injected", "disk_hits"):
            getattr(self._library, name).restype = ctypes.c_long

    def share(self, path: Path) -> None:
        """Count the operations of worker processes too."""
        self._library.disk_share(os.fsencode(path))
        os.environ["HEXDATA_DISK_STATE"] = str(path)

    def start(self, folder: Path, log: Path | None) -> None:
        """Count the operations below a folder, and record them in a file."""
        self._library.disk_start(os.fsencode(folder), None if log is None else os.fsencode(log))

    def arm(self, at: int, fault: str) -> None:
        """Let operation ``at`` fail."""
        kind, _, lasting = fault.partition("-")
        self._library.disk_arm(ctypes.c_long(at), ERRORS[kind], int(bool(lasting)))

    def arm_group(self, keys: list[int], fault: str) -> None:
        """Let all operations with these keys fail."""
        array = (ctypes.c_uint64 * len(keys))(*sorted(keys))
        self._library.disk_arm_group(array, ctypes.c_long(len(keys)), ERRORS[fault])

    def pause(self, paused: bool) -> None:
        """Stop or continue counting."""
        self._library.disk_pause(int(paused))

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of operations, of faults, and of keys of a group that were reached."""
        library = self._library
        return library.disk_count(), library.disk_injected(), library.disk_hits()


_MASK: Final = (1 << 64) - 1


def keys_of(operations: Iterable[Operation]) -> list[int]:
    """Return the key of each operation: a hash of its path and kind, plus its number among these."""
    numbers: Counter[int] = Counter()
    names: dict[tuple[str, str], int] = {}
    keys = []
    for operation in operations:
        if (name := names.get((operation.path, operation.kind))) is None:
            name = 14695981039346656037
            path = os.fsencode(f"/{operation.path}" if operation.path else "")
            for byte in (*path, KINDS.index(operation.kind)):
                name = ((name ^ byte) * 1099511628211) & _MASK
            names[operation.path, operation.kind] = name
        keys.append((name + numbers[name] * 0x9E3779B97F4A7C15) & _MASK)
        numbers[name] += 1
    return keys


class _Sessions:
    """DuckDB databases in memory that are opened before the fork: opening one takes 14 ms of CPU time.

    Threads do not survive a fork, so they have none before it, and later one that reads
    ahead instead of eight.
    """

    _CONFIG: Final = {
        "threads": "1",
        "preserve_insertion_order": "false",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
    }
    _SETTABLE: Final = ("memory_limit", "temp_directory")

    def __init__(self) -> None:
        self._connect = duckdb.connect
        self._open: list[Any] = []
        self._kept: list[Any] = []
        self.used = 0

    def fill(self) -> None:
        """Open as many databases as a run has used."""
        while len(self._open) < min(self.used, 24):
            self._open.append(self._connect(":memory:", config={**self._CONFIG, "async_threads": "0"}))

    def install(self) -> None:
        """Use the open databases for all calls of ``duckdb.connect`` with the same options."""
        duckdb.connect = self._next  # type: ignore[assignment]

    def _next(self, database: str = ":memory:", **options: Any) -> Any:
        config = options.get("config", {})
        fixed = {name: value for name, value in config.items() if name not in self._SETTABLE}
        if database != ":memory:" or options.keys() != {"config"} or fixed != self._CONFIG:
            return self._connect(database, **options)
        self.used += 1
        if not self._open:
            return self._connect(database, config={**config, "async_threads": "1"})
        connection = self._open.pop()
        self._kept.append(connection.cursor())  # the process ends sooner than the database could be freed
        connection.execute("SET async_threads = 1")
        for name in config.keys() & self._SETTABLE:
            text = config[name].replace("'", "''")
            connection.execute(f"SET {name} = '{text}'")
        return connection


_SESSIONS: Final = _Sessions()


@dataclass(frozen=True)
class _Plan:
    """What a run in a child process does besides its action.

    Attributes:
        log: File for the record of its operations; None for none.
        marks: Digests of the files of the undisturbed run at its points. Once a fault was
            returned, or if none is planned, a run with the same files ends there.
        server: Stage at whose beginning the process becomes a server of forks; None for none.
        shared: File for the state of the shim; None if it is not shared with worker processes.
    """

    log: Path | None = None
    marks: dict[str, str] = field(default_factory=dict)
    server: str | None = None
    shared: Path | None = None


def _run_here(folder: Path, action: Callable[[], Any], plan: _Plan, requests: int, answers: int) -> None:
    """Run an action, and write the outcome to ``answers``. A server forks for each line of ``requests``."""
    _set_up(folder)
    if plan.shared is None:
        _fix_names(again=plan.server is None and plan.log is None)
    else:
        _fork_workers()
    _SESSIONS.install()
    shim = _Shim() if hasattr(ctypes.CDLL(None), "disk_start") else None
    passed: list[tuple[str, int, str]] = []
    faulty = plan.server is not None

    def files() -> str:
        if shim is not None:
            shim.pause(True)
        key = tree_key(read_tree(folder), logs=False)
        if shim is not None:
            shim.pause(False)
        return key

    def at_point(point: str) -> None:
        counted, faults, hits = (0, 0, 0) if shim is None else shim.counts()
        if point == plan.server and shim is not None:
            _serve(shim, plan, folder, requests, answers)
        elif plan.log is not None:
            passed.append((point, counted, files()))
        elif point in plan.marks and bool(faults) == faulty and plan.marks[point] == files():
            _send(answers, Outcome("done", "", faults, counted, hits, [(point, counted, "")]))
            os._exit(0)

    if shim is not None:
        if plan.shared is not None:
            shim.share(plan.shared)
        shim.start(folder, plan.log)
    ending, text = "done", ""
    try:
        at_point("")
        with points_announced(at_point):
            action()
    except HexdataError as error:
        ending, text = "error", str(error)
        if error.path is None and "store/" not in text and f"{folder}/" not in text:
            ending, text = "bare", f"names no file: {text}"
        elif not error.hint and not any(remedy in text for remedy in ("Check the disk", "Run `hexdata")):
            ending, text = "bare", f"names no remedy: {text}"
    except BaseException:  # noqa: BLE001 - the caller reports it
        ending, text = "bare", traceback.format_exc()
    operations, faults, hits = (0, 0, 0) if shim is None else shim.counts()
    if shim is not None:
        shim.pause(True)
    _send(answers, Outcome(ending, text[-6000:], faults, operations, hits, passed))


def _set_up(folder: Path) -> None:
    """Prepare this process for a run in a folder, without output."""
    forget_databases()
    temporary.remove_abandoned.cache_clear()
    os.chdir(folder)
    os.environ["TMPDIR"] = str(folder / "tmp")
    tempfile.tempdir = None
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(silence, stream)
    warnings.simplefilter("ignore")


def _fix_names(again: bool) -> None:
    """Let all first runs use the same random names, and repeated runs other ones."""
    tempfile._name_sequence = map("t{:07d}".format, itertools.count())  # type: ignore[attr-defined]
    numbers = itertools.count(1 << 40 if again else 1)
    temporary._owner = lambda: "1-1-1-00000000-00000000"
    os.urandom = lambda size: digest(b"%d" % next(numbers)).encode()[:size].ljust(size, b"0")


def _fork_workers() -> None:
    """Let loky fork its worker processes: starting an interpreter for each takes most of a medium run."""
    import loky.backend.context

    loky.backend.context.set_start_method("fork", force=True)


def _serve(shim: _Shim, plan: _Plan, folder: Path, requests: int, answers: int) -> None:
    """Fork for each request. Return in the fork, with the fault of the request; never in the server."""
    _send(answers, Outcome("ready", operations=shim.counts()[0]))
    with os.fdopen(requests) as lines:
        for line in lines:
            child = os.fork()
            if not child:
                signal.alarm(_SECONDS)
                if plan.shared is not None:
                    os.setpgid(0, 0)
                    shim.start(folder, None)  # counts from 0: the run before has counted in the same state
                request = json.loads(line)
                if "keys" in request:
                    shim.arm_group(request["keys"], request["fault"])
                else:
                    shim.arm(request["at"], request["fault"])
                return
            _, status = os.waitpid(child, 0)
            if plan.shared is not None:
                _kill_workers(child)
            if status:
                _send(answers, Outcome("died", f"status {status}"))
    os._exit(0)


def _kill_workers(process: int) -> None:
    """End the worker processes that a run has left, before its files are replaced."""
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def _send(answers: int, outcome: Outcome) -> None:
    line = json.dumps(asdict(outcome)).encode() + b"\n"
    while line:
        line = line[os.write(answers, line) :]


class _Child:
    """A forked run. See :func:`_run_here`."""

    def __init__(self, folder: Path, action: Callable[[], Any], plan: _Plan) -> None:
        to_read, requests = os.pipe()
        reading, answers = os.pipe()
        sys.stdout.flush()
        self._process = os.fork()
        if not self._process:
            os.close(requests)
            os.close(reading)
            try:
                if plan.server is None:
                    signal.alarm(_SECONDS)
                if plan.shared is not None:
                    os.setpgid(0, 0)
                _run_here(folder, action, plan, to_read, answers)
            finally:
                os._exit(0)
        os.close(to_read)
        os.close(answers)
        self._requests = requests
        self._answers = os.fdopen(reading)
        self._has_workers = plan.shared is not None

    def outcome(self) -> Outcome | None:
        """Return the next outcome, or None if the process has ended without one."""
        line = self._answers.readline()
        return Outcome(**json.loads(line)) if line.endswith("\n") else None

    def ask(self, **request: Any) -> Outcome:
        """Ask a server for a run with a fault."""
        line = (json.dumps(request) + "\n").encode()
        while line:
            line = line[os.write(self._requests, line) :]
        outcome = self.outcome()
        assert outcome is not None, "the server has ended"
        return outcome

    def end(self) -> int:
        """Wait for the end of the process, and return its status."""
        os.close(self._requests)
        self._answers.close()
        _, status = os.waitpid(self._process, 0)
        if self._has_workers:
            _kill_workers(self._process)
        return status


_SECONDS: Final = 300
"""Seconds after which a run is ended as one that hangs."""


def run_in(folder: Path, action: Callable[[], Any], plan: _Plan | None = None) -> Outcome:
    """Run an action in a child process whose working directory is ``folder``, and return its outcome."""
    child = _Child(folder, action, plan or _Plan())
    outcome = child.outcome()
    status = child.end()
    return outcome or Outcome("died", f"status {status}")


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


def tree_key(tree: Tree, logs: bool = True) -> str:
    """Return a digest of all that can influence a command: not of temporary files, and not of times.

    Args:
        tree: Files below the working directory.
        logs: Whether to include logs, which stages only extend.
    """
    facts = []
    for path, content in tree.items():
        if path.startswith("tmp/") or (not logs and f"{path}/".startswith("store/logs/")):
            continue
        if content is not None and path.endswith(".html"):
            content = content[-8:]
        elif path.endswith(".lock"):  # its content is random
            content = b""
        elif content is not None and "/logs/" in path:
            content = re.sub(rb"[0-9][-+.0-9e]*", b"0", content)
        facts.append(f"{path} {'-' if content is None else digest(content)}")
    return digest("\n".join(sorted(facts)).encode())


def replaced(tree: Tree) -> Tree:
    """Return a tree after the steps with which the next command finishes a replacement (see format.md)."""
    ready = "store/.work/ready/"
    if f"{ready}manifest.json" not in tree:
        return tree
    new = {f"store/{path.removeprefix(ready)}": data for path, data in tree.items() if path.startswith(ready)}
    old = tuple(f"store/{folder}/" for folders in STAGES.values() for folder in folders)
    old = tuple(folder for folder in old if folder.rstrip("/") in new)
    return {path: data for path, data in tree.items() if not path.startswith((ready, *old))} | new


def half_published(tree: Tree, versions: dict[str, set[str]] | None = None) -> str:
    """Return what is half-published in a tree, or an empty text.

    Args:
        tree: Files below the working directory.
        versions: Digests that the content of each published file may have. Default: not compared.
    """
    tree = replaced(tree)
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


def leftovers(tree: Tree, command: str) -> list[str]:
    """Return temporary files that a finished command must not leave.

    ``report`` has no lock, so it must not remove the unfinished page of another run. The next stage does.
    """
    found = [path for path in tree if path.endswith(".tmp") and not path.startswith("tmp/")]
    return [path for path in found if command != "report" or not path.startswith("store/.report.html.")]


OPTIONAL: Final = (DATABASE_NAME, *CARDS)
"""Files that a run without an error may not have written, which a note then says."""


def _difference(tree: Tree, end: Tree, optional: tuple[str, ...] = ()) -> str:
    found, expected = published(tree), published(end)
    names = [n for n in sorted(found.keys() | expected.keys()) if found.get(n) != expected.get(n)]
    names = [name for name in names if name.partition("store/")[2] not in optional]
    return f"other files than after an undisturbed run: {', '.join(names[:5])}" if names else ""


# --- one command ---------------------------------------------------------------------------------------


class Simulation:
    """A command with its start, and the record and the files of its undisturbed run.

    Args:
        command: Name of a command.
        size: "small" or "medium".
        folder: Folder for the files of all runs.
    """

    def __init__(self, command: str, size: str, folder: Path) -> None:
        self.command, self.size, self.folder = command, size, folder
        self.exact = size == "small"
        """Whether every run has the same operations in the same order: it has one process and one thread."""
        begin = folder / "begin"
        begin.mkdir(parents=True)
        made = run_in(begin, lambda: prepare(command, size))
        assert made.ending == "done", made.text
        self.start = read_tree(begin)
        log = folder / "log"
        outcome = run_in(begin, self.action, self.plan(log=log))
        assert outcome.ending == "done", outcome.text
        self.end = read_tree(begin)
        self.operations = read_log(log)
        log.unlink()
        shutil.rmtree(begin)
        self.keys = keys_of(self.operations)
        self.points = {point: at for point, at, _ in outcome.passed}
        """Number of the first operation after each point of the run."""
        self.stages = [(point, at) for point, at in self.points.items() if not point.startswith("end of ")]
        """Points at which a run can be forked, as it has neither open files nor threads."""
        self.marks = {}
        if self.exact:  # what a check has found is not in a file
            self.marks = {at: key for at, _, key in outcome.passed[1:] if not at.startswith("check of ")}
        else:
            self.stages = self.stages[:1]
        disk = Disk(self.start)
        for operation in self.operations:
            disk.apply(operation)
        replayed = disk.after_crash("killed", "")
        assert replayed == self.end, "the record does not give the files of the run"
        self.versions = disk.versions

    def action(self) -> None:
        """Run the command in the working directory."""
        if self.exact:  # the default number of processes and threads is the number of cores
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        COMMANDS[self.command].run(self.size)

    def plan(self, **plan: Any) -> _Plan:
        """Return a plan. Worker processes share the state of the shim."""
        if self.exact:
            return _Plan(**plan)
        shared = self.folder / f"state-{os.getpid()}"
        shared.unlink(missing_ok=True)
        return _Plan(**plan, shared=shared)

    def stage_of(self, at: int) -> str:
        """Return the last stage that begins before an operation."""
        return next((stage for stage, first in reversed(self.stages) if first <= at), "")

    def cases(self, faults: tuple[str, ...] = FAULTS, seeds: Iterable[int] = range(SEEDS)) -> Iterator[Case]:
        """Yield all cases of the given faults: first the errors, then the crashes."""
        for crashes in (False, True):
            chosen = [fault for fault in faults if (fault in CRASHES) == crashes]
            paths = set()
            for operation in self.operations:
                is_first = operation.path not in paths
                paths.add(operation.path)
                for fault in chosen:
                    if crashes:
                        reached: Iterable[str] = CHANGES
                    elif fault in LASTING:
                        reached = _LASTING_REACHED[fault.removesuffix("-lasting")]
                    else:
                        reached = _REACHED.get(fault, KINDS)
                    if operation.kind in reached or (is_first and fault == "eio-lasting"):
                        for seed in seeds if fault in SEEDED else [0]:
                            yield Case(self.command, self.size, operation.number, fault, seed)
            if crashes:  # after the last operation
                for fault in chosen:
                    yield Case(self.command, self.size, len(self.operations), fault)

    def chunks(self, cases: Iterable[Case]) -> list[list[Case]]:
        """Divide cases into lists that each have only errors of one stage, or only crashes."""
        chunks: list[list[Case]] = []
        for _, found in itertools.groupby(
            cases,
            lambda case: (case.fault in CRASHES, "" if case.fault in CRASHES else self.stage_of(case.at)),
        ):
            whole = list(found)
            number = -(-len(whole) // _CHUNK[self.size])
            chunks += [
                whole[len(whole) * k // number : len(whole) * (k + 1) // number] for k in range(number)
            ]
        return chunks


def sample(cases: list[Case], size: Callable[[int], int], seed: int = 0) -> list[Case]:
    """Return some cases of each fault, spread evenly over the operations.

    Args:
        cases: All cases.
        size: Returns the number of cases to choose from a number of cases.
        seed: Seed of the choice.
    """
    chosen = set()
    for fault in FAULTS:
        found = [case for case in cases if case.fault == fault]
        draw = random.Random(f"{seed} {fault}")
        number = min(size(len(found)), len(found))
        chosen |= {found[int((k + draw.random()) * len(found) / number)] for k in range(number)}
    return [case for case in cases if case in chosen]


class _Seen:
    """Keys of disks on which the command was run again with success, in a file of all workers."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._keys: set[bytes] = set()
        self._at = 0

    def __contains__(self, key: str) -> bool:
        new = os.pread(self._file, 1 << 24, self._at)
        self._at += len(new)
        self._keys.update(new.split())
        return key.encode() in self._keys

    def add(self, key: str) -> None:
        os.write(self._file, key.encode() + b"\n")


class _Worker:
    """Checks chunks of cases, in a folder of its own."""

    def __init__(self, simulation: Simulation, job: int) -> None:
        self.simulation = simulation
        self.folder = simulation.folder / f"job-{job}"
        self.seen = _Seen(simulation.folder / "seen")
        self.counts: Counter[str] = Counter()
        self._disk, self._at = Disk(simulation.start), 0
        self.folder.mkdir(parents=True, exist_ok=True)
        self._inode = self.folder.stat().st_ino
        if simulation.exact:
            self._warm_up()

    def _warm_up(self) -> None:
        """Run the command in this process, so that its forks find caches filled and databases open."""
        write_tree(self.simulation.start, self.folder)
        _SESSIONS.install()
        child = os.dup(1), os.dup(2), Path.cwd()
        _set_up(self.folder)
        _fix_names(again=False)
        self.simulation.action()
        for stream in (1, 2):
            os.dup2(child[stream - 1], stream)
            os.close(child[stream - 1])
        os.chdir(child[2])
        _SESSIONS.fill()
        gc.collect()
        gc.freeze()

    def check(self, cases: list[Case]) -> Iterator[tuple[Case, str]]:
        """Check a chunk; yield each case that fails with what is wrong."""
        if cases[0].fault in CRASHES:
            found = ((case, self._check_crash(case)) for case in cases)
        else:
            found = self._check_errors(cases)
        yield from ((case, wrong) for case, wrong in found if wrong)
        if not self.folder.exists() or self.folder.stat().st_ino != self._inode:
            raise RuntimeError(f"another program has removed {self.folder}; run these cases again")
        self.counts["cases"] += len(cases)
        self.counts.update(f"{case.fault} cases" for case in cases)

    def _check_crash(self, case: Case) -> str:
        simulation = self.simulation
        if case.at < self._at:
            self._disk, self._at = Disk(simulation.start), 0
        for operation in simulation.operations[self._at : case.at]:
            self._disk.apply(operation)
        self._at = case.at
        running = simulation.operations[case.at] if case.at < len(simulation.operations) else None
        tree = self._disk.after_crash(case.fault, f"{case.seed} {case.at}", running)
        if wrong := half_published(tree, simulation.versions):
            return wrong
        key = tree_key(tree)
        if key in self.seen:
            return ""
        self.counts["disks after crashes"] += 1
        write_tree(tree, self.folder)
        return self._run_again(key)

    def _check_errors(self, cases: list[Case]) -> Iterator[tuple[Case, str]]:
        simulation = self.simulation
        stage = simulation.stage_of(cases[0].at) if simulation.exact else ""
        write_tree(simulation.start, self.folder)
        server = _Child(self.folder, simulation.action, simulation.plan(marks=simulation.marks, server=stage))
        ready = server.outcome()
        assert ready is not None, "the run has ended"
        assert ready.ending == "ready", ready.text
        assert not simulation.exact or (stage, ready.operations) in simulation.stages, ready
        begin = read_tree(self.folder)

        def run(**request: Any) -> Outcome:
            write_tree(begin, self.folder)
            self.counts["runs with errors"] += 1
            return server.ask(**request)

        single = []
        for fault in ERRORS | dict.fromkeys(LASTING):
            chosen = [case for case in cases if case.fault == fault]
            if fault in UNNOTICED and simulation.exact:
                chosen = self._noticed([case for case in chosen if not self._is_noticed(case)], run)
                single += [case for case in cases if case.fault == fault and self._is_noticed(case)]
            single += chosen
        for case in single:
            yield case, self._judge(run(at=case.at, fault=case.fault))
        server.end()

    def _is_noticed(self, case: Case) -> bool:
        """Return whether a run will notice a fault: Python repeats all interrupted calls but truncate."""
        operation = self.simulation.operations[case.at]
        in_database = operation.path.startswith("tmp/") and DATABASE_NAME in operation.path
        return case.fault == "eintr" and (operation.kind == "truncate" or in_database)

    def _noticed(self, cases: list[Case], run: Callable[..., Outcome]) -> list[Case]:
        """Return the cases whose fault a run may notice: those of groups that do not end as usual."""
        if len(cases) < 2:
            return cases
        simulation = self.simulation
        cases = sorted(
            cases, key=lambda case: simulation.operations[case.at].path
        )  # one reader, one behaviour
        keys = [simulation.keys[case.at] for case in cases]
        outcome = run(keys=keys, fault=cases[0].fault)
        if outcome.ending == "done" and outcome.hits == len(keys):
            end = simulation.points[outcome.passed[0][0]] if outcome.passed else len(simulation.operations)
            if outcome.operations == end and (
                outcome.passed or tree_key(read_tree(self.folder)) == tree_key(simulation.end)
            ):
                self.counts["cases in groups"] += len(cases)
                return []
        middle = len(cases) // 2
        return self._noticed(cases[:middle], run) + self._noticed(cases[middle:], run)

    def _judge(self, outcome: Outcome) -> str:
        """Return what is wrong after a run with one error, or with one that lasts."""
        self.counts["errors returned"] += bool(outcome.faults)
        self.counts[f"then {outcome.ending}"] += 1
        if outcome.ending in ("bare", "died"):
            return f"{outcome.ending}: {outcome.text}"
        if outcome.passed:
            return ""
        tree = read_tree(self.folder)
        if wrong := half_published(tree):
            return f"after {outcome.text}: {wrong}"
        if outcome.ending == "done" and (difference := _difference(tree, self.simulation.end, OPTIONAL)):
            return f"ends without an error, but there are {difference}"
        key = tree_key(tree)
        if key in self.seen:
            return ""
        self.counts["disks after errors"] += 1
        if wrong := self._run_again(key):
            return f"after {outcome.text}: {wrong}"
        return ""

    def _run_again(self, key: str) -> str:
        simulation = self.simulation
        outcome = run_in(self.folder, simulation.action, simulation.plan(marks=simulation.marks))
        if outcome.ending != "done":
            return f"the command again: {outcome.ending}: {outcome.text}"
        if not outcome.passed:
            tree = read_tree(self.folder)
            if difference := _difference(tree, simulation.end):
                return f"the command again: {difference}"
            if left := leftovers(tree, simulation.command):
                return f"the command again leaves {left}"
        self.seen.add(key)
        return ""


# --- many cases ----------------------------------------------------------------------------------------


class CommandGroup(Group):
    """The cases of one command, divided into chunks, which are tried with some processes.

    Args:
        name: Name of the command.
        size: "small" or "medium".
        folder: Folder for the files, which is removed at the end.
        choose: Selects cases. Default: all.
        seeds: Seeds of the faults that depend on one. Default: 0 and 1.
    """

    def __init__(
        self,
        name: str,
        size: str,
        folder: Path,
        choose: Callable[[list[Case]], list[Case]] = list,
        seeds: Sequence[int] = range(SEEDS),
    ) -> None:
        super().__init__()
        self.name, self.size, self.folder = name, size, folder
        self._choose, self._seeds = choose, seeds

    def prepare(self) -> tuple[dict[str, Any], int]:
        simulation = Simulation(self.name, self.size, self.folder)
        cases = list(simulation.cases(seeds=self._seeds))
        chunks = simulation.chunks(self._choose(cases))
        (self.folder / "simulation").write_bytes(pickle.dumps((simulation, chunks)))
        return {"operations": len(simulation.operations), "all cases": len(cases)}, len(chunks)

    def begin(self, job: int) -> Callable[[int], dict[str, Any]]:
        simulation, chunks = pickle.loads((self.folder / "simulation").read_bytes())
        worker = _Worker(simulation, job)

        def check(number: int) -> dict[str, Any]:
            worker.counts.clear()
            failures = [
                {"case": asdict(case), "wrong": wrong[-3000:]} for case, wrong in worker.check(chunks[number])
            ]
            return {"counts": dict(worker.counts), "failures": failures}

        return check

    def end(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def load_libraries() -> None:
    """Import what the children need, and so would import each."""
    import pandas  # noqa: F401
    import pyarrow.compute
    import pyarrow.dataset
    import pyarrow.parquet  # noqa: F401

    import hexdata.formats.legacy
    import hexdata.loader
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


def default_folder() -> Path:
    """Return a folder in memory, if there is one: a run syncs nothing, but makes and removes many files."""
    memory = Path("/dev/shm")
    return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / f"hexdata-disk-{os.getuid()}"


def main() -> None:
    """Run the cases that the command line selects; exit with status 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", nargs="+", choices=[*COMMANDS, "all"])
    parser.add_argument("--size", choices=["small", "medium"], default="small")
    parser.add_argument("--at", type=int, help="number of the operation; default: each")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="default: each")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of torn and disordered; default: 0 and 1"
    )
    parser.add_argument("--every", type=int, default=1, help="check every k-th case of each fault only")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=default_folder())
    parser.add_argument("--list", action="store_true", help="print the operations and end")
    options = parser.parse_args()
    preload(options.folder)
    load_libraries()
    names = list(COMMANDS) if "all" in options.command else options.command
    if options.list:
        for name in names:
            _print_operations(name, options)
        return
    seeds = range(SEEDS) if options.seed is None else [options.seed]
    groups = [
        CommandGroup(
            name,
            options.size,
            options.folder / f"{name}-{options.size}-{os.getpid()}",
            lambda cases: _chosen(cases, options),
            seeds=seeds,
        )
        for name in names
    ]
    failed = 0
    counts: dict[Group, Counter[str]] = {group: Counter() for group in groups}
    for group, number, answer in share_tasks(groups, options.jobs, float("inf")):
        assert isinstance(group, CommandGroup)
        counts[group].update(answer.get("counts", {}))
        counts[group]["CPU seconds"] += answer.get("cpu", 0)
        for failure in answer.get("failures", ()):
            failed += 1
            counts[group]["failed"] += 1
            wrong = failure["wrong"].replace("\n", "\n    ")
            print(f"FAILED {Case(**failure['case'])}\n    {wrong}", flush=True)
        if "broken" in answer:
            failed += 1
            print(f"BROKEN {group.name} {group.size}, chunk {number}\n{answer['broken']}", flush=True)
        elif number is None and group.facts is not None:
            print(_summary(group, counts[group]), flush=True)
    sys.exit(failed > 0)


def _chosen(cases: list[Case], options: argparse.Namespace) -> list[Case]:
    """Return the cases that the command line selects."""
    cases = [
        case
        for case in cases
        if options.at in (None, case.at) and (options.fault is None or case.fault in options.fault)
    ]
    return sample(cases, lambda number: -(-number // options.every))


def _print_operations(name: str, options: argparse.Namespace) -> None:
    folder = options.folder / f"{name}-{options.size}-{os.getpid()}"
    try:
        for operation in Simulation(name, options.size, folder).operations:
            print(operation.number, operation.kind, operation.path, operation.other, len(operation.data))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _summary(group: CommandGroup, counts: Counter[str]) -> str:
    assert group.facts is not None
    shown = {
        name: round(number)
        for name, number in sorted(counts.items())
        if name != "failed" and not name.endswith("cases")
    }
    figures = {"operations": group.facts["operations"], "cases": counts["cases"], **shown}
    return f"{group.name} {group.size}: {counts['failed']} failed; {figures}"


if __name__ == "__main__":
    main()
