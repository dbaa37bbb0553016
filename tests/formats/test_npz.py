"""KataHex's training data, compared with an independent writer, and hostile archives of arrays."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from hexdata.board import unpack_boards
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import FormatError
from hexdata.formats.gunzip import GunzipLimits
from hexdata.formats.katago import KataHexReader
from tests.kit.sources import read_source
from tests.pairs import FULL

BLACK, WHITE = 1, 2
TARGETS, PLANES = "globalTargetsNC", "binaryInputNCHWPacked"
POLICY, INPUTS = "policyTargetsNCMove", "globalInputNC"
Arrays = dict[str, np.ndarray]


@dataclass
class Row:
    """A position as KataHex has it: stones by (x, y), black connects y = 0 with y = n - 1."""

    n: int = 5
    stones: dict[tuple[int, int], int] = field(default_factory=dict)
    player: int = BLACK
    visits: dict[tuple[int, int], int] | None = field(default_factory=lambda: {(0, 0): 3, (1, 0): 1})
    """None: the file has a placeholder."""
    passes: int = 0
    black: tuple[float, float, float] = (1.0, 0.0, 0.0)
    """Win, loss and no result of black: the game, or the search of a side position."""
    search: tuple[float, float, float] = (0.6, 0.4, 0.0)
    hash: tuple[int, int] = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
    turn: int = 0
    side: bool = False
    root_visits: int = 600
    weight: float = 1.0


def columns_of(row: Row) -> list[float]:
    """The 64 columns of globalTargetsNC, as trainingwrite.cpp fills them."""
    out, white = [0.0] * 64, row.player == WHITE
    averages = ((0.9, 0.1, 0.0), (0.8, 0.2, 0.0), (0.7, 0.3, 0.0))
    for column, black in zip(range(0, 20, 4), (row.black, *averages, row.search), strict=True):
        out[column : column + 3] = (black[1], black[0], black[2]) if white else black
    out[25], out[26], out[28] = row.weight, row.visits is not None, not row.side
    out[30:34] = 0.5, 1.5, 2.5, not row.side
    for i, part in enumerate(row.hash):
        out[41 + 3 * i : 44 + 3 * i] = part & 0x3FFFFF, (part >> 22) & 0x3FFFFF, (part >> 44) & 0xFFFFF
    out[51], out[55], out[57] = row.turn, 2, -0.25 if white else 0.25
    out[60], out[63] = row.root_visits, 1
    return out


def arrays_of(rows: Sequence[Row], edge: int = 7) -> Arrays:
    """The arrays of the file. Cells are placed one by one, transposed if white moves, as in C++."""
    area = edge * edge
    planes = np.zeros((len(rows), 22, (area + 7) // 8), np.uint8)
    policy = np.zeros((len(rows), 2, area + 1), np.int16)
    for i, row in enumerate(rows):
        for x, y in np.ndindex(row.n, row.n):
            at = x * edge + y if row.player == WHITE else y * edge + x
            stone = row.stones.get((x, y))
            for plane in [0] if stone is None else [0, 1 if stone == row.player else 2]:
                planes[i, plane, at // 8] |= 1 << (7 - at % 8)
            policy[i, 0, at] = (row.visits or {}).get((x, y), 0)
        policy[i, 0, area] = row.passes
    policy[[row.visits is None for row in rows]] = policy[:, 1] = 1
    inputs = np.zeros((len(rows), 19), np.float32)
    inputs[:, 0] = [row.player == WHITE for row in rows]
    return {
        PLANES: planes,
        INPUTS: inputs,
        POLICY: policy,
        TARGETS: np.array([columns_of(row) for row in rows], np.float32).reshape(-1, 64),
        "scoreDistrN": np.zeros((len(rows), 2 * area + 120), np.int8),
        "valueTargetsNCHW": np.zeros((len(rows), 5, edge, edge), np.int8),
    }


def member(array: np.ndarray, shape: str = "") -> bytes:
    """The array after the header of numpywrite.cpp: 256 bytes."""
    shape = shape or ",".join(map(str, array.shape))
    text = f"{{'descr':'{array.dtype.str}','fortran_order':False,'shape':({shape})}}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 246) + text.ljust(245).encode() + b"\n" + array.tobytes()


def save(path: Path, content: Sequence[Row] | Arrays | dict[str, bytes], shuffled: bool = False) -> Path:
    """Write a file as the self-play does, with names without ".npy"; or as shuffle.py, with NumPy."""
    content = content if isinstance(content, dict) else arrays_of(content)
    if shuffled:
        np.savez_compressed(path, **content)  # type: ignore[arg-type]
        return path
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data if isinstance(data, bytes) else member(data))
    return path


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(FormatError) as error:
        read_source(path, **options)
    assert str(path) in str(error.value)
    return str(error.value.code)


# Rows


def some_row(rng: np.random.Generator) -> Row:
    n = int(rng.integers(3, 8))
    cells = [divmod(int(k), n) for k in rng.permutation(n * n)]
    count = int(rng.integers(n * n))
    visited = cells[count : count + 1 + int(rng.integers(n * n - count))]
    win, share = float(rng.integers(2)), int(rng.integers(9)) / 8
    return Row(
        n,
        {cell: int(rng.integers(1, 3)) for cell in cells[:count]},
        int(rng.integers(1, 3)),
        {cell: int(rng.integers(1, 30_000)) for cell in visited},
        int(rng.choice([0, 0, 5])),
        (win, 1 - win, 0.0),
        (share, 1 - share, 0.0),
        turn=int(rng.integers(400)),
        root_visits=int(rng.integers(100_000)),
    )


def test_random_positions_are_read_as_they_were_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for number in range(60 if FULL else 20):
        rows = [some_row(rng) for _ in range(1 + number % 6)]
        path = save(tmp_path / "a.npz", arrays_of(rows, 7 + number % 3), shuffled=number % 2 == 1)
        reader, found, rejected = read_source(path)
        n = rows[0].n
        assert (reader.format, reader.board_size) == ("katahex", n)
        others = [(i, "board-size") for i, row in enumerate(rows) if row.n != n]
        assert [(each.record, each.reason) for each in rejected] == others
        kept = [(i, row) for i, row in enumerate(rows) if row.n == n]
        for (i, row), position in zip(kept, found, strict=True):
            board = np.frombuffer(position["board"], np.uint8)[np.newaxis]
            planes = np.argwhere(unpack_boards(board, n, np.uint8)[0]).tolist()
            assert {(x, y): BLACK + plane for plane, y, x in planes} == row.stones
            assert row.visits is not None
            total = sum(row.visits.values()) + row.passes
            expected = {y * n + x: np.float32(visits / total) for (x, y), visits in row.visits.items()}
            if position["move"] is None:
                assert {p["cell"]: p["probability"] for p in position["policy"]} == expected
            else:
                assert (position["policy"], expected) == (None, {position["move"]: 1.0})
            assert (position["record"], position["value"]) == (i, 1 - row.black[0])
            assert (position["root_value"], position["winner"]) == (row.search[1], int(row.black[0] == 0))
            assert position["player_to_move"] == int(row.player == WHITE)
            assert (position["visits"], position["position_in_game"]) == (row.root_visits, row.turn)


def set_bits(*bits: tuple[int, int]) -> Callable[[np.ndarray], object]:
    def change(array: np.ndarray) -> None:
        for plane, at in bits:
            array[0, plane, at // 8] |= 1 << (7 - at % 8)

    return change


def put(where: Any, value: Any) -> Callable[[np.ndarray], object]:
    return lambda array: array.__setitem__(where, value)


INVALID: list[tuple[str, str, Callable[[np.ndarray], object]]] = [
    ("board-shape", PLANES, put((0, 0, 1), 0)),
    ("board-shape", PLANES, set_bits((0, 7 * 7 - 1))),
    ("board-shape", PLANES, set_bits((1, 7 * 7))),  # a bit after the last cell
    ("board-overlap", PLANES, set_bits((1, 8), (2, 8))),
    ("board-cells", PLANES, set_bits((1, 6))),
    ("player-range", INPUTS, put((0, 0), np.nan)),
    ("no-winner", TARGETS, put((0, slice(0, 3)), (0, 0, 1))),
    ("no-winner", TARGETS, put((0, slice(0, 3)), 0)),  # the game was not finished
    ("value-range", TARGETS, put((0, slice(0, 2)), (1, 1))),
    ("value-range", TARGETS, put((0, slice(16, 18)), (0.5, 0.2))),
    ("value-range", TARGETS, put((0, slice(16, 18)), (np.inf, -np.inf))),
    ("target-range", TARGETS, put((0, 25), -1)),
    ("target-range", TARGETS, put((0, 60), 1.5)),
    ("target-range", TARGETS, put((0, 60), 2.0**31)),
    ("target-range", TARGETS, put((0, 31), np.nan)),
    ("target-range", INPUTS, put((0, slice(4, 6)), (1, np.nan))),
    ("policy-values", POLICY, put((0, 0, 1), -1)),
    ("policy-values", POLICY, put((0, 0, 6), 1)),  # outside the board
    ("policy-values", POLICY, put((0, 0, 16), 1)),  # the stone
    ("policy-values", POLICY, put((0, 0), [0] * 49 + [9])),
]


def test_an_invalid_row_is_rejected_and_the_others_are_kept(tmp_path: Path) -> None:
    for reason, name, change in INVALID:
        arrays = arrays_of([Row(5, {(2, 2): BLACK}), Row(5, {(2, 2): BLACK}, WHITE)])
        change(arrays[name])
        _, rows, rejected = read_source(save(tmp_path / "a.npz", arrays))
        assert [(each.record, each.reason) for each in rejected] == [(0, reason)]
        assert [row["record"] for row in rows] == [1]


# Archives that are refused as a whole


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of the file was run",))


ARRAYS = arrays_of([Row(5)], 5)
MEMBERS = {name: member(array) for name, array in ARRAYS.items()}
ZEROS = np.zeros((1 << 20, 19), np.float32)
HEADERS = (
    b"",
    b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
    b"\x93NUMPY\x01\x00\x00\x04" + b"(" * 1024,
    b"\x93NUMPY\x01\x00\x10\x00" + b"__import__('os')",
    b"\x93NUMPY\x01\x00\x40\x00" + b"{'descr':'|O','fortran_order':False,'shape':(1,)}".ljust(64),
)
SHAPES = ("1000000000000,22,4", "1,22,5", "-1,22,4", "18446744073709551617,22,4", "()")


def changed(name: str, change: Callable[[np.ndarray], object]) -> Arrays:
    arrays = arrays_of([Row(5)], 5)
    change(arrays[name])
    return arrays


CONTENTS: dict[str, list[Any]] = {
    "unknown-layout": [
        changed(PLANES, set_bits((9, 3))),  # another game
        changed(TARGETS, put((0, 63), 2)),  # another version
        *(
            ARRAYS | {name: array}
            for name in (PLANES, POLICY, TARGETS, INPUTS)
            for array in (ARRAYS[name][..., :-1], ARRAYS[name].astype(np.float64), ARRAYS[name][:0])
        ),
        *({n: array for n, array in ARRAYS.items() if n != name} for name in (PLANES, POLICY, TARGETS)),
        *(MEMBERS | {name: b"x"} for name in ("../globalInputNC", "globalInputNC.npy.npy")),
        MEMBERS | {INPUTS + ".npy": MEMBERS[INPUTS]},  # an array twice
    ],
    "corrupt-array|unknown-layout|truncated": [
        *(MEMBERS | {PLANES: member(ARRAYS[PLANES], shape)} for shape in SHAPES),
        *(MEMBERS | {name: header} for name in (PLANES, "scoreDistrN") for header in HEADERS),
    ],
    "limit-ratio": [MEMBERS | {INPUTS: member(ZEROS)}],
}
"""Contents of archives, by the code of the error."""


@pytest.mark.parametrize("codes", CONTENTS)
def test_arrays_of_another_layout_are_refused(tmp_path: Path, codes: str) -> None:
    for content in CONTENTS[codes]:
        path = save(tmp_path / "a.npz", content)
        assert refused(path) in codes.split("|")
    if codes == "unknown-layout":
        path = save(path, ARRAYS | {"scoreDistrN": np.array([Bomb()], object)}, shuffled=True)
        assert refused(path, salvage=True) == codes


def flipped(data: bytes) -> bytes:
    found = bytearray(data)
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        found[data.index(signature) + offset] |= 1
    return bytes(found)


def overlapping(data: bytes) -> bytes:
    found = bytearray(data)
    first, second = [i for i in range(len(data)) if data[i : i + 4] == b"PK\x01\x02"][:2]
    found[second + 42 : second + 46] = data[first + 42 : first + 46]
    return bytes(found)


def with_large_directory(data: bytes) -> bytes:
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as archive:
        for number in range(20):
            info = zipfile.ZipInfo(f"more{number}")
            info.comment = b"x" * 60_000
            archive.writestr(info, b"")
    return buffer.getvalue()


ARCHIVES: list[tuple[Callable[[bytes], bytes], str]] = [
    (flipped, "unknown-layout"),  # encrypted
    (overlapping, "corrupt-zip"),
    (with_large_directory, "corrupt-zip"),
    (gzip.compress, "unknown-layout"),
    (lambda data: b"#!/bin/sh\n" + data, "unknown-layout"),
]


def test_hostile_archives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = save(tmp_path / "a.npz", ARRAYS).read_bytes()
    for change, code in ARCHIVES:
        (tmp_path / "b.npz").write_bytes(change(whole))
        assert refused(tmp_path / "b.npz") == code
    monkeypatch.setattr(KataHexReader, "limits", GunzipLimits(1000, ratio=10**6, ratio_floor=1 << 40))
    assert refused(tmp_path / "a.npz") == "limit-size"


def test_damage_is_refused_or_ends_the_salvaged_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The changed checksum of the policies is found after the last row."""
    monkeypatch.setattr("hexdata.formats.npz._MAX_READ", 1 << 10)
    path = save(tmp_path / "a.npz", [Row(5, turn=i) for i in range(40)])
    with zipfile.ZipFile(path) as archive:
        crc = archive.getinfo(POLICY).CRC
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", crc), struct.pack("<I", crc ^ 1)))
    assert refused(path) == "corrupt-zip"
    reader, rows, rejected = read_source(path, salvage=True)
    assert reader.damage is not None
    assert (reader.damage.code, rejected) == ("corrupt-zip", [])
    assert 0 < len(rows) < 40
    assert [row["position_in_game"] for row in rows] == list(range(len(rows)))


def test_memory_does_not_grow_with_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 150 MB is read with less than 100 MB of memory."""
    count, one = 30_000, arrays_of([Row(9, {(1, 1): BLACK}, turn=3)], 19)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in (PLANES, INPUTS, POLICY, TARGETS):
            shape = ",".join(map(str, (count, *one[name].shape[1:])))
            archive.writestr(name, member(one[name], shape)[:256] + one[name].tobytes() * count)
    limits = GunzipLimits(decompressed_bytes=1 << 40, ratio=2000, ratio_floor=1)
    monkeypatch.setattr(KataHexReader, "limits", limits)
    tracemalloc.start()
    try:
        with KataHexReader(tmp_path / "a.npz") as reader:
            assert sum(batch.records for batch in reader.batches()) == count
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


# From the files to a store


def play(seed: int) -> list[Row]:
    """Return the rows of a game of ten turns: turn 4 was written twice, and turn 6 has a side position."""
    rng, rows, red = np.random.default_rng(seed), [], float(seed % 2)
    order = [divmod(int(k), 5) for k in rng.permutation(25)]
    for turn in range(10):
        row = Row(
            stones={where: BLACK + i % 2 for i, where in enumerate(order[:turn])},
            player=BLACK + turn % 2,
            visits={where: int(rng.integers(1, 99)) for where in order[turn : turn + 4]},
            black=(1 - red, red, 0.0),
            search=(0.625, 0.375, 0.0),
            hash=(7919 * seed + 1, seed + 1),
            turn=turn,
            weight=1.5 if turn == 4 else 1.0,
        )
        rows += [row] * (2 if turn == 4 else 1)
        rows += [replace(row, side=True, black=(0.25, 0.75, 0.0))] if turn == 6 else []
    return rows


def table_of(store: Path, name: str) -> list[dict[str, Any]]:
    return [
        row for path in sorted((store / name).glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]


def test_the_rows_of_a_game_are_one_game_in_any_order_and_in_several_files(tmp_path: Path) -> None:
    rows, store = [row for seed in range(30) for row in play(seed)], tmp_path / "store"
    rows = [rows[i] for i in np.random.default_rng(5).permutation(len(rows)).tolist()]
    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "a.npz", rows[:200])
    save(tmp_path / "in" / "b.npz", arrays_of(rows[200:]), shuffled=True)
    result = convert_sources(tmp_path / "in", store, ConvertOptions(workers=1))
    assert (result.positions, result.rejected, result.games, result.flags) == (360, 0, 30, {})
    headers = [json.loads(source["header"])["counts"] for source in table_of(store, "sources")]
    assert sum(counts["side_positions"] for counts in headers) == 30
    games = {game["game_id"]: game for game in table_of(store, "games")}
    assert {game["positions"] for game in games.values()} == {12}
    for row, position in zip(rows, table_of(store, "positions"), strict=True):
        game = games[position["game_id"]]
        assert (game["file_idx"], game["line_idx"]) == row.hash
        assert game["winner"] == ("BLUE" if row.hash[1] % 2 else "RED")
        assert position["position_in_game"] == (None if row.side else row.turn)
        assert (position["value"], position["root_value"]) == (row.black[1], row.search[1])
        assert (position["visits"], position["weight"]) == (row.root_visits, row.weight)
        sign = 1 if row.player == BLACK else -1
        assert position["extra.network_win_loss"] == sign * 0.25
        assert position["extra.td_short"] == pytest.approx(sign * 0.4)
        assert (position["extra.game_type"], position["extra.policy_surprise"]) == (2, 0.5)
        assert (position["extra.max_moves"], position["metadata"]) == (None, None)
