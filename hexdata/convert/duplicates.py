"""The search for duplicate games: equal hashes, the first game of each hash, and the kind of duplicate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import symmetry_table
from hexdata.games.find import binary_matrix, column
from hexdata.games.findings import Flag

__all__ = ["COLUMNS", "GameIdentities", "find_duplicates"]

Array = npt.NDArray[Any]

COLUMNS: Final = ("game_hash", "moves", "first_player")
"""The columns of games that are compared; winners are passed separately."""

_FRAGMENT: Final = 255
_UNKNOWN: Final = 255


@dataclass(frozen=True)
class GameIdentities:
    """The compared values of G games, 18 bytes per game."""

    hashes: npt.NDArray[np.uint8]
    """``game_hash``, (G, 16)."""
    frame: npt.NDArray[np.uint8]
    """Index of the symmetry image that each game is, (G,): 2 · first player + rotated. Games with equal hash
    and frame have the same moves. 255 where moves are missing."""
    winner: npt.NDArray[np.uint8]
    """Winner in the canonical image, (G,), so that mirror images of a game agree. 255 if unknown."""

    @classmethod
    def from_batches(cls, games: Iterable[tuple[pa.RecordBatch, Array]], board_size: int) -> GameIdentities:
        """Build the identities of games.

        Args:
            games: batches with ``COLUMNS``, each with the winners of its games, int64 (N,): 0 blue, 1 red,
                -1 unknown.
            board_size: n.
        """
        parts = [_identities(batch, winner, board_size) for batch, winner in games]
        return cls.concatenate([cls(*part) for part in parts])

    @classmethod
    def concatenate(cls, parts: Sequence[GameIdentities]) -> GameIdentities:
        """Return the concatenation of ``parts``."""
        return cls(
            np.concatenate([np.empty((0, 16), np.uint8), *(part.hashes for part in parts)]),
            np.concatenate([np.empty(0, np.uint8), *(part.frame for part in parts)]),
            np.concatenate([np.empty(0, np.uint8), *(part.winner for part in parts)]),
        )

    def __len__(self) -> int:
        return len(self.hashes)


def _identities(batch: pa.RecordBatch, winner: Array, board_size: int) -> tuple[Array, Array, Array]:
    first = column(batch, "first_player", 0)
    moves = batch.column("moves")
    whole = moves.is_valid().to_numpy(zero_copy_only=False)
    frame = np.full(batch.num_rows, _FRAGMENT, np.uint8)
    frame[whole] = 2 * first[whole] + _is_rotated(moves.drop_null(), first[whole], board_size)
    canonical = np.where(winner < 0, _UNKNOWN, winner ^ first)
    return binary_matrix(batch.column("game_hash")), frame, canonical.astype(np.uint8)


def _is_rotated(moves: pa.ListArray, first: Array, board_size: int) -> npt.NDArray[np.bool_]:
    """Return which games differ from their canonical image (``board.canonical_moves``) by a rotation.

    Args:
        moves: the moves of each game, (G,).
        first: the first player of each game, (G,).
        board_size: n.
    """
    table = symmetry_table(board_size).astype(np.int64)
    starts = moves.offsets.to_numpy()
    cells = moves.values.to_numpy()
    off_centre = np.flatnonzero(
        table[0, cells] != table[1, cells]
    )  # all except the centre, which maps to itself
    index = np.searchsorted(off_centre, starts[:-1])
    asymmetric = index < len(off_centre)
    asymmetric[asymmetric] = off_centre[index[asymmetric]] < starts[1:][asymmetric]
    cell = cells[off_centre[index[asymmetric]]]
    one, other = np.where(first[asymmetric] == 1, table[2:, cell], table[:2, cell])
    rotated = np.zeros(len(first), dtype=bool)
    rotated[asymmetric] = other < one
    return rotated


def find_duplicates(games: GameIdentities) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """Return, for each game, the index of the first game with the same hash.

    Args:
        games: the games in ascending id.

    Returns:
        int64 (G,): that index, -1 where the game is itself the first; and uint32 (G,): bits of ``Flag``
        for the kind of duplicate, 0 where the game is no duplicate.
    """
    halves = games.hashes.view(np.uint64)
    # The first of equal hashes has the lowest id: a stable sort keeps ids ascending within them.
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    same = np.zeros(len(order), dtype=bool)
    same[1:] = (halves[order][1:] == halves[order][:-1]).all(axis=1)
    leader = order[np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))]
    first = np.full(len(order), -1, dtype=np.int64)
    first[order[same]] = leader[same]
    return first, _duplicate_kinds(games, first)


def _duplicate_kinds(games: GameIdentities, first: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    flags = np.zeros(len(first), np.uint32)
    copies = np.flatnonzero(first >= 0)
    originals = first[copies]
    frame, winner = games.frame[copies], games.winner[copies]
    exact = frame == games.frame[originals]
    flags[copies] = np.where(exact, int(Flag.DUPLICATE_EXACT), int(Flag.DUPLICATE_SYMMETRIC))
    flags[copies[frame == _FRAGMENT]] = int(Flag.DUPLICATE_FRAGMENT)
    known = (frame != _FRAGMENT) & (winner != _UNKNOWN) & (games.winner[originals] != _UNKNOWN)
    flags[copies[known & (winner != games.winner[originals])]] |= np.uint32(Flag.CONTRADICTORY_DUPLICATES)
    return flags
