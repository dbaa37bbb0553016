"""Reading of all shards of a split into the page cache, from front to back, in threads.

Rows that are gathered at random from shards on the disk cause one small read per page. Reading the files in
order first is much faster, if all of them fit into the memory.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from hexdata.errors import HexdataError
from hexdata.pool import available_memory
from hexdata.progress import SILENT, Progress
from hexdata.shards.files import LocalShard
from hexdata.shards.sources import altered_shard_error
from hexdata.shards.tar_members import HEADER_BYTES
from hexdata.system import is_cached

__all__ = ["ReadAhead"]

_THREADS: Final = 2
"""Number of threads that read. On the disk that was measured, one was slower and more were not faster."""
_BUFFER: Final = 1 << 20
_SAMPLES: Final = 512
"""Number of bytes sampled to find whether shards are in the page cache: at most one per shard, or per MB."""
_SHARE_OF_MEMORY: Final = 0.8
"""Largest share of the available memory that shards may fill."""
_POLICIES: Final = ("policy", "policy_cell", "policy_probability")
"""Members of policies that are large. The others are needed to find which positions have one."""
_POLL_SECONDS: Final = 0.1

_Parts: TypeAlias = list[tuple[int, int]]
"""Parts of a file, ascending, each from a first byte up to, but excluding, a last byte."""


@dataclass
class _Run:
    """The threads of one process that read ahead.

    It contains no lock, because a thread that is absent after a fork could hold it forever.
    """

    pid: int
    threads: list[threading.Thread] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    """Number of bytes that each thread has read."""
    stopped: bool = False
    error: HexdataError | OSError | None = None

    def stop(self) -> None:
        """Make the threads end after the current read."""
        self.stopped = True


class ReadAhead:
    """Reads the needed bytes of shards once in the background, unless they are cached or do not fit.

    The shards of every process are read by its own threads; data that another process has read is in the
    page cache, so it is not read from the disk again. Picklable: the copy starts its own threads.

    Args:
        shards: The shards, in the order to read them.
        members: Names of the needed fields. Only policies are large enough to be left out.
        progress: Receives the bytes read while :meth:`wait` waits, but not in other processes (default: no
            reports).

    Attributes:
        bytes: Number of needed bytes.
        too_little_memory: If the shards do not fit into the memory, the bytes of memory that were available;
            otherwise None. Then nothing is read.
    """

    def __init__(
        self, shards: Sequence[LocalShard], members: Sequence[str], progress: Progress = SILENT
    ) -> None:
        self._parts = [(shard, _needed_parts(shard, members)) for shard in shards]
        self.bytes = sum(stop - start for _, parts in self._parts for start, stop in parts)
        self.too_little_memory: int | None = None
        self._progress = progress
        self._pid = os.getpid()
        self._run: _Run | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the threads and the receiver of progress."""
        return {**self.__dict__, "_run": None, "_progress": SILENT}

    def start(self) -> None:
        """Start to read in the background, or find that this is not needed or not possible.

        Later calls in the same process do nothing.
        """
        if self._run is not None and self._run.pid == os.getpid():
            return
        self._run = run = _Run(os.getpid())
        available = available_memory()
        fits = self.bytes <= _SHARE_OF_MEMORY * available
        self.too_little_memory = None if fits else available
        if not self._parts or not fits or _are_cached(self._parts):
            return
        queue = iter(self._parts)
        run.done = [0] * _THREADS
        run.threads = [
            threading.Thread(target=_read, args=(run, queue, number), name="hexdata-read-ahead", daemon=True)
            for number in range(_THREADS)
        ]
        weakref.finalize(self, run.stop)
        for thread in run.threads:
            thread.start()

    def wait(self) -> None:
        """Start if necessary, and return when all shards are read, or when a read failed.

        A failed read gives a warning. If the fault is permanent, the next access to the shard raises.
        """
        self.start()
        run = self._run
        if run is None or not run.threads:
            return
        progress = self._progress if self._pid == run.pid else SILENT
        reported = 0
        progress.begin("read ahead", self.bytes, "bytes")
        for thread in run.threads:
            waiting = True
            while waiting:
                thread.join(_POLL_SECONDS)
                waiting, done = thread.is_alive(), sum(run.done)
                progress.advance(done - reported)
                reported = done
        run.threads = []
        if run.error is not None:
            warnings.warn(f"reading shards ahead stopped: {run.error}", stacklevel=2)


def _needed_parts(shard: LocalShard, members: Sequence[str]) -> _Parts:
    """Return the parts of a shard to read: all of it, or all except the policies."""
    entry = shard.entry
    left_out = () if "policy" in members else [name for name in _POLICIES if name in entry.offsets]
    if not left_out:
        return [(0, entry.bytes)]
    starts = sorted({entry.bytes, *itertools.chain.from_iterable(entry.offsets.values())})
    parts, first = [], 0
    for start in sorted(itertools.chain.from_iterable(entry.offsets[name] for name in left_out)):
        if first < start:
            parts.append((first, start))
        first = starts[bisect.bisect_right(starts, start)] - HEADER_BYTES
    return [*parts, (first, entry.bytes)]


def _read(run: _Run, queue: Iterator[tuple[LocalShard, _Parts]], number: int) -> None:
    """Read shards of a shared queue until it is empty."""
    buffer = memoryview(bytearray(_BUFFER))
    try:
        for shard, parts in queue:
            with shard.open_file() as file:
                for start, stop in parts:
                    file.seek(start)
                    while start < stop and not run.stopped:
                        size = file.readinto(buffer[: stop - start])
                        if not size:
                            raise altered_shard_error(shard.address, f"{start} bytes", shard.entry.bytes)
                        start += size
                        run.done[number] += size
            if run.stopped:
                return
    except (HexdataError, OSError) as error:
        run.error = error
        run.stop()


def _are_cached(needed: Sequence[tuple[LocalShard, _Parts]]) -> bool:
    """Return whether samples of the shards are in the page cache; False if the system cannot tell."""
    sampled = needed[:: math.ceil(len(needed) / _SAMPLES)]
    most = math.ceil(_SAMPLES / len(sampled))
    try:
        for number, (shard, parts) in enumerate(sampled):
            size = sum(stop - start for start, stop in parts)
            samples = min(most, 1 + size // _BUFFER)
            with shard.open_file() as file:
                for sample in range(samples):
                    offset = _offset_in(parts, int(size * (sample + number / len(sampled)) / samples))
                    if not is_cached(file, offset):
                        return False
    except (HexdataError, OSError):
        return False
    return True


def _offset_in(parts: _Parts, index: int) -> int:
    """Return the offset in the file of a needed byte, given its index among the needed bytes."""
    for start, stop in parts:
        if index < stop - start:
            return start + index
        index -= stop - start
    return parts[-1][1] - 1
