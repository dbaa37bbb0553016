"""Which positions carry value weight in an epoch: the legacy's tiers, drawn for each position.

A draw follows from (seed, epoch, position) alone. Never looks at which batch, rank or worker asks.
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
    """Return float32 (B,): 1 where the draw of a position falls below the probability of its tier, else 0.

    Args:
        position_ids: int64 (B,); the identities that draws belong to.
        tiers: uint8 (B,). One that ``probabilities`` does not reach, such as the 255 of unknown, counts
            as probability 1: what nobody graded is not thinned out.
        probabilities: of the tiers 0, 1, 2 …, each in [0, 1].
        seed: any integer.
        epoch: another epoch, another draw.
    """
    limits = np.ones(256)
    limits[: len(probabilities)] = probabilities
    draws = uniform_draw(position_ids, derive_key(seed, "value", epoch))
    weights: npt.NDArray[np.float32] = (draws < limits[tiers]).astype(np.float32)
    return weights
