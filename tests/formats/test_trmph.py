"""Reader and writer of TRMPH text: valid games, rejected lines, gzip and limits."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import sys
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.board import BLUE, RED, pack_boards, parse_moves, replay
from hexdata.errors import FormatError
from hexdata.formats import open_source
from hexdata.formats.source import BATCH_ROWS, RawBatch
from hexdata.formats.trmph import DEFAULT_LIMITS, TrmphReader, looks_like_trmph, write_trmph
from hexdata.schema import raw_schema

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "trmph"

CHAIN = "a1b1a2b2a3"
"""Blue wins down column a of the smallest board."""


def save(folder: Path, text: str | bytes, name: str = "games.trmph") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(path: Path) -> tuple[TrmphReader, list[RawBatch]]:
    with TrmphReader(path) as reader:
        return reader, list(reader.batches())


def rows(batches: Iterable[RawBatch]) -> list[dict[str, object]]:
    return pa.Table.from_batches([batch.positions for batch in batches]).to_pylist()


def rejections(batches: Iterable[RawBatch]) -> list[tuple[int, str]]:
    return [(rejection.record, rejection.reason) for batch in batches for rejection in batch.rejected]


def test_a_game_yields_all_positions(tmp_path: Path) -> None:
    reader, (batch,) = read(save(tmp_path, "#3,a1c3b2 r\n"))
    assert (reader.format, reader.board_size) == ("trmph", 3)
    assert batch.positions.schema.equals(raw_schema(3), check_metadata=True)
    batch.positions.validate(full=True)
    boards = [board.tobytes() for board in pack_boards(replay([0, 8, 4], 3))]
    absent = ("policy", "file_idx", "value_sample_tier", "end_reason", "swap", "origin", "metadata")
    shared = dict.fromkeys(absent)
    assert batch.positions.to_pylist() == [
        shared
        | {"record": ply, "board": boards[ply], "move": move, "value": 1.0, "player_to_move": ply % 2}
        | {"line_idx": 1, "position_in_game": ply, "total_positions": 4, "winner": RED}
        for ply, move in enumerate([0, 8, 4, None])
    ]


@pytest.mark.parametrize(("letter", "winner"), [("b", BLUE), ("1", BLUE), ("r", RED), ("2", RED), ("R", RED)])
def test_the_winner_sets_the_value(tmp_path: Path, letter: str, winner: int) -> None:
    _, batches = read(save(tmp_path, f"#3,a1 {letter}"))
    assert {(row["winner"], row["value"]) for row in rows(batches)} == {(winner, float(winner))}


def test_a_missing_winner_is_that_of_the_chain(tmp_path: Path) -> None:
    reader, batches = read(save(tmp_path, f"#3,{CHAIN}\n#3,a1b1 b\n#3,a1b1a2\n#3,a1a2b1b2c3c2 # red's row\n"))
    winner_of_line = {row["line_idx"]: row["winner"] for row in rows(batches)}
    assert winner_of_line == {1: BLUE, 2: BLUE, 4: RED}
    assert rejections(batches) == [(6 + 3, "no-winner")]
    assert reader.header["counts"] == {"comments": 0, "winners_from_chain": 2, "bytes_between_games": 0}


def test_a_stated_winner_is_kept_against_the_chain(tmp_path: Path) -> None:
    _, batches = read(save(tmp_path, f"#3,{CHAIN} r"))
    assert {row["winner"] for row in rows(batches)} == {RED}


def test_invalid_lines_are_one_rejected_record_each(tmp_path: Path) -> None:
    lines = [
        b"# a header comment",
        b"nonsense",
        b"#3,a1b2 b",
        b"",
        b"#3,a1d1 b",
        b"#3,a1b2a1 r",
        b"#4,a1b2 b",
        b"#99,a1 b",
        b"#3,a1 b # caf\xe9",
        b"#3,a1" + b" " * 70_000 + b"b",
        b"   \t ",
        b" " * 70_000 + b"#3,a1 b",
        b"#3,a1 b # caf\xc3\xa9",
    ]
    reader, batches = read(save(tmp_path, b"\n".join(lines)))
    assert rejections(batches) == [
        (0, "trmph-syntax"),
        (4, "trmph-cell"),
        (5, "repeated-move"),
        (6, "board-size"),
        (7, "board-size"),
        (8, "not-utf8"),
        (9, "line-too-long"),
        (10, "line-too-long"),
    ]
    assert [(row["record"], row["line_idx"]) for row in rows(batches)] == [
        (1, 3),
        (2, 3),
        (3, 3),
        (11, 11),
        (12, 11),
    ]
    assert sum(batch.records for batch in batches) == 13
    between = sum(len(lines[number]) + 1 for number in (0, 3, 10))
    assert reader.header["counts"] == {
        "comments": 1,
        "winners_from_chain": 0,
        "bytes_between_games": between,
    }
    details = [rejection.detail for rejection in batches[0].rejected]
    assert details[0] == "line 2: not a TRMPH line; found 'nonsense'; expected #13,a1b2c3 b"
    assert [detail.split(":")[0] for detail in details] == [f"line {n}" for n in (2, 5, 6, 7, 8, 9, 10, 12)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("#5, b", "no-moves"),
        ("#5,", "no-moves"),
        ("#5, # resigned at once", "no-moves"),
        ("http://www.trmph.com/hex/board#5, 2", "no-moves"),
        ("#99, b", "board-size"),
        ("#5,a1", "no-winner"),
        ("#5,a1 x", "trmph-syntax"),
        ("#5 b", "trmph-syntax"),
        ("# 5 b", None),  # a comment
        ("#5,a1 b", None),
    ],
)
def test_a_line_without_moves_is_rejected(tmp_path: Path, line: str, reason: str | None) -> None:
    """It would be an empty board with a result, which teaches nothing."""
    _, batches = read(save(tmp_path, f"#5,a1b1 b\n{line}\n#5,c1 r\n"))
    assert rejections(batches) == ([(3, reason)] if reason else [])
    games = [1, 2, 3] if line == "#5,a1 b" else [1, 3]
    assert sorted({row["line_idx"] for row in rows(batches)}) == games
    assert sum(b.records for b in batches) == len(rows(batches)) + len(rejections(batches))
    assert all(row["total_positions"] > 1 for row in rows(batches))


def test_the_first_valid_game_sets_the_board_size(tmp_path: Path) -> None:
    reader, batches = read(save(tmp_path, "#5,a1a1 b\n#7,a1b1\n#3,a1 b\n#5,a1 b\n"))
    assert reader.board_size == 3
    assert rejections(batches) == [(0, "repeated-move"), (1, "no-winner"), (4, "board-size")]


@pytest.mark.parametrize("text", ["", "\n\n", "# only\n# comments\n"])
def test_a_file_without_games_has_no_records(tmp_path: Path, text: str) -> None:
    reader, batches = read(save(tmp_path, text))
    assert batches == []
    assert reader.board_size is None


def test_a_file_of_invalid_lines_counts_them(tmp_path: Path) -> None:
    reader, batches = read(save(tmp_path, "x\n" * (BATCH_ROWS + 1)))
    assert reader.board_size is None
    assert [(batch.positions.num_rows, len(batch.rejected)) for batch in batches] == [(0, BATCH_ROWS), (0, 1)]
    assert rejections(batches)[-1] == (BATCH_ROWS, "trmph-syntax")


def test_gzip_and_line_endings_do_not_matter(tmp_path: Path) -> None:
    text = f"# head\n#3,{CHAIN} b\n\nhttp://www.trmph.com/hex/board#3,a1 2\n"
    reader, plain = read(save(tmp_path, text))
    assert reader.header["spelling"] == {"#3,... b/r": 1, "http://...#3,... 1/2": 1}
    assert json.loads(json.dumps(reader.header)) == reader.header
    variants = [gzip.compress(text.encode()), text.replace("\n", "\r\n").encode(), text.rstrip().encode()]
    for number, variant in enumerate(variants):
        _, again = read(save(tmp_path, variant, f"{number}.bin"))
        assert rows(again) == rows(plain)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-12], lambda b: b[:40] + b"\xff" * 20 + b[60:], lambda b: b[:-4] + b"...."]
)
def test_a_damaged_gzip_stream_fails_the_file(tmp_path: Path, damage: object) -> None:
    text = "".join(f"#13,{chr(97 + i % 13)}{1 + i % 11} b\n" for i in range(500))
    path = save(tmp_path, damage(gzip.compress(text.encode())), "games.trmph.gz")
    with pytest.raises(FormatError, match="corrupt or ends early") as error:
        read(path)
    assert error.value.code == "corrupt-gzip"
    assert error.value.path == str(path)


@pytest.mark.parametrize(
    ("filler", "limits", "code"),
    [
        (b"\n", {}, "limit-ratio"),
        (b" \r\n", {}, "limit-ratio"),
        (b" ", {}, "limit-ratio"),
        (b"#3,a1 b\n", {"ratio_floor": 1 << 18}, "limit-ratio"),
        (b"no game\n", {"ratio_floor": 1 << 18}, "limit-ratio"),
        (b"\n", {"decompressed_bytes": 1 << 18}, "limit-size"),
    ],
)
@pytest.mark.parametrize("salvage", [False, True])
def test_gzip_bombs(tmp_path: Path, filler: bytes, limits: dict[str, int], code: str, salvage: bool) -> None:
    bomb = b"#3,a1 b\n" + filler * ((5 << 20) // len(filler))
    path = save(tmp_path, gzip.compress(bomb, mtime=0))
    reader = TrmphReader(path, limits=replace(DEFAULT_LIMITS, **limits), salvage=salvage)
    with reader, pytest.raises(FormatError) as error:
        list(reader.batches())
    assert error.value.code == code
    assert error.value.path == str(path)


def test_games_compress_far_less_than_the_limit(tmp_path: Path) -> None:
    """All games here have the same first moves, so they compress better than real games."""
    opening = "".join(f"{column}{row}" for row in range(1, 11) for column in "ab")
    tails = np.random.default_rng(1).permuted(np.tile(np.arange(1, 14), (5000, 1)), axis=1)
    lines = [opening + "".join(f"c{row}d{row}" for row in tail) for tail in tails.tolist()]
    text = "".join(f"#13,{line} b\n" for line in lines)
    limits = replace(DEFAULT_LIMITS, ratio=DEFAULT_LIMITS.ratio // 10, ratio_floor=1)
    with TrmphReader(save(tmp_path, gzip.compress(text.encode())), limits=limits) as reader:
        assert sum(batch.records for batch in reader.batches()) == 5000 * 47


@pytest.mark.parametrize("blank", ["\n", "\r\n", " \t\r\n", "\f\n\n \n"])
@pytest.mark.parametrize("packed", [False, True])
def test_blank_lines_are_counted_and_cheap(tmp_path: Path, blank: str, packed: bool) -> None:
    count = 30_000
    text = f"#3,a1 b\n{blank * count} \t#3,a1 b\n{blank * count}\rx\n\n\n  #3,a1b1 b".encode()
    path = save(tmp_path, gzip.compress(text) if packed else text)
    calls = 0

    def count_calls(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count_calls)
    try:
        _, batches = read(path)
    finally:
        sys.setprofile(None)
    number = 3 + 2 * count * blank.count("\n")
    assert [rejection.detail.split(":")[0] for rejection in batches[0].rejected] == [f"line {number}"]
    assert [row["line_idx"] for row in rows(batches)] == [1, 1, 2, 2, 4, 4, 4]
    assert calls < count // 3


def test_batches_are_full_and_do_not_split_games(tmp_path: Path) -> None:
    lines = [f"#13,{'a1b2c3d4e5f6g7h8'[: 2 * length]} {'br'[length % 2]}\n" for length in range(1, 9)] * 400
    _, batches = read(save(tmp_path, "".join(lines)))
    table = pa.Table.from_batches([batch.positions for batch in batches])
    assert table["record"].to_pylist() == list(range(400 * sum(range(2, 10))))
    assert [BATCH_ROWS - 9 < batch.positions.num_rows <= BATCH_ROWS for batch in batches[:-1]] == [True] * 2
    assert all(batch.positions["position_in_game"][0].as_py() == 0 for batch in batches)


def test_memory_does_not_grow_with_file_or_line_length(tmp_path: Path) -> None:
    # A line of 8 MB, then 60 bad ones of 60 kB: neither may be held.
    path = tmp_path / "games.trmph"
    with path.open("wb") as file:
        file.write(b"#13," + b"a1" * (4 << 20) + b"\n")
        file.writelines([b"#13," + b"a1" * 30_000 + b"\n"] * 60)
    tracemalloc.start()
    _, batches = read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rejections(batches) == [(0, "line-too-long"), *((n, "repeated-move") for n in range(1, 61))]
    assert peak < 4 << 20


games = st.lists(
    st.tuples(
        st.permutations(range(25)).flatmap(lambda order: st.integers(0, 25).map(lambda m: order[:m])),
        st.sampled_from([BLUE, RED]),
    ),
    max_size=8,
)


@given(games)
def test_written_games_are_read_back(written: list[tuple[list[int], int]]) -> None:
    text = io.StringIO()
    assert write_trmph(text, [(np.array(m, np.uint16), winner) for m, winner in written], 5) == len(written)
    lines = text.getvalue().splitlines()
    assert [parse_moves(line[3:-2], 5).tolist() for line in lines] == [moves for moves, _ in written]
    assert [line[-1] for line in lines] == ["br"[winner] for _, winner in written]


def test_files_are_written_in_the_newer_notation(tmp_path: Path) -> None:
    path = tmp_path / "games.trmph"
    moves = np.array([0, 8], np.uint16)
    write_trmph(path, [(moves, BLUE), (moves, RED), (moves, None)], 3)
    assert path.read_bytes() == b"#3,a1c3 b\n#3,a1c3 r\n#3,a1c3\n"


@pytest.mark.parametrize(
    ("head", "answer"),
    [
        (b"#13,a1b2c3 b\n", True),
        (b"# by hand\n\n#13,a1b2", True),
        (b"http://www.trmph.com/hex/board#11,a1 1", True),
        (b"a broken line\n#13,a1 b\n", True),
        (b"# only a comment\n\n# or two", True),
        (b"\n", True),
        (b"", False),
        (b"a,b,c\n1,2,3\n", False),
        (b"#13 of 20\nprint(1)\n", False),
        (b"\x80\x04\x95\x00\n#13,a1b2c3 b\n", False),
        (b'{"game": "#13,a1b2"}', False),
    ],
)
def test_the_format_is_detected_from_the_content(head: bytes, answer: bool) -> None:
    assert looks_like_trmph(head) is answer


@pytest.mark.skipif(not DATA.is_dir(), reason="real games are not here")
@pytest.mark.parametrize(
    ("name", "size", "games"),
    [
        ("neurohex_00", 13, 994),
        ("realmix_A", 13, 20),
        ("wolve_10x10", 10, 500),
        ("fusekipedia_19x19", 19, 1931),
    ],
)
def test_real_files_are_read_completely(name: str, size: int, games: int) -> None:
    path = DATA / f"{name}.trmph"
    reader, batches = read(path)
    assert reader.board_size == size
    assert rejections(batches) == []
    table = pa.Table.from_batches([batch.positions for batch in batches])
    finals = table.filter(table["move"].is_null())
    assert finals.num_rows == games
    lines = path.read_text().splitlines()
    assert finals["winner"].to_pylist() == ["br".index(line[-1]) for line in lines]
    last = replay(parse_moves(lines[-1].split(",")[1][:-2], size), size)
    assert table["board"].to_pylist()[-len(last) :] == [board.tobytes() for board in pack_boards(last)]


@pytest.mark.parametrize("rest", [b"#13,a1b2 b\n", b"# made by hand\r\n#13,a1b2 b\r\n", b""])
def test_a_byte_order_mark_is_ignored(tmp_path, rest):
    path = tmp_path / "games.trmph"
    path.write_bytes(codecs.BOM_UTF8 + rest)
    with open_source(path) as reader:
        batches = list(reader.batches())
    assert sum(batch.positions.num_rows for batch in batches) == 3 * rest.count(b"#13,")
    assert not any(batch.rejected for batch in batches)
