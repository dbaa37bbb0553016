"""Reading of all shards of a split from front to back, in threads, which checks their digests.

The shards are in the page cache afterwards, if all of them fit into the memory. Rows that are gathered at
random from shards on the disk would cause one small read per page.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from hexdata.errors import HexdataError
from hexdata.pool import available_memory
from hexdata.progress import SILENT, Progress
from hexdata.shards.files import LocalShard
from hexdata.shards.sources import altered_shard_error

__all__ = ["ReadAhead"]

_THREADS: Final = 2
"""Number of threads that read. On the disk that was measured, one was slower and more were not faster."""
_SHARE_OF_MEMORY: Final = 0.8
"""Largest share of the available memory that shards may fill."""
_POLL_SECONDS: Final = 0.1


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
    error: HexdataError | None = None

    def stop(self) -> None:
        """Make the threads end after the current read."""
        self.stopped = True


class ReadAhead:
    """Reads shards once in the background and checks their digests, unless they do not fit into the memory.

    Picklable: the copy starts its own threads, which leave out the files that the original had checked.

    Args:
        shards: The mapped shards, in the order to read them.
        progress: Receives the bytes read while :meth:`wait` waits, but not in other processes (default: no
            reports).

    Attributes:
        bytes: Number of bytes of the shards.
        too_little_memory: If the shards do not fit into the memory, the bytes of memory that were available;
            otherwise None. Then nothing is read.
    """

    def __init__(self, shards: Sequence[LocalShard], progress: Progress = SILENT) -> None:
        self._shards = shards
        self.bytes = sum(shard.entry.bytes for shard in shards)
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
        left = [shard for shard in self._shards if not shard.checked]
        if not left or not fits:
            return
        queue = iter(left)
        run.done = [0] * _THREADS
        run.threads = [
            threading.Thread(target=_read, args=(run, queue, number), name="hexdata-read-ahead", daemon=True)
            for number in range(_THREADS)
        ]
        weakref.finalize(self, run.stop)
        for thread in run.threads:
            thread.start()

    def wait(self) -> None:
        """Start if necessary, and return when all shards are read and checked.

        Raises:
            StoreError, BudgetError: A shard cannot be read, or has another digest. The next call reads again
                the shards that were not checked.
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
            self._run = None
            raise run.error


def _read(run: _Run, queue: Iterator[LocalShard], number: int) -> None:
    """Read and check shards of a shared queue until it is empty."""

    def on_read(size: int) -> bool:
        run.done[number] += size
        return not run.stopped

    try:
        for shard in queue:
            shard.open()
            with shard.open_file() as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != (shard.stamp or ())[:2]:
                    raise altered_shard_error(shard.address, "a new file", "the one that was mapped")
                shard.check_digest(file, on_read)
            if run.stopped:
                return
    except HexdataError as error:
        run.error = error
        run.stop()
