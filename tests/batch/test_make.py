"""Batches, compared with a reference implementation for single positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hexdata.batch import FIELDS, BatchOptions, make_batch, required_members
from hexdata.board import pack_boards
from hexdata.order import derive_key, sort_key
from hexdata.schema import NO_GAME, NO_MOVE, NO_PLY, NO_TIER, board_bytes
from hexdata.shards.blocks import POLICY_FIELDS, block_fields

Arrays = dict[str, np.ndarray]
SEED, EPOCH = 11, 4
TIERS = (1.0, 0.5, 0.25, 0.0)


def block_of(n: int, size: int, seed: int, dense: bool) -> Arrays:
    """Return a block with all stored fields, including final positions and unknown values."""
    rng = np.random.default_rng([n, size, seed])
    move = rng.integers(0, n * n, size).astype(np.uint16)
    move[rng.random(size) < 0.2] = NO_MOVE
    block = {
        "board": pack_boards(rng.integers(0, 2, (size, 2, n, n))),
        "move": move,
        "value": rng.choice([0, 1, 0.25], size).astype(np.float32),
        "player_to_move": rng.integers(0, 2, size).astype(np.uint8),
        "value_sample_tier": rng.choice([0, 1, 2, 3, NO_TIER], size).astype(np.uint8),
        "position_id": rng.integers(0, 2**40, size),
        "game_id": rng.choice([NO_GAME, 3, 4], size),
        "position_in_game": rng.choice([0, 7, NO_PLY], size).astype(np.uint16),
        "total_positions": rng.choice([9, NO_PLY], size).astype(np.uint16),
    }
    if dense:
        rows = np.flatnonzero(rng.random(size) < 0.4).astype(np.uint32)
        block["policy_row"] = rows
        block["policy"] = rng.random((len(rows), n * n)).astype(np.float32)
    assert block.keys() == {*block_fields(n, with_policy=False), *(POLICY_FIELDS if dense else ())}
    if seed % 2:
        block["root_value"] = np.where(rng.random(size) < 0.3, np.nan, rng.random(size)).astype(np.float32)
        block["visits"] = rng.integers(-1, 900, size).astype(np.int32)
        block["policy_weight"] = rng.choice([0, 1, 0.5], size).astype(np.float32)
    return block


def image_of(symmetry: int, cell: int, n: int) -> int:
    row, column = divmod(cell, n)
    if symmetry in (1, 3):
        row, column = n - 1 - row, n - 1 - column
    if symmetry in (2, 3):
        row, column = column, row
    return row * n + column


def draw(identity: int, purpose: str) -> int:
    return int(sort_key([identity], derive_key(SEED, purpose, EPOCH))[0])


def plain_position(block: Arrays, row: int, options: BatchOptions, n: int) -> dict[str, Any]:
    """Return all fields of one position, as documented."""
    stored = {
        name: block[name][row].item() for name in block if name not in ("board", "policy", "policy_row")
    }
    symmetry = draw(stored["position_id"], "augment") >> 62 if options.symmetry else 0
    swapped = symmetry >= 2
    cells = n * n

    player = stored["player_to_move"] ^ swapped
    planes = [[0] * cells for _ in range(options.planes)]
    for bit in range(2 * cells):
        if block["board"][row][bit // 8] >> (7 - bit % 8) & 1:
            planes[(bit // cells) ^ swapped][image_of(symmetry, bit % cells, n)] = 1
    if options.planes == 3:
        planes[2] = [player] * cells

    move, final = stored["move"], stored["move"] == NO_MOVE
    policy = [0.0] * cells
    if not final:
        move = image_of(symmetry, move, n)
        policy[move] = 1.0
    elif options.final_policy == "uniform":
        policy = [1 / cells] * cells
    for index in np.flatnonzero(block.get("policy_row", np.zeros(0)) == row):
        final = False
        for cell in range(cells):
            policy[image_of(symmetry, cell, n)] = block["policy"][index, cell]

    weight = stored.get("policy_weight", 1.0)
    if not weight:
        policy = [0.0] * cells
    tier = stored["value_sample_tier"]
    likely = 1.0 if options.tier_probability is None or tier == NO_TIER else options.tier_probability[tier]
    return stored | {
        "board": np.reshape(planes, (options.planes, n, n)),
        "policy": policy,
        "policy_mask": not final and weight > 0,
        "policy_weight": weight,
        "move": move,
        "value": 1 - stored["value"] if swapped else stored["value"],
        "root_value": 1 - stored.get("root_value", np.nan) if swapped else stored.get("root_value"),
        "value_weight": float(draw(stored["position_id"], "value") / 2**64 < likely),
        "player_to_move": player,
    }


DTYPES = {
    "policy": np.float32,
    "policy_mask": np.bool_,
    "policy_weight": np.float32,
    "move": np.uint16,
    "value": np.float32,
    "value_weight": np.float32,
    "position_id": np.int64,
    "game_id": np.int64,
    "player_to_move": np.uint8,
    "value_sample_tier": np.uint8,
    "position_in_game": np.uint16,
    "total_positions": np.uint16,
    "root_value": np.float32,
    "visits": np.int32,
}


def plain_batch(block: Arrays, options: BatchOptions, n: int) -> Arrays:
    positions = [plain_position(block, row, options, n) for row in range(len(block["value"]))]
    form = np.dtype("uint8" if options.board == "packed" else options.board)
    shapes = {"board": (options.planes, n, n), "policy": (n * n,)}
    batch = {}
    for name in options.delivered:
        values = [position[name] for position in positions]
        shape = (len(values), *shapes.get(name, ()))
        batch[name] = np.array(values, form if name == "board" else DTYPES[name]).reshape(shape)
    if options.board == "packed" and "board" in batch:
        stones = batch["board"][:, :2].reshape(len(positions), 2 * n * n)
        batch["board"] = np.packbits(stones, axis=1).reshape(len(positions), board_bytes(n))
    return batch


def made(block: Arrays, options: BatchOptions, n: int) -> Arrays:
    """Make a batch from only the members it needs."""
    members = {name: block[name] for name in required_members(options, block)}
    if "fill" in members:
        members["ply"] = block["ply"]
    return make_batch(members, options, n, seed=SEED, epoch=EPOCH)


def assert_equal(batch: Arrays, expected: Arrays) -> None:
    assert list(batch) == list(expected)
    for name, array in batch.items():
        np.testing.assert_array_equal(array, expected[name], strict=True, err_msg=name)
        assert array.flags.c_contiguous, name
        assert array.flags.writeable, name


options_of_batches = st.builds(
    BatchOptions,
    fields=st.permutations(FIELDS).flatmap(
        lambda names: st.integers(1, len(names)).map(lambda k: tuple(names[:k]))
    ),
    planes=st.sampled_from([2, 3]),
    board=st.sampled_from(["float32", "float16", "uint8", "packed"]),
    final_policy=st.sampled_from(["zeros", "uniform", "skip"]),
    tier_probability=st.sampled_from([None, TIERS]),
    symmetry=st.booleans(),
)


@given(
    st.sampled_from([3, 4, 5, 8, 11, 13]),
    st.integers(0, 12),
    st.integers(0, 100),
    st.booleans(),
    options_of_batches,
)
def test_batches_equal_the_reference(
    n: int, size: int, seed: int, dense: bool, options: BatchOptions
) -> None:
    block = block_of(n, size, seed, dense)
    if "root_value" in block:
        options = replace(options, fields=(*options.fields, "root_value", "visits"))
    before = {name: array.copy() for name, array in block.items()}
    assert_equal(made(block, options, n), plain_batch(block, options, n))
    for name, array in before.items():
        np.testing.assert_array_equal(block[name], array, err_msg=f"{name} was changed in place")


def test_the_draws_are_pinned_and_follow_seed_and_epoch() -> None:
    """If these literals change, runs cannot be repeated, and ORDER_VERSION must be increased."""

    def draw(seed: int, epoch: int) -> tuple[list[int], list[int]]:
        """Return the symmetry of each position, from the image of the cell b1; and the value weights."""
        block = {"position_id": np.arange(16), "move": np.ones(16, np.uint16)}
        block["value_sample_tier"] = np.arange(16).astype(np.uint8) % 4
        tiers = (1.0, 0.8, 0.4, 0.1)
        options = BatchOptions(fields=("move", "value_weight"), tier_probability=tiers, symmetry=True)
        batch = make_batch(block, options, 5, seed=seed, epoch=epoch)
        images = [image_of(symmetry, 1, 5) for symmetry in range(4)]
        return [images.index(move) for move in batch["move"].tolist()], batch["value_weight"].tolist()

    symmetries, weights = draw(1, 2)
    assert symmetries == [0, 0, 2, 2, 1, 2, 1, 0, 0, 1, 0, 3, 1, 2, 0, 2]
    assert weights == [1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 0]
    for other in (draw(1, 3), draw(2, 2)):
        assert symmetries != other[0]
        assert weights != other[1]


# --- members ------------------------------------------------------------------------------------------


# --- options ------------------------------------------------------------------------------------------
