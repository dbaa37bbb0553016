"""The reader of HexWorld links."""

from __future__ import annotations

import gzip

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hexdata.board import BLUE, RED, cell_name, format_moves
from hexdata.demo.games import make_game
from hexdata.errors import FormatError, Reason
from hexdata.formats import open_source
from hexdata.formats.gunzip import is_gzip
from hexdata.formats.hexworld import HexWorldReader, looks_like_hexworld
from hexdata.formats.trmph import TrmphReader
from tests.pairs import FULL


def read(path):
    with open_source(path) as reader:
        batches = list(reader.batches())
    rows = pa.Table.from_batches([batch.positions for batch in batches]).to_pylist() if batches else []
    return reader, rows, [each for batch in batches for each in batch.rejected]


@pytest.fixture
def read_text(tmp_path):
    def function(text, name="a.hexworld"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read(path)

    return function


@pytest.mark.parametrize("n", [3, 13, 27, 32])
@pytest.mark.parametrize("head", ["https://hexworld.org/board/#{n}r9c1,", "#{n}c1,", "{n},", "{n}x{n}nr3c1,"])
def test_a_link_has_the_positions_of_the_same_game_in_trmph(read_text, tmp_path, n, head):
    moves, winner = make_game(0, 1, n)
    text = format_moves(moves, n)
    _, rows, rejected = read_text(f"{head.format(n=n)}{text}\n")
    trmph = tmp_path / "a.trmph"
    trmph.write_text(f"#{n},{text} {'br'[winner]}\n")
    with TrmphReader(trmph) as reader:
        expected = pa.Table.from_batches([batch.positions for batch in reader.batches()]).to_pylist()
    assert rows == expected
    assert not rejected


def test_the_moves_after_the_cursor_belong_to_the_game(read_text):
    _, whole, _ = read_text("5c1,a1b2c3:rb\n")
    for text in ("5c1,a1,b2c3:rb", "5c1,,a1b2c3:rb", "5c1,a1b2c3:rb,"):
        assert read_text(text)[1] == whole


@pytest.mark.parametrize(
    ("end", "winner", "end_reason"),
    [(":rb", RED, "resigned"), (":rw", BLUE, "resigned"), (":fb", RED, "unknown"), (":fw", BLUE, "unknown")],
)
def test_a_resignation_decides_the_game(read_text, end, winner, end_reason):
    _, rows, _ = read_text(f"5c1,a1b2{end}")
    assert [(row["winner"], row["value"], row["end_reason"], row["swap"]) for row in rows] == [
        (winner, winner, end_reason, None)
    ] * 3


def test_a_swap_of_pieces_is_a_game_that_red_begins_with_the_mirrored_cell(read_text):
    _, rows, _ = read_text("5c1,b1:sc3:rw")
    assert [(row["move"], row["player_to_move"], row["swap"]) for row in rows] == [
        (5, RED, "pieces"),
        (12, BLUE, "pieces"),
        (None, RED, "pieces"),
    ]
    assert rows[1]["board"][3] & 2  # bit 30 = 25 + 5: a red stone on a2


def test_a_swap_of_sides_leaves_the_stones(read_text):
    _, swapped, _ = read_text("5c1,b1:Sc3:rw")
    _, plain, _ = read_text("5c1,b1c3:rw")
    assert swapped == [row | {"swap": "sides"} for row in plain]


def test_a_pass_is_a_position_without_a_move(read_text):
    _, rows, _ = read_text("5c1,a1:pb2:rw")
    assert [(row["move"], row["player_to_move"]) for row in rows] == [(0, 0), (None, 1), (6, 0), (None, 1)]
    assert rows[1]["board"] == rows[2]["board"]


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        ("hello", "hexworld-syntax", "found 'hello'"),
        ("5c1,a1b2x:rb", "hexworld-syntax", "found 'x:rb'"),
        ("5c1,a1 b", "hexworld-syntax", "not a HexWorld link"),
        ("5c1,A1", "hexworld-syntax", ""),
        ("https://hexworld.org/board/5c1,a1b2:rb", "hexworld-syntax", "found 'https"),
        ("5x6c1,a1b2:rb", "board-size", "not square; found 5 x 6"),
        ("33c1,a1b2:rb", "board-size", "3 to 32"),
        ("7c1,a1b2:rb", "board-size", "first game"),
        ("5c1,a1f2:rb", "trmph-cell", "a1 to e5"),
        ("5c1,a1b2a1:rb", "repeated-move", "ply 2"),
        ("5c1,b1:sa2:rb", "repeated-move", "ply 1"),
        ("5c1,a1b2:s:rb", "move-order", "second move"),
        ("5c1,:s:rb", "move-order", "second move"),
        ("5c1,a1:s:S:rb", "move-order", "second move"),
        ("5c1,a1:rb:rw", "move-order", "after the end"),
        ("5c1,a1:rbb2", "move-order", "after the end"),
        ("5c1,a1" + 26 * ":p" + ":rb", "move-order", "passes"),
        ("5c1,:p:rb", "no-moves", ""),
        ("5c1", "no-moves", ""),
        ("5c1,a1b2", "no-winner", "a resignation"),
        ("5c1,a1" + 70_000 * " ", "line-too-long", ""),
        (b"5c1,a1 # \xff", "not-utf8", ""),
    ],
)
def test_a_bad_line_is_one_rejected_record(read_text, line, reason, detail):
    line = line if isinstance(line, bytes) else line.encode()
    _, rows, rejected = read_text(b"# comment\n5c1,a1b2:rb\n" + line + b"\n\n5c1,a1b2:rw # played fast\n")
    assert len(rows) == 6
    assert [(each.record, each.reason) for each in rejected] == [(3, Reason(reason))]
    assert rejected[0].detail.startswith("line 3: ")
    assert detail in rejected[0].detail


def test_facts_of_comments_and_spellings_are_in_the_header(read_text):
    reader, _, _ = read_text("# Model: x\n5c1,a1:rb\n#5c1,a1:rb\nhttps://hexworld.org/board/#5c1,a1:rb\n")
    assert reader.header == {
        "spelling": {"": 1, "#": 1, "https://...#": 1},
        "counts": {"comments": 1, "winners_from_chain": 0, "bytes_between_games": 11},
        "run": {"model": "x"},
    }


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        ("https://hexworld.org/board/#11,a1b2", "a.txt", "hexworld"),
        ("# games\n\n11r9c1,a1b2", "a.txt", "hexworld"),
        ("11,a1b2c3", "a.txt", "hexworld"),
        ("#11c1,a1b2", "a.trmph", "hexworld"),
        ("#11,a1b2 b", "a.txt", "trmph"),
        ("http://www.trmph.com/hex/board#11,a1b2 b", "a.txt", "trmph"),
        ("#11,a1b2:rb", "a.hexworld.gz", "hexworld"),
        ("", "a.hexworld", "hexworld"),
        ("", "a.trmph", "trmph"),
        ("11,12,13", "a.txt", None),
        ("hello", "a.txt", None),
        ("", "a.txt", None),
    ],
)
def test_the_content_tells_the_format(tmp_path, text, name, found):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    if found is None:
        with pytest.raises(FormatError):
            open_source(path)
    else:
        with open_source(path) as reader:
            assert reader.format == found


@settings(max_examples=150 if FULL else 50, deadline=None)
@given(st.binary(max_size=300) | st.text("0123456789xrcmn,:abzSspfw#\n ", max_size=300).map(str.encode))
def test_any_bytes_are_read_or_rejected(tmp_path_factory, content):
    assume(not is_gzip(content))
    path = tmp_path_factory.getbasetemp() / "fuzz.hexworld"
    path.write_bytes(content)
    looks_like_hexworld(content)
    with HexWorldReader(path) as reader:
        records = sorted(
            record
            for batch in reader.batches()
            for record in [
                *batch.positions.column("record").to_pylist(),
                *(each.record for each in batch.rejected),
            ]
        )
    assert records == list(range(len(records)))


def test_columns_after_z_are_named_by_two_letters(read_text):
    _, rows, _ = read_text("27c1,z1aa1aa27:rw")
    assert [row["move"] for row in rows] == [25, 26, 728, None]
    assert cell_name(728, 27) == "aa27"
