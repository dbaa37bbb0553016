"""Tests of ``hexdata.fill``: fill rows against replayed games, packed boards and symmetries."""

from __future__ import annotations

import itertools
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
    fill_to_packed,
    fill_to_policy,
    fill_to_stones,
    games_to_fill,
    never_filled,
    transform_fill,
)
from hexdata.schema import NO_MOVE

Array = npt.NDArray[Any]

SIZES = range(MIN_SIZE, MAX_SIZE + 1)


def random_game(rng: np.random.Generator, n: int, length: int | None = None) -> Array:
    """Return the moves of a game of random length, or of the given one."""
    count = int(rng.integers(0, n * n + 1)) if length is None else length
    return rng.permutation(n * n)[:count].astype(np.uint16)


def games_of(n: int) -> list[tuple[Array, int]]:
    """Return games with the player who began: empty games, full boards and random lengths."""
    rng = np.random.default_rng(n)
    lengths = [0, 0, 1, 1, n * n, n * n, n * n - 1, *[None] * 5]
    return [(random_game(rng, n, length), int(rng.integers(2))) for length in lengths] + [
        (random_game(rng, n), first_player) for first_player in (0, 1)
    ]


def fill_of(games: list[tuple[Array, int]], n: int) -> Array:
    return games_to_fill(
        np.concatenate([moves for moves, _ in games]),
        np.array([len(moves) for moves, _ in games]),
        np.array([first_player for _, first_player in games], np.uint8),
        n,
    )


def positions_of(moves: Array, first_player: int, row: Array) -> tuple[Array, Array, Array]:
    """Return the repeated fill row, the ply of each position of a game, and the next moves."""
    plies = (np.arange(len(moves) + 1) + first_player).astype(row.dtype)
    return np.tile(row, (len(plies), 1)), plies, np.append(moves, np.uint16(NO_MOVE))


@pytest.mark.parametrize("n", SIZES)
def test_every_position_of_a_game_follows_from_its_fill_row(n: int) -> None:
    games = games_of(n)
    fill = fill_of(games, n)
    assert fill.dtype == fill_dtype(n) == (np.uint8 if n <= 15 else np.uint16)
    assert fill.shape == (len(games), n * n)
    for (moves, first_player), row in zip(games, fill, strict=True):
        rows, plies, next_moves = positions_of(moves, first_player, row)
        stones = fill_to_stones(rows, plies)
        assert stones.dtype == np.uint8
        assert np.array_equal(stones.reshape(-1, 2, n, n), replay(moves, n, first_player))
        found = fill_to_move(rows, plies)
        assert found.dtype == np.uint16
        assert np.array_equal(found, next_moves)
        policy = np.zeros((len(rows), n * n), np.float32)
        policy[np.arange(len(moves)), moves] = 1
        assert fill_to_policy(rows, plies).tobytes() == policy.tobytes()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 1100])
def test_positions_of_games_are_packed(n: int, count: int) -> None:
    """Positions are packed in groups of 512; any order and repetition are allowed."""
    games, rng = games_of(n), np.random.default_rng([n, count])
    boards = [pack_boards(replay(moves, n, first_player)) for moves, first_player in games]
    chosen = rng.integers(0, len(games), count)
    plies = np.array([rng.integers(0, len(boards[game])) for game in chosen], np.int64)
    first_players = np.array([first_player for _, first_player in games])
    packed = fill_to_packed(fill_of(games, n), chosen, plies + first_players[chosen])
    assert (packed.dtype, packed.shape) == (np.uint8, (count, boards[0].shape[1]))
    for row, game, ply in zip(packed, chosen, plies, strict=True):
        assert np.array_equal(row, boards[game][ply])


def test_a_fill_row_has_the_plies_of_the_game() -> None:
    fill = games_to_fill(np.array([4, 0, 4, 8]), np.array([2, 0, 2]), np.array([0, 0, 1], np.uint8), 3)
    never = 255
    assert fill.tolist() == [
        [1, never, never, never, 0, never, never, never, never],
        [never] * 9,
        [never, never, never, never, 1, never, never, never, 2],
    ]
    assert [never_filled(np.dtype(kind)) for kind in (np.uint8, np.uint16)] == [255, 65_535]


def test_the_last_ply_of_a_repeated_cell_remains() -> None:
    fill = games_to_fill(np.array([4, 0, 4]), np.array([3]), np.array([0]), 3)
    assert fill[0, 4] == 2
    assert np.count_nonzero(fill != 255) == 2


def test_any_number_of_games_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Games are converted in groups, of which the last one may be shorter."""
    rng = np.random.default_rng(1)
    games = [(random_game(rng, 5), int(rng.integers(2))) for _ in range(23)]
    whole = fill_of(games, 5)
    for size in (1, 4, 22, 23, 24):
        monkeypatch.setattr("hexdata.fill._GAMES_AT_ONCE", size)
        assert np.array_equal(fill_of(games, 5), whole)
    empty = games_to_fill(np.empty(0, np.uint16), np.empty(0, np.int64), np.empty(0, np.uint8), 5)
    assert (empty.dtype, empty.shape) == (np.uint8, (0, 25))


def test_stones_can_be_written_to_an_array() -> None:
    fill = fill_of(games_of(6), 6)
    ply = np.full(len(fill), 7, fill.dtype)
    out = np.full((len(fill), 2, 36), 9, np.uint8)
    assert fill_to_stones(fill, ply, out) is out
    assert np.array_equal(out, fill_to_stones(fill, ply))


@pytest.mark.parametrize("n", SIZES)
def test_plies_of_full_boards_stay_below_the_never_value(n: int) -> None:
    """Also in a game that red began, and in its reflection."""
    moves = random_game(np.random.default_rng(n), n, n * n)
    fill = fill_of([(moves, 1)], n)
    ply = np.array([n * n + 1], fill.dtype)
    image, image_ply = transform_fill(fill, ply, np.array([2], np.uint8), n)
    assert int(image.max()) == n * n + 1 < never_filled(fill.dtype)
    assert int(image_ply[0]) == n * n + 2
    assert fill_to_stones(image, image_ply).sum() == n * n
    assert fill_to_move(image, image_ply)[0] == NO_MOVE


# --- single positions -----------------------------------------------------------------------------------


def random_positions(n: int, count: int = 60) -> tuple[Array, Array]:
    """Return packed boards with any stones, and moves on free and occupied cells, or none."""
    rng = np.random.default_rng(100 + n)
    cells = rng.integers(0, 3, (count, n, n))
    cells[0], cells[1], cells[2] = 0, 1, 2
    moves = rng.integers(0, n * n, count).astype(np.uint16)
    moves[rng.integers(0, 3, count) == 0] = NO_MOVE
    return pack_boards(np.stack([cells == 1, cells == 2], axis=1)), moves


@pytest.mark.parametrize("n", SIZES)
def test_single_positions_have_fill_rows(n: int) -> None:
    packed, moves = random_positions(n)
    fill = boards_to_fill(packed, moves, n)
    assert (fill.dtype, fill.shape) == (fill_dtype(n), (len(packed), n * n))
    ply = np.full(len(fill), POSITION_PLY, fill.dtype)
    planes = unpack_boards(packed, n, np.uint8)
    assert np.array_equal(fill_to_stones(fill, ply).reshape(planes.shape), planes)
    stones = planes.any(axis=1).reshape(len(fill), -1)
    for row, move in enumerate(moves):
        is_free = move != NO_MOVE and not stones[row, move]
        assert fill_to_move(fill, ply)[row] == (move if is_free else NO_MOVE)
        assert fill_to_policy(fill, ply)[row].sum() == is_free


def test_the_fill_row_of_a_position_has_four_numbers() -> None:
    planes = np.zeros((1, 2, 3, 3), np.uint8)
    planes[0, 0, 0, 0] = planes[0, 1, 2, 2] = 1
    never = 255
    for move, last in ((3, [0, never, never, 2]), (NO_MOVE, [0, never, never, never])):
        (row,) = boards_to_fill(pack_boards(planes), np.array([move], np.uint16), 3).tolist()
        assert row == [*last, never, never, never, never, 1]
    (row,) = boards_to_fill(pack_boards(planes), np.array([8], np.uint16), 3).tolist()
    assert row == [0, *[never] * 7, 1]  # the move on an occupied cell is left out


def test_no_positions_have_no_rows() -> None:
    fill = boards_to_fill(np.empty((0, 13), np.uint8), np.empty(0, np.uint16), 7)
    ply = np.empty(0, fill.dtype)
    assert (fill.dtype, fill.shape) == (np.uint8, (0, 49))
    assert fill_to_stones(fill, ply).shape == (0, 2, 49)
    assert fill_to_move(fill, ply).shape == (0,)
    assert fill_to_policy(fill, ply).shape == (0, 49)
    images, plies = transform_fill(fill, ply, np.empty(0, np.uint8), 7)
    assert (images.shape, plies.shape) == ((0, 49), (0,))


# --- symmetries -----------------------------------------------------------------------------------------


def rows_and_planes(n: int) -> tuple[Array, Array, Array, Array]:
    """Return fill rows of positions of games and of single positions, their plies, moves and planes."""
    found = []
    games = games_of(n)[-4:]
    for (moves, first_player), row in zip(games, fill_of(games, n), strict=True):
        rows, plies, next_moves = positions_of(moves, first_player, row)
        chosen = np.unique(np.linspace(0, len(moves), 8).astype(int))
        planes = replay(moves, n, first_player)
        found.append((rows[chosen], plies[chosen], next_moves[chosen], planes[chosen]))
    packed, moves = random_positions(n, 12)
    planes = unpack_boards(packed, n, np.uint8)
    free = moves != NO_MOVE
    free[free] = ~planes.any(axis=1).reshape(len(moves), -1)[np.flatnonzero(free), moves[free]]
    moves = np.where(free, moves, NO_MOVE).astype(np.uint16)
    fill = boards_to_fill(packed, moves, n)
    found.append((fill, np.full(len(fill), POSITION_PLY, fill.dtype), moves, planes))
    fills, plies, all_moves, all_planes = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return fills, plies, all_moves, all_planes


@pytest.mark.parametrize("n", SIZES)
def test_symmetries_of_fill_rows_are_those_of_boards(n: int) -> None:
    """One symmetry for all rows, and another one for each row."""
    fill, ply, moves, planes = rows_and_planes(n)
    before = fill.copy(), ply.copy()
    mixed = np.random.default_rng(n).integers(0, 4, len(fill)).astype(np.uint8)
    for symmetries in (*(np.full(len(fill), each, np.uint8) for each in SYMMETRIES), mixed):
        image, image_ply = transform_fill(fill, ply, symmetries, n)
        assert (image.dtype, image_ply.dtype) == (fill.dtype, ply.dtype)
        stones = fill_to_stones(image, image_ply).reshape(planes.shape)
        found = fill_to_move(image, image_ply)
        for each in SYMMETRIES:
            rows = np.flatnonzero(symmetries == each)
            assert np.array_equal(stones[rows], transform_planes(planes[rows], each))
            has_move = rows[moves[rows] != NO_MOVE]
            assert np.array_equal(found[has_move], transform_moves(moves[has_move], n, each))
            assert (found[np.setdiff1d(rows, has_move)] == NO_MOVE).all()
            policy = fill_to_policy(fill[rows], ply[rows])[:, symmetry_table(n)[each]]
            assert fill_to_policy(image[rows], image_ply[rows]).tobytes() == policy.tobytes()
    assert np.array_equal(fill, before[0])
    assert np.array_equal(ply, before[1])


@pytest.mark.parametrize("n", [3, 4, 13, 15, 16, 26, 32])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(range(4), repeat=2)))
def test_symmetries_can_be_composed(n: int, first: int, second: int) -> None:
    """Two reflections add two to each ply, which gives the same stones, moves and policies."""
    fill, ply, _, _ = rows_and_planes(n)

    def transformed(rows: Array, plies: Array, symmetry: int) -> tuple[Array, Array]:
        return transform_fill(rows, plies, np.full(len(rows), symmetry, np.uint8), n)

    twice = transformed(*transformed(fill, ply, first), second)
    once = transformed(fill, ply, first ^ second)
    for function in (fill_to_stones, fill_to_move, fill_to_policy):
        assert np.array_equal(function(*twice), function(*once))
