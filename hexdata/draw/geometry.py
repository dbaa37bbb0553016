"""Where things stand on a slanted board: centres, corners and the four edges, in units of a cell's side.

A cell is a hexagon with a corner on top. Each row stands half a cell further right than the one above, so
the centres of neighbours are √3 apart. x goes right, y goes down, and the centre of ``a1`` is (0, 0).
"""

from __future__ import annotations

from math import sqrt
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["CORNERS", "PITCH", "Edges", "Point", "Points", "centre", "edge_bands"]

Point = tuple[float, float]
Points = npt.NDArray[np.float64]
"""Shape (m, 2)."""

PITCH: Final = sqrt(3)
"""From the centre of a cell to that of the next in its row."""

_HALF: Final = PITCH / 2
CORNERS: Final[tuple[Point, ...]] = (
    (0, -1),
    (_HALF, -0.5),
    (_HALF, 0.5),
    (0, 1),
    (-_HALF, 0.5),
    (-_HALF, -0.5),
)
"""Of a cell around its centre, clockwise from the one on top."""
_TOP, _UPPER_RIGHT, _LOWER_RIGHT, _BOTTOM, _LOWER_LEFT, _UPPER_LEFT = range(6)


def centre(row: float, column: float) -> Point:
    """Return the centre of a cell; rows and columns beyond the board go on as those on it."""
    return PITCH * (column + row / 2), 1.5 * row


class Edges(NamedTuple):
    """The board's four edges, each a closed polygon (m, 2) along its cells."""

    top: Points
    right: Points
    bottom: Points
    left: Points


def edge_bands(n: int, width: float) -> Edges:
    """Return bands along the four edges of a board of size n, so wide, that meet at the corners.

    The acute corners are parted at the point where the outlines of both edges end. At the obtuse ones a
    side of the corner's cell belongs to both edges: each gets half of it.
    """
    sides = _outline(n)
    inner = np.concatenate([side[:-1] for side in sides])
    outer = _grow(inner, width)
    bands = []
    start = 0
    for side in sides:
        places = np.arange(start, start + len(side)) % len(inner)
        bands.append(np.concatenate([inner[places], outer[places[::-1]]]))
        start += len(side) - 1
    return Edges(*bands)


def _outline(n: int) -> list[Points]:
    """Return the board's outline clockwise as four lines, each from corner to corner."""
    last = n - 1

    def corner(row: int, column: int, which: int) -> Points:
        return np.add(centre(row, column), CORNERS[which])

    upper = (corner(0, last, _TOP) + corner(0, last, _UPPER_RIGHT)) / 2
    lower = (corner(last, 0, _BOTTOM) + corner(last, 0, _LOWER_LEFT)) / 2
    top = [corner(0, column, which) for column in range(n) for which in (_UPPER_LEFT, _TOP)]
    right = [corner(row, last, which) for row in range(n) for which in (_UPPER_RIGHT, _LOWER_RIGHT)]
    bottom = [
        corner(last, column, which) for column in range(last, -1, -1) for which in (_LOWER_RIGHT, _BOTTOM)
    ]
    left = [corner(row, 0, which) for row in range(last, -1, -1) for which in (_LOWER_LEFT, _UPPER_LEFT)]
    return [
        np.array([*top, upper]),
        np.array([upper, *right]),
        np.array([*bottom, lower]),
        np.array([lower, *left]),
    ]


def _grow(loop: Points, width: float) -> Points:
    """Move each side of a closed clockwise outline outward by ``width``; return where they meet, (m, 2)."""
    ahead = np.roll(loop, -1, axis=0) - loop
    ahead /= np.linalg.norm(ahead, axis=1, keepdims=True)
    outward = np.stack([ahead[:, 1], -ahead[:, 0]], axis=1)
    before = np.roll(outward, 1, axis=0)
    # Both sides move: the corner goes along their bisector, 1 / cos(half the turn) as far.
    corners: Points = loop + width * (outward + before) / (1 + (outward * before).sum(axis=1, keepdims=True))
    return corners
