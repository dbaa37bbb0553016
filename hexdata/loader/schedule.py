"""Schedules of exact and stream mode: the rows that each rank delivers at each step of an epoch.

A schedule is computed from sizes, options and seeds; it reads no shards.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from hexdata.arrays import Arrays
from hexdata.errors import ConfigError
from hexdata.loader.options import LoaderOptions
from hexdata.order import Permutation, derive_key

# Groups of 1,024 positions, then 4,096, 16,384 and 65,536 (NumPy): a factor of 4 gets there in few steps.
_GROWTH: Final = 4


class Part(NamedTuple):
    """Steps of one rank whose batches are made together."""

    steps: range
    read: Callable[[], Mapping[str, Any]]
    """Returns their positions as one block, the same number for each step. May be called in a thread."""
    padding: Any = None
    """Which positions are padding, bool (B,), if there is only one step; None for none."""


class StepSlice(NamedTuple):
    """Part of an epoch's order that one rank delivers at one step."""

    start: int
    stop: int
    """Indices [start, stop) of the order."""
    padding: range
    """Positions to repeat after them, numbered 0, 1, 2 … from the start of the epoch, mod its length."""


class EpochSchedule:
    """The steps of an epoch in exact mode.

    Step t is the next ``batch_size * world_size`` indices of the order, divided among the ranks in turn. With
    the same global batch, a step therefore has the same positions for any number of ranks. An incomplete last
    global batch is divided evenly; lower ranks get one position more. With ``last_batch`` "pad" every part is
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
        self._pad = options.last_batch == "pad"
        self._full, self._rest = divmod(positions, options.global_batch)
        if options.last_batch == "drop":
            self._rest = 0
        self.steps = self._full + (self._rest > 0)

    def groups(self, steps: range, ops: Arrays, size: int, most: int) -> Iterator[tuple[range, Any]]:
        """Yield steps of this rank, and the indices in the order of the epoch of all their positions.

        Args:
            steps: Ascending steps, which are divided. The last step of the epoch is a group of its own if it
                is incomplete.
            ops: Operations of the library of the indices.
            size: Approximate number of positions of the first group: few, for a fast first batch.
            most: Approximate number of positions of the largest group.
        """
        own = ops.arange(self._rank * self._batch_size, (self._rank + 1) * self._batch_size)
        # Only the last step of an epoch can be incomplete, so all others are computed together.
        full = len(steps) - (len(steps) > 0 and steps[-1] >= self._full)
        start = 0
        while start < full:
            group = steps[start : min(start + max(1, size // self._batch_size), full)]
            firsts = ops.arange(group.start, group.stop, group.step) * (self._batch_size * self._world_size)
            yield group, (firsts[:, None] + own).reshape(-1)
            start += len(group)
            size = min(_GROWTH * size, most)
        for step in steps[full:]:
            part = self.slice_at(step)
            indices = ops.arange(part.start, part.stop)
            if part.padding:
                repeated = ops.arange(part.padding.start, part.padding.stop) % self.positions
                indices = ops.xp.concatenate([indices, repeated])
            yield range(step, step + 1), indices

    def slice_at(self, step: int) -> StepSlice:
        """Return the slice of this rank at a step below ``steps``."""
        first = step * self._batch_size * self._world_size
        if step < self._full:
            start = first + self._rank * self._batch_size
            return StepSlice(start, start + self._batch_size, range(0))
        size, extra = divmod(self._rest, self._world_size)
        # Lower ranks have one position more until the extra ones are used up.
        before = self._rank * size + min(self._rank, extra)
        size += self._rank < extra
        # The ranks below lack this many positions for full batches, so
        # they use the padding before this number.
        missing = self._rank * self._batch_size - before
        padding = range(missing, missing + self._batch_size - size) if self._pad else range(0)
        return StepSlice(first + before, first + before + size, padding)


class StreamWindow(NamedTuple):
    """Consecutive rows of a stream that are permuted together."""

    stream: int
    number: int
    """Index of the window in its stream."""
    start: int
    stop: int
    """Rows [start, stop) of the epoch."""


class StreamSlice(NamedTuple):
    """Rows of one window that are delivered at a step, or padding."""

    window: StreamWindow | None
    """Window of the rows, which permutes them; None for padding."""
    start: int
    stop: int
    """Rows [start, stop) of the epoch; of padding, mod its length."""


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
        self._order = list(range(len(sizes)))
        if options.shuffle:
            # Unshuffled order is one stream, for which any number of ranks will do.
            _check_streams(options)
            key = derive_key(options.seed, "epoch", epoch, options.split, "shards")
            self._order = Permutation(len(sizes), key).slice(0, len(sizes)).tolist()
        self._shard_starts: list[int] = [0, *itertools.accumulate(sizes[shard] for shard in self._order)]
        # Ranks then divide each step among themselves, as in exact mode.
        self._parts, self._phases = options.streams if options.shuffle else (options.world_size, 1)
        self._part_size = options.global_batch // self._parts
        # The parts of a global batch are divided like the ranks of exact mode.
        of_parts = replace(options, batch_size=self._part_size, world_size=self._parts, rank=0)
        of_parts = replace(of_parts, remainder=options.last_batch)  # "auto" depends on the number of ranks
        self._part_schedules = [
            EpochSchedule(self.positions, replace(of_parts, rank=part)) for part in range(self._parts)
        ]
        self.steps = self._part_schedules[0].steps
        self._stream_starts = [0, *itertools.accumulate(self._stream_lengths())]
        self._window_starts = [*map(self._find_window_starts, range(len(self._stream_starts) - 1))]

    @property
    def positions(self) -> int:
        """Number of positions in the split."""
        return self._shard_starts[-1]

    def slices_at(self, step: int) -> Iterator[StreamSlice]:
        """Yield this rank's rows of the global batch at a step, in the order of delivery."""
        options = self._options
        # Steps cycle through the Q streams of a part; this is how often the stream has been used before.
        number, phase = divmod(step, self._phases)
        for part in range(options.rank, self._parts, options.world_size):
            own = self._part_schedules[part].slice_at(step)
            stream, start = 0, own.start
            if options.shuffle:
                stream = part * self._phases + phase
                start = self._stream_starts[stream] + number * self._part_size
            stop = start + own.stop - own.start
            while start < stop:
                window = self.window_at(stream, start)
                end = min(stop, window.stop)
                yield StreamSlice(window, start, end)
                start = end
            if own.padding:
                yield StreamSlice(None, own.padding.start, own.padding.stop)

    def _stream_lengths(self) -> Iterator[int]:
        """Yield the number of rows in each stream, which is that of its parts at all steps."""
        if not self._options.shuffle:
            yield self.positions  # includes rows that remainder="drop" omits at the end
            return
        for schedule, phase in itertools.product(self._part_schedules, range(self._phases)):
            steps = range(phase, self.steps, self._phases)
            # Only the last step of the epoch may have a shorter part, and
            # it belongs to one stream of each part.
            missing = 0
            if steps and steps[-1] == self.steps - 1:
                last = schedule.slice_at(steps[-1])
                missing = self._part_size - (last.stop - last.start)
            yield len(steps) * self._part_size - missing

    def window_at(self, stream: int, row: int) -> StreamWindow:
        """Return the window of a stream that contains a row of the epoch."""
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
            # Windows end at shards if possible, so that a shard is not read for two windows.
            limit = start + self._options.window
            start = end if limit >= end else self._last_boundary(start, limit)
            starts.append(start)
        return starts

    def _last_boundary(self, start: int, limit: int) -> int:
        """Return the last boundary of shards in (start, limit], otherwise of blocks, otherwise ``limit``."""
        shard = self._shard_starts[bisect.bisect_right(self._shard_starts, limit) - 1]
        block = shard + (limit - shard) // self._block_size * self._block_size
        # A window must make progress: a boundary at its start, or before it, does not count.
        return next(boundary for boundary in (shard, block, limit) if boundary > start)

    def windows(self, steps: range) -> Iterator[StreamWindow]:
        """Yield the windows that this rank reads for the given steps, in the order of reading."""
        current: dict[int, StreamWindow] = {}
        for own in itertools.chain.from_iterable(map(self.slices_at, steps)):
            # A stream keeps its window between steps; it is listed once, when it is reached.
            if own.window and current.get(own.window.stream) != own.window:
                current[own.window.stream] = own.window
                yield own.window

    def window_order(self, window: StreamWindow) -> Permutation | None:
        """Return the permutation of the rows of a window, or None for stored order."""
        options = self._options
        if not options.shuffle:
            return None
        purpose = ("epoch", self.epoch, options.split, "stream", window.stream, "window", window.number)
        return Permutation(window.stop - window.start, derive_key(options.seed, *purpose))

    def shard_slices(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard, first, last), the rows of shards that form rows [start, stop) of the epoch."""
        index = bisect.bisect_right(self._shard_starts, start) - 1
        while start < stop:
            base, end = self._shard_starts[index : index + 2]
            yield self._order[index], start - base, min(stop, end) - base
            start, index = end, index + 1

    def check_workers(self, workers: int) -> None:
        """Check that each stream has one reader.

        Raises:
            ConfigError: The number of workers does not divide Q.
        """
        # Otherwise several workers would read the same stream, each for some of its steps.
        if self._options.shuffle and self._phases % workers:
            streams = self._parts, math.lcm(self._phases, workers)
            raise ConfigError(
                f"the number of workers, {workers}, must divide Q of streams={self._options.streams}: "
                f"use streams={streams}, or other workers"
            )


def _check_streams(options: LoaderOptions) -> None:
    (parts, phases), ranks = options.streams, options.world_size
    if parts % ranks:
        raise ConfigError(
            f"the number of ranks, {ranks}, must divide P of streams={options.streams}: "
            f"use streams={(math.lcm(parts, ranks), phases)}, or other ranks"
        )
    if options.global_batch % parts:
        raise ConfigError(
            f"P of streams={options.streams} must divide the global batch, {options.global_batch}: "
            f"use a batch_size that is a multiple of {parts // math.gcd(parts, ranks)}"
        )
