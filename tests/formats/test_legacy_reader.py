"""Reader of legacy pickles: every variant and every rejection, on the fast path and the plain one."""

from __future__ import annotations

import copy
import json
import pickle
import pickletools
import sys

import numpy as np
import pytest

from hexdata.board import unpack_boards
from hexdata.errors import FormatError
from hexdata.formats.legacy import LegacyLimits, LegacyReader, looks_like_pickle, reader
from hexdata.schema import raw_schema
from tests import legacy_pickles
from tests.legacy_pickles import legacy_enum, save_pickle, top_level

pytestmark = pytest.mark.usefixtures("hex_ai")

N = 5
CELLS = N * N


def board(ply=3, n=N, dtype="f4", order="C"):
    planes = np.zeros((2, n, n), dtype)
    for move in range(ply % (n * n)):
        planes[move % 2].flat[(move * 7) % (n * n)] = 1
    return np.asarray(planes, order=order)


def policy(move=0, n=N, dtype="f4"):
    if move is None:
        return None
    cells = np.zeros(n * n, dtype)
    cells[move % (n * n)] = 1
    return cells


def example(ply=3, move=4, value=1.0, **changes):
    """Return an example with a legal board; ``changes`` are those of ``legacy_pickles.example``."""
    own = {"board": board(ply), "policy": policy(move), "value": value, "player_to_move": ply % 2}
    own |= {"position_in_game": ply, "value_sample_tier": 1}
    return legacy_pickles.example(12, 0, 20, **own | changes)


def read(path, fast=True):
    """Return the rows of a file, its rejections as (record, code), and the reader."""
    with LegacyReader(path, fast=fast) as file:
        batches = list(file.batches())
    rows = [row for batch in batches for row in batch.positions.to_pylist()]
    rejected = [(item.record, item.reason) for batch in batches for item in batch.rejected]
    for batch in batches:
        assert batch.positions.schema == raw_schema(file.board_size or 0)
    return rows, rejected, file


def planes_of(row, n=N):
    return unpack_boards(np.frombuffer(row["board"], np.uint8)[None], n)[0]


@pytest.fixture(params=[True, False], ids=["fast", "plain"])
def fast(request):
    return request.param


# Accepted files


@pytest.mark.parametrize("protocol", range(6))
def test_all_protocols_give_equal_rows(tmp_path, fast, protocol):
    examples = [example(ply, ply if ply % 4 else None, ply % 2, game_id=(1, ply)) for ply in range(40)]
    rows, rejected, file = read(save_pickle(tmp_path / "a", top_level(examples), protocol), fast)
    assert rejected == []
    assert [row["record"] for row in rows] == list(range(40))
    assert [row["move"] for row in rows] == [ply % CELLS if ply % 4 else None for ply in range(40)]
    assert [row["line_idx"] for row in rows] == list(range(40))
    assert [row["player_to_move"] for row in rows] == [ply % 2 for ply in range(40)]
    for ply, row in enumerate(rows):
        np.testing.assert_array_equal(planes_of(row), board(ply))
    assert file.header["dialect"]["board"] == "<f4"
    assert (file.format, file.board_size) == ("legacy-dicts", N)


def test_tuples(tmp_path, fast):
    examples = [(board(ply), policy(ply), float(ply % 2)) for ply in range(20)]
    rows, rejected, file = read(save_pickle(tmp_path / "a", top_level(examples)), fast)
    assert [(row["move"], row["value"]) for row in rows] == [(ply, ply % 2) for ply in range(20)]
    assert {row["player_to_move"] for row in rows} == {row["winner"] for row in rows} == {None}
    assert rejected == []
    assert file.format == "legacy-tuples"
    assert file.header == {
        "source_file": "data/a.trmph",
        "dialect": {"layout": "tuple", "board": "<f4", "policy": "<f4", "value": "float"},
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_names_of_older_numpy_are_accepted(tmp_path, fast, protocol):
    raw = pickle.dumps(top_level([example(ply) for ply in range(9)]), protocol)
    older = raw.replace(b"\x8c\x16numpy._core.m", b"\x8c\x15numpy.core.m")
    older = older.replace(b"\x8c\x13numpy._core.n", b"\x8c\x12numpy.core.n").replace(
        b"numpy._core", b"numpy.core"
    )
    older = pickletools.optimize(older)  # frames of the right length again
    assert b"numpy.core." in older
    rows, _, _ = read(save_pickle(tmp_path / "a", older), fast)
    assert rows == read(save_pickle(tmp_path / "b", raw), fast)[0]
    assert len(rows) == 9


@pytest.mark.parametrize("module", ["hex_ai.enums", "hex_ai.value_utils"])
def test_enums_are_read_without_their_package(tmp_path, fast, module, monkeypatch):
    player, winner = legacy_enum("Player", module), legacy_enum("Winner", module)
    examples = [example(ply, player_to_move=player(ply % 2), winner=winner(ply // 9)) for ply in range(18)]
    path = save_pickle(tmp_path / "a", top_level(examples))
    for name in ("hex_ai", "hex_ai.enums", "hex_ai.value_utils"):
        monkeypatch.setitem(sys.modules, name, None)
    rows, rejected, file = read(path, fast)
    assert rejected == []
    assert [row["player_to_move"] for row in rows] == [ply % 2 for ply in range(18)]
    assert [row["winner"] for row in rows] == [ply // 9 for ply in range(18)]
    assert file.header["dialect"]["player_to_move"] == f"{module}.Player"
    assert file.header["dialect"]["winner"] == f"{module}.Winner"


@pytest.mark.parametrize(
    ("spelling", "winner", "dialect"),
    [("RED", 1, "BLUE/RED"), ("b", 0, "b/r"), ("2", 1, "1/2"), (1, 0, "int 1/2"), (None, None, None)],
)
def test_winners(tmp_path, fast, spelling, winner, dialect):
    rows, _, file = read(save_pickle(tmp_path / "a", top_level([example(winner=spelling)])), fast)
    assert rows[0]["winner"] == winner
    assert file.header["dialect"].get("winner") == dialect


@pytest.mark.parametrize("dtype", ["?", "u1", "i8", "f2", "f8", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_other_dtypes_and_orders(tmp_path, fast, dtype, order):
    examples = [example(ply, board=board(ply, dtype=dtype, order=order), policy=policy(ply, dtype=dtype))
                for ply in range(12)]  # fmt: skip
    rows, rejected, file = read(save_pickle(tmp_path / "a", top_level(examples)), fast)
    assert rejected == []
    for ply, row in enumerate(rows):
        np.testing.assert_array_equal(planes_of(row), board(ply))
        assert row["move"] == ply
    name = np.dtype(dtype).str.replace("?", "b1")
    assert file.header["dialect"]["board"] == name + (" fortran" if order == "F" else "")
    assert file.header["dialect"]["policy"] == name


def test_dense_policies_are_kept(tmp_path, fast):
    dense = np.linspace(0, 1, CELLS, dtype="f4")
    zeros = np.zeros(CELLS, "f4")
    twice = policy(3) + policy(4)
    minus = policy(3)
    minus[7] = -0.0  # no plain zero: a single move would lose its sign
    policies = [copy.deepcopy(item) for item in [dense, zeros, twice, minus, policy(9), None] * 2]
    rows, rejected, _ = read(
        save_pickle(tmp_path / "a", top_level([example(policy=p) for p in policies])), fast
    )
    assert rejected == []
    for row, expected in zip(rows, policies, strict=True):
        if row["policy"] is None:
            assert row["move"] == (None if expected is None else 9)
        else:
            assert row["move"] is None
            cells = np.flatnonzero(expected.view("u4")).tolist()
            given = [{"cell": cell, "probability": float(expected[cell])} for cell in cells]
            assert repr(row["policy"]) == repr(given)
    assert [row["policy"] is None for row in rows] == [False, False, False, False, True, True] * 2


def test_unknown_metadata_goes_to_the_column_metadata(tmp_path, fast):
    examples = [
        example(zoo=[1, {"a": None}], source_file=f"f{ply % 2}", alpha=ply, original_source="raw\udce9")
        for ply in range(12)
    ]
    rows, _, file = read(save_pickle(tmp_path / "a", top_level(examples)), fast)
    for ply, row in enumerate(rows):
        expected = {
            "alpha": ply,
            "original_source": "raw\udce9",
            "source_file": f"f{ply % 2}",
            "zoo": [1, {"a": None}],
        }
        assert row["metadata"] == json.dumps(expected, separators=(",", ":"))
        assert row["origin"] == "raw\\udce9"
    assert file.header["dialect"]["metadata_keys"][-1] == "original_source"


def test_the_header_contains_all_other_keys(tmp_path, fast):
    header = {
        "processing_stats": {"all_games": 3, "file_error": None, "rate": 1.5},
        "shuffling_stats": {"bucket_id": 1},
        "odd": (1, np.float32(0.5), float("inf"), {2: b"x"}),
    }
    _, _, file = read(save_pickle(tmp_path / "a", top_level([example()], **header)), fast)
    assert file.format == "legacy-shuffled"
    odd = {"__tuple__": [1, {"__numpy__": ["<f4", 0.5]}, {"__float__": "inf"},
                         {"__dict__": [[2, {"__object__": "bytes"}]]}]}  # fmt: skip
    assert {key: file.header[key] for key in header} == header | {"odd": odd}
    json.dumps(file.header, allow_nan=False)


def test_mixed_dialects_are_recorded(tmp_path, fast):
    examples = [
        example(winner=("BLUE", "b")[ply % 3 == 0], player_to_move=(..., 1)[ply % 2]) for ply in range(12)
    ]
    _, _, file = read(save_pickle(tmp_path / "a", top_level([*examples, (board(), None, 0)])), fast)
    dialect = file.header["dialect"]
    assert dialect["winner"] == {"mixed": [["BLUE/RED", 8], ["b/r", 4]]}
    assert dialect["layout"] == {"mixed": [["dict", 12], ["tuple", 1]]}
    assert dialect["value"] == {"mixed": [["float", 12], ["int", 1]]}
    assert [count for _, count in dialect["keys"]["mixed"]] == [6, 6]
    json.dumps(file.header)


def test_numpy_scalars_are_numbers(tmp_path, fast):
    examples = [example(ply, value=np.float32(0.25), position_in_game=np.int64(ply)) for ply in range(5)]
    rows, rejected, file = read(save_pickle(tmp_path / "a", top_level(examples)), fast)
    assert rejected == []
    assert [(row["value"], row["position_in_game"]) for row in rows] == [(0.25, ply) for ply in range(5)]
    assert file.header["dialect"]["value"] == "numpy <f4"


def test_a_file_without_examples(tmp_path, fast):
    rows, rejected, file = read(save_pickle(tmp_path / "a", top_level([])), fast)
    assert (rows, rejected, file.board_size) == ([], [], None)
    assert file.header == {"source_file": "data/a.trmph", "dialect": {}}


def test_plain_files_are_read(tmp_path, fast):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(top_level([example()])))
    assert len(read(tmp_path / "a.pkl", fast)[0]) == 1


# Rejected records


def spoiled(array, place, value):
    array = array.copy()
    array.flat[place] = value
    return array


REJECTIONS = {
    "example-layout": [
        *(7, [], (board(), policy()), example(value=...), example(board=...), {"x": 1}),
        *(example() | {"visits": value} for value in ("3", True, np.bool_(True), [1], (1,))),
        example() | {1: 1},
    ],
    "metadata-type": [example(metadata=None), example(metadata={1: 2})],
    "board-type": [(None, None, 1.0), *(example(board=value) for value in (None, [[0]], "x", np.float32(1)))],
    "board-shape": [
        example(board=np.zeros(shape)) for shape in ((2, 2, 2), (2, 0, 0), (), (2, 5, 6), (5, 5))
    ],
    "board-cells": [example(board=spoiled(board(), 4, cell)) for cell in (2, 0.5, -1, np.nan, -0.0)],
    "board-overlap": [example(board=np.ones((2, N, N)))],
    "board-size": [example(board=board(n=6), policy=policy(n=6))],
    "policy-type": [example(policy=value) for value in ([0.5], 0.5, "x")],
    "policy-shape": [example(policy=policy(n=6)), example(policy=np.zeros((N, N), "f4"))],
    "policy-values": [example(policy=spoiled(policy(), 4, cell)) for cell in (np.nan, np.inf, -0.5)],
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
        example(zoo=value) for value in ((1, 2), b"x", [float("nan")], {"a": np.float32(1)}, {1: 2})
    ],
}


@pytest.mark.parametrize("code", REJECTIONS)
def test_rejections(tmp_path, fast, code):
    good = [example(ply) for ply in range(4)]
    examples = [copy.deepcopy(item) for bad in REJECTIONS[code] for item in (*good, bad)]
    rows, rejected, file = read(save_pickle(tmp_path / "a", top_level(examples)), fast)
    assert rejected == [(5 * i + 4, code) for i in range(len(REJECTIONS[code]))]
    assert [row["record"] for row in rows] == [i for i in range(len(examples)) if i % 5 != 4]
    assert file.board_size == N


def test_the_first_usable_board_sets_the_size(tmp_path, fast):
    examples = [
        example(board=board() * 2),
        example(board=board(n=6), policy=None),
        example(),
        example(board=""),
    ]
    rows, rejected, file = read(save_pickle(tmp_path / "a", top_level(examples)), fast)
    assert file.board_size == 6
    assert rejected == [(0, "board-cells"), (2, "board-size"), (3, "board-type")]
    assert [row["record"] for row in rows] == [1]


def test_a_file_without_a_usable_board(tmp_path, fast):
    rows, rejected, file = read(save_pickle(tmp_path / "a", top_level([1, 2])), fast)
    assert (rows, rejected, file.board_size) == ([], [(0, "example-layout"), (1, "example-layout")], None)


def test_batches_are_bounded_and_complete(tmp_path, fast):
    one = board(0, 3, "u1"), policy(0, 3, "u1")
    examples = [(one[0].copy(), one[1].copy(), 0.0 if i % 10 else None) for i in range(9_000)]
    with LegacyReader(save_pickle(tmp_path / "a", top_level(examples)), fast=fast) as file:
        batches = list(file.batches())
    assert [batch.records for batch in batches] == [8_000, 1_000]
    assert all(batch.positions.num_rows <= reader.BATCH_ROWS for batch in batches)
    assert sum(len(batch.rejected) for batch in batches) == 900
    assert batches[1].positions.column("record")[0].as_py() == 8_001


# Other files


def refusal(path, fast=True):
    with LegacyReader(path, fast=fast) as file, pytest.raises(FormatError) as caught:
        list(file.batches())
    assert str(path) in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "list at the top level"),
        ({"boards": 1, "num_games": 2}, "top-level keys ['boards', 'num_games']"),
        ({"games": [{"moves": ["#5,a1"]}]}, "self-play file of games"),
        ({"examples": 5}, 'a list under "examples"'),
        ({"examples": ({},)}, 'a list under "examples"'),
    ],
)
def test_errors_describe_other_layouts(tmp_path, content, words):
    error = refusal(save_pickle(tmp_path / "a", content))
    assert error.code == "unknown-layout"
    assert words in str(error)


def test_the_error_names_the_torch_layout(tmp_path):
    raw = b"\x80\x02}(X\x06\x00\x00\x00boardsctorch._utils\n_rebuild_tensor_v2\n(tR" + b"u."
    error = refusal(save_pickle(tmp_path / "a", raw))
    assert error.code == "torch-tensors"
    assert "torch._utils._rebuild_tensor_v2" in str(error)
    assert "PyTorch" in str(error)


@pytest.mark.parametrize("content", [{}, [], {"a": 1}, [1]])
@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_is_recognised_by_its_first_bytes(content, protocol):
    assert looks_like_pickle(pickle.dumps(content, protocol)[:64])


@pytest.mark.parametrize(
    "head", [b"", b"\x80", b"#5,a1b2 b\n", b"http://www.trmph", b'{"a": 1}', b"\x80\x06ab", b"PAR1"]
)
def test_other_files_are_not_recognised(head):
    assert not looks_like_pickle(head)


# Shared objects


def shared_everything(count=3_000):
    texts = {"trmph_game": "#5,a1b2c3" * 3, "source_file": "data/x.trmph"}
    games = [((3, line), dict(texts)) for line in range(count // 20 + 1)]
    return [
        example(ply % 20, ply % CELLS, game_id=games[ply // 20][0], **games[ply // 20][1])
        for ply in range(count)
    ]


def test_distant_examples_may_share_small_objects(tmp_path, fast):
    examples = shared_everything(60)
    examples = examples[::2] + examples[1::2]
    rows, rejected, _ = read(save_pickle(tmp_path / "a", top_level(examples)), fast)
    assert rejected == []
    assert [row["line_idx"] for row in rows] == [item["metadata"]["game_id"][1] for item in examples]


@pytest.mark.parametrize("part", ["board", "policy", "metadata"])
def test_a_shared_payload_is_refused_with_a_hint(tmp_path, fast, part):
    examples = [example(ply) for ply in range(30)]
    examples[25][part] = examples[3][part]
    error = refusal(save_pickle(tmp_path / "a", top_level(examples)), fast)
    assert error.code == "shared-payload"
    assert "byte " in str(error)
    assert "deepcopy" in str(error)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_examples_may_share_numpy_scalars(tmp_path, fast, protocol):
    shared = [np.float32(0.75), np.int8(98), np.True_, np.float64("nan"), np.uint64(1 << 40)]
    examples = [
        example(ply, ply, temperature=shared[ply % 2], value=np.float32(ply % 2), flag=np.bool_(ply % 3))
        | {"score": shared[0], "noise": shared[3], "count": np.int8(ply % 5), "seed": shared[4]}
        for ply in range(24)
    ]
    path = save_pickle(tmp_path / "a", top_level(examples, scalar=shared[0]), protocol)
    rows, rejected, _ = read(path, fast)
    assert rejected == []
    for ply, row in enumerate(rows):
        metadata = json.loads(row["metadata"])
        numbers = metadata["hexdata:example"]
        assert (metadata["temperature"], metadata["flag"]) == (shared[ply % 2], bool(ply % 3))
        assert numbers == {"score": 0.75, "noise": "nan", "count": ply % 5, "seed": 1 << 40}
        types = metadata["hexdata:example_types"]
        assert types == {
            "score": "numpy <f4",
            "noise": "numpy <f8",
            "count": "numpy |i1",
            "seed": "numpy <u8",
        }


def test_scalars_do_not_replace_shared_texts(tmp_path):
    first, last = example(0, trmph_game="#5,a1"), example(1, trmph_game="#5,a1")
    others = [example(ply % 20, noise=np.float32(ply)) for ply in range(400)]
    path = save_pickle(tmp_path / "a", top_level([first, *others, last]))
    limits = LegacyLimits(memo_bytes=6_000)
    with LegacyReader(path, limits=limits) as file:
        assert sum(batch.records for batch in file.batches()) == 402
        assert file._unpickler.memo._kept_cost < 13_000


def test_memory_does_not_grow_with_the_number_of_examples(tmp_path, fast):
    path = save_pickle(tmp_path / "a", top_level(shared_everything()))
    with LegacyReader(path, fast=fast) as file:
        assert sum(batch.records for batch in file.batches()) == 3_000
        memo = file._unpickler.memo
    assert memo.next > 3_000 * 10
    assert len(memo.permanent) + len(memo.current) + len(memo._kept) < 100


def test_batches_are_yielded_before_the_end_of_the_file(tmp_path, fast, monkeypatch):
    monkeypatch.setattr(reader, "_BLOCK", 1_000)
    raw = pickle.dumps(top_level([(board(i % 9), None, 1.0) for i in range(4_000)]))
    (tmp_path / "a.pkl").write_bytes(raw[: len(raw) * 3 // 4])
    with LegacyReader(tmp_path / "a.pkl", fast=fast) as file:
        batches = file.batches()
        assert [next(batches).records, next(batches).records] == [1_000, 1_000]
        with pytest.raises(FormatError, match="the pickle is truncated"):
            list(batches)
