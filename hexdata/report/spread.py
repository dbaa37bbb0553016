"""Number of buckets that contain positions of a game: measured, and expected of a random order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["LONGEST_GAME", "Spread", "reached_by_chance", "spread_of"]

LONGEST_GAME: Final = 4096
"""Games with more positions are ignored; only damaged data contains them."""


@dataclass(frozen=True)
class Spread:
    """Distribution of the number of pieces of an order that contain positions of a game.

    Attributes:
        pieces: Number of pieces: the buckets, or equal parts of the order.
        by_bucket: Whether the pieces are the buckets.
        games: Number of games measured.
        positions: Number of positions of these games.
        before: Number of games by the number of pieces they reach, in the input order (pieces + 1,).
        after: The same in the shuffled order.
        chance: The same, expected of a uniform random order.
    """

    pieces: int
    by_bucket: bool
    games: int
    positions: int
    before: list[int]
    after: list[int]
    chance: list[float]

    @staticmethod
    def mean(reached: list[int] | list[float]) -> float:
        """Return the mean number of pieces that contain positions of a game."""
        total = sum(reached)
        return sum(number * games for number, games in enumerate(reached)) / total if total else 0.0


def spread_of(rows: Iterable[Mapping[str, Any]], *, buckets: int, positions: int) -> Spread | None:
    """Return the spread computed from the rows of the named query ``spread``.

    Args:
        rows: Rows with pieces, positions, before, after and games.
        buckets: Number of buckets of the split.
        positions: Number of positions of the split.

    Returns:
        The spread, or None if there are no games.
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
    counted = sum(size * games for size, games in sizes.items())
    return Spread(pieces, pieces == buckets, sizes.total(), counted, before, after, chance.tolist())


def reached_by_chance(sizes: Mapping[int, int], *, pieces: int, positions: int) -> npt.NDArray[np.float64]:
    """Return the expected number of games that reach 0, 1, … pieces in a uniform random order (pieces + 1,).

    The positions of a game are drawn without replacement. If i of them are in k pieces of m positions each,
    the next one is in a new piece with probability (pieces - k) m / (positions - i).

    Args:
        sizes: Number of games by their number of positions.
        pieces: Number of pieces, of equal size.
        positions: Number of positions in all pieces together.
    """
    piece_size = positions / pieces
    reached = np.arange(pieces + 1)
    chance = np.zeros(pieces + 1)
    chance[0] = 1.0
    total = np.zeros(pieces + 1)
    for drawn in range(max(sizes, default=0)):
        new = np.clip((pieces - reached) * piece_size / (positions - drawn), 0.0, 1.0)
        moved = chance * new
        chance = chance - moved
        chance[1:] += moved[:-1]
        total += sizes.get(drawn + 1, 0) * chance
    return total
