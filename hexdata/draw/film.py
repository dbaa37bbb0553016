"""Filmstrips: several positions as small boards in one SVG."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import ceil, sqrt
from typing import Final

from hexdata.draw.diagram import Diagram, fact_lines
from hexdata.draw.svg import (
    LINE,
    board_box,
    document,
    draw_caption,
    draw_cells,
    draw_coordinates,
    draw_edges,
    draw_stones,
    figures,
    letters_in,
)
from hexdata.errors import ConfigError

__all__ = ["film_svg"]

_FRAME: Final = 200.0
"""Horizontal distance between boards, in pixels."""
_GAP: Final = 12.0
_MAX_COLUMNS: Final = 6


def film_svg(
    frames: Sequence[Diagram], *, columns: int | None = None, title: str, caption: Sequence[str] = ()
) -> str:
    """Draw boards of the same size in rows, each with its caption below.

    Args:
        frames: the boards; their titles and shades are ignored.
        columns: number of boards per row. Default None: about as many as there are rows, at most 6.
        title: accessible description of the drawing.
        caption: texts above the boards.

    Returns:
        One ``<svg>`` element.

    Raises:
        ConfigError: there are no boards, the sizes differ, or ``columns`` is below 1.
    """
    sizes = {frame.size for frame in frames}
    if len(sizes) != 1:
        raise ConfigError("a filmstrip needs boards of one size", found=f"boards of sizes {sorted(sizes)}")
    if columns is None:
        columns = min(_MAX_COLUMNS, ceil(sqrt(len(frames))))
    if columns < 1:
        raise ConfigError("columns must be at least 1", found=columns)
    n = sizes.pop()
    box = board_box(n, margin=2.3)
    side = (_FRAME - _GAP) / box.width
    width = max(_FRAME * min(columns, len(frames)), 2 * _FRAME)
    captions = [fact_lines(frame.caption, letters_in(_FRAME)) for frame in frames]
    height = box.height * side + LINE * max(map(len, captions)) + _GAP
    heading = fact_lines(caption, letters_in(width))
    above = LINE * len(heading) + (_GAP if heading else 0)

    name = f"hexdata-{hashlib.sha256(repr((n, side)).encode()).hexdigest()[:12]}"
    parts = [
        *draw_caption(heading, 0),
        f'<defs><g id="{name}">',
        *draw_edges(n, side),
        *draw_cells(n, side),
        *draw_coordinates(n, side),
        "</g></defs>",
    ]
    for index, (frame, lines) in enumerate(zip(frames, captions, strict=True)):
        row, column = divmod(index, columns)
        x, y = column * _FRAME, above + row * height
        parts.append(f'<g transform="translate({figures(x, y)})" data-frame="{index}">')
        parts.extend(_draw_frame(frame, side, name))
        parts.extend(draw_caption(lines, box.height * side))
        parts.append("</g>")
    return document(width, above + height * ceil(len(frames) / columns), title, parts)


def _draw_frame(frame: Diagram, side: float, grid: str) -> Iterator[str]:
    box = board_box(frame.size, margin=2.3)
    yield f'<g transform="translate({figures(-box.left * side, -box.top * side)})"><use href="#{grid}"/>'
    yield from draw_stones(frame, side)
    yield "</g>"
