"""Process that writes games to a folder as self-play does, controlled by tests through text commands."""

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
    """Check that a test ends every thread it starts. Modules request this with ``usefixtures``."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


class GameWriter:
    """Runs ``game_writer.py`` in a separate process. A file exists when the call that writes it returns."""

    def __init__(self, folder: Path, **options: str | int | float | bool) -> None:
        flags = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in options.items()
        ]
        command = [sys.executable, str(WRITER), str(folder), *flags]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def write(self, files: int) -> list[str]:
        """Write some files; return their names in order."""
        self._say(f"write {files}")
        return [self.answer() for _ in range(files)]

    def half(self) -> str:
        """Write half of a file and pause; return the name of the incomplete file."""
        self._say("half")
        word, _, name = self.answer().partition(" ")
        assert word == "half"
        return name

    def run(self) -> None:
        """Write continuously at the given rate. ``answer`` returns the name of each file."""
        self._say("run")

    def answer(self) -> str:
        """Return the next line of output; empty after the process has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().removesuffix("\n")

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Close the input of the process and wait for its end."""
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
