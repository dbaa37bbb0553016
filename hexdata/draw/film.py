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
    draw_differing,
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
    frames: Sequence[Diagram],
    *,
    columns: int | None = None,
    title: str,
    caption: Sequence[str] = (),
    frame: float = _FRAME,
) -> str:
    """Draw boards of the same size in rows, each with its caption below.

    Args:
        frames: The boards; their titles and shades are ignored.
        columns: Number of boards per row. Default None: about as many as there are rows, at most 6.
        title: Accessible description of the drawing.
        caption: Texts above the boards.
        frame: Horizontal distance between boards, in pixels. Default 200.

    Returns:
        One ``<svg>`` element.

    Raises:
        ConfigError: There are no boards, the sizes differ, or ``columns`` is below 1.
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
    side = (frame - _GAP) / box.width
    width = max(frame * min(columns, len(frames)), 2 * _FRAME)
    captions = [fact_lines(diagram.caption, letters_in(frame)) for diagram in frames]
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
    for index, (diagram, lines) in enumerate(zip(frames, captions, strict=True)):
        row, column = divmod(index, columns)
        x, y = column * frame, above + row * height
        parts.append(f'<g transform="translate({figures(x, y)})" data-frame="{index}">')
        parts.extend(_draw_frame(diagram, side, name))
        parts.extend(draw_caption(lines, box.height * side))
        parts.append("</g>")
    return document(width, above + height * ceil(len(frames) / columns), title, parts)


def _draw_frame(frame: Diagram, side: float, grid: str) -> Iterator[str]:
    box = board_box(frame.size, margin=2.3)
    yield f'<g transform="translate({figures(-box.left * side, -box.top * side)})"><use href="#{grid}"/>'
    yield from draw_differing(frame, side)
    yield from draw_stones(frame, side)
    yield "</g>"
