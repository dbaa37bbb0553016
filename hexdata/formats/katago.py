"""Reader of the training data of KataHex, in the ``.npz`` files of KataGo's self-play and of its shuffle.

KataHex is KataGo for Hex, branches Hex2022 and Hex2024 of github.com/hzyhhzy/KataGomo. Its files have these
arrays (cpp/dataio/trainingwrite.h and cpp/neuralnet/nninputs.cpp describe them; L is the edge of the largest
board of the run, N the number of rows):

- ``binaryInputNCHWPacked`` uint8 (N, 22, ceil(L·L / 8)): planes of bits, the highest bit of a byte first.
  Plane 0 is the board, in the corner of row 0 and column 0; plane 1 the stones of the player to move, plane 2
  those of the opponent, plane 3 the last move in some runs. The other planes are 0.
- ``globalInputNC`` float32 (N, 19): column 0 is 1 if white moves.
- ``policyTargetsNCMove`` int16 (N, 2, L·L + 1): visits of the cells and of the pass, of this turn and of the
  next one.
- ``globalTargetsNC`` float32 (N, 64): value targets and metadata, see ``_Column``.

Black moves first and connects top and bottom, as blue does here. Planes and policy of a row in which white
moves are transposed, so that the player to move always connects top and bottom.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import MAX_SIZE, MIN_SIZE, pack_boards
from hexdata.errors import FormatError, Reason
from hexdata.formats.gunzip import GunzipLimits
from hexdata.formats.npz import LOCAL_HEADER, NpzFile
from hexdata.formats.source import BATCH_ROWS, FileReader, RawBatch, Rejection, SourceFormat, raw_batch
from hexdata.policy import SparsePolicies
from hexdata.schema import NO_PLY
from hexdata.storage import AnyPath

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

_PLANES: Final = "binaryInputNCHWPacked"
_INPUTS: Final = "globalInputNC"
_POLICY: Final = "policyTargetsNCMove"
_TARGETS: Final = "globalTargetsNC"
_NEEDED: Final = (_PLANES, _INPUTS, _POLICY, _TARGETS)
_NAMES: Final = (*_NEEDED, "scoreDistrN", "valueTargetsNCHW", "qValueTargetsNCMove", "metadataInputNC")
"""Arrays of KataGo's files. Those that are not read contain targets that Hex does not have."""

_MAX_EDGE: Final = 64
"""Maximum of L, to which smaller boards are padded. It limits the memory of a row."""
_BLOCK_BYTES: Final = 32 << 20
"""Approximate number of decompressed bytes that are processed together."""
_SUM_TOLERANCE: Final = 1e-3
"""The sum of three shares in float32 need not be exactly 1."""


class _Column(IntEnum):
    """Columns of ``globalTargetsNC``, from the view of the player to move."""

    OUTCOME = 0
    """Win, loss, no result (3 columns): the result of the game, or the search of a side position."""
    TD_LONG = 4
    """Averages of the searches of this turn and the later ones: win, loss, no result; also at 8 and 12."""
    SEARCH = 16
    """Win, loss, no result: the search of this turn."""
    WEIGHT = 25
    POLICY_WEIGHT = 26
    """0 if the policy is a placeholder."""
    POLICY_SURPRISE = 30
    POLICY_ENTROPY = 31
    SEARCH_ENTROPY = 32
    MAIN_LINE = 33
    """1 if the later boards of the game are given, 0 for a side position that was not played."""
    HASH = 41
    """Random 128-bit number of the game: 6 columns of 22, 22, 20, 22, 22 and 20 bits."""
    TURN = 51
    GAME_TYPE = 55
    NETWORK = 57
    """Win minus loss according to the network without search."""
    VISITS = 60
    VERSION = 63


_EXTRAS: Final = {
    "extra.game_type": _Column.GAME_TYPE,
    "extra.network_win_loss": _Column.NETWORK,
    "extra.policy_entropy": _Column.POLICY_ENTROPY,
    "extra.policy_surprise": _Column.POLICY_SURPRISE,
    "extra.search_entropy": _Column.SEARCH_ENTROPY,
    "extra.search_no_result": _Column.SEARCH + 2,
}
"""Extra columns that are columns of ``globalTargetsNC``, from the view of the player to move."""
_TD: Final = {"extra.td_long": 4, "extra.td_mid": 8, "extra.td_short": 12}
"""Extra columns that are win minus loss of an average over later searches, from the view of the player to
move."""
_NOT_NEGATIVE: Final = [_Column.WEIGHT, _Column.POLICY_WEIGHT, _Column.VISITS]
_CHECKED: Final = [
    *map(int, (*_NOT_NEGATIVE, *_EXTRAS.values())),
    *(i + k for i in _TD.values() for k in (0, 1)),
]
"""Columns whose numbers must be finite, besides those of the results."""
_MAX_MOVES: Final = "extra.max_moves"
"""Extra column: moves after which the game ends without a winner, per cell of the board; null without such a
rule (``globalInputNC``, columns 4 and 5)."""


def _any(cells: Array) -> Mask:
    """Return whether any value of each row is not 0, (k,)."""
    return np.asarray(cells.any(axis=tuple(range(1, cells.ndim))))


class _Block:
    """The arrays of k rows, as they are in the file.

    Attributes:
        planes: Cells on the board, stones of the player to move, stones of the opponent: (3, k, L, L) bool.
        padding: True if bits after the last cell are set, (k,).
        visits: Visits of each cell, and of the pass, (k, L·L + 1).
        inputs: ``globalInputNC``.
        targets: ``globalTargetsNC`` as float64.
        sizes: Cells along an edge of the board, (k,).
        red: Whether red is to move, (k,).
        has_policy: Whether the policy is given, not a placeholder: (k,).
    """

    def __init__(self, arrays: Mapping[str, Array], edge: int) -> None:
        bits = np.unpackbits(arrays[_PLANES][:, :3], axis=2)
        self.planes = bits[:, :, : edge * edge].reshape(-1, 3, edge, edge).astype(bool).swapaxes(0, 1)
        self.padding = _any(bits[:, :, edge * edge :])
        self.visits = arrays[_POLICY][:, 0].astype(np.int32)
        self.inputs, self.targets = arrays[_INPUTS], arrays[_TARGETS].astype(np.float64)
        self.sizes = self.planes[0, :, 0].sum(axis=1, dtype=np.int64)
        self.red = self.inputs[:, 0] == 1
        self.has_policy = self.targets[:, _Column.POLICY_WEIGHT] > 0

    def red_share(self, column: int) -> npt.NDArray[np.float64]:
        """Return the share of red in win, loss and no result, which begin at a column of ``globalTargetsNC``.

        Returns:
            The shares, (k,), rounded to float32: 0 if blue wins, 1 if red wins; no result is half for each.
        """
        win, loss = self.targets[:, column], self.targets[:, column + 1]
        share = 0.5 + 0.5 * np.where(self.red, win - loss, loss - win)
        return np.asarray(np.clip(share, 0.0, 1.0).astype(np.float32).astype(np.float64))


class KataHexReader(FileReader):
    """Reader of one file: a :class:`hexdata.formats.source.SourceReader`.

    Each row is one record. The value is the result of the game: 0 if blue won, 1 if red won. Positions that
    were searched but not played (side positions) have the result of their search as value, and no winner.
    ``root_value`` is the search of the turn, ``visits`` its number of visits, ``weight`` the weight of the
    row; no result of a search counts as half a win for each. The policy is the number of visits of each cell
    divided by that of all cells and the pass: its sum is below 1 by the share of the pass. It is null if the
    row has a placeholder.

    Games have the ids ``file_idx`` and ``line_idx``, 31 bits each of the random hash of the game, and
    ``position_in_game`` is the turn, so that rows of a game can be in any order and in several files. Rows
    that the self-play wrote twice, because of their weight, are two positions. Side positions belong to the
    game, but have no ``position_in_game``.

    A row is rejected with one of these reasons: "board-shape" (the board is not a square), "board-size" (not
    from 3 to 32, or another size than the first valid row), "board-overlap", "board-cells", "player-range",
    "no-winner" (the game ended without a winner, or was not finished), "value-range", "target-range",
    "policy-values" (negative visits, visits of a stone or outside the board, or of nothing but the pass).

    Args:
        path: Local file or remote object.
        salvage: If True, a damaged file yields the rows before the damage instead of raising.
    """

    limits: ClassVar[GunzipLimits] = GunzipLimits(decompressed_bytes=1 << 40, ratio=250, ratio_floor=16 << 20)
    """Limits on the sizes of the arrays and on their compression ratio. The arrays that are read compress
    about 20:1, as most planes are empty."""
    targets: tuple[str, ...] = tuple(sorted(("root_value", "visits", "weight", _MAX_MOVES, *_EXTRAS, *_TD)))

    def __init__(self, path: str | AnyPath, *, salvage: bool = False) -> None:
        super().__init__(path, salvage=salvage)
        self._counts = Counter(rows_without_game=0, side_positions=0, without_policy=0)
        self.header = {"counts": self._counts}

    def batches(self) -> Iterator[RawBatch]:
        """Read the file once, from front to back, in memory that does not grow with the file.

        The board size is unknown before the first valid row: batches before it contain only rejections and
        have the schema of the smallest board.

        Yields:
            The rows of the file in order, at most ``BATCH_ROWS`` per batch.

        Raises:
            FormatError: See :class:`hexdata.formats.npz.NpzFile`, unless the archive is damaged and the file
                was opened for salvage; "unknown-layout" also if the arrays have other types or shapes, or the
                rows are not of Hex.
            OSError: The file cannot be read.
        """
        record = 0
        try:
            with NpzFile(self.path, _NAMES) as file:
                edge = self._check_layout(file)
                # About 24 bytes per cell for what is made of a row: unpacked planes, visits, probabilities.
                row_bytes = sum(file.arrays[name].itemsize for name in _NEEDED) + 24 * edge**2
                for arrays in file.blocks(min(BATCH_ROWS, max(1, _BLOCK_BYTES // row_bytes))):
                    yield self._batch(arrays, edge, record)
                    record += len(arrays[_TARGETS])
        except FormatError as error:
            self._stop_at(error)

    def _check_layout(self, file: NpzFile) -> int:
        """Select the arrays that are read; return L.

        Raises:
            FormatError: As :meth:`batches`.
        """
        reason = "the arrays are not those of training data of KataHex"
        if not set(_NEEDED) <= file.headers.keys():
            raise FormatError(reason, found=sorted(file.headers), expected=_NEEDED)
        file.select(_NEEDED, self.limits)
        shape = file.arrays[_POLICY].shape
        edge = math.isqrt(max((shape or (0,))[-1] - 1, 0))
        # Only the policy of this turn is read, so a file may lack that of the next one.
        expected = {
            _PLANES: np.dtype((np.uint8, (22, (edge * edge + 7) // 8))),
            _INPUTS: np.dtype((np.float32, (19,))),
            _POLICY: np.dtype((np.int16, (1 if shape[:1] == (1,) else 2, edge * edge + 1))),
            _TARGETS: np.dtype((np.float32, (64,))),
        }
        found = {name: file.arrays[name] for name in expected}
        if found != expected or not MIN_SIZE <= edge <= _MAX_EDGE:
            raise FormatError(reason, found=found, expected=f"{expected}, up to {_MAX_EDGE} x {_MAX_EDGE}")
        shapes = {name: [file.rows, *row.shape] for name, row in sorted(file.arrays.items())}
        self.header |= {"arrays": shapes, "largest_board": edge}
        return edge

    def _batch(self, arrays: Mapping[str, Array], edge: int, record: int) -> RawBatch:
        """Return a batch of rows, whose records are numbered from ``record`` on.

        Raises:
            FormatError: "unknown-layout", if the rows are not of Hex.
        """
        # Files of other games have the same arrays; only the planes that Hex does not use differ.
        other = _any(arrays[_PLANES][:, 4:]) | (arrays[_TARGETS][:, _Column.VERSION] != 1)
        if other.any():
            reason = "training data of KataGo for another game, or of another version than 1"
            raise FormatError(reason, record=record + int(other.argmax()))
        block = _Block(arrays, edge)
        sizes, valid = block.sizes, np.ones(len(block.sizes), bool)
        rejected: list[Rejection] = []

        def reject(reason: Reason, wrong: Mask, what: str) -> None:
            """Reject rows that are still valid, for their first fault."""
            for row in np.flatnonzero(wrong & valid).tolist():
                size = int(sizes[row]) if reason == Reason.BOARD_SIZE else None
                rejected.append(Rejection(record + row, reason, what, size))
            valid[wrong] = False

        for fault in _faults(block, self.board_size if self._is_size_selected else None):
            reject(*fault)
        if self.board_size is None and valid.any():
            self.board_size = int(sizes[valid][0])
        n = self.board_size or MIN_SIZE
        reject(Reason.BOARD_SIZE, sizes != n, f"another board size than {n}, that of the first valid row")
        # Made again of the valid rows, so that no later step meets numbers out of range.
        kept = _Block({name: array[valid] for name, array in arrays.items()}, edge)
        positions = self._positions(kept, record + np.flatnonzero(valid), n)
        return RawBatch(positions, sorted(rejected, key=lambda each: each.record))

    def _positions(self, block: _Block, records: Array, n: int) -> pa.RecordBatch:
        """Return valid rows with these records as ``raw_schema(n, targets)``."""
        targets, red, edge = block.targets, block.red, block.planes.shape[2]

        def in_board(planes: Array) -> Array:
            """Return planes (k, n, n) of the board. In the file they are transposed if red is to move."""
            cut = planes[:, :n, :n]
            return np.where(red[:, np.newaxis, np.newaxis], cut.transpose(0, 2, 1), cut)

        stones = np.stack([in_board(block.planes[1]), in_board(block.planes[2])], axis=1)
        # The planes begin with the player to move, those of the store with blue.
        stones[red] = stones[red][:, ::-1]
        main = targets[:, _Column.MAIN_LINE] > 0
        outcome = block.red_share(_Column.OUTCOME)
        # Both ids of a game are 31 bits of its hash, two numbers of 64 bits in three columns each.
        parts, limits = targets[:, _Column.HASH :][:, :6], np.array([1 << 22, 1 << 22, 1 << 20] * 2)
        # A hash of 0 in all columns means that there is none.
        known = ((parts >= 0) & (parts < limits) & (parts % 1 == 0)).all(axis=1) & parts.any(axis=1)
        whole = np.where(known[:, np.newaxis], parts, 0).astype(np.int64)
        # 31 of the 64 bits, as the columns of the ids are int32.
        file_idx, line_idx = ((whole[:, i] | whole[:, i + 1] << 22) & 0x7FFF_FFFF for i in (0, 3))
        turn = targets[:, _Column.TURN]
        has_turn = main & known & (turn >= 0) & (turn < NO_PLY) & (turn % 1 == 0)
        visits = in_board(block.visits[:, :-1].reshape(-1, edge, edge)).reshape(len(red), n * n)
        # The pass has no cell in the store, but its visits are a share of the total.
        total = visits.sum(axis=1) + block.visits[:, -1]
        best = visits.argmax(axis=1)
        # A policy of one cell is a move, as the table has it for all formats.
        single = block.has_policy & (visits[np.arange(len(visits)), best] == total)
        dense = block.has_policy & ~single
        probabilities = (visits[dense] / total[dense, np.newaxis]).astype(np.float32)
        has_search = _any(targets[:, _Column.SEARCH : _Column.SEARCH + 3])
        self._counts["rows_without_game"] += int(np.count_nonzero(~known))
        self._counts["side_positions"] += int(np.count_nonzero(~main))
        self._counts["without_policy"] += int(np.count_nonzero(~block.has_policy))
        columns: dict[str, Any] = {
            "record": records,
            "move": pa.array(best.astype(np.uint16), mask=~single),
            "policy": SparsePolicies.from_dense(probabilities).to_arrow(dense),
            "value": outcome,
            "player_to_move": red.astype(np.uint8),
            "file_idx": pa.array(file_idx, mask=~known),
            "line_idx": pa.array(line_idx, mask=~known),
            "position_in_game": pa.array(turn, mask=~has_turn),
            # The value of a side position is that of a search, which names no winner.
            "winner": pa.array(outcome, mask=~(main & ((outcome == 0) | (outcome == 1)))),
            "root_value": pa.array(block.red_share(_Column.SEARCH), mask=~has_search),
            "visits": targets[:, _Column.VISITS].astype(np.int32),
            "weight": targets[:, _Column.WEIGHT].astype(np.float32),
            _MAX_MOVES: pa.array(block.inputs[:, 5], mask=block.inputs[:, 4] != 1),
        }
        columns |= {name: targets[:, column] for name, column in _EXTRAS.items()}
        columns |= {name: targets[:, first] - targets[:, first + 1] for name, first in _TD.items()}
        return raw_batch(n, self.targets, pack_boards(stones), columns)


@np.errstate(invalid="ignore")  # of infinite numbers, which are rejected
def _faults(block: _Block, wanted_size: int | None) -> list[tuple[Reason, Mask, str]]:
    """Return the faults that rows may have, in the order in which they are compared with a row.

    Args:
        block: The rows.
        wanted_size: Board size of the rows to keep. None: any.

    Returns:
        For each fault: the reason code of the rows that are rejected, the rows (k,), and what is wrong.
    """
    board, own, opponent = block.planes
    sizes, stones, targets = block.sizes, own | opponent, block.targets
    within = np.arange(board.shape[1]) < sizes[:, np.newaxis]
    is_square = board == within[:, :, np.newaxis] & within[:, np.newaxis, :]
    outcome, search = (targets[:, first : first + 3] for first in (_Column.OUTCOME, _Column.SEARCH))
    both = np.stack([outcome, search])
    shares = (both >= 0) & (both <= 1 + _SUM_TOLERANCE)  # not NaN
    # A row may have no search.
    sums = (np.abs(both.sum(axis=2) - 1) <= _SUM_TOLERANCE) | ~both.any(axis=2)
    numbers, visits = targets[:, _CHECKED], targets[:, _Column.VISITS]
    wrong = _any(~np.isfinite(numbers)) | _any(targets[:, _NOT_NEGATIVE] < 0)
    wrong |= (visits % 1 != 0) | (visits >= 1 << 31)
    wrong |= np.isnan(block.inputs[:, 5]) & (block.inputs[:, 4] == 1)
    visited = block.visits[:, :-1].reshape(board.shape) > 0
    bad_visits = _any(block.visits < 0) | _any(visited & (stones | ~board)) | ~_any(visited)
    return [
        (Reason.BOARD_SHAPE, _any(~is_square) | block.padding | (sizes == 0), "the board is not a square"),
        (Reason.BOARD_SIZE, (sizes < MIN_SIZE) | (sizes > MAX_SIZE), "the board size is not from 3 to 32"),
        (Reason.BOARD_OVERLAP, _any(own & opponent), "cells have stones of both players"),
        (Reason.BOARD_CELLS, _any(stones & ~board), "stones are outside the board"),
        (Reason.PLAYER_RANGE, ~np.isin(block.inputs[:, 0], (0, 1)), f"column 0 of {_INPUTS} is not 0 or 1"),
        # What other faults rows of other sizes have does not matter.
        (Reason.BOARD_SIZE, sizes != (wanted_size or sizes), f"not of the selected size {wanted_size}"),
        (Reason.VALUE_RANGE, ~shares.all(axis=(0, 2)), "results or searches are not shares from 0 to 1"),
        (Reason.NO_WINNER, ~_any(outcome) | (outcome[:, 2] > 0.5), "the game has no winner"),
        (Reason.VALUE_RANGE, ~sums.all(axis=0), "the sum of the shares of the result or search is not 1"),
        (Reason.TARGET_RANGE, wrong, f"a number of {_TARGETS} is out of range"),
        # Placeholders are not compared.
        (Reason.POLICY_VALUES, block.has_policy & bad_visits, "visits of no empty cell, or negative ones"),
    ]


def _is_katahex(head: bytes, _name: str) -> bool:
    """Return whether a file is a zip archive whose first member is an array of KataGo's training data."""
    name = head[30:]  # after the fixed part of a local header
    return head.startswith(LOCAL_HEADER) and name.startswith(tuple(each.encode() for each in _NAMES))


FORMAT: Final = SourceFormat(
    "katahex", ("*.npz",), _is_katahex, KataHexReader, "data of KataHex", options=("salvage",)
)
