"""Parquet files of the store: atomic, deterministic writing and reading by row range."""

from __future__ import annotations

import errno
import hashlib
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from tempfile import SpooledTemporaryFile
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hexdata.board import MAX_SIZE
from hexdata.errors import StoreError
from hexdata.retry import error_number
from hexdata.storage import AnyPath, storage_of
from hexdata.storage.errors import VERIFY_HINT
from hexdata.store.files import FileFacts

ROW_GROUP_ROWS: Final = 65_536
"""Rows per row group. It is small because row-group buffers are not part of DuckDB's memory limit."""
ROW_GROUP_BYTES: Final = 64 << 20
"""Maximum bytes of the lists and texts of a row group: it has fewer rows if most have a large policy."""
_ITEM_BYTES: Final = 8
"""Bytes of an item of a list, such as a cell of a policy, in this limit."""
_BATCH_BYTES: Final = 32 << 20
"""Maximum bytes of texts in a batch, except of a single row, and about the bytes of its other columns."""
_MAX_TEXTS: Final = 128 << 20
_MEAN_TEXT: Final = 1 << 10
"""Maximum bytes of the texts in a table that is held in memory: together, and in addition for each row."""
_MAX_CHUNK: Final = 128 << 20
"""Maximum encoded bytes of a column of a row group."""
_SPOOLED_BYTES: Final = 64 << 20
"""Size above which the copy of an object is written to a temporary file."""
_BLOCK: Final = 8 << 20
"""Bytes of an object that are copied at a time."""


def write_parquet(
    path: AnyPath, schema: pa.Schema, batches: Iterable[pa.RecordBatch | pa.Table], *, replace: bool = True
) -> FileFacts:
    """Publish batches as one Parquet file and return its size, digest and row count.

    The bytes depend only on the rows, not on how they are divided into batches.

    Args:
        path: Final path or object address.
        schema: Schema of the file and of all batches.
        batches: Rows to write, in order.
        replace: Whether to overwrite an existing object with other content (default: True).
    """
    # Values of these columns rarely repeat.
    unique = {"board", "game_id", "position_id", "record", "sort_key"}
    encoded = [field.name for field in schema if field.name not in unique]
    rows = 0
    with storage_of(path).publish(replace=replace) as file:
        with pq.ParquetWriter(
            file, schema, compression="zstd", compression_level=1, use_dictionary=encoded
        ) as writer:
            for table in regroup(batches, schema, ROW_GROUP_ROWS, ROW_GROUP_BYTES):
                writer.write_table(_reencode_dictionaries(table), row_group_size=ROW_GROUP_ROWS)
                rows += table.num_rows
                del table  # not held while the next one is read: with policies, each takes 100 MB
        return FileFacts.of(file, rows)


def _reencode_dictionaries(table: pa.Table) -> pa.Table:
    """Re-encode dictionary columns with only the values they use, in order of first use."""
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            # The dictionary of a batch may hold values of rows outside this table, and would be written to
            # the file.
            values = table.column(index).cast(field.type.value_type)
            table = table.set_column(index, field, values.dictionary_encode().cast(field.type))
    return table


def regroup(
    batches: Iterable[pa.RecordBatch | pa.Table], schema: pa.Schema, rows: int, size: int | None = None
) -> Iterator[pa.Table]:
    """Divide a stream of batches into tables of ``rows`` rows; the last one may be shorter.

    Args:
        batches: The stream.
        schema: Schema of the batches.
        rows: Number of rows.
        size: Maximum bytes of the lists and texts of a table of several rows; None for any (default).
    """
    pending: list[pa.RecordBatch] = []
    count = held = 0
    for item in batches:
        # Slices share the memory of their batch, so only the rows of one table are copied at a time.
        for batch in item.to_batches() if isinstance(item, pa.Table) else [item]:
            while len(batch):
                taken = min(rows - count, len(batch))
                if size is not None:
                    ends = held + np.cumsum(_varying_bytes(batch.slice(0, taken)))
                    taken = int(np.searchsorted(ends, size, "right")) or (0 if pending else 1)
                    held = int(ends[taken - 1])
                if taken:
                    pending.append(batch.slice(0, taken))
                count, batch = count + taken, batch.slice(taken)
                if len(batch) or count == rows:
                    yield _join(pending, schema)
                    count = held = 0
    if pending:
        yield _join(pending, schema)


def _varying_bytes(rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Return the bytes of the lists and texts in each row, (N,)."""
    total = np.zeros(len(rows), np.int64)
    for column in rows.columns:
        if pa.types.is_list(column.type):
            lengths = pc.list_value_length(column).fill_null(0)
            total += _ITEM_BYTES * lengths.to_numpy(zero_copy_only=False).astype(np.int64)
        else:
            total += text_bytes(column)
    return total


def _join(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """Return batches as a table of one chunk. The list is empty afterwards, so that nothing is held twice."""
    table = pa.Table.from_batches(batches, schema).combine_chunks()
    batches.clear()
    return table


@dataclass(frozen=True)
class ParquetRows:
    """A range of rows over a sequence of Parquet files."""

    files: tuple[tuple[AnyPath, int], ...]
    """Each file with its number of rows."""
    start: int
    stop: int

    @classmethod
    def of(cls, files: Iterable[tuple[AnyPath, int]]) -> ParquetRows:
        """Return all rows of some files, each with its number of rows."""
        listed = tuple(files)
        return cls(listed, 0, sum(count for _, count in listed))

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.stop - self.start

    def part(self, start: int, stop: int) -> ParquetRows:
        """Return the rows ``start`` to ``stop`` (exclusive) of this range, with only their files."""
        firsts = list(accumulate((count for _, count in self.files), initial=-self.start))
        begin, end = bisect_right(firsts, start) - 1, bisect_left(firsts, stop)
        return ParquetRows(self.files[begin:end], start - firsts[begin], stop - firsts[begin])


def read_rows(rows: ParquetRows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range in order; row groups outside it are not read.

    Args:
        rows: The range.
        schema: Columns to return.
    """
    first = 0
    for path, count in rows.files:
        with open_parquet(path, schema) as file:
            yield from read_batches(file, schema, start=max(rows.start - first, 0), stop=rows.stop - first)
        first += count


@contextmanager
def memory_returned() -> Iterator[None]:
    """Return a context manager in which Arrow uses the allocator of the system, which returns freed memory.

    Its default allocator, mimalloc, retains more and more of it: 40 MB where 5 MB are used.
    """
    pool = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        # Of two threads whose times overlap, the second one has found the pool of the first one.
        if pool.backend_name != "system":
            pa.set_memory_pool(pool)


@contextmanager
def open_parquet(
    path: AnyPath, schema: pa.Schema | None = None, facts: FileFacts | None = None, whole: int | None = None
) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file of a store. :func:`read_batches` reads its columns.

    Texts are read as dictionaries, since a small file may repeat a long text in every row.

    Args:
        path: The file.
        schema: Columns that the file must have, with their types; None for any columns (default).
        facts: Facts of the file in the manifest, which are compared with the bytes that are read (default
            None: not compared).
        whole: Number of rows of a file that has no other columns than ``schema``. Default None: any columns,
            and the rows of ``facts``.

    Raises:
        StoreError: The file is missing or damaged, on opening or while the context is active, or a column is
            missing or has another type, or the file differs from its facts.
    """
    try:
        with ExitStack() as stack:
            source = _open(path, facts, stack)
            # Twice: the text columns have to be named when a file is opened, and only its footer lists them.
            with pq.ParquetFile(source) as file:
                found, metadata = file.schema_arrow, file.metadata
            # Before anything is decoded: a damaged footer may promise any amount of memory.
            _require_bounded(metadata)
            reason = "a file of the store does not have the columns of its table"
            for field in schema or ():
                index = found.get_field_index(field.name)  # also -1 if several columns have the name
                column = found.field(index) if index >= 0 else f"not one column {field.name}"
                if column != field:
                    raise StoreError(reason, found=column, expected=field, hint=VERIFY_HINT)
            if whole is not None and schema is not None and found.names != schema.names:
                raise StoreError(reason, found=found.names, expected=schema.names, hint=VERIFY_HINT)
            expected = facts.rows if facts and whole is None else whole
            if expected not in (None, count := metadata.num_rows):
                reason = "the number of rows differs from the manifest"
                raise StoreError(reason, found=f"{count:,}", expected=f"{expected:,}", hint=VERIFY_HINT)
            texts = [field.name for field in found if pa.types.is_string(field.type)]
            yield stack.enter_context(pq.ParquetFile(source, metadata=metadata, read_dictionary=texts))
    except StoreError as error:
        error.path = error.path or str(path)
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the latter in damaged column names
        # Arrow reports a damaged page as an OSError without a number. Others are of the disk or the memory.
        if isinstance(error, MemoryError) or (
            isinstance(error, OSError) and error_number(error) not in (None, errno.ENOENT)
        ):
            raise
        reason, found = "a file of the store is missing or damaged", str(error).partition("\n")[0]
        raise StoreError(reason, path=path, found=found, hint=VERIFY_HINT) from error


def _require_bounded(metadata: pq.FileMetaData) -> None:
    """Check that each row group can be read in little memory.

    Raises:
        StoreError: A column is larger than any that hexdata writes.
    """
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            size, count = max(column.total_uncompressed_size, column.total_compressed_size), column.num_values
            # A list has at most a move or a probability for each cell.
            if size > _MAX_CHUNK or count > group.num_rows * MAX_SIZE**2:
                raise _too_large(f"{size:,} bytes and {count:,} values in {column.path_in_schema}")


def _too_large(found: str) -> StoreError:
    return StoreError("a file of the store is larger than hexdata writes it", found=found, hint=VERIFY_HINT)


def _open(path: AnyPath, facts: FileFacts | None, stack: ExitStack) -> Any:
    """Return an open file of a store, after its digest was compared with the facts, if there are any.

    A local file is hashed and then read through the same open file. An object is copied, as a second request
    might return another version of it.
    """
    storage = storage_of(path)
    file: Any = stack.enter_context(storage.open())
    if facts is None:
        return file
    if storage.local is None:
        source, file = file, stack.enter_context(SpooledTemporaryFile(_SPOOLED_BYTES))  # noqa: SIM115
        shutil.copyfileobj(source, file, _BLOCK)
        file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if error := facts.difference(path, file.tell(), digest, VERIFY_HINT):
        raise error
    file.seek(0)
    return file


def read_parquet(path: AnyPath, columns: Sequence[str], filters: Any = None) -> pa.Table:
    """Return some columns of a small Parquet file of a store.

    Args:
        path: The file.
        columns: Names of the columns to return.
        filters: Expression that selects rows; None for all rows (default).

    Raises:
        StoreError: The file is missing or damaged.
    """
    with open_parquet(path) as file:
        # The filter may use columns that are not returned.
        names = columns if filters is None else file.schema_arrow.names
        schema = pa.schema([_decoded(file.schema_arrow.field(name)) for name in names])
        table = collect(read_batches(file, schema, threads=False), schema)
        return (table if filters is None else table.filter(filters)).select(list(columns))


def _decoded(field: pa.Field) -> pa.Field:
    """Return the field of a file that :func:`open_parquet` opened, with texts as such."""
    is_text = pa.types.is_dictionary(field.type) and pa.types.is_int32(field.type.index_type)
    return field.with_type(field.type.value_type) if is_text else field


def collect(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """Return batches of a store as one table.

    Raises:
        StoreError: Their texts are longer than those of any table of hexdata.
    """
    kept, texts, most = [], 0, _MAX_TEXTS
    for batch in batches:
        kept.append(batch)
        texts += sum(int(text_bytes(column).sum()) for column in batch.columns)
        most += _MEAN_TEXT * batch.num_rows
        if texts > most:
            raise _too_large(f"more than {most:,} bytes of text")
    return pa.Table.from_batches(kept, schema)


def read_batches(
    file: pq.ParquetFile, schema: pa.Schema, *, start: int = 0, stop: int | None = None, threads: bool = True
) -> Iterator[pa.RecordBatch]:
    """Yield rows of an open Parquet file with the columns of ``schema``, in batches of limited size.

    Args:
        file: File from :func:`open_parquet`, which has checked these columns.
        schema: Columns to return.
        start: First row. Default 0. Row groups without any of the rows are not read.
        stop: Row after the last one; None for the end (default).
        threads: Whether columns are decoded in parallel. Default True. Arrow's threads release the Python
            file, for which they need the interpreter: a process that exits at once might abort.

    Raises:
        StoreError: A row is larger than any that hexdata writes.
    """
    first = 0
    for number in range(file.num_row_groups):
        metadata = file.metadata.row_group(number)
        after = first + metadata.num_rows
        if after > start and (stop is None or first < stop):
            groups = {"row_groups": [number], "columns": schema.names, "use_threads": threads}
            for batch in file.iter_batches(_rows_of_batch(metadata), **groups):
                low = max(start - first, 0)
                high = batch.num_rows if stop is None else min(stop - first, batch.num_rows)
                if low < high:
                    for part in _divide(batch.slice(low, high - low)):
                        # Arrow returns columns in the order of the file. The cast decodes the texts of one
                        # part at a time.
                        yield from part.select(schema.names).cast(schema).to_batches()
                first += batch.num_rows
        first = after


def _rows_of_batch(group: pq.RowGroupMetaData) -> int:
    """Return the number of rows to decode together: all, unless a column is long."""
    rows, longest = int(group.num_rows), 1
    for column in map(group.column, range(group.num_columns)):
        # A few bytes can encode any number of equal values. Those of lists exist many times while they are
        # decoded: of policies, 5,000 rows took as long as all, and 170 MB less.
        longest = max(longest, int(column.total_uncompressed_size), 128 * int(column.num_values))
    return max(1, min(rows, rows * _BATCH_BYTES * 4 // longest))


def _divide(rows: pa.RecordBatch) -> Iterator[pa.Table]:
    """Divide rows so that their texts, which are dictionaries yet, can be decoded in little memory."""
    size = sum(int(text_bytes(column).sum()) for column in rows.columns)
    if size <= _BATCH_BYTES:
        yield pa.Table.from_batches([rows])
    elif rows.num_rows == 1:
        raise _too_large(f"a row with {size:,} bytes of text")
    else:
        half = rows.num_rows // 2
        yield from _divide(rows.slice(0, half))
        yield from _divide(rows.slice(half))


def text_bytes(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return the bytes of the text in each row of a column, (N,): 0 in null rows and in other columns."""
    is_coded = pa.types.is_dictionary(column.type)
    if not pa.types.is_string(column.type.value_type if is_coded else column.type):
        return np.zeros(len(column), np.int64)
    lengths = pc.binary_length(column.dictionary if is_coded else column)
    lengths = lengths.take(column.indices) if is_coded else lengths
    return np.asarray(lengths.fill_null(0).to_numpy(zero_copy_only=False), np.int64)
