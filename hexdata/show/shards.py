"""Reading of a position from a shard, which needs neither its store nor its manifest."""

from __future__ import annotations

import itertools
from typing import Any, Final

from hexdata.errors import StoreError
from hexdata.schema import is_target
from hexdata.shards.block_check import check_block
from hexdata.shards.blocks import Block, members_to_block
from hexdata.shards.format import read_blocks, samples_to_block
from hexdata.shards.manifest import ShardManifest
from hexdata.shards.sources import altered_shard_error
from hexdata.show.position import Position
from hexdata.storage import AnyPath, as_path, is_address
from hexdata.store.disk_space import translate_disk_full
from hexdata.store.files import digest_file

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


def read_shard_position(path: str | AnyPath, number: int) -> Position:
    """Read one position of a shard, of blocks or of samples, counted from 0 in the shard's order.

    The shard is read and checked from its beginning up to that position, and no further. If the
    ``manifest.json`` in the folder of a local shard lists it, the size and the digest of the whole file are
    compared first.

    Raises:
        StoreError: The shard differs from the manifest or has fewer positions, or the disk fails.
        FormatError: It is truncated or altered, or no shard of hexdata's.
    """
    with translate_disk_full(as_path(path)):
        if not is_address(path):
            _require_unchanged(as_path(path))
        return _read_position(path, number)


def _require_unchanged(path: AnyPath) -> None:
    """Compare a shard with its entry in the manifest beside it, if there is one."""
    try:
        shards = itertools.chain(*ShardManifest.load(path.parent).splits.values())
        listed = next((shard for shard in shards if shard.name == path.name), None)
        if listed is None:
            return
        size, digest = digest_file(path)
    except (StoreError, OSError):  # no manifest of hexdata, or no shard, which the caller reports
        return
    if listed.bytes != size:
        raise altered_shard_error(str(path), f"{size} bytes", listed.bytes)
    if listed.sha256 != digest:
        raise altered_shard_error(str(path), f"SHA-256 {digest}", listed.sha256)


def _read_position(path: str | AnyPath, number: int) -> Position:
    first = 0
    for key, arrays in read_blocks(path):
        is_sample = "move" in arrays and arrays["move"].ndim == 0
        block = samples_to_block([(key, arrays)], path) if is_sample else arrays
        size = check_block(block, path, key)
        rows = len(block["move"])
        if first <= number < first + rows:
            return _position(members_to_block(block, size * size), number - first)
        first += rows
    raise StoreError(
        "the shard has no such position",
        path=path,
        found=f"position {number}",
        expected=f"0 to {first - 1}" if first else "none, as it is empty",
    )


def _position(block: Block, row: int) -> Position:
    """Make a position of a row of a block."""
    policy = None
    if "policy" in block:
        indices = (block["policy_row"] == row).nonzero()[0]
        policy = block["policy"][indices[0]] if len(indices) else None
    names = [*_FACTS, *filter(is_target, block)]
    facts: dict[str, Any] = {name: block[name][row] for name in names}
    return Position.of_planes(block["board"][row], policy=policy, **facts)
