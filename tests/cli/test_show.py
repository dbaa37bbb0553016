"""``hexdata show``: what it prints, writes and refuses."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hexdata.cli import main
from tests.cli.terminal import run_on_terminal

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


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return ``run(*arguments, encoding="utf-8", **environment)``: status, standard output and error."""

    def run(*arguments: object, encoding: str = "utf-8", **environment: str) -> tuple[int, str, str]:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
        with monkeypatch.context() as patch:
            for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM"):
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr("sys.argv", ["hexdata", "show", *map(str, arguments)])
            patch.setattr("sys.stdout", streams[0])
            patch.setattr("sys.stderr", streams[1])
            status = 0
            try:
                main()
            except SystemExit as end:
                status = int(end.code or 0)
            for stream in streams:
                stream.flush()
        out, err = (stream.buffer.getvalue().decode(encoding) for stream in streams)
        return status, out, err

    return run


def test_a_game_is_drawn_as_by_hand(run):
    assert run(GAME) == (0, DRAWN, "")


def test_where_there_is_no_unicode_it_is_drawn_in_ascii(run):
    status, out, _ = run(GAME, encoding="ascii")
    assert status == 0
    assert out.isascii()
    assert " 1 \\ R .[B]\\ 1" in out.splitlines()


def test_a_terminal_gets_colours_unless_it_wants_none(run):
    _, colored, _ = run(GAME, FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[94m●" in colored
    assert "\x1b[91m●" in colored
    _, plain, _ = run(GAME, FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1")
    assert "\x1b[94m" not in plain
    assert "○" in plain


def test_a_position_of_a_store_is_drawn_with_its_facts(run, trmph_store):
    status, out, err = run(trmph_store, 33)
    assert (status, err) == (0, "")
    assert "position 33 · game " in out
    status, out, _ = run(trmph_store, 33, "--json")
    facts = json.loads(out)
    assert (status, facts["position_id"], facts["svg"]) == (0, 33, None)
    assert len(facts["blue"]) + len(facts["red"]) == facts["ply"]


def test_svg_files_are_written(run, trmph_store, tmp_path):
    board, film, ply = tmp_path / "board.svg", tmp_path / "film.svg", tmp_path / "ply.svg"
    status, out, err = run(trmph_store, 33, "--svg", board)
    assert (status, err) == (0, "")
    assert out.startswith(f"{board}: position 33, game ")
    assert run(trmph_store, "--game", 2, "--svg", film, "--every", 5, "--json")[0] == 0
    assert run(trmph_store, "--game", 2, "--ply", 9, "--numbers", "--svg", ply)[0] == 0
    drawn = {path: ElementTree.parse(path).getroot() for path in (board, film, ply)}
    frames = [element for element in drawn[film].iter() if element.get("data-frame")]
    game = json.loads(run(trmph_store, "--game", 2, "--json")[1])
    plies = len(game["positions"]) - 1
    assert len(frames) == len({*range(0, plies + 1, 5), plies})
    numbers = [e.text for e in drawn[ply].iter() if e.tag.endswith("text") and (e.text or "").isdigit()]
    assert {str(number) for number in range(1, 10)} <= set(numbers)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["STORE"], 2, "no position or --game is given"),
        (["STORE", "99999"], 1, "the store has no such position; found position 99999; expected 0 to"),
        (["STORE", "--game", "80"], 1, "the store has no such game; found game 80; expected 0 to 79"),
        (["STORE", "--game", "8", "--ply", "999"], 1, "no position at that ply; found ply 999"),
        (["STORE", "1", "--game", "8"], 2, "by its id, or by game and ply, not both"),
        (["STORE/positions", "1"], 1, "not a hexdata store"),
        (["nowhere.tar:3"], 1, "nowhere.tar: No such file"),
        (["#3,b2z9"], 1, "move 2 is not on the board; found 'z9'; expected a1 to c3"),
        (["#3,b2", "--ply", "2"], 1, "no position at that ply; found ply 2; expected 0 to 1"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(run, trmph_store, arguments, status, message):
    found, out, err = run(*(word.replace("STORE", str(trmph_store)) for word in arguments))
    assert (found, out) == (status, "")
    (line,) = err.splitlines()
    assert line.startswith("hexdata: ")
    assert message in line


def test_numbers_without_a_drawing_are_noted(run):
    status, out, err = run(GAME, "--numbers")
    assert (status, out) == (0, DRAWN)
    assert err.startswith("note: --numbers has no effect without --svg")


def test_the_file_cannot_be_written(run, tmp_path: Path):
    (tmp_path / "folder.svg").mkdir()
    status, out, err = run(GAME, "--svg", tmp_path / "folder.svg")
    assert (status, out) == (1, "")
    assert "folder.svg" in err


def test_two_positions_are_compared(run, trmph_store, tmp_path):
    status, out, err = run(trmph_store, 3, "--compare", 5)
    assert (status, err) == (0, "")
    assert "( ) different" in out
    assert "position 5 compared with position 3:\nonly in position 5: " in out
    status, out, _ = run(trmph_store, 3, "--compare", 5, "--svg", tmp_path / "both.svg", "--json")
    assert status == 0
    assert len(json.loads(out)["cells"]) == 2
    assert (tmp_path / "both.svg").read_text("utf-8").count("data-frame") == 2
    status, out, _ = run(trmph_store, 3, "--compare", 5, "--png", tmp_path / "both.png")
    first, *facts = out.splitlines()
    assert first.endswith("both.png: position 5 compared with position 3")
    assert facts[0].startswith("only in position 5: ")
    assert "ply: 5 instead of 3" in facts
    status, _, err = run(GAME, "--compare", 5)
    assert status == 2
    assert "expected SHARD.tar:17 or '#13,a1b2c3'" in err


def test_lines_below_the_board_fit_a_narrow_terminal(trmph_store):
    for options in ([], ["--compare", 9]):
        shown = run_on_terminal("show", trmph_store, 5, *options, COLUMNS="40", TERM="xterm", NO_COLOR="1")
        shown = re.sub("\x1b\\[[0-9;]*m", "", shown)
        lines = shown.splitlines()
        assert max(map(len, lines)) <= 40
        assert "blue, top to bottom" in shown
