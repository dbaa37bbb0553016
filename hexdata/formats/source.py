"""The interface of formats: what a format declares, and what its reader returns to ``convert``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import FormatError, Reason
from hexdata.json_models import Count
from hexdata.schema import raw_schema
from hexdata.storage import AnyPath, as_path

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
"""Error codes of damage that leaves the records before it readable. A limit or a forbidden name is no damage:
nothing of such a file is used."""


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
    board_size: int | None = None
    """Board size of a record that is rejected because of it: it is not that of the file, or not selected."""


@dataclass(frozen=True)
class RawBatch:
    """The next records of a source: the valid positions, and the rejected records with their reasons."""

    positions: pa.RecordBatch
    """At most ``BATCH_ROWS`` rows of ``schema.raw_schema(board_size, targets)``, in record order."""
    rejected: list[Rejection] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Number of positions."""
        return int(self.positions.num_rows)

    @property
    def records(self) -> int:
        """Number of records of the file in the batch, rejected ones included."""
        return self.rows + len(self.rejected)

    def stated(self, column: str) -> int:
        """Return the number of positions that have a value in a column."""
        return self.rows - int(self.positions.column(column).null_count)

    @property
    def nbytes(self) -> int:
        """Size of the positions in bytes, approximately."""
        return int(self.positions.nbytes)

    @staticmethod
    def join(batches: Sequence[RawBatch]) -> pa.RecordBatch:
        """Return the positions of batches of the same class and schema, also of several files."""
        return pa.concat_batches([batch.positions for batch in batches])


def raw_batch(
    board_size: int, targets: Sequence[str], boards: npt.NDArray[np.uint8], columns: Mapping[str, Any]
) -> pa.RecordBatch:
    """Return positions as ``raw_schema(board_size, targets)``.

    Args:
        board_size: N.
        targets: Optional columns of the schema.
        boards: Packed boards, (rows, width).
        columns: The other columns by name: NumPy or Arrow arrays or lists. Missing ones and None are null.
    """
    schema, data = raw_schema(board_size, targets), np.ascontiguousarray(boards)
    # The boards as they are, without a copy and without a Python object for each row.
    packed = pa.Array.from_buffers(pa.binary(data.shape[1]), len(data), [None, pa.py_buffer(data)])
    arrays = []
    for each in schema:
        values = packed if each.name == "board" else columns.get(each.name)
        if values is None:
            values = pa.nulls(len(data), each.type)
        arrays.append(values.cast(each.type) if isinstance(values, pa.Array) else pa.array(values, each.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


OWN_READER: Final = (
    "otherwise write a reader of 20 lines, as docs/howto/formats.md shows "
    'under "Add a format from your own package"'
)
"""Hint for a file whose layout is not read."""


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
    def __exit__(self, *error: Any) -> None: ...


class FileReader:
    """Base of the built-in readers: the attributes of a ``SourceReader``, and what salvaging does.

    Args:
        path: The file, local or in an object store.
        salvage: If True, a damaged file yields the complete records before the damage instead of raising.
    """

    format: str = ""
    targets: tuple[str, ...] = ()

    def __init__(self, path: str | AnyPath, *, salvage: bool = False) -> None:
        self.path = as_path(path)
        self.board_size: int | None = None
        self.header: dict[str, object] = {}
        self.damage: FormatError | None = None
        self._is_size_selected = False
        self._salvage = salvage
        self._opened = ExitStack()
        """Closes what the reader has opened."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def batches(self) -> Iterator[RawBatch]:
        """Read the file once; see :class:`SourceReader`."""
        raise NotImplementedError

    def select_board_size(self, board_size: int) -> None:
        """Reject the records of all other board sizes, instead of those that differ from the first one.

        Args:
            board_size: N. Must be set before the first batch is read.
        """
        self.board_size, self._is_size_selected = board_size, True

    def _stop_at(self, error: FormatError) -> None:
        """Store an error in ``damage`` if the file is salvaged and the records before it are sound.

        Raises:
            FormatError: ``error``, otherwise.
        """
        error.at(self.path)
        if not self._salvage or error.code not in SALVAGEABLE:
            raise error
        self.damage = error


@dataclass(frozen=True, eq=False)
class SourceFormat:
    """A format of source files: how its files are recognised and opened.

    Attributes:
        name: Name of the format in messages: lower-case letters, digits and hyphens, such as "trmph". It is
            also the ``format`` of readers that have none.
        patterns: Name patterns, in lower case, of files that are read in a folder, such as ``"*.trmph.gz"``.
        matches: Function of the first bytes of a file, decompressed (at most 65,536; empty for an empty
            file), and of its name. Returns whether the file has this format. Built-in formats get the name in
            lower case, or "" if the file is no text.
        open: Function that opens a local file or remote object and returns its reader. It is called with the
            path and with the keyword arguments ``options``, and may raise a FormatError or an OSError.
        contents: What a file contains, for messages: "TRMPH games". Default: the name.
        appendable: Whether files are texts to which lines are appended, so that ``open`` accepts a part.
            Default False.
        options: Names of the keyword arguments of ``open``. Default: ``salvage``, whether a damaged file
            yields the complete records before the damage; and ``part``, the range of bytes to read, which is
            None for the whole file and always None if the format is not ``appendable``.
    """

    name: str
    patterns: tuple[str, ...]
    matches: Callable[[bytes, str], bool]
    open: Callable[..., SourceReader]
    contents: str = ""
    appendable: bool = False
    options: tuple[str, ...] = ("salvage", "part")

    def has_name(self, name: str) -> bool:
        """Return whether a file name matches one of ``patterns``, in upper or lower case."""
        return any(fnmatchcase(name.lower(), pattern) for pattern in self.patterns)
