"""Legacy pickles: read as Python reads them, written back field for field; rejections, damage and memory."""

from __future__ import annotations

import copy
import io
import json
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.errors import FormatError, InputError
from hexdata.formats.legacy import DIALECTS, LegacyReader, limits, reader, stream, write_legacy
from hexdata.schema import raw_schema
from tests import legacy_pickles
from tests.fuzz.pickles import check_file
from tests.fuzz.random_pickles import opcodes_of
from tests.kit.sources import read_source
from tests.legacy_pickles import assert_same, legacy_enum, load_pickle, one_hot, save_pickle, top_level

pytestmark = pytest.mark.usefixtures("hex_ai")

N = 5
CELLS = N * N
FILES = sorted((Path(__file__).parents[3] / "shared" / "data" / "legacy").rglob("*.pkl.gz"))


def board(ply: int = 3, n: int = N, dtype: str = "f4", order: Any = "C") -> np.ndarray:
    planes = np.zeros((2, n, n), dtype)
    for move in range(ply % (n * n)):
        planes[move % 2].flat[(move * 7) % (n * n)] = 1
    return np.asarray(planes, order=order)


def example(ply: int = 3, **changes: Any) -> dict[str, Any]:
    """Return an example with a legal board; ``changes`` are those of ``legacy_pickles.example``."""
    own = {"board": board(ply), "policy": one_hot(ply % CELLS, N), "value": 1.0, "player_to_move": ply % 2}
    own |= {"position_in_game": ply, "value_sample_tier": 1}
    return legacy_pickles.example(12, 0, 20, **own | changes)


def read(path: Path) -> tuple[list[dict[str, Any]], list[tuple[int, str]], Any]:
    """Return the rows of a file, its rejections as (record, code), and the reader."""
    found, rows, rejected = read_source(path)
    return rows, [(each.record, str(each.reason)) for each in rejected], found


# Accepted files


def enums(module: str) -> list[Any]:
    player, winner = legacy_enum("Player", module), legacy_enum("Winner", module)
    return [example(ply, player_to_move=player(ply % 2), winner=winner(ply // 9)) for ply in range(18)]


def policies() -> list[Any]:
    dense, minus = np.linspace(0, 1, CELLS, dtype="f4"), one_hot(3, N)
    minus[7] = -0.0  # no plain zero: a single move would lose its sign
    different = [dense, np.zeros(CELLS, "f4"), one_hot(3, N) + one_hot(4, N), minus, one_hot(9, N), None]
    return [example(policy=copy.deepcopy(policy)) for policy in different * 2]


def scalars() -> list[Any]:
    shared = [np.float32(0.75), np.int8(98), np.True_, np.float64("nan"), np.uint64(1 << 40)]
    return [
        example(ply, temperature=shared[ply % 2], value=np.float32(ply % 2), total_positions=np.int64(20))
        | {"score": shared[0], "noise": shared[3], "count": np.int8(ply % 5), "seed": shared[4]}
        for ply in range(24)
    ]


def sharing(count: int = 60) -> list[Any]:
    """Return examples of several games that share their ids and texts."""
    games = [((3, line), f"#5,a1b2c3 {line}") for line in range(count // 20 + 1)]
    return [
        example(ply % 20, game_id=games[ply // 20][0], trmph_game=games[ply // 20][1], source_file="x.trmph")
        for ply in range(count)
    ]


def arrays(dtype: str, order: str) -> list[Any]:
    made = [(board(ply, dtype=dtype, order=order), one_hot(ply, N, dtype)) for ply in range(12)]
    return [example(board=planes, policy=policy) for planes, policy in made]


VARIANTS: dict[str, list[Any]] = {
    "nothing": [],
    "dicts": [
        example(ply, game_id=(1, ply), policy=None if ply % 4 else one_hot(ply, N)) for ply in range(24)
    ],
    "tuples": [(board(ply), one_hot(ply, N) if ply % 3 else None, ply % 2 / 1) for ply in range(20)],
    "enums": enums("hex_ai.enums"),
    "older enums": enums("hex_ai.value_utils"),
    **{f"winner {w!r}": [example(winner=w) for _ in range(4)] for w in ("RED", "b", "2", 1, None)},
    **{f"{t} {order}": arrays(t, order) for t in ("?", "u1", "i8", "f2", "f8", ">f4") for order in "CF"},
    "values": [example(value=value) for value in (0.0, -0.0, 1.0, 0.5, 1, np.float32(-0.0))],
    "policies": policies(),
    "scalars": scalars(),
    "distant examples share": sharing()[::2] + sharing()[1::2],
    "other metadata": [
        example(zoo=[1, {"b": None, "a": "\u00e9"}], alpha=ply, original_source="raw\udce9", board=board(ply))
        for ply in range(12)
    ],
    "keys of the table": [
        example(),
        example(line_idx=9, move=3, dialect="x"),
        example(**{"hexdata:dialect": 5}),
    ],
    "mixed": [
        *(example(winner=("BLUE", "b")[p % 3 == 0], player_to_move=(..., 1)[p % 2]) for p in range(12)),
        (board(), None, 0),
    ],
    "tuples beside searches": [
        example() | {"policy_search_target": np.linspace(0, 1, CELLS, dtype="f4")},
        (board(), np.linspace(0, 1, CELLS, dtype="f4"), 0),
    ],
    "values beside the known keys": [
        example(ply)
        | {"note": f"x{ply // 4}", "flag": np.bool_(ply % 2), "is_end": False, "list": [ply, {"a": None}]}
        for ply in range(24)
    ],
    "other keys in another order": [dict(reversed([*example(ply).items()])) for ply in range(9)],
}
ODD = {"t": (1, (2,)), "f": float("inf"), 2: np.float32(0.5), "s": "x" * 300, "n": float("nan")}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_read_as_python_reads_it_and_written_back(tmp_path: Path, name: str) -> None:
    for protocol in (2, 4, 5):
        content = top_level(VARIANTS[name], odd=ODD, stats={"e": []})
        raw = pickle.dumps(content, protocol)
        if protocol > 2:  # names of older NumPy; frames of the right length again
            older = raw.replace(b"\x8c\x16numpy._core.m", b"\x8c\x15numpy.core.m")
            older = older.replace(b"\x8c\x13numpy._core.n", b"\x8c\x12numpy.core.n")
            raw = pickletools.optimize(older.replace(b"numpy._core", b"numpy.core"))
        (tmp_path / "a").write_bytes(raw)
        assert check_file(tmp_path / "a") == ("", 0)
        write_back(tmp_path / "a", tmp_path / "b")
        assert_same(load_pickle(tmp_path / "b"), pickle.loads(pickle.dumps(content, 4)))


def test_frames_end_at_any_opcode_and_anywhere_in_a_piece(tmp_path: Path, monkeypatch: Any) -> None:
    """Texts of 64 kB are written outside of frames, so bytes without a frame may follow one."""
    monkeypatch.setattr(stream, "_PIECE", 601)
    opcodes = opcodes_of(pickle.dumps(top_level([example(ply % 20) for ply in range(8)]), 4))
    for count in range(1, len(opcodes), 37):
        first, rest = b"".join(opcodes[1:count]), b"".join(opcodes[count:])
        for framed in (rest, b"\x95" + struct.pack("<Q", len(rest)) + rest):
            frame = first and b"\x95" + struct.pack("<Q", len(first)) + first
            (tmp_path / "a").write_bytes(opcodes[0] + frame + framed)
            assert check_file(tmp_path / "a") == ("", 0)


def write_back(source: Path, target: Path) -> None:
    with LegacyReader(source) as file:
        batches = [batch.positions for batch in file.batches()]
    header: Any = json.loads(json.dumps(file.header, allow_nan=False))
    assert all(batch.schema == raw_schema(file.board_size or 0) for batch in batches)
    size = file.board_size or N
    assert "none" not in str(header["dialect"].get("policy")) or "search" in str(header["dialect"])
    with target.open("wb") as written:
        write_legacy(written, batches, board_size=size, dialect=header["dialect"], header=header)


@pytest.mark.skipif(not FILES, reason="needs the real data")
def test_real_files_survive_the_round_trip(tmp_path: Path) -> None:
    for path in (path for path in FILES if path.stat().st_size < 69_000):
        write_back(path, tmp_path / "a")
        assert_same(load_pickle(path), load_pickle(tmp_path / "a"))


# Rejected records


def spoiled(array: np.ndarray, cell: Any) -> np.ndarray:
    array = array.copy()
    array.flat[4] = cell
    return array


REJECTIONS: dict[str, list[Any]] = {
    "example-layout": [
        *(7, [], (board(), one_hot(0, N)), example(value=...), example(board=...), {"x": 1}),
        example() | {1: 1},
    ],
    "metadata-type": [example(metadata=None), example(metadata={1: 2})],
    "board-type": [(None, None, 1.0), *(example(board=value) for value in (None, [[0]], "x", np.float32(1)))],
    "board-shape": [
        example(board=np.zeros(shape)) for shape in ((2, 2, 2), (2, 0, 0), (), (2, 5, 6), (5, 5))
    ],
    "board-cells": [example(board=spoiled(board(), cell)) for cell in (2, 0.5, -1, np.nan, -0.0)],
    "board-overlap": [example(board=np.ones((2, N, N)))],
    "board-size": [example(board=board(n=6), policy=one_hot(0, 6))],
    "policy-type": [example(policy=value) for value in ([0.5], 0.5, "x")],
    "policy-shape": [example(policy=one_hot(0, 6)), example(policy=np.zeros((N, N), "f4"))],
    "policy-values": [example(policy=spoiled(one_hot(0, N), cell)) for cell in (np.nan, np.inf, -0.5)],
    "policy-dtype": [example(policy=np.full(CELLS, cell)) for cell in (0.1, 1e300)],
    "value-type": [(board(), None, board()), *(example(value=value) for value in ("1", None, True))],
    "value-range": [example(value=value) for value in (1.5, -0.25, float("nan"), float("inf"), 2, 10**40)],
    "player-type": [example(player_to_move=value) for value in (0.0, "BLUE", True, (1,))],
    "player-range": [example(player_to_move=value) for value in (2, -1)],
    "position-type": [example(position_in_game="3"), example(total_positions=3.0)],
    "position-range": [example(position_in_game=-1), example(total_positions=65535)],
    "tier-type": [example(value_sample_tier="0")],
    "tier-range": [example(value_sample_tier=value) for value in (4, 255, 1 << 70)],
    "game-id": [example(game_id=value) for value in ((1,), (1, -1), [1, 2], (1, 1 << 31), 5, (True, 1))],
    "winner-value": [example(winner=value) for value in ("blue", 0, 3, True, 1.0, ())],
    "metadata-value": [
        made
        for value in ((1, 2), b"x", [float("nan")], {"a": np.float32(1)}, {1: 2}, one_hot(0, N))
        for made in (example(zoo=value), example() | {"zoo": value})
    ],
}


@pytest.mark.parametrize("code", REJECTIONS)
def test_an_invalid_example_is_rejected_by_name(tmp_path: Path, code: str) -> None:
    good = [example(ply) for ply in range(4)]
    examples = [copy.deepcopy(item) for bad in REJECTIONS[code] for item in (*good, bad)]
    rows, rejected, file = read(save_pickle(tmp_path / "a", top_level(examples)))
    assert rejected == [(5 * i + 4, code) for i in range(len(REJECTIONS[code]))]
    assert [row["record"] for row in rows] == [i for i in range(len(examples)) if i % 5 != 4]
    assert file.board_size == N


# Files that are refused


def refusal(path: Path) -> FormatError:
    with LegacyReader(path) as file, pytest.raises(FormatError) as caught:
        list(file.batches())
    assert str(path) in str(caught.value)
    return caught.value


def test_other_layouts_are_refused(tmp_path: Path) -> None:
    layouts: list[Any] = [[1, 2], {"boards": 1}, {"games": [{"moves": ["#5,a1"]}]}]
    layouts += [{"examples": 5}, {"examples": ({},)}]
    for content in layouts:
        assert refusal(save_pickle(tmp_path / "a", content)).code == "unknown-layout"


@pytest.mark.parametrize("part", ["board", "policy", "metadata"])
def test_a_shared_payload_is_refused(tmp_path: Path, part: str) -> None:
    examples = [example(ply) for ply in range(30)]
    examples[25][part] = examples[3][part]
    error = refusal(save_pickle(tmp_path / "a", top_level(examples)))
    assert error.code == "shared-payload"
    assert "byte " in str(error)
    examples[28]["policy"] = [0.5]  # the first error of a file is named
    assert refusal(save_pickle(tmp_path / "a", top_level(examples))).code == "shared-payload"


def test_examples_within_other_objects_are_refused(tmp_path: Path) -> None:
    """Examples are handed out before their batch ends, so no later opcode may use them in another way."""
    raw = pickle.dumps({"examples": [example(ply) for ply in range(30)]}, 4)
    assert raw.endswith(b"es.")
    for opcodes in (b"\x85", b"t(", b"(X\x01\x00\x00\x00a]u"):  # TUPLE1; TUPLE; SETITEMS of {"a": []}
        reaching = pickletools.optimize(raw[:-3] + opcodes + raw[-3:])  # in frames of the right length
        assert refusal(save_pickle(tmp_path / "a", reaching)).code == "irregular-examples"


def test_layouts_of_rejected_examples_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = [example(zoo=pickle.loads(b"N" + b"\x85" * 500 + b".")) for _ in range(3)]  # in 500 tuples
    examples = [*deep, *(example(value=7.0, **{f"key{k}": 1}) for k in range(8))]
    path = save_pickle(tmp_path / "a", top_level(examples))
    assert len(read(path)[1]) == 11
    monkeypatch.setattr(limits, "MOST_LAYOUTS", 8)
    assert refusal(path).code == "limit-layouts"


# Memory


@pytest.mark.parametrize("length", [500, 9_000])
def test_batches_are_bounded_however_long_a_list_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Python appends 1,000 items at a time, but other picklers may append all at once."""
    monkeypatch.setattr(pickle._Pickler, "_BATCHSIZE", length)  # type: ignore[attr-defined]
    examples = [(board(0, 3, "u1"), one_hot(0, 3, "u1"), 0.0 if i % 10 else None) for i in range(9_000)]
    path = save_pickle(tmp_path / "a", pickle._dumps(top_level(examples), 4))  # type: ignore[attr-defined]
    with LegacyReader(path) as file:
        batches = list(file.batches())
    assert len(batches) == 2  # columns are made of thousands of examples at a time
    assert batches[0].records <= reader.BATCH_ROWS
    assert sum(batch.rows for batch in batches) == 8_100
    assert sum(len(batch.rejected) for batch in batches) == 900
    assert batches[-1].positions.column("record")[-1].as_py() == 8_999


# Damage


@pytest.mark.parametrize("spelling", ["os._exit", "hex_ai.enums.Enum", "builtins.exit", "text"])
def test_no_other_name_is_written_than_those_of_the_enums(tmp_path: Path, spelling: str) -> None:
    """A dialect may be that of a stranger's store, and ``pickle.load`` calls the names of a pickle."""
    with LegacyReader(save_pickle(tmp_path / "a", top_level(VARIANTS["dicts"]))) as source:
        batches = [batch.positions for batch in source.batches()]
    fields = ("player_to_move", "winner", "value")
    changes = [{field: spelling} for field in fields] + [{"board": "|O8"}, {"value": "numpy |O8"}]
    for change in changes:
        dialect: Any = {**source.header["dialect"], **change}  # type: ignore[dict-item]
        with pytest.raises(InputError):
            write_legacy(io.BytesIO(), batches, board_size=N, dialect=dialect, header={})
    header = {"a": {"__numpy__": ["|O8", 1]}}
    with pytest.raises(InputError):
        write_legacy(io.BytesIO(), batches, board_size=N, dialect=DIALECTS["dicts"], header=header)
