"""Checks of the batches of readers that other packages provide."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hexdata.board import BLUE, RED, check_board_size, unpack_boards
from hexdata.errors import FormatError, Reason, StoreError
from hexdata.formats.legacy.limits import DEFAULT_LIMITS
from hexdata.formats.source import BATCH_ROWS, RawBatch, Rejection, SourceReader
from hexdata.policy import SparsePolicies
from hexdata.schema import (
    END_REASONS,
    GAME_FORMATS,
    MAX_TIER,
    NO_PLY,
    SWAPS,
    board_bytes,
    is_target,
    raw_schema,
)

__all__ = ["CheckedReader"]

_RANGES: Final = {
    "value": (0.0, 1.0),
    "player_to_move": (0, 1),
    "winner": (0, 1),
    "value_sample_tier": (0, MAX_TIER),
    "position_in_game": (0, NO_PLY - 1),
    "total_positions": (0, NO_PLY - 1),
    "file_idx": (0, (1 << 31) - 1),
    "line_idx": (0, (1 << 31) - 1),
    "root_value": (0.0, 1.0),
    "visits": (0, (1 << 31) - 1),
    "weight": (0.0, float(np.finfo(np.float32).max)),
}
"""Smallest and largest valid number of each column; nulls are valid."""
_REASONS: Final = {
    "value": Reason.VALUE_RANGE,
    "player_to_move": Reason.PLAYER_RANGE,
    "winner": Reason.WINNER_VALUE,
    "value_sample_tier": Reason.TIER_RANGE,
    "position_in_game": Reason.POSITION_RANGE,
    "total_positions": Reason.POSITION_RANGE,
    "file_idx": Reason.GAME_ID,
    "line_idx": Reason.GAME_ID,
    "move": Reason.TRMPH_CELL,
    "root_value": Reason.TARGET_RANGE,
    "visits": Reason.TARGET_RANGE,
    "weight": Reason.TARGET_RANGE,
}
"""Reason of a record with a number outside its range."""
_TEXTS: Final = {"end_reason": END_REASONS, "swap": SWAPS}


class CheckedReader:
    """A reader of another package whose batches are checked: a SourceReader.

    A record with an invalid board, policy, number or text is rejected. Errors in the layout of a batch, such
    as another schema or numbers of records that are not in order, end the file.

    Args:
        reader: The reader.
        name: Name of its format, for messages.

    Raises:
        FormatError: "reader-error", if its format or its targets are invalid.
    """

    format: str
    board_size: int | None
    targets: tuple[str, ...]
    header: dict[str, object]
    damage: FormatError | None

    def __init__(self, reader: SourceReader, name: str) -> None:
        self._reader = reader
        self._name = name
        self.targets = tuple(reader.targets)
        if reader.format in GAME_FORMATS or reader.format.startswith("legacy"):
            raise self._error("its format", reader.format, f"another name, such as {name}")
        if len(set(self.targets)) < len(self.targets) or not all(map(is_target, self.targets)):
            raise self._error("its targets", self.targets, "different names such as visits, extra.time")
        self._copy_state()

    def _copy_state(self) -> None:
        """Set the attributes of the interface to those of the reader."""
        reader = self._reader
        self.format, self.board_size = reader.format, reader.board_size
        self.header, self.damage = reader.header, reader.damage

    def __enter__(self) -> Self:
        self._reader.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)

    def batches(self) -> Iterator[RawBatch]:
        """Yield the batches of the reader. Records with invalid values are rejected.

        Raises:
            FormatError: "reader-error", if a batch violates the interface; and the errors of the reader.
        """
        records = 0
        size: int | None = None
        for batch in self._reader.batches():
            if batch.positions.num_rows:
                size = size or self._reader.board_size
                n = self._check_layout(batch.positions, size)
            found = sorted(
                [*batch.positions.column("record").to_pylist(), *(each.record for each in batch.rejected)]
            )
            if found != list(range(records, records + len(found))):
                raise self._error(
                    "its records", found[:3], f"each record once, in order, and {records:,} as the next"
                )
            if any(each.reason not in set(Reason) for each in batch.rejected):
                raise self._error(
                    "a reason", {each.reason for each in batch.rejected}, "hexdata.errors.Reason"
                )
            records += len(found)
            self._copy_state()
            yield _without_invalid(batch, n) if batch.positions.num_rows else batch
        self._copy_state()

    def _check_layout(self, rows: pa.RecordBatch, size: int | None) -> int:
        """Return the board size of a batch.

        Raises:
            FormatError: "reader-error", if its schema or its number of rows is wrong, or arrays are damaged.
        """
        if size is None or size != self._reader.board_size:
            raise self._error("its board_size", self._reader.board_size, "one size for all positions")
        n = check_board_size(size)
        if not rows.schema.equals(raw_schema(n, self.targets)):
            raise self._error(
                "the schema of a batch", str(rows.schema)[:200], "raw_schema(board_size, targets)"
            )
        if rows.num_rows > BATCH_ROWS:
            raise self._error("the rows of a batch", rows.num_rows, f"at most {BATCH_ROWS:,}")
        try:
            rows.validate(full=True)
        except pa.ArrowInvalid as error:
            raise self._error("a batch", error, "valid Arrow arrays") from error
        if any(rows.column(name).null_count for name in ("record", "board", "value")):
            raise self._error("a record, board or value", None, "no nulls")
        return n

    def _error(self, what: str, found: object, expected: str) -> FormatError:
        return FormatError(
            f"the reader of the format {self._name!r}, of another package, returned invalid data: {what}",
            code=Reason.READER_ERROR,
            found=found,
            expected=expected,
        )


def _without_invalid(batch: RawBatch, n: int) -> RawBatch:
    """Return a batch whose rows with invalid values are rejected, with the first fault of each.

    Args:
        batch: The batch, whose layout is valid.
        n: Cells along an edge.
    """
    rows = batch.positions
    faults: dict[int, tuple[Reason, str]] = {}
    for name, (low, high) in (_RANGES | {"move": (0, n * n - 1)}).items():
        if name in rows.schema.names:
            values = pc.fill_null(rows.column(name), low).to_numpy(zero_copy_only=False)
            for row in np.flatnonzero(~((values >= low) & (values <= high))).tolist():  # NaN, too
                detail = f"{name}; found {values[row]}; expected {low} to {high}"
                faults.setdefault(row, (_REASONS[name], detail))
    for name, texts in _TEXTS.items():
        for row, text in enumerate(rows.column(name).to_pylist()):
            if text is not None and text not in texts:
                detail = f"{name}; found {text[:40]!r}; expected {', '.join(texts)}"
                faults.setdefault(row, (Reason.READER_ERROR, detail))
    lengths = pc.binary_length(rows.column("metadata")).fill_null(0).to_numpy(zero_copy_only=False)
    limits = DEFAULT_LIMITS
    most = limits.metadata_bytes + limits.metadata_mean * rows.num_rows
    for row in np.flatnonzero((lengths > limits.metadata_bytes) | (np.cumsum(lengths) > most)).tolist():
        detail = f"metadata of {lengths[row]:,} bytes; {limits.metadata_expected}"
        faults.setdefault(row, (Reason.METADATA_SIZE, detail))
    for row, fault in (*_board_faults(rows.column("board"), n), *_policy_faults(rows.column("policy"), n)):
        faults.setdefault(row, fault)
    if not faults:
        return batch
    records = rows.column("record").to_pylist()
    rejected = [Rejection(records[row], *fault) for row, fault in faults.items()]
    kept = np.delete(np.arange(rows.num_rows), sorted(faults))
    return RawBatch(
        rows.take(pa.array(kept)), sorted([*batch.rejected, *rejected], key=lambda each: each.record)
    )


def _board_faults(boards: pa.Array, n: int) -> Iterator[tuple[int, tuple[Reason, str]]]:
    """Yield the rows of invalid boards, each with its fault."""
    width = board_bytes(n)
    packed = np.frombuffer(boards.buffers()[1] or b"", np.uint8)
    packed = packed[boards.offset * width : (boards.offset + len(boards)) * width].reshape(-1, width)
    spare = 8 * width - 2 * n * n
    for row in np.flatnonzero(packed[:, -1] & ((1 << spare) - 1)).tolist():
        yield row, (Reason.BOARD_CELLS, "board; found bits after its cells; expected 0")
    planes = unpack_boards(packed, n, np.uint8)
    both = (planes[:, BLUE] & planes[:, RED]).reshape(len(planes), -1).any(axis=1)
    for row in np.flatnonzero(both).tolist():
        yield row, (Reason.BOARD_OVERLAP, "board; found a cell that is both blue and red")


def _policy_faults(policies: pa.Array, n: int) -> Iterator[tuple[int, tuple[Reason, str]]]:
    """Yield the rows of invalid policies, each with its fault."""
    try:
        SparsePolicies.from_arrow(policies, n * n)
    except (pa.ArrowInvalid, StoreError):
        for row in range(len(policies)):
            try:
                SparsePolicies.from_arrow(policies.slice(row, 1), n * n)
            except (pa.ArrowInvalid, StoreError) as error:
                yield row, (Reason.POLICY_VALUES, f"policy; {error}")
