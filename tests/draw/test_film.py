"""Filmstrips: contents and layout of the frames."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from hexdata.board import replay
from hexdata.draw import Diagram, film_svg
from hexdata.errors import ConfigError

NS = "{http://www.w3.org/2000/svg}"


def frames(count: int, n: int = 5) -> list[Diagram]:
    planes = replay(np.arange(n * n), n)
    return [Diagram(n, planes[ply], caption=[f"ply {ply}"]) for ply in range(count)]


def frames_of(root: ElementTree.Element) -> list[ElementTree.Element]:
    found = [group for group in root.iter(NS + "g") if group.get("data-frame")]
    assert [int(group.get("data-frame", "")) for group in found] == [*range(len(found))]
    return found


def place(group: ElementTree.Element) -> tuple[float, float]:
    x, y = re.findall(r"-?[\d.]+", group.get("transform", ""))
    return float(x), float(y)


def test_every_frame_has_its_stones_and_its_caption():
    root = ElementTree.fromstring(film_svg(frames(26), title="a game", caption=["all of it"]))
    assert root.find(NS + "title").text == "a game"
    shown = frames_of(root)
    assert len(shown) == 26
    for ply, group in enumerate(shown):
        assert len(list(group.iter(NS + "circle"))) == ply
        assert [text.text for text in group.iter(NS + "text")] == [f"ply {ply}"]


@pytest.mark.parametrize(
    ("count", "columns", "wide"), [(1, None, 1), (3, None, 2), (50, None, 6), (5, 2, 2), (2, 9, 2)]
)
def test_frames_are_in_rows_within_the_view(count, columns, wide):
    root = ElementTree.fromstring(
        film_svg(frames(min(count, 26)) * (1 + count // 26), columns=columns, title="")
    )
    width, height = map(float, root.get("viewBox", "").split()[2:])
    points = [place(group) for group in frames_of(root)]
    columns_at = sorted({x for x, _ in points})
    rows_at = sorted({y for _, y in points})
    assert len(columns_at) == wide
    assert len(set(points)) == len(points)
    assert points == sorted(points, key=lambda point: (point[1], point[0]))
    steps = np.diff(columns_at)
    assert (steps >= 190).all()
    assert columns_at[-1] + 190 <= width
    if len(rows_at) > 1:
        assert rows_at[-1] + np.diff(rows_at).min() <= height + 0.1


def test_frames_share_one_board_with_a_unique_id():
    films = [film_svg(frames(4, n), title="") for n in (5, 6)]
    names = []
    for film, cells in zip(films, (25, 36), strict=True):
        root = ElementTree.fromstring(film)
        (board,) = [element for element in root.iter() if element.get("id")]
        (path,) = [e for e in board.iter(NS + "path") if e.get("class") == "hexdata-fill-cell"]
        assert path.get("d", "").count("Z") == cells
        uses = [use.get("href") for use in root.iter(NS + "use")]
        assert uses == [f"#{board.get('id')}"] * 4
        names.append(board.get("id"))
    assert len(set(names)) == 2
    assert film_svg(frames(4), title="") == films[0]


@pytest.mark.parametrize(
    ("boards", "columns"), [([], None), ([*frames(1), *frames(1, 6)], None), (frames(2), 0)]
)
def test_invalid_filmstrips_are_refused(boards, columns):
    with pytest.raises(ConfigError):
        film_svg(boards, columns=columns, title="")
