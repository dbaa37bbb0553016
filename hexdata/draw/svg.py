"""Hex boards as self-contained SVG, for pages, notebooks and files: one board, or several as a filmstrip.

The SVG contains no scripts and no external resources, and its ids depend on the content only. A cell is a
hexagon with a corner at the top and sides of 16 pixels, the centre of a1 is (0, 0), and each row is shifted
by half a cell to the right. A filmstrip scales its boards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import escape
from math import ceil, cos, sin, sqrt
from typing import Final, NamedTuple

import numpy as np

from hexdata.board import BLUE, RED, cell_name, column_name
from hexdata.draw.diagram import Diagram, Shades, fact_lines
from hexdata.errors import ConfigError


class Shade(NamedTuple):
    """Hexadecimal codes of one colour on light and on dark pages."""

    light: str
    dark: str


PALETTE: Final = {
    "cell": Shade("#f1ece1", "#2a2d33"),
    "line": Shade("#bdb4a1", "#565b64"),
    "blue": Shade("#1f62c4", "#5a92ee"),
    "red": Shade("#c52f33", "#ee6660"),
    "rim": Shade("#2b2a28", "#0e1013"),
    "on-stone": Shade("#ffffff", "#0e1013"),
    "heat": Shade("#053c36", "#2cb29e"),
    "on-cell": Shade("#000000", "#ffffff"),
    "on-heat": Shade("#ffffff", "#000000"),
    "ink": Shade("#747881", "#747881"),
}
"""Colours by name. ``ink`` is used beside the board, where the background is the page's own and may differ
from the system's scheme, so both of its codes are readable on white and on black."""
CONTRAST_STRENGTH: Final = 0.64
"""Texts use the colour ``on-heat`` on cells with at least this shade, and ``on-cell`` otherwise."""

_SIDE: Final = 16.0
"""Length of a cell's side in pixels. Other lengths of a board are given in sides where that is said."""
_PITCH: Final = sqrt(3) * _SIDE
"""Distance between the centres of neighbours in a row."""
_CORNERS: Final = _SIDE * np.array(
    [(sin(angle), -cos(angle)) for angle in np.radians([0, 60, 120, 180, 240, 300]).tolist()]
)
"""Corners of a cell relative to its centre, clockwise from the top."""
_EDGE: Final = 0.34
"""Width of an edge, in sides of a cell."""
_MARGIN: Final = 2.3
"""Space around the centres of the cells, in sides of a cell."""
_NARROWEST: Final = 240.0
"""Minimum width of a drawing in pixels, which leaves space for the caption."""
_FONT: Final = 12.0
_LINE: Final = 17.0
"""Font size and line height of captions, in pixels."""
_LETTER: Final = 0.56
"""Estimated width of a letter relative to the font size, rounded up."""
_LEGEND_STEPS: Final = 25
"""Rectangles of the legend's scale: each is 8 pixels wide, which the eye takes for a continuous scale."""
_FRAME: Final = 200.0
"""Horizontal distance between the boards of a filmstrip, in pixels."""
_GAP: Final = 12.0
"""Space beside and below the boards of a filmstrip, in pixels."""
_MAX_COLUMNS: Final = 6
"""Maximum number of boards in a row: 1,200 pixels, the width of a page."""
_PLAYERS: Final = ((BLUE, "blue"), (RED, "red"))
_GRID: Final = "hexdata-grid"
"""Beginning of the id of an empty board, which ends with its size."""
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
    left, top, width, below = _box(diagram.size)
    width = max(width, _NARROWEST)
    board = [*_grid(diagram.size), *_draw_marks(diagram)]
    parts = [f'<g transform="translate({_figures(-left, -top)})">', *board, "</g>"]
    if diagram.shades and diagram.shades.maximum:
        parts += _draw_legend(diagram.shades, below + 4)
        below += 3 * _LINE
    lines = fact_lines(diagram.caption, _letters_in(width))
    parts += _draw_caption(lines, below)
    below += _LINE * len(lines) + (8 if lines else 0)
    return _document(width, below, diagram.title, parts)


def film_svg(
    frames: Sequence[Diagram],
    *,
    columns: int | None = None,
    title: str,
    caption: Sequence[str] = (),
) -> str:
    """Draw boards of the same size in rows, each with its caption below.

    Args:
        frames: The boards; their titles are ignored.
        columns: Number of boards per row. Default None: about as many as there are rows, at most 6.
        title: Accessible description of the drawing.
        caption: Texts above the boards.

    Returns:
        One ``<svg>`` element.

    Raises:
        ConfigError: There are no boards, the sizes differ, or ``columns`` is below 1.
    """
    sizes = {diagram.size for diagram in frames}
    if len(sizes) != 1:
        raise ConfigError(f"a filmstrip needs boards of one size, not {sorted(sizes)}")
    if columns is None:
        columns = min(_MAX_COLUMNS, ceil(sqrt(len(frames))))
    if columns < 1:
        raise ConfigError(f"columns must be at least 1, not {columns}")
    n = sizes.pop()
    left, top, wide, high = _box(n)
    scale = (_FRAME - _GAP) / wide
    high *= scale
    captions = [fact_lines(diagram.caption, _letters_in(_FRAME)) for diagram in frames]
    height = high + _LINE * max(map(len, captions)) + _GAP
    width = _FRAME * max(min(columns, len(frames)), 2)
    heading = fact_lines(caption, _letters_in(width))
    above = _LINE * len(heading) + (_GAP if heading else 0)

    # The empty board is drawn once and repeated.
    parts = [*_draw_caption(heading, 0), f'<defs><g id="{_GRID}-{n}">', *_grid(n), "</g></defs>"]
    for index, (diagram, lines) in enumerate(zip(frames, captions, strict=True)):
        row, column = divmod(index, columns)
        place, origin = _figures(column * _FRAME, above + row * height), _figures(-left * scale, -top * scale)
        parts += [
            f'<g transform="translate({place})" data-frame="{index}">',
            f'<g transform="translate({origin}) scale({scale:.5f})"><use href="#{_GRID}-{n}"/>',
            *_draw_marks(diagram),
            "</g>",
            *_draw_caption(lines, high),
            "</g>",
        ]
    return _document(width, above + height * ceil(len(frames) / columns), title, parts)


def page_svg(diagram: Diagram) -> str:
    """Draw one board, without texts below, for a page that contains ``STYLE`` and :func:`page_grid`."""
    box = _figures(*_box(diagram.size)).replace(",", " ")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="board" viewBox="{box}" role="img">'
    board = [f'<use href="#{_GRID}-{diagram.size}"/>', *_draw_marks(diagram)]
    return "".join([head, f"<title>{_plain(diagram.title)}</title>", *board, "</svg>"])


def page_grid(n: int) -> str:
    """Return the empty board that the boards of a page repeat."""
    board = f'<g id="{_GRID}-{n}">{"".join(_grid(n))}</g>'
    return f'<svg xmlns="http://www.w3.org/2000/svg"><defs>{board}</defs></svg>'


# --- elements -----------------------------------------------------------------------------------------


def _rules(scheme: int) -> str:
    rules = []
    for name, shade in PALETTE.items():
        value = f"var(--hexdata-{name},{shade[scheme]})"
        stroke = f";stroke:var(--hexdata-line,{PALETTE['line'][scheme]})" if name == "cell" else ""
        rules.append(f".hexdata-fill-{name}{{fill:{value}{stroke}}}")
        if name in {"blue", "red", "ink", "rim", "on-stone"}:
            rules.append(f".hexdata-stroke-{name}{{stroke:{value}}}")
    return "".join(rules)


STYLE: Final = f"{_rules(0)}@media screen and (prefers-color-scheme:dark){{{_rules(1)}}}"
"""CSS of all drawings, the same so that a page can contain several. Each selector is a single class, because
browsers do not match ancestors for elements repeated by <use>."""


def _paint(fill: str | None = None, stroke: str | None = None) -> str:
    """Return SVG attributes that paint an element in colours of the palette.

    The plain attributes are a fallback for viewers without CSS variables, in the colours of light pages.
    """
    classes = [f"hexdata-{kind}-{name}" for kind, name in (("fill", fill), ("stroke", stroke)) if name]
    attributes = f'class="{" ".join(classes)}" fill="{PALETTE[fill].light if fill else "none"}"'
    line = "line" if fill == "cell" else stroke
    return f'{attributes} stroke="{PALETTE[line].light}"' if line else attributes


def _document(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """Return the ``<svg>`` element that contains ``parts``, with its size in pixels."""
    wide, high = _figures(width), _figures(height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="hexdata-svg" role="img" viewBox="0 0 {wide} {high}" '
        f'width="{wide}" height="{high}" style="max-width:100%;height:auto" '
        'font-family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif">'
    )
    return "\n".join([head, f"<title>{_plain(title)}</title>\n<style>{STYLE}</style>", *parts, "</svg>\n"])


def _plain(text: str) -> str:
    """Escape text for an element or an attribute; replace characters that XML cannot represent."""
    return escape(_UNPRINTABLE.sub("\ufffd", text))


def _figures(*numbers: float) -> str:
    """Format coordinates to a hundredth of a pixel. Adding 0.0 turns -0.0 into 0.0."""
    return ",".join(f"{round(number, 2) + 0.0:.2f}".rstrip("0").rstrip(".") for number in numbers)


def _text(middle: tuple[float, float], text: str, height: float) -> str:
    """Draw text centred at ``middle``, with a font size of ``height`` sides of a cell."""
    size = height * _SIDE
    # 0.36 of the font size is half the height of a capital, so the baseline is that far below the middle.
    x, y = _figures(middle[0]), _figures(middle[1] + 0.36 * size)
    return f'<text x="{x}" y="{y}" font-size="{_figures(size)}">{_plain(text)}</text>'


def _letters_in(width: float) -> int:
    """Return the number of letters of a caption that fit into a width in pixels."""
    return int((width - 16) / (_LETTER * _FONT))


def _draw_caption(lines: Sequence[str], top: float) -> Iterator[str]:
    """Draw lines of text below each other."""
    if lines:
        yield f'<g {_paint("ink")} font-size="{_figures(_FONT)}">'
        for number, line in enumerate(lines):
            yield f'<text x="8" y="{_figures(top + 12 + number * _LINE)}">{_plain(line)}</text>'
        yield "</g>"


# --- the board ----------------------------------------------------------------------------------------


def _centre(row: float, column: float) -> tuple[float, float]:
    """Return the centre of a cell, which may be outside the board."""
    return _PITCH * (column + row / 2), 1.5 * _SIDE * row


def _box(n: int) -> tuple[float, float, float, float]:
    """Return left, top, width and height of a board and its labels."""
    right, bottom = _centre(n - 1, n - 1)
    beside, above = _MARGIN * _PITCH / 2 + 0.5 * _SIDE, _MARGIN * _SIDE
    return -beside, -above, right + 2 * beside, bottom + 2 * above


def _hexagons(cells: Iterable[int], n: int) -> str:
    """Return the path of some cells."""
    corners = (_CORNERS + _centre(*divmod(cell, n)) for cell in cells)
    return "".join(f"M{'L'.join(_figures(*point) for point in cell.tolist())}Z" for cell in corners)


@cache
def _grid(n: int) -> tuple[str, ...]:
    """Draw an empty board: its coloured edges, its cells, and their coordinates."""
    last, cells = n - 1, range(n)
    # The outline, clockwise, each edge as (row, column, corner). Its inner half is below the cells. The side
    # of an obtuse corner that belongs to two edges is divided in half.
    outline = (
        ("blue", [(0, column, corner) for column in cells for corner in (5, 0)]),
        ("red", [(row, last, corner) for row in cells for corner in (1, 2)]),
        ("blue", [(last, column, corner) for column in reversed(cells) for corner in (2, 3)]),
        ("red", [(row, 0, corner) for row in reversed(cells) for corner in (4, 5)]),
    )
    edges = [
        np.array([_CORNERS[c] + _centre(row, column) for row, column, c in points]) for _, points in outline
    ]
    for before, after in ((0, 1), (2, 3)):
        middle = (edges[before][-1] + edges[after][0]) / 2
        edges[before] = np.vstack([edges[before], middle])
        edges[after] = np.vstack([middle, edges[after]])
    parts, width = [], _figures(2 * _EDGE * _SIDE)
    for (player, _), points in zip(outline, edges, strict=True):
        corners = " ".join(_figures(*point) for point in points.tolist())
        parts.append(f'<polyline {_paint(stroke=player)} stroke-width="{width}" points="{corners}"/>')
    path, thin = _hexagons(range(n * n), n), _figures(_SIDE / 16)
    parts.append(f'<path {_paint("cell")} stroke-width="{thin}" d="{path}"/>')
    parts.append(f'<g {_paint("ink")} text-anchor="middle">')
    for index in cells:
        # A letter is drawn vertically above its first cell; along the slant it would be above a gap.
        (above, top), (below, bottom) = _centre(0, index), _centre(last, index)
        name, beyond = column_name(index), 1.74 * _SIDE
        labels = [((above, top - beyond), name), ((below, bottom + beyond), name)]
        labels += [(_centre(index, column), str(index + 1)) for column in (-1, n)]
        parts += [_text(middle, text, 0.7) for middle, text in labels]
    return (*parts, "</g>")


def _draw_marks(diagram: Diagram) -> Iterator[str]:
    """Draw shades, stones, numbers, and the marks of the last and the next move.

    If both players have a stone on one cell, which is illegal, both stones are visible.
    """
    n = diagram.size

    def circle(cell: int, radius: float, paint: str) -> str:
        x, y = _centre(*divmod(cell, n))
        place = f'cx="{_figures(x)}" cy="{_figures(y)}" r="{_figures(radius * _SIDE)}"'
        return f"<circle {place} {paint}/>".replace(" />", "/>")

    if diagram.shades:
        yield from _draw_shades(diagram.shades, n)
    blue = set(diagram.stones(BLUE))
    for player, name in _PLAYERS:
        if cells := diagram.stones(player):
            yield f'<g {_paint(name, stroke="rim")} stroke-width="{_figures(_SIDE / 20)}">'
            yield from (circle(c, 0.36 if player == RED and c in blue else 0.72, "") for c in cells)
            yield "</g>"
    if diagram.numbers:
        yield f'<g {_paint("on-stone")} font-weight="600" text-anchor="middle">'
        for cell, number in sorted(diagram.numbers.items()):
            yield _text(_centre(*divmod(cell, n)), str(number), 0.66 if number < 100 else 0.54)
        yield "</g>"
    if (last := diagram.last_move) is not None:
        ring = f'{_paint(stroke="on-stone")} stroke-width="{_figures(0.09 * _SIDE)}"'
        radius, paint = (0.62, ring) if last in diagram.numbers else (0.25, _paint("on-stone"))
        yield circle(last, radius, f'{paint} data-mark="last"')  # a dot would cover the number
    if diagram.next_move is not None:
        name = "ink" if diagram.player is None else dict(_PLAYERS)[diagram.player]
        # Six dashes with their gaps are the circumference of a circle of radius 0.6.
        dashes = f'stroke-dasharray="{_figures(0.36 * _SIDE, 0.2683 * _SIDE)}" data-mark="next"'
        stroke = f'{_paint(stroke=name)} stroke-width="{_figures(0.2 * _SIDE)}"'
        yield circle(diagram.next_move, 0.6, f"{stroke} {dashes}")


# --- shades -------------------------------------------------------------------------------------------


def _draw_shades(shades: Shades, n: int) -> Iterator[str]:
    """Draw shaded cells and their texts; the tooltip of a cell contains its name and number."""
    texts: dict[str, list[str]] = {"on-cell": [], "on-heat": []}
    written = shades.texts or [""] * (n * n)
    yield f"<g {_paint('heat')}>"
    for cell, (strength, text) in enumerate(zip(shades.strengths.tolist(), written, strict=True)):
        name = cell_name(cell, n)
        if strength > 0:
            title = f"<title>{name}: {shades.format(float(shades.values[cell]))}</title>"
            path = f'fill-opacity="{strength:.3f}" d="{_hexagons([cell], n)}" data-cell="{name}"'
            yield f"<path {path}>{title}</path>"
        if text:
            # A longer text is smaller, so that it fits into a cell, which is 1.73 sides wide.
            height = min(0.68, 1.5 / (_LETTER * len(text)))
            part = "on-heat" if strength >= CONTRAST_STRENGTH else "on-cell"
            texts[part].append(_text(_centre(*divmod(cell, n)), text, height))
    yield "</g>"
    for part, drawn in texts.items():
        if drawn:
            # The mouse acts on the cell below a text, which has the tooltip.
            yield f'<g {_paint(part)} text-anchor="middle" pointer-events="none">{"".join(drawn)}</g>'


def _draw_legend(shades: Shades, top: float) -> Iterator[str]:
    """Draw the legend: the scale of shades with their numbers, and the label above."""
    wide, high, left, y = 200.0, 9.0, 8.0, _figures(top + 14)
    step = wide / _LEGEND_STEPS
    yield from _draw_caption([shades.label], top - 4)
    yield f'<rect {_paint("cell")} x="{left:g}" y="{y}" width="{wide:g}" height="{high:g}"/>'
    yield f"<g {_paint('heat')}>"
    for index in range(_LEGEND_STEPS):
        place = f'x="{_figures(left + index * step)}" y="{y}" width="{_figures(step)}" height="{high:g}"'
        yield f'<rect {place} fill-opacity="{index / (_LEGEND_STEPS - 1):.3f}"/>'
    yield "</g>"
    yield f'<g {_paint("ink")} font-size="{_figures(_FONT - 2)}">'
    for strength, anchor in (0.0, "start"), (0.5, "middle"), (1.0, "end"):
        place = f'x="{_figures(left + strength * wide)}" y="{_figures(top + 34)}" text-anchor="{anchor}"'
        yield f"<text {place}>{_plain(shades.format(shades.value_at(strength)))}</text>"
    yield "</g>"
