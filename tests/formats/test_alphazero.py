"""Positions, policies and values of AlphaZero-style programs, in every convention that they use."""

from __future__ import annotations

import gzip
import io
import pickle
import tracemalloc
from collections import deque
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.board import RED, replay
from hexdata.errors import FormatError
from tests.demo_games import demo_games
from tests.kit.command_line import hexdata_run
from tests.kit.sources import read_source

N = 5
STONES = ("first", "second", "to move", "moved")
Row = tuple[Any, Any, Any]


def played(count: int = 6) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Return the boards before each move, a policy, and the winner of each position of some games."""
    random, rows = np.random.default_rng(3), []
    for game in demo_games(count, 3, N):
        boards = replay(game.moves, N)[:-1]
        policies = random.dirichlet(np.ones(N * N), len(boards)).astype(np.float32)
        rows += [(board, policy, game.winner) for board, policy in zip(boards, policies, strict=True)]
    return rows


ROWS = played()


def written(
    rows: list[Any], stones: str, view: str, turned: bool = False, transposed: bool = False, low: int = -1
) -> list[Row]:
    """Return rows in a convention: planes of 0 and 1, policy, value."""
    converted = []
    for board, policy, winner in rows:
        ply = int(board.sum())
        players = {"first": 0, "second": 1, "to move": ply % 2, "moved": 1 - ply % 2}
        planes, cells = board[[players[stones], 1 - players[stones]]], policy.reshape(N, N)
        if transposed != (turned and ply % 2 == 1):
            planes, cells = planes.swapaxes(1, 2), cells.T
        converted.append((planes, cells.reshape(-1), 1 if players[view] == winner else low))
    return converted


MOVER = written(ROWS, "to move", "to move")


def expected_of(rows: list[Any]) -> dict[str, list[Any]]:
    return {
        "board": [np.packbits(board.reshape(-1)).tobytes() for board, _, _ in rows],
        "value": [float(winner == RED) for _, _, winner in rows],
        "winner": [winner for _, _, winner in rows],
        "player_to_move": [int(board.sum()) % 2 for board, _, _ in rows],
        "policy": [
            [{"cell": int(c), "probability": float(p[c])} for c in np.flatnonzero(p)] for _, p, _ in rows
        ],
    }


def check(path: Path, rows: list[Any] = ROWS, **options: Any) -> Any:
    """Check that a file has these rows, and return its reader and what it read."""
    reader, found, rejected = read_source(path, **options)
    assert not rejected
    expected = expected_of(rows)
    assert {name: [row[name] for row in found] for name in expected} == expected
    return reader, found


def save(path: Path, content: object, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


@pytest.mark.parametrize(("stones", "view"), [*pairwise(STONES), ("moved", "first"), ("to move", "to move")])
def test_every_convention_gives_the_same_positions(tmp_path: Path, stones: str, view: str) -> None:
    for (turned, transposed), low in zip(product((False, True), repeat=2), (-1, 0, 0, -1), strict=True):
        check(save(tmp_path / "a.pkl", written(ROWS, stones, view, turned, transposed, low)))


def signed(planes: np.ndarray) -> np.ndarray:
    return planes[0].astype(np.int64) - planes[1].astype(np.int64)


LAYOUTS: dict[str, Callable[..., object]] = {
    "lists as a board": lambda b, p, v: (signed(b).tolist(), p, v),
    "lists as planes": lambda b, p, v: (tuple(map(np.ndarray.tolist, b)), p, v),
    "list of NumPy scalars": lambda b, p, v: (signed(b), list(p.astype(np.float64)), np.float32(v)),
    "number of a pass": lambda b, p, v: (b, np.append(p, 0), v),
    "policy as a board": lambda b, p, v: (b, p.reshape(N, N), [v]),
    "plane of the player": lambda b, p, v: (np.append(b, np.full((1, N, N), b.sum() % 2), 0), p, v),
    "planes last": lambda b, p, v: (np.moveaxis(b, 0, 2).astype(np.float16), p[None], v),
    "batch of one": lambda b, p, v: (b[None], p, v),
    "plane of empty cells first": lambda b, p, v: (np.append(1 - b.sum(0, keepdims=True), b, 0), p, v),
    "dict": lambda b, p, v: {"State": b, "pi": p, "Z": v, "player": "x"},
    "dict with the winner as value": lambda b, p, v: {"winner": v, "obs": signed(b), "policy": p},
    "plane of empty cells": lambda b, p, v: (np.append(b, 1 - b.sum(0, keepdims=True), 0), p, np.array([v])),
    "list, not tuple": lambda b, p, v: [np.asfortranarray(b), p, float(v)],
    "only lists": lambda b, p, v: [signed(b).tolist(), p.tolist(), v],
}


def test_boards_policies_and_values_in_other_types_are_read(tmp_path: Path) -> None:
    for layout in LAYOUTS.values():
        check(save(tmp_path / "a.pkl", [layout(*row) for row in MOVER]))
    first = written(ROWS, "first", "second")
    check(save(tmp_path / "a.pkl", [(np.array([1, 2]) @ b.reshape(2, -1), p, v) for b, p, v in first]))


COLUMNS = [np.array(column) for column in zip(*MOVER, strict=True)]
WINNER = np.array([winner for _, _, winner in ROWS])


def test_deques_and_arrays_are_read_as_one_list(tmp_path: Path) -> None:
    dicts = [dict(zip(("state", "pi", "z"), row, strict=True)) for row in MOVER]
    halves, nested = [deque(MOVER[:7], maxlen=100), deque(MOVER[7:])], [[MOVER[:7], MOVER[7:9]], [MOVER[9:]]]
    for content, protocol in product((halves, nested, [deque(dicts)], deque(dicts, maxlen=100)), (2, 4)):
        check(save(tmp_path / "checkpoint_0.pth.tar.examples", content, protocol))
    for names in (("states", "policies", "winner"), ("x", "pi", "z"), ("Board", "probs", "value")):
        arrays: dict[str, Any] = dict(zip(names, COLUMNS, strict=True))
        np.savez_compressed(tmp_path / "a.npz", settings=np.array("x"), **arrays)
        assert check(tmp_path / "a.npz")[0].header["counts"]["arrays"] == 1
    check(save(tmp_path / "a.pkl", arrays | {"value": COLUMNS[2].tolist()}))


WINNERS = {
    "0 and 1": (WINNER, 0),
    "1 and -1": (1 - 2 * WINNER, 0),
    "1 and 2": ((WINNER + 1)[:, np.newaxis], 0),
    "for the mover": (COLUMNS[2], 0),
    "texts": (np.array(["blue", "red"])[WINNER], 1),
    "of games": (np.arange(6) % 2, 1),
}


@pytest.mark.parametrize("name", WINNERS)
def test_winners_beside_values_agree_with_them_or_are_noted(tmp_path: Path, name: str) -> None:
    winners, unread = WINNERS[name]
    arrays: dict[str, Any] = dict(zip(("boards", "policies", "values"), COLUMNS, strict=True))
    np.savez(tmp_path / "a.npz", winners=winners, **arrays)
    assert check(tmp_path / "a.npz")[0].header["counts"].get("arrays", 0) == unread
    if len(winners) == len(MOVER):
        dicts = [
            {"s": s, "p": p, "v": v, "outcome": w}
            for (s, p, v), w in zip(MOVER, winners.tolist(), strict=True)
        ]
        assert check(save(tmp_path / "a.pkl", dicts))[0].header["counts"].get("arrays", 0) == unread
    if not unread:
        np.savez(tmp_path / "b.npz", winners=np.roll(winners, 3), **arrays)
        assert "contradict" in refused(tmp_path / "b.npz")
        # Beside the values of a search, the chains show whose winners they are.
        np.savez(tmp_path / "a.npz", winner=winners, **arrays | {"values": COLUMNS[2] / 4})
        _, rows, _ = read_source(tmp_path / "a.npz", alphazero_convention="mover/top-bottom/mover")
        assert {row["value"] for row in rows} == {0.375, 0.625}
        assert [row["winner"] for row in rows] == WINNER.tolist()


BOARD, POLICY = np.zeros((2, 3, 3)), np.full(9, 0.11)
BAD: list[tuple[str, Any]] = [
    ("policy-shape", (BOARD, np.ones(7), 1.0)),
    ("policy-values", (BOARD, [-1.0, *POLICY[1:]], 1.0)),
    ("policy-values", (BOARD, [np.inf, *POLICY[1:]], 1.0)),
    *(("value-range", (BOARD, POLICY, value)) for value in (5.0, 0.5)),
    ("board-cells", (np.full((2, 3, 3), [[[1]], [[3]]]), POLICY, 1.0)),
    ("board-cells", (np.append(BOARD, np.eye(3)[None], 0), POLICY, 1.0)),
    ("board-overlap", (np.ones((2, 3, 3)), POLICY, 1.0)),
    ("value-range", (np.zeros((2, N, N)), np.full(N * N, 0.04), 0.0)),  # no result; others are 1 and -1
]


def test_a_bad_record_is_rejected_and_does_not_decide_the_board_size(tmp_path: Path) -> None:
    for reason, record in BAD:
        reader, found, rejected = read_source(save(tmp_path / "a.pkl", [record, *MOVER]))
        assert [(each.record, each.reason) for each in rejected] == [(0, reason)]
        assert (reader.board_size, [row["record"] for row in found]) == (N, [*range(1, len(MOVER) + 1)])


def refused(path: Path) -> str:
    with pytest.raises(FormatError) as caught:
        read_source(path)
    return str(caught.value)


def test_positions_whose_convention_is_not_shown_are_refused_with_their_layout(tmp_path: Path) -> None:
    ends = [index for index, (board, _, _) in enumerate(MOVER) if not board.any()][1:]
    contents: list[list[Any]] = [
        [MOVER[index] for index in np.random.default_rng(1).permutation(len(MOVER))],
        [(board, policy, -v if index == 9 else v) for index, (board, policy, v) in enumerate(MOVER)],
        [row for index, row in enumerate(MOVER) if not {index + 1, index + 2, index + 3} & {*ends}],
        *([(board[:, :, ::-1], policy, value) for board, policy, value in MOVER], MOVER[:1]),
        [(np.zeros((2, N, N), np.float32), np.full(N * N, 1 / 25, np.float32), 1.0)] * 5,
    ]
    for content in contents:
        message = refused(save(tmp_path / "a.pkl", content))
        assert f"a list of {len(content)} of (an array " in message
        assert "(2, 5, 5), an array <f4 (25,), " in message
        assert "docs/howto/formats.md" in message


EDGES = {"top-bottom": (0, 0), "left-right": (0, 1), "mover-top-bottom": (1, 0), "mover-left-right": (1, 1)}
WORDS = {"to move": "mover", "moved": "other"}


@pytest.mark.parametrize("edges", EDGES)
def test_a_stated_convention_reads_positions_in_any_order(tmp_path: Path, edges: str) -> None:
    order = np.random.default_rng(1).permutation(len(ROWS))
    for stones, view in (("to move", "to move"), ("first", "second"), ("moved", "first")):
        examples = written(ROWS, stones, view, *map(bool, EDGES[edges]))
        convention = f"{WORDS.get(stones, stones)}/{edges}/{WORDS.get(view, view)}"
        path = save(tmp_path / "a.pkl", [examples[index] for index in order])
        reader, found = check(path, [ROWS[index] for index in order], alphazero_convention=convention)
        assert reader.header["convention"] == convention
        assert {row["line_idx"] for row in found} == {None}  # the game of a position is unknown
        _, found = check(save(path, examples), alphazero_convention=convention)
        assert [row["line_idx"] for row in found] == np.cumsum([not row[0].any() for row in ROWS]).tolist()


def test_a_board_after_the_last_move_may_have_no_policy(tmp_path: Path) -> None:
    games = demo_games(6, 3, N)
    content = [(board, None, float(game.winner)) for game in games for board in replay(game.moves, N)]
    _, found, rejected = read_source(save(tmp_path / "a.pkl", content))
    assert (len(found), rejected, {row["policy"] for row in found}) == (len(content), [], {None})


def test_games_in_order_are_games_although_they_were_resigned(tmp_path: Path) -> None:
    rows = [row for row in played(12) if row[0].sum() < 6]
    path, store = save(tmp_path / "a.pkl", written(rows, "to move", "to move")), tmp_path / "store"
    done = hexdata_run("convert", path, store, "--max-reject-rate", "0")
    assert "--alphazero-convention STONES/EDGES/VALUES" in done.err
    done = hexdata_run("convert", path, store, "--alphazero-convention", "mover/top-bottom/mover", "--json")
    result = done.facts
    assert (result["positions"], result["games"], result["rejected"]) == (72, 12, 0)
    assert hexdata_run("verify", store, "--round-trip", path).status == 0
    assert hexdata_run("convert", path, store, "--alphazero-convention", "mover/mover").status == 2


def test_files_of_another_layout_are_refused_with_keys_and_shapes(tmp_path: Path) -> None:
    npz, packed = tmp_path / "a.npz", tmp_path / "b.npz"
    np.savez(npz, obs=np.zeros((4, 3)), states=np.zeros((4, 2, 5, 5), np.int8))
    packed.write_bytes(gzip.compress(npz.read_bytes()))
    np.savez(tmp_path / "c.npz", x=np.array([{}, None]), pi=np.zeros(2), z=np.zeros(2))
    np.save(tmp_path / "a.npy", np.zeros((4, 3)))
    objects = [(np.array([[1, None]], object), np.ones(25), 1.0)]
    arrays = {"boards": np.zeros((4, 5, 5)), "values": [1, 2]}
    legal = [(board, policy * (board.sum(axis=0) == 0).reshape(-1), value) for board, policy, value in MOVER]
    for path, words in (
        (save(tmp_path / "a.pkl", [("a", [1])] * 2), ["a list of 2 of (str, a list of 1 of int)"]),
        (npz, ["obs float64 (4, 3)", "states int8 (4, 2, 5, 5)"]),
        (packed, ["gunzip"]),
        (tmp_path / "a.npy", ["a single NumPy array", "docs/howto/formats.md"]),
        (save(tmp_path / "d.pkl", MOVER, 0), ["protocol 0"]),
        (tmp_path / "c.npz", ["object (2,)", "array.tolist()"]),
        (save(tmp_path / "b.pkl", objects), ["array.tolist()"]),
        (save(tmp_path / "e.pkl", [{"board": 1, "policy": 2, "value": 1, "z": 2}]), ["'z': int"]),
        (save(tmp_path / "h.pkl", [(b, p.reshape(N, N).T, v) for b, p, v in legal]), ["columns exchanged"]),
        (save(tmp_path / "i.pkl", [(b, np.append(0, p), v) for b, p, v in legal]), ["that of a pass"]),
        (save(tmp_path / "j.pkl", [(3 * b, p, v) for b, p, v in MOVER]), ["such as record 1: a cell"]),
        (save(tmp_path / "f.pkl", {**arrays, "policies": []}), ["'policies': a list of 0"]),
        (save(tmp_path / "g.pkl", {"boards": 1, "pi": np.ones(()), "z": 2.0}), ["'pi': an array <f8 ()"]),
        (save(tmp_path / "c.pkl", arrays), ["'boards': an array <f8 (4, 5, 5), 'values': a list of 2"]),
    ):
        message = refused(path)
        assert [word for word in words if word not in message] == []


def shared(value: object, count: int) -> bytes:
    """Return a pickle of a list that contains the same object ``count`` times."""
    get, pickled = b"j\xff\xff\0\0", pickle.dumps(value, 2)[2:-1]
    return b"\x80\x02](" + pickled + b"r\xff\xff\0\0e" + (b"(" + get * 100 + b"e") * (count // 100) + b"."


def nested(depth: int, each: int, kind: type = list) -> Any:
    value: Any = 0.0
    for _ in range(depth):
        value = kind([value] * each)
    return value


def save_archive(rows: int) -> bytes:
    file, cells = io.BytesIO(), np.zeros((rows, 9), np.uint8)
    np.savez_compressed(file, boards=cells, policies=cells, values=cells[:, 0])
    return file.getvalue()


EMPTY = (np.zeros((N, N)), np.ones(N * N), 1)
WIDE: dict[str, Any] = dict.fromkeys(map(str, range(20_000))) | dict(zip(("s", "p", "v"), EMPTY, strict=True))
HOSTILE: dict[str, Callable[[], bytes]] = {
    "a call": lambda: b"\x80\x02](cos\nsystem\nX\x01\x00\x00\x00x\x85Re.",
    "tensors": lambda: b"\x80\x02](ctorch._utils\n_rebuild_tensor_v2\nX\x01\x00\x00\x00x\x85Re.",
    "lists that contain a list twice": lambda: pickle.dumps([(nested(40, 2), *EMPTY[1:])] * 2),
    "nested lists": lambda: pickle.dumps([(nested(200, 1), *EMPTY[1:])]),
    "a list of one array": lambda: pickle.dumps([([np.zeros(1 << 20)] * 1000, *EMPTY[1:])]),
    "a value of many numbers": lambda: shared((*EMPTY[:2], np.zeros(20_000)), 1000),
    "wide tuples": lambda: pickle.dumps([(nested(4, 8, tuple), *EMPTY[1:])] * 20),
    "a wide dict": lambda: shared(WIDE, 60_000),
    "arrays without cells": lambda: pickle.dumps(
        dict.fromkeys(("boards", "pi", "z"), np.zeros((1 << 31, 0)))
    ),
    "an iteration": lambda: shared([EMPTY] * 3000, 2000),
    "large boards": lambda: shared((np.zeros((32, 32)), np.ones(1024), 1), 40_000),
    "an archive of many rows": lambda: save_archive(1 << 20),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_small_file_runs_no_code_and_does_not_expand_in_memory(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.pkl").write_bytes(HOSTILE[name]())
    tracemalloc.start()
    try:
        message = refused(tmp_path / "a.pkl")
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert len(message) < 1000
    assert {"a call": "os.system", "tensors": "torch._utils"}.get(name, "") in message
