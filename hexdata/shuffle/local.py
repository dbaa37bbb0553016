"""The row operations of a shuffle: scatters slices into runs, and sorts units of runs into buckets.

The content of a bucket is a pure function of the store and the options. Memory limits, layout and order of
work do not affect it. DuckDB selects the rows and their destinations; Arrow moves the data.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hexdata.errors import StoreError
from hexdata.order import sort_key
from hexdata.schema import positions_schema
from hexdata.selection import Placement
from hexdata.shards.position_check import find_bad_position
from hexdata.shuffle.layout import Bucket, Job, Layout, Limits, Slice, sort_cost
from hexdata.shuffle.runs import (
    Piece,
    Runs,
    as_run,
    join_columns,
    read_column,
    read_pieces,
    run_schema,
    write_run,
)
from hexdata.storage import AnyPath
from hexdata.store.parquet import ROW_GROUP_ROWS
from hexdata.store.session import DuckDBPyConnection

__all__ = ["Mover"]

SAMPLED_KEYS: Final = 1 << 17
"""Maximum number of keys sampled to split a unit: enough for parts of equal size within a few percent."""
MORE_PARTS: Final = 1.25
"""Factor for the number of parts over the minimum for parts of exactly equal size."""
BATCH_ROWS: Final = 1 << 14
"""Maximum rows per batch from DuckDB. It is small so that even batches of wide rows take little memory."""

Rows = Iterator[pa.Table]
UInt64Array = npt.NDArray[np.uint64]
UnitNumbers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Mover:
    """Scatters slices and sorts units with the parameters shared by all of them.

    Attributes:
        key: Key of ``sort_key``.
        board_size: Cells along an edge.
        folder: Folder or address in which runs are written.
        spill: Folder for a unit that is split further; None for the system's temporary folder.
        layout: Slices and units.
        limits: Limits of one thread.
        say: Called with each line for the log.
        check: Called regularly; raises if the work must stop.
    """

    key: int
    board_size: int
    folder: AnyPath
    spill: Path | None
    layout: Layout
    limits: Limits
    say: Callable[[str], None]
    check: Callable[[], None]

    def scatter(self, con: DuckDBPyConnection, placement: Placement, part: Slice) -> Iterator[int]:
        """Phase 1: write a slice as runs, one per chunk, and yield the size of each in bytes."""
        query = placement.rows_sql(part.start, part.stop)
        reader = con.sql(query).to_arrow_reader(min(self.limits.chunk_rows, BATCH_ROWS))
        for number, batches in enumerate(self._chunks(reader)):
            yield self._scatter_rows(batches, self.folder / part.run_name(number))

    def _scatter_rows(self, batches: list[pa.RecordBatch], run: AnyPath) -> int:
        """Write rows as a run and return its size in bytes. ``batches`` is emptied to free memory."""
        table = pa.Table.from_batches(batches)
        batches.clear()
        rows = as_run(table, self.board_size)
        _check_values(rows)
        split, bucket, key = (table.column(name).to_numpy() for name in ("split", "bucket", "sort_key"))
        unit = self.layout.unit_numbers(split, bucket, key)
        return write_run(run, rows, unit)

    def sort(self, runs: Runs, job: Job) -> Iterator[tuple[Bucket, Rows]]:
        """Phase 2: yield each bucket of a job with its sorted rows.

        Read the rows of a bucket, which have ``positions_schema``, before requesting the next bucket.

        Args:
            runs: All runs of the shuffle, or those of the job's units.
            job: Buckets and their units.

        Raises:
            StoreError: A run is missing or damaged.
        """
        blocks = [self._sort_unit(runs.pieces(unit), job.buckets) for unit in job.units]
        if len(blocks) == 1:
            yield from blocks[0]
        else:
            yield job.buckets[0], chain.from_iterable(rows for block in blocks for _, rows in block)

    def _sort_unit(self, pieces: list[Piece], buckets: list[Bucket]) -> Iterator[tuple[Bucket, Rows]]:
        """Sort the rows of several buckets, or of a part of one bucket."""
        rows, size = sum(piece.rows for piece in pieces), sum(piece.bytes for piece in pieces)
        if rows <= 1 or self.limits.may_sort(rows, size):
            yield from self._sort_in_memory(pieces, buckets)
            return
        self.say(f"{buckets[0].name}: {rows:,} rows of {size:,} bytes are more than planned: cut further")
        if len(buckets) > 1:
            with self._cut(pieces, lambda rows: rows.column("bucket").to_numpy() - buckets[0].index) as runs:
                for index, bucket in enumerate(buckets):
                    yield from self._sort_unit(runs.pieces(index), [bucket])
        else:
            bounds = self._bounds(pieces, rows, size)
            with self._cut(pieces, lambda rows: np.searchsorted(bounds, self._keys(rows), "right")) as runs:
                parts = (self._sort_unit(runs.pieces(i), buckets) for i in range(len(bounds) + 1))
                yield buckets[0], chain.from_iterable(rows for part in parts for _, rows in part)

    def _sort_in_memory(self, pieces: list[Piece], buckets: list[Bucket]) -> Iterator[tuple[Bucket, Rows]]:
        """Sort rows that fit into memory, which is the usual case."""
        batches = list(self._read(pieces))
        if not batches:
            yield from ((bucket, iter(())) for bucket in buckets)
            return
        table = join_columns(batches, run_schema(self.board_size))
        if len(buckets) == 1:
            order, bounds = np.argsort(self._keys(table)), np.array([0, table.num_rows])
        else:
            number = table.column("bucket").to_numpy()
            order = np.lexsort((self._keys(table), number))
            first = buckets[0].index
            bounds = np.searchsorted(number[order], range(first, first + len(buckets) + 1))
        schema = positions_schema(self.board_size)
        table = table.select(schema.names)
        for bucket, (start, stop) in zip(buckets, pairwise(bounds.tolist()), strict=True):
            yield bucket, _take(table, order[start:stop], schema)

    def _read(self, pieces: list[Piece]) -> Iterator[pa.RecordBatch]:
        for batch in read_pieces(pieces, run_schema(self.board_size)):
            self.check()
            yield batch

    def _keys(self, rows: pa.Table) -> UInt64Array:
        return sort_key(rows.column("position_id").to_numpy(), self.key)

    def _bounds(self, pieces: list[Piece], rows: int, size: int) -> UInt64Array:
        """Return the keys at which to split a unit, estimated from a sample of its keys."""
        step = -(-rows // SAMPLED_KEYS)
        columns = read_column(pieces, run_schema(self.board_size), "position_id")
        ids = np.concatenate([ids.to_numpy()[::step] for ids in columns])
        keys = np.sort(sort_key(ids, self.key))
        excess = max(rows / self.limits.sort_rows, sort_cost(rows, size) / self.limits.sort_bytes)
        parts = math.ceil(MORE_PARTS * excess)
        return keys[np.arange(1, parts) * len(keys) // parts]

    @contextmanager
    def _cut(self, pieces: list[Piece], unit_of: Callable[[pa.Table], UnitNumbers]) -> Iterator[Runs]:
        """Scatter the rows of a unit again into temporary runs, which are removed at the end."""
        if self.spill is not None:
            self.spill.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="cut-", dir=self.spill) as folder:
            paths: list[Path] = []
            for batches in self._chunks(self._read(pieces)):
                rows = join_columns(batches, run_schema(self.board_size))
                paths.append(Path(folder, f"run-{len(paths):06d}.arrow"))
                write_run(paths[-1], rows, unit_of(rows))
            yield Runs(paths)

    def _chunks(self, batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
        """Group batches into lists that fit into memory. Their sizes vary with the width of the rows."""
        chunk: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in batches:
            rows, size = rows + len(batch), size + batch.nbytes
            if chunk and not self.limits.may_scatter(rows, size):
                yield chunk
                chunk, rows, size = [], len(batch), batch.nbytes
            chunk.append(batch)
        if chunk:
            yield chunk


def _check_values(rows: pa.Table) -> None:
    """Check that the positions are valid for the readers of shards.

    Raises:
        StoreError: A position is not valid.
    """
    bad = find_bad_position(rows, texts=False)
    if bad is not None:
        raise StoreError(
            "the store holds what no position has",
            record=f"position {rows.column('position_id')[bad.row]}",
            found=bad.found,
            expected=bad.expected,
            hint="Run `hexdata verify` to see which file is wrong.",
        )


def _take(table: pa.Table, order: npt.NDArray[np.int64], schema: pa.Schema) -> Rows:
    """Yield the rows in the given order, one row group at a time."""
    for start in range(0, len(order), ROW_GROUP_ROWS):
        yield table.take(pa.array(order[start : start + ROW_GROUP_ROWS])).cast(schema)
