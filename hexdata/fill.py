"""Fill rows: a game, and every position of it, as the ply at which each cell is filled.

The fill row of a game has one number for each cell: the ply at which a stone is placed there, or the never
value of its dtype (255 for uint8, 65535 for uint16) if none is. The position at ply p of the game is then one
comparison:

- a cell is occupied if its number is below p;
- an occupied cell is blue if its number is even, and red if it is odd;
- the next move is the cell whose number equals p.

In a game that red began, every number and p itself are one higher, so that the rule for colours holds. A
single position without a game has a fill row, too: 0 on blue cells, 1 on red cells and 2 on its next move,
with p = 2.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.arrays import NUMPY, Arrays
from hexdata.board import Symmetry
from hexdata.schema import NO_MOVE

__all__ = [
    "POSITION_PLY",
    "FillArray",
    "boards_to_fill",
    "fill_dtype",
    "fill_to_move",
    "fill_to_packed",
    "fill_to_policy",
    "fill_to_stones",
    "games_to_fill",
    "never_filled",
    "transform_fill",
]

FillArray = npt.NDArray[Any]
"""Fill rows (N, n·n), or the plies (N,) that belong to them, in the dtype of :func:`fill_dtype`."""

_LARGEST_UINT8_BOARD: Final = 15
"""The largest board whose plies, with the additions for red and for a reflection, stay below 255."""
_GAMES_AT_ONCE: Final = 4096
"""Number of games that are converted together, which limits the memory for their plies."""
_ROWS_AT_ONCE: Final = 512
"""Number of rows whose comparisons fit into the CPU cache."""
POSITION_PLY: Final = 2
"""Ply that belongs to the fill row of a single position."""


def fill_dtype(n: int) -> np.dtype[Any]:
    """Return the dtype of fill rows for board size n: uint8 up to 15, uint16 above."""
    return np.dtype(np.uint8 if n <= _LARGEST_UINT8_BOARD else np.uint16)


def never_filled(dtype: np.dtype[Any]) -> int:
    """Return the number of a cell that is never filled: 255 for uint8, 65535 for uint16."""
    return int(np.iinfo(dtype).max)


def games_to_fill(
    moves: npt.NDArray[Any], lengths: npt.NDArray[Any], first_players: npt.NDArray[Any], n: int
) -> FillArray:
    """Return the fill rows of games.

    Args:
        moves: Concatenated cell indices of all games (M,), below n·n. If a cell repeats within a game, the
            last of its plies remains.
        lengths: Number of moves of each game (G,), with sum M.
        first_players: Player of the first move of each game (G,): 0 blue, 1 red.
        n: Board size.

    Returns:
        (G, n·n) of :func:`fill_dtype`.
    """
    dtype, cells = fill_dtype(n), n * n
    fill = np.full((len(lengths), cells), never_filled(dtype), dtype)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    for first in range(0, len(lengths), _GAMES_AT_ONCE):
        own = slice(first, first + _GAMES_AT_ONCE)
        start, stop = starts[own][0], starts[own][-1] + lengths[own][-1]
        # The number of the ply in its game, and one more in games that red began.
        plies = np.arange(start, stop) - np.repeat(starts[own] - first_players[own], lengths[own])
        row_starts = np.repeat(np.arange(first, first + len(lengths[own])) * cells, lengths[own])
        fill.reshape(-1)[row_starts + moves[start:stop]] = plies
    return fill


def boards_to_fill(packed: Any, moves: Any, n: int, ops: Arrays = NUMPY) -> Any:
    """Return the fill rows of single positions; all have the ply ``POSITION_PLY``.

    Args:
        packed: Packed boards, uint8 (N, ceil(2·n·n / 8)).
        moves: Cell index of the next move (N,), 65535 for none. A move on an occupied cell is left out.
        n: Board size.
        ops: Operations of the library of the arrays (default NumPy).

    Returns:
        (N, n·n) of :func:`fill_dtype`.
    """
    dtype = fill_dtype(n)
    never = never_filled(dtype)
    stones = ops.cast(ops.unpack(packed, 2 * n * n), dtype.name)
    blue, red = stones[:, : n * n], stones[:, n * n :]
    # 0 on blue cells, 1 on red cells and the never value on others, with operations that all libraries have.
    fill = never - blue * never - red * (never - 1)
    # Without a move on a free cell, a cell is set to the number that it has.
    rows, has_move = ops.arange(0, len(fill)), moves != NO_MOVE
    cells = ops.cast(ops.xp.where(has_move, moves, 0), "int64")
    found = fill[rows, cells]
    fill[rows, cells] = ops.xp.where(has_move & (found == never), POSITION_PLY, found)
    return fill


def fill_to_stones(fill: Any, ply: Any, out: Any = None, ops: Arrays = NUMPY) -> Any:
    """Return the stones of positions.

    Args:
        fill: Fill rows (N, cells).
        ply: Ply of each position (N,), of the same dtype.
        out: uint8 (N, 2, cells) to write to (default None: a new array).
        ops: Operations of the library of the arrays (default NumPy).

    Returns:
        uint8 (N, 2, cells), 0 or 1: blue stones, then red stones.
    """
    stones = ops.empty((len(fill), 2, fill.shape[1]), ops.xp.uint8) if out is None else out
    occupied = ops.cast(fill < ply[:, None], "uint8")
    # Contiguous arrays, since operations on rows of planes take twice the time of copies. The lowest bit of a
    # number remains in uint8.
    red = occupied & ops.cast(fill, "uint8")
    stones[:, 1] = red
    occupied ^= red
    stones[:, 0] = occupied
    return stones


def fill_to_packed(
    fill: FillArray, games: npt.NDArray[Any], plies: npt.NDArray[Any]
) -> npt.NDArray[np.uint8]:
    """Return the packed boards of positions of games, as ``board.pack_boards`` returns them.

    Args:
        fill: Fill rows of G games (G, cells).
        games: Index of the game of each position, int (N,).
        plies: Ply of each position, int (N,).

    Returns:
        uint8 (N, ceil(2·cells / 8)).
    """
    cells = fill.shape[1]
    packed = np.empty((len(games), (2 * cells + 7) // 8), np.uint8)
    # Reused for all rows, so that it stays in the cache.
    stones = np.empty((_ROWS_AT_ONCE, 2, cells), np.uint8)
    for first in range(0, len(games), _ROWS_AT_ONCE):
        own = slice(first, first + _ROWS_AT_ONCE)
        rows = fill.take(games[own], axis=0)
        found = fill_to_stones(rows, plies[own].astype(fill.dtype), stones[: len(rows)])
        packed[own] = np.packbits(found.reshape(len(rows), 2 * cells), axis=1)
    return packed


def fill_to_move(fill: Any, ply: Any, ops: Arrays = NUMPY) -> Any:
    """Return the next move of positions: uint16 (N,), 65535 for none."""
    # At most one cell has this number. ``argmax`` is 0 without one, so ``any`` decides.
    is_next = fill == ply[:, None]
    move = ops.cast(ops.xp.argmax(ops.cast(is_next, "uint8"), 1), "uint16")
    return ops.xp.where(ops.xp.any(is_next, 1), move, ops.cast(ops.full((1,), NO_MOVE, "int64"), "uint16"))


def fill_to_policy(fill: Any, ply: Any, ops: Arrays = NUMPY) -> Any:
    """Return one-hot policies of the next moves: float32 (N, cells), all zeros where there is none."""
    return ops.cast(fill == ply[:, None], "float32")


def transform_fill(fill: Any, ply: Any, symmetries: Any, n: int, ops: Arrays = NUMPY) -> tuple[Any, Any]:
    """Return the images of fill rows and their plies under one symmetry for each row.

    Args:
        fill: Fill rows (N, n·n).
        ply: Ply of each row (N,).
        symmetries: Values of ``board.Symmetry`` (N,). Reflections also swap the colours: they add one to each
            ply.
        n: Board size.
        ops: Operations of the library of the arrays (default NumPy).
    """
    swapped = symmetries >= Symmetry.LONG_DIAGONAL
    fill = ops.image(fill, symmetries, n)
    # The never value stays as it is: 255 + 1 would be 0, a blue stone of the first ply.
    return fill + (swapped[:, None] & (fill != never_filled(fill_dtype(n)))), ply + swapped
