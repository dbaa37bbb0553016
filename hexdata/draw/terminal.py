"""Hex boards as text for terminals, with or without colours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from hexdata.board import BLUE, RED, column_name
from hexdata.draw.diagram import Diagram, fact_lines

__all__ = ["TEXT_WIDTH", "board_text"]


class _Symbols(NamedTuple):
    """The characters of a drawing."""

    empty: str
    blue: str
    red: str
    both: str
    slant: str
    level: str
    between: str


_ASCII: Final = _Symbols(".", "B", "R", "X", "\\", "-", "; ")
_UNICODE: Final = _Symbols("·", "●", "○", "◉", "╲", "─", " · ")
_NEXT: Final = "*"

_BLUE: Final = "94"
_RED: Final = "91"
_BOLD: Final = "1"
_DIM: Final = "2"
"""Codes of ANSI styles. The bright colours are readable on black and on white."""
_PLAYERS: Final = (_BLUE, _RED)
TEXT_WIDTH: Final = 78
"""Default of the maximum line length of the legend and the caption."""
_STYLES: Final = re.compile("\x1b\\[[0-9;]*m")
_FAINTEST: Final = 0.05
"""Lighter shades are not drawn."""


def board_text(
    diagram: Diagram, *, color: bool = False, unicode: bool = True, width: int = TEXT_WIDTH
) -> str:
    """Draw one board as text, with a legend and the caption below.

    Blue is ``●`` and red ``○`` (both ``●`` in colour; ``B`` and ``R`` without Unicode). The last move is in
    brackets, the next one is ``*``, differing cells are in parentheses. Shades are digits on empty cells, in
    tenths of the darkest shade. Each row is shifted by half a cell to the right.

    Args:
        diagram: The drawing; numbers on stones are not shown.
        color: Whether to use ANSI escape sequences. Default False.
        unicode: Whether to use characters beyond ASCII. Default True.
        width: Maximum line length of the legend and the caption. Default 78.

    Returns:
        Lines of text, with a newline at the end.
    """
    symbols = _UNICODE if unicode else _ASCII
    if color and unicode:
        symbols = symbols._replace(red=symbols.blue)
    pen = _Pen(color)
    cells = _cells(diagram, symbols)
    n = diagram.size
    letters = _column_names(n)
    level = pen.draw(symbols.level * (2 * n + 1), _BLUE)
    slant = pen.draw(symbols.slant, _RED)
    lines = [f"     {pen.draw(letters, _DIM)}", f"   {level}"]
    for row in range(n):
        number = pen.draw(f"{row + 1:>2}", _DIM)
        after = pen.draw(str(row + 1), _DIM)
        inside = _draw_row(cells[row * n : row * n + n], diagram, row, pen)
        lines.append(f"{' ' * row}{number} {slant}{inside}{slant} {after}")
    lines += [f"{' ' * (n + 4)}{level}", f"{' ' * (n + 4)}{pen.draw(letters, _DIM)}", ""]
    lines += fact_lines(list(_key(diagram, symbols, pen)), width, symbols.between, length=_visible_length)
    lines += fact_lines(diagram.caption, width, symbols.between)
    return "\n".join(lines) + "\n"


def _visible_length(text: str) -> int:
    return len(_STYLES.sub("", text))


def _column_names(n: int) -> str:
    """Return the names of the columns, two characters each; of ``aa`` and later ones, every second one."""
    names = [column_name(column) for column in range(n)]
    shown = (name if len(name) == 1 or column % 2 == 0 else "" for column, name in enumerate(names))
    return "".join(f"{name:<2}" for name in shown).rstrip()


class _Pen:
    """Applies ANSI styles if colour is enabled."""

    def __init__(self, color: bool) -> None:
        self._color = color

    def draw(self, text: str, *styles: str) -> str:
        """Return the text in these styles."""
        return f"\x1b[{';'.join(styles)}m{text}\x1b[0m" if self._color and styles else text


class _Cell(NamedTuple):
    symbol: str
    styles: tuple[str, ...]


def _cells(diagram: Diagram, symbols: _Symbols) -> list[_Cell]:
    """Return the symbol and styles of each cell."""
    cells = [_Cell(symbols.empty, (_DIM,))] * diagram.size**2
    if diagram.shades is not None:
        for cell, strength in enumerate(diagram.shades.strengths.tolist()):
            if strength >= _FAINTEST:  # false for NaN
                cells[cell] = _Cell(str(min(max(round(10 * strength), 1), 9)), ())
    if diagram.next_move is not None:
        colour = () if diagram.player is None else (_PLAYERS[diagram.player],)
        cells[diagram.next_move] = _Cell(_NEXT, (_BOLD, *colour))
    blue, red = set(diagram.stones(BLUE)), set(diagram.stones(RED))
    for cell in blue | red:
        if cell in blue and cell in red:
            cells[cell] = _Cell(symbols.both, ())
        elif cell in blue:
            cells[cell] = _Cell(symbols.blue, (_BLUE,))
        else:
            cells[cell] = _Cell(symbols.red, (_RED,))
    return cells


def _draw_row(cells: list[_Cell], diagram: Diagram, row: int, pen: _Pen) -> str:
    """Draw the cells of a row, separated by blanks, or by brackets of the last move and differing cells."""
    around = [" "] * (len(cells) + 1)
    columns = [cell % diagram.size for cell in diagram.differing if cell // diagram.size == row]
    for column in columns:
        around[column] = pen.draw("|" if column - 1 in columns else "(", _BOLD)
        around[column + 1] = pen.draw("|" if column + 1 in columns else ")", _BOLD)
    if diagram.last_move is not None and diagram.last_move // diagram.size == row:
        column = diagram.last_move % diagram.size
        around[column : column + 2] = pen.draw("[", _BOLD), pen.draw("]", _BOLD)
    drawn = [pen.draw(cell.symbol, *cell.styles) for cell in cells]
    return "".join(part for pair in zip(around, [*drawn, ""], strict=True) for part in pair)


def _key(diagram: Diagram, symbols: _Symbols, pen: _Pen) -> Iterator[str]:
    """Yield the entries of the legend."""
    yield f"{pen.draw(symbols.blue, _BLUE)} blue, top to bottom"
    yield f"{pen.draw(symbols.red, _RED)} red, left to right"
    if diagram.differing:
        yield "( ) different"
    if diagram.last_move is not None:
        yield "[ ] last move"
    if diagram.next_move is not None:
        yield f"{_NEXT} next move"
    if diagram.shades is not None and diagram.shades.maximum:
        strongest = diagram.shades.format(diagram.shades.maximum)
        yield f"1 to 9: {diagram.shades.label or 'shades'}, in tenths of {strongest}"
