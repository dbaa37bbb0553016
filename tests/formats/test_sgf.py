"""The reader of Hex games in SGF."""

from __future__ import annotations

import gzip
import io

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hexdata.board import BLUE, RED, format_moves
from hexdata.demo.games import make_game
from hexdata.errors import FormatError, Reason
from hexdata.formats import open_source
from hexdata.formats import sgf as sgf_module
from hexdata.formats.gunzip import is_gzip
from hexdata.formats.sgf import MAX_GAMES_LISTED, SgfReader
from tests.pairs import FULL

HEAD = "FF[4]GM[11]SZ[5]"


def read(path, **options):
    with open_source(path, **options) as reader:
        batches = list(reader.batches())
    rows = pa.Table.from_batches([batch.positions for batch in batches]).to_pylist() if batches else []
    return reader, rows, [each for batch in batches for each in batch.rejected]


@pytest.fixture
def read_text(tmp_path):
    def function(text, name="a.sgf"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read(path)

    return function


def nodes(moves, n, colours="BW"):
    return "".join(f";{colours[ply % 2]}[{format_moves([move], n)}]" for ply, move in enumerate(moves))


def letters(moves, n):
    pairs = [chr(97 + move % n) + chr(97 + move // n) for move in moves]
    return "".join(f";{'WB'[ply % 2]}[{pair}]" for ply, pair in enumerate(pairs))


def played(rows):
    return [(row["move"], row["player_to_move"]) for row in rows]


@pytest.mark.parametrize("n", [3, 13, 27, 32])
@pytest.mark.parametrize("style", ["names", "upper", "wrapped", "letters"])
def test_a_game_has_the_positions_of_the_same_game_in_trmph(read_text, tmp_path, n, style):
    moves, winner = make_game(0, 1, n)
    if style == "letters" and n > 26:
        n = 26
        moves, winner = make_game(0, 1, n)
    text = {
        "names": f"(;AP[HexGui:0.9]FF[4]GM[11]SZ[{n}]{nodes(moves, n)})",
        "upper": f"(;FF[4]GM[11]SZ[{n}:{n}]{nodes(moves, n).upper()})",
        "wrapped": f"\ufeff(;FF[4]\r\nGM [11]\nSZ[{n}]\n{nodes(moves, n)} )\n".replace(";", "\n ; "),
        "letters": f"(;FF[4]EV[hex.ch.1]PB[x]PW[y]SZ[{n}]RE[{'BW'[winner]}]{letters(moves, n)})",
    }[style]
    _, rows, rejected = read_text(text)
    trmph = tmp_path / "a.trmph"
    trmph.write_text(f"#{n},{format_moves(moves, n)} {'br'[winner]}\n")
    _, expected, _ = read(trmph)
    ends = {"end_reason": "unknown"} if style == "letters" else {}
    assert rows == [row | ends for row in expected]
    assert not rejected


@pytest.mark.parametrize(
    ("text", "winner", "end_reason"),
    [
        ("RE[B+R];B[a1];W[b2]", BLUE, "resigned"),
        ("RE[W+Resign];B[a1];W[b2]", RED, "resigned"),
        ("RE[B+T];B[a1];W[b2]", BLUE, "time"),
        ("RE[w+time];B[a1];W[b2]", RED, "time"),
        ("RE[B+F];B[a1];W[b2]", BLUE, "unknown"),
        ("RE[B+];B[a1];W[b2]", BLUE, "unknown"),
        ("RE[White];B[a1];W[b2]", RED, "unknown"),
        (";B[a1];W[b2];B[resign]", RED, "resigned"),
        ("RE[B+];B[a1];W[b2];W[RESIGN]", BLUE, "resigned"),
        (";B[a1];W[b2];B[forfeit]", RED, "unknown"),
    ],
)
def test_the_result_or_a_resignation_decides_the_game(read_text, text, winner, end_reason):
    _, rows, _ = read_text(f"(;{HEAD}{text})")
    assert [(row["winner"], row["value"], row["end_reason"]) for row in rows] == [
        (winner, winner, end_reason)
    ] * 3


def test_white_may_begin(read_text):
    _, rows, _ = read_text(f"(;{HEAD}PL[W]RE[B+R];W[a1];B[b2])")
    assert played(rows) == [(0, RED), (6, BLUE), (None, RED)]


def test_in_letters_the_first_player_is_blue_whatever_its_colour(read_text):
    _, rows, _ = read_text("(;FF[4]EV[hex.x]SZ[5]RE[B];W[ab];B[cc];B[resign])")
    assert played(rows) == [(5, BLUE), (12, RED), (None, BLUE)]
    assert {(row["winner"], row["end_reason"]) for row in rows} == {(BLUE, "resigned")}


@pytest.mark.parametrize("swap", ["swap-pieces", "swap"])
def test_a_swap_of_pieces_is_followed_by_the_opponent(read_text, swap):
    _, rows, _ = read_text(f"(;{HEAD};B[b1];W[{swap}];B[c3];W[resign])")
    assert played(rows) == [(5, RED), (12, BLUE), (None, RED)]
    assert {(row["winner"], row["swap"]) for row in rows} == {(BLUE, "pieces")}
    _, same, _ = read_text(f"(;EV[hex.x]SZ[5]RE[B];W[ba];B[{swap}];W[cc];B[resign])")
    assert same == rows


@pytest.mark.parametrize("swap", ["swap-sides", "swap", "SWAP", "swap-pieces"])
def test_a_swap_of_sides_is_followed_by_the_same_colour(read_text, swap):
    _, rows, _ = read_text(f"(;{HEAD}RE[B+];B[b1];W[{swap}];W[c3];B[resign])")
    assert played(rows) == [(1, BLUE), (12, RED), (None, BLUE)]
    assert {(row["winner"], row["swap"]) for row in rows} == {(RED, "sides")}


@pytest.mark.parametrize("text", ["pass", ""])
def test_a_pass_is_a_position_without_a_move(read_text, text):
    _, rows, _ = read_text(f"(;{HEAD}RE[B+R];B[a1];W[{text}];B[b2])")
    assert played(rows) == [(0, BLUE), (None, RED), (6, BLUE), (None, RED)]


def test_comments_nesting_and_unknown_properties_are_skipped(read_text):
    plain = read_text(f"(;{HEAD}RE[B+R];B[a1];W[b2])")[1]
    for text in (
        f"(;{HEAD}RE[B+R]C[one (two; [three\\] \\\\];B[a1]BL[3]XY[1][2][3](;W[b2]C[;W[c3\\]]))",
        f"(;{HEAD}RE[B+R](;B[a1](;W[b2](;C[end]))))",
        "(;FileFormat[3]GaMe[11]SiZe[5]RE[B+R];Black[a1];White[b2])",
    ):
        assert read_text(text)[1:] == (plain, [])


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        (f"(;{HEAD};B[a1](;W[b2])(;W[c3]))", "sgf-variations", "variations"),
        (f"(;{HEAD}AB[a1][b2];W[c3])", "setup-stones", "found AB"),
        (f"(;{HEAD};B[c3];AE[c3])", "setup-stones", "found AE"),
        ("(;FF[4]GM[1]SZ[5];B[aa])", "sgf-game", "found GM[1]"),
        ("(;FF[4]SZ[5];B[a1])", "sgf-game", "no GM"),
        ("(;FF[4]EV[havannah.x]SZ[5];W[A1])", "sgf-game", "no GM"),
        ("(;GM[11]SZ[5:6];B[a1])", "board-size", "not square; found SZ[5:6]"),
        ("(;GM[11]SZ[-5];B[a1])", "board-size", "not a board size; found SZ[-5]"),
        ("(;GM[11]SZ[x];B[a1])", "board-size", "SZ[x]"),
        ("(;GM[11]SZ[33];B[a1])", "board-size", "3 to 32"),
        ("(;GM[11];B[k11];W[resign])", "board-size", "found 11"),
        (f"(;{HEAD};B[f1])", "trmph-cell", "a1 to e5"),
        (f"(;{HEAD};B[aa];W[bf])", "trmph-cell", "letters up to e"),
        (f"(;{HEAD};B[aa];W[b2])", "trmph-cell", "two letters"),
        (f"(;{HEAD};B[a1];W[bb])", "trmph-cell", "not a move"),
        (f"(;{HEAD};B[a1:b2])", "trmph-cell", "not a move"),
        (f"(;{HEAD};B[a1];W[a1])", "repeated-move", "ply 1"),
        (f"(;{HEAD};B[a1];B[b2])", "move-order", "wrong player"),
        (f"(;{HEAD}PL[B];W[a1])", "move-order", "PL"),
        (f"(;{HEAD};B[a1];W[swap])", "move-order", "last move"),
        (f"(;{HEAD};B[a1];W[b2];B[swap-pieces];W[c3])", "move-order", "second move"),
        (f"(;{HEAD};B[a1];W[resign];W[b2])", "move-order", "after the end"),
        (f"(;{HEAD};B[a1]W[b2])", "sgf-syntax", "two moves"),
        (f"(;{HEAD};B[a1][b2])", "sgf-syntax", "two moves"),
        (f"(;{HEAD}RE[B+R];)", "no-moves", ""),
        (f"(;{HEAD};B[a1];W[b2])", "no-winner", "RE[B+R]"),
        (f"(;{HEAD}RE[?];B[a1];W[b2])", "no-winner", "2 moves"),
        (f"(;{HEAD}RE[B+R];B[a1];W[swap-sides];W[b2])", "no-winner", ""),
        (f"(;{HEAD}RE[W+R];B[a1];W[resign])", "winner-value", "RE[W+R]"),
        (b"(;GM[11]SZ[5]CA[UTF-8]PB[\xff]RE[B+];B[a1])", "not-utf8", "PB"),
        ("(;GM[11]SZ[5]CA[Shift_JIS]PB[x]RE[B+];B[a1])", "not-utf8", "Shift_JIS"),
        ("(;GM[11]SZ[5]CA[rot13]PB[x]RE[B+];B[a1])", "not-utf8", "rot13"),
        ("(;GM[11]SZ[5]x;B[a1])", "sgf-syntax", "without a value"),
        ("(;GM[11]SZ[5]PB[x]];B[a1])", "sgf-syntax", "not SGF"),
        ("(;GM[11]SZ[5];B a1)", "sgf-syntax", "without a value"),
        ("(;[11])", "sgf-syntax", "without a property"),
        ("()", "sgf-syntax", "without nodes"),
        ("((;GM[11]))", "sgf-syntax", "before the first node"),
        ("(;GM[11](;B[a1]);W[b2])", "sgf-syntax", "after a variation"),
        ("(;GM[11]SZ[5]" + 5000 * ";" + ")", "sgf-syntax", "too many nodes"),
    ],
)
def test_a_bad_game_is_one_rejected_record(read_text, text, reason, detail):
    text = text if isinstance(text, bytes) else text.encode()
    good = f"(;{HEAD}RE[B+R];B[a1];W[b2])".encode()
    _, rows, rejected = read_text(good + b"\n" + text + b"\n" + good + b"\n")
    assert len(rows) == 6
    assert [row["line_idx"] for row in rows] == [1, 1, 1, 3, 3, 3]
    assert [(each.record, each.reason) for each in rejected] == [(3, Reason(reason))]
    assert rejected[0].detail.startswith("game 2: ")
    assert detail in rejected[0].detail


@pytest.mark.parametrize("end", ["(;GM[11]SZ[5];B[a1", "(;GM[11]SZ[5];B[a1]\\", "(;GM[11]SZ[5];B[a1]", "("])
def test_a_game_without_an_end_is_rejected(read_text, end):
    _, rows, rejected = read_text(f"(;{HEAD}RE[B+R];B[a1];W[b2])\n{end}")
    assert len(rows) == 3
    assert [each.reason for each in rejected] == ["sgf-syntax"]


def test_a_damaged_file_yields_the_games_before_the_damage(tmp_path):
    game = f"(;{HEAD}RE[B+R];B[a1];W[b2])\n".encode()
    data = io.BytesIO()
    rng = np.random.default_rng(1)
    with gzip.GzipFile(fileobj=data, mode="wb") as file:
        for _ in range(2000):
            file.write(game.replace(b"RE", b"C[%d]RE" % rng.integers(1 << 62)))
    path = tmp_path / "a.sgf.gz"
    path.write_bytes(data.getvalue()[: len(data.getvalue()) // 2])
    with pytest.raises(FormatError, match="gzip"):
        read(path)
    reader, rows, rejected = read(path, salvage=True)
    assert reader.damage is not None
    assert len(rows) > 1000
    assert len(rows) % 3 == 0
    assert not rejected


@pytest.mark.parametrize("cut", range(1, 100, 11))
def test_damage_within_a_game_fails_the_file(tmp_path, cut):
    """The damage is found while a game is scanned, but does not reject only this game."""
    game = f"(;{HEAD}C[comment]RE[B+R];B[a1];W[b2])\n".encode()
    path = tmp_path / "a.sgf.gz"
    path.write_bytes(gzip.compress(game * 3, 0)[:-cut])
    with pytest.raises(FormatError) as caught:
        read(path)
    assert caught.value.code == "corrupt-gzip"
    reader, rows, rejected = read(path, salvage=True)
    assert (reader.damage.code, rejected) == ("corrupt-gzip", [])
    assert len(rows) == (9 if cut <= 9 else 6 if cut < 9 + len(game) else 3)


def test_players_dates_and_events_are_in_the_header(read_text):
    game = ";B[a1];W[b2])\n"
    text = "(;GM[11]SZ[5]PB[Ann\\]a]PW[B\n ob]DT[2024-05-06]EV[final]RE[B+R]" + game
    reader, _, _ = read_text(2 * text)
    listed = {"PB": "Ann]a", "PW": "B ob", "DT": "2024-05-06", "EV": "final", "RE": "B+R"}
    assert reader.header["games"] == [{"game": 1, **listed}, {"game": 2, **listed}]
    assert reader.header["run"] == {"date": "2024-05-06"}
    assert reader.header["spelling"] == {"B[a3]": 2}
    reader, _, _ = read_text(text + text.replace("05-06", "05-07"))
    assert "run" not in reader.header
    reader, _, _ = read_text("(;GM[11]SZ[5]PB[\xe9]CA[latin1]RE[B+R]".encode("latin-1") + game.encode())
    assert reader.header["games"][0]["PB"] == "é"


def test_the_header_is_bounded(read_text, monkeypatch):
    monkeypatch.setattr(sgf_module, "MAX_GAMES_LISTED", 3)
    reader, _, _ = read_text(5 * f"(;{HEAD}PB[{'x' * 100_000}]RE[B+R];B[a1];W[b2])\n")
    assert len(reader.header["games"]) == 3 < MAX_GAMES_LISTED
    assert {len(game["PB"]) for game in reader.header["games"]} == {512}
    assert reader.header["counts"]["games_not_listed"] == 2


def test_pieces_may_end_anywhere(read_text, monkeypatch):
    text = f"(;{HEAD}C[a\\]b\\\\]RE[B+R];B[a1];W[b2])\n(;GM[11\n(;{HEAD}RE[W+T];B[a1];W[swap-pieces];B[c3])\n"
    whole = read_text(text)[1:]
    for size in (1, 2, 3, 5, 7):
        monkeypatch.setattr(sgf_module, "_PIECE", size)
        assert read_text(text)[1:] == whole
    assert len(whole[1]) == 1


@pytest.mark.parametrize(
    "text",
    [
        f"\ufeff(;{HEAD}SZZ[3]RE[B];B[a1])",
        f"(;{HEAD}WK[b1]B[a1];BZ];W[b1])\n(   ;{HEAD}RE[B];B[a1])",
        f"(;{HEAD}\x00B[a1];BLACKANDWHITE[b1]RE[B])\n(;{HEAD}RE[B];B[a1])",
    ],
)
def test_salvaging_small_gzip_members_changes_nothing(tmp_path, text):
    """A salvaged stream returns the bytes of each member alone, however few."""
    raw = text.encode()
    path = tmp_path / "a.sgf.gz"
    path.write_bytes(b"".join(gzip.compress(raw[start : start + 1]) for start in range(len(raw))))
    found = []
    for salvage in (False, True):
        with SgfReader(path, salvage=salvage) as reader:
            batches = list(reader.batches())
        found.append(([batch.positions.to_pylist() for batch in batches], [b.rejected for b in batches]))
    assert found[0] == found[1]


def test_deep_nesting_needs_no_memory(read_text):
    _, rows, rejected = read_text(f"(;{HEAD}RE[B+R];B[a1]" + 200_000 * "(" + 200_000 * ")" + ";W[b2])\n")
    assert not rows
    assert [each.reason for each in rejected] == ["sgf-syntax"]


@settings(max_examples=150 if FULL else 50, deadline=None)
@given(
    st.binary(max_size=300)
    | st.text("()[];\\BWabc123 \n", max_size=300).map(str.encode)
    | st.lists(
        st.sampled_from(
            [
                "(;GM[11]SZ[5]",
                ";B[a1]",
                ";W[b2]",
                ";B[c3]",
                "RE[B+]",
                ")",
                "\n",
                "(",
                "[",
                "]",
                "\\",
                "AB[a1]",
            ]
        ),
        max_size=40,
    ).map(lambda parts: "".join(parts).encode())
)
def test_any_bytes_are_read_or_rejected(tmp_path_factory, content):
    assume(not is_gzip(content))
    path = tmp_path_factory.getbasetemp() / "fuzz.sgf"
    path.write_bytes(content)
    with SgfReader(path) as reader:
        records = sorted(
            record
            for batch in reader.batches()
            for record in [
                *batch.positions.column("record").to_pylist(),
                *(each.record for each in batch.rejected),
            ]
        )
    assert records == list(range(len(records)))


def test_games_of_other_kinds_are_rejected_in_files_of_little_golem(read_text):
    hex_game, other = "(;FF[4]EV[{}]SZ[5]RE[B];W[aa];B[bb])", "(;EV[havannah.in.DEFAULT.1]SZ[5];W[A1];B[B2])"
    texts = [hex_game.format(event) for event in ("null", "hex.ch.1", "St. Petersburg", "")] + [other]
    _, rows, rejected = read_text("\n".join(texts), "a.hsgf")
    assert len(rows) == 4 * 3
    assert [(each.record, each.reason) for each in rejected] == [(12, "sgf-game")]
    assert "EV[havannah.in.default.1]" in rejected[0].detail


@pytest.mark.parametrize("name", ["a.sgf", "a.hsgf.gz", "A.SGF"])
def test_the_name_tells_that_a_text_is_sgf_if_it_does_not_begin_with_a_game(read_text, name):
    game = f"(;{HEAD}RE[B+R];B[a1];W[b2])\n"
    for before in ("", "From: Ann\nSubject: our game\n\n", " \n" * 40_000, "# caf\u00e9\n"):
        reader, rows, _ = read_text((before + game).encode("latin-1"), name)
        assert (reader.format, len(rows)) == ("sgf", 3)
    for empty in (b"", gzip.compress(b""), b"\r\n"):
        assert read_text(empty, name)[1:] == ([], [])


def test_a_name_of_links_does_not_hide_sgf(read_text):
    reader, rows, _ = read_text(f"(;{HEAD}RE[B+R];B[a1];W[b2])", "a.hexworld")
    assert (reader.format, len(rows)) == ("sgf", 3)


def test_a_text_in_utf_16_is_named(read_text):
    with pytest.raises(FormatError, match="Save the text as UTF-8"):
        read_text(f"(;{HEAD};B[a1])".encode("utf-16"))
