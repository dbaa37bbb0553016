"""Hex boards as self-contained SVG, for pages, notebooks and files.

The SVG contains no scripts and no external resources, and its ids depend on the content only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from hexdata.board import BLUE, RED, cell_name, column_name
from hexdata.draw.diagram import Diagram, Shades, fact_lines
from hexdata.draw.geometry import CORNERS, PITCH, Point, centre, edge_bands
from hexdata.draw.palette import CONTRAST_STRENGTH, STYLE, paint

__all__ = [
    "LINE",
    "Box",
    "board_box",
    "board_svg",
    "document",
    "draw_caption",
    "draw_cells",
    "draw_coordinates",
    "draw_differing",
    "draw_edges",
    "draw_stones",
    "figures",
    "letters_in",
    "plain",
]

_SIDE: Final = 16.0
"""Length of a cell's side in pixels."""
_EDGE: Final = 0.34
"""Width of an edge, in sides of a cell."""
_STONE: Final = 0.72
"""Radius of a stone, in sides of a cell."""
_NARROWEST: Final = 240.0
"""Minimum width of a drawing in pixels, which leaves space for the caption."""
_FONT: Final = 12.0
LINE: Final = 17.0
"""Font size and line height of captions, in pixels."""
_LETTER: Final = 0.56
"""Estimated width of a letter relative to the font size, rounded up."""
_LETTERS_AWAY: Final = 1.74
"""Distance of a column letter from the centre of the next cell, in sides of a cell."""
_LEGEND_STEPS: Final = 25
_DIFFERING_STRENGTH: Final = 0.55
"""Opacity of the shade of differing cells."""
_PLAYERS: Final = ((BLUE, "blue"), (RED, "red"))
_UNPRINTABLE: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot represent."""


def board_svg(diagram: Diagram) -> str:
    """Draw one board.

    Blue's edges are top and bottom, red's left and right. The last move is marked on its stone, the next move
    with a dashed ring. A page can set the colours with CSS variables.

    Args:
        diagram: The drawing.

    Returns:
        One ``<svg>`` element with a title, for use in HTML or as a file.
    """
    n = diagram.size
    box = board_box(n, margin=2.3)
    width = max(box.width * _SIDE, _NARROWEST)
    below = box.height * _SIDE
    parts = [
        f'<g transform="translate({figures(-box.left * _SIDE, -box.top * _SIDE)})">',
        *draw_edges(n, _SIDE),
        *draw_cells(n, _SIDE),
        *draw_coordinates(n, _SIDE),
        *(_draw_shades(diagram.shades, n) if diagram.shades else ()),
        *draw_differing(diagram, _SIDE),
        *draw_stones(diagram, _SIDE),
        "</g>",
    ]
    if diagram.shades and diagram.shades.maximum:
        parts.extend(_draw_legend(diagram.shades, below + 4))
        below += 3 * LINE
    lines = fact_lines(diagram.caption, letters_in(width))
    parts.extend(draw_caption(lines, below))
    below += LINE * len(lines) + (8 if lines else 0)
    return document(width, below, diagram.title, parts)


@dataclass(frozen=True)
class Box:
    """Bounding box of a drawing, in sides of a cell; the centre of a1 is (0, 0)."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        """Width in sides of a cell."""
        return self.right - self.left

    @property
    def height(self) -> float:
        """Height in sides of a cell."""
        return self.bottom - self.top


def board_box(n: int, margin: float) -> Box:
    """Return the box of a board of size n with ``margin`` around the centres of its cells."""
    right, bottom = centre(n - 1, n - 1)
    return Box(-margin * PITCH / 2 - 0.5, -margin, right + margin * PITCH / 2 + 0.5, bottom + margin)


def document(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Return the ``<svg>`` element that contains ``parts``, with its size in pixels."""
    size = figures(width, height, separator=" ")
    wide, high = size.split()
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="hexdata-svg" role="img" viewBox="0 0 {size}" '
            f'width="{wide}" height="{high}" style="max-width:100%;height:auto" '
            'font-family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif">',
            f"<title>{plain(title)}</title>",
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


def plain(text: str) -> str:
    """Escape text for an element or an attribute; replace characters that XML cannot represent."""
    return escape(_UNPRINTABLE.sub("\ufffd", text))


def figures(*numbers: float, separator: str = ",") -> str:
    """Format coordinates to a hundredth of a pixel."""
    return separator.join(
        f"{round(number, 2) + 0.0:.2f}".rstrip("0").rstrip(".")  # adding 0.0 turns -0.0 into 0.0
        for number in numbers
    )


# --- the board ----------------------------------------------------------------------------------------


def draw_edges(n: int, side: float) -> Iterator[str]:
    """Draw the four coloured edges."""
    bands = edge_bands(n, _EDGE)
    for player, points in (
        ("blue", bands.top),
        ("red", bands.right),
        ("blue", bands.bottom),
        ("red", bands.left),
    ):
        corners = " ".join(figures(*point) for point in (points * side).tolist())
        yield f'<polygon {paint(player)} points="{corners}"/>'


def draw_cells(n: int, side: float) -> Iterator[str]:
    """Draw all cells as one path."""
    hexagons = "".join(_hexagon(centre(row, column), side) for row in range(n) for column in range(n))
    yield f'<path {paint("cell")} stroke-width="{figures(side / 16)}" d="{hexagons}"/>'


def _hexagon(middle: Point, side: float) -> str:
    corners = (np.add(middle, CORNERS) * side).tolist()
    return f"M{'L'.join(figures(*corner) for corner in corners)}Z"


def draw_coordinates(n: int, side: float) -> Iterator[str]:
    """Draw the column letters above and below the board and the row numbers on both sides.

    A letter is drawn vertically above its first cell; along the slant it would be above the gap between
    cells.
    """
    labels = []
    for column in range(n):
        letter = column_name(column)
        (above, top), (below, bottom) = centre(0, column), centre(n - 1, column)
        labels += [((above, top - _LETTERS_AWAY), letter), ((below, bottom + _LETTERS_AWAY), letter)]
    for row in range(n):
        labels += [(centre(row, -1), str(row + 1)), (centre(row, n), str(row + 1))]
    yield f'<g {paint("ink")} text-anchor="middle">'
    for middle, text in labels:
        yield _text(middle, side, text, 0.7)
    yield "</g>"


def _text(middle: Point, side: float, text: str, height: float) -> str:
    """Draw text centred at ``middle``, with a font size of ``height`` sides of a cell."""
    x, y = middle
    return (
        f'<text x="{figures(x * side)}" y="{figures((y + 0.36 * height) * side)}" '
        f'font-size="{figures(height * side)}">{plain(text)}</text>'
    )


def draw_differing(diagram: Diagram, side: float) -> Iterator[str]:
    """Draw the differing cells with a shade, which is also visible around stones."""
    if diagram.differing:
        n = diagram.size
        hexagons = "".join(_hexagon(centre(*divmod(cell, n)), side) for cell in sorted(diagram.differing))
        opacity = f'fill-opacity="{_DIFFERING_STRENGTH}"'
        yield f'<path {paint("heat")} {opacity} d="{hexagons}" data-mark="different"/>'


def draw_stones(diagram: Diagram, side: float) -> Iterator[str]:
    """Draw stones, numbers, and the marks of the last and the next move.

    If both players have a stone on one cell, which is illegal, both stones are visible.
    """
    n = diagram.size
    blue = set(diagram.stones(BLUE))
    for player, name in _PLAYERS:
        cells = diagram.stones(player)
        if not cells:
            continue
        yield f'<g {paint(name, stroke="rim")} stroke-width="{figures(side / 20)}">'
        for cell in cells:
            radius = _STONE * (0.5 if player == RED and cell in blue else 1.0)
            yield f"<circle {_circle(cell, n, side, radius)}/>"
        yield "</g>"
    if diagram.numbers:
        yield f'<g {paint("on-stone")} font-weight="600" text-anchor="middle">'
        for cell, number in sorted(diagram.numbers.items()):
            yield _text(centre(*divmod(cell, n)), side, str(number), 0.66 if number < 100 else 0.54)
        yield "</g>"
    if diagram.last_move is not None:
        yield _mark_last(diagram.last_move, n, side, ring=diagram.last_move in diagram.numbers)
    if diagram.next_move is not None:
        name = "ink" if diagram.player is None else dict(_PLAYERS)[diagram.player]
        yield (
            f"<circle {_circle(diagram.next_move, n, side, 0.6)} {paint(stroke=name)} "
            f'stroke-width="{figures(0.2 * side)}" stroke-dasharray="{figures(0.36 * side, 0.2683 * side)}" '
            'data-mark="next"/>'
        )


def _mark_last(cell: int, n: int, side: float, *, ring: bool) -> str:
    """Draw the mark of the last move: a dot, or a ring if the stone has a number."""
    if not ring:
        return f'<circle {_circle(cell, n, side, 0.25)} {paint("on-stone")} data-mark="last"/>'
    return (
        f"<circle {_circle(cell, n, side, 0.62)} {paint(stroke='on-stone')} "
        f'stroke-width="{figures(0.09 * side)}" data-mark="last"/>'
    )


def _circle(cell: int, n: int, side: float, radius: float) -> str:
    x, y = centre(*divmod(cell, n))
    return f'cx="{figures(x * side)}" cy="{figures(y * side)}" r="{figures(radius * side)}"'


# --- shades -------------------------------------------------------------------------------------------


def _draw_shades(shades: Shades, n: int) -> Iterator[str]:
    """Draw shaded cells and their texts; the tooltip of a cell contains its name and number."""
    strengths = shades.strengths.tolist()
    yield f"<g {paint('heat')}>"
    for cell, strength in enumerate(strengths):
        if strength > 0:
            name = f"{cell_name(cell, n)}: {shades.format(float(shades.values[cell]))}"
            yield (
                f'<path fill-opacity="{strength:.3f}" d="{_hexagon(centre(*divmod(cell, n)), _SIDE)}">'
                f"<title>{name}</title></path>"
            )
    yield "</g>"
    for part, strong in ("on-cell", False), ("on-heat", True):
        cells = [
            (cell, text)
            for cell, text in enumerate(shades.texts or ())
            if text and (strengths[cell] >= CONTRAST_STRENGTH) == strong
        ]
        if cells:
            yield f'<g {paint(part)} text-anchor="middle">'
            for cell, text in cells:
                height = min(0.68, 1.5 / (_LETTER * len(text)))
                yield _text(centre(*divmod(cell, n)), _SIDE, text, height)
            yield "</g>"


def _draw_legend(shades: Shades, top: float) -> Iterator[str]:
    """Draw the legend: the scale of shades with their numbers, and the label above."""
    wide, high = 200.0, 9.0
    left, step = 8.0, wide / _LEGEND_STEPS
    y = top + 14
    yield from draw_caption([shades.label], top - 4)
    yield f'<rect {paint("cell")} x="{left:g}" y="{figures(y)}" width="{wide:g}" height="{high:g}"/>'
    yield f"<g {paint('heat')}>"
    for index in range(_LEGEND_STEPS):
        x = left + index * step
        yield (
            f'<rect x="{figures(x)}" y="{figures(y)}" width="{figures(step)}" height="{high:g}" '
            f'fill-opacity="{index / (_LEGEND_STEPS - 1):.3f}"/>'
        )
    yield "</g>"
    yield f'<g {paint("ink")} font-size="{figures(_FONT - 2)}">'
    for strength, anchor in (0.0, "start"), (0.5, "middle"), (1.0, "end"):
        yield (
            f'<text x="{figures(left + strength * wide)}" y="{figures(y + high + 11)}" '
            f'text-anchor="{anchor}">{plain(shades.format(shades.value_at(strength)))}</text>'
        )
    yield "</g>"


# --- captions -----------------------------------------------------------------------------------------


def letters_in(width: float) -> int:
    """Return the number of letters of a caption that fit into a width in pixels."""
    return int((width - 16) / (_LETTER * _FONT))


def draw_caption(lines: Sequence[str], top: float) -> Iterator[str]:
    """Draw lines of text below each other."""
    if lines:
        yield f'<g {paint("ink")} font-size="{figures(_FONT)}">'
        for number, line in enumerate(lines):
            yield f'<text x="8" y="{figures(top + 12 + number * LINE)}">{plain(line)}</text>'
        yield "</g>"
