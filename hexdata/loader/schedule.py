"""Schedules of exact and stream mode: the rows that each rank delivers at each step of an epoch.

A schedule is computed from sizes, options and seeds; it reads no shards.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hexdata.errors import ConfigError
from hexdata.loader.options import LoaderOptions
from hexdata.order import Permutation, derive_key
from hexdata.shards.blocks import Block

__all__ = [
    "Epoch",
    "EpochSchedule",
    "PackedStep",
    "ShardSlice",
    "StepSlice",
    "StreamSchedule",
    "StreamSlice",
    "StreamWindow",
]

PackedStep = tuple[Block, npt.NDArray[np.bool_] | None]
"""Positions of one rank at one step as stored, and which of them are padding, bool (B,) (None: none)."""


class Epoch(Protocol):
    """One epoch of one rank, in exact or stream mode."""

    @property
    def steps(self) -> int:
        """Number of batches, which is the same for every rank."""

    def blocks(self, steps: range, pool: ThreadPoolExecutor | None = None) -> Iterator[PackedStep]:
        """Yield the positions of this rank at each of the given steps.

        Args:
            steps: Ascending steps. Worker w of W delivers ``range(first, self.steps, W)``. Omitted steps take
                no time. A rank without positions at a step yields an empty block.
            pool: Threads that may read ahead; None to read when a block is needed (default).

        Raises:
            StoreError, FormatError: A shard differs from its manifest.
        """


class StepSlice(NamedTuple):
    """Part of an epoch's order that one rank delivers at one step."""

    start: int
    stop: int
    """Indices [start, stop) of the order."""
    padding: range
    """Positions to repeat after them, numbered 0, 1, 2 … from the start of the epoch, mod its length."""

    def indices(self, positions: int) -> npt.NDArray[np.int64]:
        """Return the indices in the order of delivery, for an epoch with this number of positions."""
        own = np.arange(self.start, self.stop)
        if not self.padding:
            return own
        return np.concatenate([own, np.arange(self.padding.start, self.padding.stop) % positions])

    def padding_mask(self) -> npt.NDArray[np.bool_] | None:
        """Return which of the indices are padding, bool (B,), or None if none are."""
        if not self.padding:
            return None
        return np.repeat([False, True], [self.stop - self.start, len(self.padding)])


class EpochSchedule:
    """The steps of an epoch in exact mode.

    Step t is the next ``batch_size * world_size`` indices of the order, divided among the ranks in turn. With
    the same global batch, a step therefore has the same positions for any number of ranks. An incomplete last
    global batch is divided evenly; lower ranks get one position more. With ``remainder="pad"`` every part is
    then filled with repeated positions; with "drop" the global batch is omitted.

    Args:
        positions: Number of positions in the epoch.
        options: Options of the loader.

    Attributes:
        positions: Number of positions in the epoch.
        steps: Number of batches, which is the same for every rank.
    """

    def __init__(self, positions: int, options: LoaderOptions) -> None:
        self.positions = positions
        self._rank = options.rank
        self._world_size = options.world_size
        self._batch_size = options.batch_size
        self._pad = options.remainder == "pad"
        self._full, self._rest = divmod(positions, options.global_batch)
        if options.remainder == "drop":
            self._rest = 0
        self.steps = self._full + (self._rest > 0)

    def slice_at(self, step: int) -> StepSlice:
        """Return the slice of this rank at a step below ``steps``."""
        first = step * self._batch_size * self._world_size
        if step < self._full:
            start = first + self._rank * self._batch_size
            return StepSlice(start, start + self._batch_size, range(0))
        size, extra = divmod(self._rest, self._world_size)
        before = self._rank * size + min(self._rank, extra)
        size += self._rank < extra
        missing = self._rank * self._batch_size - before
        padding = range(missing, missing + self._batch_size - size) if self._pad else range(0)
        return StepSlice(first + before, first + before + size, padding)


class StreamSlice(NamedTuple):
    """One part of a global batch in stream mode."""

    stream: int
    """Stream that contains the part."""
    start: int
    stop: int
    """Rows [start, stop) of the epoch, all in that stream. Windows permute them."""
    padding: range
    """Rows of the epoch to repeat after them, see :class:`StepSlice`."""


class StreamWindow(NamedTuple):
    """Consecutive rows of a stream that are permuted together."""

    stream: int
    number: int
    """Index of the window in its stream."""
    start: int
    stop: int
    """Rows [start, stop) of the epoch."""


class ShardSlice(NamedTuple):
    """Rows [start, stop) of one shard."""

    shard: int
    """Index of the shard in the split."""
    start: int
    stop: int


class StreamSchedule:
    """The steps of an epoch in stream mode.

    The rows of the epoch are the rows of all shards of the split, concatenated in the epoch's order of
    shards. With ``streams=(P, Q)`` they are divided into P · Q consecutive ranges, the streams. Stream
    p · Q + q provides part p of the global batch at each step t with t mod Q = q, and is as long as all its
    parts together. Rank r of W delivers the parts p with p mod W = r. A step therefore has the same positions
    for every W that divides P, and each stream is read by one worker for every number of workers that
    divides Q.

    Up to ``window`` consecutive rows of a stream are permuted together.

    Without shuffling there is a single stream in stored order, which every rank and worker reads.

    Args:
        sizes: Number of positions in each shard of the split.
        block_size: Positions per block.
        options: Options of the loader.
        epoch: The epoch.

    Attributes:
        epoch: The epoch.
        steps: Number of batches, which is the same for every rank.

    Raises:
        ConfigError: The numbers of streams, ranks and positions per batch do not fit.
    """

    def __init__(self, sizes: Sequence[int], block_size: int, options: LoaderOptions, epoch: int) -> None:
        self.epoch = epoch
        self._options = options
        self._block_size = block_size
        self._window_starts: dict[int, list[int]] = {}
        self._order = list(range(len(sizes)))
        if options.shuffle:
            _check_streams(options)
            key = derive_key(options.seed, "epoch", epoch, options.split, "shards")
            self._order = Permutation(len(sizes), key).slice(0, len(sizes)).tolist()
        self._shard_starts: list[int] = [0, *itertools.accumulate(sizes[shard] for shard in self._order)]
        self._parts, self._phases = options.streams if options.shuffle else (options.world_size, 1)
        self._part_size = options.global_batch // self._parts
        # The parts of a global batch are divided like the ranks of exact mode.
        self._part_schedules = [
            EpochSchedule(
                self.positions,
                replace(options, batch_size=self._part_size, world_size=self._parts, rank=part),
            )
            for part in range(self._parts)
        ]
        self.steps = self._part_schedules[0].steps
        self._stream_starts = [0, *itertools.accumulate(self._stream_lengths())]

    @property
    def positions(self) -> int:
        """Number of positions in the split."""
        return self._shard_starts[-1]

    def slices_at(self, step: int) -> list[StreamSlice]:
        """Return this rank's parts of the global batch at a step, in the order of delivery."""
        options = self._options
        if not options.shuffle:
            return [StreamSlice(0, *self._part_schedules[options.rank].slice_at(step))]
        number, phase = divmod(step, self._phases)
        slices = []
        for part in range(options.rank, self._parts, options.world_size):
            stream = part * self._phases + phase
            own = self._part_schedules[part].slice_at(step)
            start = self._stream_starts[stream] + number * self._part_size
            slices.append(StreamSlice(stream, start, start + own.stop - own.start, own.padding))
        return slices

    def _stream_lengths(self) -> Iterator[int]:
        """Yield the number of rows in each stream, which is that of its parts at all steps."""
        if not self._options.shuffle:
            yield self.positions  # includes rows that remainder="drop" omits at the end
            return
        for schedule, phase in itertools.product(self._part_schedules, range(self._phases)):
            steps = range(phase, self.steps, self._phases)
            missing = 0
            if steps and steps[-1] == self.steps - 1:
                last = schedule.slice_at(steps[-1])
                missing = self._part_size - (last.stop - last.start)
            yield len(steps) * self._part_size - missing

    def window_at(self, stream: int, row: int) -> StreamWindow:
        """Return the window of a stream that contains a row of the epoch."""
        if stream not in self._window_starts:
            self._window_starts[stream] = self._find_window_starts(stream)
        starts = self._window_starts[stream]
        number = bisect.bisect_right(starts, row) - 1
        return StreamWindow(stream, number, starts[number], starts[number + 1])

    def _find_window_starts(self, stream: int) -> list[int]:
        """Return the first row of each window of a stream, and the end of the stream.

        A window is as long as ``window`` allows, but ends at the end of a shard if possible, otherwise at the
        end of a block.
        """
        start, end = self._stream_starts[stream : stream + 2]
        starts = [start]
        while start < end:
            limit = start + self._options.window
            start = end if limit >= end else self._last_boundary(start, limit)
            starts.append(start)
        return starts

    def _last_boundary(self, start: int, limit: int) -> int:
        """Return the last boundary of shards in (start, limit], otherwise of blocks, otherwise ``limit``."""
        shard = self._shard_starts[bisect.bisect_right(self._shard_starts, limit) - 1]
        block = shard + (limit - shard) // self._block_size * self._block_size
        return next(boundary for boundary in (shard, block, limit) if boundary > start)

    def count_streams(self, steps: range) -> int:
        """Return the number of streams that this rank reads at the given steps."""
        if not self._options.shuffle:
            return 1
        return self._parts // self._options.world_size * self._phases // math.gcd(self._phases, steps.step)

    def windows(self, steps: range) -> Iterator[StreamWindow]:
        """Yield the windows that this rank reads for the given steps, in the order of reading."""
        if not steps:
            return
        if not self._options.shuffle:
            yield from self._stored_windows(steps)
            return
        stride = math.gcd(self._phases, steps.step)
        streams = (
            self._stream_windows(part, phase, steps)
            for part in range(self._options.rank, self._parts, self._options.world_size)
            for phase in range(self._phases)
            if phase % stride == steps[0] % stride
        )
        for _, _, window in heapq.merge(*streams):
            yield window

    def _stream_windows(self, part: int, phase: int, steps: range) -> Iterator[tuple[int, int, StreamWindow]]:
        """Yield (first step, part, window) for the windows of a stream, beginning at ``steps[0]``."""
        stream = part * self._phases + phase
        start, end = self._stream_starts[stream : stream + 2]
        first = -(-(steps[0] - phase) // self._phases)
        row = start + first * self._part_size
        while row < end:
            window = self.window_at(stream, row)
            number = max(first, (window.start - start) // self._part_size)
            yield number * self._phases + phase, part, window
            row = window.stop

    def _stored_windows(self, steps: range) -> Iterator[StreamWindow]:
        """Yield the windows of the single stream that contain this rank's rows at the given steps."""
        last = None
        for step in steps:
            for part in self.slices_at(step):
                row = part.start
                while row < part.stop:
                    window = self.window_at(part.stream, row)
                    if window != last:
                        yield window
                    last, row = window, window.stop

    def window_order(self, window: StreamWindow) -> Permutation | None:
        """Return the permutation of the rows of a window, or None for stored order."""
        options = self._options
        if not options.shuffle:
            return None
        purpose = ("epoch", self.epoch, options.split, "stream", window.stream, "window", window.number)
        return Permutation(window.stop - window.start, derive_key(options.seed, *purpose))

    def shard_slices(self, start: int, stop: int) -> Iterator[ShardSlice]:
        """Yield the slices of shards that form rows [start, stop) of the epoch, in their order."""
        index = bisect.bisect_right(self._shard_starts, start) - 1
        while start < stop:
            base, end = self._shard_starts[index : index + 2]
            yield ShardSlice(self._order[index], start - base, min(stop, end) - base)
            start, index = end, index + 1

    def check_workers(self, workers: int) -> None:
        """Check that each stream has one reader.

        Raises:
            ConfigError: The number of workers does not divide Q.
        """
        if self._options.shuffle and self._phases % workers:
            raise ConfigError(
                "the number of workers must divide Q of streams=(P, Q)",
                found=f"{workers} workers, streams={self._options.streams}",
                hint=f"Use streams=({self._parts}, {math.lcm(self._phases, workers)}), "
                "or another number of workers.",
            )


def _check_streams(options: LoaderOptions) -> None:
    parts, phases = options.streams
    if parts % options.world_size:
        raise ConfigError(
            "the number of ranks must divide P of streams=(P, Q)",
            found=f"{options.world_size} ranks, streams={options.streams}",
            hint=f"Use streams=({math.lcm(parts, options.world_size)}, {phases}), "
            "or another number of ranks.",
        )
    if options.global_batch % parts:
        raise ConfigError(
            "P of streams=(P, Q) must divide the global batch",
            found=f"streams={options.streams}, batch_size {options.batch_size} on {options.world_size} ranks",
            hint=f"Use a batch_size that is a multiple of {parts // math.gcd(parts, options.world_size)}.",
        )
