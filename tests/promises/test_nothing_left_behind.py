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
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from hexdata.convert import convert_sources
from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.temporary import remove_abandoned, temporary_folder
from tests.conftest import DemoTrmph
from tests.kit.command_line import hexdata_run
from tests.pairs import FULL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped with Linux's signals")

COMMANDS: dict[str, Sequence[str]] = {
    "browse": ["browse", "store"],
    "demo": ["demo", "demo"],
    "export": ["export", "store", "--block-size", "512", "--shard-size", "2048"],
    "load": ["load", "store", "--mode", "games", "--weights", "value + 1", "--epochs", "1000"],
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
PATIENT = 300.0
"""Seconds after which a process is considered to hang."""
LONG = COMMANDS["sql"]
"""A command that runs until it is ended."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, demo_trmph: DemoTrmph) -> Path:
    """A folder with sources, and an exported store. Read only: copy it."""
    folder = tmp_path_factory.mktemp("prepared")
    demo_trmph(folder / "games", games=200, files=8)
    convert_sources([folder / "games"], folder / "store")
    shuffle_store(folder / "store", ShuffleOptions())
    export_shards(folder / "store", ExportOptions(workers=1))
    return folder


class Workplace:
    """A folder in which commands run, with a temporary folder and a cache folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temporary, self.cache = folder, folder / "tmp", folder / "cache"
        self.errors = folder / "errors.txt"
        own = {"TMPDIR": self.temporary, "HEXDATA_CACHE": self.cache, "MPLCONFIGDIR": self.cache}
        self.own = {name: str(path) for name, path in own.items()}
        self.temporary.mkdir()
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command as the leader of a group of processes."""
        with self.errors.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "hexdata", *arguments],
                cwd=self.folder,
                env=os.environ | self.own,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def left(self) -> list[Path]:
        """Return the temporary files and folders that exist."""
        folders = [self.temporary, self.cache / "temporary"]
        paths = [path for folder in folders if folder.exists() for path in folder.iterdir()]
        return [path for path in paths if not PROBE.fullmatch(path.name)]

    def stop_with_files(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command, and stop it at a moment when it has a temporary file or folder."""
        for _ in range(20):
            process = self.start(arguments)
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
        """Run another command, as the first of this process."""
        remove_abandoned.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", None)
            assert hexdata_run("info", self.folder / "store", "--json", **self.own).status == 0


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path) -> Iterator[Workplace]:
    """A workplace whose commands are killed at the end of the test."""
    made = Workplace(shutil.copytree(prepared, tmp_path / "workplace"))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else ignored under nohup, also by children
    yield made
    signal.signal(signal.SIGHUP, before)
    for process in made.started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def processes_of(group: int) -> bool:
    """Return whether a group has processes."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


CHOSEN = list(COMMANDS) if FULL else ["export", "load", "sql"]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_terminated_command_leaves_nothing(name: str, workplace: Workplace) -> None:
    process = workplace.stop_with_files(COMMANDS[name])
    process.send_signal(signal.SIGTERM)
    os.killpg(process.pid, signal.SIGCONT)
    assert process.wait(PATIENT) == 128 + signal.SIGTERM
    assert "Traceback" not in workplace.errors.read_text()
    assert workplace.left() == []
    deadline = time.monotonic() + PATIENT  # loky's processes end a moment after their parent
    while processes_of(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_next_command_removes_what_a_killed_one_left(name: str, workplace: Workplace) -> None:
    workplace.kill(workplace.stop_with_files(COMMANDS[name]))
    workplace.run_next()
    assert workplace.left() == []


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_closed_terminal_ends_a_command_as_ctrl_c_does(name: str, workplace: Workplace) -> None:
    """Files of a running command are kept by others."""
    number = signal.Signals[name]
    process = workplace.stop_with_files(LONG)
    files = workplace.left()
    workplace.run_next()
    assert workplace.left() == files
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    assert process.wait(PATIENT) == 128 + number
    assert workplace.left() == []


def test_ctrl_c_during_the_removal_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt_once(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "unlink", interrupt_once)
    with pytest.raises(KeyboardInterrupt), temporary_folder("demo", tmp_path) as folder:
        (folder / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_other_files_and_links_are_kept(workplace: Workplace) -> None:
    workplace.kill(workplace.stop_with_files(LONG))
    abandoned = workplace.left()[0]
    theirs = workplace.folder / "theirs"
    theirs.mkdir()
    (theirs / "file").touch()
    kept = [workplace.temporary / name for name in ("hexdata-results", f"{abandoned.name}.tar", "duckdb-1")]
    for path in kept:
        path.mkdir()
    others = [abandoned.with_name(abandoned.name[:-1] + last) for last in "012" if last != abandoned.name[-1]]
    link = others[0]
    link.symlink_to(theirs)
    kept.append(link)
    if os.getuid() == 0:
        kept.append(shutil.copytree(abandoned, others[1]))
        os.chown(kept[-1], 12345, 12345)
    workplace.run_next()
    assert sorted(workplace.left()) == sorted(kept)
    assert (theirs / "file").exists()
