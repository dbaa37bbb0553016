"""Runs a command and measures its time, memory and bytes written, with those of its child processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import IO

import psutil

from hexdata.demo.games import make_games
from hexdata.formats.trmph import write_trmph

MEMORY = 1_000_000_000
"""The budget of every stage, all its processes together, in bytes."""
POSITIONS_PER_GAME = 68
SAMPLE_SECONDS = 0.02
CHILDREN_SECONDS = 0.5
"""Seconds between two searches for new child processes, which take longer than reading their memory."""


@dataclass(frozen=True)
class Watched:
    """A process that has ended, with its children: times, peak resident memory and bytes written to files."""

    seconds: float
    processor_seconds: float
    peak: int
    written: int


def watch(command: Sequence[str], *, stdout: int | IO[str], cwd: Path | None = None) -> Watched:
    """Run a command and sum the resident memory of its processes 50 times a second.

    Pages that processes share are counted in each, so the peak is an upper bound.

    Raises:
        CalledProcessError: The command failed.
    """
    begin, before = time.perf_counter(), getrusage(RUSAGE_CHILDREN)
    process = subprocess.Popen(command, cwd=cwd, stdout=stdout)
    peak, status, searched = 0, None, 0.0
    processes: list[psutil.Process] = []
    while status is None:
        if time.perf_counter() - searched >= CHILDREN_SECONDS:
            searched, processes = time.perf_counter(), _processes(process.pid)
        peak = max(peak, _resident(processes))
        try:
            status = process.wait(SAMPLE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    seconds, after = time.perf_counter() - begin, getrusage(RUSAGE_CHILDREN)
    if status:
        raise subprocess.CalledProcessError(status, command)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Watched(seconds, processor, peak, 512 * (after.ru_oublock - before.ru_oublock))


def watch_hexdata(*arguments: object) -> Watched:
    """Run a command of hexdata."""
    command = [sys.executable, "-m", "hexdata", *map(str, arguments)]
    return watch(command, stdout=subprocess.DEVNULL)


def write_games(path: Path, positions: int) -> None:
    """Write a text of generated games with at least so many positions."""
    write_trmph(path, make_games(-(-positions // POSITIONS_PER_GAME), 1, 13), 13)


def _processes(pid: int) -> list[psutil.Process]:
    """Return a process and its children; none if it has ended."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _resident(processes: Sequence[psutil.Process]) -> int:
    """Return the resident memory of those processes that still run."""
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
