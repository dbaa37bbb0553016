"""Temporary files of commands: removed when a command is ended, and by the next one if it was killed.

Each command is stopped as soon as it has made a temporary folder, and then ended by a signal.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from hexdata.convert import convert_sources
from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.conftest import DemoTrmph

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped with Linux's signals")

COMMANDS: dict[str, Sequence[str]] = {
    "browse": ["browse", "store"],
    "demo": ["demo", "demo"],
    "export": ["export", "store", "--block-size", "512", "--shard-size", "2048"],
    "load": ["load", "store", "--mode", "games", "--weights", "weights.npy", "--epochs", "1000"],
    "report": ["report", "store"],
    "shuffle": ["shuffle", "store", "--seed", "7"],
    "shuffle --dry-run": ["shuffle", "store", "--seed", "7", "--dry-run"],
    "sql": ["sql", "store", "SELECT count(*) FROM range(100_000_000_000) t(i) WHERE hash(i) = 1"],
    "verify": ["verify", "store"],
    "verify --round-trip": ["verify", "store", "--round-trip", "games"],
}
"""Commands that make temporary files, run in a folder with a store and its sources."""
PROBE = re.compile("[a-z0-9_]{8}")
"""The file with which Python finds out, once in a process, whether it can write to a temporary folder."""
CONVERT = ["convert", "games", "new", "--workers", "2"]
LONG = COMMANDS["sql"]
"""A command that runs until it is ended."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, demo_trmph: DemoTrmph) -> Path:
    """A folder with sources, an exported store and weights. Read only: copy it."""
    folder = tmp_path_factory.mktemp("prepared")
    demo_trmph(folder / "games", games=200, files=8)
    positions = convert_sources([folder / "games"], folder / "store").positions
    shuffle_store(folder / "store", ShuffleOptions())
    export_shards(folder / "store", ExportOptions(workers=1))
    np.save(folder / "weights.npy", np.ones(positions, np.float32))
    return folder


class Workplace:
    """A folder in which commands run, with a temporary folder and a cache folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temporary, self.cache = folder, folder / "tmp", folder / "cache"
        self.errors = folder / "errors.txt"
        self.temporary.mkdir()
        self.environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "HEXDATA_CACHE": str(self.cache),
            "MPLCONFIGDIR": str(self.cache),
        }

    def start(self, arguments: Sequence[str], *before: str) -> subprocess.Popen[bytes]:
        """Start a command as the leader of a group of processes."""
        with self.errors.open("wb") as errors:
            return subprocess.Popen(
                [*before, sys.executable, "-m", "hexdata", *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def left(self) -> list[Path]:
        """Return the temporary files and folders that exist."""
        cached = self.cache / "temporary"
        folders = [self.temporary, *([cached] if cached.exists() else [])]
        paths = [path for folder in folders for path in folder.iterdir()]
        return [path for path in paths if not PROBE.fullmatch(path.name)]

    def stop_with_files(self, arguments: Sequence[str], *before: str) -> subprocess.Popen[bytes]:
        """Start a command, and stop it at a moment when it has a temporary file or folder."""
        for _ in range(20):
            process = self.start(arguments, *before)
            while process.poll() is None:
                if self.left():
                    os.killpg(process.pid, signal.SIGSTOP)
                    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                    if process.poll() is None and self.left():
                        return process
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGCONT)
                time.sleep(0.0005)
            assert process.returncode == 0, self.errors.read_text()
            for name in ("demo", "cache/browse"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        pytest.fail(f"{arguments} makes no temporary files")

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a command with its processes."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert self.left()

    def run_next(self) -> None:
        """Run another command."""
        process = self.start(["info", "store", "--json"])
        assert process.wait(60) == 0


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path) -> Workplace:
    return Workplace(shutil.copytree(prepared, tmp_path / "workplace"))


@pytest.fixture
def stopped(workplace: Workplace) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Return ``Workplace.stop_with_files``, whose processes are killed at the end of the test."""
    processes = []

    def stop(*arguments: str, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        processes.append(workplace.stop_with_files(arguments, *before))
        return processes[-1]

    yield stop
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def becomes(condition: Callable[[], bool]) -> bool:
    """Return whether a condition is met soon: loky's processes end a moment after their parent."""
    deadline = time.monotonic() + 10
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return met


def processes_of(group: int) -> bool:
    """Return whether a group has processes."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("name", COMMANDS)
def test_a_terminated_command_leaves_nothing(
    name: str, workplace: Workplace, stopped: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = stopped(*COMMANDS[name])
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGCONT)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert "Traceback" not in workplace.errors.read_text()
    assert workplace.left() == []
    assert becomes(lambda: not processes_of(process.pid))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_next_command_removes_what_a_killed_one_left(
    name: str, workplace: Workplace, stopped: Callable[..., subprocess.Popen[bytes]]
) -> None:
    workplace.kill(stopped(*COMMANDS[name]))
    workplace.run_next()
    assert workplace.left() == []


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_closed_terminal_ends_a_command_as_ctrl_c_does(
    name: str, workplace: Workplace, stopped: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process, number = stopped(*LONG), signal.Signals[name]
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 128 + number
    assert workplace.left() == []


def test_a_repeated_signal_does_not_disturb_the_end(
    workplace: Workplace, stopped: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """``timeout`` sends SIGTERM to the process and to its group."""
    process = stopped(*LONG)
    process.send_signal(signal.SIGCONT)
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    assert process.returncode == 128 + signal.SIGTERM
    assert workplace.left() == []


def test_files_of_a_running_process_are_kept(
    workplace: Workplace, stopped: Callable[..., subprocess.Popen[bytes]]
) -> None:
    stopped(*LONG)
    files = workplace.left()
    workplace.run_next()
    assert workplace.left() == files


def test_a_process_with_the_same_id_protects_nothing(
    workplace: Workplace, stopped: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = stopped(*LONG)
    workplace.kill(process)
    for path in workplace.left():
        renamed = path.name.replace(f"-{process.pid}-", f"-{os.getpid()}-")
        assert renamed != path.name
        path.rename(path.with_name(renamed))
    workplace.run_next()
    assert workplace.left() == []


def test_other_files_and_links_are_kept(
    workplace: Workplace, stopped: Callable[..., subprocess.Popen[bytes]]
) -> None:
    workplace.kill(stopped(*LONG))
    abandoned = workplace.left()[0]
    theirs = workplace.folder / "theirs"
    theirs.mkdir()
    (theirs / "file").touch()
    kept = [workplace.temporary / name for name in ("hexdata-results", f"{abandoned.name}.tar", "duckdb-1")]
    for path in kept:
        path.mkdir()
    last = "0" if abandoned.name[-1] != "0" else "1"
    link = abandoned.with_name(abandoned.name[:-1] + last)
    link.symlink_to(theirs)
    kept.append(link)
    if os.getuid() == 0:
        kept.append(shutil.copytree(abandoned, abandoned.with_name(f"{abandoned.name[:-2]}aa")))
        os.chown(kept[-1], 12345, 12345)
    workplace.run_next()
    assert sorted(workplace.left()) == sorted(kept)
    assert (theirs / "file").exists()


def test_files_of_another_container_are_kept(
    workplace: Workplace, stopped: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Its processes cannot be seen, and their ids are those of other processes here."""
    container = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    try:
        subprocess.run([*container, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no namespace of process ids can be made here")
    stopped(*LONG, before=container)
    files = workplace.left()
    workplace.run_next()
    assert workplace.left() == files


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_semaphores_of_workers_are_removed(name: str, workplace: Workplace) -> None:
    """They are files in a folder that all processes of the machine share."""
    number = signal.Signals[name]
    process = workplace.start(CONVERT)
    main = psutil.Process(process.pid)
    while len(main.children()) < 2:  # of the processes that are started, the first removes semaphores
        assert process.poll() is None, "no workers were started"
        time.sleep(0.0005)
    semaphores = [path for path in Path("/dev/shm").iterdir() if f"-{process.pid}-" in path.name]
    assert semaphores
    os.killpg(process.pid, number)
    assert process.wait(60) in (128 + number, -number)
    if number == signal.SIGKILL:
        assert any(path.exists() for path in semaphores)
        workplace.run_next()
    assert becomes(lambda: not any(path.exists() for path in semaphores))
    assert workplace.left() == []
