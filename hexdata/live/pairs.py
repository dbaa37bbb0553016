"""Expected number of position pairs from one game in a batch of a live pipeline.

This is pure arithmetic; docs/live.md derives it.
"""

from __future__ import annotations

import math

from hexdata.checks import check_count
from hexdata.errors import ConfigError

__all__ = ["expected_pairs"]


def expected_pairs(batch_size: int, reservoir: int, pool_size: int, per_visit: float) -> float:
    """Return the expected number of pairs of positions from one game in a batch, in the steady state.

    The time that a position spends in the reservoir is geometric, with a mean of ``reservoir`` steps. The
    entry times of two positions of a batch therefore differ by the difference of two such times. The two are
    from one game if they entered in the same visit of it, or in visits of it in different passes over the
    pool.

    Args:
        batch_size: Positions in a batch; far below ``reservoir``.
        reservoir: Positions in the reservoir; far above ``per_visit``.
        pool_size: Games in the pool, each drawn once per pass.
        per_visit: Positions that each draw of a game gives, the same for all games.

    Raises:
        ConfigError: A size is below 1.
    """
    check_count("batch_size", batch_size, 1)
    check_count("reservoir", reservoir, 1)
    check_count("pool_size", pool_size, 1)
    if not per_visit >= 1:
        raise ConfigError("per_visit cannot be used", found=per_visit, expected="a number, at least 1")
    passes = reservoir / (pool_size * per_visit)
    same_visit = (per_visit - 1) / (2 * reservoir)
    other_pass = passes * -math.expm1(-1 / passes)
    return batch_size * (batch_size - 1) / 2 * (same_visit + other_pass / pool_size)
