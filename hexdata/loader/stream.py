"""Stream mode: epochs read sequentially from shards, one window per stream at a time."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import ConfigError, FormatError, HexdataError, StoreError
from hexdata.loader.options import LoaderOptions
from hexdata.loader.schedule import PackedStep, ShardSlice, StreamSchedule, StreamSlice, StreamWindow
from hexdata.policy import SparsePolicies
from hexdata.shards.blocks import (
    SPARSE_FIELDS,
    Block,
    block_length,
    join_blocks,
    members_to_policies,
    policies_to_members,
    row_fields,
    slice_rows,
    take_rows,
)
from hexdata.shards.cache import CachedSource
from hexdata.shards.manifest import REPAIR_HINT, ShardEntry, ShardManifest
from hexdata.shards.reader import BlockReader
from hexdata.shards.sources import ShardSource

__all__ = ["OnSkip", "Prefetcher", "StreamEpoch"]

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


class StreamEpoch:
    """One epoch of one rank, in the order of ``StreamSchedule``.

    It keeps one window in memory for each stream that this rank and worker read. If the source has a cache,
    the next shards are fetched in the background. No file stays open between two batches.

    Args:
        source: Source of the shards.
        manifest: Manifest of the shards.
        options: Options of the loader.
        epoch: The epoch.
        members: Names of the fields to read.
        on_skip: Called when rows are left out because their shard cannot be read; the batches are shorter
            by these rows. None: the error is raised.

    Raises:
        ConfigError: Streams, ranks and batch size do not fit, or the options select a part of the split.
        StoreError: A shard in a folder is missing or has another size and ``on_skip`` is None, or no shard
            can be read.
    """

    def __init__(
        self,
        source: ShardSource,
        manifest: ShardManifest,
        options: LoaderOptions,
        epoch: int,
        members: Sequence[str],
        on_skip: OnSkip | None = None,
    ) -> None:
        _check_options(options)
        self._cached = source if isinstance(source, CachedSource) else None
        self._reader = BlockReader(source, manifest, options.split, members)
        sizes = [shard.positions for shard in self._reader.shards]
        self._schedule = StreamSchedule(sizes, manifest.block_size, options, epoch)
        self._options = options
        self._prefetch = options.copies.prefetch
        self._on_skip = on_skip
        self._found_readable_shard = on_skip is None
        faults = [fault for _, fault in self._reader.find_faults()]
        if faults and on_skip is None:
            raise faults[0]
        if faults and len(faults) == len(sizes):
            self._require_readable_shard(faults[0])

    @property
    def steps(self) -> int:
        """Number of batches, which is the same for every rank."""
        return self._schedule.steps

    def blocks(
        self,
        steps: range,
        pool: ThreadPoolExecutor | None = None,  # noqa: ARG002 - streams are read in order
    ) -> Iterator[PackedStep]:
        """Yield the positions of this rank at each of the given steps; see ``Epoch``.

        Windows before the first step are not read.

        Raises:
            StoreError, FormatError: A shard differs from its manifest or, with ``on_skip``, every shard does.
                No position of its window has been delivered.
            ConfigError: The number of workers, which is the stride of ``steps``, does not divide Q of
                ``streams=(P, Q)``.
        """
        self._schedule.check_workers(steps.step)
        windows: dict[int, _LoadedWindow] = {}
        with ExitStack() as stack:
            prefetcher = self._make_prefetcher(steps)
            on_read = stack.enter_context(prefetcher).advance if prefetcher else _do_nothing
            for step in steps:
                blocks: list[Block] = []
                flags: list[tuple[int, bool]] = []
                for part in self._schedule.slices_at(step):
                    own = list(self._read_slice(part, windows, on_read))
                    repeated = self._read_padding(part.padding)
                    blocks += [*own, *repeated]
                    flags += [(block_length(block), False) for block in own]
                    flags += [(block_length(block), True) for block in repeated]
                # Joining with an empty block copies the rows, so that no batch refers to a window.
                yield join_blocks([_BlockBuilder(self._reader, 0).block(), *blocks]), _padding_mask(flags)

    def _make_prefetcher(self, steps: range) -> Prefetcher | None:
        """Return a prefetcher of the shards of the given steps, or None if nothing is to be prefetched."""
        streams = self._schedule.count_streams(steps)
        shards = max(_MIN_PREFETCH, streams) if self._prefetch is None else self._prefetch
        if self._cached is None or not shards:
            return None
        reads = (
            self._reader.shards[part.shard]
            for window in self._schedule.windows(steps)
            for part in self._schedule.shard_slices(window.start, window.stop)
        )
        return Prefetcher(self._cached, reads, shards)

    def _read_slice(
        self, part: StreamSlice, windows: dict[int, _LoadedWindow], on_read: Callable[[], None]
    ) -> Iterator[Block]:
        """Yield the rows of a slice, and load the next window of its stream when it is reached."""
        row, stream = part.start, part.stream
        while row < part.stop:
            if stream in windows and row >= windows[stream].window.stop:
                del windows[stream]  # frees its memory before the next window is loaded
            if stream not in windows:
                windows[stream] = self._load(self._schedule.window_at(stream, row), on_read)
            stop = min(part.stop, windows[stream].window.stop)
            yield windows[stream].slice(row, stop)
            row = stop

    def _load(self, window: StreamWindow, on_read: Callable[[], None]) -> _LoadedWindow:
        """Read a window into memory and permute its rows."""
        block, present = self._read_rows(window.start, window.stop, self._on_skip, on_read)
        permutation = self._schedule.window_order(window)
        order = None if permutation is None else permutation.slice(0, len(permutation))
        if present.all():
            return _LoadedWindow.of_block(window, block if order is None else take_rows(block, order), None)
        if order is None:
            order = np.arange(len(present))
        delivered = present[order]
        block_rows = np.cumsum(present) - 1  # index in the block of each row that was read
        counts = np.concatenate([[0], np.cumsum(delivered)])
        return _LoadedWindow.of_block(window, take_rows(block, block_rows[order[delivered]]), counts)

    def _read_rows(
        self, start: int, stop: int, on_skip: OnSkip | None, on_read: Callable[[], None]
    ) -> tuple[Block, npt.NDArray[np.bool_]]:
        """Return rows [start, stop) of the epoch in stored order.

        Args:
            start: First row.
            stop: End of the rows.
            on_skip: Called for each slice of a shard that cannot be read. None: the error is raised.
            on_read: Called before each slice of a shard is read.

        Returns:
            The rows that could be read, and which of the requested rows these are, bool (stop - start,).
        """
        builder = _BlockBuilder(self._reader, stop - start)
        present = np.ones(stop - start, np.bool_)
        row = 0
        for part in self._schedule.shard_slices(start, stop):
            count = part.stop - part.start
            on_read()
            try:
                builder.add(part)
            except (StoreError, FormatError) as error:
                if on_skip is None:
                    raise
                self._require_readable_shard(error)
                on_skip(self._reader.shards[part.shard].name, range(part.start, part.stop), error)
                present[row : row + count] = False
            else:
                self._found_readable_shard = True
            row += count
        return builder.block(), present

    def _require_readable_shard(self, fault: HexdataError) -> None:
        """Check, after a shard could not be read, that another one can be.

        Raises:
            StoreError: No shard can be read, so every batch would be empty.
        """
        for shard in range(len(self._reader.shards)):
            if self._found_readable_shard:
                return
            try:
                for _ in self._reader.read(shard, 0, 1):
                    pass
            except (StoreError, FormatError):
                continue
            self._found_readable_shard = True
        if not self._found_readable_shard:
            raise StoreError(
                f"no shard of {self._options.split} can be used",
                path=fault.path,
                found=fault.detail(),
                hint=REPAIR_HINT,
            )

    def _read_padding(self, padding: range) -> list[Block]:
        """Return the rows of the epoch that are repeated as padding, except those that cannot be read."""
        if not padding:
            return []
        rows = np.arange(padding.start, padding.stop) % self._schedule.positions
        first, last = int(rows.min()), int(rows.max())
        on_skip = None if self._on_skip is None else _ignore_skip
        block, present = self._read_rows(first, last + 1, on_skip, _do_nothing)
        rows -= first
        return [take_rows(block, (np.cumsum(present) - 1)[rows[present[rows]]])]


def _check_options(options: LoaderOptions) -> None:
    given = {
        "where": options.where is not None,
        "dedup": options.dedup != "none",
        "newest": options.newest is not None,
        "final_policy='skip'": options.batch.final_policy == "skip",
    }
    selecting = [name for name, is_given in given.items() if is_given]
    if selecting:
        raise ConfigError(
            "stream mode cannot select positions",
            found=", ".join(selecting),
            hint="Use mode='games' or 'exact', or select with `hexdata shuffle` before you export.",
        )


def _ignore_skip(name: str, rows: range, error: HexdataError) -> None:
    """Do not report skipped padding: its rows are reported where they are delivered."""


def _do_nothing() -> None:
    """Replace ``Prefetcher.advance`` if nothing is prefetched."""


class _BlockBuilder:
    """Builds a block of a known number of rows from slices of shards."""

    def __init__(self, reader: BlockReader, rows: int) -> None:
        self._reader = reader
        self._arrays = {
            name: np.empty((rows if name not in SPARSE_FIELDS else 0, *spec.shape), spec.dtype)
            for name, spec in reader.specs.items()
        }
        self._policies: list[Block] = []
        self._rows = 0

    def add(self, part: ShardSlice) -> None:
        """Append a slice of a shard. If reading it fails, nothing is appended."""
        size = self._reader.block_size
        block_start = part.start // size * size
        row, policies = self._rows, []
        with closing(self._reader.read(part.shard, block_start // size, -(-part.stop // size))) as blocks:
            for block in blocks:
                start, stop = max(part.start - block_start, 0), min(part.stop - block_start, size)
                rows = slice_rows(block, start, stop)
                for name in row_fields(rows):
                    self._arrays[name][row : row + stop - start] = rows[name]
                if "policy_row" in rows:
                    own = {name: rows[name] for name in SPARSE_FIELDS}
                    policies.append(own | {"policy_row": own["policy_row"] + np.uint32(row)})
                row += stop - start
                block_start += size
        self._rows = row
        self._policies += policies

    def block(self) -> Block:
        """Return the rows appended so far."""
        block = {name: array[: self._rows] for name, array in self._arrays.items()}
        for name in SPARSE_FIELDS:
            if name in block:
                block[name] = np.concatenate([block[name], *(part[name] for part in self._policies)])
        return block


@dataclass(frozen=True)
class _LoadedWindow:
    """A window in memory, with its rows in the order of delivery."""

    window: StreamWindow
    block: Block
    """The rows that could be read, without policies."""
    rows_with_policy: npt.NDArray[np.uint32] | None
    """The rows of the block that have one of ``policies``, ascending; None if policies are not read."""
    policies: SparsePolicies | None
    counts: npt.NDArray[np.int64] | None
    """``counts[i]`` is how many of the first i rows could be read; None if all rows could."""

    def slice(self, start: int, stop: int) -> Block:
        """Return views of rows [start, stop) of the epoch, without those that could not be read."""
        first, last = start - self.window.start, stop - self.window.start
        if self.counts is not None:
            first, last = int(self.counts[first]), int(self.counts[last])
        cut = slice_rows(self.block, first, last)
        if self.rows_with_policy is None or self.policies is None:
            return cut
        begin, end = np.searchsorted(self.rows_with_policy, (first, last))
        rows = self.rows_with_policy[begin:end] - np.uint32(first)
        return cut | policies_to_members(self.policies.slice(begin, end), rows)

    @classmethod
    def of_block(
        cls, window: StreamWindow, block: Block, counts: npt.NDArray[np.int64] | None
    ) -> _LoadedWindow:
        """Return a window with the rows of a block, in the order of delivery."""
        plain = {name: block[name] for name in row_fields(block)}
        if "policy_row" not in block:
            return cls(window, plain, None, None, counts)
        return cls(window, plain, block["policy_row"], members_to_policies(block), counts)


def _padding_mask(flags: Sequence[tuple[int, bool]]) -> npt.NDArray[np.bool_] | None:
    """Return which rows are padding, or None if none are.

    Args:
        flags: For each block of a batch its length and whether it is padding.
    """
    if not any(padding for _, padding in flags):
        return None
    return np.repeat([padding for _, padding in flags], [length for length, _ in flags])


class Prefetcher:
    """Fetches shards into the cache before they are read.

    It is a context manager that ends its threads. Errors are ignored: reading the shard raises them again.

    Args:
        source: Source of the shards, with a cache.
        reads: The shards in the order of reading; a shard may occur several times.
        shards: Maximum number of different shards to fetch in advance.
    """

    def __init__(self, source: CachedSource, reads: Iterator[ShardEntry], shards: int) -> None:
        self._source = source
        self._reads = reads
        self._shards = shards
        self._bytes = source.cache.size // _CACHE_FRACTION
        self._ahead: deque[ShardEntry] = deque()
        self._next: ShardEntry | None = None
        self._stopped = threading.Event()
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
        if self._ahead:
            self._ahead.popleft()
        else:  # the read was not planned, so it is the next one
            self._peek()
            self._next = None
        while (entry := self._peek()) is not None and self._fits(entry):
            self._next = None
            if all(entry.sha256 != other.sha256 for other in self._ahead):
                self._threads.submit(self._fetch, entry)
            self._ahead.append(entry)

    def _peek(self) -> ShardEntry | None:
        """Return the first read that is not planned yet, or None at the end."""
        self._next = self._next or next(self._reads, None)
        return self._next

    def _fits(self, entry: ShardEntry) -> bool:
        if len(self._ahead) >= self._shards * _MAX_READS_PER_SHARD:
            return False
        sizes = {other.sha256: other.bytes for other in (*self._ahead, entry)}
        return len(sizes) <= self._shards and sum(sizes.values()) <= self._bytes

    def _fetch(self, entry: ShardEntry) -> None:
        with contextlib.suppress(HexdataError):
            self._source.cache.prefetch(entry, self._source.source, self._stopped.is_set)
