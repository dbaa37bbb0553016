"""Stream mode: epochs read sequentially from shards, one window per stream at a time."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.errors import FormatError, HexdataError, StoreError
from hexdata.loader.game_table import GameTable
from hexdata.loader.opening import LoaderData
from hexdata.loader.options import LoaderOptions
from hexdata.loader.schedule import Part, StreamSchedule, StreamWindow
from hexdata.loader.shard_table import ShardRows
from hexdata.loader.shared_arrays import allocate
from hexdata.shards.blocks import Block, join_blocks
from hexdata.shards.cache import CachedSource
from hexdata.shards.manifest import REPAIR_HINT, ShardEntry
from hexdata.shards.reader import BlockReader

OnSkip = Callable[[str, range, HexdataError], None]
"""Called with the name of a shard, the rows of it that were left out, and the error.

It is called each time the rows would be read, so more than once if an epoch is repeated."""

_MIN_PREFETCH: Final = 2
"""Default number of shards to prefetch if fewer streams are read."""
_MAX_THREADS: Final = 4
_CACHE_FRACTION: Final = 2
"""Prefetched shards take at most 1/2 of the cache, so that they do not evict shards that are still needed."""
_MAX_READS_PER_SHARD: Final = 8
"""Limits the reads that are planned ahead of the reader if shards are read in many small slices."""


class _LoadedWindow(NamedTuple):
    """A window in memory."""

    window: StreamWindow
    block: Block
    """Its rows in the order of delivery, without policies."""
    order: npt.NDArray[np.int64]
    """Number in stored order of each row of the block."""
    is_present: npt.NDArray[np.bool_] | None
    """Which rows of the block could be read; None for all."""
    policies: GameTable | None
    """The rows in stored order, of which only the policies are valid; None if no row has a policy."""


class StreamEpoch:
    """One epoch of one rank, in the order of ``StreamSchedule``.

    It keeps one window in memory for each stream that this rank and worker read. If the source has a cache,
    the next shards are fetched in the background. No file stays open between two batches.

    Args:
        data: The shards, and the names of the fields to read.
        options: Options of the loader.
        epoch: The epoch.
        on_skip: Called when rows are left out because their shard cannot be read; the batches are shorter
            by these rows. None: the error is raised.

    Raises:
        ConfigError: Streams, ranks and batch size do not fit, or the options select a part of the split.
        StoreError: A shard in a folder is missing or has another size and ``on_skip`` is None, or no shard
            can be read.
    """

    def __init__(
        self, data: LoaderData, options: LoaderOptions, epoch: int, on_skip: OnSkip | None = None
    ) -> None:
        manifest = data.manifest
        assert data.source is not None
        assert manifest is not None
        self._board_size, self._members = data.board_size, data.members
        self._cached = data.source if isinstance(data.source, CachedSource) else None
        self._reader = BlockReader(data.source, manifest, options.split, data.members)
        sizes = [shard.positions for shard in self._reader.shards]
        self._schedule = StreamSchedule(sizes, manifest.block_size, options, epoch)
        self._options = options
        # Joined with the rows of each step, so that a step of which nothing can be read still has all fields.
        self._empty = ShardRows(self._reader, self._board_size, 0).table().take(np.arange(0), data.members)
        self._on_skip = on_skip
        self._found_readable_shard = False
        # Local folders are checked now, before training begins; other sources would need a request per shard.
        faults: list[StoreError] = []
        for shard in self._reader.shards if data.source.is_local else ():
            try:
                data.source.open(shard.name, size=shard.bytes).close()
            except StoreError as error:
                faults.append(error)
        if faults and on_skip is None:
            raise faults[0]
        if faults and len(faults) == len(sizes):
            self._require_readable_shard(faults[0])

    @property
    def steps(self) -> int:
        """Number of batches, which is the same for every rank."""
        return self._schedule.steps

    def parts(self, steps: range) -> Iterator[Part]:
        """Yield the positions of this rank at each of the given steps, in order.

        Windows before the first step are not read.

        Raises:
            StoreError, FormatError: A shard differs from its manifest or, with ``on_skip``, every shard does.
                No position of its window has been delivered.
            ConfigError: The number of workers, which is the stride of ``steps``, does not divide Q of
                ``streams=(P, Q)``.
        """
        self._schedule.check_workers(steps.step)
        windows: dict[int, _LoadedWindow] = {}
        """The window of each stream of this worker."""
        # The last table that was read. Its memory is used again, but only here: other threads may iterate.
        scratch: deque[GameTable] = deque(maxlen=1)
        with self._prefetcher(steps) as ahead:
            for step in steps:
                slices, blocks = list(self._schedule.slices_at(step)), []
                for own in slices:
                    if own.window is None:
                        blocks.append(self._read_padding(own.start, own.stop))
                        continue
                    stream = own.window.stream
                    if stream not in windows or windows[stream].window != own.window:
                        # Its policies and its order are freed before the next window is read.
                        memory = windows.pop(stream).block if stream in windows else {}
                        windows[stream] = self._load(own.window, memory, scratch, ahead)
                    blocks.append(self._take(windows[stream], own.start, own.stop))
                padding = None
                if any(own.window is None for own in slices):
                    sizes = [len(block["position_id"]) for block in blocks]
                    padding = np.repeat([own.window is None for own in slices], sizes)
                # An empty block, so that all fields are there if no row is, and that the others are copied.
                block = join_blocks([self._empty, *blocks])
                yield Part(range(step, step + 1), partial(dict, block), padding)

    def _prefetcher(self, steps: range) -> Prefetcher | AbstractContextManager[None]:
        """Return a prefetcher of the shards of the given steps, or of nothing."""
        options, shards = self._options, self._options.prefetch
        # The streams advance together, so the next shards of all of them are needed at about the same time.
        if shards is None:  # as many as the streams that this rank and worker read
            shards = math.prod(options.streams) // (options.world_size * steps.step) if options.shuffle else 1
            shards = max(_MIN_PREFETCH, shards)
        if self._cached is None or not shards:
            return nullcontext()
        # The same windows in the same order as in `parts`.
        reads = (
            self._reader.shards[shard]
            for window in self._schedule.windows(steps)
            for shard, _, _ in self._schedule.shard_slices(window.start, window.stop)
        )
        return Prefetcher(self._cached, reads, shards)

    def _load(
        self, window: StreamWindow, memory: Block, scratch: deque[GameTable], ahead: Prefetcher | None
    ) -> _LoadedWindow:
        """Read a window into the memory of another one. New memory would take as long as reading."""
        count = window.stop - window.start
        rows = ShardRows(self._reader, self._board_size, count, scratch[0] if scratch else None)
        is_present = self._read_rows(rows, window.start, window.stop, self._on_skip, ahead)
        table = rows.table()
        scratch.append(table)
        # Shards are read in stored order, then all rows are permuted at once: the memory that is read
        # at random is still in the CPU cache, since it is the same for all windows.
        permutation = self._schedule.window_order(window)
        order = np.arange(count) if permutation is None else permutation.slice(0, count)
        block: Block = {}
        for name, array in table.packed.items():
            own = memory[name][:count] if name in memory else array[:0]
            if len(own) < count:
                own = allocate(array.shape, array.dtype)
            block[name] = array.take(order, axis=0, out=own, mode="clip")  # other modes copy once more
        present = None if is_present.all() else is_present[order]
        return _LoadedWindow(window, block, order, present, table if table.has_policies else None)

    def _take(self, loaded: _LoadedWindow, start: int, stop: int) -> Block:
        """Return rows [start, stop) of the epoch, except those that could not be read."""
        own = slice(start - loaded.window.start, stop - loaded.window.start)
        order = loaded.order[own]
        block = {name: array[own] for name, array in loaded.block.items()}
        # Rows that could not be read are left out here, in the order of
        # delivery, so that the others keep their steps.
        if loaded.is_present is not None:
            order = order[loaded.is_present[own]]
            block = {name: array[loaded.is_present[own]] for name, array in block.items()}
        elif stop == loaded.window.stop:
            # The next window may be read into this memory before the rows of the step are joined.
            block = {name: array.copy() for name, array in block.items()}
        if loaded.policies:
            block |= loaded.policies.take_policies(order, contents="policy" in self._members)
        return block

    def _read_padding(self, start: int, stop: int) -> Block:
        """Return the rows of the epoch that are repeated as padding, except those that cannot be read."""
        rows = np.arange(start, stop) % self._schedule.positions
        first, last = int(rows.min()), int(rows.max())
        read = ShardRows(self._reader, self._board_size, last + 1 - first)
        # Skipped rows are reported where they are delivered.
        on_skip = None if self._on_skip is None else lambda *_: None
        is_present = self._read_rows(read, first, last + 1, on_skip)
        return read.table().take((rows - first)[is_present[rows - first]], self._members)

    def _read_rows(
        self, rows: ShardRows, start: int, stop: int, on_skip: OnSkip | None, ahead: Prefetcher | None = None
    ) -> npt.NDArray[np.bool_]:
        """Read rows [start, stop) of the epoch, and return which of them could be read, (stop - start,).

        Args:
            rows: Where the rows are read to.
            start: First row.
            stop: End of the rows.
            on_skip: Called for each slice of a shard that cannot be read. None: the error is raised.
            ahead: Prefetcher of the slices (default None).
        """
        is_present = np.ones(stop - start, np.bool_)
        row = 0
        for shard, first, last in self._schedule.shard_slices(start, stop):
            if ahead:
                ahead.advance()
            try:
                rows.read(shard, first, last, row)
            except (StoreError, FormatError) as error:
                if on_skip is None:
                    raise
                self._require_readable_shard(error)
                on_skip(self._reader.shards[shard].name, range(first, last), error)
                # Rows keep their numbers, so the order of all other rows is that of an undamaged epoch.
                is_present[row : row + last - first] = False
            row += last - first
        return is_present

    def _require_readable_shard(self, fault: HexdataError) -> None:
        """Check, after a shard could not be read, that another one can be.

        Raises:
            StoreError: No shard can be read, so every batch would be empty.
        """

        def is_readable(shard: int) -> bool:
            with contextlib.suppress(StoreError, FormatError):
                return bool(list(self._reader.read(shard, 0, 1)))
            return False

        # Once a shard has been read, a run with "skip" continues, even if all others fail.
        shards = range(len(self._reader.shards))
        self._found_readable_shard = self._found_readable_shard or any(map(is_readable, shards))
        if not self._found_readable_shard:
            reason, found = f"no shard of {self._options.split} can be used", fault.detail()
            raise StoreError(reason, path=fault.path, found=found, hint=REPAIR_HINT)


class Prefetcher:
    """Fetches shards into the cache before they are read.

    It is a context manager that ends its threads. Errors are ignored: reading the shard raises them again.

    Args:
        source: Source of the shards, with a cache.
        reads: The shards in the order of reading; a shard may occur several times.
        shards: Maximum number of different shards to fetch in advance.
    """

    def __init__(self, source: CachedSource, reads: Iterator[ShardEntry], shards: int) -> None:
        self._source, self._reads, self._shards = source, reads, shards
        self._next = next(reads, None)
        """The first read that is not planned yet; the planned ones before it are ``_ahead``."""
        self._ahead: deque[ShardEntry] = deque()
        self._stopped = threading.Event()
        # DataLoader workers may be forked while a prefetcher runs.
        self._pid = os.getpid()
        self._threads = ThreadPoolExecutor(min(shards, _MAX_THREADS), "hexdata-prefetch")

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads. Downloads stop when their next bytes arrive."""
        if os.getpid() == self._pid:  # a forked child has no threads to end
            self._stopped.set()
            self._threads.shutdown(cancel_futures=True)

    def advance(self) -> None:
        """Start the next read, and fetch the shards of the reads after it."""
        # `reads` is one plan for both: entries leave `_ahead` as they are
        # read, and enter it as they are planned.
        if self._ahead:
            self._ahead.popleft()
        else:
            self._next = next(self._reads, None)
        while self._next is not None and len(self._ahead) < self._shards * _MAX_READS_PER_SHARD:
            known = {entry.sha256: entry.bytes for entry in self._ahead}
            sizes = known | {self._next.sha256: self._next.bytes}
            # A shard that several reads share counts once: the cache names copies by their digest.
            if len(sizes) > self._shards or sum(sizes.values()) > self._source.size // _CACHE_FRACTION:
                break
            if self._next.sha256 not in known:
                self._threads.submit(self._fetch, self._next)
            self._ahead.append(self._next)
            self._next = next(self._reads, None)

    def _fetch(self, entry: ShardEntry) -> None:
        with contextlib.suppress(HexdataError):
            self._source.prefetch(entry.name, self._stopped.is_set)
