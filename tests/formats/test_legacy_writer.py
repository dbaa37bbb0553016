"""Writer of legacy pickles: its files as pickle.load reads them, and round trips of read files."""

from __future__ import annotations

import errno
import gc
import io
import json
import pickle
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hexdata.board import pack_boards
from hexdata.errors import InputError
from hexdata.formats.legacy import DIALECTS, LegacyReader, write_legacy
from hexdata.schema import raw_schema
from tests.legacy_pickles import Player, Winner, assert_same, load_pickle

N = 4
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
FILES = sorted((SHARED / "legacy").rglob("*.pkl.gz"))
SMALL = [path for path in FILES if path.stat().st_size < 200_000]
pytestmark = pytest.mark.usefixtures("hex_ai")
real = pytest.mark.skipif(not FILES, reason="needs the real data")


def read(path):
    with LegacyReader(path) as file:
        return list(file.batches()), file


def batch(count, **columns):
    """Return raw rows. The move is the number of the row, or null in every third row."""
    planes = np.zeros((count, 2, N, N), np.uint8)
    planes[:, 0].reshape(count, -1)[np.arange(count), np.arange(count) % 16] = 1
    rows = {
        "record": range(count),
        "board": [bytes(board) for board in pack_boards(planes)],
        "move": [None if row % 3 == 2 else row % 16 for row in range(count)],
        "value": [float(row % 2) for row in range(count)],
        "player_to_move": [row % 2 for row in range(count)],
        "file_idx": [3] * count,
        "line_idx": [row * 7 for row in range(count)],
        "position_in_game": range(count),
        "total_positions": [400] * count,
        "value_sample_tier": [row % 4 for row in range(count)],
        "winner": [row % 2 for row in range(count)],
        "metadata": ['{"source_file":"data/a.trmph"}'] * count,
    } | columns
    schema = raw_schema(N)
    return pa.RecordBatch.from_pydict({name: rows.get(name, [None] * count) for name in schema.names}, schema)


def write(path, batches, dialect, header=None):
    return write_legacy(path, batches, board_size=N, dialect=dialect, header=header or {})


def test_tuples_as_pickle_reads_them(tmp_path):
    assert (
        write(tmp_path / "a", [batch(5), batch(3)], "tuples", {"source_file": "x", "stats": {"n": [1, 2.5]}})
        == 8
    )
    content = load_pickle(tmp_path / "a")
    assert list(content) == ["examples", "source_file", "stats"]
    assert content["stats"] == {"n": [1, 2.5]}
    board, policy, value = content["examples"][1]
    assert (board.dtype, board.shape, policy.dtype, policy.shape) == ("f4", (2, N, N), "f4", (N * N,))
    assert (np.flatnonzero(board).tolist(), np.flatnonzero(policy).tolist(), value) == ([1], [1], 1.0)
    assert content["examples"][2][1] is None


def test_dicts_as_pickle_reads_them(tmp_path):
    write(tmp_path / "a", [batch(40)], "dicts")
    example = load_pickle(tmp_path / "a")["examples"][39]
    assert list(example) == ["board", "policy", "value", "metadata"]
    assert example["metadata"] == {
        "game_id": (3, 273),
        "position_in_game": 39,
        "total_positions": 400,
        "value_sample_tier": 3,
        "winner": "RED",
    }


def test_enums_as_pickle_reads_them(tmp_path):
    write(tmp_path / "a", [batch(40, winner=[1, None] * 20)], "dicts-enums")
    first, second = load_pickle(tmp_path / "a")["examples"][:2]
    assert (first["player_to_move"], first["metadata"]["winner"]) == (Player.BLUE, Winner.RED)
    assert (second["player_to_move"], second["metadata"]["winner"]) == (Player.RED, None)
    assert first["metadata"]["source_file"] == "data/a.trmph"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_written_files_are_read_back(tmp_path, dialect):
    header = {"processing_stats": {"all_games": 3, "error": None, "deep": [{"a": [True, -5, 1 << 40]}]}}
    write(tmp_path / "a", [batch(2_500)], dialect, header)
    batches, file = read(tmp_path / "a")
    assert file.header["processing_stats"] == header["processing_stats"]
    assert [batch.records for batch in batches] == [2_500]
    write(tmp_path / "b", [batch.positions for batch in batches], file.header["dialect"], file.header)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_header_keys_may_be_added_while_writing(tmp_path):
    header = {}

    def batches():
        yield batch(3)
        header["processing_stats"] = {"examples_generated": 3}

    write_legacy(tmp_path / "a", batches(), board_size=N, dialect="tuples", header=header)
    assert load_pickle(tmp_path / "a")["processing_stats"] == {"examples_generated": 3}


@pytest.mark.parametrize("n_dtype", ["?", "u1", "f8", ">f4"])
def test_unusual_values_survive_the_round_trip(tmp_path, n_dtype):
    """Dense policies, other dtypes and orders, NumPy scalars, strange headers: field for field."""
    dense = np.linspace(0, 1, N * N, dtype="f4").astype("f8" if n_dtype == "f8" else "f4")
    examples = [
        {
            "metadata": {
                "zoo": [1, {"b": None, "a": "\u00e9"}],
                "winner": "r",
                "total_positions": np.int64(7),
            },
            "board": np.zeros((2, N, N), n_dtype, order="F"),
            "policy": policy,
            "value": 0.25,
        }
        for policy in (dense, None, dense[::-1].copy(), np.eye(1, N * N, 3, dense.dtype)[0])
    ]
    odd = {"t": (1, (2,)), "f": float("inf"), 2: np.float32(0.5), "s": "x" * 300, "n": float("nan")}
    raw = pickle.dumps({"examples": examples, "odd": odd, "d": {"e": []}})
    (tmp_path / "a").write_bytes(raw)
    batches, file = read(tmp_path / "a")
    assert not any(batch.rejected for batch in batches)
    header = json.loads(json.dumps(file.header))
    write(tmp_path / "b", [batch.positions for batch in batches], header["dialect"], header)
    assert_same(pickle.loads(raw), load_pickle(tmp_path / "b"))


def test_mixed_dialects_survive_the_round_trip(tmp_path):
    examples = [{"board": np.zeros((2, N, N), dtype), "policy": None, "value": 0.5} for dtype in ("f4", "u1")]
    examples += [(np.zeros((2, N, N), "f4"), None, 1), {**examples[0], "board": np.zeros((2, N, N), "f4")}]
    raw = pickle.dumps({"examples": examples})
    (tmp_path / "a").write_bytes(raw)
    batches, file = read(tmp_path / "a")
    write(tmp_path / "b", [batch.positions for batch in batches], file.header["dialect"])
    assert_same(pickle.loads(raw), load_pickle(tmp_path / "b"))


def test_a_mixed_spelling_without_a_first_one_is_refused(tmp_path):
    dialect = {**DIALECTS["tuples"], "board": {"mixed": [["<f4", 1], ["|u1", 1]]}}
    with pytest.raises(InputError, match="several spellings of board"):
        write(tmp_path / "a", [batch(1)], dialect)


# Real files


@real
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_real_files_are_read_completely(path):
    batches, file = read(path)
    assert not any(batch.rejected for batch in batches)
    count = sum(batch.positions.num_rows for batch in batches)
    table = pa.Table.from_batches([batch.positions for batch in batches])
    stats = file.header.get("processing_stats")
    games = Counter(zip(*(table.column(name).to_pylist() for name in ("file_idx", "line_idx")), strict=True))
    if stats is not None:
        assert count == stats["examples_generated"]
        assert table.column("move").null_count == stats["valid_games"]  # on the final position of each game
        assert file.board_size == 13
    elif count > 5:
        assert count == file.header["shuffling_stats"]["total_examples"]
    if file.format == "legacy-dicts" and (None, None) not in games:
        assert len(games) == stats["valid_games"]
    expected = {"v1": "legacy-tuples", "v2": "legacy-dicts", "found": "legacy-shuffled"}
    assert file.format == expected.get(path.parent.name, file.format)


@real
@pytest.mark.parametrize("path", SMALL, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_real_files_survive_the_round_trip(tmp_path, path):
    batches, file = read(path)
    header = json.loads(json.dumps(file.header))
    write_legacy(
        tmp_path / "a",
        [batch.positions for batch in batches],
        board_size=file.board_size,
        dialect=header["dialect"],
        header=header,
    )
    assert_same(load_pickle(path), load_pickle(tmp_path / "a"))


class FullDisk(io.BytesIO):
    """A file on a disk that is full after ``room`` writes."""

    def __init__(self, room):
        super().__init__()
        self.room = room

    def write(self, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= 1
        return super().write(data)


def test_a_failed_write_leaves_no_open_stream(monkeypatch):
    """The stream must not write again when it is finalized, after its owner has closed the file."""
    errors = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    for room in range(4):
        with pytest.raises(OSError, match="No space left"), FullDisk(room) as file:
            write_legacy(file, [batch(7)], board_size=N, dialect="dicts", header={})
    gc.collect()
    assert not errors
