"""A process that writes games into a folder, as self-play does, and that tests command line by line."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

WRITER = Path(__file__).parent / "game_writer.py"


@pytest.fixture
def no_thread_survives() -> Iterator[None]:
    """See that a test ends every thread that it starts; a module asks for it with ``usefixtures``."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


class GameWriter:
    """``game_writer.py`` as a process of its own. What it writes is there when a call returns."""

    def __init__(self, folder: Path, **options: str | int | float | bool) -> None:
        flags = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in options.items()
        ]
        command = [sys.executable, str(WRITER), str(folder), *flags]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def write(self, files: int) -> list[str]:
        """Let it write so many files; their names, in order."""
        self._say(f"write {files}")
        return [self.answer() for _ in range(files)]

    def half(self) -> str:
        """Let it write half a file and stay there; the name that the half has."""
        self._say("half")
        word, _, name = self.answer().partition(" ")
        assert word == "half"
        return name

    def run(self) -> None:
        """Let it write on at its rate. ``answer`` gives the name of each file."""
        self._say("run")

    def answer(self) -> str:
        """Return the next line that it writes; empty once it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().removesuffix("\n")

    def kill(self) -> None:
        """End it with SIGKILL, wherever it is."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Close its input, and wait until it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=60)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


StartWriter = Callable[..., GameWriter]


@pytest.fixture
def start_writer() -> Iterator[StartWriter]:
    """Return ``start_writer(folder, games=10, board_size=5, seed=1, first=0, rate=300, in_place=False)``."""
    with contextlib.ExitStack() as stack:

        def start(folder: Path, **options: str | int | float | bool) -> GameWriter:
            writer = GameWriter(folder, **options)
            stack.callback(writer.kill)
            return writer

        yield start
