"""Checks of blocks: invalid values of every field raise an error with their row, valid ones do not."""

from __future__ import annotations

import numpy as np
import pytest

from hexdata.board import MAX_SIZE, MIN_SIZE, pack_boards
from hexdata.errors import FormatError
from hexdata.schema import NO_GAME, NO_MOVE, NO_PLY, NO_TIER, is_target
from hexdata.shards.block_check import check_block, find_bad_row
from hexdata.shards.blocks import block_fields

N, ROWS = 5, 9
NAN, INFINITY = float("nan"), float("inf")
TARGETS = ("extra.noise", "root_value", "visits", "weight")


def good_block():
    fields = block_fields(N, with_policy=False, targets=TARGETS)
    block = {name: np.zeros((ROWS, *spec.shape), spec.dtype) for name, spec in fields.items()}
    block["position_id"][:] = np.arange(ROWS)
    return block | {
        "policy_row": np.array([1, 4, ROWS - 1], "<u4"),
        "policy_count": np.array([2, 0, 3], "<u2"),
        "policy_cell": np.array([3, 24, 0, 8, 9], "<u2"),
        "policy_probability": np.array([0.5, 0.5, 0.25, 0.25, 0.5], "<f4"),
    }


def refused(**other):
    """Return the record of the error for a block with other members."""
    with pytest.raises(FormatError) as caught:
        check_block(good_block() | other, "a.tar", "000003")
    assert (caught.value.path, caught.value.code) == ("a.tar", "broken-shard")
    return caught.value.record


GOOD = {
    "game_id": [NO_GAME, 0, (1 << 62) - 1],
    "move": [0, N * N - 1, NO_MOVE],
    "player_to_move": [0, 1],
    "position_id": [100, (1 << 62) - 1],
    "position_in_game": [0, NO_PLY],
    "total_positions": [0, NO_PLY],
    "value": [0.0, -0.0, 0.5, 1.0],
    "value_sample_tier": [0, 3, NO_TIER],
    "policy_cell": [4, 24],
    "policy_probability": [0.0, -0.0, 3e38, 1e-45],
    "root_value": [0.0, -0.0, 0.5, 1.0, NAN],
    "visits": [-1, 0, (1 << 31) - 1],
    "weight": [0.0, 3e38, NAN],
    "extra.noise": [-1e300, INFINITY, 0.0, NAN],
}
BAD = {
    "game_id": [-2, -(1 << 63), 1 << 62],
    "move": [N * N, 200, NO_MOVE - 1],
    "player_to_move": [2, 9, 255],
    "position_id": [-1, 1 << 62, 8],
    "value": [NAN, INFINITY, -INFINITY, 7.0, -0.1, 1.0000001],
    "value_sample_tier": [4, 200, 254],
    "policy_cell": [25, NO_MOVE],
    "policy_probability": [NAN, INFINITY, -0.1],
    "root_value": [INFINITY, -INFINITY, 1.0000001, -0.1],
    "visits": [-2, -(1 << 31)],
    "weight": [INFINITY, -0.1],
}


@pytest.mark.parametrize("field", GOOD)
def test_valid_values_are_accepted_and_others_named_with_their_row(field):
    for value in GOOD[field]:
        block = good_block()
        block[field].flat[1] = value
        assert check_block(block, "a.tar", "000003") == N
    for value in BAD.get(field, ()):
        values = good_block()[field]
        values[4] = value
        row = 8 if (field, value) == ("position_id", 8) else 4  # the second row with this id
        assert refused(**{field: values}) == f"000003.{field}.npy row {row}"


@pytest.mark.parametrize("n", [MIN_SIZE, 4, 5, 6, 13, MAX_SIZE])
def test_boards_of_several_sizes(n):
    """Two stones on one cell, and bits after the last cell; the red plane begins at each bit of a byte."""
    rng = np.random.default_rng(n)
    cells = rng.integers(0, 3, (4_200, n, n))
    boards = pack_boards(np.stack([cells == 1, cells == 2], axis=1).astype(np.uint8))
    assert find_bad_row("board", boards, n) is None
    stones = {0, 7, 8, n * n - 1, *rng.integers(0, n * n, 3).tolist()} & {*range(n * n)}
    changes = [(cell, n * n + cell) for cell in stones] + [
        (b,) for b in range(2 * n * n, 8 * boards.shape[1])
    ]
    for number, bits in enumerate(changes):
        row, before = 4_199 - number, boards.copy()
        for bit in bits:
            before[row, bit // 8] |= 0x80 >> bit % 8
        bad = find_bad_row("board", before, n)
        assert bad is not None
        assert bad.row == row


OTHERS = {
    "value": [np.zeros(ROWS, "<f8"), np.zeros(ROWS - 1, "<f4")],
    "move": [np.zeros((ROWS, 1), "<u2")],
    "board": [np.zeros((ROWS, 6), "u1"), np.zeros(ROWS, "u1")],
    "policy": [np.zeros((3, N * N), "<f4")],
    "policy_cell": [np.zeros(5, "<u4"), np.array([3, 3, 0, 8, 9], "<u2"), np.array([3, 24, 0, 9, 8], "<u2")],
    "policy_count": [np.zeros(3, "<f4"), *(np.array(c, "<u2") for c in ([2, 0], [2, 0, 4], [2, 0, 2]))],
    "policy_probability": [np.zeros(4, "<f4")],
    "policy_row": [np.array(r, "<u4") for r in ([1, 1, 2], [1, 0, 2], [3, 9, 10], [9, 10, 11])],
    "root_value": [np.zeros(ROWS, "<f8")],
    "visits": [np.zeros(ROWS, "<i8")],
    "weight": [np.zeros(3, "<f4")],
    "extra.noise": [np.zeros(ROWS, "<f4")],
    "more": [np.zeros(ROWS, "u1")],
    "extra.": [np.zeros(ROWS, "<f8")],
}
"""Arrays of another type, shape or length, and policies that contradict each other."""


@pytest.mark.parametrize("field", OTHERS)
def test_other_arrays_and_members_raise_an_error(field):
    for array in OTHERS[field]:
        # A number of cells that differs from the sum of the counts is a fault of the cells.
        names = (field, "policy_cell") if field == "policy_count" else (field,)
        assert refused(**{field: array}).startswith(tuple(f"000003.{name}.npy" for name in names))


def test_a_missing_field_raises_an_error():
    for field in good_block():
        block = good_block()
        del block[field]
        if not is_target(field):
            with pytest.raises(FormatError, match=rf"000003\.{field}\.npy"):
                check_block(block, "a.tar", "000003")
