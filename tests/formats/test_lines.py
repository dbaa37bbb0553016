"""Texts with a game per line: TRMPH, HexWorld and lists of moves, and the comments that state their run."""

from __future__ import annotations

import gzip
import tracemalloc
from dataclasses import replace

import pytest

from hexdata.board import BLUE, RED, format_moves, pack_boards, replay
from hexdata.demo.games import make_game
from hexdata.errors import FormatError
from hexdata.formats import FilePart, open_source
from hexdata.formats.run_header import date_of_name
from hexdata.formats.trmph import TrmphReader
from hexdata.schema import raw_schema
from tests.kit.sources import save_source

TRMPH = "#11,a2b4d4f7 b"
LINK = "https://hexworld.org/board/#11c1,a2b4d4f7:rw"
LARGE = format_moves(make_game(0, 1, 32).moves, 32)
SMALL = format_moves(make_game(0, 1, 3).moves, 3)


def test_a_game_yields_all_positions(read_text):
    reader, rows, _ = read_text("#3,a1c3b2 r\n")
    assert (reader.format, reader.board_size) == ("trmph", 3)
    boards = [board.tobytes() for board in pack_boards(replay([0, 8, 4], 3))]
    stated = ("record", "board", "move", "value", "player_to_move", "line_idx")
    stated += ("position_in_game", "total_positions", "winner")
    for ply, move in enumerate([0, 8, 4, None]):
        values = (ply, boards[ply], move, 1.0, ply % 2, 1, ply, 4, RED)
        assert rows[ply] == dict.fromkeys(raw_schema(3).names) | dict(zip(stated, values, strict=True))


@pytest.mark.parametrize(
    ("line", "expected", "names"),
    [
        *(
            (line, TRMPH, ("a.trmph",))
            for line in (
                *("#11,A2B4D4F7 b", "#11,a2,b4,d4,f7 b", "#11,a2 b4 d4 f7 b", "#11,a2b4d4f7,b"),
                *("#11,a2b4d4f7 black", "#11,1. a2 b4 2. d4 f7 b", "'#11,a2b4d4f7 b',"),
                *("1. https://trmph.com/hex/board#11,a2b4d4f7 b", "3,ann,#11,a2b4d4f7 b"),
                *("[a](http://www.trmph.com/hex/board#11,a2b4d4f7) b  # Ann", "\ufeff#11,a2b4d4f7 b"),
                *("https://trmph.com/hex/board%2311%2Ca2b4d4f7 b.", '"#11,a2b4d4f7",b'),
                *("| 3 | #11,a2b4d4f7 b |", "<https://trmph.com/hex/board#11,a2b4d4f7> 1", "#11,A2B4D4F7 1"),
            )
        ),
        *(
            (line, TRMPH, ("a.txt",))
            for line in (
                "https://trmph.com/board%2311,a2b4d4f7 b",
                '1,"#11,a2b4d4f7 b"',
                *("\u201c#11,a2b4d4f7 b\u201d", "[[https://trmph.com/board#11,a2b4d4f7]] b"),
            )
        ),
        *(
            (line, TRMPH, ("a.hexworld", "a.txt"))
            for line in (
                *(LINK, "https://hexworld.org/board/#11nc1%2Ca2b4d4f7%3Arw", f"<{LINK}>"),
                *("hexworld.org/board/#11C1,A2B4D4F7:RW", f'"{LINK}" # Ann vs Bob', LINK.upper()),
            )
        ),
        ("Game 2: #11c1,a2b4d4f7:rw", TRMPH, ("a.hexworld",)),
        *(
            (f"{head}{n}{options},{moves}", f"#{n},{moves}", ("a.hexworld",))
            for n, moves in ((3, SMALL), (32, LARGE))
            for head, options in (("https://hexworld.org/board/#", "r9c1"), ("#", "c1"), ("", ""))
        ),
        (f"32x32nr3c1,{LARGE[:200]},{LARGE[200:]}", f"#32,{LARGE}", ("a.hexworld",)),
        *(
            (line, "#3,a1c1a2c2a3 b", ("a.txt",))
            for line in (
                *("A1,C1,A2,C2,A3", "a1c1a2c2a3", "a1; c1; a2; c2; a3"),
                *("1. a1 c1 2.a2 c2 3) a3", "1.a1,c1 3.a2;4.c2 a3"),
            )
        ),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_a_line_has_the_positions_of_its_game(read_text, line, expected, names):
    rows = [row | {"end_reason": None} for row in read_text(expected).rows]
    for name in names:
        _, found, rejected = read_text(f"{line}\n", name)
        assert ([row | {"end_reason": None} for row in found], rejected) == (rows, [])


def test_a_resignation_decides_the_game(read_text):
    ends = {
        ":rb": (RED, "resigned"),
        ":rw": (BLUE, "resigned"),
        ":fb": (RED, "unknown"),
        ":fw": (BLUE, "unknown"),
    }
    for end, expected in ends.items():
        _, rows, _ = read_text(f"5c1,a1b2{end}", "a.hexworld")
        assert [(row["winner"], row["end_reason"]) for row in rows] == [expected] * 3


def test_a_swap_of_pieces_is_a_game_that_red_begins_with_the_mirrored_cell(read_text):
    _, rows, _ = read_text("5c1,b1:sc3:rw", "a.hexworld")
    found = [(row["move"], row["player_to_move"], row["swap"]) for row in rows]
    assert found == [(5, RED, "pieces"), (12, BLUE, "pieces"), (None, RED, "pieces")]
    assert rows[1]["board"][3] & 2  # bit 30 = 25 + 5: a red stone on a2


def test_a_missing_winner_is_that_of_the_chain(read_text):
    text = "#3,a1b1a2b2a3\n#3,a1b1 b\n#3,a1b1a2\n#3,a1a2b1b2c3c2 # red's row\n"
    reader, rows, rejected = read_text(text)
    assert {row["line_idx"]: row["winner"] for row in rows} == {1: BLUE, 2: BLUE, 4: RED}
    assert [(each.record, each.reason) for each in rejected] == [(6 + 3, "no-winner")]
    assert reader.header["counts"] == {"comments": 0, "winners_from_chain": 2, "bytes_between_games": 0}


BAD = {
    "a.trmph": {
        "": "#11,a2b4d4f7 b",
        "trmph-syntax": "nonsense|#5 b|#11,a2b4d4f7 1.0|#11,a2b4d4f7 b r|#11,a2swapd4f7 b|##11,a2 b|x#11,a2 b"
        "|#11,a1 b #11,a2 b|11,a1 b #11,a2 b|#11,a12.b3 b|#11,a2b4b|#11,a2 b4 3 b"
        '|"#11,a2b4",1|7;#11,a2b4;1|"#11,a2b4", 2|#11,a2b4,1|#11,a2, b4, 1'  # columns of numbers
        "|#11,1. a2 3. b4 b|#11,9. a2 b4 b|#11,1. a2 b4 2. d4 4. f7 b",
        "trmph-cell": "#11,a1l1 b",
        "repeated-move": "#11,a1b2a1 r",
        "board-size": "#4,a1b2 b|#99,a1 b",
        "no-moves": "#5, b|#5, # resigned at once",
        "no-winner": "#11,a1",
        "line-too-long": f"#11,a1{70_000 * ' '}b|{70_000 * ' '}#11,a1 b",
    },
    "a.hexworld": {
        "": "5c1,a1b2:rb",
        "hexworld-syntax": "hello|5c1,a1b2x:rb|5c1,A1:SB2:rb|5c1,a1\udcff # \udcff"
        "|x https://hexworld.org/board/#5c1,a1:rb #5c1,a1:rb",
        "board-size": "5x6c1,a1b2:rb|33c1,a1b2:rb|7c1,a1b2:rb",
        "trmph-cell": "5c1,a1f2:rb",
        "repeated-move": "5c1,a1b2a1:rb|5c1,b1:sa2:rb",
        "move-order": f"5c1,a1b2:s:rb|5c1,a1:s:S:rb|5c1,a1:rbb2|5c1,a1{26 * ':p'}:rb",
        "no-moves": "5c1,:p:rb",
        "no-winner": "5c1,a1b2",
    },
    "a.moves": {
        "": "a1c1a2c2a3",
        "no-winner": "a2 b4 d4 f7",
        "trmph-syntax": "a1 b9x|1. a1 3. c1 4. a2 5. c2 6. a3|1. a1 c1 2. a2 3. c2 a3|2. a1 c1 a2 c2 a3",
        "repeated-move": "a1 c3 a1",
    },
}
"""For each format a line that is a game, and lines that are rejected, by reason."""


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_one_rejected_record(read_text, name):
    (_, good), *others = BAD[name].items()
    bad = [(line, reason) for reason, lines in others for line in lines.split("|")]
    content = "\n".join(["# comment", good, *(line for line, _ in bad), "", good])
    _, rows, rejected = read_text(content.encode(errors="surrogateescape"), name)
    plies = len(rows) // 2
    assert [row["line_idx"] for row in rows] == [2] * plies + [3 + len(bad)] * plies
    found = [(each.record, each.reason, each.detail.partition(":")[0]) for each in rejected]
    assert found == [(plies + n, bad[n][1], f"line {n + 3}") for n in range(len(bad))]


def test_a_long_line_that_is_no_game_is_rejected_in_time(read_text):
    lines = ["#5" + 60_000 * char + end for char in " .<,a" for end in ("", "#", "\x01")]
    lines += ["#5," + 10_000 * "a1 , " + "!", 60_000 * "<", 30_000 * "1,", 30_000 * "%2"]
    assert len(read_text("\n".join(lines)).rejected) == len(lines)


@pytest.mark.parametrize("end", [b"\n", b"\r"])
def test_comments_blank_lines_and_other_encodings_are_counted(read_text, end):
    lines = [
        b"# a comment",
        b"#3,a1b2 b",
        b"",
        b"#3,a1 b # caf\xe9",
        b"   \t ",
        b"#3,a1 b # caf\xc3\xa9",
        b"# 5 b",
    ]
    reader, rows, rejected = read_text(end.join(lines))
    assert ([row["line_idx"] for row in rows], rejected) == ([2, 2, 2, 3, 3, 4, 4], [])
    between = sum(len(lines[number]) + 1 for number in (0, 2, 4, 6)) - 1
    counts = {"comments": 2, "winners_from_chain": 0, "bytes_between_games": between, "other_encodings": 1}
    assert reader.header["counts"] == counts


@pytest.mark.parametrize("filler", [b"\n", b"no game\n"])
def test_a_gzip_bomb_of_lines_is_refused(read_text, monkeypatch, filler):
    monkeypatch.setattr(TrmphReader, "limits", replace(TrmphReader.limits, ratio_floor=1 << 14))
    bomb = gzip.compress(b"#3,a1 b\n" + filler * (1 << 15), mtime=0)
    with pytest.raises(FormatError) as error:
        read_text(bomb, "a.trmph.gz", salvage=True)
    assert error.value.code == "limit-ratio"
    assert str(error.value.path).endswith("a.trmph.gz")


def test_memory_does_not_grow_with_file_or_line_length(read_text):
    content = b"#13," + b"a1" * (4 << 20) + b"\n" + b"".join([b"#13," + b"a1" * 30_000 + b"\n"] * 10)
    tracemalloc.start()
    _, _, rejected = read_text(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    reasons = [(each.record, each.reason) for each in rejected]
    assert reasons == [(0, "line-too-long"), *((n, "repeated-move") for n in range(1, 11))]
    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        ("https://hexworld.org/board/#11,a1b2", "a.txt", "hexworld"),
        ("# games\n\n11r9c1,a1b2", "a.txt", "hexworld"),
        ("# games\ra1 b2\r", "a.txt", "moves"),
        ("1,x\r2,<#11,a1b2 b>\r", "a.txt", "trmph"),
        ("11,a1b2c3", "a.txt", "hexworld"),
        ("name,link\rx,https://hexworld.org/board/#11c1,a1b2:rb", "a.csv", "hexworld"),
        ("a1 b2\nhttps://hexworld.org/board/#11c1,a1b2:rb", "a.txt", "moves"),
        ("#11c1,a1b2", "a.trmph", "hexworld"),
        ("http://www.trmph.com/hex/board#11,a1b2 b", "a.txt", "trmph"),
        ("#11,a1b2:rb", "a.hexworld.gz", "hexworld"),
        ("", "a.hexworld", "hexworld"),
        ("", "a.trmph", "trmph"),
        ("a1", "a.txt", None),
        ("hello", "a.txt", None),
    ],
)
def test_the_content_tells_the_format(tmp_path, text, name, found):
    path = save_source(tmp_path / name, gzip.compress(text.encode()) if name.endswith(".gz") else text)
    if found is None:
        with pytest.raises(FormatError):
            open_source(path)
    else:
        with open_source(path) as reader:
            assert reader.format == found


# Facts of the run

HEADER = """\
# Self-play games - 2025-09-08T12:11:06.123456
# Model: checkpoints/epoch2_mini201.pt.gz
# MCTS simulations: 500
# C_PUCT: 1.5
# Gumbel root selection: True
# Temperature: 0.5
# Random seed: 4294967295
# Git commit: 941efd55+
# Format: trmph_string winner
"""
"""Header as the legacy tool writes it."""
RUN = {
    "date": "2025-09-08",
    "model": "checkpoints/epoch2_mini201.pt.gz",
    "simulations": 500,
    "temperature": 0.5,
    "seed": 4294967295,
    "commit": "941efd55+",
}
GAME = "#3,a1b1a2b2a3 b\n"
SECOND = HEADER.replace("2025-09-08", "2025-09-09").replace("mini201", "mini300")


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (HEADER + GAME, {"run": RUN}),
        (HEADER, {"run": RUN}),  # a run that has just begun
        (GAME, {}),
        *(
            (f"# {line}\n{GAME}", {"run": run})
            for line, run in (
                ("model: x", {"model": "x"}),
                ("MODEL = a b.pt", {"model": "a b.pt"}),
                ("Models: ['a.pt.gz', 'b.pt.gz', 'a.pt.gz']", {"model": "a.pt.gz, b.pt.gz"}),
                ("mcts_sims: 200", {"simulations": 200}),
                ("temperature 1.0", {"temperature": 1.0}),
                ("seed: -7", {"seed": -7}),
                ("Date: 2025-09-30 12:00", {"date": "2025-09-30"}),
            )
        ),
        *(
            (f"# {fact}\n{GAME}", {})
            for fact in (
                *("temperature: 0.5 -> 0.01", "temperature: 1e999", "seed: 99999999999999999999"),
                *("simulations: -1", "simulations: many", "date: 2025-13-30", "Git commit: unknown"),
                *("model collapse", "Models: " + "[" * 400, "Model: " + "x" * 600),
            )
        ),
        (
            HEADER + GAME + SECOND.replace("# Random seed: 4294967295\n", "") + GAME + GAME,
            {
                "run": {name: RUN[name] for name in ("simulations", "temperature", "commit")},
                "run_changes": {
                    "model": [RUN["model"], "checkpoints/epoch2_mini300.pt.gz"],
                    "seed": [4294967295, None],  # a title line begins a new header, which states no seed
                    "date": ["2025-09-08", "2025-09-09"],
                },
            },
        ),
        (GAME + "# model: x\n" + GAME, {"run_changes": {"model": [None, "x"]}}),
    ],
)
def test_comments_state_the_run(read_text, text, facts):
    header = read_text(text).reader.header
    assert {key: header[key] for key in ("run", "run_changes") if key in header} == facts


def test_lines_appended_to_a_file_belong_to_the_last_header_before_them(read_text):
    text, size = HEADER + GAME + GAME + "# Temperature: 0.25\n" + GAME, len(HEADER + GAME)
    for start, stop, changes in (
        (0, size, {}),
        (size, size + len(GAME), {}),
        (size + len(GAME), len(text), {"temperature": 0.25}),
    ):
        header = read_text(text, part=FilePart(start, stop)).reader.header
        assert (header["run"], "run_changes" in header) == (RUN | changes, False)


@pytest.mark.parametrize(
    ("name", "date"),
    [
        ("data/2025-09-30/games.trmph", "2025-09-30"),
        ("deterministic_tournament_20250908_1234/a_vs_b.trmph", "2025-09-08"),
        ("tournament_play_250908_12/tournament.trmph", "2025-09-08"),
        ("20250101/selfplay_20250908_123456.trmph", "2025-09-08"),
        ("20250908_to_20250909/a.trmph", None),
        ("play_250908_12/tournament.trmph", None),
        ("20251345/a.trmph", None),
        ("a_120250930.trmph", None),
    ],
)
def test_the_date_in_a_name(name, date):
    assert date_of_name(name) == date
