"""Hex boards as text for terminals, with or without colours."""

from __future__ import annotations

import re
from typing import Final

from hexdata.board import BLUE, RED, column_name
from hexdata.draw.diagram import Diagram, fact_lines

_ASCII: Final = (".", ("B", "R", "X"), "\\", "-", "; ")
_UNICODE: Final = ("·", ("●", "○", "◉"), "╲", "─", " · ")
"""Characters of empty cells, of stones (blue, red, both), of slanting and level edges, and between facts."""
_NEXT: Final = "*"
_PLAYERS: Final = ("94", "91")
"""Codes of ANSI styles: bright colours are readable on black and on white."""
_BOLD: Final = "1"
_DIM: Final = "2"
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
    brackets, the next one is ``*``. Shades are digits on empty cells, in tenths of the darkest shade. Each
    row is shifted by half a cell to the right.

    Args:
        diagram: The drawing; numbers on stones are not shown.
        color: Whether to use ANSI escape sequences. Default False.
        unicode: Whether to use characters beyond ASCII. Default True.
        width: Maximum line length of the legend and the caption. Default 78.

    Returns:
        Lines of text, with a newline at the end.
    """
    n = diagram.size
    empty, letters, slanting, level, between = _UNICODE if unicode else _ASCII
    if color and unicode:
        letters = ("●", "●", "◉")

    def styled(text: str, *styles: str) -> str:
        return f"\x1b[{';'.join(styles)}m{text}\x1b[0m" if color and styles else text

    cells = [styled(empty, _DIM)] * n**2
    strengths = diagram.shades.strengths.tolist() if diagram.shades else ()
    for cell, strength in enumerate(strengths):
        if strength >= _FAINTEST:  # false for NaN
            cells[cell] = str(min(max(round(10 * strength), 1), 9))
    if diagram.next_move is not None:
        colours = () if diagram.player is None else (_PLAYERS[diagram.player],)
        cells[diagram.next_move] = styled(_NEXT, _BOLD, *colours)
    blue, red = (set(diagram.stones(player)) for player in (BLUE, RED))
    stones = [styled(letters[player], _PLAYERS[player]) for player in (BLUE, RED)]
    for cell in blue | red:
        both = cell in blue and cell in red
        cells[cell] = letters[2] if both else stones[BLUE if cell in blue else RED]

    # Names of two characters, such as aa, are written above every second column.
    names = [column_name(column) for column in range(n)]
    shown = (name if len(name) == 1 or column % 2 == 0 else "" for column, name in enumerate(names))
    header = styled("".join(f"{name:<2}" for name in shown).rstrip(), _DIM)
    edge, slant = styled(level * (2 * n + 1), _PLAYERS[BLUE]), styled(slanting, _PLAYERS[RED])
    lines = [f"     {header}", f"   {edge}"]
    for row in range(n):
        # Blanks between the cells, or brackets around the last move.
        around = [" "] * (n + 1)
        if diagram.last_move is not None and diagram.last_move // n == row:
            column = diagram.last_move % n
            around[column : column + 2] = styled("[", _BOLD), styled("]", _BOLD)
        drawn = zip(around, [*cells[row * n : row * n + n], ""], strict=True)
        inside = "".join(part for pair in drawn for part in pair)
        before, after = styled(f"{row + 1:>2}", _DIM), styled(str(row + 1), _DIM)
        lines.append(f"{' ' * row}{before} {slant}{inside}{slant} {after}")
    lines += [f"{' ' * (n + 4)}{edge}", f"{' ' * (n + 4)}{header}", ""]
    key = [f"{stones[BLUE]} blue, top to bottom", f"{stones[RED]} red, left to right"]
    if diagram.last_move is not None:
        key.append("[ ] last move")
    if diagram.next_move is not None:
        key.append(f"{_NEXT} next move")
    if diagram.shades is not None and diagram.shades.maximum:
        strongest = diagram.shades.format(diagram.shades.maximum)
        key.append(f"1 to 9: {diagram.shades.label or 'shades'}, in tenths of {strongest}")
    lines += fact_lines(key, width, between, length=lambda text: len(_STYLES.sub("", text)))
    lines += fact_lines(diagram.caption, width, between)
    return "\n".join(lines) + "\n"
