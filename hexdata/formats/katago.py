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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import MAX_SIZE, MIN_SIZE, pack_boards
from hexdata.errors import FormatError, Reason
from hexdata.formats.gunzip import GunzipLimits
from hexdata.formats.npz import NpzFile, first_member
from hexdata.formats.source import BATCH_ROWS, SALVAGEABLE, RawBatch, Rejection
from hexdata.policy import SparsePolicies
from hexdata.schema import NO_PLY, raw_schema
from hexdata.storage import AnyPath, as_path

__all__ = ["DEFAULT_LIMITS", "FORMAT", "KataHexReader", "looks_like_katahex"]

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

FORMAT: Final = "katahex"
"""``SourceReader.format`` of these files."""

DEFAULT_LIMITS: Final = GunzipLimits(decompressed_bytes=1 << 40, ratio=250, ratio_floor=16 << 20)
"""Limits for these files. The arrays that are read compress about 20:1, as most planes are empty."""

_PLANES: Final = "binaryInputNCHWPacked"
_INPUTS: Final = "globalInputNC"
_POLICY: Final = "policyTargetsNCMove"
_TARGETS: Final = "globalTargetsNC"
_NEEDED: Final = (_PLANES, _INPUTS, _POLICY, _TARGETS)
_NAMES: Final = (*_NEEDED, "scoreDistrN", "valueTargetsNCHW", "qValueTargetsNCMove", "metadataInputNC")
"""Arrays of KataGo's files. Those that are not read contain targets that Hex does not have."""

_MAX_EDGE: Final = 64
"""Maximum of L."""
_BLOCK_BYTES: Final = 32 << 20
"""Approximate number of decompressed bytes that are processed together."""
_SUM_TOLERANCE: Final = 1e-3


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
_MAX_MOVES: Final = "extra.max_moves"
"""Extra column: moves after which the game ends without a winner, per cell of the board; null without such a
rule (``globalInputNC``, columns 4 and 5)."""


def looks_like_katahex(head: bytes) -> bool:
    """Return whether a file is a zip archive whose first member is an array of KataGo's training data.

    Args:
        head: The first bytes of the file.
    """
    return first_member(head) in _NAMES


def _any(cells: Array) -> Mask:
    """Return whether any value of each row is not 0, (k,)."""
    return np.asarray(cells.reshape(len(cells), -1).any(axis=1))


@dataclass
class _Checks:
    """The rows of a block that are still valid, and the first fault of the others."""

    valid: Mask
    faults: dict[int, tuple[Reason, str]] = field(default_factory=dict)

    def reject(self, wrong: Mask, reason: Reason, detail: Callable[[int], str]) -> None:
        """Reject rows that are still valid.

        Args:
            wrong: The rows, (k,).
            reason: Reason code.
            detail: Function of a row that returns the message.
        """
        for row in np.flatnonzero(wrong & self.valid).tolist():
            self.faults[row] = reason, detail(row)
        self.valid &= ~wrong


@dataclass(frozen=True)
class _Block:
    """The arrays of k rows that are needed, as they are in the file."""

    board: Mask
    """Cells on the board, (k, L, L)."""
    own: Mask
    """Stones of the player to move, (k, L, L)."""
    opponent: Mask
    cells: npt.NDArray[np.int32]
    """Visits of each cell, (k, L, L)."""
    passes: npt.NDArray[np.int32]
    """Visits of the pass, (k,)."""
    inputs: npt.NDArray[np.float32]
    """``globalInputNC``."""
    targets: npt.NDArray[np.float64]
    """``globalTargetsNC``."""
    padding: Mask
    """True if bits after the last cell are set, (k,)."""

    @property
    def red(self) -> Mask:
        """Whether red is to move, (k,)."""
        red: Mask = self.inputs[:, 0] == 1
        return red

    @property
    def has_policy(self) -> Mask:
        """Return whether the policy is given, not a placeholder: (k,)."""
        given: Mask = self.targets[:, _Column.POLICY_WEIGHT] > 0
        return given

    def result(self, column: int) -> Array:
        """Return win, loss and no result, (k, 3), beginning at a column of ``globalTargetsNC``."""
        return self.targets[:, column : column + 3]

    def red_share(self, column: int, rows: Array) -> npt.NDArray[np.float64]:
        """Return the share of red in a result: 0 if blue wins, 1 if red wins; no result is half for each.

        Args:
            column: First column of the result.
            rows: Indices of the rows, (m,).

        Returns:
            The shares, (m,), from 0 to 1, rounded to float32.
        """
        win, loss, _ = self.result(column)[rows].T
        share = 0.5 + 0.5 * np.where(self.red[rows], win - loss, loss - win)
        rounded: npt.NDArray[np.float32] = np.clip(share, 0.0, 1.0).astype(np.float32)
        return rounded.astype(np.float64)


class KataHexReader:
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
        limits: Limits on the sizes of the arrays and on their compression ratio.
        salvage: If True, a damaged file yields the rows before the damage instead of raising.

    Raises:
        FormatError: See :class:`hexdata.formats.npz.NpzFile`; also "unknown-layout" if the arrays have other
            types or shapes. With ``salvage``, a damaged archive is not an error: see ``damage``.
        OSError: The file cannot be read.
    """

    format: str = FORMAT
    targets: tuple[str, ...] = tuple(sorted(("root_value", "visits", "weight", _MAX_MOVES, *_EXTRAS, *_TD)))

    def __init__(
        self, path: str | AnyPath, *, limits: GunzipLimits = DEFAULT_LIMITS, salvage: bool = False
    ) -> None:
        self.path = as_path(path)
        self.board_size: int | None = None
        self._wanted_size: int | None = None
        self.damage: FormatError | None = None
        self._salvage = salvage
        self._counts = Counter(rows_without_game=0, side_positions=0, without_policy=0)
        self.header: dict[str, object] = {"counts": self._counts}
        self._file: NpzFile | None = None
        try:
            self._file = NpzFile(self.path, _NAMES, _NEEDED, limits)
            self._edge = self._check_layout(self._file)
        except FormatError as error:
            self.__exit__(None, None, None)
            self._handle_damage(error)
            self._file = None

    def select_board_size(self, board_size: int) -> None:
        """Reject the rows of all other board sizes, instead of those that differ from the first valid row.

        Args:
            board_size: N. Must be set before the first batch is read.
        """
        self._wanted_size = board_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.__exit__(kind, error, trace)

    def _handle_damage(self, error: FormatError) -> None:
        """Store the error in ``damage`` if the file is opened for salvage and is damaged; else raise it."""
        if not self._salvage or error.code not in SALVAGEABLE:
            raise error.at(self.path)
        self.damage = error

    def _check_layout(self, file: NpzFile) -> int:
        """Return L.

        Raises:
            FormatError: "unknown-layout".
        """
        rows, moves = file.rows, (file.arrays[_POLICY].shape or (0,))[-1]
        edge = math.isqrt(max(moves - 1, 0))
        channels = 1 if file.arrays[_POLICY].shape[1:2] == (1,) else 2
        expected = {
            _PLANES: (np.dtype(np.uint8), (rows, 22, (edge * edge + 7) // 8)),
            _INPUTS: (np.dtype(np.float32), (rows, 19)),
            _POLICY: (np.dtype(np.int16), (rows, channels, edge**2 + 1)),
            _TARGETS: (np.dtype(np.float32), (rows, 64)),
        }
        for name, (dtype, shape) in expected.items():
            array = file.arrays[name]
            if array.dtype != dtype or array.shape != shape or not MIN_SIZE <= edge <= _MAX_EDGE:
                raise FormatError(
                    "an array has another type or shape than in training data of KataHex",
                    path=self.path,
                    found=f"{name} of type {array.dtype}, shape {array.shape}",
                    expected=f"type {dtype}, shape {shape}, for boards up to {_MAX_EDGE} x {_MAX_EDGE}",
                )
        self.header |= {"arrays": {name: list(array.shape) for name, array in sorted(file.arrays.items())}}
        self.header["largest_board"] = edge
        return edge

    def batches(self) -> Iterator[RawBatch]:
        """Read the file once, from front to back, in memory that does not grow with the file.

        The board size is unknown before the first valid row: batches before it contain only rejections and
        have the schema of the smallest board.

        Yields:
            The rows of the file in order, at most ``BATCH_ROWS`` per batch.

        Raises:
            FormatError: "corrupt-zip" or "truncated", if a member is damaged and the file was not opened for
                salvage; "unknown-layout", if the rows are not of Hex.
        """
        if self._file is None:
            return
        row_bytes = sum(self._file.arrays[name].row_bytes for name in _NEEDED) + 24 * self._edge**2
        blocks = self._file.blocks(min(BATCH_ROWS, max(1, _BLOCK_BYTES // row_bytes)))
        record = 0
        while True:
            try:
                arrays = next(blocks, None)
            except FormatError as error:
                self._handle_damage(error)
                return
            if arrays is None:
                return
            batch = self._batch(arrays, record)
            record += batch.records
            yield batch

    def _batch(self, arrays: Mapping[str, Array], record: int) -> RawBatch:
        """Return a batch of rows, whose records are numbered from ``record`` on."""
        block = self._block(arrays, record)
        checks = _Checks(np.ones(len(block.red), bool))
        sizes = _check_boards(block, checks)
        if self._wanted_size is not None:
            self._check_size(sizes, checks)
        with np.errstate(invalid="ignore"):  # of infinite numbers, which are rejected
            _check_numbers(block, checks)
        _check_policies(block, checks)
        if self._wanted_size is None:
            self._check_size(sizes, checks)
        elif checks.valid.any():
            self.board_size = self._wanted_size
        size = self.board_size or MIN_SIZE
        rejected = [Rejection(record + row, *checks.faults[row]) for row in sorted(checks.faults)]
        return RawBatch(self._positions(block, np.flatnonzero(checks.valid), record, size), rejected)

    def _block(self, arrays: Mapping[str, Array], record: int) -> _Block:
        """Return the rows of a block.

        Raises:
            FormatError: "unknown-layout", if the rows are not of Hex.
        """
        planes, edge = arrays[_PLANES], self._edge
        targets = arrays[_TARGETS].astype(np.float64)
        others = np.flatnonzero(_any(planes[:, 4:]))
        versions = np.flatnonzero(targets[:, _Column.VERSION] != 1)
        for rows, found, expected in (
            (others, "input planes beyond the fourth", "boards, stones and the last move only, as in Hex"),
            (versions, f"another version in column {_Column.VERSION} of {_TARGETS}", "version 1"),
        ):
            if len(rows):
                raise FormatError(
                    "the file is not training data of KataHex, but of another game or version",
                    path=self.path,
                    record=record + int(rows[0]),
                    found=found,
                    expected=expected,
                )
        bits = np.unpackbits(planes[:, :3], axis=2)
        board, own, opponent = (
            bits[:, plane, : edge * edge].reshape(-1, edge, edge).astype(bool) for plane in range(3)
        )
        visits = arrays[_POLICY][:, 0].astype(np.int32)
        return _Block(
            board=board,
            own=own,
            opponent=opponent,
            cells=visits[:, :-1].reshape(-1, edge, edge),
            passes=visits[:, -1],
            inputs=arrays[_INPUTS],
            targets=targets,
            padding=_any(bits[:, :, edge * edge :]),
        )

    def _check_size(self, sizes: npt.NDArray[np.int64], checks: _Checks) -> None:
        """Reject the rows of another board size than the selected one, or than the file's first valid row."""
        if self._wanted_size is None and self.board_size is None and checks.valid.any():
            self.board_size = int(sizes[checks.valid][0])
        what = "the first valid row of the file" if self._wanted_size is None else "the selected one"
        expected = self._wanted_size or self.board_size or 0
        checks.reject(
            sizes != expected,
            Reason.BOARD_SIZE,
            lambda row: f"another board size than {what}; found {sizes[row]}; expected {expected}",
        )

    def _positions(self, block: _Block, rows: Array, record: int, n: int) -> pa.RecordBatch:
        """Return the valid rows as ``raw_schema(n, targets)``."""
        red, targets = block.red[rows], block.targets[rows]

        def in_board(planes: Array) -> Array:
            """Return planes (k, n, n) of the board, not transposed."""
            cut = planes[rows, :n, :n]
            return np.where(red[:, np.newaxis, np.newaxis], cut.transpose(0, 2, 1), cut)

        own, opponent = in_board(block.own), in_board(block.opponent)
        turned = red[:, np.newaxis, np.newaxis]
        boards = pack_boards(
            np.stack([np.where(turned, opponent, own), np.where(turned, own, opponent)], axis=1)
        )
        main = targets[:, _Column.MAIN_LINE] > 0
        outcome = block.red_share(_Column.OUTCOME, rows)
        decided = main & ((outcome == 0) | (outcome == 1))
        searched = block.result(_Column.SEARCH)[rows].any(axis=1)
        limited = block.inputs[rows, 4] == 1
        file_idx, line_idx = _game_ids(targets)
        turn = targets[:, _Column.TURN]
        has_turn = main & (line_idx >= 0) & (turn >= 0) & (turn < NO_PLY) & (turn % 1 == 0)
        move, policy = _policies(in_board(block.cells), block.passes[rows], block.has_policy[rows])
        self._counts["rows_without_game"] += int(np.count_nonzero(line_idx < 0))
        self._counts["side_positions"] += int(np.count_nonzero(~main))
        self._counts["without_policy"] += int(np.count_nonzero(~block.has_policy[rows]))
        columns: dict[str, Any] = {
            "record": record + rows,
            "board": pa.Array.from_buffers(
                pa.binary(boards.shape[1]), len(rows), [None, pa.py_buffer(np.ascontiguousarray(boards))]
            ),
            "move": move,
            "policy": policy,
            "value": outcome,
            "player_to_move": red.astype(np.uint8),
            "file_idx": pa.array(file_idx.astype(np.int32), mask=line_idx < 0),
            "line_idx": pa.array(line_idx.astype(np.int32), mask=line_idx < 0),
            "position_in_game": pa.array(np.where(has_turn, turn, 0).astype(np.uint16), mask=~has_turn),
            "winner": pa.array((outcome == 1).astype(np.uint8), mask=~decided),
            "root_value": pa.array(block.red_share(_Column.SEARCH, rows), mask=~searched),
            "visits": targets[:, _Column.VISITS].astype(np.int32),
            "weight": targets[:, _Column.WEIGHT].astype(np.float32),
            _MAX_MOVES: pa.array(block.inputs[rows, 5].astype(np.float64), mask=~limited),
        }
        columns |= {name: targets[:, column] for name, column in _EXTRAS.items()}
        columns |= {name: targets[:, first] - targets[:, first + 1] for name, first in _TD.items()}
        schema = raw_schema(n, self.targets)
        columns |= {name: pa.nulls(len(rows)) for name in schema.names if name not in columns}
        arrays = [pa.array(columns[each.name], each.type) for each in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _check_boards(block: _Block, checks: _Checks) -> npt.NDArray[np.int64]:
    """Reject invalid boards and players; return the board size of each row, (k,)."""
    edge = block.board.shape[1]
    sizes: npt.NDArray[np.int64] = block.board[:, 0].sum(axis=1, dtype=np.int64)
    within = np.arange(edge) < sizes[:, np.newaxis]
    square = within[:, :, np.newaxis] & within[:, np.newaxis, :]
    checks.reject(
        _any(block.board != square) | block.padding | (sizes == 0),
        Reason.BOARD_SHAPE,
        lambda row: (
            f"the board is not a square; found {block.board[row].sum()} cells, {sizes[row]} in the first row"
        ),
    )
    checks.reject(
        (sizes < MIN_SIZE) | (sizes > MAX_SIZE),
        Reason.BOARD_SIZE,
        lambda row: f"unsupported board size; found {sizes[row]}; expected {MIN_SIZE} to {MAX_SIZE}",
    )
    checks.reject(
        _any(block.own & block.opponent),
        Reason.BOARD_OVERLAP,
        lambda row: f"{(block.own & block.opponent)[row].sum()} cells have stones of both players",
    )
    stones = block.own | block.opponent
    checks.reject(
        _any(stones & ~block.board),
        Reason.BOARD_CELLS,
        lambda row: f"{(stones & ~block.board)[row].sum()} stones are outside the board",
    )
    checks.reject(
        (block.inputs[:, 0] != 0) & (block.inputs[:, 0] != 1),
        Reason.PLAYER_RANGE,
        lambda row: (
            f"the player to move in column 0 of {_INPUTS}; found {block.inputs[row, 0]}; "
            "expected 0 for black or 1 for white"
        ),
    )
    return sizes


def _check_numbers(block: _Block, checks: _Checks) -> None:
    """Reject rows with invalid results, visits, weights or extras."""
    outcome, search = block.result(_Column.OUTCOME), block.result(_Column.SEARCH)
    for result, what in ((outcome, "the result"), (search, "the search")):
        finite = ~_any(~np.isfinite(result))
        checks.reject(
            ~finite | _any(result < 0) | _any(result > 1 + _SUM_TOLERANCE),
            Reason.VALUE_RANGE,
            lambda row, result=result, what=what: (
                f"{what}: found win, loss and no result {result[row]}; "  # type: ignore[misc]
                "expected numbers from 0 to 1"
            ),
        )
    checks.reject(
        ~_any(outcome) | (outcome[:, 2] > 0.5),
        Reason.NO_WINNER,
        lambda row: f"the game has no winner; found win, loss and no result {outcome[row]}",
    )
    empty = ~_any(search)
    for result, missing, what in ((outcome, False, "the result"), (search, empty, "the search")):
        checks.reject(
            (np.abs(result.sum(axis=1) - 1) > _SUM_TOLERANCE) & ~np.asarray(missing),
            Reason.VALUE_RANGE,
            lambda row, result=result, what=what: (
                f"{what}: found win, loss and no result {result[row]}; "  # type: ignore[misc]
                "expected the sum 1"
            ),
        )
    numbers = [_Column.WEIGHT, _Column.POLICY_WEIGHT, _Column.VISITS, *_EXTRAS.values()]
    numbers += [column for first in _TD.values() for column in (first, first + 1)]
    for column in numbers:
        number = block.targets[:, column]
        wrong = ~np.isfinite(number)
        if column in (_Column.WEIGHT, _Column.POLICY_WEIGHT, _Column.VISITS):
            wrong |= number < 0
        if column == _Column.VISITS:
            wrong |= (number % 1 != 0) | (number >= 1 << 31)
        checks.reject(
            wrong,
            Reason.TARGET_RANGE,
            lambda row, column=column: (
                f"column {int(column)} of {_TARGETS}; "  # type: ignore[misc]
                f"found {block.targets[row, column]}"
            ),
        )


def _check_policies(block: _Block, checks: _Checks) -> None:
    """Reject rows whose policy is invalid; placeholders are not checked."""
    given = block.has_policy
    stones = block.own | block.opponent
    visited = block.cells > 0
    for wrong, what in (
        (_any(block.cells < 0) | (block.passes < 0), "negative visits"),
        (_any(visited & ~block.board), "visits outside the board"),
        (_any(visited & stones), "visits of a cell with a stone"),
        (~_any(visited), "no visits except of the pass"),
    ):
        checks.reject(given & wrong, Reason.POLICY_VALUES, lambda _row, what=what: f"the policy has {what}")  # type: ignore[misc]


def _policies(cells: Array, passes: Array, given: Mask) -> tuple[pa.Array, pa.Array]:
    """Return the columns ``move`` and ``policy`` of visits (k, n, n), of the pass (k,), and of rows (k,)."""
    visits = cells.reshape(len(cells), cells.shape[1] * cells.shape[2])
    total = visits.sum(axis=1) + passes
    best = visits.argmax(axis=1)
    single = given & (visits[np.arange(len(visits)), best] == total)
    dense = given & ~single
    probabilities = (visits[dense] / total[dense, np.newaxis]).astype(np.float32)
    move = pa.array(best.astype(np.uint16), mask=~single)
    return move, SparsePolicies.from_dense(probabilities).to_arrow(dense)


def _game_ids(targets: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return ``file_idx`` and ``line_idx`` of each row, (k,), from the hash of its game; -1 without one."""
    parts = targets[:, _Column.HASH : _Column.HASH + 6]
    limits = np.array([1 << 22, 1 << 22, 1 << 20] * 2)
    known = ((parts >= 0) & (parts < limits) & (parts % 1 == 0)).all(axis=1) & parts.any(axis=1)
    whole = np.where(known[:, np.newaxis], parts, 0).astype(np.int64)
    low, high = ((whole[:, i] | whole[:, i + 1] << 22) & 0x7FFF_FFFF for i in (0, 3))
    return np.where(known, low, -1), np.where(known, high, -1)
