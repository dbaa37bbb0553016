"""What every reader of a source file gives: the contract between a format and ``convert``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self

import pyarrow as pa

from hexdata.errors import FormatError

__all__ = ["BATCH_ROWS", "SALVAGEABLE", "RawBatch", "Rejection", "SourceReader"]

BATCH_ROWS = 8192
"""At most so many rows a raw batch."""

SALVAGEABLE: Final = frozenset({"truncated", "corrupt-gzip", "corrupt-pickle", "trailing-data"})
"""Codes of the damage that what comes before it survives."""


@dataclass(frozen=True)
class Rejection:
    """A record that cannot be a position: its number in the file, a stable reason code, the details."""

    record: int
    reason: str
    detail: str


@dataclass(frozen=True)
class RawBatch:
    """The next records of a source: those that are positions, and those that cannot be, with why."""

    positions: pa.RecordBatch
    """``schema.raw_schema(board_size)``, at most ``BATCH_ROWS`` rows, in record order."""
    rejected: list[Rejection] = field(default_factory=list)

    @property
    def records(self) -> int:
        """How many records of the file the batch accounts for."""
        return int(self.positions.num_rows) + len(self.rejected)


class SourceReader(Protocol):
    """One source file, open; a context manager."""

    format: str
    """The variant, told by content: ``legacy-tuples``, ``legacy-dicts``, ``legacy-shuffled``, ``trmph``."""
    board_size: int | None
    """Cells along an edge, from the first usable record; None while there has been none."""
    header: dict[str, object]
    """What the file says of itself, JSON-able: ``source_file``, ``processing_stats``, how fields are
    spelled … Complete once ``batches`` is exhausted."""
    damage: FormatError | None
    """What broke the file off, if it was opened to be salvaged and is damaged: known once ``batches`` is
    exhausted."""

    def batches(self) -> Iterator[RawBatch]:
        """Read the file once, front to back, in memory that does not grow with it.

        Raises:
            FormatError: the file as a whole cannot be read; its batches so far are void. One that was
                opened to be salvaged gives its whole examples before the damage instead.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
