"""Checks of the batches of readers that other packages provide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.board import BLUE, RED, check_board_size, unpack_boards
from hexdata.errors import FormatError, Reason, StoreError
from hexdata.formats.legacy import limits
from hexdata.formats.source import BATCH_ROWS, RawBatch, Rejection, SourceReader
from hexdata.policy import SparsePolicies
from hexdata.schema import (
    END_REASONS,
    EXTRA_PREFIX,
    MAX_EXTRAS,
    MAX_TIER,
    NO_PLY,
    SWAPS,
    binary_matrix,
    board_bytes,
    is_target,
    raw_schema,
)
from hexdata.text import shortened

_MAX_INT: Final = (1 << 31) - 1
_MAX_FLOAT: Final = float(np.finfo(np.float32).max)
_RANGES: Final = {
    "value": (0.0, 1.0, Reason.VALUE_RANGE),
    "player_to_move": (0, 1, Reason.PLAYER_RANGE),
    "winner": (0, 1, Reason.WINNER_VALUE),
    "value_sample_tier": (0, MAX_TIER, Reason.TIER_RANGE),
    "position_in_game": (0, NO_PLY - 1, Reason.POSITION_RANGE),
    "total_positions": (0, NO_PLY - 1, Reason.POSITION_RANGE),
    "file_idx": (0, _MAX_INT, Reason.GAME_ID),
    "line_idx": (0, _MAX_INT, Reason.GAME_ID),
    "policy_weight": (0.0, _MAX_FLOAT, Reason.TARGET_RANGE),
    "root_value": (0.0, 1.0, Reason.TARGET_RANGE),
    "visits": (0, _MAX_INT, Reason.TARGET_RANGE),
    "weight": (0.0, _MAX_FLOAT, Reason.TARGET_RANGE),
}
"""Smallest and largest valid number of each column, and the reason of other records. Nulls are valid,
infinite numbers are not."""
_ANY_NUMBER: Final = (-math.inf, math.inf, Reason.TARGET_RANGE)
"""The same of extra columns: not NaN."""


class CheckedReader:
    """A reader of another package whose batches are checked: a SourceReader.

    A record with an invalid board, policy, number or text is rejected. Errors in the layout of a batch, such
    as another schema or numbers of records that are not in order, end the file.

    Args:
        reader: The reader.
        name: Name of its format, for messages, and as its ``format`` if it has none.

    Raises:
        FormatError: "reader-error", if its format or its targets are invalid.
    """

    format: str
    board_size: int | None
    targets: tuple[str, ...]
    header: dict[str, object]
    damage: FormatError | None

    def __init__(self, reader: SourceReader, name: str) -> None:
        self._reader, self.format = reader, name
        # What a format of hexdata's own stands for is known to later stages, so no other reader may state it.
        self._require(reader.format in ("", name), f"its format is {reader.format!r}")
        self.targets = tuple(reader.targets)
        # Names that differ only in case would be the same column of a query.
        are_different = len({name.lower() for name in self.targets}) == len(self.targets)
        extras = sum(name.startswith(EXTRA_PREFIX) for name in self.targets)
        are_valid = all(map(is_target, self.targets)) and extras <= MAX_EXTRAS
        fault = f"its targets are {self.targets}, not different names such as extra.time"
        self._require(are_different and are_valid, fault)

    def __getattr__(self, name: str) -> Any:
        """Return ``board_size``, ``header`` or ``damage`` of the reader, which change while it reads."""
        return getattr(self._reader, name)

    def __enter__(self) -> Self:
        self._reader.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._reader.__exit__(*error)

    def select_board_size(self, board_size: int) -> None:
        """Reject the records of all other board sizes, if the reader has this method, too."""
        if select := getattr(self._reader, "select_board_size", None):
            select(board_size)

    def batches(self) -> Iterator[RawBatch]:
        """Yield the batches of the reader. Records with invalid values are rejected.

        Raises:
            FormatError: "reader-error", if a batch violates the interface; and the errors of the reader.
        """
        records, size = 0, None
        for batch in self._reader.batches():
            rows = batch.positions
            if rows.num_rows:
                # A reader knows the size only with its first positions; from then on it must not change.
                size = size or check_board_size(self._reader.board_size or 0)
                self._check_layout(rows, size)
            found = sorted([*rows.column("record").to_pylist(), *(each.record for each in batch.rejected)])
            are_next = found == list(range(records, records + len(found)))
            self._require(are_next, f"its records {found[:3]} do not follow each other from {records:,} on")
            reasons = {each.reason for each in batch.rejected} - set(Reason)
            self._require(not reasons, f"the reasons {reasons}")
            records += len(found)
            yield _without_invalid(batch, size) if size and rows.num_rows else batch

    def _check_layout(self, rows: pa.RecordBatch, size: int) -> None:
        """Check board size, schema, number of rows, and arrays of a batch."""
        self._require(size == self._reader.board_size, "its board_size changes")
        is_same = rows.schema.equals(raw_schema(size, self.targets)) and rows.num_rows <= BATCH_ROWS
        self._require(is_same, f"its schema is not raw_schema({size}, {self.targets}), or has too many rows")
        try:
            rows.validate(full=True)
        except pa.ArrowInvalid as error:
            self._require(False, str(error))
        nulls = [name for name in ("record", "board", "value") if rows.column(name).null_count]
        self._require(not nulls, f"nulls in {nulls}")

    def _require(self, condition: bool, fault: str) -> None:
        """Raise "reader-error" unless a condition holds."""
        if not condition:
            reason = f"the reader of the format {self.format!r}, of another package, returned invalid data"
            raise FormatError(f"{reason}: {fault}", Reason.READER_ERROR)


def _without_invalid(batch: RawBatch, n: int) -> RawBatch:
    """Return a batch, whose layout is valid, without the rows that have invalid values: they are rejected."""
    rows, rejected = batch.positions, [*batch.rejected]
    records, valid = rows.column("record").to_pylist(), np.ones(rows.num_rows, bool)
    for name, reason, wrong in _faults(rows, n):
        for row in np.flatnonzero(wrong & valid).tolist():
            found = shortened(str(rows.column(name)[row].as_py()))
            rejected.append(Rejection(records[row], reason, f"an invalid {name}; found {found}"))
        valid &= ~wrong
    if valid.all():
        return batch
    return RawBatch(rows.filter(pa.array(valid)), sorted(rejected, key=lambda each: each.record))


def _faults(rows: pa.RecordBatch, n: int) -> Iterator[tuple[str, Reason, npt.NDArray[np.bool_]]]:
    """Yield the columns of a batch, the reason of an invalid value, and which rows have one."""
    extras = {name: _ANY_NUMBER for name in rows.schema.names if name.startswith(EXTRA_PREFIX)}
    for name, (low, high, reason) in (_RANGES | {"move": (0, n * n - 1, Reason.TRMPH_CELL)} | extras).items():
        if name in rows.schema.names:
            values = pc.fill_null(rows.column(name), low).to_numpy(zero_copy_only=False)
            yield name, reason, ~((values >= low) & (values <= high))  # NaN, too
    for name, possible in (("end_reason", END_REASONS), ("swap", SWAPS)):
        wrong = [text not in (None, *possible) for text in rows.column(name).to_pylist()]
        yield name, Reason.READER_ERROR, np.array(wrong)
    lengths = pc.binary_length(rows.column("metadata")).fill_null(0).to_numpy(zero_copy_only=False)
    # The limits of legacy files hold for all formats, as later stages load the metadata of many records.
    are_many = np.cumsum(lengths) > limits.METADATA_BYTES + limits.METADATA_MEAN * rows.num_rows
    yield "metadata", Reason.METADATA_SIZE, (lengths > limits.METADATA_BYTES) | are_many
    packed = binary_matrix(rows.column("board"))
    # Boards are compared by their bytes later, so the bits after the last cell must be equal, too.
    yield "board", Reason.BOARD_CELLS, packed[:, -1] & ((1 << (8 * board_bytes(n) - 2 * n * n)) - 1) > 0
    planes = unpack_boards(packed, n, np.uint8)
    yield "board", Reason.BOARD_OVERLAP, np.asarray((planes[:, BLUE] & planes[:, RED]).any(axis=(1, 2)))
    policies = rows.column("policy")
    if not _are_valid(policies, n * n):  # nearly always, one call shows that all are
        wrong = [not _are_valid(policies.slice(row, 1), n * n) for row in range(len(policies))]
        yield "policy", Reason.POLICY_VALUES, np.array(wrong)


def _are_valid(policies: pa.Array, cells: int) -> bool:
    try:
        return SparsePolicies.from_arrow(policies, cells) is not None
    except (pa.ArrowInvalid, StoreError):
        return False
