"""Packed boards and moves, made from the payloads of the arrays of examples.

Payloads are 50 times as large as the result, so they are converted in portions that fit into the CPU cache.
Nothing is rejected here: invalid cells are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.board import MAX_SIZE, MIN_SIZE, pack_boards

__all__ = ["PORTION", "ArrayKind", "PackedBoards", "PackedPolicies", "PayloadPacker", "is_board_shape"]

Bools = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

PORTION: Final = 1 << 20
"""Bytes of examples, approximately, that are converted at a time."""


@dataclass(frozen=True, slots=True)
class ArrayKind:
    """Dtype, shape and memory order shared by the arrays of a group."""

    dtype: str
    shape: tuple[int, ...]
    fortran: bool

    def __str__(self) -> str:
        return f"an array {self.dtype} {self.shape}"


@dataclass(frozen=True, slots=True)
class PackedBoards:
    """n boards as bits."""

    packed: UInt8Array
    """Boards as of :func:`hexdata.board.pack_boards`, (n, bytes). A cell is set if it is 1."""
    invalid: Int64Array
    """Number of cells that are neither 0 nor 1, (n,)."""
    overlapping: Int64Array
    """Number of cells that are both blue and red, (n,)."""

    def __getitem__(self, rows: Bools) -> PackedBoards:
        return PackedBoards(self.packed[rows], self.invalid[rows], self.overlapping[rows])


@dataclass(frozen=True, slots=True)
class PackedPolicies:
    """n policies as moves, except those that are not one-hot."""

    moves: Int64Array
    """Index of the first nonzero cell, (n,)."""
    one_hot: Bools
    """Whether this cell is 1 and all others are 0, (n,)."""
    dense: UInt8Array
    """Payloads of the policies that are not one-hot, in order, (k, bytes)."""

    def __getitem__(self, rows: Bools) -> PackedPolicies:
        return PackedPolicies(self.moves[rows], self.one_hot[rows], self.dense[rows[~self.one_hot]])


def is_board_shape(shape: tuple[int, ...]) -> bool:
    """Return whether a shape is (2, n, n) with n from ``MIN_SIZE`` to ``MAX_SIZE``."""
    return len(shape) == 3 and shape[0] == 2 and shape[1] == shape[2] and MIN_SIZE <= shape[1] <= MAX_SIZE


class PayloadPacker:
    """Packs the payloads of examples of one layout, portion by portion.

    Args:
        board: Kind of the boards; a description if they are not arrays.
        policy: Kind of the policies; likewise.

    Attributes:
        board: Kind of the boards that are packed; None if the boards have no valid shape.
        policy: Kind of the policies that are packed; None if these or the boards have no valid shape.
    """

    def __init__(self, board: ArrayKind | str, policy: ArrayKind | str) -> None:
        self.board: ArrayKind | None = None
        self.policy: ArrayKind | None = None
        if isinstance(board, ArrayKind) and is_board_shape(board.shape):
            self.board = board
            if isinstance(policy, ArrayKind) and policy.shape == (board.shape[1] ** 2,):
                self.policy = policy
        self._boards: list[PackedBoards] = []
        self._policies: list[PackedPolicies] = []

    def add(self, board: UInt8Array | None, policy: UInt8Array | None) -> None:
        """Pack the next examples.

        Args:
            board: Payloads of the boards, (m, bytes); ignored if the attribute ``board`` is None.
            policy: Payloads of the policies, (m, bytes); ignored if the attribute ``policy`` is None.
        """
        if self.board is not None and board is not None:
            self._boards.append(_pack_boards(board, self.board))
        if self.policy is not None and policy is not None:
            self._policies.append(_pack_policies(policy, self.policy))

    def finish(self) -> tuple[PackedBoards | None, PackedPolicies | None]:
        """Return all boards and policies, each None if it is not packed."""
        return (
            PackedBoards(*_joined(self._boards)) if self._boards else None,
            PackedPolicies(*_joined(self._policies)) if self._policies else None,
        )


def _joined(parts: list[PackedBoards] | list[PackedPolicies]) -> Iterator[npt.NDArray[Any]]:
    """Yield each field of all parts, concatenated."""
    for field in fields(parts[0]):
        yield np.concatenate([getattr(part, field.name) for part in parts])


def _pack_boards(payload: UInt8Array, kind: ArrayKind) -> PackedBoards:
    words, one = _words(payload, kind)
    stones = words == one
    invalid = overlapping = np.zeros(len(words), np.int64)
    if np.count_nonzero(words) != np.count_nonzero(stones):
        invalid = np.count_nonzero((words != 0) & ~stones, axis=1).astype(np.int64)
    cells = stones.shape[1] // 2
    both = stones[:, :cells] & stones[:, cells:]
    if both.any():
        overlapping = np.count_nonzero(both, axis=1).astype(np.int64)
    return PackedBoards(pack_boards(stones.reshape(-1, *kind.shape)), invalid, overlapping)


def _pack_policies(payload: UInt8Array, kind: ArrayKind) -> PackedPolicies:
    words, one = _words(payload, kind)
    nonzero = words != 0
    moves = nonzero.argmax(axis=1)
    one_hot = words[np.arange(len(words)), moves] == one
    if np.count_nonzero(nonzero) != len(words) or not one_hot.all():
        one_hot &= np.count_nonzero(nonzero, axis=1) == 1
    return PackedPolicies(moves, one_hot, payload[~one_hot])


def _words(payload: UInt8Array, kind: ArrayKind) -> tuple[npt.NDArray[Any], Any]:
    """Return the bits of cells as unsigned integers (n, cells) in C order, and the bits of the number 1.

    Comparing bits distinguishes values that are equal as numbers: -0.0 from 0, and a bool of 2 from 1.
    """
    size = np.dtype(kind.dtype).itemsize
    words = np.ascontiguousarray(payload).view(f"u{size}")
    if kind.fortran:
        axes = range(len(kind.shape), 0, -1)
        words = words.reshape(-1, *kind.shape[::-1]).transpose(0, *axes).reshape(len(words), -1)
    return words, np.ones(1, kind.dtype).view(f"u{size}")[0]
