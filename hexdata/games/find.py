"""Assignment of the positions of a source to games, by metadata or by boards.

A source is processed in windows that end where a game begins, so memory does not grow with the source.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import Symmetry, game_hashes, pack_boards, transform_planes, unpack_boards

__all__ = [
    "EVIDENCE",
    "GAMES",
    "ROWS",
    "Grouping",
    "binary_matrix",
    "column",
    "find_games",
    "identity_hash",
    "played_moves",
    "position_hash",
    "with_columns",
]

Grouping = Literal["boards", "ids", "runs"]
"""Way to find the games of a source: by boards (tuples have no metadata), by the ids in the metadata, or by
runs of plies (metadata without ids)."""

Array = npt.NDArray[Any]
Segments = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""Bounds of contiguous segments, (S + 1,), and whether each segment is a game, (S,)."""

WINDOW_ROWS: Final = 32_768

EVIDENCE: Final = (
    *("board", "move", "value", "file_idx", "line_idx", "origin"),
    *("position_in_game", "total_positions", "winner", "end_reason", "swap"),
)
"""Columns of ``raw_schema`` that are used to find games."""

_TEXTS: Final = ("origin", "end_reason", "swap")

ROWS: Final = pa.schema(
    [
        ("game", pa.int32()),
        ("ply", pa.uint16()),
        ("total", pa.uint16()),
        ("player", pa.uint8()),
        ("move", pa.uint16()),
    ]
)
"""Schema with one row per position: its game, counted from 0 within the source, the ply, the number of
positions of the game, and, according to the boards of the game, the player to move and the move that was
played. Null if unknown."""

GAMES: Final = pa.schema(
    [
        ("file_idx", pa.int32()),
        ("line_idx", pa.int32()),
        ("origin", pa.string()),
        ("winner", pa.uint8()),
        ("end_reason", pa.string()),
        ("swap", pa.string()),
        ("value", pa.float64()),
        ("total_positions", pa.uint16()),
        ("positions", pa.int64()),
        ("first_player", pa.uint8()),
        ("moves", pa.list_(pa.uint16())),
        ("game_hash", pa.binary(16)),
        ("provenance", pa.string()),
    ]
)
"""Schema with one row per game. ``value`` is that of its first position, in the convention of the source.
``end_reason`` and ``swap`` are those that the source states."""


@dataclass(frozen=True)
class SourceWindow:
    """Consecutive positions of a source as NumPy columns; -1 represents null."""

    board_size: int
    boards: npt.NDArray[np.uint8]
    move: Array
    ply: Array
    total: Array
    file_idx: Array
    line_idx: Array
    origin: Array
    winner: Array
    value: Array
    texts: pa.Table
    """The columns ``_TEXTS``."""

    @classmethod
    def of(cls, table: pa.Table, board_size: int) -> SourceWindow:
        """Return the positions of a table with the columns ``EVIDENCE``."""
        origins = table.column("origin").combine_chunks().dictionary_encode()
        return cls(
            board_size,
            binary_matrix(table.column("board")),
            column(table, "move", -1),
            column(table, "position_in_game", -1),
            column(table, "total_positions", -1),
            column(table, "file_idx", -1),
            column(table, "line_idx", -1),
            origins.indices.fill_null(-1).to_numpy(zero_copy_only=False),
            column(table, "winner", -1),
            column(table, "value", np.nan),
            table.select(_TEXTS),
        )

    def __len__(self) -> int:
        return len(self.boards)


def column(table: pa.Table | pa.RecordBatch, name: str, null: float) -> Array:
    """Return a numeric column as int64 or float64, (N,); nulls are replaced by ``null``."""
    values = table.column(name)
    kind = pa.float64() if pa.types.is_floating(values.type) else pa.int64()
    array: Array = values.cast(kind).fill_null(null).to_numpy()
    return array


def with_columns(batch: pa.RecordBatch, **columns: pa.Array) -> pa.RecordBatch:
    """Return a batch in which these columns have other values, in the type of the batch."""
    for name, values in columns.items():
        index = batch.schema.get_field_index(name)
        field = batch.schema.field(index)
        batch = batch.set_column(index, field, values.cast(field.type))
    return batch


def binary_matrix(boards: pa.ChunkedArray | pa.Array) -> npt.NDArray[np.uint8]:
    """Return a fixed-size binary column as uint8 (N, width), without a copy if it is one chunk."""
    array = boards.combine_chunks() if isinstance(boards, pa.ChunkedArray) else boards
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], boards.type)
    width = array.type.byte_width
    flat = np.frombuffer(array.buffers()[1] or b"", dtype=np.uint8)
    return flat[array.offset * width : (array.offset + len(array)) * width].reshape(-1, width)


def find_games(
    batches: Iterable[pa.RecordBatch], board_size: int, grouping: Grouping
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Find the games of a source.

    Args:
        batches: Columns ``EVIDENCE`` of all positions, in record order.
        board_size: Board size n.
        grouping: Way to find the games.

    Yields:
        Tables of ``ROWS`` and ``GAMES`` for consecutive positions. ``ROWS`` has one row per position.
    """
    segment = _SEGMENTERS[grouping]
    pending: list[pa.RecordBatch] = []
    first_game = 0
    need = WINDOW_ROWS
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        if batch is not None:
            pending.append(batch)
        rows = sum(b.num_rows for b in pending)
        if batch is not None and rows < need:
            continue
        if not rows:
            return
        table = pa.Table.from_batches(pending)
        window = SourceWindow.of(table, board_size)
        bounds, known = segment(window, batch is None)
        done = int(bounds[-1])
        if done:
            positions, games = _describe(window, bounds, known, grouping, first_game)
            first_game += games.num_rows
            yield positions, games
        pending = table.slice(done).to_batches()
        need = WINDOW_ROWS + (rows - done)  # the window grows if a game is longer
        if batch is None:
            return


def _by_boards(window: SourceWindow, last: bool) -> Segments:
    """Split at empty boards, and where no move leads to the next board."""
    empty: npt.NDArray[np.bool_] = np.logical_not(window.boards.any(axis=1))
    movers, _ = played_moves(window.boards, window.move, window.board_size)
    starts = np.flatnonzero(empty | ~np.concatenate(([False], movers >= 0)))
    bounds = np.append(starts, len(window)) if last else starts
    return bounds, empty[bounds[:-1]]


def _by_ids(window: SourceWindow, last: bool) -> Segments:
    """Split where the id changes. Positions without an id belong to no known game."""
    changed = np.ones(len(window), dtype=bool)
    changed[1:] = False
    for ids in (window.file_idx, window.line_idx, window.origin):
        changed[1:] |= ids[1:] != ids[:-1]
    starts = np.flatnonzero(changed)
    bounds = np.append(starts, len(window)) if last else starts
    known: npt.NDArray[np.bool_] = window.line_idx[bounds[:-1]] >= 0
    return bounds, known


def _by_runs(window: SourceWindow, last: bool) -> Segments:
    """Find runs of ``total_positions`` positions whose plies are 0 … total - 1 in any order."""
    bounds, known = [0], []
    start = 0
    while start < len(window):
        stop = start + max(int(window.total[start]), 1)
        if stop > len(window) and not last:
            break
        is_run = _is_run(window, start, stop)
        start = stop if is_run else start + 1
        bounds.append(start)
        known.append(is_run)
    return np.array(bounds, dtype=np.int64), np.array(known, dtype=bool)


def _is_run(window: SourceWindow, start: int, stop: int) -> bool:
    if stop > len(window) or not (window.total[start:stop] == stop - start).all():
        return False
    same_winner = (window.winner[start:stop] == window.winner[start]).all()
    return bool(same_winner and (np.sort(window.ply[start:stop]) == np.arange(stop - start)).all())


_SEGMENTERS: Final[dict[str, Callable[[SourceWindow, bool], Segments]]] = {
    "boards": _by_boards,
    "ids": _by_ids,
    "runs": _by_runs,
}


_FIRST_BIT: Final = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1).argmax(axis=1)
"""Index of the first bit that is set in a byte, counted from the highest one."""


def played_moves(
    boards: npt.NDArray[np.uint8], stated: Array, board_size: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int64]]:
    """Return the player and the cell of the move that leads from each board to the next.

    The boards decide, because a policy of a search need not be that of the move that was played. A stone on
    an occupied cell replaces the other stone, as in the legacy tool. If it has the same colour, the boards
    are equal; then the move is the stated one.

    Args:
        boards: Packed boards (N, width).
        stated: Move that the source states for each board (N,), -1 if none.
        board_size: N.

    Returns:
        int8 (N - 1,) and int64 (N - 1,); both are -1 where no single move leads to the next board.
    """
    cells = board_size * board_size
    player = np.full(max(len(boards) - 1, 0), -1, dtype=np.int8)
    cell = np.full(len(player), -1, dtype=np.int64)
    change = np.zeros((len(player), -(-boards.shape[1] // 8) * 8), dtype=np.uint8)  # whole 64-bit words
    np.bitwise_xor(boards[:-1], boards[1:], out=change[:, : boards.shape[1]])
    changed = np.bitwise_count(change.view(np.uint64)).sum(axis=1, dtype=np.int64)
    rows = np.flatnonzero((changed <= 2) & ((changed > 0) | (stated[: len(player)] >= 0)))
    byte = (change[rows] != 0).argmax(axis=1)
    first = (8 * byte + _FIRST_BIT[change[rows, byte]]) % cells
    move = np.where(changed[rows] > 0, first, stated[rows])
    after = []
    for colour in (0, 1):
        bit = move + colour * cells
        byte, shift = bit >> 3, (7 - (bit & 7)).astype(np.uint8)
        after.append((boards[rows + 1, byte] >> shift & 1).astype(bool))
        changed[rows] -= change[rows, byte] >> shift & 1
    is_move = (changed[rows] == 0) & (after[0] != after[1])
    player[rows[is_move]] = after[1][is_move]
    cell[rows[is_move]] = move[is_move]
    return player, cell


def _describe(
    window: SourceWindow, bounds: Array, known: npt.NDArray[np.bool_], grouping: Grouping, first_game: int
) -> tuple[pa.Table, pa.Table]:
    """Return the tables ``ROWS`` and ``GAMES`` of the segments of a window."""
    rows = int(bounds[-1])
    starts, lengths = bounds[:-1], np.diff(bounds)
    segment = np.repeat(np.arange(len(known)), lengths)
    index_in_segment = np.arange(rows) - starts[segment]
    ply = index_in_segment if grouping == "boards" else window.ply[:rows]
    total = lengths[segment] if grouping == "boards" else window.total[:rows]

    order = np.arange(rows)
    if grouping != "boards":
        order = np.argsort((segment << 17) + ply, kind="stable")  # -1 <= ply < 2^16
    boards = window.boards[order]
    is_last = index_in_segment == (lengths - 1)[segment]
    movers, move = (
        np.append(array, -1) for array in played_moves(boards, window.move[order], window.board_size)
    )
    movers[is_last], move[is_last] = -1, -1
    first, last = order[starts], order[bounds[1:] - 1]
    began = np.where((lengths > 1) & (movers[starts] >= 0), (movers[starts] + ply[first]) & 1, -1)
    expected = (np.maximum(began, 0)[segment] + index_in_segment) & 1
    in_order = (ply[order] == index_in_segment) & (is_last | (movers == expected))
    complete = np.logical_and.reduceat(in_order, starts) & (total[first] == lengths)
    complete &= ~boards[starts].any(axis=1)
    # Matching plies alone make no run: the boards must follow each other.
    found = known & complete if grouping == "runs" else known
    number = np.where(found, np.cumsum(found) - 1 + first_game, -1)[segment]
    first_player = np.where(found, began, -1)
    player = first_player[segment]
    played = np.empty(rows, np.int64)
    played[order] = np.where(number >= 0, move, -1)
    ply_known = ply >= 0 if grouping != "boards" else number >= 0
    positions = pa.table(
        {
            "game": _nullable(number),
            "ply": pa.array(ply, mask=~ply_known),
            "total": pa.array(total, mask=~ply_known | (total < 0)),
            "player": pa.array((player + ply) & 1, mask=~ply_known | (player < 0)),
            "move": _nullable(played),
        }
    ).cast(ROWS)
    moves = move[(found & complete)[segment] & ~is_last].astype(np.uint16)
    games = _games(
        window, first[found], last[found], first_player[found], lengths[found], complete[found], moves
    )
    games["total_positions"] = _nullable(total[first[found]])
    games["provenance"] = pa.repeat("metadata" if grouping == "ids" else "recovered", int(found.sum()))
    return positions, pa.table(games).select(GAMES.names).cast(GAMES)


def _games(
    window: SourceWindow,
    first: Array,
    last: Array,
    first_player: Array,
    positions: Array,
    complete: npt.NDArray[np.bool_],
    moves: npt.NDArray[np.uint16],
) -> dict[str, pa.Array]:
    """Return columns of ``GAMES`` for G games: all except ``total_positions`` and ``provenance``.

    Args:
        window: The window.
        first: Row in the window of the first position of each game, (G,).
        last: Row of its last position, (G,).
        first_player: Player who began it, (G,); -1 if unknown.
        positions: Number of its positions, (G,).
        complete: Whether all its positions are there and follow each other, (G,).
        moves: Moves of the complete games, one game after the other, (sum of ``positions - 1`` of these,).
    """
    lengths = np.where(complete, positions - 1, 0)
    began = np.maximum(first_player[complete], 0)
    of_moves = iter(game_hashes(moves, lengths[complete], window.board_size, began))
    hashes = [
        next(of_moves) if is_complete else position_hash(window.boards[row], window.board_size)
        for row, is_complete in zip(last.tolist(), complete.tolist(), strict=True)
    ]

    texts = window.texts.take(pa.array(first))
    return {
        "file_idx": _nullable(window.file_idx[first]),
        "line_idx": _nullable(window.line_idx[first]),
        "winner": _nullable(window.winner[first]),
        "value": pa.array(window.value[first]),
        "positions": pa.array(positions),
        "first_player": _nullable(first_player),
        "moves": pa.ListArray.from_arrays(
            np.concatenate(([0], np.cumsum(lengths))).astype(np.int32), moves, mask=pa.array(~complete)
        ),
        "game_hash": pa.array(hashes, pa.binary(16)),
        **{name: texts.column(name).combine_chunks().cast(pa.string()) for name in _TEXTS},
    }


def _nullable(numbers: Array) -> pa.Array:
    """Return integers as an Arrow array; negative ones become null."""
    return pa.array(numbers, mask=numbers < 0)


def position_hash(board: npt.NDArray[np.uint8], board_size: int) -> bytes:
    """Return the hash of a packed board (width,), 16 bytes. It is equal for its images under symmetries.

    It is the hash of a game with missing moves, given the board with the most stones.
    """
    planes = unpack_boards(board[np.newaxis], board_size, np.uint8)
    images = (pack_boards(transform_planes(planes, symmetry)).tobytes() for symmetry in Symmetry)
    return hashlib.sha256(b"hexdata position %d " % board_size + min(images)).digest()[:16]


def identity_hash(origin: str | None, file_idx: int | None, line_idx: int, board_size: int) -> bytes:
    """Return the hash of the ids of a game, 16 bytes; None and -1 both mean that there is no ``file_idx``.

    It is the hash of a game with missing moves whose positions may be in several files, so that the board
    with the most stones is unknown.
    """
    file = -1 if file_idx is None else file_idx
    identity = json.dumps([board_size, origin, file, line_idx]).encode("ascii")
    return hashlib.sha256(b"hexdata identity " + identity).digest()[:16]
