"""Runs: temporary files of a shuffle in which rows are grouped into pieces, each of one unit.

A run is complete or absent. It ends with an index of its pieces, so that each piece can be read as one byte
range from a disk or an object store. This module neither assigns rows to units nor sorts them.
"""

from __future__ import annotations

import errno
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Final, TypeVar
from zlib import crc32 as checksum_of

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc as ipc

from hexdata.errors import StoreError
from hexdata.schema import positions_schema
from hexdata.storage import AnyPath, add_path_to_disk_full, error_number, storage_of
from hexdata.system import read_at

__all__ = [
    "PARALLEL_READS",
    "RANGE_BYTES",
    "RUN_FORMAT",
    "MergedRunIndex",
    "RunCopy",
    "RunIndex",
    "RunPiece",
    "as_run",
    "encode_run",
    "join_columns",
    "read_ahead",
    "read_pieces",
    "run_schema",
    "write_run",
]

Item = TypeVar("Item")
Result = TypeVar("Result")

PIECE_ROWS: Final = 65_536
"""Maximum rows of a piece. A compressed copy of a piece is held in memory."""
RANGE_BYTES: Final = 1 << 22
"""Maximum bytes of adjacent pieces that are read at once. A larger piece is read alone."""
PARALLEL_READS: Final = 8
"""Maximum number of reads at a time from storage on the network, for which a thread mostly waits."""
MAX_READ_BYTES: Final = 1 << 23
"""Maximum bytes of the reads at a time, unless one is larger. A client holds twice as much while it reads."""
MAX_COPY_BYTES: Final = 1 << 25
"""Maximum bytes of ``PARALLEL_READS`` reads at a time while runs are copied, when threads hold no rows."""
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
_ENTRY: Final = np.dtype([("run", "<u4"), *(field for field in _INDEX.descr if field[0] != "unit")])
"""Entry of a merged index. The unit follows from its index, so reading its piece detects a damaged entry."""
_FACTS: Final = (_ENTRY.names or ())[1:]
"""Facts of a piece that both an index entry and an entry of a merged index contain."""
BLOCK_BYTES: Final = 1 << 24
"""Bytes of the part of a merged index that is in memory; three times as much while it is built."""
_END: Final = np.dtype([("checksum", "<u4"), ("pieces", "<u4"), ("magic", "S8")])
"""The end of a run: the CRC-32 of its index, the number of its pieces and the format."""
RUN_FORMAT: Final = 3
"""Version of the file format. Runs of other versions are not read."""
_DAMAGED: Final = (None, errno.ENOENT, errno.EINVAL)
"""Numbers of the errors of missing and shortened runs. Object stores refuse ranges after the end."""
_MAGIC: Final = b"hexdata%d" % RUN_FORMAT
_CODEC: Final = pa.Codec("zstd", compression_level=1)
_MESSAGE_SIZE: Final = struct.Struct("<Q")
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
    copy: RunCopy | None = None
    """Local copy of this part of the run, from which the piece is read; None to read the run (default)."""

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
    index = np.empty(len(bounds) - 1, _INDEX)
    index["unit"], index["rows"] = sorted_unit[bounds[:-1]], np.diff(bounds)
    for number, (start, stop) in enumerate(pairwise(bounds.tolist())):
        (batch,) = rows.slice(start, stop - start).to_batches()
        content, offset = _compress(batch), file.tell()
        file.write(content)
        facts = (batch.nbytes, offset, len(content), checksum_of(content))
        index[number] = (*index[number].tolist()[:2], *facts)
    content = index.tobytes()
    file.write(content)
    file.write(np.array([(checksum_of(content), len(index), _MAGIC)], _END).tobytes())


def _compress(batch: pa.RecordBatch) -> bytes:
    """Return the bytes of a piece: the size of an Arrow message, and the message, compressed as a whole.

    Arrow itself compresses each buffer of each column, which takes three times as long for small pieces.
    """
    message = batch.serialize()
    compressed: bytes = _CODEC.compress(message, asbytes=True)
    return _MESSAGE_SIZE.pack(message.size) + compressed


def _decompress(content: memoryview, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows of a piece. Their columns are views on the decompressed message."""
    (size,) = _MESSAGE_SIZE.unpack_from(content)
    return ipc.read_record_batch(_CODEC.decompress(content[_MESSAGE_SIZE.size :], size), schema)


@dataclass(frozen=True, eq=False)
class RunIndex:
    """The pieces of some units in a set of runs.

    It consists of arrays, so that the pieces of a few units are sent to another process at little cost.

    Attributes:
        folder: Folder of the runs.
        names: File names of the runs, shape (runs,).
        table: Entry of each piece with the index of its run in ``names``, sorted by unit, then by run.
    """

    folder: AnyPath
    names: npt.NDArray[np.bytes_]
    table: npt.NDArray[np.void]

    @classmethod
    def read(cls, paths: Sequence[AnyPath]) -> RunIndex:
        """Read the indexes of a few runs in one folder. ``MergedRunIndex`` reads those of many.

        Raises:
            StoreError: A run is missing or damaged.
        """
        with closing(MergedRunIndex(paths)) as merged:
            return merged.whole()

    def only(self, units: range) -> RunIndex:
        """Return the index of some consecutive units, the minimum to send to another process."""
        table = self.table[self._rows_of(units)].copy()
        used, table["run"] = np.unique(table["run"], return_inverse=True)
        return RunIndex(self.folder, self.names[used], table)

    def pieces(self, unit: int) -> list[RunPiece]:
        """Return the pieces of a unit in the order of the runs."""
        table = self.table[self._rows_of(range(unit, unit + 1))]
        return [
            RunPiece(self._path(run), rows, size, offset, length, checksum)
            for run, _, rows, size, offset, length, checksum in table.tolist()
        ]

    def stored_bytes(self, units: range) -> int:
        """Return the number of bytes of the pieces of some consecutive units in the runs."""
        return int(self.table["length"][self._rows_of(units)].sum(dtype=np.int64))

    def spans(self) -> list[tuple[AnyPath, int, int]]:
        """Return, for each run with pieces of these units, the byte range that contains all of them.

        Returns:
            Tuples (run, offset of the first byte, offset of the end), in the order of the runs. Units are
            adjacent in a run, so a range contains no other bytes if the units are consecutive.
        """
        order = np.argsort(self.table["run"], kind="stable")
        table = self.table[order]
        begins = np.flatnonzero(np.diff(table["run"].astype(np.int64), prepend=-1))
        ends = np.append(begins[1:], len(table))[: len(begins)] - 1
        stops = table["offset"][ends] + table["length"][ends]
        bounds = np.stack([table["run"][begins], table["offset"][begins], stops], axis=1).tolist()
        return [(self._path(run), start, stop) for run, start, stop in bounds]

    def _path(self, run: int) -> AnyPath:
        name: bytes = self.names[run]
        return self.folder / name.decode()

    def _rows_of(self, units: range) -> slice:
        """Return the range of rows of the table with the pieces of consecutive units."""
        bounds = np.array((units.start, units.stop), np.uint32)  # another type would convert the whole column
        return slice(*np.searchsorted(self.table["unit"], bounds).tolist())


class MergedRunIndex:
    """The merged indexes of all runs of a shuffle, of which only a part is in memory.

    The index of each run is read once. The entries of consecutive runs are sorted by unit and appended to a
    temporary file without a name, one block at a time, so that the entries of consecutive units are one range
    of each block. A single block stays in memory. Only one thread at a time may use an instance.
    """

    def __init__(
        self, paths: Iterable[AnyPath], spill: Path | None = None, *, block_bytes: int = BLOCK_BYTES
    ) -> None:
        """Read the indexes of the runs.

        Args:
            paths: Runs in one folder.
            spill: Folder for the temporary file; None for the system's temporary folder (default).
            block_bytes: Bytes of the entries of a block, and of those that are read at a time.

        Raises:
            StoreError: A run is missing or damaged.
            OSError: The temporary file cannot be written.
        """
        self._spill = spill
        self._block_entries = max(block_bytes // _ENTRY.itemsize, 1)
        self._folder: AnyPath = Path()
        self._file: IO[bytes] | None = None
        self._block: npt.NDArray[np.void] = np.empty(0, _ENTRY)
        """The last block, if it is not in the file."""
        self._offsets: list[int] = []
        """Offset of each block in the file."""
        try:
            self._names, self._firsts = self._read(paths)
        except BaseException:
            self.close()
            raise
        self._counts = np.diff(self._firsts).sum(axis=0)
        """Number of entries of each unit."""
        self._window = range(0)
        self._cached = self._load(self._window)
        """The pieces of the units in ``_window``."""

    def close(self) -> None:
        """Remove the temporary file. Indexes that were returned remain usable."""
        if self._file is not None:
            self._file.close()

    def only(self, units: range) -> RunIndex:
        """Return the pieces of consecutive units.

        The entries of the next units are read at the same time, so that ascending requests read few ranges.
        """
        if units.start not in self._window or units.stop > self._window.stop:
            sums = np.cumsum(self._counts[units.start :])
            following = int(np.searchsorted(sums, self._block_entries, "right"))
            window = range(units.start, max(units.stop, units.start + following))
            self._window, self._cached = range(0), self._load(range(0))  # frees the memory first
            self._window, self._cached = window, self._load(window)
        return self._cached.only(units)

    def whole(self) -> RunIndex:
        """Return the pieces of all units."""
        return self._load(range(len(self._counts)))

    def _read(self, paths: Iterable[AnyPath]) -> tuple[npt.NDArray[np.bytes_], npt.NDArray[np.uint32]]:
        """Write the blocks; return the names of the runs, and the first entry of each unit in each block."""
        names: list[str] = []
        firsts: list[npt.NDArray[np.uint32]] = []
        pending: list[npt.NDArray[np.void]] = []
        size = 0
        for path, index in read_ahead(_read_index, paths, PARALLEL_READS):
            assert not names or self._folder == path.parent
            self._folder = path.parent
            if pending and size + len(index) > self._block_entries:
                firsts.append(self._add_block(len(names), pending))
                self._write_block()
                pending, size = [], 0
            names.append(path.name)
            pending.append(index)
            size += len(index)
        if pending:
            firsts.append(self._add_block(len(names), pending))
            if self._file is not None:
                self._write_block()
        units = max((len(block) for block in firsts), default=1)
        padded = [np.pad(block, (0, units - len(block)), "edge") for block in firsts]
        return np.array(names, np.bytes_), np.array(padded, np.uint32).reshape(-1, units)

    def _add_block(self, stop: int, indexes: list[npt.NDArray[np.void]]) -> npt.NDArray[np.uint32]:
        """Make a block of the entries of consecutive runs before ``stop``; return each unit's first entry."""
        unit = np.concatenate([index["unit"] for index in indexes])
        order = np.argsort(unit, kind="stable")
        self._block = np.empty(len(unit), _ENTRY)
        run = np.arange(stop - len(indexes), stop)
        self._block["run"] = np.repeat(run, [len(index) for index in indexes])[order]
        for name in _FACTS:
            self._block[name] = np.concatenate([index[name] for index in indexes])[order]
        return np.concatenate([[0], np.cumsum(np.bincount(unit))]).astype(np.uint32)

    def _write_block(self) -> None:
        if self._file is None:
            if self._spill is not None:
                self._spill.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._spill)  # noqa: SIM115 - closed by ``close``
        self._offsets.append(self._file.tell())
        self._file.write(self._block.view(np.uint8).data)
        self._file.flush()
        self._block = np.empty(0, _ENTRY)

    def _load(self, units: range) -> RunIndex:
        """Read the entries of consecutive units from all blocks."""
        firsts = self._firsts[:, units.start : units.stop + 1].astype(np.int64)
        parts = [np.empty(0, _ENTRY)]
        if firsts.shape[1]:
            for block, (start, stop) in enumerate(firsts[:, [0, -1]].tolist()):
                parts.append(self._entries(block, start, stop))
        width = max(firsts.shape[1] - 1, 0)
        number = np.tile(np.arange(width, dtype=np.min_scalar_type(width)), len(firsts))
        number = np.repeat(number, np.diff(firsts).ravel())
        order = np.argsort(number, kind="stable")  # a radix sort of up to 65,536 units
        table = np.empty(len(order), _TABLE)
        table["unit"] = number[order].astype(np.uint32) + np.uint32(units.start)
        for name in ("run", *_FACTS):
            table[name] = np.concatenate([part[name] for part in parts])[order]
        return RunIndex(self._folder, self._names, table)

    def _entries(self, block: int, start: int, stop: int) -> npt.NDArray[np.void]:
        if self._file is None:
            return self._block[start:stop]
        size = _ENTRY.itemsize
        content = read_at(self._file, (stop - start) * size, self._offsets[block] + start * size)
        return np.frombuffer(content, _ENTRY, stop - start)


def read_pieces(
    pieces: Sequence[RunPiece], schema: pa.Schema, *, parallel: int = 1
) -> Generator[pa.RecordBatch]:
    """Yield the rows of pieces in order, reading small adjacent pieces together.

    Args:
        pieces: Pieces to read.
        schema: Their ``run_schema``.
        parallel: Maximum number of reads at a time (default: 1).

    Raises:
        StoreError: A run is missing or damaged.
    """
    reads = read_ahead(_read_adjacent, _adjacent_pieces(pieces), parallel, size_of=_length_of)
    with closing(reads):
        for group, content in reads:
            for piece in group:
                start = piece.offset - group[0].offset
                with _explain_damage(piece.path):
                    batch = _read_piece(memoryview(content)[start : start + piece.length], piece, schema)
                yield batch
                del batch


def _read_piece(content: memoryview, piece: RunPiece, schema: pa.Schema) -> pa.RecordBatch:
    if checksum_of(content) != piece.checksum:
        raise pa.ArrowInvalid(f"bytes {piece.offset:,} to {piece.stop:,} do not match their checksum")
    batch = _decompress(content, schema)
    if batch.num_rows != piece.rows:
        raise pa.ArrowInvalid("a piece has a different number of rows than its index entry")
    return batch


class RunCopy:
    """A copy of parts of runs in a temporary local file without a name, which ends with the process.

    An object store answers a limited number of requests per second. The pieces of consecutive units are
    adjacent in each run, so that one request per run reads the pieces of many units, which are then read from
    the copy one unit at a time.
    """

    def __init__(
        self, runs: RunIndex, folder: Path | None, parallel: int, check: Callable[[], None] = lambda: None
    ) -> None:
        """Copy the pieces of consecutive units from all runs.

        Args:
            runs: Index of these units.
            folder: Folder for the file; None for the system's temporary folder.
            parallel: Maximum number of reads at a time.
            check: Called after each read; may raise to stop (default: nothing).

        Raises:
            StoreError: A run is missing or damaged.
            OSError: The runs cannot be read, or the file cannot be written.
        """
        self._runs = runs
        self._offsets: dict[AnyPath, int] = {}
        """Offset in the file of the first byte of each run, which may be negative."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        with add_path_to_disk_full(folder or Path(tempfile.gettempdir())):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by ``close``
            try:
                self._copy(parallel, check)
            except BaseException:
                self.close()
                raise

    def _copy(self, parallel: int, check: Callable[[], None]) -> None:
        spans = self._runs.spans()
        ranges = (
            (path, begin, min(begin + RANGE_BYTES, stop))
            for path, start, stop in spans
            for begin in range(start, stop, RANGE_BYTES)
        )
        most = MAX_COPY_BYTES * parallel // PARALLEL_READS
        reads = read_ahead(_read_span, ranges, parallel, size_of=_length_of_span, max_bytes=most)
        with closing(reads):
            for (path, start, _), content in reads:
                self._offsets.setdefault(path, self._file.tell() - start)
                self._file.write(content)
                del content
                check()
        self._file.flush()

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def pieces(self, unit: int) -> list[RunPiece]:
        """Return the pieces of a unit, which are read from the copy."""
        return [replace(piece, copy=self) for piece in self._runs.pieces(unit)]

    def read_range(self, path: AnyPath, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of a run."""
        return read_at(self._file, stop - start, self._offsets[path] + start)


def _read_span(span: tuple[AnyPath, int, int]) -> bytes:
    path, start, stop = span
    with _explain_damage(path):
        content = storage_of(path).read_range(start, stop)
        if len(content) != stop - start:
            raise pa.ArrowInvalid("the file is shorter than its index says")
    return content


def _length_of_span(span: tuple[AnyPath, int, int]) -> int:
    return span[2] - span[1]


def _length_of(pieces: list[RunPiece]) -> int:
    return pieces[-1].stop - pieces[0].offset


def _read_adjacent(pieces: list[RunPiece]) -> bytes:
    """Return the bytes of adjacent pieces, from their local copy if there is one."""
    first, stop = pieces[0], pieces[-1].stop
    with _explain_damage(first.path):
        if first.copy is not None:
            return first.copy.read_range(first.path, first.offset, stop)
        return storage_of(first.path).read_range(first.offset, stop)


def read_ahead(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    parallel: int,
    *,
    size_of: Callable[[Item], int] = lambda _: 0,
    max_bytes: int = MAX_READ_BYTES,
) -> Generator[tuple[Item, Result]]:
    """Yield each item with its result, in order, while a few threads compute the next results.

    When the generator is closed, or after an exception, no further item is begun.

    Args:
        function: Function to call on each item, for example to read it.
        items: Items, taken as needed.
        parallel: Maximum number of calls at a time. For 1, the function is called in this thread.
        size_of: Returns the bytes of an item's result (default: 0).
        max_bytes: Maximum bytes of the results that are being computed or have not been yielded; a larger
            one is computed alone.
    """
    if parallel == 1:
        yield from ((item, function(item)) for item in items)
        return
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    size = 0
    with ThreadPoolExecutor(parallel, "reader") as threads:
        try:
            for item in items:
                while waiting and (len(waiting) == parallel or size + size_of(item) > max_bytes):
                    size -= size_of(waiting[0][0])
                    yield _take_first(waiting)
                size += size_of(item)
                waiting.append((item, threads.submit(function, item)))
            while waiting:
                yield _take_first(waiting)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _take_first(waiting: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Result]:
    """Remove the first item; return it with its result, to which the caller then has the only reference."""
    item, result = waiting.popleft()
    return item, result.result()


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
        disk_failed = isinstance(error, OSError) and error_number(error) not in _DAMAGED
        if disk_failed or isinstance(error, MemoryError):
            raise  # the file is not damaged
        raise StoreError(
            "a temporary file of an unfinished shuffle is missing or damaged",
            path=path,
            found=str(error).partition("\n")[0],
            hint=f"Remove {path.parent} and run the command again; it starts from the beginning.",
        ) from error
