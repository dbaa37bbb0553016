"""Checks of blocks: invalid values of every field raise an error with their row, valid ones do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hexdata.board import MAX_SIZE, MIN_SIZE, pack_boards
from hexdata.errors import FormatError
from hexdata.schema import NO_GAME, NO_MOVE, NO_PLY, NO_TIER
from hexdata.shards.block_check import check_block, find_bad_row
from hexdata.shards.blocks import Block, block_fields

N, ROWS = 5, 9


def good_block() -> Block:
    block = {name: np.zeros((ROWS, *spec.shape), spec.dtype) for name, spec in block_fields(N, False).items()}
    block["position_id"][:] = np.arange(ROWS)
    return block | {"policy": np.ones((2, N * N), "<f4"), "policy_row": np.array([1, ROWS - 1], "<u4")}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("game_id", [NO_GAME, 0, (1 << 62) - 1]),
        ("move", [0, N * N - 1, NO_MOVE]),
        ("player_to_move", [0, 1]),
        ("position_id", [100, (1 << 62) - 1]),
        ("position_in_game", [0, NO_PLY]),
        ("total_positions", [0, NO_PLY]),
        ("value", [0.0, -0.0, 0.5, 1.0]),
        ("value_sample_tier", [0, 3, NO_TIER]),
        ("policy", [0.0, 3e38, 1e-45]),
    ],
)
def test_valid_values_are_accepted(field: str, values: list[Any]) -> None:
    for value in values:
        block = good_block()
        block[field].flat[1] = value
        assert check_block(block, "a.tar", "000003", board_size=N, rows=ROWS) == N


BAD: list[tuple[str, Any]] = [
    *(("game_id", value) for value in (-2, -(1 << 63), 1 << 62)),
    *(("move", value) for value in (N * N, 200, NO_MOVE - 1)),
    *(("player_to_move", value) for value in (2, 9, 255)),
    *(("position_id", value) for value in (-1, 1 << 62, 8)),
    *(("value", value) for value in (float("nan"), float("inf"), float("-inf"), 7.0, -0.1, 1.0000001)),
    *(("value_sample_tier", value) for value in (4, 200, 254)),
    *(("policy", value) for value in (float("nan"), float("inf"), -0.1)),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_an_invalid_value_raises_an_error_with_its_row(field: str, value: Any) -> None:
    block = good_block()
    row = 1 if field == "policy" else 4
    block[field][row] = value
    with pytest.raises(FormatError) as caught:
        check_block(block, "a.tar", "000003", board_size=N, rows=ROWS)
    named = 8 if (field, value) == ("position_id", 8) else row
    assert (caught.value.path, caught.value.code) == ("a.tar", "broken-shard")
    assert caught.value.record == f"000003.{field}.npy row {named}"
    assert caught.value.found
    assert caught.value.expected
    assert caught.value.hint


@pytest.mark.parametrize(
    ("rows", "bad"), [([1, 1], 1), ([1, 0], 1), ([3, 9], 1), ([9, 10], 0), ([0, 2**32 - 1], 1)]
)
def test_policy_rows_must_ascend_within_the_block(rows: list[int], bad: int) -> None:
    block = good_block() | {"policy_row": np.array(rows, "<u4")}
    with pytest.raises(FormatError, match=rf"policy_row\.npy row {bad}: .*strictly ascending rows below 9"):
        check_block(block, "a.tar", "000003")


@pytest.mark.parametrize(
    "other",
    [
        {"value": np.zeros(ROWS, "<f8")},
        {"value": np.zeros(ROWS - 1, "<f4")},
        {"move": np.zeros((ROWS, 1), "<u2")},
        {"board": np.zeros((ROWS, 6), "u1")},
        {"board": np.zeros(ROWS, "u1")},
        {"policy": np.zeros((1, N * N), "<f4")},
        {"policy": np.zeros((2, N), "<f4")},
        {"more": np.zeros(ROWS, "u1")},
    ],
)
def test_other_types_and_shapes_raise_an_error(other: Block) -> None:
    with pytest.raises(FormatError, match=rf"000003\.{next(iter(other))}\.npy: "):
        check_block(good_block() | other, "a.tar", "000003")


@pytest.mark.parametrize("field", sorted(good_block()))
def test_a_missing_field_raises_an_error(field: str) -> None:
    block = good_block()
    del block[field]
    with pytest.raises(FormatError, match=rf"000003\.{field}\.npy"):
        check_block(block, "a.tar", "000003")


@pytest.mark.parametrize("n", range(MIN_SIZE, MAX_SIZE + 1))
def test_boards_of_every_size(n: int) -> None:
    """Two stones on one cell, and bits after the last cell, at every position."""
    cells = np.random.default_rng(n).integers(0, 3, (3_000, n, n))
    boards = pack_boards(np.stack([cells == 1, cells == 2], axis=1).astype(np.uint8))
    assert find_bad_row("board", boards, n) is None
    for cell in range(n * n):
        both = boards.copy()
        row = 2_999 - cell
        for bit in (cell, n * n + cell):
            both[row, bit // 8] |= 0x80 >> bit % 8
        bad = find_bad_row("board", both, n)
        assert bad is not None
        assert bad.row == row
    for bit in range(2 * n * n, 8 * boards.shape[1]):
        padded = boards.copy()
        padded[2_100, bit // 8] |= 0x80 >> bit % 8
        bad = find_bad_row("board", padded, n)
        assert bad is not None
        assert bad.row == 2_100
