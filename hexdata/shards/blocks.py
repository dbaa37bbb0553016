"""Row operations on blocks of positions: take, slice and join.

Dense policies are stored apart from the other fields; only this module and the sampler depend on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hexdata.errors import StoreError
from hexdata.shards.format import POLICY_FIELDS, Block, block_length

__all__ = ["join_blocks", "plain_fields", "slice_rows", "take_rows"]


def plain_fields(block: Block) -> list[str]:
    """Return the sorted names of the fields with one row per position."""
    return sorted(block.keys() - set(POLICY_FIELDS))


def take_rows(block: Block, rows: npt.NDArray[np.integer[Any]]) -> Block:
    """Return a block with copies of the given rows.

    Args:
        block: Block of positions.
        rows: Row indices, int (k,), in any order; an index may repeat.
    """
    taken: Block = {name: block[name].take(rows, axis=0) for name in plain_fields(block)}
    if "policy" in block:
        slots = np.full(block_length(block), -1, np.int64)
        slots[block["policy_row"]] = np.arange(len(block["policy_row"]))
        found = slots[rows]
        dense = np.flatnonzero(found >= 0)
        _add_policies(taken, block["policy"].take(found[dense], axis=0), dense)
    return taken


def slice_rows(block: Block, start: int, stop: int) -> Block:
    """Return a block of views on the rows [start, stop)."""
    cut: Block = {name: block[name][start:stop] for name in plain_fields(block)}
    if "policy" in block:
        first, last = np.searchsorted(block["policy_row"], (start, stop))
        _add_policies(cut, block["policy"][first:last], block["policy_row"][first:last] - np.uint32(start))
    return cut


def join_blocks(blocks: Sequence[Block]) -> Block:
    """Concatenate blocks; return a single block unchanged.

    Raises:
        StoreError: The blocks have different fields.
    """
    if len(blocks) == 1:
        return blocks[0]
    names = plain_fields(blocks[0])
    for block in blocks:
        if plain_fields(block) != names:
            raise StoreError("blocks of different fields", found=plain_fields(block), expected=names)
    joined: Block = {name: np.concatenate([block[name] for block in blocks]) for name in names}
    starts = np.cumsum([0, *(block_length(block) for block in blocks[:-1])])
    dense = [
        (block["policy"], block["policy_row"] + start)
        for block, start in zip(blocks, starts, strict=True)
        if "policy" in block
    ]
    if dense:
        _add_policies(
            joined,
            np.concatenate([policy for policy, _ in dense]),
            np.concatenate([rows for _, rows in dense]),
        )
    return joined


def _add_policies(block: Block, policies: npt.NDArray[Any], rows: npt.NDArray[Any]) -> None:
    """Add dense policies (k, cells) for the ascending rows (k,) to a block; do nothing if k is 0."""
    if len(rows):
        block["policy"] = policies
        block["policy_row"] = rows.astype(np.uint32, copy=False)
