"""The reader of Hex games in SGF."""

from __future__ import annotations

import gzip
import re

import numpy as np
import pytest

from hexdata.board import BLUE, RED, format_moves, unpack_boards
from hexdata.demo.games import make_game

HEAD = "FF[4]GM[11]SZ[5]"
MOVES = ";B[a1];W[b2]"
GOOD = f"(;{HEAD}RE[B+R]{MOVES})"


@pytest.fixture
def read_sgf(read_text):
    def read_sgf(text, name="a.sgf", **options):
        return read_text(text, name, **options)

    return read_sgf


def played(rows):
    return [(row["move"], row["player_to_move"]) for row in rows]


@pytest.mark.parametrize("n", [3, 26, 32])
def test_a_game_has_the_positions_of_the_same_game_in_trmph(read_text, n):
    moves, winner = make_game(0, 1, n)
    names = [f";{'BW'[ply % 2]}[{format_moves([move], n)}]" for ply, move in enumerate(moves)]
    letters = [f";{'WB'[k % 2]}[{chr(97 + m % n)}{chr(97 + m // n)}]" for k, m in enumerate(moves)]
    nodes = "".join(names)
    texts = [
        f"(;AP[HexGui:0.9]FF[4]GM[11];SZ[{n}]{nodes})",
        f"(;FF[4]GM[11]SZ[{n}:{n}]{nodes.upper()})",
        f"(;FF[4]GM[11]SZ[{n} X {n}]{nodes})",
        f"\ufeff(;FF[4]\r\nGM [11]\nSZ[{n}]\n{nodes} )\n".replace(";", "\n ; "),
        f"(;FF[4]EV[hex.ch.1]PB[x]PW[y]SZ[{n}]RE[{'BW'[winner]}]{''.join(letters)})",
    ]
    expected = read_text(f"#{n},{format_moves(moves, n)} {'br'[winner]}\n").rows
    for text in texts if n <= 26 else texts[:-1]:
        _, rows, rejected = read_text(text, "a.sgf")
        ends = {"end_reason": "unknown"} if "RE[" in text else {}
        assert (rows, rejected) == ([row | ends for row in expected], [])


RESULTS = {
    (BLUE, "resigned"): ["RE[B+R]" + MOVES, "RE[黑中盘胜]" + MOVES, f"RE[B+]{MOVES};W[RESIGN]"],
    (BLUE, "time"): ["RE[B+T]" + MOVES],
    (BLUE, "unknown"): ["RE[B+F]" + MOVES, "RE[White lost]" + MOVES, "RE[黑胜]" + MOVES],
    (RED, "time"): ["RE[white won on time]" + MOVES],
    (RED, "resigned"): [
        *("RE[Black resigns]" + MOVES, "RE[黑认输]" + MOVES, f"RE[?]{MOVES};B[resign]"),
        MOVES + "RE[W+R]RE[B+R]",
    ],
    (RED, "unknown"): [
        *("RE[Winner: White]" + MOVES, "RE[0-1]" + MOVES, "RE[白の勝ち]" + MOVES, MOVES + ";B[forfeit]")
    ],
}


@pytest.mark.parametrize("end", RESULTS)
def test_the_result_or_a_resignation_decides_the_game(read_sgf, end):
    _, rows, _ = read_sgf("".join(f"(;{HEAD}{text})" for text in RESULTS[end]))
    found = [(row["winner"], row["end_reason"]) for row in rows]
    assert found == [end] * 3 * len(RESULTS[end])


@pytest.mark.parametrize("encoding", ["gbk", "big5", "utf-8"])
def test_a_result_in_an_encoding_that_is_not_stated_is_read(read_sgf, encoding):
    text = f"(;{HEAD}RE[白勝]{MOVES})(;{HEAD}RE[黑子胜利了吗]{MOVES};B[resign])"
    reader, rows, rejected = read_sgf(text.encode(encoding, "replace"))
    assert ([row["winner"] for row in rows], rejected) == ([RED] * 6, [])
    assert reader.header["counts"]["results"] == 1


B, R = BLUE, RED
PIECES = [(5, R), (12, B), (None, R)]
SIDES = [(1, B), (12, R), (None, B)]
EVENT = "(;EV[hex.x]SZ[5]"


SWAPS = {
    ("pieces", BLUE): [
        *(f"(;{HEAD};B[b1];W[{swap}];B[c3];W[resign])" for swap in ("swap-pieces", "S", "swap pieces")),
        f"{EVENT}RE[B];W[ba];B[swap];W[cc];B[resign])",
    ],
    ("pieces", RED): [  # as what it does; without AE, a later move shows that the first cell is free
        f"(;{HEAD};B[b1]{node};B[c3];W[b1];B[resign])"
        for node in (
            *(";AE[b1]AW[a2]", ";W[a2]AE[b1]", ";W[swap]AE[b1]AW[a2]", ";AE[b1]W[swap-pieces]", ";W[a2]"),
        )
    ],
    ("sides", RED): [
        f"(;{HEAD}RE[B+];B[b1];W[{swap}];W[c3];B[resign])"
        for swap in ("swap-sides", "SWAP", "swap-pieces", "")
    ],
}


@pytest.mark.parametrize(("kind", "winner"), SWAPS)
def test_a_swap_is_read_in_every_way_in_which_it_is_written(read_sgf, kind, winner):
    expected = {BLUE: PIECES, RED: [*PIECES[:2], (1, R), (None, B)]}[winner] if kind == "pieces" else SIDES
    for text in SWAPS[kind, winner]:
        _, rows, rejected = read_sgf(text)
        assert (played(rows), rejected) == (expected, [])
        assert {(row["winner"], row["swap"]) for row in rows} == {(winner, kind)}


def test_white_may_begin(read_sgf):
    assert played(read_sgf(f"(;{HEAD}PL[W]RE[B+R];W[a1];B[b2])").rows) == [(0, R), (6, B), (None, R)]


@pytest.mark.parametrize(
    ("text", "expected", "plies"),
    [
        # stones, then move and player of each position
        ("AB[c3][d4]RE[W+R];W[a1];B[b2]", [(0, R), (6, B), (None, R)], (3, 6)),
        ("AB[c3]AW[d4]RE[B+];B[a1]", [(0, B), (None, R)], (2, 4)),
        ("AB[c3][a1]AW[d4]PL[W]RE[B+]", [(None, R)], (3, 4)),
        ("AB[c3]AW[d4]RE[W+]", [(None, B)], (2, 3)),
        ("AB[c3]AW[d4]PL[]RE[W+]", [(None, B)], (2, 3)),
        ("AB[c3][a1]AW[d4]PL[2]RE[B+]", [(None, R)], (3, 4)),
        ("RE[W+];AB[c3];AW[d4]PL[B]", [(None, B)], (2, 3)),  # as HexGui writes it
        ("AW[c3]RE[W+];W[a1]", [(0, R), (None, B)], (3, 5)),
        ("AB[a1][a2][a3][a4]AW[b1];B[a5]", [(20, B), (None, R)], (8, 10)),
        ("PL[W]AB[c3]RE[W+];W[];B[pass];W[a1]", [(None, R), (None, B), (0, R), (None, B)], (1, 5)),
    ],
)
def test_stones_set_up_before_the_first_move_are_on_all_boards(read_sgf, text, expected, plies):
    reader, rows, rejected = read_sgf(f"(;{HEAD}{text})")
    assert (played(rows), rejected, reader.header["counts"]["setup"]) == (expected, [], 1)
    assert (rows[0]["position_in_game"], rows[0]["total_positions"]) == plies
    stones = {"B": set(), "W": set()}
    for name, cells in re.findall(r"A([BW])((?:\[[a-e][1-5]\])+)", text):
        stones[name] |= {"abcde".index(c) + 5 * (int(r) - 1) for c, r in re.findall(r"([a-e])([1-5])", cells)}
    for row in rows:
        board = unpack_boards(np.frombuffer(row["board"], np.uint8)[np.newaxis], 5)[0].reshape(2, 25)
        assert [set(np.flatnonzero(plane)) for plane in board] == [stones["B"], stones["W"]]
        if row["move"] is not None:
            stones["BW"[row["player_to_move"]]].add(row["move"])


def test_stones_may_be_set_up_as_rectangles(read_sgf):
    expected = read_sgf(f"(;{HEAD}AB[a1][b1][a2][b2]AW[d4][d5]RE[B+];W[e5])")[1:]
    assert len(expected[0]) == 2
    for text in (f"(;{HEAD}AB[b1:a2]AW[d5:d4]RE[B+];W[e5])", f"{EVENT}AB[aa:bb]AW[dd:de]RE[B+];W[ee])"):
        assert read_sgf(text)[1:] == expected


def test_comments_nesting_and_unknown_properties_are_skipped(read_sgf):
    texts = [
        f"(;{HEAD}RE[B+R]C[one (two; [three\\] \\\\];B[a1]BL[3]XY[1][2][3](;W[b2]C[;W[c3\\]]))",
        f"(;{HEAD}RE[B+R](;B[a1](;W[b2](;C[end]))))",
        "(;FileFormat[3]GaMe[11]SiZe[5]RE[B+R];Black[a1];White[b2])",
        f"(;{HEAD}RE[B+R];PL[B];B[a1]PL[W];PL[W];W[b2])",
        f"Our games (see below), 2024 (final):\n{GOOD}\n(the end)\n",
    ]
    for text in texts:
        assert read_sgf(text)[1:] == read_sgf(GOOD)[1:]


BAD = {
    "sgf-variations": [f"{HEAD};B[a1](;W[b2])(;W[c3])"],
    "setup-stones": [
        *(f"{HEAD}AB[b2];B[c3];W[a1]AW[b3]", f"{HEAD}AE[a1];B[c3]", f"{HEAD}AB[a1]AW[a1];B[c3]"),
        *(f"{HEAD};B[b1];W[c3]AE[b1];B[a1]", f"{HEAD};B[b1];AE[b1];W[a2]"),
    ],
    "trmph-cell": [
        *(f"{HEAD}AB[a1]AW[f1];B[c3]", f"{HEAD}AB[a1:x];B[c3]", f"{HEAD};B[f1]", f"{HEAD};B[aa];W[bf]"),
        *(f"{HEAD};B[aa];W[b2]", f"{HEAD};B[a1];W[bb]"),
    ],
    "repeated-move": [f"{HEAD}AB[a1];W[a1]", f"{HEAD};B[b1];W[b1]"],
    "move-order": [
        *(f"{HEAD}AB[a1];W[b2];B[swap-pieces];W[c3]", f"{HEAD}AB[a1]PL[B];W[b2]", f"{HEAD};B[a1];B[b2]"),
        *(f"{HEAD};B[a1];W[swap]", f"{HEAD}{MOVES};B[swap-pieces];W[c3]", f"{HEAD};B[a1];W[resign];W[b2]"),
    ],
    "sgf-game": [
        *("FF[4]GM[1]SZ[5];B[aa]", "FF[4]SZ[5];B[a1]", "FF[4]EV[havannah.x]SZ[5];W[A1]"),
        "FF[4]EV[null]SO[http://www.littlegolem.com]SZ[5];W[A1]",
    ],
    "board-size": [
        *("GM[11]SZ[5:6];B[a1]", "GM[11]SZ[x];B[a1]", "GM[11]SZ[33];B[a1]", "GM[11];B[k11];W[resign]")
    ],
    "no-moves": [f"{HEAD}RE[B+R];"],
    "no-winner": [
        *(f"{HEAD}{MOVES}", f"{HEAD}RE[0-1];W[a1];B[b2]", f"{HEAD}RE[Ann wins];B[a1]"),
        f"{HEAD}RE[B+R];B[a1];W[swap-sides];W[b2]",
    ],
    "winner-value": [f"{HEAD}RE[W+R];B[a1];W[resign]"],
    "sgf-syntax": [
        *(f"{HEAD};B[a1]W[b2]", f"{HEAD};B[a1][b2]", "GM[11]SZ[5]x;B[a1]", "GM[11]SZ[5]PB[x];B[a1]];W[b2]"),
        *("GM[11]SZ[5]RE[B+R]PB[x]Ba1];W[b2]", "[11]", "GM[11](;B[a1]);W[b2]"),
        "GM[11]SZ[5]" + 5000 * ";",
        f"{HEAD}RE[B+R];B[a1]" + 200_000 * "(" + 200_000 * ")" + ";W[b2]",
    ],
}
"""Games that are rejected, by reason."""


def test_a_bad_game_is_one_rejected_record(read_sgf):
    bad = [(f"(;{text})", reason) for reason, texts in BAD.items() for text in texts]
    bad.append(("((;GM[11]))", "sgf-syntax"))
    _, rows, rejected = read_sgf("\n".join([GOOD, *(text for text, _ in bad), GOOD]))
    assert [row["line_idx"] for row in rows] == [1] * 3 + [2 + len(bad)] * 3
    found = [(each.record, each.reason, each.detail.partition(":")[0]) for each in rejected]
    assert found == [(3 + n, reason, f"game {n + 2}") for n, (_, reason) in enumerate(bad)]


def test_players_dates_and_events_are_in_the_header(read_sgf):
    text = f"(;GM[11]SZ[5]PB[Ann\\]a]PW[B\n ob]DT[2024-05-06]EV[final]RE[B+R]{MOVES})\n"
    reader, _, _ = read_sgf(2 * text)
    listed = {"PB": "Ann]a", "PW": "B ob", "DT": "2024-05-06", "EV": "final", "RE": "B+R"}
    assert reader.header["games"] == [{"game": 1, **listed}, {"game": 2, **listed}]
    assert reader.header["run"] == {"date": "2024-05-06"}
    assert reader.header["counts"]["games"] == 2
    assert "run" not in read_sgf(text + text.replace("05-06", "05-07")).reader.header


@pytest.mark.parametrize("root", ["AP[HexGui:0.9.GIT]", "EV[null]SO[http://www.littlegolem.com]"])
def test_hex_may_name_its_program_instead(read_sgf, root):
    reader, rows, _ = read_sgf(f"(;FF[4]{root}SZ[5]RE[some words];B[aa];W[bb];B[resign])")
    assert (len(rows), rows[0]["winner"], reader.header["counts"]["results"]) == (3, RED, 1)


@pytest.mark.parametrize("name", ["a.hsgf.gz", "A.SGF"])
def test_the_name_tells_that_a_text_is_sgf_if_it_does_not_begin_with_a_game(read_sgf, name):
    for before in ("", "From: Ann\nSubject: our game\n\n", " \n" * 40_000, "# caf\u00e9\n"):
        reader, rows, _ = read_sgf(f"{before}{GOOD}\n".encode("latin-1"), name)
        assert (reader.format, len(rows)) == ("sgf", 3)
    for empty in (b"", gzip.compress(b""), b"\r\n"):
        assert read_sgf(empty, name)[1:] == ([], [])


@pytest.mark.parametrize(
    ("stated", "encoding", "name", "shown", "noted"),
    [
        ("GBK", "gbk", "张", "张", 0),
        ("GB18030", "gb18030", "张誠", "张誠", 0),
        ("Shift_JIS", "shift_jis", "表ソ", "表ソ", 0),
        ("latin1", "latin-1", "é", "é", 0),
        ("utf8mb4", "utf-8", "张", "张", 0),
        ("", "utf-8", "张\\]", "张]", 0),
        ("UTF-8", "gbk", "张", "\ufffd\ufffd", 1),
        ("rot13", "latin-1", "Zoë", "Zoë", 1),
        (None, "latin-1", "Zoë", "Zoë", 1),
        (None, "gbk", "誠", "Õ\\", 1),
        ("UTF-16", "utf-16", "张", "张", 0),
    ],
)
def test_a_name_in_any_encoding_costs_no_game(read_sgf, stated, encoding, name, shown, noted):
    ca = "" if stated is None else f"CA[{stated}]"
    text = f"(;{HEAD}{ca}PB[{name}]RE[B+R]PW[{name}];B[a1]C[{name}];W[b2])"
    reader, rows, rejected = read_sgf(text.encode(encoding))
    assert (rows, rejected) == read_sgf(GOOD)[1:]
    (game,) = reader.header["games"]
    assert (game["PB"], game["PW"]) == (shown, shown)
    assert reader.header["counts"].get("other_encodings", 0) == 2 * noted


@pytest.mark.parametrize("name", ["Bo;]", "[1] and 2]", "x] y] z"])
def test_an_unescaped_bracket_within_a_name_costs_no_game(read_sgf, name):
    reader, rows, _ = read_sgf(f"(;{HEAD}PB[{name}]RE[B+R]XY[{name}];B[a1]C[{name}];W[b2])")
    assert (len(rows), reader.header["games"][0]["PB"]) == (3, name)
    assert reader.header["counts"]["unescaped"] == 3 * name.count("]")


@pytest.mark.parametrize(
    ("tree", "variations"),
    [
        (";B[a1];W[b2](;B[c3])(;B[d4];W[e5])", 1),
        (";B[a1](;W[b2](;B[c3](;C[end])(;W[d4]))(;B[e5](;W[a2])(;W[a3]))(;PL[W]AB[a4]))(;W[swap])", 6),
        (";B[a1];W[b2];B[c3]", 0),
    ],
)
def test_the_main_line_is_the_first_variation(read_sgf, tree, variations):
    good = f"(;{HEAD}RE[B+R];B[b1])"
    text = f"(;{HEAD}RE[B+R]{tree})\n{good}(;{HEAD}(;B[a1]);W[b2]){good}"
    reader, rows, rejected = read_sgf(text, variations="main")
    assert [row["move"] for row in rows] == [0, 6, 12, None, 1, None, 1, None]
    assert [each.reason for each in rejected] == ["sgf-syntax"]
    assert reader.header["counts"]["variations"] == variations
