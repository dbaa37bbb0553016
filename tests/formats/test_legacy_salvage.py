"""Salvage of damaged legacy pickles: both readers keep the same examples and name the same damage."""

from __future__ import annotations

import gzip
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.errors import FormatError
from hexdata.formats import open_source
from hexdata.formats.legacy import LegacyReader
from tests.kit.formats import some_example
from tests.pairs import FULL

COUNT = 300
DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "legacy" / "v2"


def marker(index: int) -> bytes:
    """Return a text that only one example of a file contains."""
    return b"mark%05d." % index


def pickle_of(layout: str, protocol: int) -> bytes:
    """Return a pickle of ``COUNT`` examples with references to common texts, each with its marker."""
    examples: list[Any] = []
    for index in range(COUNT):
        game, ply = divmod(index, 10)
        example = some_example(index)
        if layout == "tuples":
            examples.append((example["board"], example["policy"], example["value"]))
            continue
        example["metadata"] = {
            "game_id": (0, game + 1),
            "winner": ("BLUE", "RED")[game % 2],
            "position_in_game": ply,
            "total_positions": 10,
            "source_file": f"game{game // 30}.trmph",
            "note": marker(index).decode(),
        }
        examples.append(example)
    return pickle.dumps({"examples": examples, "source_file": "a"}, protocol)


def references_of(raw: bytes) -> list[int]:
    """Return the offsets of all references to other objects."""
    return [at or 0 for code, _, at in pickletools.genops(raw) if code.name in ("BINGET", "LONG_BINGET")]


def read(path: Path, *, fast: bool, salvage: bool = True) -> tuple[Any, ...]:
    """Return rows, rejections, damage, format and header; or the error."""
    rows: list[dict[str, Any]] = []
    rejected: list[Any] = []
    try:
        with LegacyReader(path, fast=fast, salvage=salvage) as reader:
            for batch in reader.batches():
                rows += batch.positions.to_pylist()
                rejected += batch.rejected
    except FormatError as error:
        return [], [], (type(error), error.code, error.detail()), "", {}
    damage = reader.damage
    return rows, rejected, damage and (damage.code, damage.detail()), reader.format, reader.header


@pytest.mark.parametrize("layout", ["dicts", "tuples"])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_both_readers_agree_on_any_flipped_bit(tmp_path: Path, layout: str, protocol: int) -> None:
    raw, random = pickle_of(layout, protocol), np.random.default_rng(protocol)
    references = references_of(raw)
    damages = set()
    for number in range(60 if FULL else 10):
        at = int(random.choice(references)) + 1 if number % 4 else int(random.integers(len(raw)))
        changed = bytearray(raw)
        changed[at] ^= 1 << int(random.integers(8))
        (tmp_path / "a.pkl").write_bytes(changed)
        for salvage in (True, False):
            fast = read(tmp_path / "a.pkl", fast=True, salvage=salvage)
            assert fast == read(tmp_path / "a.pkl", fast=False, salvage=salvage), (at, salvage)
            damages.add(fast[2] is None)
    assert damages == {True, False}


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_damaged_reference_keeps_all_examples_before_it(tmp_path: Path, protocol: int) -> None:
    """Every example that ends before the changed byte is kept unchanged."""
    raw, random = pickle_of("dicts", protocol), np.random.default_rng(protocol)
    (tmp_path / "a.pkl").write_bytes(raw)
    whole = read(tmp_path / "a.pkl", fast=True)[0]
    assert len(whole) == COUNT
    starts = [raw.index(marker(index)) for index in range(COUNT)]
    references = [at for at in references_of(raw) if starts[COUNT // 3] < at < starts[-1]]
    salvaged = 0
    for at in random.choice(references, 12, replace=False).tolist():
        changed = bytearray(raw)
        changed[at + 1] ^= 1 << int(random.integers(8))
        (tmp_path / "a.pkl").write_bytes(changed)
        rows, rejected, damage, *_ = read(tmp_path / "a.pkl", fast=True)
        if damage is None:
            continue  # the reference means another text
        complete = sum(start < at for start in starts) - 1
        assert len(rows) + len(rejected) >= complete > 0, (at, damage)
        assert rows[:complete] == whole[:complete]
        salvaged += 1
    assert salvaged > 5


@pytest.mark.skipif(not DATA.is_dir(), reason="real pickles are not here")
def test_a_real_file_with_a_damaged_reference_is_salvaged(tmp_path: Path) -> None:
    path = min(DATA.glob("*.pkl.gz"), key=lambda file: file.stat().st_size)
    raw = bytearray(gzip.decompress(path.read_bytes()))
    reference = re.compile(rb"j..\0\0", re.DOTALL).search(raw, len(raw) // 2)
    assert reference
    raw[reference.start() + 4] ^= 0x40  # a number far above those of all objects
    (tmp_path / "a.pkl").write_bytes(raw)
    rows, _, damage, *_ = read(tmp_path / "a.pkl", fast=True)
    assert damage is not None
    assert len(rows) > 100


def test_every_bit_of_a_reference_may_be_wrong(tmp_path: Path) -> None:
    raw = pickle_of("dicts", 4)
    shared = raw.rindex(b"h", 0, raw.index(marker(COUNT // 2)))
    for bit in range(8):
        changed = bytearray(raw)
        changed[shared + 1] ^= 1 << bit
        (tmp_path / "a.pkl").write_bytes(changed)
        with open_source(tmp_path / "a.pkl", salvage=True) as reader:
            rows = sum(batch.records for batch in reader.batches())
        assert rows == COUNT if reader.damage is None else rows >= COUNT // 2 - 1
