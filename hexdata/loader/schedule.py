"""Schedules of exact and stream mode: which rows each rank delivers at each step of an epoch.

A schedule is computed from sizes, options and seeds; it reads no shard.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hexdata.errors import ConfigError
from hexdata.loader.options import LoaderOptions
from hexdata.order import Permutation, derive_key
from hexdata.shards.blocks import Block

__all__ = ["Epoch", "EpochPlan", "PackedStep", "Piece", "Share", "StreamPlan", "StreamShare", "Window"]

PackedStep = tuple[Block, npt.NDArray[np.bool_] | None]
"""What one rank gets at one step: its positions as stored, and which of them are padding (None: none)."""


class Epoch(Protocol):
    """One epoch of one rank."""

    @property
    def steps(self) -> int:
        """Batches of the epoch, the same for every rank."""

    def blocks(self, steps: range) -> Iterator[PackedStep]:
        """Yield what this rank gets at each of these ascending steps, in their order.

        ``steps`` is ``range(first, last + 1, stride)``: of W workers, worker w delivers the steps with
        step mod W = w, so its stride is W. Steps that are passed over cost nothing. A rank that has
        nothing at a step gets a block of no positions.

        Raises:
            StoreError, FormatError: a shard is not what the manifest says.
        """


class Share(NamedTuple):
    """What one rank gets at one step: places [start, stop) of the order, and then those it repeats.

    ``padding`` counts on over the epoch's places 0, 1, 2 … and from 0 again where they run out.
    """

    start: int
    stop: int
    padding: range

    def places(self, positions: int) -> npt.NDArray[np.int64]:
        """Return the places in the order they are delivered, of an epoch of ``positions``."""
        own = np.arange(self.start, self.stop)
        if not self.padding:
            return own
        return np.concatenate([own, np.arange(self.padding.start, self.padding.stop) % positions])

    def padding_mask(self) -> npt.NDArray[np.bool_] | None:
        """Return which of the places are repeats; None if none is."""
        if not self.padding:
            return None
        return np.repeat([False, True], [self.stop - self.start, len(self.padding)])


class EpochPlan:
    """The steps of one epoch over a number of positions, shared out over ranks.

    Step t is the next ``batch_size * world_size`` places of the order, rank after rank; so with the same
    global batch a step holds the same positions for any number of ranks. The last global batch may be
    short: its positions are shared out as evenly as can be, the lower ranks taking one more. Under
    ``remainder="pad"`` each rank's part is then filled up with repeats; under ``"drop"`` there is no
    such batch.

    Attributes:
        positions: how many there are.
        steps: batches of the epoch, the same for every rank.
    """

    def __init__(self, positions: int, options: LoaderOptions) -> None:
        """Plan an epoch over so many positions."""
        self.positions = positions
        self._rank = options.rank
        self._world_size = options.world_size
        self._batch_size = options.batch_size
        self._pad = options.remainder == "pad"
        self._full, self._rest = divmod(positions, options.global_batch)
        if options.remainder == "drop":
            self._rest = 0
        self.steps = self._full + (self._rest > 0)

    def share(self, step: int) -> Share:
        """Return what this rank gets at a step below ``steps``."""
        first = step * self._batch_size * self._world_size
        if step < self._full:
            start = first + self._rank * self._batch_size
            return Share(start, start + self._batch_size, range(0))
        size, extra = divmod(self._rest, self._world_size)
        before = self._rank * size + min(self._rank, extra)
        size += self._rank < extra
        missing = self._rank * self._batch_size - before
        padding = range(missing, missing + self._batch_size - size) if self._pad else range(0)
        return Share(first + before, first + before + size, padding)


class StreamShare(NamedTuple):
    """What one part of a global batch consists of.

    Attributes:
        stream: the stream that the part is read from.
        start, stop: its rows of the epoch, all in that stream; windows are permuted within them.
        padding: which of the epoch's rows are repeated after them; see ``plan.Share``.
    """

    stream: int
    start: int
    stop: int
    padding: range


class Window(NamedTuple):
    """Consecutive rows [start, stop) of one stream that are permuted as one, the ``number``-th such."""

    stream: int
    number: int
    start: int
    stop: int


class Piece(NamedTuple):
    """Rows [first, stop) of one shard, given by its number in the split."""

    shard: int
    first: int
    stop: int


class StreamPlan:
    """One epoch of one rank in stream mode.

    The split's shards in the epoch's order make one row of positions, the rows of the epoch. With
    ``streams=(P, Q)`` these are cut into P·Q consecutive ranges, the streams; stream p·Q + q gives part
    p of the global batch at each step t with t mod Q = q, and is as long as these parts are together.
    Rank r of W takes the parts p with p mod W = r. So a step holds the same positions for every W that
    divides P, and a stream has one reader for every number of workers that divides Q.

    Of a stream, up to ``window`` consecutive rows at a time are permuted as one.

    Without shuffling there is one stream, in stored order, which every rank and worker reads.

    Raises:
        ConfigError: the numbers of streams, ranks and positions a batch do not fit.
    """

    def __init__(self, sizes: Sequence[int], block_size: int, options: LoaderOptions, epoch: int) -> None:
        """Plan the epoch over shards of ``sizes`` positions, in blocks of ``block_size``."""
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
        self._plans = [
            EpochPlan(
                self.positions,
                replace(options, batch_size=self._part_size, world_size=self._parts, rank=part),
            )
            for part in range(self._parts)
        ]
        self.steps = self._plans[0].steps
        self._stream_starts = [0, *itertools.accumulate(self._stream_lengths())]

    @property
    def positions(self) -> int:
        """Positions of the split."""
        return self._shard_starts[-1]

    def shares(self, step: int) -> list[StreamShare]:
        """Return this rank's parts of the global batch at ``step``, in the order they are joined.

        Parts share out a global batch as ``EpochPlan`` has ranks do.
        """
        options = self._options
        if not options.shuffle:
            return [StreamShare(0, *self._plans[options.rank].share(step))]
        turn, phase = divmod(step, self._phases)
        shares = []
        for part in range(options.rank, self._parts, options.world_size):
            stream = part * self._phases + phase
            share = self._plans[part].share(step)
            start = self._stream_starts[stream] + turn * self._part_size
            shares.append(StreamShare(stream, start, start + share.stop - share.start, share.padding))
        return shares

    def _stream_lengths(self) -> Iterator[int]:
        """Yield the rows of each stream: those that its part has at its steps."""
        if not self._options.shuffle:
            yield self.positions  # those to be dropped too, which come last
            return
        for plan, phase in itertools.product(self._plans, range(self._phases)):
            steps = range(phase, self.steps, self._phases)
            missing = 0
            if steps and steps[-1] == self.steps - 1:
                last = plan.share(steps[-1])
                missing = self._part_size - (last.stop - last.start)
            yield len(steps) * self._part_size - missing

    def window_at(self, stream: int, row: int) -> Window:
        """Return the window of the stream that holds a row of the epoch."""
        if stream not in self._window_starts:
            self._window_starts[stream] = self._cut_windows(stream)
        starts = self._window_starts[stream]
        number = bisect.bisect_right(starts, row) - 1
        return Window(stream, number, starts[number], starts[number + 1])

    def _cut_windows(self, stream: int) -> list[int]:
        """Return where the windows of a stream begin, and its end.

        A window is as long as ``window`` allows. It ends with a shard if it can, else with a block.
        """
        start, end = self._stream_starts[stream : stream + 2]
        starts = [start]
        while start < end:
            reach = start + self._options.window
            start = end if reach >= end else self._round(start, reach)
            starts.append(start)
        return starts

    def _round(self, start: int, reach: int) -> int:
        """Return the last border of a shard in (start, reach], else of a block, else ``reach``."""
        shard = self._shard_starts[bisect.bisect_right(self._shard_starts, reach) - 1]
        block = shard + (reach - shard) // self._block_size * self._block_size
        return next(border for border in (shard, block, reach) if border > start)

    def streams_of(self, steps: range) -> int:
        """Return how many streams this rank reads at these steps."""
        if not self._options.shuffle:
            return 1
        return self._parts // self._options.world_size * self._phases // math.gcd(self._phases, steps.step)

    def windows_of(self, steps: range) -> Iterator[Window]:
        """Yield the windows that are read for this rank's batches of these steps, in the order they are."""
        if not steps:
            return
        if not self._options.shuffle:
            yield from self._passed_windows(steps)
            return
        streams = (
            self._dated_windows(part, phase, steps)
            for part in range(self._options.rank, self._parts, self._options.world_size)
            for phase in range(self._phases)
            if phase % math.gcd(self._phases, steps.step) == steps[0] % math.gcd(self._phases, steps.step)
        )
        for _, _, window in heapq.merge(*streams):
            yield window

    def _dated_windows(self, part: int, phase: int, steps: range) -> Iterator[tuple[int, int, Window]]:
        """Yield the windows of a stream from the first of these steps on: (step, part, window)."""
        stream = part * self._phases + phase
        start = self._stream_starts[stream]
        first = -(-(steps[0] - phase) // self._phases)
        for window in self._windows_from(stream, start + first * self._part_size):
            turn = max(first, (window.start - start) // self._part_size)
            yield turn * self._phases + phase, part, window

    def _passed_windows(self, steps: range) -> Iterator[Window]:
        """Yield the windows of the one stream there is that this rank's shares lie in."""
        last = None
        for step in steps:
            for share in self.shares(step):
                row = share.start
                while row < share.stop:
                    window = self.window_at(share.stream, row)
                    if window != last:
                        yield window
                    last, row = window, window.stop

    def _windows_from(self, stream: int, row: int) -> Iterator[Window]:
        """Yield the windows of a stream from the one that holds a row of the epoch on."""
        end = self._stream_starts[stream + 1]
        while row < end:
            window = self.window_at(stream, row)
            yield window
            row = window.stop

    def window_order(self, window: Window) -> Permutation | None:
        """Return the permutation of the window's rows; None for stored order."""
        options = self._options
        if not options.shuffle:
            return None
        purpose = ("epoch", self.epoch, options.split, "stream", window.stream, "window", window.number)
        return Permutation(window.stop - window.start, derive_key(options.seed, *purpose))

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces of shards that rows [start, stop) of the epoch consist of, in their order."""
        place = bisect.bisect_right(self._shard_starts, start) - 1
        while start < stop:
            base, end = self._shard_starts[place : place + 2]
            yield Piece(self._order[place], start - base, min(stop, end) - base)
            start, place = end, place + 1

    def check_workers(self, workers: int) -> None:
        """Refuse a number of workers with which a stream would have more than one reader.

        Raises:
            ConfigError: it does not divide Q.
        """
        if self._options.shuffle and self._phases % workers:
            raise ConfigError(
                "the number of workers must divide the second of streams=(P, Q)",
                found=f"{workers} workers, streams={self._options.streams}",
                hint=f"Give streams=({self._parts}, {math.lcm(self._phases, workers)}), or other workers.",
            )


def _check_streams(options: LoaderOptions) -> None:
    parts, phases = options.streams
    if parts % options.world_size:
        raise ConfigError(
            "the number of ranks must divide the first of streams=(P, Q)",
            found=f"{options.world_size} ranks, streams={options.streams}",
            hint=f"Give streams=({math.lcm(parts, options.world_size)}, {phases}), or other ranks.",
        )
    if options.global_batch % parts:
        raise ConfigError(
            "the first of streams=(P, Q) must divide the positions a step over all ranks",
            found=f"streams={options.streams}, {options.batch_size} positions on {options.world_size} ranks",
            hint=f"Give a batch_size that is a multiple of {parts // math.gcd(parts, options.world_size)}.",
        )
