"""The tree of openings: positions up to symmetry, with the number of games, their results and their moves.

A game that red began is reflected, so that blue begins every game of the tree. Its positions then have two
images, the position itself and its rotation by 180°. A node is the image whose hash is smaller. Equal
positions after different orders of moves are one node.
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.board import BLUE, PASS, RED, Symmetry, symmetry_table
from hexdata.progress import Progress

__all__ = ["DEPTH", "END", "UNKNOWN", "Branch", "Openings", "write_openings"]

Array = npt.NDArray[Any]
Hashes = npt.NDArray[np.uint64]

DEPTH: Final = 24
"""Number of moves in the tree."""
END: Final = 65_534
"""Move at the end of a game."""
UNKNOWN: Final = 65_533
"""Move of a game whose moves are not known."""
_EDGE: Final = np.dtype(
    [("node", "<u8"), ("move", "<u2"), ("games", "<u4"), ("blue", "<u4"), ("red", "<u4"), ("example", "<i8")]
)
"""A move in a position: number of games, games won by blue and by red, and the first game."""


@dataclass(frozen=True)
class Branch:
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


@dataclass(frozen=True)
class Openings:
    """The tree of a store.

    Attributes:
        edges: The moves of all positions that occur in at least two games, by ply, position and move.
        plies: For each ply, the index of its first edge, and the number of all edges at the end.
        board_size: N.
    """

    edges: Array
    plies: Sequence[int]
    board_size: int

    def branches(self, moves: Sequence[int]) -> list[Branch]:
        """Return the moves that were played after these moves, the most frequent first.

        The result is empty if fewer than two games have the position, or after ``DEPTH`` moves. Where a
        position is its own rotation, equal moves are counted as one, on the cell with the smaller index.

        Args:
            moves: Cells, blue first; ``PASS`` for a pass.
        """
        if len(moves) >= DEPTH or not len(self.edges):
            return []
        one, other = _hashes_of(moves, self.board_size)
        node = min(one, other)
        low, high = self.plies[len(moves)], self.plies[len(moves) + 1]
        start = bisect_left(self.edges, node, low, high, key=lambda edge: int(edge["node"]))
        stop = bisect_left(self.edges, node + 1, start, high, key=lambda edge: int(edge["node"]))
        rotated = symmetry_table(self.board_size)[Symmetry.ROTATION]
        branches = []
        for edge in self.edges[start:stop].tolist():
            _, move, games, blue, red, example = edge
            if other < one and move < len(rotated):
                move = int(rotated[move])
            branches.append(Branch(None if move == END else move, games, blue, red, example))
        return sorted(branches, key=lambda branch: -branch.games)


@functools.cache
def _zobrist(size: int) -> Hashes:
    """Return a hash of each stone, (2, n·n), the same in every process."""
    data = hashlib.shake_256(b"hexdata browse openings").digest(16 * size * size)
    return np.frombuffer(data, "<u8").reshape(2, size * size)


def _hashes_of(moves: Sequence[int], size: int) -> tuple[int, int]:
    """Return the hashes of a position and of its rotation."""
    rotated = symmetry_table(size)[Symmetry.ROTATION]
    one = other = 0
    for ply, move in enumerate(moves):
        if move != PASS:
            stones = _zobrist(size)[ply % 2]
            one ^= int(stones[move])
            other ^= int(stones[rotated[move]])
    return one, other


def write_openings(
    path: Path, games: Array, plies: Sequence[Array], size: int, progress: Progress
) -> list[int]:
    """Write the edges of the tree of all games to a file, and return ``Openings.plies``.

    Args:
        path: The file, in the format of ``numpy.save``.
        games: Rows of the index of games.
        plies: For each ply of the tree, the move of each game (games,), uint16.
        size: N.
        progress: Receives the number of plies.
    """
    parts: list[Array] = []
    alive = np.flatnonzero(plies[0] != UNKNOWN) if len(games) else np.empty(0, np.int64)
    one, other = np.zeros(len(alive), np.uint64), np.zeros(len(alive), np.uint64)
    progress.begin("building the tree of openings", DEPTH, "moves")
    for ply, column in enumerate(plies):
        if len(alive):
            moves = _normal_moves(column[alive], games["first_player"][alive], size)
            parts.append(_edges_of(alive, moves, one, other, games, size))
            kept = moves != END
            alive, moves, one, other = alive[kept], moves[kept], one[kept], other[kept]
            one, other = _play(moves, one, other, ply, size)
        else:
            parts.append(np.empty(0, _EDGE))
        progress.advance(1)
    np.save(path, np.concatenate(parts))
    return [0, *np.cumsum([len(part) for part in parts]).tolist()]


def _normal_moves(moves: Array, first_player: Array, size: int) -> Array:
    """Return the moves of the games in the image in which blue begins."""
    mirror = symmetry_table(size)[Symmetry.LONG_DIAGONAL]
    reflected = (first_player == RED) & (moves < size * size)
    return np.where(reflected, mirror[np.where(reflected, moves, 0)], moves)


def _rotate(moves: Array, size: int) -> Array:
    on_board = moves < size * size
    rotated = symmetry_table(size)[Symmetry.ROTATION]
    return np.where(on_board, rotated[np.where(on_board, moves, 0)], moves)


def _play(moves: Array, one: Hashes, other: Hashes, ply: int, size: int) -> tuple[Hashes, Hashes]:
    """Return the hashes of positions and of their rotations after these moves."""
    stones = np.append(_zobrist(size)[ply % 2], np.uint64(0))
    rotated = _rotate(moves, size)
    return one ^ stones[np.minimum(moves, size * size)], other ^ stones[np.minimum(rotated, size * size)]


def _edges_of(alive: Array, moves: Array, one: Hashes, other: Hashes, games: Array, size: int) -> Array:
    """Return the edges of one ply. Positions of a single game have none."""
    node, rotated = np.minimum(one, other), _rotate(moves, size)
    cell = np.where(other < one, rotated, moves)
    cell = np.where(one == other, np.minimum(moves, rotated), cell)
    order = np.lexsort((cell, node))
    nodes, cells = node[order], cell[order]
    new_node = np.concatenate(([True], nodes[1:] != nodes[:-1]))
    first = np.flatnonzero(new_node)
    counts = np.diff([*first, len(nodes)])
    several = np.repeat(counts > 1, counts)
    order, nodes, cells, new_node = order[several], nodes[several], cells[several], new_node[several]
    begins = np.flatnonzero(new_node | np.concatenate(([True], cells[1:] != cells[:-1]))[: len(cells)])
    edges = np.empty(len(begins), _EDGE)
    if len(begins):
        ids = alive[order]
        winner = games["winner"][ids]
        winner = np.where((games["first_player"][ids] == RED) & (winner >= 0), 1 - winner, winner)
        edges["node"], edges["move"] = nodes[begins], cells[begins]
        edges["games"] = np.diff([*begins, len(ids)])
        edges["blue"] = np.add.reduceat((winner == BLUE).astype(np.uint32), begins)
        edges["red"] = np.add.reduceat((winner == RED).astype(np.uint32), begins)
        edges["example"] = np.minimum.reduceat(ids, begins)
    return edges
