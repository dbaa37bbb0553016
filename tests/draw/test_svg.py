"""Boards as SVG, parsed and compared with the position."""

from __future__ import annotations

import re
from math import hypot, sqrt
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.draw import Diagram, Shades, board_svg
from hexdata.draw.palette import CONTRAST_STRENGTH, PALETTE
from hexdata.errors import ConfigError, FormatError

NS = "{http://www.w3.org/2000/svg}"
SIDE = 16
"""Length of a cell's side in pixels."""


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def painted(root: ElementTree.Element, tag: str, name: str) -> list[ElementTree.Element]:
    """Return elements of a tag with this class, or in a group with this class."""
    found = []
    for element in root.iter():
        if name in element.get("class", "").split():
            found += [element] if element.tag == NS + tag else list(element.iter(NS + tag))
    return found


def hexagons(path: str) -> np.ndarray:
    """Return the corners of each part of a path (cells, 6, 2)."""
    parts = [part for part in path.split("M") if part]
    assert all(part.endswith("Z") for part in parts)
    return np.array(
        [[[float(x) for x in point.split(",")] for point in part[:-1].split("L")] for part in parts]
    )


def cells_of(root: ElementTree.Element) -> np.ndarray:
    """Return the centres of the drawn cells (n·n, 2)."""
    (path,) = painted(root, "path", "hexdata-fill-cell")
    return hexagons(path.get("d", "")).mean(axis=1)


def places(root: ElementTree.Element, circles: list[ElementTree.Element]) -> list[int]:
    """Return the cells with circles at their centres."""
    centres = cells_of(root)
    found = []
    for circle in circles:
        point = float(circle.get("cx", "")), float(circle.get("cy", ""))
        distances = np.hypot(*(centres - point).T)
        assert distances.min() < 0.02
        found.append(int(distances.argmin()))
    return found


def stones(root: ElementTree.Element) -> dict[str, list[int]]:
    return {name: places(root, painted(root, "circle", f"hexdata-fill-{name}")) for name in ("blue", "red")}


@st.composite
def diagrams(draw: st.DrawFn) -> Diagram:
    n = draw(st.integers(3, 32))
    cell = st.none() | st.integers(0, n * n - 1)
    counts = draw(st.lists(st.integers(0, 2), min_size=n * n, max_size=n * n))
    board = np.array(counts).reshape(n, n)
    return Diagram(
        n,
        np.stack([board == 1, board == 2]),
        last_move=draw(cell),
        next_move=draw(cell),
        player=draw(st.sampled_from([None, 0, 1])),
        title=draw(st.text(max_size=30)),
        caption=draw(st.lists(st.text(max_size=30), max_size=5)),
    )


@given(diagrams())
def test_stones_are_on_their_cells(diagram):
    root = parse(board_svg(diagram))
    blue, red = (plane.ravel().nonzero()[0].tolist() for plane in diagram.planes)
    assert stones(root) == {"blue": blue, "red": red}
    marks = {
        kind: places(root, [c for c in root.iter(NS + "circle") if c.get("data-mark") == kind])
        for kind in ("last", "next")
    }
    assert marks["last"] == ([] if diagram.last_move is None else [diagram.last_move])
    assert marks["next"] == ([] if diagram.next_move is None else [diagram.next_move])


@pytest.mark.parametrize("n", [3, 13, 32])
def test_each_cell_is_one_hexagon_and_rows_are_shifted_right(n):
    (path,) = painted(parse(board_svg(Diagram(n))), "path", "hexdata-fill-cell")
    corners = hexagons(path.get("d", ""))
    assert corners.shape == (n * n, 6, 2)
    middles = corners.mean(axis=1).reshape(n, n, 2)
    sides = corners - np.roll(corners, 1, axis=1)
    assert np.hypot(sides[..., 0], sides[..., 1]) == pytest.approx(SIDE, abs=0.02)
    assert np.diff(middles, axis=1) == pytest.approx(
        np.broadcast_to([SIDE * sqrt(3), 0], (n, n - 1, 2)), abs=0.02
    )
    assert np.diff(middles, axis=0) == pytest.approx(
        np.broadcast_to([SIDE * sqrt(3) / 2, SIDE * 1.5], (n - 1, n, 2)), abs=0.02
    )


def test_blue_owns_top_and_bottom_and_red_left_and_right():
    root = parse(board_svg(Diagram(5)))
    centres = cells_of(root).reshape(5, 5, 2)
    bands = {
        name: [
            np.array([point.split(",") for point in band.get("points", "").split()], float).mean(axis=0)
            for band in painted(root, "polygon", f"hexdata-fill-{name}")
        ]
        for name in ("blue", "red")
    }
    top, bottom = sorted(bands["blue"], key=lambda point: point[1])
    left, right = sorted(bands["red"], key=lambda point: point[0])
    for band, cells in (
        (top, centres[0]),
        (bottom, centres[-1]),
        (left, centres[:, 0]),
        (right, centres[:, -1]),
    ):
        assert hypot(*(band - cells.mean(axis=0))) < 1.5 * SIDE


def texts(root: ElementTree.Element, name: str = "ink") -> list[tuple[str, float, float]]:
    return [
        (text.text or "", float(text.get("x", "")), float(text.get("y", "")))
        for text in painted(root, "text", f"hexdata-fill-{name}")
    ]


def test_letters_label_columns_and_numbers_label_rows():
    root = parse(board_svg(Diagram(4)))
    centres = cells_of(root).reshape(4, 4, 2)
    written = texts(root)
    assert sorted(text for text, *_ in written) == sorted(2 * [*"abcd1234"])
    for column, letter in enumerate("abcd"):
        (top, bottom) = sorted((y, x) for text, x, y in written if text == letter)
        assert top[1] == pytest.approx(centres[0, column, 0], abs=0.02)
        assert bottom[1] == pytest.approx(centres[3, column, 0], abs=0.02)
        assert top[0] < centres[0, 0, 1] - SIDE < centres[3, 0, 1] + SIDE < bottom[0]
    for row, number in enumerate("1234"):
        (left, right) = sorted((x, y) for text, x, y in written if text == number)
        assert left[0] < centres[row, 0, 0] < centres[row, 3, 0] < right[0]
        assert left[1] == right[1] == pytest.approx(centres[row, 0, 1], abs=SIDE / 3)


@pytest.mark.parametrize("n", [3, 13, 32])
def test_everything_is_within_the_view(n):
    values = np.arange(n * n)
    svg = board_svg(
        Diagram(n, shades=Shades(values, label="a label"), caption=["one", "two " * 8, "three " * 9])
    )
    root = parse(svg)
    left, top, width, height = map(float, root.get("viewBox", "").split())
    assert (left, top) == (0, 0)
    assert (root.get("width"), root.get("height")) == (f"{width:g}", f"{height:g}")
    board = root.find(f"{NS}g[@transform]")
    shift = np.array(re.findall(r"-?[\d.]+", board.get("transform", "")), float)
    points = [
        np.array(p.split(","), float) for e in board.iter(NS + "polygon") for p in e.get("points").split()
    ]
    points += [np.array([x, y]) for _, x, y in texts(board)]
    inside = np.array(points) + shift
    assert (inside > 4).all()
    assert (inside < [width - 4, height - 4]).all()
    outside = [e for e in root.iter(NS + "text") if e not in set(board.iter())]
    assert all(0 < float(e.get("y")) < height - 2 for e in outside)
    lowest = max(float(e.get("y")) for e in outside)
    assert lowest > inside[:, 1].max()


def test_numbers_are_on_their_stones():
    planes = np.zeros((2, 3, 3))
    planes[0, 0, 1] = planes[1, 2, 2] = 1
    root = parse(board_svg(Diagram(3, planes, numbers={1: 1, 8: 102}, last_move=8)))
    centres = cells_of(root)
    written = texts(root, "on-stone")
    assert [text for text, *_ in written] == ["1", "102"]
    for (_, x, y), cell in zip(written, (1, 8), strict=True):
        assert hypot(x - centres[cell, 0], y - centres[cell, 1]) < 6
    (mark,) = [circle for circle in root.iter(NS + "circle") if circle.get("data-mark")]
    assert mark.get("fill") == "none"  # a ring, as a dot would cover the number


def test_two_stones_on_one_cell_are_both_visible():
    root = parse(board_svg(Diagram(3, np.ones((2, 3, 3)))))
    assert stones(root) == {"blue": [*range(9)], "red": [*range(9)]}
    radii = {
        name: {float(c.get("r")) for c in painted(root, "circle", f"hexdata-fill-{name}")}
        for name in ("blue", "red")
    }
    assert max(radii["red"]) < min(radii["blue"])


@pytest.mark.parametrize("scale", ["linear", "sqrt"])
def test_shades_grow_with_their_values(scale):
    values = np.array([0, 1, 2, 4, np.nan, 8, 16, 0, 0.5])
    written = ["", "one", "", "", "none", "", "most", "zero", ""]
    shades = Shades(values, label="stones & sums", texts=written, scale=scale)
    root = parse(board_svg(Diagram(3, shades=shades)))
    drawn = {}
    for path in painted(root, "path", "hexdata-fill-heat"):
        name, _, number = path.find(NS + "title").text.partition(": ")
        drawn[name] = float(path.get("fill-opacity")), number
    shares = np.sqrt(values / 16) if scale == "sqrt" else values / 16
    expected = {"b1": (1, "1"), "c1": (2, "2"), "a2": (3, "4"), "c2": (5, "8"), "a3": (6, "16")}
    expected["c3"] = (8, "0.5")
    assert drawn == {
        name: (pytest.approx(shares[cell], abs=6e-4), text) for name, (cell, text) in expected.items()
    }
    assert [text for text, *_ in texts(root, "on-heat")] == ["most"]
    assert [text for text, *_ in texts(root, "on-cell")] == ["one", "none", "zero"]
    legend = [text for text, *_ in texts(root)][-4:]
    assert legend == ["stones & sums", "0", "4" if scale == "sqrt" else "8", "16"]


def test_shades_can_be_shares_and_have_a_top():
    shades = Shades(np.array([0.25, *[0] * 8]), share=True, top=0.5)
    assert shades.strengths[0] == 0.5
    root = parse(board_svg(Diagram(3, shades=shades)))
    assert [text for text, *_ in texts(root)][-3:] == ["0 %", "25 %", "50 %"]


@pytest.mark.parametrize("values", [np.zeros(9), np.full(9, np.nan)])
def test_cells_without_numbers_have_no_shade(values):
    root = parse(board_svg(Diagram(3, shades=Shades(values, label="none"))))
    assert not painted(root, "path", "hexdata-fill-heat")
    assert "none" not in [text for text, *_ in texts(root)]


def test_text_is_escaped():
    hostile = '</title><script>alert(1)</script> & "quoted" \x00\x0b\ud800 ünïcode'
    shades = Shades(np.ones(361), label=hostile)
    svg = board_svg(Diagram(19, title=hostile, caption=[hostile], shades=shades))
    root = parse(svg)
    shown = hostile.replace("\x00", "\ufffd").replace("\x0b", "\ufffd").replace("\ud800", "\ufffd")
    assert root[0].tag == NS + "title"
    assert root[0].text == shown
    assert [text for text, *_ in texts(root)].count(shown) == 2
    assert not list(root.iter(NS + "script"))
    assert svg.encode()


def test_the_svg_is_self_contained_and_deterministic():
    """It has no ids and no external resources, and its CSS applies to its own classes only."""
    diagram = Diagram(13, np.zeros((2, 13, 13)), shades=Shades(np.arange(169)))
    svg = board_svg(diagram)
    assert board_svg(diagram) == svg
    root = parse(svg)
    assert (root.get("role"), root.get("class")) == ("img", "hexdata-svg")
    assert not [e for e in root.iter() if e.get("id") or any("href" in name for name in e.attrib)]
    assert "url(" not in svg
    assert svg.replace('xmlns="http://www.w3.org/2000/svg"', "").find("http") == -1
    style = root.find(NS + "style").text
    rules = re.findall(
        r"([^{}]+)\{[^{}]*\}", style.replace("@media screen and (prefers-color-scheme:dark){", "")
    )
    assert rules
    # Each selector is a single class; otherwise elements repeated by <use> would lack the scheme's colours.
    assert all(re.fullmatch(r"\.hexdata-(fill|stroke)-[a-z-]+", rule) for rule in rules)


def test_a_page_can_set_every_colour():
    style = parse(board_svg(Diagram(3))).find(NS + "style").text
    assert set(re.findall(r"var\(--hexdata-([a-z-]+),#[0-9a-f]{6}\)", style)) == set(PALETTE)
    assert not re.search(r":#", style)


# Contrast, as WCAG 2 defines it.


def luminance(colour: np.ndarray) -> float:
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_sufficient_contrast(scheme):
    colour = {name: rgb(getattr(shade, scheme)) for name, shade in PALETTE.items()}
    for strength in np.linspace(0, 1, 101):
        ground = (1 - strength) * colour["cell"] + strength * colour["heat"]
        text = "on-heat" if strength >= CONTRAST_STRENGTH else "on-cell"
        assert contrast(ground, colour[text]) > 4.45, strength
    for player in ("blue", "red"):
        assert contrast(colour[player], colour["cell"]) > 3
        assert contrast(colour[player], colour["on-stone"]) > 4.5
    for page in ("#ffffff", "#000000"):
        assert contrast(rgb(page), colour["ink"]) > 4.3
        assert min(contrast(rgb(page), colour[player]) for player in ("blue", "red")) > 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: Diagram(3, np.zeros((2, 4, 4))),
        lambda: Diagram(3, last_move=9),
        lambda: Diagram(3, next_move=-1),
        lambda: Diagram(3, numbers={9: 1}),
        lambda: Diagram(3, player=2),
        lambda: Diagram(3, shades=Shades(np.ones(16))),
        lambda: Shades(np.array([-1.0])),
        lambda: Shades(np.array([np.inf])),
        lambda: Shades(np.ones(9), texts=["a"]),
        lambda: Shades(np.ones(9), scale="cubic"),
        lambda: Shades(np.ones(9), top=0),
    ],
)
def test_attributes_that_do_not_fit_the_board_are_refused(make):
    with pytest.raises(ConfigError, match="found"):
        make()


@pytest.mark.parametrize("n", [2, 33])
def test_boards_of_other_sizes_are_refused(n):
    with pytest.raises(FormatError, match="board size"):
        Diagram(n)
