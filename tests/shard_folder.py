"""A folder of small synthetic shards, and the arrays written to it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hexdata.board import pack_boards
from hexdata.schema import NO_MOVE
from hexdata.shards.blocks import block_fields, block_to_members, block_to_policy
from hexdata.shards.format import ShardWriter
from hexdata.shards.manifest import ShardManifest

Arrays = dict[str, npt.NDArray[Any]]

BOARD_SIZE = 5
CELLS = BOARD_SIZE * BOARD_SIZE
BLOCK_SIZE = 8
SHARD_SIZE = 16
TARGETS = ("extra.temperature", "root_value", "visits", "weight")


class ShardFolder:
    """A folder of synthetic shards.

    Args:
        path: The folder, which is created.
        sizes: Number of positions by split.
        dense: Whether some positions have dense policies.
        seed: Seed of the arrays.
        cuts: Rows at which a shard ends, besides every ``SHARD_SIZE`` rows.
        targets: Whether the positions have all ``TARGETS``.

    Attributes:
        splits: The arrays of each split in stored order; ``policy`` as float32 (N, cells).
        shards: The manifest entries of each split.
    """

    def __init__(self, path, sizes, dense=False, seed=7, cuts=(), targets=False):
        self.path = path
        self.splits = {}
        self.shards = {}
        self._cuts = cuts
        path.mkdir(parents=True)
        for number, (split, size) in enumerate(sizes.items()):
            rng = np.random.default_rng([seed, number])
            arrays = synthetic_positions(size, rng)
            if targets:
                arrays |= synthetic_targets(size, rng)
            policies = synthetic_policies(size, rng) if dense else {}
            self.shards[split] = tuple(self._write_split(split, arrays, policies))
            self.splits[split] = arrays | {
                "policy": block_to_policy(block_to_members(arrays | policies), CELLS)
            }
        manifest = ShardManifest(
            board_size=BOARD_SIZE,
            block_size=BLOCK_SIZE,
            shard_size=SHARD_SIZE,
            seed=seed,
            fields=block_fields(BOARD_SIZE, dense, TARGETS if targets else ()),
            splits=self.shards,
        )
        (path / "manifest.json").write_bytes(manifest.dumps())

    def _write_split(self, split, arrays, policies):
        entries, key = [], 0
        size = len(arrays["position_id"])
        ends = sorted({*range(0, size, SHARD_SIZE), *self._cuts, size})
        for number, (first, end) in enumerate(itertools.pairwise(ends)):
            path = self.path / f"{split}-{number:06d}.tar"
            with path.open("wb") as file:
                writer = ShardWriter(file)
                for start in range(first, end, BLOCK_SIZE):
                    block = cut_block(arrays, policies, start, min(start + BLOCK_SIZE, end))
                    writer.write_block(key, block_to_members(block))
                    key += 1
                writer.close()
            entries.append(writer.entry(path.name, hashlib.sha256(path.read_bytes()).hexdigest()))
        return entries


def synthetic_positions(size, rng):
    """Return random packed boards and labels. Every seventh position is final; ids are not sorted."""
    move = rng.integers(0, CELLS, size).astype(np.uint16)
    move[::7] = NO_MOVE
    cells = rng.integers(0, 3, (size, BOARD_SIZE, BOARD_SIZE))
    return {
        "board": pack_boards(np.stack([cells == 1, cells == 2], axis=1).astype(np.uint8)),
        "move": move,
        "value": rng.integers(0, 2, size).astype(np.float32),
        "player_to_move": rng.integers(0, 2, size).astype(np.uint8),
        "value_sample_tier": rng.integers(0, 4, size).astype(np.uint8),
        "position_id": rng.permutation(size).astype(np.int64),
        "game_id": rng.integers(0, 9, size),
        "position_in_game": rng.integers(0, 9, size).astype(np.uint16),
        "total_positions": rng.integers(9, 20, size).astype(np.uint16),
    }


def synthetic_targets(size, rng):
    """Return random values of ``TARGETS``, with nulls."""
    floats = rng.random((3, size))
    floats[:, ::4] = np.nan
    return {
        "root_value": floats[0].astype(np.float32),
        "visits": rng.integers(-1, 900, size).astype(np.int32),
        "weight": 2 * floats[1].astype(np.float32),
        "extra.temperature": 10 * floats[2] - 5,
    }


def synthetic_policies(size, rng):
    """Return policies for every third position: most with some zeros, some without, one of zeros."""
    rows = np.arange(0, size, 3, dtype=np.uint32)
    policies = rng.random((len(rows), CELLS)).astype(np.float32)
    policies[rng.random(policies.shape) < rng.integers(0, 4, (len(rows), 1)) / 4] = 0
    policies[5:6] = 0
    return {"policy": policies, "policy_row": rows}


def cut_block(arrays, policies, start, stop):
    """Return rows [start, stop) of the split as a block."""
    block = {name: array[start:stop] for name, array in arrays.items()}
    if policies:
        inside = (policies["policy_row"] >= start) & (policies["policy_row"] < stop)
        block["policy"] = policies["policy"][inside]
        block["policy_row"] = policies["policy_row"][inside] - np.uint32(start)
    return block


MakeShards = Callable[..., ShardFolder]


@pytest.fixture
def make_shards(tmp_path):
    """Return ``make(name="shards", dense=False, seed=7, cuts=(), targets=False, **sizes)``.

    It writes a folder of shards.
    """

    def make(name="shards", dense=False, seed=7, cuts=(), targets=False, **sizes):
        return ShardFolder(tmp_path / name, sizes, dense, seed, cuts, targets)

    return make


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """134 training positions in 9 shards, the last of 6, and 20 validation positions in 2; read-only."""
    return ShardFolder(tmp_path_factory.mktemp("store") / "shards", {"train": 134, "val": 20})
