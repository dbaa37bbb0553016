"""Positions as nodes of a graph: a hash of each one's board, and of the board that its move leads to.

Looks at each position by itself; which of them make up a game is for ``chains`` to find.
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
"""Stands for the board after a final position."""
NOWHERE: Final = (1 << 64) - 2
"""Stands for the board after a position that cannot be followed: its policy names no single cell, or an
occupied one."""

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
"""``class`` is what the positions of a game have in common: origin, length, winner and first player.
``node`` is the hash of class and board, ``next`` that of class and next board."""

EVIDENCE: Final = (
    *("board", "move", "policy", "value", "winner", "origin"),
    *("line_idx", "position_in_game", "total_positions", "player_to_move"),
)
"""The columns of spooled positions that make nodes of them."""


class NodeMaker:
    """Makes nodes of positions; two of the same maker are equal if class and board are.

    A board's hash is the xor of a random word for each stone, so a move is one xor more (Zobrist 1970,
    "A New Hashing Method with Application for Game Playing"). A class is mixed in by one xor too.
    """

    def __init__(self, board_size: int) -> None:
        self._cells = board_size * board_size
        width = board_bytes(board_size)
        words = sort_key(np.arange(8 * width), derive_key(0, "nodes", "stones"))
        words[2 * self._cells :] = 0  # the spare bits of a packed board
        self.stones: Hashes = words[: 2 * self._cells]
        """The words, (2·n·n,), blue first."""
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1)
        self._tables = np.bitwise_xor.reduce(words.reshape(width, 1, 8) * bits, axis=2)
        """The xor of the words of each byte of a packed board, for each of its values: (width, 256)."""
        self._origins: dict[str | None, int] = {}

    def nodes(self, raw: pa.RecordBatch, first_row: int) -> pa.RecordBatch:
        """Return ``NODES`` of those positions without an id that can be followed at all.

        Left out are those whose stones do not agree with their ply, as after a move to an occupied cell,
        and those that nothing assigns to a winner. Without a ply, the stones give it; without a player,
        blue began.

        Args:
            raw: ``EVIDENCE`` of some positions.
            first_row: number of the first one.
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
        """Return a number for each raw file, and one for none: int64 (N,)."""
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
        """Return the node that each move leads to; ``NOWHERE`` without a move to an empty cell."""
        result = np.full(len(node), NOWHERE, dtype=np.uint64)
        rows = np.flatnonzero(move >= 0)
        for colour in (0, 1):
            bit = move[rows] + colour * self._cells
            rows = rows[boards[rows, bit >> 3] & (128 >> (bit & 7)) == 0]
        result[rows] = node[rows] ^ self.stones[move[rows] + player[rows] * self._cells]
        return result

    def origins_and_winners(self, classes: Array) -> tuple[list[str | None], list[int | None]]:
        """Return the raw file and the winner that each class (N,) names; None where it names none."""
        names = list(self._origins)
        origins = [names[origin] for origin in (classes >> 20).tolist()]
        return origins, [outcome if outcome < 2 else None for outcome in (classes >> 1 & 3).tolist()]

    @staticmethod
    def first_players(classes: Array) -> Array:
        """Return the first player of each class, int64 (N,)."""
        players: Array = classes & 1
        return players


def _outcome(winner: Array, value: Array) -> Array:
    """Return 0 or 1 where a winner is named, else 2 or 3 for a value of 0 or 1, else -1: int64 (N,)."""
    by_value = np.where(value == 0, 2, np.where(value == 1, 3, -1))
    return np.where(winner >= 0, winner, by_value)
