"""Random value weights by value sample tier.

The weight of a position depends only on seed, epoch and position id, not on batch, rank or worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hexdata.order import derive_key, uniform_draw

__all__ = ["draw_value_weights"]


def draw_value_weights(
    position_ids: npt.NDArray[np.int64],
    tiers: npt.NDArray[Any],
    probabilities: Sequence[float],
    seed: int,
    epoch: int,
) -> npt.NDArray[np.float32]:
    """Return the value weights of positions, float32 (B,): 1 with the probability of the tier, otherwise 0.

    Args:
        position_ids: Position ids, int64 (B,).
        tiers: Value sample tiers, uint8 (B,). A tier beyond ``probabilities``, such as 255 for unknown, has
            probability 1.
        probabilities: Probabilities of tiers 0, 1, 2 …, each in [0, 1].
        seed: Seed of the draws.
        epoch: Epoch of the draws; each epoch has different draws.
    """
    limits = np.ones(256)
    limits[: len(probabilities)] = probabilities
    draws = uniform_draw(position_ids, derive_key(seed, "value", epoch))
    weights: npt.NDArray[np.float32] = (draws < limits[tiers]).astype(np.float32)
    return weights
