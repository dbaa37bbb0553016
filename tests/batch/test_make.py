"""Batches, compared with a reference implementation for single positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.batch import (
    FIELDS,
    BatchOptions,
    make_batch,
    required_members,
)
from hexdata.board import pack_boards
from hexdata.errors import ConfigError
from hexdata.fill import boards_to_fill
from hexdata.order import derive_key, sort_key
from hexdata.schema import NO_GAME, NO_MOVE, NO_PLY, NO_TIER, board_bytes
from hexdata.shards.blocks import block_fields, fields_of_members
from tests.pairs import every_pair

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
    assert block.keys() == set(fields_of_members(block_fields(n, with_policy=dense)))
    return block


def rows_of(block: Arrays, rows: list[int]) -> Arrays:
    """Return a block of the given rows."""
    cut = {name: array[rows] for name, array in block.items() if name not in ("policy", "policy_row")}
    found_rows = [(new, np.flatnonzero(block["policy_row"] == old)) for new, old in enumerate(rows)]
    cut["policy_row"] = np.array([new for new, found in found_rows if len(found)], np.uint32)
    cut["policy"] = np.concatenate([block["policy"][found] for _, found in found_rows])
    return cut


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

    tier = stored["value_sample_tier"]
    likely = 1.0 if options.tier_probability is None or tier == NO_TIER else options.tier_probability[tier]
    return stored | {
        "board": np.reshape(planes, (options.planes, n, n)),
        "policy": policy,
        "policy_mask": not final,
        "move": move,
        "value": 1 - stored["value"] if swapped else stored["value"],
        "value_weight": float(draw(stored["position_id"], "value") / 2**64 < likely),
        "player_to_move": player,
    }


DTYPES = {
    "policy": np.float32,
    "policy_mask": np.bool_,
    "move": np.uint16,
    "value": np.float32,
    "value_weight": np.float32,
    "position_id": np.int64,
    "game_id": np.int64,
    "player_to_move": np.uint8,
    "value_sample_tier": np.uint8,
    "position_in_game": np.uint16,
    "total_positions": np.uint16,
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
    assert_equal(made(block, options, n), plain_batch(block, options, n))


@every_pair(
    n=[3, 4, 5, 8, 11, 13, 26, 32],
    board=["float32", "float16", "uint8", "packed"],
    symmetry=[False, True],
)
def test_a_whole_batch_of_every_form(n: int, board: Any, symmetry: bool) -> None:
    block = block_of(n, 30, 1, dense=True)
    options = BatchOptions(FIELDS, planes=3, board=board, tier_probability=TIERS, symmetry=symmetry)
    assert_equal(made(block, options, n), plain_batch(block, options, n))


@pytest.mark.parametrize("planes", [2, 3])
@pytest.mark.parametrize("board", ["float32", "float16", "uint8", "packed"])
@pytest.mark.parametrize("symmetry", [False, True])
def test_an_empty_block_of_fill_rows(symmetry: bool, board: Any, planes: int) -> None:
    """A rank gets one if the last global batch has fewer positions than there are ranks."""
    block = block_of(5, 0, 1, dense=False)
    options = BatchOptions(FIELDS, planes=planes, board=board, tier_probability=TIERS, symmetry=symmetry)
    expected = plain_batch(block, options, 5)
    fill = boards_to_fill(block.pop("board"), block["move"], 5)
    assert_equal(made({**block, "fill": fill, "ply": np.empty(0, fill.dtype)}, options, 5), expected)


@pytest.mark.parametrize("symmetry", [False, True])
def test_a_position_is_the_same_in_any_batch(symmetry: bool) -> None:
    block = block_of(5, 60, 2, dense=True)
    options = BatchOptions(FIELDS, planes=3, tier_probability=TIERS, symmetry=symmetry)
    whole = made(block, options, 5)
    for size in (1, 7, 59):
        parts = [
            made(rows_of(block, list(range(start, min(start + size, 60)))), options, 5)
            for start in range(0, 60, size)
        ]
        assert_equal({name: np.concatenate([part[name] for part in parts]) for name in whole}, whole)
    order = np.random.default_rng(1).permutation(60)
    mixed = made(rows_of(block, order.tolist()), options, 5)
    assert_equal(mixed, {name: array[order] for name, array in whole.items()})


def test_the_draws_follow_seed_and_epoch() -> None:
    block = block_of(5, 60, 3, dense=False)
    options = BatchOptions(("move",), tier_probability=(0.5,) * 4, symmetry=True)
    made_of = [
        make_batch(block, options, 5, seed=seed, epoch=epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0))
    ]
    for name in ("move", "value_weight"):
        for first in range(3):
            for second in range(first):
                assert (made_of[first][name] != made_of[second][name]).any()


def test_the_block_is_not_modified() -> None:
    block = block_of(5, 40, 4, dense=True)
    before = {name: array.copy() for name, array in block.items()}
    for array in block.values():
        array.flags.writeable = False
    options = BatchOptions(FIELDS, planes=3, final_policy="uniform", tier_probability=TIERS, symmetry=True)
    for form in ("float32", "packed"):
        make_batch(block, replace(options, board=form), 5, seed=SEED, epoch=EPOCH)
    for name, array in before.items():
        np.testing.assert_array_equal(block[name], array)


# --- members ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "members"),
    [
        (BatchOptions(("board",)), {"board"}),
        (BatchOptions(("board",), planes=3), {"board", "player_to_move"}),
        (BatchOptions(("board",), planes=3, board="packed"), {"board", "player_to_move"}),
        (BatchOptions(("value",), symmetry=True), {"value", "position_id"}),
        (BatchOptions(("policy",)), {"move", "policy", "policy_row"}),
        (BatchOptions(("policy_mask",)), {"move", "policy", "policy_row"}),
        (BatchOptions(("value_weight",)), {"position_id"}),
        (BatchOptions(("move",), tier_probability=TIERS), {"move", "position_id", "value_sample_tier"}),
    ],
)
def test_required_members_lists_only_the_needed_members(options: BatchOptions, members: set[str]) -> None:
    dense = fields_of_members(block_fields(5, with_policy=True))
    assert required_members(options, dense) == sorted(members)
    one_hot = fields_of_members(block_fields(5, with_policy=False))
    assert required_members(options, one_hot) == sorted(members - {"policy", "policy_row"})


def test_options_add_their_fields() -> None:
    assert BatchOptions(tier_probability=TIERS).delivered == ("board", "policy", "value", "value_weight")
    packed = BatchOptions(("board", "player_to_move", "value"), planes=3, board="packed")
    assert packed.delivered == packed.fields
    assert replace(packed, fields=("board",)).delivered == ("board", "player_to_move")
    assert replace(packed, fields=("board",), planes=2).delivered == ("board",)
    assert replace(packed, fields=("move",)).delivered == ("move",)


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": ()}, r"fields cannot be used; found \(\); expected a tuple of board, policy"),
        ({"fields": "board"}, "fields cannot be used; found 'board'"),
        ({"fields": ["board"]}, "fields cannot be used"),
        ({"fields": ("board", "policies")}, r"unknown fields; found \['policies'\]; expected some of board"),
        ({"fields": ("board", "board")}, "a field is named twice"),
        ({"planes": 4}, "unknown planes; found 4; expected 2 or 3"),
        ({"planes": 2.0}, "planes"),
        ({"board": "float64"}, "unknown board; found 'float64'; expected 'float32' or 'float16' or"),
        ({"final_policy": "drop"}, "unknown final_policy; found 'drop'"),
        ({"tier_probability": (1, 0.8, 0.4)}, "tier_probability cannot be used"),
        ({"tier_probability": (1, 0.8, 0.4, 1.1)}, "numbers from 0 to 1"),
        ({"tier_probability": (1, 0.8, 0.4, float("nan"))}, "tier_probability"),
        ({"tier_probability": (1, 0.8, 0.4, True)}, "tier_probability"),
        ({"tier_probability": [1, 0.8, 0.4, 0.1]}, "tier_probability"),
        ({"symmetry": "auto"}, "symmetry cannot be used; found 'auto'; expected True or False"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchOptions(**options)
