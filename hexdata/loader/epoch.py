"""What the two ways through the shards have in common: an epoch that gives packed blocks by step.

A protocol and no more: ``exact`` and ``stream`` keep it, ``loader`` and the PyTorch side rely on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hexdata.shards.format import Block

__all__ = ["Epoch", "PackedStep"]

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
