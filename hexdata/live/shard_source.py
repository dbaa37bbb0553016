"""Reading of a training shard as raw batches, from which games are extracted as from any other source.

Shards of blocks and shards of samples can be read. Their manifest is not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from hexdata.policy import SparsePolicies
from hexdata.schema import POLICY_TYPE, SPLITS, is_target, raw_schema
from hexdata.shards.block_check import check_block
from hexdata.shards.blocks import SENTINELS, Block, members_to_policies, null_of
from hexdata.shards.format import read_blocks, samples_to_block

__all__ = ["looks_like_shard", "shard_batches", "shard_split"]

_MAGIC: Final = (257, b"ustar")
_NAME: Final = re.compile(rf"({'|'.join(SPLITS)})-\d{{6,}}\.tar")
_SAMPLES: Final = 4096
"""Number of samples that are combined into one block."""
_LINE_BITS: Final = 31


def looks_like_shard(path: Path) -> bool:
    """Return whether a file is a tar archive, as every shard is.

    Raises:
        OSError: The file cannot be opened.
    """
    offset, magic = _MAGIC
    with path.open("rb") as file:
        return file.read(offset + len(magic))[offset:] == magic


def shard_split(name: str) -> str | None:
    """Return the split in a shard's name, as in ``val-000003.tar``; None if the name is not of that form."""
    match = _NAME.fullmatch(name.rpartition("/")[2])
    return match and match[1]


def shard_batches(path: Path) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (board size, positions as ``raw_schema``) for each part of a shard, with values in the store's
    convention.

    The ``game_id`` is stored in ``file_idx`` (the bits above 31) and ``line_idx``.

    Raises:
        FormatError: "broken-shard": the shard is truncated or damaged, or was not written by hexdata.
        OSError: The file cannot be read.
    """
    record = 0
    for key, block in _blocks(path):
        size = check_block(block, path, key)
        yield size, _raw(block, size, record)
        record += len(block["move"])


def _blocks(path: Path) -> Iterator[tuple[str, Block]]:
    """Yield blocks with their keys; samples are combined into blocks."""
    for is_sample, members in groupby(read_blocks(path), lambda member: _is_sample(member[1])):
        if not is_sample:
            yield from members
            continue
        samples: list[tuple[str, Block]] = []
        for sample in members:
            samples.append(sample)
            if len(samples) == _SAMPLES:
                yield samples[0][0], samples_to_block(samples, path)
                samples = []
        if samples:
            yield samples[0][0], samples_to_block(samples, path)


def _is_sample(block: Block) -> bool:
    """Return whether these are the arrays of one position, which have no leading dimension."""
    return "move" in block and block["move"].ndim == 0


def _raw(block: Block, board_size: int, record: int) -> pa.RecordBatch:
    length = len(block["move"])
    targets = [name for name in block if is_target(name)]
    schema = raw_schema(board_size, targets)
    boards = np.ascontiguousarray(block["board"])
    game = block["game_id"]
    columns = {
        "record": np.arange(record, record + length),
        "board": pa.Array.from_buffers(schema.field("board").type, length, [None, pa.py_buffer(boards)]),
        "policy": _policies(block),
        "value": block["value"].astype(np.float64),
        "player_to_move": block["player_to_move"],
        "file_idx": pa.array((game >> _LINE_BITS).astype(np.int32), mask=game < 0),
        "line_idx": pa.array((game & (1 << _LINE_BITS) - 1).astype(np.int32), mask=game < 0),
    }
    for name in ("move", "position_in_game", "total_positions", "value_sample_tier"):
        columns[name] = pa.array(block[name], mask=block[name] == SENTINELS[name])
    for name in targets:
        null = null_of(name)
        is_null = np.isnan(block[name]) if np.isnan(null) else block[name] == null
        columns[name] = pa.array(block[name], mask=is_null).cast(schema.field(name).type)
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else pa.nulls(length, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _policies(block: Block) -> pa.Array:
    """Return the policies of the members of a block as a column, with null for rows without one."""
    length = len(block["move"])
    if "policy_row" not in block:
        return pa.nulls(length, POLICY_TYPE)
    has_policy = np.zeros(length, np.bool_)
    has_policy[block["policy_row"]] = True
    dense = "policy" in block
    policies = SparsePolicies.from_dense(block["policy"]) if dense else members_to_policies(block)
    return policies.to_arrow(has_policy)
