"""``hexdata show``: what it prints and writes."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.kit.command_line import Ran, hexdata_run, run_on_terminal

GAME = "#3,b2a1c1 b"
DRAWN = """\
     a b c
   ───────
 1 ╲ ○ ·[●]╲ 1
  2 ╲ · ● · ╲ 2
   3 ╲ · · · ╲ 3
       ───────
       a b c

● blue, top to bottom · ○ red, left to right · [ ] last move
ply 3 of 3 · last move c1 · red to move · no next move · winner blue
3 moves, 4 positions, winner blue
"""


def test_a_game_is_drawn_as_by_hand() -> None:
    assert hexdata_run("show", GAME) == Ran(0, DRAWN, "")
    ran = hexdata_run("show", GAME, "--numbers")
    assert (ran.status, ran.out, ran.err.startswith("note: --numbers")) == (0, DRAWN, True)


def test_where_there_is_no_unicode_it_is_drawn_in_ascii() -> None:
    ran = hexdata_run("show", GAME, encoding="ascii")
    assert (ran.status, " 1 \\ R .[B]\\ 1" in ran.out.splitlines()) == (0, True)


def test_a_terminal_gets_colours_unless_it_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    coloured = hexdata_run("show", GAME, **terminal).out
    assert all(stone in coloured for stone in ("\x1b[94m●", "\x1b[91m●"))
    plain = hexdata_run("show", GAME, **terminal, NO_COLOR="1").out
    assert ("\x1b[94m" in plain, "○" in plain) == (False, True)


def test_a_position_of_a_store_is_drawn_with_its_facts(trmph_store: Path) -> None:
    ran = hexdata_run("show", trmph_store, 33)
    assert (ran.status, ran.err, "position 33 · game " in ran.out) == (0, "", True)
    facts = hexdata_run("show", trmph_store, 33, "--json").facts
    assert (facts["position_id"], facts["svg"]) == (33, None)
    assert len(facts["blue"]) + len(facts["red"]) == facts["ply"]


def test_svg_files_are_written(trmph_store: Path, tmp_path: Path) -> None:
    board, film, ply = tmp_path / "board.svg", tmp_path / "film.svg", tmp_path / "ply.svg"
    ran = hexdata_run("show", trmph_store, 33, "--svg", board)
    assert (ran.err, ran.out.startswith(f"{board}: position 33, game ")) == ("", True)
    made = hexdata_run("show", trmph_store, "--game", 2, "--svg", film, "--every", 5, "--json").facts
    assert hexdata_run("show", trmph_store, "--game", 2, "--ply", 9, "--numbers", "--svg", ply).status == 0
    drawn = {path: ElementTree.parse(path).getroot() for path in (board, film, ply)}
    plies = len(made["positions"]) - 1
    frames = [element for element in drawn[film].iter() if element.get("data-frame")]
    assert len(frames) == len({*range(0, plies + 1, 5), plies})
    numbers = [e.text for e in drawn[ply].iter() if e.tag.endswith("text") and (e.text or "").isdigit()]
    assert {str(number) for number in range(1, 10)} <= set(numbers)


def test_lines_below_the_board_fit_a_narrow_terminal(trmph_store: Path) -> None:
    shown = run_on_terminal("show", trmph_store, 5, COLUMNS="40", TERM="xterm", NO_COLOR="1")
    shown = re.sub("\x1b\\[[0-9;]*m", "", shown)
    assert max(map(len, shown.splitlines())) <= 40
    assert "blue, top to bottom" in shown
