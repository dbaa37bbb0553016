"""Decides the winner and the split of a game, and the player to move of a position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.board import player_to_move, unpack_boards
from hexdata.games.convention import Convention
from hexdata.games.find import binary_matrix, column

__all__ = ["players_of", "split_of", "winners_of"]


def winners_of(games: pa.RecordBatch, convention: Convention) -> npt.NDArray[np.int64]:
    """Return each game's winner: by its metadata, else by its value; -1 if unknown."""
    named = column(games, "winner", -1)
    value = column(games, "value", np.nan)
    won = np.where(value == 0.0, 0, np.where(value == 1.0, 1, -1))
    by_value = won if convention == "blue-is-0" else np.where(won >= 0, 1 - won, -1)
    winner: npt.NDArray[np.int64] = np.where(named >= 0, named, by_value)
    return winner


def players_of(raw: pa.RecordBatch, row: pa.RecordBatch, board_size: int) -> pa.Array:
    """Return the player to move: by the source, else the game's boards, the ply, or the stones: uint8 (N,).

    Args:
        raw: positions of ``raw_schema``.
        row: their ``find.ROWS``.
        board_size: n.
    """
    by_ply = pc.bit_wise_and(row.column("ply"), 1).cast(pa.uint8())
    known = pc.coalesce(raw.column("player_to_move"), row.column("player"), by_ply)
    if known.null_count:
        stones = unpack_boards(binary_matrix(raw.column("board")), board_size, np.uint8).sum(axis=(2, 3))
        known = pc.coalesce(known, pa.array(player_to_move(stones[:, 0], stones[:, 1])))
    return known


def split_of(game_hash: bytes, val: float, test: float) -> str:
    """Return the split of a game: a function of its hash alone, so it stays when files are added.

    The first 8 bytes of the hash, as a fraction of 2^64, are below ``test`` for test, below
    ``test + val`` for val, and train otherwise.
    """
    place = int.from_bytes(game_hash[:8], "big") / 2**64
    return "test" if place < test else "val" if place < test + val else "train"
