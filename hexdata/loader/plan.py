"""Which places of an epoch's order come at which step, and to which rank.

Arithmetic on numbers alone. Never reads a shard, and knows neither order nor mode.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.loader.options import LoaderOptions

__all__ = ["EpochPlan", "Share"]


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
