"""Winner and split of a game, and player to move of a position."""

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
    """Return the winner of each game, int64 (G,): from its metadata, else from its value; -1 if unknown."""
    named = column(games, "winner", -1)
    value = column(games, "value", np.nan)
    won = np.where(value == 0.0, 0, np.where(value == 1.0, 1, -1))
    by_value = won if convention == "blue-is-0" else np.where(won >= 0, 1 - won, -1)
    winner: npt.NDArray[np.int64] = np.where(named >= 0, named, by_value)
    return winner


def players_of(raw: pa.RecordBatch, row: pa.RecordBatch, board_size: int) -> pa.Array:
    """Return the player to move of each position, uint8 (N,).

    It is taken from the source, else from the game, else from the ply, else from the stones.

    Args:
        raw: Positions of ``raw_schema``.
        row: The same positions as ``find.ROWS``.
        board_size: Board size n.
    """
    by_ply = pc.bit_wise_and(row.column("ply"), 1).cast(pa.uint8())
    known = pc.coalesce(raw.column("player_to_move"), row.column("player"), by_ply)
    if known.null_count:
        stones = unpack_boards(binary_matrix(raw.column("board")), board_size, np.uint8).sum(axis=(2, 3))
        known = pc.coalesce(known, pa.array(player_to_move(stones[:, 0], stones[:, 1])))
    return known


def split_of(game_hash: bytes, val: float, test: float) -> str:
    """Return the split of a game. It depends only on the hash, so it does not change when files are added.

    The first 8 bytes of the hash are a fraction of 2^64: below ``test`` for test, below ``test + val`` for
    val, and train otherwise.

    Args:
        game_hash: Hash of the game, 16 bytes.
        val: Share of games in val, from 0 to 1.
        test: Share of games in test, from 0 to 1.
    """
    fraction = int.from_bytes(game_hash[:8], "big") / 2**64
    return "test" if fraction < test else "val" if fraction < test + val else "train"
