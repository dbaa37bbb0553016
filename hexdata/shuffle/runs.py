"""Runs: temporary files of a shuffle in which rows are grouped into pieces, each of one unit.

A run is complete or absent. It ends with an index of its pieces, so that each piece can be read as one byte
range from a disk or an object store. This module neither assigns rows to units nor sorts them.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final
from zlib import crc32 as checksum_of

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc as ipc

from hexdata.errors import StoreError
from hexdata.schema import positions_schema
from hexdata.storage import AnyPath, storage_of

__all__ = [
    "RUN_FORMAT",
    "RunIndex",
    "RunPiece",
    "as_run",
    "encode_run",
    "join_columns",
    "read_column",
    "read_pieces",
    "run_schema",
    "write_run",
]

PIECE_ROWS: Final = 65_536
"""Maximum rows of a piece. A compressed copy of a piece is held in memory."""
RANGE_BYTES: Final = 1 << 22
"""Maximum bytes of adjacent pieces that are read at once. A larger piece is read alone."""
PARALLEL_INDEX_READS: Final = 8
"""Number of indexes that are read in parallel, because reads mostly wait for the storage."""
_INDEX: Final = np.dtype(
    [
        ("unit", "<u4"),
        ("rows", "<u4"),
        ("bytes", "<u8"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("checksum", "<u4"),
    ]
)
"""Index entry of a piece: its unit, rows, bytes in memory, offset and length in the run, and its CRC-32."""
_TABLE: Final = np.dtype([("run", "<u4"), *_INDEX.descr])
_END: Final = np.dtype([("checksum", "<u4"), ("pieces", "<u4"), ("magic", "S8")])
"""The end of a run: the CRC-32 of its index, the number of its pieces and the format."""
RUN_FORMAT: Final = 2
"""Version of the file format. Runs of other versions are not read."""
_MAGIC: Final = b"hexdata%d" % RUN_FORMAT
_TAIL_BYTES: Final = 1 << 16
"""Bytes of the first read from the end of a run, which usually include the whole index."""


def run_schema(board_size: int, targets: Sequence[str] = ()) -> pa.Schema:
    """Return the schema of a run: a position and its bucket per row.

    ``winner`` is text, because an Arrow file has only one dictionary per column.

    Args:
        board_size: Cells along an edge.
        targets: Optional columns of the shuffled positions (default: none).
    """
    schema = positions_schema(board_size, targets)
    winner = schema.get_field_index("winner")
    schema = schema.set(winner, pa.field("winner", pa.string()))
    return schema.append(pa.field("bucket", pa.uint32(), nullable=False))


@dataclass(frozen=True)
class RunPiece:
    """Rows of one unit in one run."""

    path: AnyPath
    rows: int
    bytes: int
    """Size in memory."""
    offset: int
    length: int
    """Number of its bytes in the run."""
    checksum: int
    """CRC-32 of these bytes."""

    @property
    def stop(self) -> int:
        """Offset of the end of its bytes (exclusive)."""
        return self.offset + self.length


def as_run(rows: pa.Table, board_size: int, targets: Sequence[str] = ()) -> pa.Table:
    """Convert rows from DuckDB, which widens some types, to ``run_schema``."""
    schema = run_schema(board_size, targets)
    return rows.select(schema.names).cast(schema)


def write_run(path: AnyPath, rows: pa.Table, unit: npt.NDArray[np.integer[Any]]) -> int:
    """Write rows to a run, grouped by unit, and return its size in bytes.

    Args:
        path: Path or address of the run.
        rows: Rows of ``run_schema``.
        unit: Unit of each row, shape (N,). Within a unit, rows keep their order.
    """
    with storage_of(path).publish() as file:
        encode_run(file, rows, unit)
        return file.tell()


def encode_run(file: Any, rows: pa.Table, unit: npt.NDArray[np.integer[Any]]) -> None:
    """Write a run to an open file in the format of :func:`write_run`."""
    order = np.argsort(unit, kind="stable")  # a radix sort if there are at most 65,536 units
    sorted_unit = unit[order]
    begins = np.flatnonzero(np.diff(sorted_unit.astype(np.int64), prepend=-1))
    bounds = np.union1d(begins, np.arange(0, len(unit) + PIECE_ROWS, PIECE_ROWS).clip(max=len(unit)))
    rows = rows.take(pa.array(order)).combine_chunks()
    options = ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1), use_threads=False)
    index = np.empty(len(bounds) - 1, _INDEX)
    index["unit"], index["rows"] = sorted_unit[bounds[:-1]], np.diff(bounds)
    checked = _CheckedFile(file)
    with ipc.new_stream(checked, rows.schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([], rows.schema))  # the stream begins with the schema
        for number, (start, stop) in enumerate(pairwise(bounds.tolist())):
            offset, checked.checksum = file.tell(), 0
            (batch,) = rows.slice(start, stop - start).to_batches()
            writer.write_batch(batch)
            length = file.tell() - offset
            index[number] = (*index[number].tolist()[:2], batch.nbytes, offset, length, checked.checksum)
    content = index.tobytes()
    file.write(content)
    file.write(np.array([(checksum_of(content), len(index), _MAGIC)], _END).tobytes())


class _CheckedFile(io.RawIOBase):
    """A write-only file that computes the CRC-32 of all data written since ``checksum`` was set to 0."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.checksum = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        self.checksum = checksum_of(data, self.checksum)
        written: int = self._file.write(data)
        return written

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        offset: int = self._file.tell()
        return offset


class RunIndex:
    """The index of a set of runs: finds the pieces of each unit."""

    def __init__(self, paths: Sequence[AnyPath]) -> None:
        """Read the indexes of the runs.

        Raises:
            StoreError: A run is missing or damaged.
        """
        self._paths = paths
        with ThreadPoolExecutor(PARALLEL_INDEX_READS) as threads:
            indexes = list(threads.map(_read_index, paths))
        table = np.empty(sum(map(len, indexes)), _TABLE)
        for name in _INDEX.names or ():
            np.concatenate([index[name] for index in indexes] or [table[name]], out=table[name])
        table["run"] = np.repeat(np.arange(len(paths)), [len(index) for index in indexes])
        self._table = table[np.argsort(table["unit"], kind="stable")]

    def only(self, units: range) -> RunIndex:
        """Return the index of some consecutive units, the minimum to send to another process."""
        table = self._table[self._rows_of(units.start, units.stop)].copy()
        used, table["run"] = np.unique(table["run"], return_inverse=True)
        index = RunIndex([])
        index._paths, index._table = [self._paths[run] for run in used.tolist()], table
        return index

    def pieces(self, unit: int) -> list[RunPiece]:
        """Return the pieces of a unit in the order of the runs."""
        return [
            RunPiece(self._paths[run], rows, size, offset, length, checksum)
            for run, _, rows, size, offset, length, checksum in self._table[
                self._rows_of(unit, unit + 1)
            ].tolist()
        ]

    def _rows_of(self, first: int, stop: int) -> slice:
        """Return the range of index rows with the pieces of some units."""
        bounds = np.array((first, stop), np.uint32)  # any other type would convert the whole column
        return slice(*np.searchsorted(self._table["unit"], bounds).tolist())


def read_pieces(pieces: Sequence[RunPiece], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of pieces in order, reading small adjacent pieces together.

    Args:
        pieces: Pieces to read.
        schema: Their ``run_schema``.

    Raises:
        StoreError: A run is missing or damaged.
    """
    return _read(pieces, schema, ipc.IpcReadOptions(use_threads=False))


def read_column(pieces: Sequence[RunPiece], schema: pa.Schema, name: str) -> Iterator[pa.Array]:
    """Yield one column of pieces without decompressing the others.

    Args:
        pieces: Pieces to read.
        schema: Their ``run_schema``.
        name: Name of the column.

    Raises:
        StoreError: A run is missing or damaged.
    """
    options = ipc.IpcReadOptions(use_threads=False, included_fields=[schema.get_field_index(name)])
    for batch in _read(pieces, schema, options):
        yield batch.column(name)


def _read(pieces: Sequence[RunPiece], schema: pa.Schema, options: Any) -> Iterator[pa.RecordBatch]:
    begin = schema.serialize().to_pybytes()
    for group in _adjacent_pieces(pieces):
        path = group[0].path
        with _explain_damage(path):
            content = storage_of(path).read_range(group[0].offset, group[-1].stop)
            _check(content, group)
            batches = list(ipc.open_stream(pa.py_buffer(begin + content), options=options))
            if [batch.num_rows for batch in batches] != [piece.rows for piece in group]:
                raise pa.ArrowInvalid("a piece has a different number of rows than its index entry")
        del content
        batches.reverse()
        while batches:
            yield batches.pop()


def _check(content: bytes, pieces: Sequence[RunPiece]) -> None:
    """Check the bytes of adjacent pieces against their checksums."""
    view = memoryview(content)
    for piece in pieces:
        start = piece.offset - pieces[0].offset
        if checksum_of(view[start : start + piece.length]) != piece.checksum:
            raise pa.ArrowInvalid(f"bytes {piece.offset:,} to {piece.stop:,} do not match their checksum")


def _adjacent_pieces(pieces: Sequence[RunPiece]) -> Iterator[list[RunPiece]]:
    """Group pieces that are adjacent in a run, up to ``RANGE_BYTES`` per group."""
    group: list[RunPiece] = []
    for piece in pieces:
        follows = group and (group[-1].path, group[-1].stop) == (piece.path, piece.offset)
        if group and not (follows and piece.stop - group[0].offset <= RANGE_BYTES):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def join_columns(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """Join batches into one table with contiguous columns. ``batches`` is emptied to free memory.

    Columns are joined one after the other, so that at most one of them is in memory twice.
    """
    columns = [[batch.column(name) for batch in batches] for name in schema.names]
    batches.clear()
    columns.reverse()
    joined = []
    while columns:
        joined.append(pa.concat_arrays(columns.pop()))
    return pa.Table.from_arrays(joined, schema=schema)


def _read_index(path: AnyPath) -> npt.NDArray[np.void]:
    """Return the index of a run after checking its format and checksum."""
    with _explain_damage(path):
        tail = storage_of(path).read_tail(_TAIL_BYTES)
        ((checksum, pieces, magic),) = np.frombuffer(tail[-_END.itemsize :], _END).tolist() or [(0, 0, b"")]
        if magic != _MAGIC:
            raise pa.ArrowInvalid("the file does not end with an index of a run")
        size = pieces * _INDEX.itemsize + _END.itemsize
        if size > len(tail):
            tail = storage_of(path).read_tail(size)
        content = tail[-size : -_END.itemsize]
        if checksum_of(content) != checksum:
            raise pa.ArrowInvalid("the index does not match its checksum")
        return np.frombuffer(content, _INDEX, pieces)


@contextmanager
def _explain_damage(path: AnyPath) -> Iterator[None]:
    """Convert errors of a missing or damaged run to a StoreError with a hint. Disk errors pass unchanged."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        disk_failed = isinstance(error, OSError) and error.errno not in (None, errno.ENOENT)
        if disk_failed or isinstance(error, MemoryError):
            raise  # the file is not damaged
        raise StoreError(
            "a temporary file of an unfinished shuffle is missing or damaged",
            path=path,
            found=str(error).partition("\n")[0],
            hint=f"Remove {path.parent} and run the command again; it starts from the beginning.",
        ) from error
