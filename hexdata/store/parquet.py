"""Parquet files of the store: atomic, deterministic writing and reading by row range."""

from __future__ import annotations

import errno
import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hexdata.board import MAX_SIZE
from hexdata.errors import StoreError
from hexdata.schema import board_bytes, board_size_of, is_target
from hexdata.storage import AnyPath, HashingFile, error_number, storage_of
from hexdata.store.columns import convert_columns
from hexdata.store.files import FileFacts

__all__ = [
    "ROW_GROUP_ROWS",
    "ParquetFiles",
    "ParquetRows",
    "check_table",
    "collect",
    "encode_parquet",
    "open_parquet",
    "read_batches",
    "read_checked",
    "read_parquet",
    "read_rows",
    "regroup",
    "require_rows",
    "text_bytes",
    "write_parquet",
]

ROW_GROUP_ROWS: Final = 65_536
"""Rows per row group. It is small because row-group buffers are not part of DuckDB's memory limit."""
_BATCH_BYTES: Final = 32 << 20
"""Maximum bytes of texts in a batch, except of a single row, and about the bytes of its other columns."""
_MAX_TEXTS: Final = 128 << 20
_MEAN_TEXT: Final = 1 << 10
"""Maximum bytes of the texts in a table that is held in memory: together, and in addition for each row."""
_MAX_CHUNK: Final = 128 << 20
_MAX_ENCODED: Final = 4 * MAX_SIZE * MAX_SIZE
"""Maximum encoded bytes of a column of a row group: in all, and in addition for the policy of each row."""
_SPOOLED_BYTES: Final = 64 << 20
"""Size above which the copy of an object is written to a temporary file."""
_DAMAGE_HINT: Final = (
    "Run `hexdata verify` to list all damaged files. "
    "Restore the file, or convert the sources into a new store."
)


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
    with storage_of(path).publish(replace=replace) as file:
        rows = encode_parquet(file, schema, batches)
        return FileFacts.of(file, rows)


def encode_parquet(
    file: HashingFile | BinaryIO, schema: pa.Schema, batches: Iterable[pa.RecordBatch | pa.Table]
) -> int:
    """Write batches to an open file in the format of :func:`write_parquet` and return the number of rows."""
    rows = 0
    with pq.ParquetWriter(
        file, schema, compression="zstd", compression_level=1, use_dictionary=_dictionary_columns(schema)
    ) as writer:
        for table in regroup(batches, schema, ROW_GROUP_ROWS):
            writer.write_table(_reencode_dictionaries(table), row_group_size=ROW_GROUP_ROWS)
            rows += table.num_rows
    return rows


def _dictionary_columns(schema: pa.Schema) -> list[str]:
    """Return the columns to dictionary-encode: all except those whose values rarely repeat."""
    return [
        field.name
        for field in schema
        if field.name not in {"board", "game_id", "position_id", "record", "sort_key"}
    ]


def _reencode_dictionaries(table: pa.Table) -> pa.Table:
    """Re-encode dictionary columns with only the values they use, in order of first use."""
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            values = table.column(index).cast(field.type.value_type)
            table = table.set_column(index, field, values.dictionary_encode().cast(field.type))
    return table


def regroup(batches: Iterable[pa.RecordBatch | pa.Table], schema: pa.Schema, rows: int) -> Iterator[pa.Table]:
    """Split a stream of batches into tables of exactly ``rows`` rows; the last one may be shorter."""
    pending: list[pa.RecordBatch] = []
    count = 0
    for item in batches:
        for batch in item.to_batches() if isinstance(item, pa.Table) else [item]:
            start = 0
            while count + batch.num_rows - start >= rows:
                pending.append(batch.slice(start, rows - count))
                start += rows - count
                yield pa.Table.from_batches(pending, schema).combine_chunks()
                pending, count = [], 0
            if start < batch.num_rows:
                pending.append(batch.slice(start))
                count += batch.num_rows - start
    if pending:
        yield pa.Table.from_batches(pending, schema).combine_chunks()


@dataclass(frozen=True)
class ParquetRows:
    """A range of rows over a sequence of Parquet files."""

    files: tuple[tuple[AnyPath, int], ...]
    """Each file with its number of rows."""
    start: int
    stop: int

    @classmethod
    def over(cls, files: Sequence[tuple[AnyPath, int]], start: int, stop: int) -> ParquetRows:
        """Return the rows ``start`` to ``stop`` (exclusive), keeping only the files that contain them."""
        return ParquetFiles(files).rows(start, stop)


class ParquetFiles:
    """A sequence of Parquet files whose rows are found by their numbers.

    Args:
        files: Each file with its number of rows.
    """

    def __init__(self, files: Sequence[tuple[AnyPath, int]]) -> None:
        self._files = tuple(files)
        self._firsts = list(accumulate((count for _, count in files), initial=0))

    def __len__(self) -> int:
        """Return the number of rows of all files."""
        return self._firsts[-1]

    def rows(self, start: int, stop: int) -> ParquetRows:
        """Return the rows ``start`` to ``stop`` (exclusive), with only the files that contain them."""
        begin, end = bisect_right(self._firsts, start) - 1, bisect_left(self._firsts, stop)
        first = self._firsts[begin]
        return ParquetRows(self._files[begin:end], start - first, stop - first)


def read_rows(rows: ParquetRows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range in order; row groups outside it are not read.

    Args:
        rows: The range.
        schema: Columns to return. Optional columns that a file lacks are null.
    """
    first = 0
    for path, count in rows.files:
        if first < rows.stop and first + count > rows.start:
            with open_parquet(path, schema) as file:
                yield from read_batches(
                    file,
                    schema,
                    start=max(rows.start - first, 0),
                    stop=rows.stop - first,
                )
        first += count


@contextmanager
def open_parquet(
    path: AnyPath,
    schema: pa.Schema | None = None,
    facts: FileFacts | None = None,
) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file of a store. :func:`read_batches` reads its columns.

    Texts are read as dictionaries, since a small file may repeat a long text in every row.

    Args:
        path: The file.
        schema: Columns that the file must have, with their types; None for any columns (default). Optional
            columns may be missing.
        facts: Facts of the file in the manifest, which are compared with the bytes that are read (default
            None: not compared).

    Raises:
        StoreError: The file is missing or damaged, on opening or while the context is active, or a column is
            missing or has another type, or the file differs from its facts.
    """
    try:
        with ExitStack() as stack:
            source = (
                stack.enter_context(storage_of(path).open())
                if facts is None
                else _open_checked(path, facts, stack)
            )
            with pq.ParquetFile(source) as file:
                found, metadata = file.schema_arrow, file.metadata
            _require_bounded(metadata, found)
            if schema is not None:
                _require_columns(path, found, schema)
            texts = [field.name for field in found if pa.types.is_string(field.type)]
            file = stack.enter_context(pq.ParquetFile(source, metadata=metadata, read_dictionary=texts))
            if facts is not None:
                require_rows(path, file, facts.rows)
            yield file
    except StoreError as error:
        error.path = error.path or str(path)
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the latter in damaged column names
        if not _is_damage(error):
            raise
        raise StoreError(
            "a file of the store is missing or damaged",
            path=path,
            found=str(error).partition("\n")[0],
            hint=_DAMAGE_HINT,
        ) from error


def _require_bounded(metadata: pq.FileMetaData, found: pa.Schema) -> None:
    """Check that each row group can be read in little memory.

    Raises:
        StoreError: A column is larger than any that hexdata writes.
    """
    board = found.get_field_index("board")
    is_packed = board >= 0 and pa.types.is_fixed_size_binary(found.field(board).type)
    width = found.field(board).type.byte_width if is_packed else board_bytes(MAX_SIZE)
    longest = board_size_of(width) ** 2  # a move or a probability for each cell
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            size = max(column.total_uncompressed_size, column.total_compressed_size)
            if size > _MAX_CHUNK or column.num_values > group.num_rows * longest:
                raise _too_large(
                    f"{size:,} bytes and {column.num_values:,} values in {column.path_in_schema}"
                )


def _too_large(found: str) -> StoreError:
    return StoreError("a file of the store is larger than hexdata writes it", found=found, hint=_DAMAGE_HINT)


def _open_checked(path: AnyPath, facts: FileFacts, stack: ExitStack) -> BinaryIO:
    """Return a file with the bytes of a file of a store, after its digest was compared with the manifest.

    A local file is hashed and then read through the same open file. An object is copied, as a second request
    might return another version of it.
    """
    storage, digest = storage_of(path), hashlib.sha256()
    file: Any
    if storage.local is not None:
        file = stack.enter_context(storage.open())
        digest = hashlib.file_digest(file, "sha256")
    else:
        file = stack.enter_context(SpooledTemporaryFile(_SPOOLED_BYTES))  # noqa: SIM115 - the stack closes it
        for block in storage.blocks():
            digest.update(block)
            file.write(block)
    size = file.tell()
    if (size, digest.hexdigest()) != (facts.bytes, facts.sha256):
        raise StoreError(
            "the file was altered",
            path=path,
            found=f"{size:,} bytes, sha256 {digest.hexdigest()}",
            expected=f"{facts.bytes:,} bytes, sha256 {facts.sha256}",
            hint=_DAMAGE_HINT,
        )
    file.seek(0)
    opened: BinaryIO = file
    return opened


def _require_columns(path: AnyPath, found: pa.Schema, schema: pa.Schema) -> None:
    for field in schema:
        if is_target(field.name) and field.name not in found.names:
            continue
        index = found.get_field_index(field.name)  # also -1 if several columns have the name
        if index < 0 or not found.field(index).equals(field):
            raise StoreError(
                "a file of the store does not have the columns of its table",
                path=path,
                record=f"column {field.name}",
                found="no such column, or several" if index < 0 else _describe_type(found.field(index)),
                expected=_describe_type(field),
                hint=_DAMAGE_HINT,
            )


def _describe_type(field: pa.Field) -> str:
    return f"{field.type}{'' if field.nullable else ', never null'}"


def check_table(path: AnyPath, schema: pa.Schema, rows: int, targets: bool = False) -> None:
    """Check that a Parquet file of a store has exactly the columns of ``schema`` and ``rows`` rows.

    Args:
        path: The file.
        schema: Columns of the file.
        rows: Number of rows.
        targets: Whether the file may lack optional columns (default: False).

    Raises:
        StoreError: The columns or the number of rows differ, or the file is missing or damaged.
    """
    with open_parquet(path, schema) as file:
        found = file.schema_arrow.names
        expected = [name for name in schema.names if not (targets and is_target(name) and name not in found)]
        if found != expected:
            raise StoreError(
                "a file of the store does not have the columns of its table",
                path=path,
                found=", ".join(found),
                expected=", ".join(expected),
                hint="Restore the file, or convert the sources into a new store.",
            )
        require_rows(path, file, rows)


def require_rows(path: AnyPath, file: pq.ParquetFile, rows: int) -> None:
    """Check the number of rows of an open Parquet file of a store.

    Raises:
        StoreError: The file has another number of rows.
    """
    if file.metadata.num_rows != rows:
        raise StoreError(
            "the number of rows differs from the manifest",
            path=path,
            found=f"{file.metadata.num_rows:,}",
            expected=f"{rows:,}",
            hint="Restore the file, or convert the sources into a new store.",
        )


def _is_damage(error: Exception) -> bool:
    """Return whether an error means that the file is damaged or missing, not that a disk or memory failed.

    Arrow reports a damaged page as an OSError without an error number.
    """
    if isinstance(error, MemoryError):
        return False
    return not isinstance(error, OSError) or error_number(error) in (None, errno.ENOENT)


def read_parquet(
    path: AnyPath,
    columns: Sequence[str],
    filters: pc.Expression | None = None,
    schema: pa.Schema | None = None,
) -> pa.Table:
    """Return some columns of a small Parquet file of a store.

    Args:
        path: The file.
        columns: Names of the columns to return.
        filters: Expression that selects rows; None for all rows (default).
        schema: Columns that the file must have, with their types; None for any columns (default).

    Raises:
        StoreError: The file is missing or damaged, or a column of ``schema`` is missing or has another type.
    """
    with open_parquet(path, schema) as file:
        if schema is None:
            found = file.schema_arrow.names
            schema = pa.schema(
                [_decoded(file.schema_arrow.field(name)) for name in (columns if filters is None else found)]
            )
        table = collect(read_batches(file, schema), schema)
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
    file: pq.ParquetFile,
    schema: pa.Schema,
    *,
    group: int | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield rows of an open Parquet file with the columns of ``schema``, in batches of limited size.

    Args:
        file: File from :func:`open_parquet`, which has checked these columns.
        schema: Columns to return. Optional columns that the file lacks are null.
        group: Number of the only row group to read; None for all (default).
        start: First row, counted from the first of these row groups. Default 0.
        stop: Row after the last one; None for the end (default).

    Raises:
        StoreError: A row is larger than any that hexdata writes.
    """
    first = 0
    for number in range(file.num_row_groups) if group is None else (group,):
        count = file.metadata.row_group(number).num_rows
        if first + count > start and (stop is None or first < stop):
            rows_of_batch = _rows_of_batch(file.metadata.row_group(number))
            for batch in file.iter_batches(rows_of_batch, row_groups=[number], columns=schema.names):
                low = max(start - first, 0)
                high = batch.num_rows if stop is None else min(stop - first, batch.num_rows)
                if low < high:
                    for part in _divide(batch.slice(low, high - low)):
                        yield from convert_columns(part, schema).to_batches()
                first += batch.num_rows
        else:
            first += count


def _rows_of_batch(group: pq.RowGroupMetaData) -> int:
    """Return the number of rows to decode together: all, unless a column is long."""
    columns = map(group.column, range(group.num_columns))
    rows, longest = int(group.num_rows), 1
    for column in columns:
        longest = max(longest, int(column.total_uncompressed_size), 8 * int(column.num_values))
    return max(1, min(rows, rows * _BATCH_BYTES * 4 // longest))


def _divide(rows: pa.RecordBatch) -> Iterator[pa.Table]:
    """Divide rows so that their texts, which are dictionaries yet, can be decoded in little memory."""
    table = pa.Table.from_batches([rows])
    sizes = sum((text_bytes(column) for column in rows.columns), np.zeros(rows.num_rows, np.int64))
    if sizes.sum() <= _BATCH_BYTES:
        yield table
        return
    if sizes.max() > _BATCH_BYTES:
        raise _too_large(f"a row with {sizes.max():,} bytes of text")
    ends = np.cumsum(sizes)
    start = 0
    while start < rows.num_rows:
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + _BATCH_BYTES, side="right"))
        yield table.slice(start, stop - start)
        start = stop


def text_bytes(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return the bytes of the text in each row of a column, (N,): 0 in null rows and in other columns."""
    is_coded = pa.types.is_dictionary(column.type)
    if not pa.types.is_string(column.type.value_type if is_coded else column.type):
        return np.zeros(len(column), np.int64)
    lengths = pc.binary_length(column.dictionary if is_coded else column)
    lengths = lengths.take(column.indices) if is_coded else lengths
    found: npt.NDArray[np.int64] = lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def read_checked(path: AnyPath, schema: pa.Schema, facts: FileFacts) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file of a store, after a check of its bytes against the manifest."""
    with open_parquet(path, schema, facts) as file:
        yield from read_batches(file, schema)
