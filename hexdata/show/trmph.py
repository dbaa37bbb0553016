"""Parsing of a game from TRMPH text, with errors that name the faulty move."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from hexdata.board import UInt16Array, cell_index, cell_name, check_board_size, replay, split_trmph, winner_of
from hexdata.errors import FormatError, Reason
from hexdata.show.game import Game

__all__ = ["looks_like_game", "read_trmph"]

_START: Final = re.compile(r"\s*(?:https?://[^\s#]*)?#(?P<size>[0-9]{1,3}),(?P<moves>\S*)")
_MOVE: Final = re.compile(r"[a-z]{1,2}[0-9]+")
_SHOWN: Final = 12
"""Maximum number of characters of a faulty text in a message."""


def looks_like_game(text: str) -> bool:
    """Return whether a text looks like a TRMPH line or URL."""
    return re.match(r"\s*(?:#|https?://)", text) is not None


def read_trmph(text: str) -> Game:
    """Parse a game such as ``#13,a1b2c3``, or a URL that ends with it, optionally with a winner:
    ``#13,a1b2c3 b``.

    Without a stated winner, the winner is the player with a winning chain in the final position, if any.

    Raises:
        FormatError: "trmph-syntax", "board-size", "trmph-cell" or "repeated-move". The last two name the
            number of the move, counted from 1.
    """
    start = _START.match(text)
    if start is None:
        split_trmph(text)  # raises
    else:
        moves = _read_moves(start["moves"], check_board_size(int(start["size"])))
    line = split_trmph(text)
    winner = line.winner
    if winner is None:
        chain = int(winner_of(replay(moves, line.board_size)[-1:])[0])
        winner = chain if chain >= 0 else None
    return Game.of_moves(moves, line.board_size, winner)


def _read_moves(text: str, n: int) -> UInt16Array:
    """Parse moves one by one; return their cell indices, uint16 (m,)."""
    cells: list[int] = []
    offset = 0
    while offset < len(text):
        move = _MOVE.match(text, offset)
        if move is None:
            raise FormatError(
                f"move {len(cells) + 1} is not a cell",
                code=Reason.TRMPH_SYNTAX,
                found=repr(text[offset : offset + _SHOWN]),
                expected="a letter and a number, such as h7",
            )
        cell = _read_cell(move[0], len(cells) + 1, n)
        if cell in cells:
            raise FormatError(
                f"move {len(cells) + 1} was already played as move {cells.index(cell) + 1}",
                code=Reason.REPEATED_MOVE,
                found=cell_name(cell, n),
                expected="an empty cell",
            )
        cells.append(cell)
        offset = move.end()
    return np.array(cells, dtype=np.uint16)


def _read_cell(name: str, number: int, n: int) -> int:
    try:
        return cell_index(name, n)
    except FormatError as error:
        raise FormatError(
            f"move {number} is not on the board", code=error.code, found=error.found, expected=error.expected
        ) from None
