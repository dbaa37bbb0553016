"""Which position comes when: the one global stream of an epoch, and each rank's part of each step.

Arithmetic on sizes and seeds alone. Never reads a shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hexdata.loader.options import LoaderOptions
from hexdata.order import Permutation, derive_key

__all__ = ["EpochPlan", "count_batches"]


def count_batches(positions: int, options: LoaderOptions) -> int:
    """Return the batches of an epoch, the same number for every rank."""
    full, rest = divmod(positions, options.global_batch)
    return full + (rest > 0 and options.remainder == "short")


class EpochPlan:
    """The stream of one epoch: shards in permuted order, taken in windows, each window permuted as one.

    It follows from the shard sizes, the seed, the epoch and ``window_shards``; ranks only share it out.
    ``windows[w]`` lists the shards (their numbers in the split) of window w.
    """

    def __init__(self, sizes: Sequence[int], options: LoaderOptions, epoch: int) -> None:
        """Plan the epoch over shards of ``sizes`` positions."""
        self.epoch = epoch
        self._options = options
        order = np.arange(len(sizes))
        if options.shuffle:
            key = derive_key(options.seed, "epoch", epoch, options.split, "shards")
            order = Permutation(len(sizes), key).slice(0, len(sizes))
        step = options.window_shards
        self.windows: list[list[int]] = [order[i : i + step].tolist() for i in range(0, len(order), step)]
        window_sizes = [sum(sizes[shard] for shard in window) for window in self.windows]
        self._starts = np.cumsum([0, *window_sizes])
        self.batches = count_batches(sum(sizes), options)

    def rank_range(self, batch: int) -> tuple[int, int]:
        """Return the stream places [start, stop) that this rank takes at step ``batch``.

        A whole global batch gives every rank ``batch_size``; the last one of ``short`` is shared out as
        evenly as can be, the lower ranks taking one more.
        """
        options = self._options
        start = batch * options.global_batch
        size = min(options.global_batch, int(self._starts[-1]) - start)
        share, extra = divmod(size, options.world_size)
        start += options.rank * share + min(options.rank, extra)
        return start, start + share + (options.rank < extra)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Cut stream places [start, stop) at windows: (window, first, last + 1), places in the window.

        No places give one empty piece, so that a rank left without positions still knows its arrays.
        """
        first = int(np.searchsorted(self._starts[1:-1], start, side="right"))
        last = int(np.searchsorted(self._starts[1:-1], max(start, stop - 1), side="right"))
        for window in range(first, last + 1):
            base, end = int(self._starts[window]), int(self._starts[window + 1])
            yield window, max(start, base) - base, min(stop, end) - base

    def window_order(self, window: int) -> Permutation | None:
        """Return the permutation of the window's positions; None for stored order."""
        if not self._options.shuffle:
            return None
        size = int(self._starts[window + 1] - self._starts[window])
        return Permutation(
            size, derive_key(self._options.seed, "epoch", self.epoch, self._options.split, "window", window)
        )
