"""How often a batch of a live pipeline holds two positions of one game: what theory says of its sizes.

Pure arithmetic; docs/live.md derives it.
"""

from __future__ import annotations

import math

from hexdata.checks import check_count
from hexdata.errors import ConfigError

__all__ = ["expected_pairs"]


def expected_pairs(batch_size: int, reservoir: int, pool_size: int, per_visit: float) -> float:
    """Return the expected number of pairs of positions of one game in a batch, once a pipeline runs evenly.

    A position leaves the reservoir after a time that is geometric, with a mean of ``reservoir`` steps. So two
    positions of a batch came in at times whose difference is that of two such times. They are of one game
    if they came in by the same visit of it, or by visits of it in different passes over the pool.

    Args:
        batch_size: positions; far below ``reservoir``.
        reservoir: positions; far above ``per_visit``.
        pool_size: games that are drawn from, each once a pass.
        per_visit: positions that a game gives each time it is drawn, the same of every game.

    Raises:
        ConfigError: a size is below 1.
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
