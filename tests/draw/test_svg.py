"""Boards and filmstrips as SVG, parsed and compared with the position."""

from __future__ import annotations

import re
from functools import cached_property
from math import sqrt
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.board import replay
from hexdata.draw import Diagram, Shades, board_svg, film_svg
from hexdata.errors import ConfigError
from tests.pairs import FULL

NS = "{http://www.w3.org/2000/svg}"
SIDE = 16
"""Length of a cell's side in pixels."""
Element = ElementTree.Element


class Drawing:
    """A parsed drawing of one board."""

    def __init__(self, svg: str) -> None:
        self.root = ElementTree.fromstring(svg)

    def painted(self, tag: str, name: str) -> list[Element]:
        """Return the elements of a tag with this class, or in a group with this class."""
        groups = [each for each in self.root.iter() if name in each.get("class", "").split()]
        return [each for group in groups for each in group.iter(NS + tag)]

    @cached_property
    def corners(self) -> np.ndarray:
        """The corners of the drawn cells (n·n, 6, 2)."""
        (path,) = self.painted("path", "hexdata-fill-cell")
        parts = path.get("d", "").removesuffix("Z").split("Z")
        return np.array([[p.split(",") for p in part.removeprefix("M").split("L")] for part in parts], float)

    def places(self, circles: list[Element]) -> list[int]:
        """Return the cells with circles at their centres."""
        points = np.array([(circle.get("cx"), circle.get("cy")) for circle in circles], float).reshape(-1, 2)
        distances = np.linalg.norm(self.corners.mean(axis=1) - points[:, None], axis=-1)
        assert (distances.min(axis=1, initial=0) < 0.02).all() or not circles
        return distances.argmin(axis=1).tolist()

    def texts(self, name: str = "ink") -> list[tuple[str, float, float]]:
        found = self.painted("text", f"hexdata-fill-{name}")
        return [(text.text or "", float(text.get("x", "")), float(text.get("y", ""))) for text in found]


@st.composite
def diagrams(draw: st.DrawFn) -> Diagram:
    n = draw(st.integers(3, 9) | st.just(32))
    board = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 3, (n, n))
    cell, text = st.none() | st.integers(0, n * n - 1), st.text(max_size=30)
    marks = {"last_move": draw(cell), "next_move": draw(cell), "player": draw(st.sampled_from([None, 0, 1]))}
    planes = np.stack([board == 1, board == 2])
    return Diagram(n, planes, **marks, title=draw(text), caption=draw(st.lists(text, max_size=5)))


@given(diagrams())
@settings(max_examples=100 if FULL else 6)
def test_stones_and_marks_are_on_their_cells(diagram):
    drawing = Drawing(board_svg(diagram))
    for name, plane in zip(("blue", "red"), diagram.planes, strict=True):
        found = drawing.places(drawing.painted("circle", f"hexdata-fill-{name}"))
        assert found == plane.ravel().nonzero()[0].tolist()
    for kind, cell in (("last", diagram.last_move), ("next", diagram.next_move)):
        marks = [c for c in drawing.root.iter(NS + "circle") if c.get("data-mark") == kind]
        assert drawing.places(marks) == ([] if cell is None else [cell])


@pytest.mark.parametrize("n", [3, 13, 32])
def test_the_geometry_of_a_board(n):
    """Rows of hexagons are shifted right, and labels are beside them."""
    drawing = Drawing(board_svg(Diagram(n, shades=Shades(np.arange(n * n)))))
    corners = drawing.corners
    assert corners.shape == (n * n, 6, 2)
    assert np.linalg.norm(corners - np.roll(corners, 1, axis=1), axis=-1) == pytest.approx(SIDE, abs=0.02)
    centres = corners.mean(axis=1).reshape(n, n, 2)
    right, down = np.diff(centres, axis=1), np.diff(centres, axis=0)
    assert np.abs(right - [SIDE * sqrt(3), 0]).max() < 0.02
    assert np.abs(down - [SIDE * sqrt(3) / 2, SIDE * 1.5]).max() < 0.02

    written = drawing.texts()
    columns = [chr(97 + i) if i < 26 else f"a{chr(71 + i)}" for i in range(n)]
    for index, letter in enumerate(columns):
        above, below = sorted((y, x) for text, x, y in written if text == letter)
        assert (above[1], below[1]) == pytest.approx((centres[0, index, 0], centres[-1, index, 0]), abs=0.02)
        assert above[0] < centres[0, 0, 1] - SIDE < centres[-1, 0, 1] + SIDE < below[0]
        left, end = sorted((x, y) for text, x, y in written if text == str(index + 1))
        assert left[0] < centres[index, 0, 0] < centres[index, -1, 0] < end[0]
        assert left[1] == end[1] == pytest.approx(centres[index, 0, 1], abs=SIDE / 3)


def test_two_stones_on_one_cell_are_both_visible():
    drawing = Drawing(board_svg(Diagram(3, np.ones((2, 3, 3)))))
    blue, red = (drawing.painted("circle", f"hexdata-fill-{name}") for name in ("blue", "red"))
    assert drawing.places(blue) == drawing.places(red) == [*range(9)]
    assert max(float(c.get("r")) for c in red) < min(float(c.get("r")) for c in blue)


@pytest.mark.parametrize("scale", ["linear", "sqrt"])
def test_shades_grow_with_their_values(scale):
    values = np.array([0, 1, 2, 4, np.nan, 8, 16, 0, 0.5])
    written = ["", "one", "", "", "none", "", "most", "zero", ""]
    drawing = Drawing(board_svg(Diagram(3, shades=Shades(values, "stones & sums", written, scale=scale))))
    drawn = {}
    for path in drawing.painted("path", "hexdata-fill-heat"):
        name, _, number = path.find(NS + "title").text.partition(": ")
        drawn[name] = number, float(path.get("fill-opacity"))
    shares = np.sqrt(values / 16) if scale == "sqrt" else values / 16
    expected = {
        "b1": (1, "1"),
        "c1": (2, "2"),
        "a2": (3, "4"),
        "c2": (5, "8"),
        "a3": (6, "16"),
        "c3": (8, "0.5"),
    }
    assert drawn == {name: (text, pytest.approx(shares[i], abs=6e-4)) for name, (i, text) in expected.items()}
    assert [text for text, *_ in drawing.texts("on-heat")] == ["most"]
    assert [text for text, *_ in drawing.texts("on-cell")] == ["one", "none", "zero"]
    assert [Shades(values).format(number) for number in (0.5, 4, 1234.6)] == ["0.5", "4", "1,235"]
    legend = [text for text, *_ in drawing.texts()][-4:]
    assert legend == ["stones & sums", "0", "4" if scale == "sqrt" else "8", "16"]


def test_a_drawing_is_self_contained_and_deterministic():
    """Texts are escaped, there are no ids and no resources, and the CSS applies to its own classes only."""
    hostile = '</title><script>alert(1)</script> & "quoted" \x00\x0b\ud800 ünïcode'
    diagram = Diagram(19, title=hostile, caption=[hostile], shades=Shades(np.arange(361), label=hostile))
    svg = board_svg(diagram)
    assert board_svg(diagram) == svg
    drawing = Drawing(svg)
    root, shown = drawing.root, re.sub("[\x00\x0b\ud800]", "\ufffd", hostile)
    assert (root[0].tag, root[0].text) == (NS + "title", shown)
    assert [text for text, *_ in drawing.texts()].count(shown) == 2
    assert not list(root.iter(NS + "script"))
    assert (root.get("role"), root.get("class")) == ("img", "hexdata-svg")
    assert not [e for e in root.iter() if e.get("id") or any("href" in name for name in e.attrib)]
    assert not re.search(r"url\(|http", svg.replace('xmlns="http://www.w3.org/2000/svg"', ""))
    style = root.find(NS + "style").text.replace("@media screen and (prefers-color-scheme:dark){", "")
    # Each selector is a single class; otherwise elements repeated by <use> would lack the scheme's colours.
    rules = re.findall(r"([^{}]+)\{[^{}]*\}", style)
    assert {e.get("class", "") for e in root.iter()} - {"", "hexdata-svg"} <= {rule[1:] for rule in rules}
    assert all(re.fullmatch(r"\.hexdata-(fill|stroke)-[a-z-]+", rule) for rule in rules)


# --- filmstrips ---------------------------------------------------------------------------------------


def frames(count: int, n: int = 5) -> list[Diagram]:
    planes = replay(np.arange(n * n), n)
    return [Diagram(n, planes[ply % 26], caption=[f"ply {ply}"]) for ply in range(count)]


@pytest.mark.parametrize(
    ("count", "columns", "wide"), [(1, None, 1), (3, None, 2), (50, None, 6), (5, 2, 2), (2, 9, 2)]
)
def test_frames_have_their_stones_and_captions_and_are_in_rows(count, columns, wide):
    root = ElementTree.fromstring(film_svg(frames(count), columns=columns, title="a game", caption=["all"]))
    assert root.find(NS + "title").text == "a game"
    width, height = map(float, root.get("viewBox", "").split()[2:])
    found = [group for group in root.iter(NS + "g") if group.get("data-frame")]
    assert [int(group.get("data-frame")) for group in found] == [*range(count)]
    points = []
    for ply, group in enumerate(found):
        assert len(list(group.iter(NS + "circle"))) == ply % 26
        assert [text.text for text in group.iter(NS + "text")] == [f"ply {ply}"]
        points.append(tuple(map(float, re.findall(r"-?[\d.]+", group.get("transform", "")))))
    assert points == sorted(set(points), key=lambda point: (point[1], point[0]))
    across, down = (sorted({point[axis] for point in points}) for axis in (0, 1))
    assert len(across) == wide
    assert (np.diff(across) >= 190).all()
    assert across[-1] + 190 <= width
    assert down[-1] + min(np.diff(down), default=0) <= height + 0.1


def test_frames_share_one_board_with_a_unique_id():
    films = [film_svg(frames(4, n), title="") for n in (5, 6)]
    names = []
    for film, cells in zip(films, (25, 36), strict=True):
        root = ElementTree.fromstring(film)
        (board,) = [element for element in root.iter() if element.get("id")]
        (path,) = [e for e in board.iter(NS + "path") if e.get("class") == "hexdata-fill-cell"]
        assert path.get("d", "").count("Z") == cells
        assert [use.get("href") for use in root.iter(NS + "use")] == [f"#{board.get('id')}"] * 4
        names.append(board.get("id"))
    assert len(set(names)) == 2
    assert film_svg(frames(4), title="") == films[0]


def test_what_does_not_fit_the_board_is_refused():
    wrong = [{"planes": np.zeros((2, 4, 4))}, {"last_move": 9}, {"next_move": -1}, {"numbers": {9: 1}}]
    for options in (*wrong, {"player": 2}, {"shades": Shades(np.ones(16))}):
        with pytest.raises(ConfigError):
            Diagram(3, **options)
    numbers = [{"values": np.array([-1.0])}, {"values": np.array([np.inf])}]
    for options in (*numbers, {"texts": ["a"]}, {"scale": "cubic"}, {"top": 0}):
        with pytest.raises(ConfigError):
            Shades(**({"values": np.ones(9)} | options))
    for boards, columns in (([], None), ([*frames(1), *frames(1, 6)], None), (frames(2), 0)):
        with pytest.raises(ConfigError):
            film_svg(boards, columns=columns, title="")
