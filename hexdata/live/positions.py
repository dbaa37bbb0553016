"""Conversion of games into blocks of positions; computes the boards of games stored as moves.

Whole hands of games are converted at once. The caller selects the positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hexdata.board import replay_packed
from hexdata.live.chunk import PLIES, Chunk
from hexdata.schema import NO_MOVE, NO_TIER
from hexdata.shards.blocks import Block, join_blocks, take_rows

__all__ = ["unpack_chunks"]

Bools = npt.NDArray[np.bool_]


def unpack_chunks(hand: Sequence[Chunk], picked: Bools) -> Block:
    """Return the selected positions of games, with all fields of a shard's block.

    Args:
        hand: Numbered games on boards of one size.
        picked: Selected positions, at least one: bool (games, positions of the longest game). False beyond
            the end of a game.

    Returns:
        A block: first the positions of games stored as moves, game after game, by ply; then those of the
            others.
    """
    whole = np.array([chunk.moves is not None for chunk in hand])
    blocks = []
    if picked[whole].any():
        blocks.append(_played([chunk for chunk in hand if chunk.moves is not None], picked[whole]))
    others = np.flatnonzero(~whole & picked.any(axis=1)).tolist()
    blocks += [_found(hand[row], np.flatnonzero(picked[row])) for row in others]
    return join_blocks(blocks)


def _played(hand: Sequence[Chunk], picked: Bools) -> Block:
    """Return the selected positions of games stored as moves."""
    games = [chunk.moves for chunk in hand if chunk.moves is not None]
    moves = np.concatenate(games)
    lengths = np.array([len(game) for game in games])
    game, ply = np.nonzero(picked)
    starts = np.concatenate(([0], np.cumsum(lengths[:-1] + 1)))
    rows = starts[game] + ply
    # The move at each position; the last position of each game has none.
    played = np.insert(moves, np.cumsum(lengths), NO_MOVE)
    tiers = np.full(len(played), NO_TIER, np.uint8)
    for start, chunk in zip(starts.tolist(), hand, strict=True):
        if chunk.tiers is not None:
            tiers[start : start + chunk.positions] = chunk.tiers
    number = np.array([chunk.number for chunk in hand], np.int64)[game]
    return {
        "board": replay_packed(moves, lengths, hand[0].board_size).take(rows, axis=0),
        "game_id": number,
        "move": played[rows],
        "player_to_move": (ply & 1).astype(np.uint8),
        "position_id": number * PLIES + ply,
        "position_in_game": ply.astype(np.uint16),
        "total_positions": (lengths + 1).astype(np.uint16)[game],
        "value": np.array([chunk.value for chunk in hand], np.float32)[game],
        "value_sample_tier": tiers[rows],
    }


def _found(chunk: Chunk, places: npt.NDArray[np.intp]) -> Block:
    """Return positions of a game stored as a block."""
    assert chunk.block is not None
    taken = take_rows(chunk.block, places)
    taken["game_id"] = np.full(len(places), chunk.number, np.int64)
    taken["position_id"] = chunk.number * PLIES + places
    return taken
