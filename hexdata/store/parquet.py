"""Parquet files of the store: atomic, deterministic writing and reading by row range."""

from __future__ import annotations

import errno
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hexdata.errors import StoreError
from hexdata.schema import SCHEMA_VERSION, is_target
from hexdata.storage import AnyPath, HashingFile, add_path_to_error, error_number, storage_of
from hexdata.store.columns import convert_columns, stored_fields
from hexdata.store.files import FileFacts

__all__ = [
    "ROW_GROUP_ROWS",
    "ParquetFiles",
    "ParquetRows",
    "check_table",
    "encode_parquet",
    "open_parquet",
    "read_batches",
    "read_parquet",
    "read_rows",
    "regroup",
    "require_rows",
    "write_parquet",
]

ROW_GROUP_ROWS: Final = 65_536
"""Rows per row group. It is small because row-group buffers are not part of DuckDB's memory limit."""
_ARROW_READ_ERRORS: Final = ("reading bytes from file", "open local file")
"""Texts of Arrow's errors on reading a file, which name no file."""
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
    version: int = SCHEMA_VERSION
    """Schema version of the store."""

    @classmethod
    def over(
        cls, files: Sequence[tuple[AnyPath, int]], start: int, stop: int, version: int = SCHEMA_VERSION
    ) -> ParquetRows:
        """Return the rows ``start`` to ``stop`` (exclusive), keeping only the files that contain them."""
        return ParquetFiles(files, version).rows(start, stop)


class ParquetFiles:
    """A sequence of Parquet files whose rows are found by their numbers.

    Args:
        files: Each file with its number of rows.
        version: Schema version of the store (default: the current one).
    """

    def __init__(self, files: Sequence[tuple[AnyPath, int]], version: int = SCHEMA_VERSION) -> None:
        self._files = tuple(files)
        self._firsts = list(accumulate((count for _, count in files), initial=0))
        self._version = version

    def __len__(self) -> int:
        """Return the number of rows of all files."""
        return self._firsts[-1]

    def rows(self, start: int, stop: int) -> ParquetRows:
        """Return the rows ``start`` to ``stop`` (exclusive), with only the files that contain them."""
        begin, end = bisect_right(self._firsts, start) - 1, bisect_left(self._firsts, stop)
        first = self._firsts[begin]
        return ParquetRows(self._files[begin:end], start - first, stop - first, self._version)


def read_rows(rows: ParquetRows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range in order; row groups outside it are not read.

    Args:
        rows: The range, with the schema version of the store.
        schema: Columns to return, in the current version. Optional columns that a file lacks are null.
    """
    first = 0
    for path, count in rows.files:
        if first < rows.stop and first + count > rows.start:
            yield from _read_file(path, rows.start - first, rows.stop - first, schema, rows.version)
        first += count


@contextmanager
def open_parquet(
    path: AnyPath, schema: pa.Schema | None = None, version: int = SCHEMA_VERSION
) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file of a store. :func:`read_batches` reads its columns.

    Args:
        path: The file.
        schema: Columns that the file must have, with their types; None for any columns (default). Optional
            columns may be missing.
        version: Schema version of the store (default: the current one).

    Raises:
        StoreError: The file is missing or damaged, on opening or while the context is active, or a column is
            missing or has another type.
    """
    try:
        with pq.ParquetFile(storage_of(path).source()) as file:
            if schema is not None:
                _require_columns(path, file.schema_arrow, schema, version)
            yield file
    except StoreError as error:
        error.path = error.path or str(path)  # of a policy that cannot be converted
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the latter in damaged column names
        if not _is_damage(error):
            if any(text in str(error) for text in _ARROW_READ_ERRORS):
                with add_path_to_error(path):
                    raise
            raise
        raise StoreError(
            "a file of the store is missing or damaged",
            path=path,
            found=str(error).partition("\n")[0],
            hint=_DAMAGE_HINT,
        ) from error


def _require_columns(path: AnyPath, found: pa.Schema, schema: pa.Schema, version: int) -> None:
    for name, field in stored_fields(schema, version).items():
        if field is None or (is_target(name) and name not in found.names):
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


def check_table(
    path: AnyPath, schema: pa.Schema, rows: int, version: int = SCHEMA_VERSION, targets: bool = False
) -> None:
    """Check that a Parquet file of a store has exactly the columns of ``schema`` and ``rows`` rows.

    Args:
        path: The file.
        schema: Columns of the file, in the current version.
        rows: Number of rows.
        version: Schema version of the store (default: the current one).
        targets: Whether the file may lack optional columns (default: False).

    Raises:
        StoreError: The columns or the number of rows differ, or the file is missing or damaged.
    """
    with open_parquet(path, schema, version) as file:
        found = file.schema_arrow.names
        fields = stored_fields(schema, version).items()
        expected = [
            field.name
            for name, field in fields
            if field is not None and not (targets and is_target(name) and name not in found)
        ]
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
    version: int = SCHEMA_VERSION,
) -> pa.Table:
    """Return some columns of a small Parquet file of a store.

    Args:
        path: The file.
        columns: Names of the columns to return, in the current version if ``schema`` is given.
        filters: Expression that selects rows; None for all rows (default).
        schema: Columns that the file must have, with their types; None for any columns (default).
        version: Schema version of the store (default: the current one).

    Raises:
        StoreError: The file is missing or damaged, or a column of ``schema`` is missing or has another type.
    """
    with open_parquet(path, schema, version) as file:
        if filters is None and schema is None:
            return file.read(columns=list(columns))
        table = file.read()
        if schema is not None:
            table = convert_columns(table, schema)
        return (table if filters is None else table.filter(filters)).select(list(columns))


def read_batches(
    file: pq.ParquetFile, schema: pa.Schema, *, group: int | None = None, version: int = SCHEMA_VERSION
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an open Parquet file with the columns of ``schema``, one row group at a time.

    Args:
        file: File from :func:`open_parquet`, which has checked these columns.
        schema: Columns to return, in the current version. Optional columns that the file lacks are null.
        group: Number of the only row group to read; None for all (default).
        version: Schema version of the store (default: the current one).
    """
    stored = [field.name for field in stored_fields(schema, version).values() if field is not None]
    for number in range(file.num_row_groups) if group is None else (group,):
        rows = file.read_row_group(number, columns=stored)
        yield from convert_columns(rows, schema).to_batches()


def _read_file(
    path: AnyPath, start: int, stop: int, schema: pa.Schema, version: int
) -> Iterator[pa.RecordBatch]:
    with open_parquet(path, schema, version) as file:
        first = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            low, high = max(start - first, 0), min(stop - first, count)
            if low < high:
                table = pa.Table.from_batches(
                    read_batches(file, schema, group=group, version=version), schema
                )
                yield from table.slice(low, high - low).to_batches()
            first += count
