"""The interface of source readers: the contract between a format and ``convert``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Protocol, Self, runtime_checkable

import pyarrow as pa

from hexdata.errors import FormatError, Reason
from hexdata.strict_json import Count

__all__ = [
    "BATCH_ROWS",
    "SALVAGEABLE",
    "FilePart",
    "RawBatch",
    "Rejection",
    "SizeSelectingReader",
    "SourceReader",
]

BATCH_ROWS = 8192
"""Maximum number of rows in a raw batch."""

SALVAGEABLE: Final = frozenset(
    {
        Reason.TRUNCATED,
        Reason.CORRUPT_ARRAY,
        Reason.CORRUPT_GZIP,
        Reason.CORRUPT_PICKLE,
        Reason.CORRUPT_ZIP,
        Reason.TRAILING_DATA,
        # A damaged reference of a pickle means another object:
        Reason.SHARED_PAYLOAD,
        Reason.UNSAFE_ARRAY,
        Reason.UNSAFE_CALL,
        Reason.UNSAFE_DTYPE,
    }
)
"""Error codes of damage that leaves the records before it readable."""


@dataclass(frozen=True)
class FilePart:
    """A range of bytes of a text to which lines are appended."""

    start: Count
    """Offset of the first byte to read, the start of a line."""
    stop: Count
    """Offset after the last byte to read."""
    board_size: int | None = None
    """Board size of the lines before, which decides which games are valid; None if there are none."""


@dataclass(frozen=True)
class Rejection:
    """A record that is not a valid position: its number in the file, a stable reason code and the details."""

    record: int
    reason: Reason
    detail: str


@dataclass(frozen=True)
class RawBatch:
    """The next records of a source: the valid positions, and the rejected records with their reasons."""

    positions: pa.RecordBatch
    """At most ``BATCH_ROWS`` rows of ``schema.raw_schema(board_size, targets)``, in record order."""
    rejected: list[Rejection] = field(default_factory=list)

    @property
    def records(self) -> int:
        """Number of records of the file in the batch, rejected ones included."""
        return int(self.positions.num_rows) + len(self.rejected)


class SourceReader(Protocol):
    """One open source file; a context manager."""

    format: str
    """Detected variant: ``legacy-tuples``, ``legacy-dicts``, ``legacy-shuffled``, ``selfplay-games``,
    ``katahex`` or ``trmph``."""
    board_size: int | None
    """Cells along an edge, from the first usable record; None before that record."""
    targets: tuple[str, ...]
    """Optional columns of its batches, as in ``schema.raw_schema(board_size, targets)``; () if there are
    none. Known before the first batch."""
    header: dict[str, object]
    """Metadata of the file as JSON values, such as ``source_file``, ``processing_stats`` and the spelling of
    fields. Complete once ``batches`` is exhausted."""
    damage: FormatError | None
    """The error at which salvaging stopped; None if the file is undamaged. Set once ``batches`` is
    exhausted."""

    def batches(self) -> Iterator[RawBatch]:
        """Read the file once, from front to back, in memory that does not grow with the file.

        Yields:
            The records of the file in order.

        Raises:
            FormatError: The file cannot be read, and the batches yielded so far are invalid. A damaged file
                that was opened for salvage does not raise: its batches end before the damage.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class SizeSelectingReader(Protocol):
    """A ``SourceReader`` of files that usually contain boards of several sizes."""

    def select_board_size(self, board_size: int) -> None:
        """Reject the records of all other board sizes, instead of those that differ from the first one.

        Args:
            board_size: N. Must be set before the first batch is read.
        """
