"""Positions read out of a shard alone: no store, no manifest. Writes nothing."""

from __future__ import annotations

from typing import Any, Final

from hexdata.errors import FormatError, HexdataError, StoreError
from hexdata.formats.shards import Block, read_blocks
from hexdata.remote import AnyPath
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


def read_shard_position(path: str | AnyPath, number: int) -> Position:
    """Read one position of a shard, of blocks or of samples, counted from 0 in the shard's order.

    The shard is read from its beginning up to that position, and not checked beyond it.

    Raises:
        StoreError: the shard has fewer positions.
        FormatError: it is cut or altered, or no shard of hexdata's.
    """
    first = 0
    for key, block in read_blocks(path):
        try:
            rows = _count_rows(block)
            if first <= number < first + rows:
                return _position(block, number - first)
        except KeyError as error:
            raise FormatError(
                "not a shard of positions", path=path, record=key, expected=f"a member {error}"
            ) from None
        except HexdataError as error:
            raise FormatError("not a shard of positions", path=path, record=key, found=str(error)) from error
        first += rows
    raise StoreError(
        "the shard has no such position",
        path=path,
        found=f"position {number}",
        expected=f"0 to {first - 1}" if first else "none, as it is empty",
    )


def _count_rows(block: Block) -> int:
    """Return of how many positions a block is, or 1 for a sample.

    Raises:
        FormatError: its arrays are not of as many.
    """
    shape = block["board"].shape
    head = () if len(shape) == _ONE_BOARD else shape[:1]
    wrong = [name for name in _FACTS if block[name].shape != head]
    if head and "policy" in block and block["policy"].shape[:1] != block["policy_row"].shape:
        wrong += ["policy", "policy_row"]
    if len(shape) not in (_ONE_BOARD - 1, _ONE_BOARD) or wrong:
        shapes = {name: block[name].shape for name in ("board", *wrong)}
        raise FormatError("the arrays are not of the same positions", found=shapes)
    return head[0] if head else 1


def _position(block: Block, row: int) -> Position:
    """Make a position of a row of a block, or of a sample, whose arrays are of one position."""
    sample = block["board"].ndim == _ONE_BOARD
    facts: dict[str, Any] = {name: block[name][()] if sample else block[name][row] for name in _FACTS}
    policy = block.get("policy")
    if policy is not None and not sample:
        places = (block["policy_row"] == row).nonzero()[0]
        policy = policy[places[0]] if len(places) else None
    return Position.of_planes(block["board"] if sample else block["board"][row], policy=policy, **facts)
