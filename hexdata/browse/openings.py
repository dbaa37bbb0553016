"""The openings of a store: which moves games played in a position, and who won them.

The first moves of all games are in memory, one byte each up to board size 15. A position is found by the XOR
of the hashes of its stones, so positions that arise from other orders of the same moves are one position. A
game that red began is reflected, so that blue begins every game. A position is also found if it is the
rotation by 180° of the one asked for. A request passes twice over the moves of all games up to its ply.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.board import BLUE, PASS, RED, Symmetry, symmetry_table
from hexdata.schema import WINNERS, table_schema
from hexdata.store import Store
from hexdata.store.parquet import read_rows

_DEPTH: Final = 24
"""Number of moves of each game that are read."""
_BYTES: Final = 200 << 20
"""Memory for the moves. Of more than eight million games, fewer moves are read."""


class Branch(NamedTuple):
    """A move that was played in a position.

    Attributes:
        move: Cell, or ``PASS``; None if the games end here.
        games: Number of games.
        blue: Number of games that blue, who began, won.
        red: Number of games that red won.
        example: Id of the first of these games.
    """

    move: int | None
    games: int
    blue: int
    red: int
    example: int


class Openings:
    """The openings of all games of a store, up to ``depth`` moves."""

    def __init__(self, store: Store) -> None:
        n = store.manifest.board_size or 0
        games = store.manifest.counts.get("games", 0)
        cells = n * n
        self.depth = max(1, min(_DEPTH, _BYTES // max(games, 1)))
        # Codes of what is no cell: a pass, the end of a game, and the moves of a game that are not known.
        self._pass, self._end, self._unknown = cells, cells + 1, cells + 2
        dtype = np.uint8 if self._unknown < 256 else np.uint16
        self._moves = np.full((self.depth, games), self._end, dtype)
        self._winner = np.full(games, -1, np.int8)
        self._rotated, self._mirror = (
            np.append(symmetry_table(n)[symmetry] if n else [], range(cells, cells + 3)).astype(dtype)
            for symmetry in (Symmetry.ROTATION, Symmetry.LONG_DIAGONAL)
        )
        # A hash of each stone, the same in every process; 0 for a pass.
        data = hashlib.shake_256(b"hexdata openings").digest(16 * cells)
        stones = np.frombuffer(data, "<u8").reshape(2, cells)
        self._stones = np.concatenate([stones, np.zeros((2, 3), np.uint64)], axis=1)
        schema = table_schema("games", store.manifest.board_size)
        columns = pa.schema([schema.field(name) for name in ("winner", "first_player", "moves")])
        start = 0
        for batch in read_rows(store.rows("games"), columns) if games else ():
            self._add(slice(start, start + batch.num_rows), batch)
            start += batch.num_rows

    def _add(self, rows: slice, batch: pa.RecordBatch) -> None:
        column = batch["moves"]
        known = column.is_valid().to_numpy(zero_copy_only=False)
        offsets = column.offsets.to_numpy()
        lengths = np.diff(offsets)
        # A cell outside of the board, in a damaged store, ends its game.
        cells = column.values.fill_null(self._end).to_numpy(zero_copy_only=False).astype(np.int64)
        cells = np.where(cells == PASS, self._pass, np.where(cells < self._pass, cells, self._end))
        of_red = pc.equal(batch["first_player"], RED).fill_null(False).to_numpy(zero_copy_only=False)
        for ply, moves in enumerate(self._moves[:, rows]):
            played = known & (lengths > ply)
            moves[~known] = self._unknown
            moves[played] = cells[offsets[:-1][played] + ply]
            moves[of_red] = self._mirror[moves[of_red]]
        winner = pc.index_in(batch["winner"], pa.array(WINNERS)).fill_null(-1).to_numpy(zero_copy_only=False)
        self._winner[rows] = np.where(of_red & (winner >= 0), 1 - winner, winner)

    def _hash(self, moves: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return the hashes of positions after moves (plies, games), and of their rotations."""
        one, other = np.zeros((2, moves.shape[1]), np.uint64)
        for ply, played in enumerate(moves):
            stones = self._stones[ply % 2]
            one ^= stones[played]
            other ^= stones[self._rotated][played]
        return one, other

    def branches(self, moves: Sequence[int]) -> list[Branch]:
        """Return the moves that were played after these moves, the most frequent first.

        The result is empty after ``depth`` moves. Where a position is its own rotation, equal moves are
        counted as one, on the cell with the smaller index.

        Args:
            moves: Cells, blue first; ``PASS`` for a pass.
        """
        ply = len(moves)
        if ply >= self.depth:
            return []
        path = np.array([[self._pass if move == PASS else move] for move in moves], np.int64).reshape(ply, 1)
        (node,), (turned,) = self._hash(path)
        one, other = self._hash(self._moves[:ply])
        before = self._moves[max(ply - 1, 0)]
        # The codes of an end and of unknown moves are hashed to 0, so such a game may have the same hash.
        alive = before != self._unknown if ply == 0 else before < self._end
        found = np.flatnonzero(alive & ((one == node) | (other == node)))
        following = self._moves[ply][found]
        rotated = self._rotated[following]
        # Moves of rotated games are rotated into the position that was asked for.
        following = np.where(one[found] == node, following, rotated)
        if node == turned:
            following = np.minimum(following, rotated)
        winner = self._winner[found]
        numbers = [
            np.bincount(following[chosen], minlength=self._unknown).tolist()
            for chosen in (slice(None), winner == BLUE, winner == RED)
        ]
        example = np.zeros(self._unknown, np.int64)
        example[following[::-1]] = found[::-1]  # the last one written is the first game
        codes = {self._pass: PASS, self._end: None}
        every = zip(range(self._unknown), *numbers, example.tolist(), strict=True)
        branches = [Branch(codes.get(cell, cell), *known) for cell, *known in every if known[0]]
        return sorted(branches, key=lambda branch: -branch.games)
