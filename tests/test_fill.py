"""Tests of ``hexdata.fill``: fill rows against replayed games, packed boards and symmetries."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hexdata.board import (
    MAX_SIZE,
    MIN_SIZE,
    SYMMETRIES,
    pack_boards,
    replay,
    symmetry_table,
    transform_moves,
    transform_planes,
    unpack_boards,
)
from hexdata.fill import (
    POSITION_PLY,
    boards_to_fill,
    fill_dtype,
    fill_to_move,
    fill_to_policy,
    fill_to_stones,
    games_to_fill,
    never_filled,
    transform_fill,
)
from hexdata.schema import NO_MOVE

Array = npt.NDArray[Any]
SIZES = range(MIN_SIZE, MAX_SIZE + 1)


def games_of(n: int) -> list[tuple[Array, int]]:
    """Return games with the player who began: empty games, full boards and random lengths."""
    rng = np.random.default_rng(n)
    lengths = [0, 0, 1, n * n, n * n, n * n - 1, *rng.integers(0, n * n + 1, 4).tolist()]
    return [
        (rng.permutation(n * n)[:length].astype(np.uint16), number % 2)
        for number, length in enumerate(lengths)
    ]


def fill_of(games: list[tuple[Array, int]], n: int) -> Array:
    moves = [moves for moves, _ in games]
    first_players = np.array([first_player for _, first_player in games], np.uint8)
    return games_to_fill(np.concatenate(moves), np.array([len(own) for own in moves]), first_players, n)


def random_positions(n: int, count: int) -> tuple[Array, Array]:
    """Return packed boards with any stones, and moves on free and occupied cells, or none."""
    rng = np.random.default_rng(100 + n)
    cells = rng.integers(0, 3, (count, n, n))
    cells[0], cells[1], cells[2] = 0, 1, 2
    moves = rng.integers(0, n * n, count).astype(np.uint16)
    moves[rng.integers(0, 3, count) == 0] = NO_MOVE
    return pack_boards(np.stack([cells == 1, cells == 2], axis=1)), moves


def rows_and_planes(n: int) -> tuple[Array, Array, Array, Array]:
    """Return fill rows of positions of games and of single positions, their plies, next moves and planes."""
    found = []
    games = games_of(n)
    for (moves, first_player), row in zip(games, fill_of(games, n), strict=True):
        chosen = np.unique(np.linspace(0, len(moves), 8).astype(int))
        plies = (chosen + first_player).astype(row.dtype)
        next_moves = np.append(moves, np.uint16(NO_MOVE))[chosen]
        found.append(
            (np.tile(row, (len(chosen), 1)), plies, next_moves, replay(moves, n, first_player)[chosen])
        )
    packed, moves = random_positions(n, 12)
    planes = unpack_boards(packed, n, np.uint8)
    # A move on an occupied cell is left out.
    occupied = planes.any(axis=1).reshape(len(moves), -1)
    is_free = (moves != NO_MOVE) & ~occupied[range(12), np.where(moves == NO_MOVE, 0, moves)]
    fill = boards_to_fill(packed, moves, n)
    plies = np.full(12, POSITION_PLY, fill.dtype)
    found.append((fill, plies, np.where(is_free, moves, NO_MOVE).astype(np.uint16), planes))
    fills, all_plies, all_moves, all_planes = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return fills, all_plies, all_moves, all_planes


@pytest.mark.parametrize("n", SIZES)
def test_positions_follow_from_fill_rows_and_their_images(n: int) -> None:
    """Under one symmetry for all rows, and under another one for each row."""
    fill, ply, moves, planes = rows_and_planes(n)
    assert fill.dtype == fill_dtype(n) == (np.uint8 if n <= 15 else np.uint16)
    fill.flags.writeable = ply.flags.writeable = False
    policy = np.zeros((len(fill), n * n), np.float32)
    has_move = np.flatnonzero(moves != NO_MOVE)
    policy[has_move, moves[has_move]] = 1
    mixed = np.random.default_rng(n).integers(0, 4, len(fill)).astype(np.uint8)
    for symmetries in (*(np.full(len(fill), each, np.uint8) for each in SYMMETRIES), mixed):
        image, image_ply = transform_fill(fill, ply, symmetries, n)
        assert (image.dtype, image_ply.dtype) == (fill.dtype, ply.dtype)
        stones = fill_to_stones(image, image_ply)
        found, policies = fill_to_move(image, image_ply), fill_to_policy(image, image_ply)
        assert (stones.dtype, found.dtype) == (np.uint8, np.uint16)
        for each in SYMMETRIES:
            rows = np.flatnonzero(symmetries == each)
            expected = transform_planes(planes[rows], each)
            assert np.array_equal(stones[rows].reshape(expected.shape), expected)
            own = rows[moves[rows] != NO_MOVE]
            assert np.array_equal(found[own], transform_moves(moves[own], n, each))
            assert (found[np.setdiff1d(rows, own)] == NO_MOVE).all()
            assert policies[rows].tobytes() == policy[rows][:, symmetry_table(n)[each]].tobytes()


def test_a_fill_row_has_the_plies_of_the_game() -> None:
    """A single position has four numbers, and its move only if the cell is free."""
    fill = games_to_fill(np.array([4, 0, 4, 8]), np.array([2, 0, 2]), np.array([0, 0, 1], np.uint8), 3)
    never = 255
    assert fill.tolist() == [
        [1, never, never, never, 0, never, never, never, never],
        [never] * 9,
        [never, never, never, never, 1, never, never, never, 2],
    ]
    assert [never_filled(np.dtype(kind)) for kind in (np.uint8, np.uint16)] == [255, 65_535]
    planes = np.zeros((1, 2, 3, 3), np.uint8)
    planes[0, 0, 0, 0] = planes[0, 1, 2, 2] = 1
    for move, number in ((3, 2), (NO_MOVE, never), (8, never)):
        (row,) = boards_to_fill(pack_boards(planes), np.array([move], np.uint16), 3).tolist()
        assert row == [0, never, never, number, never, never, never, never, 1]
