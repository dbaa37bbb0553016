"""Symmetries of blocks compared with loops over cells, and the draws that choose them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.batch.symmetry import draw_symmetries, transform_labels, transform_stones
from hexdata.board import SYMMETRIES, Symmetry, swaps_colours, transform_moves, transform_planes
from hexdata.order import derive_key, sort_key
from hexdata.schema import NO_MOVE

SIZES = [3, 4, 5, 8, 11, 13]


def image_of(symmetry: int, row: int, column: int, n: int) -> tuple[int, int]:
    """Return the cell to which a symmetry maps a cell, as defined in docs/format.md."""
    return [
        (row, column),
        (n - 1 - row, n - 1 - column),
        (column, row),
        (n - 1 - column, n - 1 - row),
    ][symmetry]


def batch_of(n: int, seed: int, size: int = 40) -> dict[str, np.ndarray]:
    """Random stones, labels and symmetries; every fifth position is final, every third has a dense policy."""
    rng = np.random.default_rng([n, seed])
    rows = np.arange(0, size, 3, dtype=np.uint32)
    moves = rng.integers(0, n * n, size).astype(np.uint16)
    moves[::5] = NO_MOVE
    return {
        "planes": rng.integers(0, 2, (size, 2, n, n), np.uint8),
        "move": moves,
        "value": rng.choice([0, 1, 0.25, 0.1], size).astype(np.float32),
        "player_to_move": rng.integers(0, 2, size).astype(np.uint8),
        "policy": rng.random((len(rows), n * n)).astype(np.float32),
        "policy_row": rows,
        "symmetries": rng.integers(0, 4, size).astype(np.uint8),
    }


@pytest.mark.parametrize("n", SIZES)
def test_stones_equal_those_of_plain_loops(n: int) -> None:
    batch = batch_of(n, 1)
    planes, symmetries = batch["planes"], batch["symmetries"]
    expected = np.zeros_like(planes)
    for position, colour, row, column in np.argwhere(planes).tolist():
        symmetry = int(symmetries[position])
        image = image_of(symmetry, row, column, n)
        expected[position, colour ^ (symmetry >= 2), image[0], image[1]] = 1
    transform_stones(planes, symmetries)
    np.testing.assert_array_equal(planes, expected)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_a_batch_of_one_symmetry_is_that_of_the_board(n: int, symmetry: Symmetry) -> None:
    batch = batch_of(n, 2)
    symmetries = np.full(40, symmetry, np.uint8)
    planes = batch["planes"].copy()
    transform_stones(planes, symmetries)
    np.testing.assert_array_equal(planes, transform_planes(batch["planes"], symmetry), strict=True)
    images = transform_labels(batch, symmetries, n)
    known = batch["move"] != NO_MOVE
    np.testing.assert_array_equal(
        images["move"][known], transform_moves(batch["move"][known], n, symmetry), strict=True
    )
    assert (images["move"][~known] == NO_MOVE).all()
    expected = 1 - batch["value"] if swaps_colours(symmetry) else batch["value"]
    np.testing.assert_array_equal(images["value"], expected, strict=True)


@pytest.mark.parametrize("n", SIZES)
def test_labels_equal_those_of_plain_loops(n: int) -> None:
    batch = batch_of(n, 3)
    before = {name: array.copy() for name, array in batch.items()}
    images = transform_labels(batch, batch["symmetries"], n)
    for row, symmetry in enumerate(batch["symmetries"].tolist()):
        move, value, player = (batch[name][row] for name in ("move", "value", "player_to_move"))
        if move != NO_MOVE:
            there = image_of(symmetry, *divmod(int(move), n), n)
            move = there[0] * n + there[1]
        assert images["move"][row] == move
        if symmetry >= 2:
            value, player = np.float32(1) - value, 1 - player
        assert images["value"][row] == value
        assert images["player_to_move"][row] == player
    for index, row in enumerate(batch["policy_row"].tolist()):
        for cell in range(n * n):
            there = image_of(int(batch["symmetries"][row]), *divmod(cell, n), n)
            assert images["policy"][index, there[0] * n + there[1]] == batch["policy"][index, cell]
    assert {name: array.dtype for name, array in images.items()} == {
        name: array.dtype for name, array in before.items()
    }
    for name, array in before.items():
        np.testing.assert_array_equal(batch[name], array, err_msg=f"{name} was changed in place")


@given(st.sampled_from(SIZES), st.integers(0, 1000))
def test_every_image_of_an_image_is_the_position(n: int, seed: int) -> None:
    batch = batch_of(n, seed)
    planes = batch["planes"].copy()
    for _ in range(2):
        transform_stones(planes, batch["symmetries"])
    np.testing.assert_array_equal(planes, batch["planes"])
    exact = batch | {"value": (batch["value"] > 0.2).astype(np.float32)}
    again = transform_labels(transform_labels(exact, batch["symmetries"], n), batch["symmetries"], n)
    for name in exact:
        np.testing.assert_array_equal(again[name], exact[name], strict=True)


def test_only_the_fields_of_a_block_are_transformed() -> None:
    ids = np.arange(4)
    images = transform_labels({"position_id": ids}, np.arange(4, dtype=np.uint8), 5)
    assert images.keys() == {"position_id"}
    assert images["position_id"] is ids
    planes = np.zeros((0, 2, 5, 5), np.uint8)
    transform_stones(planes, np.zeros(0, np.uint8))


def test_the_draws_are_pinned() -> None:
    """If these literals change, augmented runs cannot be repeated, and ORDER_VERSION must be increased."""
    assert draw_symmetries(np.arange(16), 1, 2).tolist() == [0, 0, 2, 2, 1, 2, 1, 0, 0, 1, 0, 3, 1, 2, 0, 2]
    assert derive_key(1, "augment", 2) == 0x4E5D28DF8F8A0FDC


def test_the_draws_are_as_documented() -> None:
    ids = np.array([0, 5, 2**40, 7], np.int64)
    keys = [int(key) for key in sort_key(ids, derive_key(7, "augment", 3))]
    assert draw_symmetries(ids, 7, 3).tolist() == [key // 2**62 for key in keys]


def test_symmetries_are_uniform_and_differ_between_epochs() -> None:
    ids = np.arange(40_000)
    drawn = np.stack([draw_symmetries(ids, 42, epoch) for epoch in range(3)] + [draw_symmetries(ids, 43, 0)])
    for first in range(4):
        counts = np.bincount(drawn[first], minlength=4)
        assert abs(counts - 10_000).max() < 5 * np.sqrt(40_000 * 3 / 16)
        for second in range(first):  # all 16 pairs of draws of one position have the same frequency
            pairs = np.bincount(4 * drawn[first] + drawn[second], minlength=16)
            assert abs(pairs - 2_500).max() < 5 * np.sqrt(2_500)
    order = np.random.default_rng(3).permutation(40_000)
    np.testing.assert_array_equal(draw_symmetries(ids[order], 42, 0), drawn[0][order])
