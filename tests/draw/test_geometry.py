"""Geometry of the board: neighbours, hexagons and edge bands."""

from __future__ import annotations

from math import hypot, sqrt

import numpy as np
import pytest

from hexdata.draw.geometry import CORNERS, centre, edge_bands

SIZES = (3, 4, 13, 32)


def neighbours(row: int, column: int, n: int) -> set[tuple[int, int]]:
    """Return the neighbours by the rules of Hex: six, fewer at the edges."""
    steps = ((0, 1), (0, -1), (1, 0), (-1, 0), (-1, 1), (1, -1))
    return {
        (row + down, column + across)
        for down, across in steps
        if 0 <= row + down < n and 0 <= column + across < n
    }


def distance(one: tuple[float, float], other: tuple[float, float]) -> float:
    return hypot(one[0] - other[0], one[1] - other[1])


@pytest.mark.parametrize("n", [3, 13])
def test_neighbours_and_only_they_are_a_pitch_apart(n):
    cells = [(row, column) for row in range(n) for column in range(n)]
    for cell in cells:
        for other in cells:
            apart = distance(centre(*cell), centre(*other))
            if other in neighbours(*cell, n):
                assert apart == pytest.approx(sqrt(3))
            elif other != cell:
                assert apart > 2.9


def test_a_cell_is_a_regular_hexagon_with_a_corner_on_top():
    assert [hypot(*corner) for corner in CORNERS] == pytest.approx([1.0] * 6)
    assert [distance(a, b) for a, b in zip(CORNERS, CORNERS[1:] + CORNERS[:1], strict=True)] == pytest.approx(
        [1.0] * 6
    )
    assert CORNERS[0] == (0, -1)


def corners_of(row: int, column: int) -> np.ndarray:
    return np.add(centre(row, column), CORNERS)


def holds(polygon: np.ndarray, point: np.ndarray) -> bool:
    return bool(np.isclose(polygon, point).all(axis=1).any())


@pytest.mark.parametrize("n", SIZES)
def test_each_band_runs_along_the_cells_of_its_edge(n):
    bands = edge_bands(n, 0.3)
    last = n - 1
    outer_corners = {"top": 0, "right": 2, "bottom": 3, "left": 4}
    cells = {
        "top": [(0, k) for k in range(n)],
        "right": [(k, last) for k in range(n)],
        "bottom": [(last, k) for k in range(n)],
        "left": [(k, 0) for k in range(n)],
    }
    for name, which in outer_corners.items():
        band = getattr(bands, name)
        assert all(holds(band, corners_of(*cell)[which]) for cell in cells[name]), name
        inner = [(row, column) for row in range(1, last) for column in range(1, last)]
        assert not any(holds(band, corner) for cell in inner for corner in corners_of(*cell)), name


def as_points(polygon: np.ndarray) -> set[tuple[float, float]]:
    return {(round(x, 6) + 0.0, round(y, 6) + 0.0) for x, y in polygon.tolist()}


@pytest.mark.parametrize("n", SIZES)
def test_the_bands_are_images_of_each_other(n):
    """A rotation maps top to bottom and left to right; reflection in the long diagonal maps top to left."""
    bands = edge_bands(n, 0.3)
    far = np.array(centre(n - 1, n - 1))
    assert as_points(far - bands.top) == as_points(bands.bottom)
    assert as_points(far - bands.left) == as_points(bands.right)
    basis = np.array([centre(0, 1), centre(1, 0)])
    swapped = np.linalg.solve(basis.T, bands.top.T)[::-1]
    assert as_points((basis.T @ swapped).T) == as_points(bands.left)


def area(polygon: np.ndarray) -> float:
    x, y = polygon.T
    return abs(float((x * np.roll(y, -1) - y * np.roll(x, -1)).sum())) / 2


@pytest.mark.parametrize("n", SIZES)
def test_the_bands_have_their_width_and_neither_gaps_nor_overlaps(n):
    """Their areas add up to that of the rim: its length times its width, plus the corners.

    Of the outline's 8n - 2 corners of 60 degrees, 6 more turn outward than inward.
    """
    width = 0.3
    sides = 8 * n - 2
    rim = sides * width + 6 * width**2 * np.tan(np.pi / 6)
    assert sum(map(area, edge_bands(n, width))) == pytest.approx(rim)
