"""The fast path and the plain interpreter give the same result, on all variants and on damaged files."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexdata.errors import FormatError
from hexdata.formats.legacy import LegacyReader, fastpath, reader
from hexdata.formats.legacy import examples as legacy_examples
from tests.legacy_pickles import Player
from tests.pairs import FULL

pytestmark = pytest.mark.usefixtures("hex_ai")


class Pickler(pickle._Pickler):
    """Python's own pickler, with frames of a chosen size."""

    def __init__(self, file, frame, protocol=4):
        super().__init__(file, protocol)
        self.framer._FRAME_SIZE_TARGET = frame


def dumps(content, frame=64 << 10, protocol=4):
    file = io.BytesIO()
    Pickler(file, frame, protocol).dump(content)
    return file.getvalue()


def read(raw, fast):
    """Return the batches of a file, and its properties or the code of its error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pkl"
        path.write_bytes(raw)
        with LegacyReader(path, fast=fast) as file:
            batches = []
            try:
                batches.extend(file.batches())
            except FormatError as error:
                return batches, error.code
            return batches, (file.header, file.format, file.board_size)


def assert_same(raw):
    fast, fast_end = read(raw, fast=True)
    plain, plain_end = read(raw, fast=False)
    assert fast_end == plain_end
    assert len(fast) == len(plain)
    for one, other in zip(fast, plain, strict=True):
        assert one.rejected == other.rejected
        assert one.positions.equals(other.positions)
    return plain_end


INTEGERS = st.sampled_from(
    [0, 1, 7, 255, 256, 65_534, 65_535, 1 << 20, (1 << 31) - 1, 1 << 31, -1, -(1 << 31)]
)
SOME = st.integers(0, 3)
PORTIONS = st.sampled_from([1, 1_000, 1 << 20])
"""Bytes of examples that are packed at a time."""


@st.composite
def examples(draw):
    """Draw the examples of a file. They are mostly alike, but any part of an example may differ."""
    n = draw(st.sampled_from([3, 5]))
    variant = draw(st.sampled_from(["tuple", "dict", "player", "enum"]))
    shares, dtype = draw(st.booleans()), draw(st.sampled_from(["f4", "f4", "u1", "f8"]))
    odd = draw(st.sets(st.integers(0, 60), max_size=12))
    result = []
    games = [((0, game), f"game {game}") for game in range(8)]
    for number in range(draw(st.integers(0, 60))):
        is_odd = number in odd
        planes, cells = np.zeros((2, n, n), dtype), np.zeros(n * n, dtype)
        planes[0].flat[: number % 4] = 1
        cells[number % len(cells)] = 1
        policy = None if number % 7 == 3 else cells
        value = draw(st.sampled_from([0.5, 0, 2.0, "x"])) if is_odd else float(number % 2)
        if is_odd and draw(st.booleans()):
            planes.flat[draw(SOME)] = 3
            cells[draw(SOME)] = draw(st.sampled_from([0.25, 1]))
        if variant == "tuple":
            result.append((planes, policy, value))
            continue
        game_id, text = games[number // 8]
        metadata = {
            "game_id": game_id if shares else (0, draw(INTEGERS) if is_odd else number * 30),
            "position_in_game": draw(INTEGERS) if is_odd else number,
            "total_positions": 60,
            "value_sample_tier": None if is_odd else number % 4,
            "winner": ("BLUE", "RED", "b")[number % 2 + is_odd],
            "trmph_game": text if shares else ("same", "".join(["other ", str(number)]))[is_odd],
        }
        if is_odd:
            metadata[draw(st.sampled_from(["zoo", "winner", "total_positions"]))] = draw(INTEGERS)
        example = {"board": planes, "policy": policy, "value": value}
        if variant != "dict":
            example["player_to_move"] = Player(number % 2) if variant == "enum" else number % 2
        result.append(example | {"metadata": metadata})
    return result


@settings(max_examples=80 if FULL else 40, deadline=None)
@given(
    examples(),
    st.sampled_from([40, 200, 1_500, 64 << 10]),
    st.integers(2, 5),
    st.booleans(),
    PORTIONS,
    PORTIONS,
)
def test_both_paths_give_the_same_result(items, frame, protocol, shuffled, fast_portion, plain_portion):
    header = {"shuffling_stats": {}} if shuffled else {"processing_stats": {"all_games": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastpath, "PORTION", fast_portion)
        patch.setattr(legacy_examples, "PORTION", plain_portion)
        header = assert_same(dumps({"examples": items, **header}, frame, protocol))
    assert isinstance(header, tuple)


def many(count, ply=lambda number: number % 20):
    for number in range(count):
        planes, cells = np.zeros((2, 5, 5), "f4"), np.zeros(25, "f4")
        planes[0].flat[: ply(number)] = cells[ply(number)] = 1
        metadata = {"game_id": (0, number // 20), "position_in_game": ply(number), "winner": "RED"}
        yield {"board": planes, "policy": cells if ply(number) else None, "value": 1.0, "metadata": metadata}


@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_a_text_of_one_character_is_one_object_in_payload_and_metadata(protocol):
    """Old protocols write NumPy's ``b"b"`` as a text, which Python also uses for a winner named ``b``."""
    items = list(many(60))
    for item in items:
        item["metadata"]["winner"] = chr(ord("b"))
    raw = dumps({"examples": items}, protocol=protocol)
    assert raw.count(b"\x01\x00\x00\x00b") == (protocol > 0)
    header = assert_same(raw)
    assert isinstance(header, tuple)


@pytest.fixture
def singles(monkeypatch):
    """Collect the examples that were read opcode by opcode."""
    seen = []
    group_examples = reader.group_examples

    def watch(items, *arguments):
        seen.extend(items)
        return group_examples(items, *arguments)

    monkeypatch.setattr(reader, "group_examples", watch)
    return seen


@pytest.mark.parametrize("frame", [1_500, 64 << 10])
@pytest.mark.parametrize("as_tuples", [True, False])
def test_nearly_all_examples_use_the_fast_path(singles, frame, as_tuples):
    items = [tuple(item.values())[:3] if as_tuples else item for item in many(1_000)]
    raw = dumps({"examples": items}, frame)
    assert raw.count(b"\x95") > (100 if frame == 1_500 else 2)
    batches, _ = read(raw, fast=True)
    assert sum(batch.positions.num_rows for batch in batches) == 1_000
    assert len(singles) < 25


def test_examples_from_many_files_use_the_fast_path(singles):
    """In a shuffled file, each example refers to the texts and the dtype of its original file."""
    files = [pickle.loads(dumps(list(many(60)))) for _ in range(20)]
    items = [example for together in zip(*files, strict=True) for example in together]
    raw = dumps({"examples": items, "shuffling_stats": {}})
    batches, _ = read(raw, fast=True)
    assert sum(batch.positions.num_rows for batch in batches) == 1_200
    assert len(singles) < 100
    assert_same(raw)


def test_references_with_another_meaning_are_detected(singles):
    """The opcodes are the same but two keys are swapped, so the layout differs."""
    items = list(many(60))
    for item in items[40:]:
        item["metadata"] = {
            "game_id": item["metadata"]["game_id"],
            "winner": item["metadata"]["position_in_game"],
            "position_in_game": item["metadata"]["winner"],
        }
    raw = dumps({"examples": items})
    assert_same(raw)
    batches, _ = read(raw, fast=True)
    assert [item.reason for item in batches[0].rejected] == ["position-type"] * 20


def test_metadata_in_metadata_is_read_for_each_example(singles):
    items = list(many(60))
    for number, item in enumerate(items):
        search = {
            "visits": number,
            "value": number / 64,
            "by": "ab"[number % 2],
            "more": {"depth": number % 3},
        }
        item["metadata"]["search"] = search
    raw = dumps({"examples": items})
    assert_same(raw)
    singles.clear()
    texts = [
        text for batch in read(raw, fast=True)[0] for text in batch.positions.column("metadata").to_pylist()
    ]
    assert [json.loads(text)["search"] for text in texts] == [item["metadata"]["search"] for item in items]
    assert len(singles) < 10


def test_the_first_of_two_errors_is_raised():
    items = list(many(100))
    items[60]["policy"] = items[3]["policy"]
    raw = dumps({"examples": items})
    assert assert_same(raw) == "shared-payload"
    assert assert_same(raw[:-2_000]) == "shared-payload"


def test_nested_examples_are_read_opcode_by_opcode():
    """A run represents many examples; an opcode that takes it as one object must not lose any."""
    items = list(many(30))
    raw = dumps({"examples": items})
    assert raw.endswith(b"es.")
    for opcodes in (b"\x85", b"(X\x01\x00\x00\x00a]u"):  # TUPLE1; SETITEMS of {"a": []}
        reaching = pickletools.optimize(raw[:-3] + opcodes + raw[-3:])  # in frames of the right length
        for fast in (True, False):
            batches, _ = read(reaching, fast=fast)
            assert [item.reason for item in batches[0].rejected] == ["example-layout"]


def test_runs_are_split_into_batches(monkeypatch):
    monkeypatch.setattr(reader, "BATCH_ROWS", 64)
    monkeypatch.setattr(reader, "_BLOCK", 500)
    raw = dumps({"examples": list(many(1_000, ply=lambda number: 3))})
    assert_same(raw)
    batches, _ = read(raw, fast=True)
    assert [batch.records for batch in batches] == [64] * 15 + [40]


@pytest.mark.parametrize("seed", range(6))
def test_damaged_files_give_the_same_result_on_both_paths(seed):
    """On both paths, the reader returns rows or raises a FormatError for any bytes."""
    rng = np.random.default_rng(seed)
    raw = dumps({"examples": list(many(24)), "processing_stats": {"a": [1, (2.5, None)]}}, frame=700)
    for _ in range(40):
        broken = bytearray(raw)
        for place in rng.integers(0, len(raw), rng.integers(1, 4)):
            broken[place] = rng.integers(0, 256)
        _, plain = read(bytes(broken), fast=False)
        _, fast = read(bytes(broken), fast=True)
        if fast != "irregular-examples":
            assert fast == plain
