"""Boards as text, compared with expected drawings."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.board import column_name
from hexdata.draw import Diagram, Shades, board_text

ANSI = re.compile(r"\x1b\[([0-9;]*)m")


def diagram() -> Diagram:
    """Blue on b2 and c1, red on a1 and, last, c2; blue plays a3 next."""
    planes = np.zeros((2, 3, 3))
    planes[0, 1, 1] = planes[0, 0, 2] = 1
    planes[1, 0, 0] = planes[1, 1, 2] = 1
    return Diagram(3, planes, last_move=5, next_move=6, player=0, caption=["game 7", "ply 4 of 9"])


EXPECTED_BOARD = """\
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

ASCII_EXPECTED_BOARD = """\
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


def test_a_board_in_unicode():
    assert board_text(diagram()) == EXPECTED_BOARD


def test_a_board_in_ascii():
    drawn = board_text(diagram(), unicode=False)
    assert drawn == ASCII_EXPECTED_BOARD
    assert drawn.isascii()


@pytest.mark.parametrize("unicode", [True, False])
def test_colour_changes_only_the_symbol_of_red(unicode):
    plain = board_text(diagram(), unicode=unicode).replace("○", "●")
    assert ANSI.sub("", board_text(diagram(), color=True, unicode=unicode)) == plain


def colours(text: str) -> list[list[tuple[str, str]]]:
    """Return the letters of each line with their styles."""
    lines = []
    for line in text.splitlines():
        style, letters = "", []
        for part in re.split(r"(\x1b\[[0-9;]*m)", line):
            code = ANSI.fullmatch(part)
            if code:
                style = "" if code[1] == "0" else code[1]
            else:
                letters += [(letter, style) for letter in part]
        assert style == ""  # nothing runs on into the next line
        lines.append(letters)
    return lines


def test_stones_and_edges_have_the_colours_of_their_players():
    lines = colours(board_text(diagram(), color=True))
    blue, red = "94", "91"
    assert {style for letter, style in lines[1] + lines[5] if letter == "─"} == {blue}
    assert {style for line in lines for letter, style in line if letter == "╲"} == {red}
    stones = [[style for letter, style in line if letter == "●"] for line in lines[2:5]]
    assert stones == [[red, blue], [blue, red], []]
    assert [style for letter, style in lines[4] if letter == "*"] == [f"1;{blue}"]


@st.composite
def boards(draw: st.DrawFn) -> tuple[Diagram, list[int]]:
    n = draw(st.sampled_from([*range(3, 14), 32]))
    kinds = draw(st.lists(st.integers(0, 3), min_size=n * n, max_size=n * n))
    board = np.array(kinds).reshape(n, n)
    cell = st.none() | st.integers(0, n * n - 1)
    planes = np.stack([(board == 1) | (board == 3), (board == 2) | (board == 3)])
    return Diagram(n, planes, last_move=draw(cell), next_move=draw(cell)), kinds


@given(boards())
def test_a_cell_has_two_columns_and_rows_are_shifted_by_one(drawn):
    diagram, kinds = drawn
    n = diagram.size
    lines = board_text(diagram).splitlines()
    for cell, kind in enumerate(kinds):
        row, column = divmod(cell, n)
        line, place = lines[2 + row], 5 + row + 2 * column
        expected = "*" if kind == 0 and cell == diagram.next_move else "·●○◉"[kind]
        assert line[place] == expected
        assert (line[place - 1] == "[") == (line[place + 1] == "]") == (cell == diagram.last_move)
        if column < 26 or column % 2 == 0:
            if row == 0:
                assert lines[0][place:].startswith(column_name(column))
            if row == n - 1:
                assert lines[n + 3][place:].startswith(column_name(column))
    for row in range(n):
        assert re.match(rf" *{row + 1} ╲", lines[2 + row])
        assert lines[2 + row].endswith(f"╲ {row + 1}")
        assert lines[2 + row].index("╲") == row + 3


def test_shades_are_tenths_of_the_strongest():
    values = np.array([0, 1, 2, 4, np.nan, 40, 39, 38, 20])
    planes = np.zeros((2, 3, 3))
    planes[0, 2, 2] = 1
    lines = board_text(Diagram(3, planes, shades=Shades(values, label="policy"))).splitlines()
    assert [line.split("╲")[1].split() for line in lines[2:5]] == [
        ["·", "·", "1"],
        ["1", "·", "9"],
        ["9", "9", "●"],
    ]
    assert lines[8].endswith("1 to 9: policy, in tenths of 40")


def test_only_captions_longer_than_a_line_are_split():
    facts = [f"fact number {number}" for number in range(20)] + ["x" * 100, "policy " * 20]
    lines = board_text(Diagram(3, caption=facts)).splitlines()[9:]
    assert " · ".join(lines[:5]).split(" · ") == facts[:20]
    assert "".join(line.strip() for line in lines[5:7]) == "x" * 100
    assert " ".join(line.strip() for line in lines[7:]).split() == ["policy"] * 20
    assert all(len(line) <= 78 for line in lines)


@pytest.mark.parametrize(("color", "unicode"), list(product((False, True), repeat=2)))
def test_the_legend_fits_the_width(color, unicode):
    planes = np.zeros((2, 3, 3))
    planes[0, 0, 0] = 1
    shades = Shades(np.ones(9), label="policy", share=True)
    diagram = Diagram(3, planes, last_move=0, next_move=6, player=0, shades=shades, differing=[4])
    text = re.sub("\x1b\\[[0-9;]*m", "", board_text(diagram, color=color, unicode=unicode, width=56))
    lines = text.splitlines()[8:]
    assert max(map(len, lines)) <= 56
    assert "different" in lines[-3] + lines[-2]
    assert lines[-1] == "1 to 9: policy, in tenths of 100 %"


def test_column_names_of_two_letters_do_not_touch():
    names = board_text(Diagram(29)).splitlines()[0].split()
    assert names[-4:] == ["y", "z", "aa", "ac"]
