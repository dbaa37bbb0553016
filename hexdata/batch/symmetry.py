"""Symmetries of the board, drawn for each position and applied to packed blocks.

Each position gets one of the four that follows from (seed, epoch, position) alone. Never looks at which
batch, rank or worker asks.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.board import SYMMETRIES, Planes, Symmetry, symmetry_table, transform_planes
from hexdata.formats.shards import Block
from hexdata.order import derive_key, sort_key
from hexdata.schema import NO_MOVE

__all__ = ["draw_symmetries", "transform_labels", "transform_stones"]

SymmetryArray = npt.NDArray[np.uint8]
"""One number of ``board.Symmetry`` a position: (B,)."""

_TOP_BITS: Final = np.uint64(62)
_TURNING: Final = tuple(symmetry for symmetry in SYMMETRIES if symmetry is not Symmetry.IDENTITY)


def draw_symmetries(position_ids: npt.NDArray[np.int64], seed: int, epoch: int) -> SymmetryArray:
    """Return the symmetry of each position in an epoch: the top two bits of its sort key for "augment"."""
    keys = sort_key(position_ids, derive_key(seed, "augment", epoch))
    return (keys >> _TOP_BITS).astype(np.uint8)


def transform_stones(planes: Planes, symmetries: SymmetryArray) -> None:
    """Turn boards (B, 2, n, n) into their images, in place; red's stones become blue's where that belongs.

    The batch is taken apart by symmetry. The images are written out in order before they are put back,
    which is faster than writing a transposed view to scattered rows.
    """
    for symmetry in _TURNING:
        rows = np.flatnonzero(symmetries == symmetry)
        planes[rows] = np.ascontiguousarray(transform_planes(planes.take(rows, axis=0), symmetry))


def transform_labels(block: Block, symmetries: SymmetryArray, board_size: int) -> Block:
    """Return the block with the images of its moves, policies, values and players, as far as it has them.

    A reflection swaps the colours, so value becomes 1 - value, and the other player is to move. The
    packed boards are left as they are, for :func:`transform_stones` once they are unpacked.
    """
    images = dict(block)
    swapped = symmetries >= Symmetry.LONG_DIAGONAL
    if "move" in block:
        images["move"] = _transform_moves(block["move"], symmetries, board_size)
    if "policy" in block:
        images["policy"] = _transform_policies(block["policy"], symmetries[block["policy_row"]], board_size)
    if "value" in block:
        images["value"] = np.where(swapped, 1 - block["value"], block["value"])
    if "player_to_move" in block:
        images["player_to_move"] = block["player_to_move"] ^ swapped
    return images


def _transform_moves(
    moves: npt.NDArray[Any], symmetries: SymmetryArray, board_size: int
) -> npt.NDArray[np.uint16]:
    images = moves.astype(np.uint16)
    rows = np.flatnonzero(moves != NO_MOVE)
    images[rows] = symmetry_table(board_size)[symmetries[rows], moves[rows]]
    return images


def _transform_policies(
    policies: npt.NDArray[np.float32], symmetries: SymmetryArray, board_size: int
) -> npt.NDArray[np.float32]:
    """Return the images of dense policies (k, cells), each under its own symmetry (k,)."""
    images = policies.copy()
    for symmetry in _TURNING:
        rows = np.flatnonzero(symmetries == symmetry)
        images[rows] = policies.take(rows, axis=0).take(symmetry_table(board_size)[symmetry], axis=1)
    return images
