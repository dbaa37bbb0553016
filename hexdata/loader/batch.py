"""Blocks of packed positions: joined, picked from, and unpacked to what a model trains on.

Whole arrays at a time. Never reads a file and never decides which rows come.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hexdata.board import unpack_boards
from hexdata.formats.shards import POLICY_FIELDS, Block, block_length, block_to_policy

__all__ = ["Batch", "join_blocks", "members_of", "take_rows", "unpack"]

Batch = dict[str, npt.NDArray[Any]]
"""The arrays of one training step, each with the batch as its leading dimension."""


def members_of(fields: Sequence[str], stored: Collection[str]) -> list[str]:
    """Return the members that the batch fields are made of, out of those that the shards store."""
    members = set(fields)
    if "policy" in members:
        members |= {"move", *POLICY_FIELDS}
        members -= set(POLICY_FIELDS) - set(stored)
    return sorted(members)


def join_blocks(blocks: Sequence[Block]) -> Block:
    """Join blocks of the same fields, in their order, and empty them: one field at a time is held twice."""
    starts = np.cumsum([0, *(block_length(block) for block in blocks)])
    if "policy_row" in blocks[0]:
        for block, start in zip(blocks, starts[:-1], strict=True):
            block["policy_row"] = block["policy_row"] + start
    return {name: np.concatenate([block.pop(name) for block in blocks]) for name in list(blocks[0])}


def take_rows(block: Block, rows: npt.NDArray[np.int64]) -> Block:
    """Return the block of the given rows, in the order given."""
    taken = {name: array.take(rows, axis=0) for name, array in block.items() if name not in POLICY_FIELDS}
    if "policy" in block:
        # policy_row ascends without repeats: a row lies between its two places or, absent, at one.
        places = np.searchsorted(block["policy_row"], rows)
        has_policy = np.searchsorted(block["policy_row"], rows, side="right") > places
        taken["policy"] = block["policy"].take(places[has_policy], axis=0)
        taken["policy_row"] = np.flatnonzero(has_policy)
    return taken


def unpack(block: Block, fields: Sequence[str], board_size: int) -> Batch:
    """Return the fields: board float32 (B, 2, n, n), policy float32 (B, n·n), the others as stored."""
    batch: Batch = {}
    for name in fields:
        if name == "board":
            batch[name] = unpack_boards(block[name], board_size, np.float32)
        elif name == "policy":
            batch[name] = block_to_policy(block, board_size * board_size)
        else:
            batch[name] = block[name]
    return batch
