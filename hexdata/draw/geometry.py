"""Geometry of a Hex board: centres, corners and the four edges, in units of a cell's side.

A cell is a hexagon with a corner at the top. Each row is shifted by half a cell to the right, so the centres
of neighbours are √3 apart. The x axis points right, the y axis down, and the centre of ``a1`` is (0, 0).
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
"""Distance between the centres of neighbours in a row."""

_HALF: Final = PITCH / 2
CORNERS: Final[tuple[Point, ...]] = (
    (0, -1),
    (_HALF, -0.5),
    (_HALF, 0.5),
    (0, 1),
    (-_HALF, 0.5),
    (-_HALF, -0.5),
)
"""Corners of a cell relative to its centre, clockwise from the top."""
_TOP, _UPPER_RIGHT, _LOWER_RIGHT, _BOTTOM, _LOWER_LEFT, _UPPER_LEFT = range(6)


def centre(row: float, column: float) -> Point:
    """Return the centre of a cell, which may be outside the board."""
    return PITCH * (column + row / 2), 1.5 * row


class Edges(NamedTuple):
    """The board's four edges, each a closed polygon (m, 2) along its cells."""

    top: Points
    right: Points
    bottom: Points
    left: Points


def edge_bands(n: int, width: float) -> Edges:
    """Return bands of the given width along the four edges of a board of size n, which meet at the corners.

    At an acute corner, the bands meet where the outlines of both edges end. At an obtuse corner, the side of
    the corner cell that belongs to both edges is divided in half.
    """
    sides = _outline(n)
    inner = np.concatenate([side[:-1] for side in sides])
    outer = _grow(inner, width)
    bands = []
    start = 0
    for side in sides:
        indices = np.arange(start, start + len(side)) % len(inner)
        bands.append(np.concatenate([inner[indices], outer[indices[::-1]]]))
        start += len(side) - 1
    return Edges(*bands)


def _outline(n: int) -> list[Points]:
    """Return the outline of the board as four polylines, clockwise, each from corner to corner."""
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
    """Return the corners (m, 2) of a closed clockwise outline whose sides are moved outward by ``width``."""
    ahead = np.roll(loop, -1, axis=0) - loop
    ahead /= np.linalg.norm(ahead, axis=1, keepdims=True)
    outward = np.stack([ahead[:, 1], -ahead[:, 0]], axis=1)
    before = np.roll(outward, 1, axis=0)
    # A corner moves along the bisector of its sides, by width / cos(half the angle between them).
    corners: Points = loop + width * (outward + before) / (1 + (outward * before).sum(axis=1, keepdims=True))
    return corners
