"""Random symmetries of the board, applied to blocks of positions.

The symmetry of a position depends only on seed, epoch and position id, not on batch, rank or worker.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.board import SYMMETRIES, Planes, Symmetry, symmetry_table, transform_planes
from hexdata.fill import transform_fill
from hexdata.order import derive_key, sort_key
from hexdata.schema import NO_MOVE
from hexdata.shards.blocks import Block

__all__ = ["draw_symmetries", "transform_labels", "transform_stones"]

SymmetryArray = npt.NDArray[np.uint8]
"""Values of ``board.Symmetry``, one per position (B,)."""

_TOP_BITS: Final = np.uint64(62)
_NON_IDENTITY: Final = tuple(symmetry for symmetry in SYMMETRIES if symmetry is not Symmetry.IDENTITY)


def draw_symmetries(position_ids: npt.NDArray[np.int64], seed: int, epoch: int) -> SymmetryArray:
    """Return the symmetry of each position in an epoch: the top two bits of its sort key for "augment"."""
    keys = sort_key(position_ids, derive_key(seed, "augment", epoch))
    return (keys >> _TOP_BITS).astype(np.uint8)


def transform_stones(planes: Planes, symmetries: SymmetryArray) -> None:
    """Apply symmetries to boards (B, 2, n, n) in place. Reflections also swap the colours.

    The boards of each symmetry are copied into a contiguous array before they are written back, which is
    faster than writing a transposed view to scattered rows.
    """
    for symmetry in _NON_IDENTITY:
        rows = np.flatnonzero(symmetries == symmetry)
        planes[rows] = np.ascontiguousarray(transform_planes(planes.take(rows, axis=0), symmetry))


def transform_labels(block: Block, symmetries: SymmetryArray, board_size: int) -> Block:
    """Return the block with transformed fill rows, moves, policies, values and players, where present.

    A reflection swaps the colours, so values become 1 - value and the other player is to move. Packed boards
    are not transformed; :func:`transform_stones` does that after unpacking.
    """
    transformed = dict(block)
    swapped = symmetries >= Symmetry.LONG_DIAGONAL
    if "fill" in block:
        transformed["fill"], transformed["ply"] = transform_fill(
            block["fill"], block["ply"], symmetries, board_size
        )
    if "move" in block:
        transformed["move"] = _transform_moves(block["move"], symmetries, board_size)
    if "policy" in block:
        transformed["policy"] = _transform_policies(
            block["policy"], symmetries[block["policy_row"]], board_size
        )
    if "policy_cell" in block:
        of_cells = np.repeat(symmetries[block["policy_row"]], block["policy_count"])
        transformed["policy_cell"] = symmetry_table(board_size)[of_cells, block["policy_cell"]]
    for name in ("value", "root_value"):
        if name in block:
            transformed[name] = np.where(swapped, 1 - block[name], block[name])
    if "player_to_move" in block:
        transformed["player_to_move"] = block["player_to_move"] ^ swapped
    return transformed


def _transform_moves(
    moves: npt.NDArray[Any], symmetries: SymmetryArray, board_size: int
) -> npt.NDArray[np.uint16]:
    transformed = moves.astype(np.uint16)
    rows = np.flatnonzero(moves != NO_MOVE)
    transformed[rows] = symmetry_table(board_size)[symmetries[rows], moves[rows]]
    return transformed


def _transform_policies(
    policies: npt.NDArray[np.float32], symmetries: SymmetryArray, board_size: int
) -> npt.NDArray[np.float32]:
    """Apply a symmetry (k,) to each dense policy (k, cells) and return the results."""
    transformed = policies.copy()
    for symmetry in _NON_IDENTITY:
        rows = np.flatnonzero(symmetries == symmetry)
        transformed[rows] = policies.take(rows, axis=0).take(symmetry_table(board_size)[symmetry], axis=1)
    return transformed
