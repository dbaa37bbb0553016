"""Runs a command and measures its time, memory and bytes written, with those of its child processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import IO

import psutil

SAMPLE_SECONDS = 0.02


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
        CalledProcessError: the command failed.
    """
    begin, before = time.perf_counter(), getrusage(RUSAGE_CHILDREN)
    process = subprocess.Popen(command, cwd=cwd, stdout=stdout)
    peak, status = 0, None
    while status is None:
        peak = max(peak, _resident(process.pid))
        try:
            status = process.wait(SAMPLE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    seconds, after = time.perf_counter() - begin, getrusage(RUSAGE_CHILDREN)
    if status:
        raise subprocess.CalledProcessError(status, command)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Watched(seconds, processor, peak, 512 * (after.ru_oublock - before.ru_oublock))


def _resident(pid: int) -> int:
    """Return the resident memory of a process and its children."""
    try:
        parent = psutil.Process(pid)
        processes = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
