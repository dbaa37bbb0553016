"""The reader of KataHex's training data, compared with an independent writer, and hostile archives."""

from __future__ import annotations

import gzip
import struct
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.board import MAX_SIZE, unpack_boards, winner_of
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import FormatError, Reason, RejectRateError
from hexdata.formats import open_source
from hexdata.formats.gunzip import GunzipLimits
from hexdata.formats.katago import KataHexReader
from hexdata.live.source_games import extract_games
from hexdata.loader import Loader
from hexdata.schema import raw_schema
from hexdata.verify import check_round_trip, verify_store
from tests.pairs import FULL

BLACK, WHITE = 1, 2


@dataclass
class Row:
    """A position as KataHex has it: stones by (x, y), black connects y = 0 with y = n - 1."""

    n: int
    stones: dict[tuple[int, int], int] = field(default_factory=dict)
    player: int = BLACK
    visits: dict[tuple[int, int], int] | None = field(default_factory=lambda: {(0, 0): 3, (1, 0): 1})
    """None: the file has a placeholder."""
    passes: int = 0
    black: tuple[float, float, float] = (1.0, 0.0, 0.0)
    """Win, loss and no result of black: the game, or the search of a side position."""
    search: tuple[float, float, float] = (0.6, 0.4, 0.0)
    """The same of the search."""
    hash: tuple[int, int] = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
    turn: int = 0
    side: bool = False
    root_visits: int = 600
    weight: float = 1.0
    network: float = 0.25
    """Win minus loss of black."""
    max_moves: float | None = None


def columns_of(row: Row) -> list[float]:
    """The 64 columns of globalTargetsNC, as trainingwrite.cpp fills them."""
    out = [0.0] * 64
    white = row.player == WHITE

    def put(column: int, black: Sequence[float]) -> None:
        out[column], out[column + 1], out[column + 2] = black
        if white:
            out[column], out[column + 1] = black[1], black[0]

    put(0, row.black)
    put(4, (0.9, 0.1, 0.0))
    put(8, (0.8, 0.2, 0.0))
    put(12, (0.7, 0.3, 0.0))
    put(16, row.search)
    out[25] = row.weight
    out[26] = 0.0 if row.visits is None else 1.0
    out[28] = 0.0 if row.side else 1.0
    out[30], out[31], out[32] = 0.5, 1.5, 2.5
    out[33] = 0.0 if row.side else 1.0
    for i, part in enumerate(row.hash):
        out[41 + 3 * i] = part & 0x3FFFFF
        out[42 + 3 * i] = (part >> 22) & 0x3FFFFF
        out[43 + 3 * i] = (part >> 44) & 0xFFFFF
    out[51] = row.turn
    out[55] = 2
    out[57] = -row.network if white else row.network
    out[60] = row.root_visits
    out[63] = 1
    return out


def arrays_of(rows: Sequence[Row], edge: int) -> dict[str, np.ndarray]:
    """The arrays of the file. Cells are placed one by one, transposed if white moves, as in C++."""
    area = edge * edge
    planes = np.zeros((len(rows), 22, (area + 7) // 8), np.uint8)
    inputs = np.zeros((len(rows), 19), np.float32)
    policy = np.zeros((len(rows), 2, area + 1), np.int16)
    for i, row in enumerate(rows):

        def pos(x: int, y: int, row: Row = row) -> int:
            return x * edge + y if row.player == WHITE else y * edge + x

        def put(plane: int, x: int, y: int, i: int = i, pos=pos) -> None:
            planes[i, plane, pos(x, y) // 8] |= 1 << (7 - pos(x, y) % 8)

        for y in range(row.n):
            for x in range(row.n):
                put(0, x, y)
                if (x, y) in row.stones:
                    put(1 if row.stones[x, y] == row.player else 2, x, y)
        inputs[i, 0] = 1.0 if row.player == WHITE else 0.0
        if row.max_moves is not None:
            inputs[i, 4:6] = 1.0, row.max_moves
        if row.visits is None:
            policy[i, 0] = 1
        else:
            for (x, y), visits in row.visits.items():
                policy[i, 0, pos(x, y)] = visits
            policy[i, 0, area] = row.passes
        policy[i, 1] = 1
    targets = np.array([columns_of(row) for row in rows], np.float32).reshape(-1, 64)
    return {
        "binaryInputNCHWPacked": planes,
        "globalInputNC": inputs,
        "policyTargetsNCMove": policy,
        "globalTargetsNC": targets,
        "scoreDistrN": np.zeros((len(rows), 2 * area + 120), np.int8),
        "valueTargetsNCHW": np.zeros((len(rows), 5, edge, edge), np.int8),
    }


def kata_header(array: np.ndarray, descr: str | None = None, shape: str | None = None) -> bytes:
    """The header of numpywrite.cpp: 256 bytes."""
    shape = shape or ",".join(map(str, array.shape))
    text = f"{{'descr':'{descr or array.dtype.str}','fortran_order':False,'shape':({shape})}}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 246) + text.ljust(245).encode() + b"\n"


def write_members(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def members_of(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: kata_header(array) + array.tobytes() for name, array in arrays.items()}


def write_kata(path: Path, rows: Sequence[Row], edge: int) -> Path:
    """Write a file as the self-play does: names without ".npy"."""
    return write_members(path, members_of(arrays_of(rows, edge)))


def write_shuffled(path: Path, rows: Sequence[Row], edge: int) -> Path:
    """Write a file as shuffle.py does, with np.savez_compressed."""
    np.savez_compressed(path, **arrays_of(rows, edge))
    return path


def read(path: Path, **options) -> tuple[pa.Table, list[tuple[int, str]], KataHexReader]:
    with open_source(path, **options) as reader:
        assert isinstance(reader, KataHexReader)
        batches = list(reader.batches())
        for batch in batches:
            assert batch.positions.schema == raw_schema(reader.board_size or 3, reader.targets)
        size = reader.board_size or 3
        tables = [b.positions for b in batches if b.positions.num_rows]
        table = pa.Table.from_batches(tables, raw_schema(size, reader.targets))
        return table, [(r.record, str(r.reason)) for b in batches for r in b.rejected], reader


def cell(x: int, y: int, n: int) -> int:
    """Return the index of a cell: x is the column, y the row."""
    return y * n + x


# Known positions


def test_a_position_with_black_to_move_is_as_in_the_file(tmp_path):
    row = Row(5, {(2, 0): BLACK, (4, 1): WHITE}, BLACK, {(0, 3): 30, (3, 0): 10}, turn=2)
    table, rejected, reader = read(write_kata(tmp_path / "a.npz", [row], 7))
    assert (reader.format, reader.board_size, rejected) == ("katahex", 5, [])
    (position,) = table.to_pylist()
    planes = unpack_boards(np.frombuffer(position["board"], np.uint8)[np.newaxis], 5, np.uint8)[0]
    assert np.argwhere(planes).tolist() == [[0, 0, 2], [1, 1, 4]]  # blue c1, red e2
    assert position["player_to_move"] == 0
    assert position["move"] is None
    assert position["policy"] == [
        {"cell": cell(3, 0, 5), "probability": 0.25},
        {"cell": cell(0, 3, 5), "probability": 0.75},
    ]
    assert (position["value"], position["winner"]) == (0.0, 0)
    assert position["root_value"] == pytest.approx(0.4, abs=1e-7)
    assert (position["visits"], position["weight"]) == (600, 1.0)
    assert (position["position_in_game"], position["total_positions"]) == (2, None)
    assert position["extra.network_win_loss"] == 0.25
    assert position["extra.td_long"] == pytest.approx(0.8)
    assert position["extra.game_type"] == 2
    assert position["extra.max_moves"] is None


def test_a_position_with_white_to_move_is_transposed_back(tmp_path):
    row = Row(5, {(2, 0): BLACK}, WHITE, {(0, 3): 30, (3, 0): 10}, search=(0.6, 0.4, 0.0), turn=1)
    file = write_kata(tmp_path / "a.npz", [row], 5)
    with np.load(file) as npz:  # the stone at x = 2, y = 0 is in row 2, column 0
        assert np.unpackbits(npz["binaryInputNCHWPacked"][0, 2])[2 * 5 + 0] == 1
    table, _, _ = read(file)
    (position,) = table.to_pylist()
    planes = unpack_boards(np.frombuffer(position["board"], np.uint8)[np.newaxis], 5, np.uint8)[0]
    assert np.argwhere(planes).tolist() == [[0, 0, 2]]
    assert position["player_to_move"] == 1
    assert [p["cell"] for p in position["policy"]] == [cell(3, 0, 5), cell(0, 3, 5)]
    assert (position["value"], position["winner"]) == (0.0, 0)  # black won, whoever moves
    assert position["root_value"] == pytest.approx(0.4, abs=1e-7)
    assert position["extra.network_win_loss"] == -0.25  # from the view of the player to move


def test_the_winner_of_a_game_connects_its_sides_in_the_store(tmp_path):
    """A column of black stones connects top and bottom: blue won, also in a row in which white moves."""
    stones = {(1, y): BLACK for y in range(3)} | {(2, 0): WHITE, (2, 1): WHITE}
    rows = [Row(3, stones, player, {(0, 0): 4}, turn=5) for player in (BLACK, WHITE)]
    table, _, _ = read(write_kata(tmp_path / "a.npz", rows, 3))
    boards = np.stack([np.frombuffer(b, np.uint8) for b in table["board"].to_pylist()])
    assert winner_of(unpack_boards(boards, 3, np.uint8)).tolist() == [0, 0]
    assert table["value"].to_pylist() == [0.0, 0.0]


def test_a_single_visited_cell_is_a_move(tmp_path):
    rows = [
        Row(4, visits={(3, 1): 50}),
        Row(4, visits={(3, 1): 50}, passes=50),
        Row(4, visits=None),
        Row(4, player=WHITE, visits={(3, 1): 7}),
    ]
    table, rejected, reader = read(write_kata(tmp_path / "a.npz", rows, 6))
    assert rejected == []
    assert table["move"].to_pylist() == [cell(3, 1, 4), None, None, cell(3, 1, 4)]
    assert table["policy"].to_pylist() == [None, [{"cell": 7, "probability": 0.5}], None, None]
    assert reader.header["counts"]["without_policy"] == 1


def test_side_positions_have_a_value_of_their_search_and_no_winner(tmp_path):
    rows = [Row(4, side=True, black=(0.25, 0.75, 0.0)), Row(4, side=True, black=(1.0, 0.0, 0.0))]
    table, _, reader = read(write_kata(tmp_path / "a.npz", rows, 4))
    assert table["value"].to_pylist() == [0.75, 0.0]
    assert table["winner"].to_pylist() == [None, None]
    assert table["position_in_game"].to_pylist() == [None, None]
    assert table["line_idx"].null_count == 0
    assert reader.header["counts"]["side_positions"] == 2


def test_the_hash_of_a_game_gives_its_ids(tmp_path):
    rows = [
        Row(4, hash=(1, 2)),
        Row(4, hash=(1, 3)),
        Row(4, hash=(1 << 31 | 1, 2)),
        Row(4, hash=((1 << 64) - 1, (1 << 64) - 1)),
        Row(4, hash=(0, 0)),
    ]
    table, _, reader = read(write_kata(tmp_path / "a.npz", rows, 4))
    assert table["file_idx"].to_pylist() == [1, 1, 1, (1 << 31) - 1, None]
    assert table["line_idx"].to_pylist() == [2, 3, 2, (1 << 31) - 1, None]
    assert table["position_in_game"].to_pylist() == [0, 0, 0, 0, None]
    assert reader.header["counts"]["rows_without_game"] == 1


def test_the_rule_of_a_maximum_number_of_moves_is_an_extra_column(tmp_path):
    rows = [Row(4, max_moves=0.5, search=(0.5, 0.25, 0.25)), Row(4)]
    table, _, _ = read(write_kata(tmp_path / "a.npz", rows, 4))
    assert table["extra.max_moves"].to_pylist() == [0.5, None]
    assert table["root_value"].to_pylist() == [0.375, pytest.approx(0.4)]
    assert table["extra.search_no_result"].to_pylist() == [0.25, 0.0]


def test_a_row_without_a_search_has_no_root_value(tmp_path):
    table, rejected, _ = read(write_kata(tmp_path / "a.npz", [Row(4, search=(0.0, 0.0, 0.0))], 4))
    assert (table["root_value"].to_pylist(), rejected) == ([None], [])


@st.composite
def positions(draw) -> Row:
    n = draw(st.integers(3, 7))
    cells = draw(st.permutations([(x, y) for x in range(n) for y in range(n)]))
    stones = draw(st.integers(0, n * n - 1))
    free = cells[stones:]
    visited = draw(st.integers(1, len(free)))
    win = draw(st.sampled_from([0.0, 1.0]))
    share = draw(st.integers(0, 8)) / 8
    return Row(
        n,
        {where: draw(st.sampled_from([BLACK, WHITE])) for where in cells[:stones]},
        draw(st.sampled_from([BLACK, WHITE])),
        {where: draw(st.integers(1, 30_000)) for where in free[:visited]},
        black=(win, 1 - win, 0.0),
        search=(share, 1 - share, 0.0),
        turn=draw(st.integers(0, 400)),
        root_visits=draw(st.integers(0, 100_000)),
        passes=draw(st.sampled_from([0, 0, 5])),
    )


@settings(max_examples=40 if FULL else 20, deadline=None)
@given(rows=st.lists(positions(), min_size=1, max_size=6), edge=st.integers(7, 9), shuffled=st.booleans())
def test_random_positions_are_read_as_they_were_written(tmp_path_factory, rows, edge, shuffled):
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    write = write_shuffled if shuffled else write_kata
    table, rejected, reader = read(write(path, rows, edge))
    n = rows[0].n
    assert reader.board_size == n
    assert rejected == [(i, "board-size") for i, row in enumerate(rows) if row.n != n]
    kept = [(i, row) for i, row in enumerate(rows) if row.n == n]
    assert table["record"].to_pylist() == [i for i, _ in kept]
    for (_, row), found in zip(kept, table.to_pylist(), strict=True):
        planes = unpack_boards(np.frombuffer(found["board"], np.uint8)[np.newaxis], n, np.uint8)[0]
        stones = {(x, y): BLACK + plane for plane, y, x in np.argwhere(planes).tolist()}
        assert stones == row.stones
        total = sum(row.visits.values()) + row.passes
        expected = {cell(x, y, n): np.float32(visits / total) for (x, y), visits in row.visits.items()}
        if found["move"] is None:
            assert {p["cell"]: p["probability"] for p in found["policy"]} == expected
        else:
            assert (found["policy"], expected) == (None, {found["move"]: 1.0})
        assert found["value"] == 1 - row.black[0]
        assert found["root_value"] == row.search[1]
        assert found["winner"] == int(row.black[0] == 0)
        assert found["player_to_move"] == int(row.player == WHITE)
        assert (found["visits"], found["position_in_game"]) == (row.root_visits, row.turn)


def test_blocks_of_any_size_give_the_same_positions(tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    rows = [
        Row(
            5,
            {(int(x), int(y)): BLACK for x, y in rng.integers(1, 5, (4, 2))},
            turn=i % 9,
            visits={(0, 0): 1 + i},
        )
        for i in range(50)
    ]
    path = write_shuffled(tmp_path / "a.npz", rows, 5)
    whole, _, _ = read(path)
    monkeypatch.setattr("hexdata.formats.katago._BLOCK_BYTES", 1)
    single, _, _ = read(path)
    assert single.column("record").num_chunks == 50
    assert single.combine_chunks() == whole.combine_chunks()


# Rejected rows


def changed(rows: Sequence[Row], edge: int = 5, **changes) -> dict[str, np.ndarray]:
    arrays = arrays_of(rows, edge)
    for name, change in changes.items():
        change(arrays[name])
    return arrays


def set_bit(array: np.ndarray, plane: int, position: int) -> None:
    array[0, plane, position // 8] |= 1 << (7 - position % 8)


TARGETS, PLANES, POLICY, INPUTS = (
    "globalTargetsNC",
    "binaryInputNCHWPacked",
    "policyTargetsNCMove",
    "globalInputNC",
)


@pytest.mark.parametrize(
    ("reason", "name", "change"),
    [
        ("board-shape", PLANES, lambda a: a.__setitem__((0, 0, 1), 0)),
        ("board-shape", PLANES, lambda a: set_bit(a, 0, 7 * 7 - 1)),
        ("board-shape", PLANES, lambda a: set_bit(a, 1, 7 * 7)),  # a bit after the last cell
        ("board-shape", PLANES, lambda a: a.__setitem__((0, 0), 0)),
        ("board-overlap", PLANES, lambda a: (set_bit(a, 1, 8), set_bit(a, 2, 8))),
        ("board-cells", PLANES, lambda a: set_bit(a, 1, 6)),
        ("player-range", INPUTS, lambda a: a.__setitem__((0, 0), 0.5)),
        ("player-range", INPUTS, lambda a: a.__setitem__((0, 0), np.nan)),
        ("player-range", INPUTS, lambda a: a.view("<u4").__setitem__((0, 0), 0x7FA00000)),  # a signalling NaN
        ("no-winner", TARGETS, lambda a: a.__setitem__((0, slice(0, 3)), (0, 0, 1))),
        ("no-winner", TARGETS, lambda a: a.__setitem__((0, slice(0, 3)), 0)),  # the game was not finished
        ("value-range", TARGETS, lambda a: a.__setitem__((0, slice(0, 2)), (1, 1))),
        ("value-range", TARGETS, lambda a: a.__setitem__((0, slice(0, 2)), (2, -1))),
        ("value-range", TARGETS, lambda a: a.__setitem__((0, 0), np.nan)),
        ("value-range", TARGETS, lambda a: a.__setitem__((0, slice(16, 18)), (0.5, 0.2))),
        ("value-range", TARGETS, lambda a: a.__setitem__((0, slice(16, 18)), (np.inf, -np.inf))),
        ("target-range", TARGETS, lambda a: a.__setitem__((0, 25), -1)),
        ("target-range", TARGETS, lambda a: a.__setitem__((0, 60), 1.5)),
        ("target-range", TARGETS, lambda a: a.__setitem__((0, 60), 2.0**31)),
        ("target-range", TARGETS, lambda a: a.__setitem__((0, 60), np.inf)),
        ("target-range", TARGETS, lambda a: a.__setitem__((0, 31), np.nan)),
        ("policy-values", POLICY, lambda a: a.__setitem__((0, 0, 1), -1)),
        ("policy-values", POLICY, lambda a: a.__setitem__((0, 0, 49), -1)),
        ("policy-values", POLICY, lambda a: a.__setitem__((0, 0, 6), 1)),  # outside the board
        ("policy-values", POLICY, lambda a: a.__setitem__((0, 0, 16), 1)),  # the stone
        ("policy-values", POLICY, lambda a: (a.__setitem__((0, 0), 0), a.__setitem__((0, 0, 49), 9))),
    ],
)
def test_an_invalid_row_is_rejected_and_the_others_are_kept(tmp_path, reason, name, change):
    rows = [Row(5, {(2, 2): BLACK}), Row(5, {(2, 2): BLACK}, WHITE)]
    arrays = changed(rows, 7, **{name: change})
    path = write_members(tmp_path / "a.npz", members_of(arrays))
    table, rejected, _ = read(path)
    assert rejected == [(0, reason)]
    assert table["record"].to_pylist() == [1]


def test_boards_of_unsupported_sizes_are_rejected(tmp_path):
    rows = [Row(2), Row(MAX_SIZE + 1), Row(MAX_SIZE), Row(5)]
    table, rejected, reader = read(write_kata(tmp_path / "a.npz", rows, MAX_SIZE + 1))
    assert rejected == [(0, "board-size"), (1, "board-size"), (3, "board-size")]
    assert (reader.board_size, table.num_rows) == (MAX_SIZE, 1)


def test_an_archive_without_rows_has_no_positions(tmp_path):
    table, rejected, reader = read(write_kata(tmp_path / "a.npz", [], 5))
    assert (table.num_rows, rejected, reader.board_size) == (0, [], None)


# Archives that are refused as a whole


def refused(path: Path, **options) -> Reason:
    with pytest.raises(FormatError) as error:
        read(path, **options)
    assert str(path) in str(error.value)
    return error.value.code


def test_data_of_another_game_or_version_is_refused(tmp_path):
    for name, change in (
        (PLANES, lambda a: set_bit(a, 9, 3)),
        (TARGETS, lambda a: a.__setitem__((0, 63), 2)),
    ):
        arrays = changed([Row(5)], **{name: change})
        path = write_members(tmp_path / "a.npz", members_of(arrays))
        assert refused(path) == "unknown-layout"


@pytest.mark.parametrize("name", [PLANES, POLICY, TARGETS, INPUTS])
def test_arrays_of_another_shape_or_type_are_refused(tmp_path, name):
    arrays = arrays_of([Row(5)], 5)
    for array in (arrays[name][..., :-1], arrays[name].astype(np.float64), arrays[name][:0], arrays[name][0]):
        path = tmp_path / "a.npz"
        np.savez(path, **(arrays | {name: array}))
        assert refused(path) == "unknown-layout"
    del arrays[name]
    np.savez(path, **arrays)
    assert refused(path) == "unknown-layout"


def test_a_pickle_in_an_array_is_not_read(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("code of the file was run",))

    arrays = arrays_of([Row(5)], 5) | {"scoreDistrN": np.array([Bomb()], object)}
    path = tmp_path / "a.npz"
    np.savez(path, allow_pickle=True, **{k: v for k, v in arrays.items() if k != "allow_pickle"})
    assert refused(path) == "unknown-layout"


@pytest.mark.parametrize("name", ["../globalInputNC", "/etc/passwd", "notes.txt", "globalInputNC.npy.npy"])
def test_unknown_members_are_refused(tmp_path, name):
    members = members_of(arrays_of([Row(5)], 5)) | {name: b"x"}
    assert refused(write_members(tmp_path / "a.npz", members)) == "unknown-layout"


def test_an_array_that_occurs_twice_is_refused(tmp_path):
    members = members_of(arrays_of([Row(5)], 5))
    members["globalInputNC.npy"] = members["globalInputNC"]
    assert refused(write_members(tmp_path / "a.npz", members)) == "unknown-layout"


def test_unusual_compression_is_refused(tmp_path):
    members = members_of(arrays_of([Row(5)], 5))
    path = write_members(tmp_path / "a.npz", members, zipfile.ZIP_LZMA)
    assert refused(path) == "unknown-layout"


def test_stored_arrays_are_read(tmp_path):
    path = write_members(tmp_path / "a.npz", members_of(arrays_of([Row(5)], 5)), zipfile.ZIP_STORED)
    assert read(path)[0].num_rows == 1


def test_an_encrypted_array_is_refused(tmp_path):
    path = write_kata(tmp_path / "a.npz", [Row(5)], 5)
    data = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + offset] |= 1
    path.write_bytes(data)
    assert refused(path) == "unknown-layout"


@pytest.mark.parametrize(
    "shape", ["1000000000000,22,4", "1,22,5", "-1,22,4", "1,22,4,1000000", "18446744073709551617,22,4", ""]
)
def test_a_declared_shape_is_compared_with_the_size_before_memory_is_allocated(tmp_path, shape):
    arrays = arrays_of([Row(5)], 5)
    members = members_of(arrays)
    members[PLANES] = kata_header(arrays[PLANES], shape=shape) + arrays[PLANES].tobytes()
    if not shape:
        members[PLANES] = members[PLANES].replace(b"(1,22,4)", b"()      ")
    assert refused(write_members(tmp_path / "a.npz", members)) in {"corrupt-array", "unknown-layout"}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x93NUMPY\x01",
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 70_000,
        b"\x93NUMPY\x01\x00\x00\x04" + b"(" * 1024,
        b"\x93NUMPY\x01\x00\x10\x00" + b"__import__('os')",
        b"\x93NUMPY\x01\x00\x40\x00" + b"{'descr':'|O','fortran_order':False,'shape':(1,)}".ljust(64),
    ],
)
def test_damaged_headers_of_arrays_are_refused(tmp_path, header):
    for name in (PLANES, "scoreDistrN"):
        members = members_of(arrays_of([Row(5)], 5)) | {name: header}
        path = write_members(tmp_path / "a.npz", members)
        assert refused(path) in {"corrupt-array", "unknown-layout", "truncated"}


@pytest.mark.parametrize("blank", [b"\x1f", b"\xa0"])
def test_other_blanks_in_the_header_of_an_array_are_refused(tmp_path, blank):
    """NumPy does not read them either."""
    members = members_of(arrays_of([Row(5)], 5))
    members[PLANES] = members[PLANES].replace(b" \n", blank + b"\n", 1)
    assert refused(write_members(tmp_path / "a.npz", members)) == "corrupt-array"


def test_a_zip_bomb_is_refused_before_it_is_decompressed(tmp_path):
    members = members_of(arrays_of([Row(5)], 5))
    zeros = np.zeros((1 << 20, 19), np.float32)
    members[INPUTS] = kata_header(zeros) + zeros.tobytes()
    path = write_members(tmp_path / "a.npz", members)
    assert refused(path) == "limit-ratio"
    limits = GunzipLimits(decompressed_bytes=1000, ratio=10**6, ratio_floor=1 << 40)
    with pytest.raises(FormatError) as error:
        KataHexReader(path, limits=limits)
    assert error.value.code == "limit-size"


def test_a_large_zip_directory_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members_of(arrays_of([Row(5)], 5)).items():
            info = zipfile.ZipInfo(name)
            info.comment = b"x" * 60_000
            archive.writestr(info, data)
        for i in range(20):
            info = zipfile.ZipInfo(f"more{i}")
            info.comment = b"x" * 60_000
            archive.writestr(info, b"")
    assert refused(path) == "corrupt-zip"


def test_overlapping_members_are_refused(tmp_path):
    path = write_kata(tmp_path / "a.npz", [Row(5)], 5)
    data = bytearray(path.read_bytes())
    entries = [i for i in range(len(data)) if data[i : i + 4] == b"PK\x01\x02"]
    data[entries[1] + 42 : entries[1] + 46] = data[entries[0] + 42 : entries[0] + 46]
    path.write_bytes(data)
    assert refused(path) == "corrupt-zip"


# Damage


def test_a_file_that_is_cut_is_refused_at_every_length(tmp_path):
    whole = write_kata(tmp_path / "a.npz", [Row(5), Row(5)], 5).read_bytes()
    cut = tmp_path / "b.npz"
    for length in [60, *range(100, len(whole), 37), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        assert refused(cut) in {"truncated", "corrupt-zip"}


def test_a_changed_byte_is_found_or_changes_nothing(tmp_path):
    path = write_kata(tmp_path / "a.npz", [Row(5), Row(5, {(1, 1): WHITE}, turn=1)], 5)
    whole = path.read_bytes()
    original = read(path)[0]
    found = 0
    for offset in range(0, len(whole), 5):
        data = bytearray(whole)
        data[offset] ^= 0x21
        path.write_bytes(data)
        try:
            table, rejected, _ = read(path)
        except FormatError:
            found += 1
        else:  # such as a date, or an array that is not read
            assert (table, rejected) == (original, [])
    assert found > 100


def damaged(path: Path, rows: Sequence[Row]) -> Path:
    """Change the checksum of the policies, so that the damage is found after the last row."""
    write_kata(path, rows, 5)
    with zipfile.ZipFile(path) as archive:
        crc = archive.getinfo(POLICY).CRC
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<I", crc), struct.pack("<I", crc ^ 1)))
    return path


def test_damage_is_refused_or_ends_the_salvaged_rows(tmp_path, monkeypatch):
    rows = [Row(5, turn=i) for i in range(40)]
    monkeypatch.setattr("hexdata.formats.npz._MAX_READ", 1 << 10)
    path = damaged(tmp_path / "a.npz", rows)
    assert refused(path) == "corrupt-zip"
    table, rejected, reader = read(path, salvage=True)
    assert reader.damage.code == "corrupt-zip"
    assert rejected == []
    assert 0 < table.num_rows < 40
    assert table["position_in_game"].to_pylist() == list(range(table.num_rows))


@pytest.mark.parametrize("prefix", [b"#!/bin/sh\n", b"\x00", bytes(1000)])
def test_bytes_before_the_archive_are_refused(tmp_path, prefix):
    path = write_kata(tmp_path / "a.npz", [Row(3, {(0, 0): 1})], 4)
    path.write_bytes(prefix + path.read_bytes())
    with zipfile.ZipFile(path) as archive:  # zipfile reads it, NumPy does not
        assert archive.testzip() is None
    assert refused(path) == "unknown-layout"
    with pytest.raises(FormatError) as error:
        KataHexReader(path)
    assert error.value.code == "corrupt-zip"


def test_salvaging_an_archive_without_a_directory_gives_no_rows(tmp_path):
    path = write_kata(tmp_path / "a.npz", [Row(5)], 5)
    path.write_bytes(path.read_bytes()[:-30])
    table, _, reader = read(path, salvage=True)
    assert (table.num_rows, reader.damage.code) == (0, "truncated")


@settings(max_examples=60 if FULL else 30, deadline=None)
@given(data=st.binary(max_size=200), where=st.integers(0, 3000))
def test_random_bytes_raise_no_other_error(tmp_path_factory, data, where):
    folder = tmp_path_factory.getbasetemp() / "random"
    folder.mkdir(exist_ok=True)
    path = write_kata(folder / "a.npz", [Row(5)], 5)
    whole = path.read_bytes()
    path.write_bytes(whole[:where] + data + whole[where + len(data) :])
    with suppress(FormatError):
        read(path, salvage=True)


def test_memory_does_not_grow_with_the_rows(tmp_path):
    """A file of 300 MB is read with less than 120 MB of memory."""
    import tracemalloc

    rows = 60_000
    one = arrays_of([Row(9, {(1, 1): BLACK}, turn=3)], 19)
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in (PLANES, INPUTS, POLICY, TARGETS):
            array = one[name]
            shape = ",".join(map(str, (rows, *array.shape[1:])))
            with archive.open(name, "w", force_zip64=True) as file:
                file.write(kata_header(array, shape=shape))
                for _ in range(rows // 1000):
                    file.write(array.tobytes() * 1000)
    limits = GunzipLimits(decompressed_bytes=1 << 40, ratio=2000, ratio_floor=1)
    tracemalloc.start()
    try:
        with KataHexReader(path, limits=limits) as reader:
            count = sum(batch.records for batch in reader.batches())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == rows
    assert peak < 120 << 20


def test_a_selected_board_size_replaces_that_of_the_first_row(tmp_path):
    rows = [Row(5), Row(6), Row(5, black=(0.0, 0.0, 1.0)), Row(6), Row(6, black=(0.0, 0.0, 1.0))]
    path = write_kata(tmp_path / "a.npz", rows, 7)
    with open_source(path) as reader:
        reader.select_board_size(6)
        (batch,) = reader.batches()
    assert reader.board_size == 6
    assert batch.positions["record"].to_pylist() == [1, 3]
    reasons = {each.record: each.reason for each in batch.rejected}
    assert reasons == {0: "board-size", 2: "board-size", 4: "no-winner"}
    with open_source(path) as reader:
        reader.select_board_size(7)
        assert sum(batch.positions.num_rows for batch in reader.batches()) == 0
    assert reader.board_size is None


# From the files to a store


def play(seed: int, n: int = 5) -> list[Row]:
    """Return the rows of a game of ten turns: turn 4 was written twice, and turn 6 has a side position."""
    rng = np.random.default_rng(seed)
    cells = [(x, y) for x in range(n) for y in range(n)]
    order = [cells[i] for i in rng.permutation(len(cells)).tolist()]
    red = float(seed % 2)
    rows = []
    for turn in range(10):
        stones = {where: BLACK + i % 2 for i, where in enumerate(order[:turn])}
        visits = dict(zip(order[turn : turn + 4], rng.integers(1, 99, 4).tolist(), strict=True))
        win = int(rng.integers(0, 9)) / 8
        row = Row(
            n,
            stones,
            BLACK + turn % 2,
            visits,
            black=(1 - red, red, 0.0),
            search=(win, 1 - win, 0.0),
            hash=(7919 * seed + 1, seed + 1),
            turn=turn,
            root_visits=100 + turn,
            weight=1.5 if turn == 4 else 1.0,
        )
        rows += [row] * (2 if turn == 4 else 1)
        if turn == 6:
            rows.append(replace(row, side=True, black=(0.25, 0.75, 0.0)))
    return rows


@pytest.fixture
def games_of_katahex(tmp_path):
    """A folder with two files that contain the shuffled rows of 30 games, and those rows."""
    rows = [row for seed in range(30) for row in play(seed)]
    rows = [rows[i] for i in np.random.default_rng(5).permutation(len(rows)).tolist()]
    (tmp_path / "in").mkdir()
    write_kata(tmp_path / "in" / "a.npz", rows[:200], 7)
    write_shuffled(tmp_path / "in" / "b.npz", rows[200:], 7)
    return tmp_path / "in", rows


def table_of(store: Path, name: str) -> list[dict]:
    paths = sorted((store / name).glob("*.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def test_the_rows_of_a_game_are_one_game_in_any_order_and_in_several_files(games_of_katahex, tmp_path):
    folder, rows = games_of_katahex
    store = tmp_path / "store"
    result = convert_sources(folder, store, ConvertOptions(workers=1))
    assert (result.positions, result.rejected, result.games, result.flags) == (360, 0, 30, {})
    games = {game["game_id"]: game for game in table_of(store, "games")}
    positions = table_of(store, "positions")
    assert {game["positions"] for game in games.values()} == {12}
    by_hash = {}
    for row, position in zip(rows, positions, strict=True):
        game = games[position["game_id"]]
        assert (game["file_idx"], game["line_idx"]) == row.hash
        assert game["winner"] == ("BLUE" if row.hash[1] % 2 else "RED")
        assert position["position_in_game"] == (None if row.side else row.turn)
        assert position["value"] == row.black[1]
        assert position["metadata"] is None
        by_hash.setdefault(row.hash, set()).add(position["game_id"])
    assert all(len(ids) == 1 for ids in by_hash.values())
    assert verify_store(store).ok


def test_the_results_of_the_search_are_in_the_store_and_in_batches(games_of_katahex, tmp_path):
    folder, rows = games_of_katahex
    store = tmp_path / "store"
    convert_sources(folder, store, ConvertOptions(workers=1, val=0, test=0))
    for row, position in zip(rows, table_of(store, "positions"), strict=True):
        assert position["root_value"] == row.search[1]
        assert (position["visits"], position["weight"]) == (row.root_visits, row.weight)
        assert position["extra.max_moves"] is None
        assert position["extra.game_type"] == 2
        sign = 1 if row.player == BLACK else -1
        assert position["extra.network_win_loss"] == sign * 0.25
        assert position["extra.td_short"] == pytest.approx(sign * 0.4)
        assert position["extra.policy_surprise"] == 0.5
    fields = ("board", "policy", "value", "root_value", "visits", "weight", "extra.td_short", "position_id")
    seen = []
    for batch in Loader(store, batch_size=64, fields=fields, seed=1):
        for i, position_id in enumerate(batch["position_id"].tolist()):
            row = rows[position_id]
            total = sum(row.visits.values())
            policy = np.zeros(25, np.float32)
            for (x, y), visits in row.visits.items():
                policy[cell(x, y, 5)] = visits / total
            assert np.array_equal(batch["policy"][i], policy)
            stones = {(x, y): BLACK + plane for plane, y, x in np.argwhere(batch["board"][i]).tolist()}
            assert stones == row.stones
            assert batch["value"][i] == row.black[1]
            assert batch["root_value"][i] == row.search[1]
            assert (batch["visits"][i], batch["weight"][i]) == (row.root_visits, row.weight)
            seen.append(position_id)
    assert sorted(seen) == list(range(360))


def test_a_store_of_katahex_equals_its_files(games_of_katahex, tmp_path):
    folder, _ = games_of_katahex
    convert_sources(folder, tmp_path / "store", ConvertOptions(workers=1))
    results = list(check_round_trip(tmp_path / "store", [folder]))
    assert [(each.name, each.ok) for each in results] == [("in/a.npz", True), ("in/b.npz", True)]


def test_live_mode_finds_the_same_games(games_of_katahex):
    folder, rows = games_of_katahex
    with open_source(folder / "a.npz") as reader:
        raw = [batch.positions for batch in reader.batches()]
    games = extract_games("a.npz", raw, 5, mixed=True, sure_ids=True, convention="blue-is-0")
    assert len(games.chunks) == len({row.hash for row in rows[:200]})


def test_one_board_size_of_files_with_several_is_converted(tmp_path):
    rows = [row for seed in range(9) for row in play(seed, n=5 if seed % 3 else 4)]
    write_kata(tmp_path / "a.npz", rows, 7)
    with pytest.raises(RejectRateError, match="--board-size"):
        convert_sources(tmp_path / "a.npz", tmp_path / "none")
    for n, games in ((4, 3), (5, 6)):
        store = tmp_path / f"store{n}"
        result = convert_sources(tmp_path / "a.npz", store, ConvertOptions(board_size=n))
        assert (result.positions, result.games) == (12 * games, games)
        assert result.reasons == {"board-size": 12 * (9 - games)}
        assert verify_store(store).ok


def test_a_failed_run_does_not_decide_the_board_size_of_the_next(tmp_path):
    rows = [*play(1, n=4), *play(2, n=5)]
    write_kata(tmp_path / "a.npz", rows, 7)
    with pytest.raises(RejectRateError):
        convert_sources(tmp_path / "a.npz", tmp_path / "store")
    result = convert_sources(tmp_path / "a.npz", tmp_path / "store", ConvertOptions(board_size=5))
    assert (result.positions, result.games) == (12, 1)


def test_a_damaged_file_is_salvaged(tmp_path, monkeypatch):
    monkeypatch.setattr("hexdata.formats.npz._MAX_READ", 1 << 10)
    damaged(tmp_path / "a.npz", play(3) * 4)
    options = ConvertOptions(salvage=True, max_reject_rate=0.5)
    result = convert_sources(tmp_path / "a.npz", tmp_path / "store", options)
    assert 0 < result.positions < 48
    assert result.reasons == {"corrupt-zip": 1}


def test_a_gzipped_archive_is_named(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(gzip.compress(write_kata(path, [Row(5)], 5).read_bytes()))
    for salvage in (False, True):
        with pytest.raises(FormatError, match=r"compressed with gzip.*gunzip") as caught:
            read(path, salvage=salvage)
        assert caught.value.code == "unknown-layout"
