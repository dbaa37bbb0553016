"""Positions as nodes of a graph: hashes of each position's board and of the board after its move.

Each position is processed on its own; ``chains`` joins the nodes to games.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.games.find import binary_matrix, column
from hexdata.order import derive_key, sort_key
from hexdata.schema import NO_MOVE, board_bytes

__all__ = ["EVIDENCE", "FINAL", "NODES", "NOWHERE", "NodeMaker"]

Array = npt.NDArray[Any]
Hashes = npt.NDArray[np.uint64]

FINAL: Final = (1 << 64) - 1
"""Value of ``next`` for a final position."""
NOWHERE: Final = (1 << 64) - 2
"""Value of ``next`` for a position that has no single move, or a move to an occupied cell."""

NODES: Final = pa.schema(
    [
        ("row", pa.int64()),
        ("ply", pa.uint16()),
        ("class", pa.int64()),
        ("node", pa.uint64()),
        ("next", pa.uint64()),
        ("move", pa.uint16()),
    ]
)
"""``class`` encodes the values that all positions of a game share: origin, length, winner and first player.
``node`` is the hash of class and board, ``next`` the hash of class and next board."""

EVIDENCE: Final = (
    *("board", "move", "policy", "value", "winner", "origin"),
    *("line_idx", "position_in_game", "total_positions", "player_to_move"),
)
"""The columns of spooled positions from which nodes are computed."""


class NodeMaker:
    """Computes nodes from positions. Positions with equal class and board have equal nodes.

    The hash of a board is the xor of one random word per stone, so a move adds one xor (Zobrist 1970,
    "A New Hashing Method with Application for Game Playing"). The hash of the class is added by xor, too.
    Classes number the origins in the order of their appearance, so the nodes of two instances may differ.
    """

    def __init__(self, board_size: int) -> None:
        self._cells = board_size * board_size
        width = board_bytes(board_size)
        words = sort_key(np.arange(8 * width), derive_key(0, "nodes", "stones"))
        words[2 * self._cells :] = 0  # the unused bits of a packed board
        self.stones: Hashes = words[: 2 * self._cells]
        """The word of each stone, (2·n·n,), blue first."""
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1)
        self._tables = np.bitwise_xor.reduce(words.reshape(width, 1, 8) * bits, axis=2)
        """The xor of the words of the bits set, per byte of a packed board and value: (width, 256)."""
        self._origins: dict[str | None, int] = {}

    def nodes(self, raw: pa.RecordBatch, first_row: int) -> pa.RecordBatch:
        """Return the nodes of the positions without an id that can be part of a chain.

        Positions are omitted if the number of stones differs from their ply, as after a move to an
        occupied cell, if their ply is not below their length, or if neither a winner nor a value of 0 or 1
        is stated. The ply defaults to the number of stones. The player to move defaults to the one who
        moves at this ply if blue began.

        Args:
            raw: Positions with the columns ``EVIDENCE``.
            first_row: Row number of the first position.

        Returns:
            A batch with the schema ``NODES``.
        """
        boards = binary_matrix(raw.column("board"))
        stones = np.bitwise_count(boards).sum(axis=1, dtype=np.int64)
        ply, total = column(raw, "position_in_game", -1), column(raw, "total_positions", -1)
        ply = np.where(ply < 0, stones, ply)
        move, player = column(raw, "move", -1), column(raw, "player_to_move", -1)
        player = np.where(player < 0, ply & 1, player)
        outcome = _outcome(column(raw, "winner", -1), column(raw, "value", np.nan))
        followed = (column(raw, "line_idx", -1) < 0) & (ply == stones) & (outcome >= 0)
        followed &= (ply < total) | (total < 0)

        origin = self._numbers(raw.column("origin"))
        common = origin << 20 | (total + 1) << 3 | outcome << 1 | (player ^ ply) & 1
        node = self._hashes(boards) ^ sort_key(common, derive_key(0, "nodes", "classes"))
        no_policy = raw.column("policy").is_null().to_numpy(zero_copy_only=False)
        final = (move < 0) & no_policy & ((ply == total - 1) | (total < 0))
        columns = {
            "row": np.arange(first_row, first_row + len(node)),
            "ply": ply,
            "class": common,
            "node": node,
            "next": np.where(final, np.uint64(FINAL), self._next(boards, node, move, player)),
            "move": np.where(move < 0, NO_MOVE, move),
        }
        arrays = [pa.array(columns[f.name][followed].astype(f.type.to_pandas_dtype())) for f in NODES]
        return pa.RecordBatch.from_arrays(arrays, schema=NODES)

    def _numbers(self, origins: pa.Array) -> Array:
        """Return the number of each raw file, int64 (N,); null is numbered like a raw file."""
        encoded = origins.dictionary_encode(null_encoding="encode")
        codes = [
            self._origins.setdefault(name, len(self._origins)) for name in encoded.dictionary.to_pylist()
        ]
        numbers: Array = np.array(codes, dtype=np.int64)[encoded.indices.to_numpy()]
        return numbers

    def _hashes(self, boards: npt.NDArray[np.uint8]) -> Hashes:
        hashes = np.zeros(len(boards), dtype=np.uint64)
        for table, values in zip(self._tables, boards.T, strict=True):
            hashes ^= table[values]
        return hashes

    def _next(self, boards: Array, node: Hashes, move: Array, player: Array) -> Hashes:
        """Return the node after each move, uint64 (N,); ``NOWHERE`` without a move to an empty cell."""
        result = np.full(len(node), NOWHERE, dtype=np.uint64)
        rows = np.flatnonzero(move >= 0)
        for colour in (0, 1):
            bit = move[rows] + colour * self._cells
            rows = rows[boards[rows, bit >> 3] & (128 >> (bit & 7)) == 0]
        result[rows] = node[rows] ^ self.stones[move[rows] + player[rows] * self._cells]
        return result

    def origins_and_winners(self, classes: Array) -> tuple[list[str | None], list[int | None]]:
        """Return the raw file and the winner of each class (N,); None where the positions name none."""
        names = list(self._origins)
        origins = [names[origin] for origin in (classes >> 20).tolist()]
        return origins, [outcome if outcome < 2 else None for outcome in (classes >> 1 & 3).tolist()]

    @staticmethod
    def first_players(classes: Array) -> Array:
        """Return the first player of each class, int64 (N,)."""
        players: Array = classes & 1
        return players


def _outcome(winner: Array, value: Array) -> Array:
    """Return 0 or 1 for a named winner, else 2 or 3 for a value of 0 or 1, else -1: int64 (N,)."""
    by_value = np.where(value == 0, 2, np.where(value == 1, 3, -1))
    return np.where(winner >= 0, winner, by_value)
