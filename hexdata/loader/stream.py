"""Stream mode: an epoch out of shards that are read from front to back, a window of each stream at a time.

Never maps a file, and holds nothing open between two batches.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.errors import ConfigError, FormatError, HexdataError, StoreError
from hexdata.loader.options import LoaderOptions
from hexdata.loader.schedule import PackedStep, Piece, StreamPlan, StreamShare, Window
from hexdata.shards.blocks import (
    POLICY_FIELDS,
    Block,
    block_length,
    join_blocks,
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
"""Hears that positions were left out: the shard's name, which of its rows, and why.

It hears so at each reading, so of the same rows again where an epoch is gone through again."""

_LEAST_AHEAD: Final = 2
"""Shards to fetch ahead if nobody says how many, where fewer streams are read: else one a stream."""


class StreamEpoch:
    """One epoch of one rank, in the order of ``StreamPlan``.

    In memory are one window for each stream that this rank and worker take part in. Of a source behind a
    cache, the next shards are fetched while batches are taken.

    Args:
        source: where the shards lie.
        manifest: what they are.
        options: which positions, in which order, to which rank.
        epoch: counted from 0.
        members: the fields that blocks hold.
        on_skip: hears of positions that are left out since their shard cannot be read; batches that
            lack them are that much shorter, and nothing else changes. None raises the error instead.

    Raises:
        ConfigError: streams, ranks and batch size do not fit, or options ask for a part of the split.
        StoreError: a shard in a folder is missing or of another size, and there is no ``on_skip``; or every
            shard is.
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
        digests = options.check == "digests" and not self._cached  # which looks at its copies itself
        self._reader = BlockReader(source, manifest, options.split, members, digests=digests)
        sizes = [shard.positions for shard in self._reader.shards]
        self._plan = StreamPlan(sizes, manifest.block_size, options, epoch)
        self._options = options
        self._prefetch = options.copies.prefetch
        self._on_skip = on_skip
        self._is_readable = on_skip is None
        """Whether a shard is known that can be used."""
        faults = [fault for _, fault in self._reader.find_faults()]
        if faults and on_skip is None:
            raise faults[0]
        if faults and len(faults) == len(sizes):
            self._require_a_shard(faults[0])

    @property
    def steps(self) -> int:
        """Batches of the epoch, the same for every rank."""
        return self._plan.steps

    def blocks(self, steps: range) -> Iterator[PackedStep]:
        """Yield what this rank gets at each of these ascending steps; see ``Epoch``.

        Windows before the first step are not read.

        Raises:
            StoreError, FormatError: a shard is not what the manifest says, or with ``on_skip`` no shard
                is. No position of the window that it was read for has been delivered.
            ConfigError: the stride is a number of workers that does not divide Q of ``streams=(P, Q)``.
        """
        self._plan.check_workers(steps.step)
        windows: dict[int, _Loaded] = {}
        with ExitStack() as threads:
            ahead = self._look_ahead(steps)
            on_read = threads.enter_context(ahead).advance if ahead else _go_on
            for step in steps:
                parts: list[Block] = []
                flags: list[tuple[int, bool]] = []
                for share in self._plan.shares(step):
                    taken = list(self._take(share, windows, on_read))
                    repeated = self._repeat(share.padding)
                    parts += [*taken, *repeated]
                    flags += [(block_length(part), False) for part in taken]
                    flags += [(block_length(part), True) for part in repeated]
                yield self._join(parts), _mask(flags)

    def _look_ahead(self, steps: range) -> Prefetcher | None:
        """Return what fetches the shards of these steps ahead, if anything does."""
        streams = self._plan.streams_of(steps)
        shards = max(_LEAST_AHEAD, streams) if self._prefetch is None else self._prefetch
        if self._cached is None or not shards:
            return None
        readings = (
            self._reader.shards[piece.shard]
            for window in self._plan.windows_of(steps)
            for piece in self._plan.pieces(window.start, window.stop)
        )
        return Prefetcher(self._cached, readings, shards)

    def _take(
        self, share: StreamShare, windows: dict[int, _Loaded], on_read: Callable[[], None]
    ) -> Iterator[Block]:
        """Yield the rows of a share, reading the next window of its stream when it comes to it."""
        row = share.start
        while row < share.stop:
            if share.stream in windows and row >= windows[share.stream].window.stop:
                del windows[share.stream]  # before the next one fills the memory
            if share.stream not in windows:
                windows[share.stream] = self._load(self._plan.window_at(share.stream, row), on_read)
            stop = min(share.stop, windows[share.stream].window.stop)
            yield windows[share.stream].slice(row, stop)
            row = stop

    def _load(self, window: Window, on_read: Callable[[], None]) -> _Loaded:
        """Read a window into memory and put its rows into their order."""
        block, present = self._read(window.start, window.stop, self._on_skip, on_read)
        permutation = self._plan.window_order(window)
        order = None if permutation is None else permutation.slice(0, len(permutation))
        if present.all():
            return _Loaded(window, block if order is None else take_rows(block, order), None)
        if order is None:
            order = np.arange(len(present))
        delivered = present[order]
        places = np.cumsum(present) - 1  # where each row stands among those that were read
        kept = np.concatenate([[0], np.cumsum(delivered)])
        return _Loaded(window, take_rows(block, places[order[delivered]]), kept)

    def _read(
        self, start: int, stop: int, on_skip: OnSkip | None, on_read: Callable[[], None]
    ) -> tuple[Block, npt.NDArray[np.bool_]]:
        """Return rows [start, stop) of the epoch in stored order, and which of them could be read.

        The block holds those alone. ``on_read`` is called before each piece is read.
        """
        filling = _Filling(self._reader, stop - start)
        present = np.ones(stop - start, np.bool_)
        row = 0
        for piece in self._plan.pieces(start, stop):
            count = piece.stop - piece.first
            on_read()
            try:
                filling.add(piece)
            except (StoreError, FormatError) as error:
                if on_skip is None:
                    raise
                self._require_a_shard(error)
                on_skip(self._reader.shards[piece.shard].name, range(piece.first, piece.stop), error)
                present[row : row + count] = False
            else:
                self._is_readable = True
            row += count
        return filling.block(), present

    def _require_a_shard(self, fault: HexdataError) -> None:
        """Look for a shard that can be used, after the first one that cannot.

        Raises:
            StoreError: there is none, so that every batch would be empty.
        """
        for shard in range(len(self._reader.shards)):
            if self._is_readable:
                return
            try:
                for _ in self._reader.read(shard, 0, 1):
                    pass
            except (StoreError, FormatError):
                continue
            self._is_readable = True
        if not self._is_readable:
            split = self._options.split
            raise StoreError(
                f"no shard of {split} can be used", path=fault.path, found=fault.detail(), hint=REPAIR_HINT
            )

    def _repeat(self, padding: range) -> list[Block]:
        """Return the rows of the epoch that padding repeats; those that cannot be read are left out."""
        if not padding:
            return []
        rows = np.arange(padding.start, padding.stop) % self._plan.positions
        first, last = int(rows.min()), int(rows.max())
        on_skip = None if self._on_skip is None else _forget
        block, present = self._read(first, last + 1, on_skip, _go_on)
        rows -= first
        return [take_rows(block, (np.cumsum(present) - 1)[rows[present[rows]]])]

    def _join(self, parts: Sequence[Block]) -> Block:
        """Join blocks into one of its own memory, so that no batch keeps a window alive."""
        return join_blocks([_Filling(self._reader, 0).block(), *parts])


def _check_options(options: LoaderOptions) -> None:
    asked = {
        "where": options.where is not None,
        "newest": options.newest is not None,
        "final_policy='skip'": options.batch.final_policy == "skip",
    }
    chosen = [name for name, is_asked in asked.items() if is_asked]
    if chosen:
        raise ConfigError(
            "stream mode delivers whole splits",
            found=", ".join(chosen),
            hint="Use mode='exact' on a local copy of the shards.",
        )


def _forget(name: str, rows: range, error: HexdataError) -> None:
    """Hear of padding that is left out: it is nobody's position, and its shard is named where it is."""


def _go_on() -> None:
    """Hear that a piece is about to be read, where nothing is fetched ahead."""


class _Filling:
    """Rows read one piece after the other into arrays of their final size."""

    def __init__(self, reader: BlockReader, rows: int) -> None:
        self._reader = reader
        self._arrays = {
            name: np.empty((rows if name not in POLICY_FIELDS else 0, *spec.shape), spec.dtype)
            for name, spec in reader.specs.items()
        }
        self._policies: list[tuple[npt.NDArray[Any], npt.NDArray[np.uint32]]] = []
        self._filled = 0

    def add(self, piece: Piece) -> None:
        """Append a piece; if it cannot be read, raise and append nothing."""
        size = self._reader.block_size
        row = piece.first // size * size
        place, policies = self._filled, []
        with closing(self._reader.read(piece.shard, row // size, -(-piece.stop // size))) as blocks:
            for block in blocks:
                start, stop = max(piece.first - row, 0), min(piece.stop - row, size)
                rows = slice_rows(block, start, stop)
                for name in row_fields(rows):
                    self._arrays[name][place : place + stop - start] = rows[name]
                if "policy" in rows:
                    policies.append((rows["policy"], rows["policy_row"] + np.uint32(place)))
                place += stop - start
                row += size
        self._filled = place
        self._policies += policies

    def block(self) -> Block:
        """Return what was appended."""
        block = {name: array[: self._filled] for name, array in self._arrays.items()}
        for index, name in enumerate(POLICY_FIELDS):
            if name in block:
                block[name] = np.concatenate([block[name], *(parts[index] for parts in self._policies)])
        return block


@dataclass(frozen=True)
class _Loaded:
    """A window in memory, its rows in the order they are delivered.

    ``kept[i]`` says how many of the first i rows could be read; None if all could.
    """

    window: Window
    block: Block
    kept: npt.NDArray[np.int64] | None

    def slice(self, start: int, stop: int) -> Block:
        """Return what there is of rows [start, stop) of the epoch, as views."""
        first, last = start - self.window.start, stop - self.window.start
        if self.kept is not None:
            first, last = int(self.kept[first]), int(self.kept[last])
        return slice_rows(self.block, first, last)


def _mask(flags: Sequence[tuple[int, bool]]) -> npt.NDArray[np.bool_] | None:
    """Return which rows are padding, given the (length, whether padding) of the parts; None if none is."""
    if not any(padding for _, padding in flags):
        return None
    return np.repeat([padding for _, padding in flags], [length for length, _ in flags])


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
