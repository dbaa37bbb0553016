"""A training shard as raw batches, so that its games are found as those of any other source.

Reads shards of blocks and of samples. Never looks at their manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import MAX_SIZE, MIN_SIZE, pack_boards
from hexdata.errors import FormatError
from hexdata.formats.shards import POLICY_FIELDS, SENTINELS, Block, block_fields, block_length, read_blocks
from hexdata.schema import NO_MOVE, SPLITS, board_bytes, board_size_of, raw_schema

__all__ = ["looks_like_shard", "shard_batches", "shard_split"]

_MAGIC: Final = (257, b"ustar")
_NAME: Final = re.compile(rf"({'|'.join(SPLITS)})-\d{{6,}}\.tar")
_SAMPLES: Final = 4096
"""So many samples are taken together."""
_LINE_BITS: Final = 31


def looks_like_shard(path: Path) -> bool:
    """Say whether a file is a tar archive, and so a shard if anything.

    Raises:
        OSError: it cannot be opened.
    """
    place, magic = _MAGIC
    with path.open("rb") as file:
        return file.read(place + len(magic))[place:] == magic


def shard_split(name: str) -> str | None:
    """Return the split that a shard's name says, as ``export`` names it: ``val-000003.tar``; else None."""
    match = _NAME.fullmatch(name.rpartition("/")[2])
    return match and match[1]


def shard_batches(path: Path) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Read a shard: (board size, positions as ``raw_schema``), values in the store's sense.

    Its ``game_id`` stands in ``file_idx`` (the bits above 31) and ``line_idx``.

    Raises:
        FormatError: "broken-shard": the shard is cut or altered, or is no shard of hexdata.
        OSError: it cannot be read.
    """
    record = 0
    for block in _blocks(path):
        size = _board_size(path, block)
        yield size, _raw(block, size, record)
        record += len(block["move"])


def _blocks(path: Path) -> Iterator[Block]:
    """Give blocks; samples are put together."""
    for is_sample, members in groupby(
        read_blocks(path), lambda member: member[1].get("move", _SCALAR).ndim == 0
    ):
        if not is_sample:
            yield from (block for _, block in members)
            continue
        samples: list[Block] = []
        for _, sample in members:
            samples.append(sample)
            if len(samples) == _SAMPLES:
                yield _joined(path, samples)
                samples = []
        if samples:
            yield _joined(path, samples)


_SCALAR: Final[npt.NDArray[Any]] = np.zeros(1)


def _joined(path: Path, samples: list[Block]) -> Block:
    """Return samples as one block."""
    try:
        block = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        block["board"] = pack_boards(block["board"])
    except (KeyError, ValueError, IndexError) as error:
        raise _foreign(path, f"samples of different fields ({error})") from None
    if "policy" in block:
        rows = np.flatnonzero((block["move"] == NO_MOVE) & block["policy"].any(axis=1))
        block["policy"], block["policy_row"] = block["policy"][rows], rows.astype(np.uint32)
    return block


def _board_size(path: Path, block: Block) -> int:
    """Return n of a block, seen to have all the fields of one."""
    board = block.get("board", _SCALAR)
    size = board_size_of(board.shape[1]) if board.ndim == 2 else 0
    if not MIN_SIZE <= size <= MAX_SIZE or board.shape[1] != board_bytes(size):
        raise _foreign(path, f"boards of shape {board.shape}")
    for name, spec in block_fields(size, with_policy="policy" in block).items():
        if name not in block or (block[name].dtype.str, block[name].shape[1:]) != (spec.dtype, spec.shape):
            found = f"{block[name].dtype} {block[name].shape}" if name in block else "none"
            raise _foreign(path, f"for the field {name}: {found}")
    try:
        block_length(block)
    except ValueError as error:
        raise _foreign(path, str(error)) from None
    _check_policies(path, block)
    _check_numbers(path, block, size)
    return size


def _check_numbers(path: Path, block: Block, board_size: int) -> None:
    """See that a block's numbers can be what they are to mean; all that comes after relies on it."""
    move, value = block["move"], block["value"]
    sound = {
        "move": (move < board_size**2) | (move == NO_MOVE),
        "player_to_move": block["player_to_move"] <= 1,
        "value": (value >= 0) & (value <= 1),
        "policy": np.isfinite(block["policy"]) & (block["policy"] >= 0)
        if "policy" in block
        else np.ones(0, np.bool_),
    }
    for name, good in sound.items():
        if not good.all():
            raise _foreign(path, f"for the field {name}: {block[name][~good][:1].tolist()}")


def _check_policies(path: Path, block: Block) -> None:
    if "policy" not in block:
        return
    rows = block["policy_row"].astype(np.int64)
    if (
        len(rows) != len(block["policy"])
        or (np.diff(rows, prepend=-1) <= 0).any()
        or (rows >= len(block["move"])).any()
    ):
        raise _foreign(path, "dense policies of other rows than there are")


def _foreign(path: Path, found: str) -> FormatError:
    return FormatError(
        "not a shard of hexdata",
        code="broken-shard",
        path=path,
        found=found,
        expected="all fields that export writes",
    )


def _raw(block: Block, board_size: int, record: int) -> pa.RecordBatch:
    length = len(block["move"])
    schema = raw_schema(board_size)
    boards = np.ascontiguousarray(block["board"])
    game = block["game_id"]
    columns = {
        "record": np.arange(record, record + length),
        "board": pa.Array.from_buffers(schema.field("board").type, length, [None, pa.py_buffer(boards)]),
        "policy": _policies(block, board_size * board_size),
        "value": block["value"].astype(np.float64),
        "player_to_move": block["player_to_move"],
        "file_idx": pa.array((game >> _LINE_BITS).astype(np.int32), mask=game < 0),
        "line_idx": pa.array((game & (1 << _LINE_BITS) - 1).astype(np.int32), mask=game < 0),
    }
    for name in ("move", "position_in_game", "total_positions", "value_sample_tier"):
        columns[name] = pa.array(block[name], mask=block[name] == SENTINELS[name])
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else pa.nulls(length, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _policies(block: Block, cells: int) -> pa.Array:
    """Return the dense policies as a list column, null for the other rows."""
    length = len(block["move"])
    kind = raw_schema(MIN_SIZE).field("policy").type
    if not set(POLICY_FIELDS) <= block.keys():
        return pa.nulls(length, kind)
    dense = np.zeros(length, np.bool_)
    dense[block["policy_row"]] = True
    offsets = np.concatenate(([0], np.cumsum(dense) * cells)).astype(np.int32)
    numbers = pa.array(block["policy"].reshape(-1).astype(np.float32))
    return pa.ListArray.from_arrays(pa.array(offsets), numbers, kind, mask=pa.array(~dense))
