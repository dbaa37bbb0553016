"""Checks of the batches of readers that other packages provide."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.board import BLUE, RED, check_board_size, unpack_boards
from hexdata.errors import FormatError, Reason, StoreError
from hexdata.formats.source import BATCH_ROWS, RawBatch, SourceReader
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
_TEXTS: Final = {"end_reason": END_REASONS, "swap": SWAPS}


class CheckedReader:
    """A reader of another package whose batches are checked: a SourceReader.

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
        """Yield the batches of the reader.

        Raises:
            FormatError: "reader-error", if a batch violates the interface; and the errors of the reader.
        """
        records = 0
        size: int | None = None
        for batch in self._reader.batches():
            if batch.positions.num_rows:
                size = size or self._reader.board_size
                self._check_positions(batch.positions, size)
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
            yield batch
        self._copy_state()

    def _check_positions(self, rows: pa.RecordBatch, size: int | None) -> None:
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
            SparsePolicies.from_arrow(rows.column("policy"), n * n)
        except (pa.ArrowInvalid, StoreError) as error:
            raise self._error("a batch", error, "valid Arrow arrays and policies") from error
        if any(rows.column(name).null_count for name in ("record", "board", "value")):
            raise self._error("a record, board or value", None, "no nulls")
        for name, (low, high) in (_RANGES | {"move": (0, n * n - 1)}).items():
            if name in rows.schema.names:
                column = rows.column(name).drop_null().to_numpy(zero_copy_only=False)
                if not ((column >= low) & (column <= high)).all():  # false for NaN too
                    raise self._error(f"a value of {name}", _outside(column, low, high), f"{low} to {high}")
        for name, texts in _TEXTS.items():
            if found := set(rows.column(name).to_pylist()) - {None, *texts}:
                raise self._error(f"a value of {name}", min(found), ", ".join(texts))
        self._check_boards(rows.column("board"), n)

    def _check_boards(self, boards: pa.Array, n: int) -> None:
        width = board_bytes(n)
        packed = np.frombuffer(boards.buffers()[1] or b"", np.uint8)
        packed = packed[boards.offset * width : (boards.offset + len(boards)) * width].reshape(-1, width)
        spare = 8 * width - 2 * n * n
        if (packed[:, -1] & ((1 << spare) - 1)).any():
            raise self._error("a board", "bits after its cells", "0")
        planes = unpack_boards(packed, n, np.uint8)
        if (planes[:, BLUE] & planes[:, RED]).any():
            raise self._error("a board", "a cell that is both blue and red", "one stone per cell")

    def _error(self, what: str, found: object, expected: str) -> FormatError:
        return FormatError(
            f"the reader of the format {self._name!r}, of another package, returned invalid data: {what}",
            code=Reason.READER_ERROR,
            found=found,
            expected=expected,
        )


def _outside(column: npt.NDArray[Any], low: float, high: float) -> object:
    return column[~((column >= low) & (column <= high))][0].item()
