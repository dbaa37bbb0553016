"""Tests of altered shards with matching digests: all readers reject them, or all deliver the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.errors import HexdataError
from hexdata.live.shard_source import shard_batches
from hexdata.loader import Loader
from hexdata.shards.blocks import Block
from hexdata.show import read_shard_position
from tests.altered_shards import alter_blocks, alter_bytes, set_header
from tests.shard_folder import TARGETS

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards

SHARD = "train-000000.tar"
POSITIONS = 16
FIELDS = ("board", "policy", "value", "position_id", "move", "player_to_move", "value_sample_tier", "game_id")


def loaded(folder: Path, mode: Any, fields: tuple[str, ...]) -> dict[str, Any] | str:
    """Return the arrays that a mode of the loader delivers, or the name of the error."""
    try:
        batches = list(Loader(folder, mode=mode, shuffle=False, batch_size=16, fields=fields))
    except HexdataError as error:
        return type(error).__name__
    return {name: np.concatenate([batch[name] for batch in batches]) for name in fields}


def outcome(folder: Path, fields: tuple[str, ...] = FIELDS) -> str:
    """Read a shard with every reader, check that they agree, and return "refused" or "delivered"."""
    exact, stream = loaded(folder, "exact", fields), loaded(folder, "stream", fields)
    if isinstance(exact, str) or isinstance(stream, str):
        assert exact == stream
    else:
        assert all(exact[name].tobytes() == stream[name].tobytes() for name in fields)
    other_readers = 0
    for read in (
        lambda: list(shard_batches(folder / SHARD)),
        lambda: read_shard_position(folder / SHARD, 15),
    ):
        try:
            read()
            other_readers += 1
        except HexdataError:
            pass
    if isinstance(exact, str):
        return "refused"
    assert ((exact["value"] >= 0) & (exact["value"] <= 1)).all()
    assert np.isfinite(exact["policy"]).all()
    assert (exact["policy"] >= 0).all()
    assert (exact["board"][:, :2].sum(axis=1) <= 1).all()
    assert other_readers == 2, "the loader delivers a shard that other readers refuse"
    return "delivered"


def change_values(rng: np.random.Generator, block: Block) -> None:
    """Change one number of a block to random bits, or one array to another dtype or length."""
    name = sorted(block)[rng.integers(len(block))]
    array = block[name]
    kind = rng.integers(10)
    if kind < 8 and array.size:
        flat = array.reshape(-1)
        flat[rng.integers(len(flat))] = np.frombuffer(rng.bytes(array.itemsize), array.dtype)[0]
    elif kind == 8:
        block[name] = array[:-1]
    else:
        block[name] = array.astype("<f4" if array.dtype != np.float32 else "<i8")


HEADER_FIELDS = {
    "name": (0, 100),
    "mode": (100, 8),
    "size": (124, 12),
    "time": (136, 12),
    "type": (156, 1),
    "magic": (257, 8),
    "prefix": (345, 155),
}
INVALID_HEADERS = (
    ("size", b"\x80" + (1 << 60).to_bytes(11, "big")),
    ("size", b"\x80" + (1 << 63).to_bytes(11, "big")),
    ("size", b"\xff" * 12),
    ("size", b"77777777777\0"),
    ("size", b"-0000000001\0"),
    ("size", b"0000000020x\0"),
    *(("type", bytes([kind])) for kind in b"S1235xgLK7V\0"),
    ("prefix", b"x"),
    ("magic", b"ustar  \0"),
)


def header_offset(data: bytearray, number: int) -> int:
    """Return the offset of the header of the ``number``-th member, mod the number of members."""
    starts = [i for i in range(0, len(data) - 512, 512) if data[i + 257 : i + 262] == b"ustar"]
    return starts[number % len(starts)]


@pytest.mark.parametrize(("field", "content"), INVALID_HEADERS)
def test_all_readers_refuse_invalid_headers(make_shards: MakeShards, field: str, content: bytes) -> None:
    folder = make_shards(train=POSITIONS, dense=True).path
    offset = HEADER_FIELDS[field][0]
    alter_bytes(folder, SHARD, lambda data: set_header(data, header_offset(data, 4), offset, content))
    assert outcome(folder) == "refused"
    with pytest.raises(HexdataError):
        list(shard_batches(folder / SHARD))


@pytest.mark.parametrize("rows", [[1, 1, 6], [1, 0, 6], [0, 3, 8], [5, 6, 2**32 - 1]])
def test_all_readers_refuse_invalid_policy_rows(make_shards: MakeShards, rows: list[int]) -> None:
    folder = make_shards(train=POSITIONS, dense=True).path

    def change(blocks: dict[str, Block]) -> dict[str, Block]:
        blocks["000000"]["policy_row"] = np.array(rows, "<u4")
        return blocks

    alter_blocks(folder, SHARD, change)
    assert outcome(folder) == "refused"


@pytest.mark.parametrize(
    ("member", "values"),
    [
        ("policy_cell", [0, 25]),
        ("policy_cell", [7, 7]),
        ("policy_count", [0]),
        ("policy_probability", [float("nan")]),
        ("root_value", [1.5]),
        ("visits", [-7]),
        ("weight", [-1.0]),
    ],
)
def test_all_readers_refuse_invalid_members_of_searches(
    make_shards: MakeShards, member: str, values: list[float]
) -> None:
    folder = make_shards(train=POSITIONS, dense=True, targets=True).path

    def change(blocks: dict[str, Block]) -> dict[str, Block]:
        blocks["000000"][member][: len(values)] = values
        return blocks

    alter_blocks(folder, SHARD, change)
    assert outcome(folder, (*FIELDS, *TARGETS)) == "refused"
    with pytest.raises(HexdataError):
        list(shard_batches(folder / SHARD))


@pytest.mark.parametrize("seed", range(4))
def test_all_readers_agree_on_random_changes(make_shards: MakeShards, seed: int) -> None:
    version, targets = 1 + seed % 2, seed == 3
    folder = make_shards(train=POSITIONS, dense=True, version=version, targets=targets).path
    fields = (*FIELDS, *TARGETS) if targets else FIELDS
    original = {path.name: path.read_bytes() for path in folder.iterdir()}
    counts = {"refused": 0, "delivered": 0}
    for case in range(20):
        rng = np.random.default_rng([seed, case])
        for name, data in original.items():
            (folder / name).write_bytes(data)
        if case % 2:

            def change_header(data: bytearray, rng: np.random.Generator = rng) -> None:
                offset, length = list(HEADER_FIELDS.values())[rng.integers(len(HEADER_FIELDS))]
                set_header(data, header_offset(data, int(rng.integers(22))), offset, rng.bytes(length))

            alter_bytes(folder, SHARD, change_header)
        else:

            def change(blocks: dict[str, Block], rng: np.random.Generator = rng) -> dict[str, Block]:
                change_values(rng, blocks[sorted(blocks)[rng.integers(len(blocks))]])
                return blocks

            alter_blocks(folder, SHARD, change)
        counts[outcome(folder, fields)] += 1
    assert counts["refused"]
    assert counts["delivered"]
