"""Checks of blocks: invalid values of every field raise an error with their row, valid ones do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.board import MAX_SIZE, MIN_SIZE, pack_boards
from hexdata.errors import FormatError
from hexdata.schema import NO_GAME, NO_MOVE, NO_PLY, NO_TIER, is_target
from hexdata.shards.block_check import check_block, find_bad_policy, find_bad_row
from hexdata.shards.blocks import Block, block_fields

N, ROWS = 5, 9
NAN, INFINITY = float("nan"), float("inf")


TARGETS = ("extra.noise", "root_value", "visits", "weight")


def good_block(version: int = 2) -> Block:
    fields = block_fields(N, with_policy=False, targets=TARGETS if version > 1 else ())
    block = {name: np.zeros((ROWS, *spec.shape), spec.dtype) for name, spec in fields.items()}
    block["position_id"][:] = np.arange(ROWS)
    block["policy_row"] = np.array([1, 4, ROWS - 1], "<u4")
    if version == 1:
        return block | {"policy": np.ones((3, N * N), "<f4")}
    return block | {
        "policy_count": np.array([2, 0, 3], "<u2"),
        "policy_cell": np.array([3, 24, 0, 8, 9], "<u2"),
        "policy_probability": np.array([0.5, 0.5, 0.25, 0.25, 0.5], "<f4"),
    }


def version_of(field: str) -> int:
    """Return the schema version of shards with this field."""
    return 1 if field == "policy" else 2


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
        ("policy_cell", [4, 24]),
        ("policy_probability", [0.0, -0.0, 3e38, 1e-45]),
        ("root_value", [0.0, -0.0, 0.5, 1.0, NAN]),
        ("visits", [-1, 0, (1 << 31) - 1]),
        ("weight", [0.0, 3e38, NAN]),
        ("extra.noise", [-1e300, INFINITY, 0.0, NAN]),
    ],
)
def test_valid_values_are_accepted(field: str, values: list[Any]) -> None:
    for value in values:
        block = good_block(version_of(field))
        block[field].flat[1] = value
        assert check_block(block, "a.tar", "000003", board_size=N, rows=ROWS) == N


BAD: list[tuple[str, Any]] = [
    *(("game_id", value) for value in (-2, -(1 << 63), 1 << 62)),
    *(("move", value) for value in (N * N, 200, NO_MOVE - 1)),
    *(("player_to_move", value) for value in (2, 9, 255)),
    *(("position_id", value) for value in (-1, 1 << 62, 8)),
    *(("value", value) for value in (float("nan"), float("inf"), float("-inf"), 7.0, -0.1, 1.0000001)),
    *(("value_sample_tier", value) for value in (4, 200, 254)),
    *(("policy", value) for value in (NAN, INFINITY, -0.1)),
    *(("policy_cell", value) for value in (25, NO_MOVE)),
    *(("policy_probability", value) for value in (NAN, INFINITY, -0.1)),
    *(("root_value", value) for value in (INFINITY, -INFINITY, 1.0000001, -0.1)),
    *(("visits", value) for value in (-2, -(1 << 31))),
    *(("weight", value) for value in (INFINITY, -0.1)),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_an_invalid_value_raises_an_error_with_its_row(field: str, value: Any) -> None:
    block = good_block(version_of(field))
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
    ("rows", "bad"),
    [([1, 1, 2], 1), ([1, 0, 2], 1), ([3, 9, 10], 1), ([9, 10, 11], 0), ([0, 2**32 - 1, 2**32 - 1], 1)],
)
def test_policy_rows_must_ascend_within_the_block(rows: list[int], bad: int) -> None:
    block = good_block() | {"policy_row": np.array(rows, "<u4")}
    with pytest.raises(FormatError, match=rf"policy_row\.npy row {bad}: .*strictly ascending rows below 9"):
        check_block(block, "a.tar", "000003")


@pytest.mark.parametrize(
    ("cells", "bad"),
    [([3, 3, 0, 8, 9], 1), ([24, 3, 0, 8, 9], 1), ([0, 24, 8, 8, 9], 3), ([0, 1, 8, 9, 2], 4)],
)
def test_cells_must_ascend_within_each_policy(cells: list[int], bad: int) -> None:
    block = good_block() | {"policy_cell": np.array(cells, "<u2")}
    with pytest.raises(
        FormatError, match=rf"policy_cell\.npy row {bad}: .*ascending cells within each policy"
    ):
        check_block(block, "a.tar", "000003")


@given(st.lists(st.lists(st.integers(0, 30), max_size=6), max_size=8))
def test_cells_are_checked_like_a_plain_loop(policies: list[list[int]]) -> None:
    counts = np.array([len(policy) for policy in policies], "<u2")
    cells = np.array([cell for policy in policies for cell in policy], "<u2")
    bad, item = None, 0
    for policy in policies:
        for index, cell in enumerate(policy):
            if bad is None and index and cell <= policy[index - 1]:
                bad = item
            item += 1
    found = find_bad_policy(counts, cells)
    assert (None if found is None else found.row) == bad


@pytest.mark.parametrize(
    ("counts", "member"),
    [
        ([2, 0, 4], "policy_cell"),
        ([2, 0, 2], "policy_cell"),
        ([2, 0], "policy_count"),
        ([26, 0, 3], "policy_c"),
    ],
)
def test_the_number_of_cells_must_be_the_sum_of_the_counts(counts: list[int], member: str) -> None:
    block = good_block() | {"policy_count": np.array(counts, "<u2")}
    with pytest.raises(FormatError, match=rf"000003\.{member}"):
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
        {"policy": np.zeros((3, N), "<f4")},
        {"policy_cell": np.zeros(5, "<u4")},
        {"policy_count": np.zeros(3, "<f4")},
        {"policy_probability": np.zeros(4, "<f4")},
        {"root_value": np.zeros(ROWS, "<f8")},
        {"visits": np.zeros(ROWS, "<i8")},
        {"weight": np.zeros(3, "<f4")},
        {"extra.noise": np.zeros(ROWS, "<f4")},
        {"more": np.zeros(ROWS, "u1")},
        {"extra.": np.zeros(ROWS, "<f8")},
    ],
)
def test_other_types_and_shapes_raise_an_error(other: Block) -> None:
    with pytest.raises(FormatError, match=rf"000003\.{next(iter(other))}\.npy: "):
        check_block(good_block(version_of(next(iter(other)))) | other, "a.tar", "000003")


@pytest.mark.parametrize("field", sorted(good_block()))
def test_a_missing_field_raises_an_error(field: str) -> None:
    block = good_block()
    del block[field]
    with pytest.raises(FormatError, match=rf"000003\.{field}\.npy"):
        check_block(block, "a.tar", "000003", members=good_block())
    if not is_target(field):
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
