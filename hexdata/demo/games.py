"""Generated games of Hex for demonstrations and tests: legal and complete, but played weakly.

Every random choice comes from the seeded order, so game i of a seed is the same on every machine and for any
number of games.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.board import check_board_size
from hexdata.order import derive_key, uniform_draw

_BOOK_SHARE: Final = 0.75
"""Share of games that start with an opening from the book."""
_BOOK_LINES: Final = 64
_SAVE: Final = 0.9
"""Probability of answering an intrusion into a bridge."""
_NEAR: Final = 0.25
"""Otherwise, the probability of playing next to one of the last two stones."""
_BLOCK: Final = 0.4
"""Otherwise, the probability of blocking the opponent's path instead of extending one's path."""
_AIMLESS: Final = 0.5
"""Otherwise, the maximum probability of a random move; it differs between games."""

Draw = Callable[[], float]
"""Function that returns the next number in [0, 1) of a seeded stream."""


class DemoGame(NamedTuple):
    """One finished game."""

    moves: npt.NDArray[np.uint16]
    """Cell indices (m,), blue first; the last one wins."""
    winner: int
    """``board.BLUE`` or ``board.RED``."""


def make_games(count: int, seed: int, board_size: int = 13, start: int = 0) -> Iterator[DemoGame]:
    """Return games ``start`` … ``start + count - 1`` of a seed."""
    return (make_game(number, seed, board_size) for number in range(start, start + count))


def make_game(number: int, seed: int, board_size: int = 13) -> DemoGame:
    """Return game ``number`` of a seed. Many games of a seed share their first moves.

    Raises:
        FormatError: "board-size", if the board size is not supported.
    """
    draw = _stream(derive_key(seed, "demo", number))
    opening: tuple[int, ...] = ()
    if draw() < _BOOK_SHARE:
        rank = draw()
        opening = _opening(
            int(_BOOK_LINES * rank * rank * rank), seed, board_size
        )  # lines with low numbers are more frequent
    bits, winner = _play(draw, board_size, opening)
    moves = np.array([bit.bit_length() - 1 for bit in bits])
    rows, columns = np.divmod(moves, board_size + 1)
    return DemoGame((rows * board_size + columns).astype(np.uint16), winner)


@functools.lru_cache(maxsize=4 * _BOOK_LINES)
def _opening(line: int, seed: int, board_size: int) -> tuple[int, ...]:
    """Return an opening of the book of a seed: the first 2 to 6 moves of a separate game."""
    draw = _stream(derive_key(seed, "demo", "opening", line))
    # Short openings, so that games share their beginning and differ after it.
    length = 2 + int(5 * draw())
    return tuple(_play(draw, board_size, ())[0][:length])


def _stream(key: int, block: int = 512) -> Draw:
    def draws() -> Iterator[float]:
        for start in itertools.count(step=block):
            yield from uniform_draw(np.arange(start, start + block), key).tolist()

    return draws().__next__


# A set of cells is a Python integer with bit row * (n + 1) + column. An extra empty column keeps shifts of
# a set to its neighbours from wrapping into the next row.


class _BoardTables(NamedTuple):
    """Constants for boards of one size."""

    cells: int
    """The set of all cells."""
    edges: tuple[tuple[int, int], tuple[int, int]]
    """The sets of cells along the two edges of blue, and along those of red."""
    saves: dict[int, tuple[tuple[int, int], ...]]
    """For each cell: (ends, other carrier) of each bridge that has the cell as a carrier.

    A bridge is two stones that are not adjacent but share two neighbours, its carriers. While both carriers
    are empty, the stones are connected, because the player can answer on the other carrier.
    """


@functools.cache
def _tables(n: int) -> _BoardTables:
    check_board_size(n)
    width = n + 1
    row = (1 << n) - 1
    column = sum(1 << r * width for r in range(n))
    cells = row * column
    clockwise = (-width, 1 - width, 1, width, width - 1, -1)

    def shifted(cell: int, step: int) -> int:
        return (cell << step if step >= 0 else cell >> -step) & cells

    def saves(cell: int) -> Iterator[tuple[int, int]]:
        # The two carriers are adjacent; the ends are their common neighbours on either side.
        for i in range(6):
            before, other, after = (shifted(cell, clockwise[(i + k) % 6]) for k in range(3))
            if before and other and after:
                yield before | after, other

    every = [1 << r * width + c for r in range(n) for c in range(n)]
    return _BoardTables(
        cells,
        ((row, row << (n - 1) * width), (column, column << (n - 1))),
        {cell: tuple(saves(cell)) for cell in every},
    )


def _around(cells: int, n: int) -> int:
    """Return the neighbours of all cells of a set, which may be outside the board."""
    both = cells | cells << 1
    return cells >> 1 | cells << 1 | both << n | (both >> n + 1)


def _flood(seeds: int, stones: int, n: int) -> int:
    """Return the stones of all chains that contain one of the stones ``seeds``."""
    reached = 0
    while seeds:
        reached |= seeds
        seeds = _around(seeds, n) & stones & ~reached
    return reached


def _any_of(cells: int, draw: Draw) -> int:
    """Return a random cell of a non-empty set."""
    for _ in range(int(draw() * cells.bit_count())):
        cells &= cells - 1
    return cells & -cells


def _shortest_way(own: int, free: int, edges: tuple[int, int], n: int, draw: Draw) -> int:
    """Return a smallest set of empty cells that would connect the player's edges.

    It exists while nobody has won, because only a chain of the opponent can separate the edges. Breadth-first
    search from one edge, where own stones cost nothing, then back from the other edge with random choices.
    """
    start, goal = edges
    reached = _flood(start & own, own, n)
    steps, chains = [0], [reached]
    entry = _around(reached, n) | start
    while not (steps[-1] | chains[-1]) & goal:
        step = entry & free & ~reached
        chain = _flood(_around(step, n) & own & ~reached, own, n)
        reached |= step | chain
        entry = _around(step | chain, n)
        steps.append(step)
        chains.append(chain)
    way, target = 0, goal
    # Step 0 has no empty cell: it is the own stones that are connected to the first edge.
    for step, chain in zip(steps[:0:-1], chains[:0:-1], strict=True):
        leading = step & (target | _around(_flood(chain & target, chain, n), n))
        cell = _any_of(leading, draw)
        way |= cell
        target = _around(cell, n)
    return way


def _play(draw: Draw, n: int, opening: tuple[int, ...]) -> tuple[list[int], int]:
    """Play from the opening until a player has connected; return (moves as one-cell sets, winner).

    A player, in this order, may save a bridge, play near the last stones, play a random cell, or play on a
    shortest path. The frequency of random moves differs between games, and with it their length.
    """
    cells, edges, saves = _tables(n)
    aimless = _AIMLESS * draw()
    stones, ways = [0, 0], [0, 0]
    moves: list[int] = []

    def choose(player: int, free: int) -> int:
        last = moves[-1] if moves else 0
        for ends, carrier in saves.get(last, ()):
            if stones[player] & ends == ends and carrier & free and draw() < _SAVE:
                return carrier
        # The sum of different one-cell sets is their union.
        near = _around(sum(moves[-2:]), n) & free
        if near and draw() < _NEAR:
            return _any_of(near, draw)
        if draw() < aimless:
            return _any_of(free, draw)
        side = 1 - player if draw() < _BLOCK else player
        # A path is kept until it is complete or the opponent has a stone on it, since the search is slow.
        if not ways[side] & free or ways[side] & stones[1 - side]:
            ways[side] = _shortest_way(stones[side], free, edges[side], n, draw)
        return _any_of(ways[side] & free, draw)

    while True:
        player = len(moves) % 2
        free = cells & ~(stones[0] | stones[1])
        move = opening[len(moves)] if len(moves) < len(opening) else choose(player, free)
        moves.append(move)
        stones[player] |= move
        chain = _flood(move, stones[player], n)
        if all(chain & edge for edge in edges[player]):
            return moves, player
