"""How many buckets a game reaches: what was found, and what a uniform shuffle would give. Reads nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["LONGEST_GAME", "Spread", "reached_by_chance", "spread_of"]

LONGEST_GAME: Final = 4096
"""Positions of a game beyond which it is left out: no such game exists, though odd data may say so."""


@dataclass(frozen=True)
class Spread:
    """How many of the pieces of an order the positions of a game stand in.

    Attributes:
        pieces: buckets, or equal pieces of the order.
        by_bucket: which of the two.
        games: that were looked at.
        before, after: games by the number of pieces that they reach; index 0 is none, and empty.
        chance: the same, expected of a uniform shuffle.
    """

    pieces: int
    by_bucket: bool
    games: int
    before: list[int]
    after: list[int]
    chance: list[float]

    @staticmethod
    def mean(reached: list[int] | list[float]) -> float:
        """Return the mean number of pieces that a game reaches."""
        total = sum(reached)
        return sum(number * games for number, games in enumerate(reached)) / total if total else 0.0


def spread_of(rows: Iterable[Mapping[str, Any]], *, buckets: int, positions: int) -> Spread | None:
    """Gather what the named query ``spread`` found.

    Args:
        rows: each with pieces, positions, before, after and games.
        buckets: of the split.
        positions: of the split.

    Returns:
        None if no game is known.
    """
    found = [row for row in rows if row["positions"] <= LONGEST_GAME]
    if not found:
        return None
    pieces = int(found[0]["pieces"])
    before, after, sizes = [0] * (pieces + 1), [0] * (pieces + 1), Counter[int]()
    for row in found:
        before[row["before"]] += row["games"]
        after[row["after"]] += row["games"]
        sizes[row["positions"]] += row["games"]
    chance = reached_by_chance(sizes, pieces=pieces, positions=positions)
    return Spread(pieces, pieces == buckets, sizes.total(), before, after, chance.tolist())


def reached_by_chance(sizes: Mapping[int, int], *, pieces: int, positions: int) -> npt.NDArray[np.float64]:
    """Return how many games reach 0, 1, … pieces, expected of a uniform order, (pieces + 1,).

    The positions of a game are drawn one after the other without replacement. With i of them in k pieces of
    m places each, the next one falls into a new piece with the chance (pieces - k) m / (positions - i).

    Args:
        sizes: games by their positions.
        pieces: of equal size.
        positions: in all pieces together, at least as many as any game has.
    """
    places = positions / pieces
    reached = np.arange(pieces + 1)
    chance = np.zeros(pieces + 1)
    chance[0] = 1.0
    total = np.zeros(pieces + 1)
    for drawn in range(max(sizes, default=0)):
        new = np.clip((pieces - reached) * places / (positions - drawn), 0.0, 1.0)
        moved = chance * new
        chance = chance - moved
        chance[1:] += moved[:-1]
        total += sizes.get(drawn + 1, 0) * chance
    return total
