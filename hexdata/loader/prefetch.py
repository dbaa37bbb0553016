"""The next shards of an epoch, fetched into the cache while earlier ones are used.

Never decides which shards come, and never reports a fault: whoever reads the shard will meet it, and say so.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from hexdata.errors import HexdataError
from hexdata.shards.cached_source import CachedSource
from hexdata.shards.manifest import ShardEntry

__all__ = ["Prefetcher"]

_MOST_THREADS: Final = 4
_SHARE: Final = 2
"""What is ahead takes at most this part of the cache, lest it drive out what is about to be read."""
_MOST_READINGS: Final = 8
"""Of each shard ahead: a shard that is read in many small pieces is not looked at over and over."""


class Prefetcher:
    """Fetches shards ahead of one reader. A context manager: its threads end with it.

    Args:
        source: the shards, behind a cache.
        readings: the shards in the order in which they will be read; one may come several times.
        shards: at most so many different ones are ahead of the reader.
    """

    def __init__(self, source: CachedSource, readings: Iterator[ShardEntry], shards: int) -> None:
        self._source = source
        self._readings = readings
        self._shards = shards
        self._bytes = source.cache.size // _SHARE
        self._ahead: deque[ShardEntry] = deque()
        self._drawn: ShardEntry | None = None
        self._stopped = threading.Event()
        self._pid = os.getpid()
        self._threads = ThreadPoolExecutor(min(shards, _MOST_THREADS), "hexdata-prefetch")

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads; a shard on its way is given up, when its next bytes arrive."""
        if os.getpid() == self._pid:  # a forked child has no threads that could end
            self._stopped.set()
            self._threads.shutdown(cancel_futures=True)

    def advance(self) -> None:
        """Hear that the next of the readings is about to begin, and look ahead from there."""
        if self._ahead:
            self._ahead.popleft()
        else:  # it was not ahead, so it is the one drawn last, or the next
            self._draw()
            self._drawn = None
        while (entry := self._draw()) is not None and self._fits(entry):
            self._drawn = None
            if all(entry.sha256 != one.sha256 for one in self._ahead):
                self._threads.submit(self._fetch, entry)
            self._ahead.append(entry)

    def _draw(self) -> ShardEntry | None:
        """Return the first reading that is not ahead yet."""
        self._drawn = self._drawn or next(self._readings, None)
        return self._drawn

    def _fits(self, entry: ShardEntry) -> bool:
        if len(self._ahead) >= self._shards * _MOST_READINGS:
            return False
        sizes = {one.sha256: one.bytes for one in (*self._ahead, entry)}
        return len(sizes) <= self._shards and sum(sizes.values()) <= self._bytes

    def _fetch(self, entry: ShardEntry) -> None:
        with contextlib.suppress(HexdataError):  # the reader asks for it again, and hears why
            self._source.cache.prefetch(entry, self._source.source, self._stopped.is_set)
