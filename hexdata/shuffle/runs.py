"""Runs: rows cut into pieces, one a unit, in Arrow files that live only while a shuffle is unfinished.

A run lies whole under its name or not at all. It says itself which piece belongs to which unit; nothing
here decides that, and nothing is sorted.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc as ipc

from hexdata.errors import StoreError
from hexdata.remote import AnyPath, open_binary
from hexdata.schema import positions_schema
from hexdata.store.files import atomic_file

__all__ = [
    "Piece",
    "Runs",
    "as_run",
    "encode_run",
    "join_columns",
    "read_column",
    "read_pieces",
    "run_schema",
    "write_run",
]

PIECE_ROWS: Final = 65_536
"""Of a piece, at most: compressed, it stands in memory once more."""
BLOCK: Final = 1 << 20
"""Bytes that are asked for at a time where runs lie in an object store: most pieces are smaller."""
_INDEX: Final = b"hexdata pieces"
"""Entry of a run's schema: for each piece its unit, its rows and its bytes in memory, as int64."""


def run_schema(board_size: int) -> pa.Schema:
    """One row a position, and its bucket: ``winner`` as text, since an Arrow file has one dictionary."""
    schema = positions_schema(board_size)
    winner = schema.get_field_index("winner")
    schema = schema.set(winner, pa.field("winner", pa.string()))
    return schema.append(pa.field("bucket", pa.uint32(), nullable=False))


@dataclass(frozen=True)
class Piece:
    """Rows of one unit in one run."""

    path: AnyPath
    number: int
    rows: int
    bytes: int
    """In memory."""


def as_run(rows: pa.Table, board_size: int) -> pa.Table:
    """Return rows as DuckDB gives them, which widens some types, as rows of ``run_schema``."""
    schema = run_schema(board_size)
    return rows.select(schema.names).cast(schema)


def write_run(path: AnyPath, rows: pa.Table, unit: npt.NDArray[np.integer[Any]]) -> int:
    """Write rows as a run, a unit piece after piece; return its bytes.

    Args:
        path: of the run.
        rows: of ``run_schema``, in memory.
        unit: of each row; within a unit rows keep their order.
    """
    with atomic_file(path) as file:
        encode_run(file, rows, unit)
        return file.tell()


def encode_run(file: Any, rows: pa.Table, unit: npt.NDArray[np.integer[Any]]) -> None:
    """Write a run, as :func:`write_run` does, into an open file."""
    order = np.argsort(unit, kind="stable")  # a radix sort, where there are at most 65,536 units
    sorted_unit = unit[order]
    begins = np.flatnonzero(np.diff(sorted_unit.astype(np.int64), prepend=-1))
    bounds = np.union1d(begins, np.arange(0, len(unit) + PIECE_ROWS, PIECE_ROWS).clip(max=len(unit)))
    rows = rows.take(pa.array(order)).combine_chunks()
    pieces = [rows.slice(start, stop - start) for start, stop in pairwise(bounds.tolist())]
    index = [
        (number, piece.num_rows, piece.nbytes)
        for number, piece in zip(sorted_unit[bounds[:-1]].tolist(), pieces, strict=True)
    ]
    schema = rows.schema.with_metadata({_INDEX: np.array(index, dtype="<i8").tobytes()})
    options = ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1), use_threads=False)
    with ipc.new_file(file, schema, options=options) as writer:
        for piece in pieces:
            (batch,) = piece.to_batches()
            writer.write_batch(batch)


class Runs:
    """Which pieces the units of some runs are made of."""

    def __init__(self, paths: Sequence[AnyPath]) -> None:
        """Read the indexes of the runs.

        Raises:
            StoreError: one is missing or damaged.
        """
        self._paths = paths
        tables = [np.empty((0, 5), np.int64)]
        for number, path in enumerate(paths):
            index = _read_index(path)
            places = np.arange(len(index))
            tables.append(np.column_stack((index[:, 0], np.full_like(places, number), places, index[:, 1:])))
        table = np.concatenate(tables)
        self._table = table[np.argsort(table[:, 0], kind="stable")]

    def only(self, units: range) -> Runs:
        """Return what is known of some consecutive units: as little as another process needs."""
        start, stop = np.searchsorted(self._table[:, 0], (units.start, units.stop))
        table = self._table[start:stop].copy()
        used, table[:, 1] = np.unique(table[:, 1], return_inverse=True)
        part = Runs([])
        part._paths, part._table = [self._paths[run] for run in used.tolist()], table
        return part

    def pieces(self, unit: int) -> list[Piece]:
        """Return the pieces of a unit, run by run."""
        start, stop = np.searchsorted(self._table[:, 0], (unit, unit + 1))
        return [
            Piece(self._paths[run], number, rows, size)
            for run, number, rows, size in self._table[start:stop, 1:].tolist()
        ]


def read_pieces(pieces: Sequence[Piece]) -> Iterator[pa.RecordBatch]:
    """Read pieces, one at a time.

    Raises:
        StoreError: a run is missing or damaged.
    """
    return _read(pieces, ipc.IpcReadOptions(use_threads=False))


def read_column(pieces: Sequence[Piece], name: str) -> Iterator[pa.Array]:
    """Read one column of pieces, without the others.

    Raises:
        StoreError: a run is missing or damaged.
    """
    for path, own in groupby(pieces, attrgetter("path")):
        with _opened(path, ipc.IpcReadOptions(use_threads=False)) as reader:
            options = ipc.IpcReadOptions(
                use_threads=False, included_fields=[reader.schema.get_field_index(name)]
            )
        for batch in _read(list(own), options):
            yield batch.column(name)


def _read(pieces: Sequence[Piece], options: Any) -> Iterator[pa.RecordBatch]:
    for path, own in groupby(pieces, attrgetter("path")):
        with _opened(path, options) as reader:
            for piece in own:
                yield reader.get_batch(piece.number)


def join_columns(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """Join batches into one table of whole columns; the list is emptied.

    Column by column, so that no more than one of them stands in memory twice.
    """
    columns = [[batch.column(name) for batch in batches] for name in schema.names]
    batches.clear()
    columns.reverse()
    joined = []
    while columns:
        joined.append(pa.concat_arrays(columns.pop()))
    return pa.Table.from_arrays(joined, schema=schema)


def _read_index(path: AnyPath) -> npt.NDArray[np.int64]:
    """Return the unit, the rows and the bytes of each piece of a run, int64 (n, 3)."""
    with _opened(path, ipc.IpcReadOptions(use_threads=False)) as reader:
        index = np.frombuffer(reader.schema.metadata[_INDEX], dtype="<i8")
    return index.reshape(-1, 3).astype(np.int64)


@contextmanager
def _opened(path: AnyPath, options: Any) -> Iterator[Any]:
    """Open a run; it is read, not mapped, since mapped pages would count as memory."""
    try:
        with pa.OSFile(str(path)) if isinstance(path, Path) else open_binary(path, block=BLOCK) as file:
            yield ipc.open_file(file, options=options)
    except (pa.ArrowException, OSError) as error:
        disk_failed = isinstance(error, OSError) and error.errno not in (None, errno.ENOENT)
        if disk_failed or isinstance(error, MemoryError):
            raise  # nothing is wrong with the file
        raise StoreError(
            "an unfinished shuffle has lost a file",
            path=path,
            found=str(error).partition("\n")[0],
            cure=f"Remove {path.parent} and run the command again; it starts from its beginning.",
        ) from error
