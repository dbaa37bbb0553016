"""The Hex board: cells, TRMPH notation, packed boards, symmetries and winners.

Blue moves first and connects top to bottom (row 1 to row n); red connects left to right (column a to the last
column). The index of a cell is row * n + column: ``a1`` is 0, ``b1`` is 1. The columns after ``z`` are
``aa``, ``ab`` and so on.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.errors import FormatError, Reason

__all__ = [
    "BLUE",
    "MAX_SIZE",
    "MIN_SIZE",
    "PASS",
    "RED",
    "SYMMETRIES",
    "Symmetry",
    "TrmphLine",
    "cast_cells",
    "cell_index",
    "cell_name",
    "check_board_size",
    "check_no_repeats",
    "column_name",
    "format_moves",
    "game_hash",
    "game_hashes",
    "pack_boards",
    "parse_moves",
    "player_to_move",
    "replay",
    "replay_packed",
    "split_trmph",
    "swaps_colours",
    "symmetry_table",
    "transform_moves",
    "transform_planes",
    "unpack_boards",
    "winner_of",
]

UInt8Array = npt.NDArray[np.uint8]
UInt16Array = npt.NDArray[np.uint16]
Planes = npt.NDArray[Any]
"""Boards (N, 2, n, n) with cells 0 or 1: the plane of blue stones, then that of red stones."""

MIN_SIZE: Final = 3
MAX_SIZE: Final = 32
"""Limit of ``winner_of``, which stores a row of the board as the bits of a uint32."""

BLUE: Final = 0
RED: Final = 1

PASS: Final = 65535
"""A move that plays on no cell."""


def check_board_size(n: int) -> int:
    """Return ``n`` if the board size is supported.

    Raises:
        FormatError: "board-size", if it is not.
    """
    if not MIN_SIZE <= n <= MAX_SIZE:
        raise FormatError("unsupported board size", Reason.BOARD_SIZE, n, f"{MIN_SIZE} to {MAX_SIZE}")
    return n


# Cells and moves


def column_name(column: int) -> str:
    """Return the name of a column, counted from 0: "a" to "z", then "aa", "ab" and so on."""
    letter = chr(ord("a") + column % 26)
    return letter if column < 26 else column_name(column // 26 - 1) + letter


@functools.cache
def _cell_names(n: int) -> tuple[str, ...]:
    check_board_size(n)
    columns = [column_name(column) for column in range(n)]
    return tuple(f"{column}{row + 1}" for row in range(n) for column in columns)


@functools.cache
def _cell_indices(n: int) -> dict[str, int]:
    return {name: index for index, name in enumerate(_cell_names(n))}


def cell_name(index: int, n: int) -> str:
    """Return the name of the cell with an index, such as "h7".

    Raises:
        FormatError: "trmph-cell", if the board has no such cell.
    """
    if not 0 <= index < check_board_size(n) ** 2:
        raise FormatError("no such cell", Reason.TRMPH_CELL, index, f"0 to {n * n - 1}")
    return _cell_names(n)[index]


def cell_index(name: str, n: int) -> int:
    """Return the index of the cell with a name: row * n + column.

    Raises:
        FormatError: "trmph-cell", if the board has no such cell.
    """
    try:
        return _cell_indices(n)[name]
    except KeyError:
        cells = f"a1 to {_cell_names(n)[-1]}"
        raise FormatError("no such cell", Reason.TRMPH_CELL, repr(name[:40]), cells) from None


def check_no_repeats(moves: npt.NDArray[Any], n: int) -> None:
    """Check that no cell is played twice in a game.

    Args:
        moves: Cell indices (m,).
        n: Board size.

    Raises:
        FormatError: "repeated-move", with the first ply that plays on an occupied cell.
    """
    cells = moves.tolist()
    if len(set(cells)) == len(cells):
        return
    ply = next(ply for ply, cell in enumerate(cells) if cell in cells[:ply])
    fault = f"the move at ply {ply} was already played at ply {cells.index(cells[ply])}"
    raise FormatError(fault, Reason.REPEATED_MOVE, cell_name(cells[ply], n), "an empty cell")


# Two letters, because boards above 26 have the columns aa to af.
_MOVE: Final = re.compile(r"[a-z]{1,2}[0-9]+")


def parse_moves(text: str, n: int) -> UInt16Array:
    """Parse a list of moves such as "a1b12c3".

    Returns:
        Cell indices in the order played, uint16 (m,). Repeated cells are not checked.

    Raises:
        FormatError: "trmph-syntax", if the text is not a sequence of columns each followed by a number;
            "trmph-cell", if a move is not a cell of the board.
    """
    # findall skips what does not match, so the names must add up to the text again.
    names = _MOVE.findall(text)
    if "".join(names) != text:
        raise FormatError("not a list of moves", Reason.TRMPH_SYNTAX, repr(text[:40]), "moves like a1b12c3")
    try:
        return np.array([*map(_cell_indices(n).__getitem__, names)], dtype=np.uint16)
    except KeyError:
        for name in names:
            cell_index(name, n)  # raises the error with the name of the cell
        raise


def format_moves(moves: Iterable[int] | npt.NDArray[Any], n: int) -> str:
    """Return cell indices as TRMPH text, the inverse of :func:`parse_moves`.

    Raises:
        FormatError: "trmph-cell", if the board has no such cell.
    """
    return "".join(cell_name(int(move), n) for move in moves)


# TRMPH lines

_WINNERS: Final = {"1": BLUE, "b": BLUE, "2": RED, "r": RED}

_LINE: Final = re.compile(
    r"\s*(?:https?://[^\s#]*)?"
    r"#(?P<size>[0-9]{1,3}),(?P<moves>[a-z0-9]*)"
    r"(?:\s+(?P<winner>[12bBrR]))?"
    # A comment has a blank after its #, so that a second board on the line is not read as one. The possessive
    # quantifier prevents backtracking.
    r"(?:\s+#(?:[ \t][^\r]*+)?)?\s*",
)


class TrmphLine(NamedTuple):
    """The parts of a TRMPH line. The moves are not parsed.

    Attributes:
        board_size: Board size n.
        moves: Text of the moves.
        winner: ``BLUE``, ``RED``, or None if the line has none.
    """

    board_size: int
    moves: str
    winner: int | None = None


def split_trmph(text: str) -> TrmphLine:
    """Split a line such as ``#13,a1b2c3 b`` or ``http://www.trmph.com/hex/board#13,a1b2c3 1 # comment``.

    Raises:
        FormatError: "trmph-syntax", if it is not a TRMPH line; "board-size", if the size is out of range.
    """
    match = _LINE.fullmatch(text)
    if match is None:
        found = repr(text.strip()[:60])
        raise FormatError("not a TRMPH line", Reason.TRMPH_SYNTAX, found, "#13,a1b2c3 b")
    size = check_board_size(int(match["size"]))
    return TrmphLine(size, match["moves"], _WINNERS.get((match["winner"] or "").lower()))


# Boards


def pack_boards(planes: Planes) -> UInt8Array:
    """Pack boards to one bit per cell with ``np.packbits`` in C order: the blue plane, then the red plane.

    Args:
        planes: Boards (N, 2, n, n) of any numeric or bool dtype; 0 is empty, other values are stones.

    Returns:
        uint8 (N, ceil(2·n·n / 8)); unused bits at the end are 0.
    """
    stones = np.asarray(planes, dtype=bool).reshape(len(planes), 2 * planes.shape[-1] ** 2)
    return np.packbits(stones, axis=1)


def unpack_boards(packed: UInt8Array, n: int, dtype: npt.DTypeLike = np.float32) -> Planes:
    """Unpack boards, the inverse of :func:`pack_boards`.

    Args:
        packed: uint8 (N, ceil(2·n·n / 8)).
        n: Board size.
        dtype: Dtype of the result. Default float32.

    Returns:
        (N, 2, n, n) of that dtype, cells 0 or 1, contiguous and writable.
    """
    bits = np.unpackbits(packed, axis=1, count=2 * n * n)
    return cast_cells(bits, dtype).reshape(len(packed), 2, n, n)


_HALF_ONE: Final = np.float16(1).view(np.uint16)


def cast_cells(cells: UInt8Array, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return uint8 cells 0 or 1 of any shape as ``dtype``; without a copy if ``dtype`` is uint8.

    Values of float16 are written as bit patterns, because NumPy's conversion is 20 times slower.
    """
    if np.dtype(dtype) == np.float16:
        halves = cells.astype(np.uint16)
        halves *= _HALF_ONE
        return halves.view(np.float16)
    return cells.astype(dtype, copy=False)


def player_to_move(blue: npt.ArrayLike, red: npt.ArrayLike) -> UInt8Array:
    """Return the player to move, given the numbers of stones of games that blue began.

    Red is to move if blue has more stones, otherwise blue. Illegal counts follow the same rule.

    Returns:
        uint8 of the common shape: ``BLUE`` or ``RED``.
    """
    return np.asarray(np.greater(blue, red), dtype=np.uint8)


def replay(moves: npt.ArrayLike, n: int, first_player: int = BLUE) -> UInt8Array:
    """Return all positions of a game, starting with the empty board.

    Args:
        moves: Cell indices (m,) in the order played. The players alternate.
        n: Board size.
        first_player: Player of the first move. Default ``BLUE``.

    Returns:
        uint8 (m + 1, 2, n, n).

    Raises:
        FormatError: "repeated-move", if a cell is played twice.
    """
    cells = np.asarray(moves, dtype=np.uint16)
    check_no_repeats(cells, n)
    packed = replay_packed(cells, np.array([len(cells)]), n, first_player)
    planes: UInt8Array = unpack_boards(packed, n, np.uint8)
    return planes


def replay_packed(
    moves: npt.NDArray[Any], lengths: npt.NDArray[Any], n: int, first_player: npt.ArrayLike = BLUE
) -> UInt8Array:
    """Return all positions of several games, packed: game by game, each starting with the empty board.

    A row is first the difference to the row before: the stone played, or, at the start of a game, all stones
    of the previous game. A cumulative xor then gives the boards. Rows are padded to 64-bit words for speed.

    Args:
        moves: Concatenated cell indices of all games (M,); ``PASS`` changes no cell. The caller checks that
            no cell repeats in a game.
        lengths: Number of moves of each game (G,), with sum M.
        n: Board size.
        first_player: Player of the first move of every game, or of each game (G,). Default ``BLUE``.

    Returns:
        uint8 (M + G, ceil(2·n·n / 8)), as :func:`pack_boards` gives.
    """
    # A game of m moves has m + 1 rows, so game g begins g rows after its first move.
    width = (2 * n * n + 7) // 8
    starts = np.concatenate(([0], np.cumsum(lengths[:-1] + 1, dtype=np.int64)))[: len(lengths)]
    plies = np.arange(len(moves)) - np.repeat(starts - np.arange(len(lengths)), lengths)
    first = np.repeat(np.broadcast_to(np.asarray(first_player, dtype=np.int64), len(lengths)), lengths)
    bits = moves.astype(np.int64) + n * n * ((plies + first) & 1)
    rows = plies + np.repeat(starts, lengths) + 1

    change = np.zeros((len(moves) + len(lengths), -(-width // 8)), dtype=np.uint64)
    # The row of a pass stays zero, so the xor repeats the board before it.
    if (moves == PASS).any():
        rows, bits = rows[moves != PASS], bits[moves != PASS]
    # Each row has one stone, so no byte is assigned twice. packbits stores the first cell in the highest bit.
    change.view(np.uint8)[rows, bits >> 3] = np.uint8(128) >> (bits & 7).astype(np.uint8)
    # The xor of all rows of a game is its final board, which the first row of the next game removes.
    if len(starts) > 1:
        finals = np.bitwise_xor.reduceat(change, starts, axis=0)
        change[starts[1:]] = finals[:-1]
    boards = np.bitwise_xor.accumulate(change, axis=0)
    return np.ascontiguousarray(boards.view(np.uint8)[:, :width])


def winner_of(planes: Planes) -> npt.NDArray[np.int8]:
    """Return the player who has connected their edges on each board.

    Args:
        planes: Boards (N, 2, n, n) with cells 0 or 1.

    Returns:
        int8 (N,): ``BLUE``, ``RED``, or -1 for neither. If both connect, which needs two stones on one cell,
        the result is ``BLUE``.
    """
    # Reflection in the long diagonal maps left-right to top-bottom and preserves neighbours.
    blue, red = np.split(_connects(np.concatenate([planes[:, BLUE], planes[:, RED].swapaxes(1, 2)])), 2)
    return np.where(blue, np.int8(BLUE), np.where(red, np.int8(RED), np.int8(-1)))


_FLOOD_STEPS: Final = 4
"""Steps of a flood fill between two searches for the boards whose fill has ended."""


def _connects(stones: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return whether each board (N, n, n) has a chain from the top row to the bottom row: bool (N,).

    Flood fill from the top row on all boards at once. A row is stored as the bits of a uint32. The
    neighbours of (r, c) are (r, c ± 1), (r ± 1, c), (r - 1, c + 1) and (r + 1, c - 1).
    """
    connected = np.zeros(len(stones), dtype=bool)
    columns = np.uint32(1) << np.arange(stones.shape[2], dtype=np.uint32)
    rows = (stones != 0) @ columns
    reached = np.zeros_like(rows)
    reached[:, 0] = rows[:, 0]
    boards = np.arange(len(stones))
    while len(boards):
        before = reached
        for _ in range(_FLOOD_STEPS):
            flood = reached | reached << 1 | reached >> 1
            flood[:, 1:] |= reached[:, :-1] | reached[:, :-1] >> 1
            flood[:, :-1] |= reached[:, 1:] | reached[:, 1:] << 1
            reached = flood & rows
        through = reached[:, -1] != 0
        connected[boards[through]] = True
        going = ~through & (reached != before).any(axis=1)
        # Most boards end early, so only those whose fill still grows are kept.
        boards, rows, reached = boards[going], rows[going], reached[going]
    return connected


# Symmetries


class Symmetry(IntEnum):
    """Symmetries of the board. Their composition is the xor of their numbers.

    Reflections map top-bottom to left-right, so they also swap the colours of planes, winner (value becomes
    1 - value) and player to move.
    """

    IDENTITY = 0
    ROTATION = 1
    """Rotation by 180°: (r, c) → (n - 1 - r, n - 1 - c)."""
    LONG_DIAGONAL = 2
    """Reflection: (r, c) → (c, r)."""
    SHORT_DIAGONAL = 3
    """Reflection: (r, c) → (n - 1 - c, n - 1 - r)."""


SYMMETRIES: Final = tuple(Symmetry)


def swaps_colours(symmetry: Symmetry) -> bool:
    """Return whether a symmetry swaps the colours."""
    return symmetry >= Symmetry.LONG_DIAGONAL


@functools.cache
def symmetry_table(n: int) -> UInt16Array:
    """Return the cell index to which each symmetry maps each cell: uint16 (4, n·n), read-only.

    Every symmetry is its own inverse, so ``policy[..., table[s]]`` is the image of a policy.
    """
    cells = np.arange(check_board_size(n) ** 2, dtype=np.uint16).reshape(n, n)
    images = [cells, cells[::-1, ::-1], cells.T, cells[::-1, ::-1].T]
    table = np.stack(images).reshape(4, n * n)
    # The cache returns the same array to all callers.
    table.flags.writeable = False
    return table


def transform_moves(moves: npt.ArrayLike, n: int, symmetry: Symmetry) -> UInt16Array:
    """Return the images of cell indices, uint16 of the same shape."""
    images: UInt16Array = symmetry_table(n)[symmetry, np.asarray(moves, dtype=np.intp)]
    return images


def transform_planes(planes: Planes, symmetry: Symmetry) -> Planes:
    """Apply a symmetry to boards (..., 2, n, n). Reflections also swap the colours.

    The result is a view of the same memory; copy it before writing to it.
    """
    if symmetry & Symmetry.ROTATION:
        planes = planes[..., ::-1, ::-1]
    if swaps_colours(symmetry):
        planes = planes[..., ::-1, :, :].swapaxes(-1, -2)
    return planes


def _canonical(
    moves: npt.NDArray[np.intp], lengths: npt.NDArray[Any], n: int, first_player: npt.NDArray[Any]
) -> UInt16Array:
    """Return the canonical moves of G games, which are equal for a game and its images under the symmetries.

    In two of the four images blue moves first: a game that blue began and its rotation, or the two
    reflections of a game that red began. The canonical form is the one with the lexicographically smaller
    moves.

    Args:
        moves: Cell indices of all games, (sum of lengths,).
        lengths: Number of moves of each game, (G,).
        n: Board size.
        first_player: Player who began each game, (G,).

    Returns:
        Cell indices of all games, concatenated: uint16 (sum of lengths,).
    """
    table = symmetry_table(n)
    red = np.repeat(first_player == RED, lengths)
    one = np.where(red, table[Symmetry.LONG_DIAGONAL, moves], moves.astype(np.uint16))
    other = np.where(red, table[Symmetry.SHORT_DIAGONAL, moves], table[Symmetry.ROTATION, moves])
    game = np.repeat(np.arange(len(lengths)), lengths)
    apart = np.flatnonzero(one != other)  # not always from ply 0 on, because the centre is its own image
    games, first = np.unique(game[apart], return_index=True)
    # Games that equal their image, such as the empty one, keep `one`.
    smaller = np.ones(len(lengths), dtype=bool)
    smaller[games] = one[apart[first]] < other[apart[first]]
    canonical: UInt16Array = np.where(smaller[game], one, other)
    return canonical


def game_hash(moves: npt.ArrayLike, n: int, first_player: int = BLUE) -> bytes:
    """Return a 16-byte hash that is equal for a game and its images under the four symmetries.

    It is the first half of SHA-256 over the text ``hexdata game <n>``, a space, and the canonical moves as
    little-endian uint16. Every store contains it and the split depends on it, so it must not change.
    """
    cells = np.asarray(moves, dtype=np.intp)
    return game_hashes(cells, np.array([len(cells)]), n, np.array([first_player]))[0]


def game_hashes(
    moves: npt.NDArray[Any], lengths: npt.NDArray[Any], n: int, first_player: npt.NDArray[Any]
) -> list[bytes]:
    """Return the :func:`game_hash` of each of G games.

    Args:
        moves: Cell indices of all games, one game after the other, (sum of lengths,).
        lengths: Number of moves of each game, (G,).
        n: Board size.
        first_player: Player who began each game, (G,).
    """
    # Little-endian on every machine, because the hash is stored.
    canonical = _canonical(moves.astype(np.intp), lengths, n, first_player).astype("<u2", copy=False)
    prefix, data = b"hexdata game %d " % n, canonical.tobytes()
    stops = (2 * np.cumsum(lengths)).tolist()
    bounds = zip([0, *stops], stops, strict=False)
    return [hashlib.sha256(prefix + data[start:stop]).digest()[:16] for start, stop in bounds]
