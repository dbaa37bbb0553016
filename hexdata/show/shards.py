"""Positions read out of a shard alone: no store, no manifest. Writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from hexdata.errors import FormatError, StoreError
from hexdata.formats.shards import Block, read_blocks
from hexdata.show.position import Position

__all__ = ["read_shard_position"]

_FACTS: Final = (
    "game_id",
    "move",
    "player_to_move",
    "position_id",
    "position_in_game",
    "total_positions",
    "value",
    "value_sample_tier",
)
_ONE_BOARD: Final = 3
"""Dimensions of the board of a sample, (2, n, n); a block of packed boards has two."""


def read_shard_position(path: str | Path, number: int) -> Position:
    """Read one position of a shard, of blocks or of samples, counted from 0 in the shard's order.

    The shard is read from its beginning up to that position, and not checked beyond it.

    Raises:
        StoreError: the shard has fewer positions.
        FormatError: it is cut or altered, or no shard of hexdata's.
    """
    first = 0
    for key, block in read_blocks(path):
        try:
            board = block["board"]
            rows = 1 if board.ndim == _ONE_BOARD else len(board)
            if first <= number < first + rows:
                return _position(block, number - first)
        except KeyError as error:
            raise FormatError(
                "not a shard of positions", path=path, record=key, expected=f"a member {error}"
            ) from None
        first += rows
    raise StoreError(
        "the shard has no such position",
        path=path,
        found=f"position {number}",
        expected=f"0 to {first - 1}" if first else "none, as it is empty",
    )


def _position(block: Block, row: int) -> Position:
    """Make a position of a row of a block, or of a sample, whose arrays are of one position."""
    sample = block["board"].ndim == _ONE_BOARD
    facts: dict[str, Any] = {name: block[name][()] if sample else block[name][row] for name in _FACTS}
    policy = block.get("policy")
    if policy is not None and not sample:
        places = (block["policy_row"] == row).nonzero()[0]
        policy = policy[places[0]] if len(places) else None
    return Position.of_planes(block["board"] if sample else block["board"][row], policy=policy, **facts)
