"""Boards as text, compared with expected drawings."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.draw import Diagram, Shades, board_text

ANSI = re.compile(r"\x1b\[([0-9;]*)m")
EXPECTED = """\
     a b c
   ───────
 1 ╲ ○ · ● ╲ 1
  2 ╲ · ●[○]╲ 2
   3 ╲ * · · ╲ 3
       ───────
       a b c

● blue, top to bottom · ○ red, left to right · [ ] last move · * next move
game 7 · ply 4 of 9
"""
ASCII = """\
     a b c
   -------
 1 \\ R . B \\ 1
  2 \\ . B[R]\\ 2
   3 \\ * . . \\ 3
       -------
       a b c

B blue, top to bottom; R red, left to right; [ ] last move; * next move
game 7; ply 4 of 9
"""


@pytest.mark.parametrize(("unicode", "expected"), [(True, EXPECTED), (False, ASCII)])
def test_a_board_is_drawn_as_by_hand(unicode, expected):
    """Blue on b2 and c1, red on a1 and, last, c2; blue plays a3. Colour changes the symbol of red."""
    planes = np.zeros((2, 3, 3))
    planes[0, 1, 1] = planes[0, 0, 2] = planes[1, 0, 0] = planes[1, 1, 2] = 1
    diagram = Diagram(3, planes, last_move=5, next_move=6, player=0, caption=["game 7", "ply 4 of 9"])
    assert board_text(diagram, unicode=unicode) == expected
    colored = board_text(diagram, color=True, unicode=unicode)
    assert ANSI.search(colored)
    assert ANSI.sub("", colored) == expected.replace("○", "●")


@st.composite
def boards(draw: st.DrawFn) -> tuple[Diagram, list[int]]:
    n = draw(st.sampled_from([*range(3, 14), 32]))
    board = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 4, (n, n))
    cell = st.none() | st.integers(0, n * n - 1)
    planes = np.stack([board % 2 == 1, board >= 2])
    return Diagram(n, planes, last_move=draw(cell), next_move=draw(cell)), board.ravel().tolist()


@given(boards())
def test_a_cell_has_two_columns_and_rows_are_shifted_by_one(drawn):
    diagram, kinds = drawn
    n, lines = diagram.size, board_text(diagram).splitlines()
    for cell, kind in enumerate(kinds):
        row, column = divmod(cell, n)
        line, place = lines[2 + row], 5 + row + 2 * column
        assert line[place] == ("*" if kind == 0 and cell == diagram.next_move else "·●○◉"[kind])
        assert (line[place - 1] == "[") == (line[place + 1] == "]") == (cell == diagram.last_move)
        name = chr(97 + column) if column < 26 else f"a{chr(71 + column)}"
        if column < 26 or column % 2 == 0:
            assert row or lines[0][place:].startswith(name)
            assert row < n - 1 or lines[n + 3][place:].startswith(name)
    for row, line in enumerate(lines[2 : n + 2]):
        assert re.match(rf" *{row + 1} ╲", line)
        assert line.endswith(f"╲ {row + 1}")
        assert line.index("╲") == row + 3


def test_shades_are_tenths_of_the_strongest():
    values = np.array([0, 1, 2, 4, np.nan, 40, 39, 38, 20])
    planes = np.zeros((2, 3, 3))
    planes[0, 2, 2] = 1
    lines = board_text(Diagram(3, planes, shades=Shades(values, label="policy"))).splitlines()
    drawn = [line.split("╲")[1].split() for line in lines[2:5]]
    assert drawn == [["·", "·", "1"], ["1", "·", "9"], ["9", "9", "●"]]
    assert lines[8].endswith("1 to 9: policy, in tenths of 40")


def test_the_legend_fits_the_width():
    shades = Shades(np.ones(9), label="policy", share=True)
    diagram = Diagram(3, last_move=0, next_move=6, player=0, shades=shades)
    for color, unicode in ((False, False), (False, True), (True, False), (True, True)):
        text = ANSI.sub("", board_text(diagram, color=color, unicode=unicode, width=56))
        lines = text.splitlines()[8:]
        assert max(map(len, lines)) <= 56
        assert lines[-1] == "1 to 9: policy, in tenths of 100 %"
