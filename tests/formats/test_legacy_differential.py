"""A short run of `tests/fuzz/differential.py`, which compares hexdata with Python's unpickler."""

from __future__ import annotations

import gzip
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from hexdata.errors import FormatError
from hexdata.formats.legacy import LegacyReader, SelfPlayGamesReader
from hexdata.formats.legacy.limits import LegacyLimits
from hexdata.formats.legacy.memo import ENTRY_COST
from tests.pairs import FULL

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

import differential


@pytest.mark.parametrize("raw", differential.seeds())
def test_the_seeds_are_read_completely(tmp_path, raw):
    assert differential.check(raw, tmp_path / "a") == "whole"


@pytest.mark.parametrize("seed", range(3 if FULL else 1))
def test_mutated_pickles_are_read_as_python_reads_them(tmp_path, seed):
    endings = differential.run(300, seed, tmp_path)
    assert endings["whole"] + endings["rejects"] > 60
    assert endings["rejects"] > 10


def test_a_difference_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(differential, "load", lambda raw: pickle.loads(raw) | {"processing_stats": 0})
    with pytest.raises(differential.DifferentError):
        differential.check(differential.seeds()[8], tmp_path / "a")


# Pickles that earlier versions read differently from Python


def sound(protocol: int, board: np.ndarray | None = None) -> bytes:
    board = np.zeros((2, 3, 3), "f4") if board is None else board
    return pickle.dumps({"examples": [(board, None, 0.5)], "source_file": "a"}, protocol)


def test_the_seed_of_the_cases_below_is_valid(tmp_path):
    for protocol in range(6):
        assert differential.check(sound(protocol), tmp_path / "a") == "whole"


FORTRAN = np.asfortranarray(np.zeros((2, 3, 3), "f4"))
DTYPE = b"cnumpy\ndtype\n(X\x02\x00\x00\x00f4I00\nI01\ntR"
STATE = b"(K\x03X\x01\x00\x00\x00%sNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
ARRAY = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01btR"
ARRAY += b"(K\x01(K\x01th\x00I00\nC\x04abcdtb"


def file_of(opcodes: bytes) -> bytes:
    return b"\x80\x04}(X\x08\x00\x00\x00examples]X\x01\x00\x00\x00a" + opcodes + b"u."


@pytest.mark.parametrize(
    ("name", "raw"),
    {
        "a Fortran flag of 1": sound(4, FORTRAN).replace(b"\x88B", b"K\x01B").replace(b"\x88C", b"K\x01C"),
        "BINPUT, then MEMOIZE": file_of(b"]q\x05X\x01\x00\x00\x00b\x94h\x06\x86"),
        "MEMOIZE, then BINPUT": file_of(b"]\x94X\x01\x00\x00\x00bq\x06h\x06\x86"),
        "octal": file_of(b"I010\n"),
        "hexadecimal": file_of(b"I0x10\n"),
        "a long integer with zeros": file_of(b"L010L\n"),
        "minus zero": file_of(b"I-0\n"),
        "a float that is too large": file_of(b"F1e999\n"),
        "a float of too many digits": file_of(b"F-" + b"9" * 310 + b"\n"),
        "an integer with underscores": file_of(b"I1_0\n"),
        "a float with underscores": file_of(b"F1_0\n"),
        "a float with spaces": file_of(b"F 1\n"),
        "a dtype told twice": file_of(DTYPE + STATE % b"<" + STATE % b">"),
        "a dtype told after its use": file_of(
            b"(" + DTYPE + b"q\x00" + ARRAY + b"h\x00" + STATE % b">" + b"t"
        ),
        "a dtype of another version": file_of(DTYPE + (STATE % b"<").replace(b"K\x03", b"K\x04")),
        "a dtype of no order": file_of(DTYPE + STATE % b"|"),
        "a dtype that is not copied": file_of(DTYPE.replace(b"I01", b"I00") + STATE % b"<"),
        "an array of another version": file_of(DTYPE + b"q\x000" + ARRAY.replace(b"tR(K\x01", b"tR(K\x02")),
        "a stack below its mark": file_of(b"}K\x01(K\x02s0")[:-2] + b"tu.",
        "a frame that ends after the pickle": b"\x80\x04\x95\xff\xff\x00\x00\x00\x00\x00\x00" + sound(3)[2:],
        "frames within one another": sound(3)[:2] + b"\x95\x14\0\0\0\0\0\0\0" * 2 + sound(3)[2:],
        "examples in two places": sound(3)[:-2] + b"X\x01\x00\x00\x00bh\x02u.",
    }.items(),
)
def test_pickles_that_python_reads_differently_are_refused(name, raw):
    with pytest.raises(FormatError):
        differential.ours(raw)


@pytest.mark.parametrize(
    "line", [b"I0", b"I-1", b"L0L", b"L-10L", b"Finf", b"F-inf", b"Fnan", b"F-0.0", b"F1e-999"]
)
def test_numbers_of_protocol_0_are_read_as_python_reads_them(line):
    raw = file_of(line + b"\n")
    assert differential.ours(raw) == differential.theirs(raw)[:2]


def test_an_enormous_memo_number_needs_no_memory():
    raw = b"}X\x08\0\0\0examples]r\xff\xff\xff\x7fs."
    assert differential.ours(raw) == differential.theirs(raw)[:2]


def shares_what_changes() -> bytes:
    """Return a file whose second example changes the metadata that the first one shares."""
    planes = np.zeros((2, 3, 3), "f4")
    shared = {"zoo": 1}
    example = {"board": planes, "policy": None, "value": 1.0, "metadata": shared}
    return pickle.dumps({"before": shared, "examples": [example], "after": shared}, 4)


def test_an_example_that_shares_a_mutable_object_is_refused(tmp_path):
    assert differential.check(shares_what_changes(), tmp_path / "a") == "shared-payload"


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("count", [0, 1])
def test_a_header_that_shares_the_list_of_examples_is_refused(tmp_path, protocol, count):
    examples = [(np.zeros((2, 3, 3), "f4"), None, 0.5)] * count
    raw = pickle.dumps({"examples": examples, "hexdata:dialect": {"F": [examples, np.inf]}}, protocol)
    assert differential.check(raw, tmp_path / "a") == "shared-payload"


@pytest.mark.parametrize(
    "raw", [b"\x80\x04}\x8c\x08examples]\x94h\x00as.", b"}X\x05\0\0\0games]q\x00h\x00as."]
)
def test_a_list_of_examples_that_contains_itself_is_refused(tmp_path, raw):
    (tmp_path / "a").write_bytes(raw)
    reader = SelfPlayGamesReader if b"games" in raw else LegacyReader
    with pytest.raises(FormatError, match="is used again"), reader(tmp_path / "a") as opened:
        list(opened.batches())


def test_header_values_may_share_objects_across_the_examples(tmp_path):
    shared = {"zoo": [1]}
    raw = pickle.dumps({"before": shared, "examples": [], "after": shared}, 4)
    assert differential.check(raw, tmp_path / "a") == "whole"


def test_a_damaged_second_gzip_member_is_salvaged(tmp_path):
    path, first = tmp_path / "a.pkl.gz", gzip.compress(sound(4), mtime=0)
    for second in (gzip.compress(sound(4), mtime=0), gzip.compress(sound(4), mtime=0)[:40]):
        path.write_bytes(first + second)
        with LegacyReader(path, salvage=True) as reader:
            assert sum(batch.positions.num_rows for batch in reader.batches()) == 1
        assert reader.damage is not None
        with LegacyReader(path) as reader, pytest.raises(FormatError):
            list(reader.batches())


def test_a_run_that_shares_a_mutable_object_is_refused(tmp_path):
    """The fast path converts runs after the examples, when later values may refer to the object again."""
    examples = [
        {"board": np.zeros((2, 3, 3), "f4"), "policy": None, "value": 0.5, "metadata": {"zoo": "text"}}
        for _ in range(20)
    ]
    pieces = differential.opcodes_of(pickle.dumps({"before": {}, "examples": examples}, 4), frames=False)
    reference = max(place for place, piece in enumerate(pieces) if piece[:1] == b"h")
    pieces[reference] = b"h\x02"
    raw = b"".join(pieces)
    assert load_code(tmp_path, raw, fast=True) == load_code(tmp_path, raw, fast=False) == "shared-payload"


def load_code(folder: Path, raw: bytes, *, fast: bool) -> str:
    (folder / "a").write_bytes(raw)
    return differential.read_rows(folder / "a", fast)[3]


def flooded(number: int, repeats: int) -> bytes:
    """Return examples that memoize the same text many times."""
    example = pickle.dumps({"board": None, "policy": None, "value": "t"}, 3)[2:-1]
    example = example.replace(b"X\x01\x00\x00\x00t", b"X\x01\x00\x00\x00t" + b"\x94" * number)
    pieces = differential.opcodes_of(example + b".", frames=False)[:-1]
    example = b"".join(piece for piece in pieces if piece[:1] != b"q")
    return b"\x80\x04}\x8c\x08examples]" + (b"(" + example + b"e") * repeats + b"s."


def test_the_memo_of_finished_examples_is_bounded(tmp_path):
    (tmp_path / "a").write_bytes(flooded(1000, 40))
    limits = LegacyLimits(memo_bytes=1 << 20)
    most = 0
    with LegacyReader(tmp_path / "a", fast=False, limits=limits) as reader:
        memo = reader._unpickler.memo
        end_example = memo.end_example

        def watched() -> None:
            nonlocal most
            end_example()
            most = max(most, len(memo._kept))

        memo.end_example = watched
        list(reader.batches())
    assert 1000 < most <= 2 * limits.memo_bytes // ENTRY_COST


def test_memo_numbers_within_one_batch_count_as_memory(tmp_path):
    (tmp_path / "a").write_bytes(flooded(1000, 2).replace(b"e(", b""))
    with (
        LegacyReader(tmp_path / "a", limits=LegacyLimits(held_bytes=200_000)) as reader,
        pytest.raises(FormatError) as caught,
    ):
        list(reader.batches())
    assert caught.value.code == "limit-held"


def test_layouts_of_rejected_examples_are_counted(tmp_path):
    examples = [
        {"board": np.zeros((2, 3, 3), "f4"), "policy": None, "value": 7.0, "metadata": {f"key{number}": 1}}
        for number in range(9)
    ]
    (tmp_path / "a").write_bytes(pickle.dumps({"examples": examples}, 4))
    with LegacyReader(tmp_path / "a", limits=LegacyLimits(layouts=9)) as reader:
        (batch,) = reader.batches()
    assert len(batch.rejected) == 9
    with (
        LegacyReader(tmp_path / "a", limits=LegacyLimits(layouts=8)) as reader,
        pytest.raises(FormatError) as caught,
    ):
        list(reader.batches())
    assert caught.value.code == "limit-layouts"
