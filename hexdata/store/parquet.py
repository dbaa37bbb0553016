"""Parquet files of the store: written atomically with the same bytes for the same rows, read by range."""

from __future__ import annotations

import errno
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hexdata.errors import StoreError
from hexdata.remote import AnyPath, open_binary
from hexdata.store.files import FileFacts, HashingFile, atomic_file

__all__ = [
    "Rows",
    "check_table",
    "encode_parquet",
    "open_parquet",
    "parquet_input",
    "read_parquet",
    "read_rows",
    "regroup",
    "write_parquet",
]

ROW_GROUP_ROWS: Final = 65_536
"""Rows a row group: small, since row-group buffers come on top of every memory limit."""


def write_parquet(
    path: AnyPath, schema: pa.Schema, batches: Iterable[pa.RecordBatch | pa.Table], *, replace: bool = True
) -> FileFacts:
    """Write batches as one Parquet file, in row groups of ``ROW_GROUP_ROWS``, as ``atomic_file`` does.

    The bytes depend on the rows alone: however they are cut into batches, row groups are the same.
    """
    with atomic_file(path, replace=replace) as file:
        return file.facts(encode_parquet(file, schema, batches))


def encode_parquet(
    file: HashingFile | BinaryIO, schema: pa.Schema, batches: Iterable[pa.RecordBatch | pa.Table]
) -> int:
    """Write batches, as :func:`write_parquet` does, into an open file; return the number of rows."""
    rows = 0
    with pq.ParquetWriter(
        file, schema, compression="zstd", compression_level=1, use_dictionary=_dictionary_columns(schema)
    ) as writer:
        for table in regroup(batches, schema, ROW_GROUP_ROWS):
            writer.write_table(_encode_anew(table), row_group_size=ROW_GROUP_ROWS)
            rows += table.num_rows
    return rows


def _dictionary_columns(schema: pa.Schema) -> list[str]:
    """Every column but those whose values hardly repeat, where a dictionary only costs."""
    return [
        field.name
        for field in schema
        if field.name not in {"board", "game_id", "position_id", "record", "sort_key"}
    ]


def _encode_anew(table: pa.Table) -> pa.Table:
    """Give dictionary columns the values they use, in order of first use: batches may bring others."""
    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            values = table.column(index).cast(field.type.value_type)
            table = table.set_column(index, field, values.dictionary_encode().cast(field.type))
    return table


def regroup(batches: Iterable[pa.RecordBatch | pa.Table], schema: pa.Schema, rows: int) -> Iterator[pa.Table]:
    """Cut a stream of batches into tables of exactly ``rows`` rows, the last one shorter."""
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
class Rows:
    """A range of the rows of some Parquet files, read one after the other."""

    files: tuple[tuple[AnyPath, int], ...]
    """Each file with the number of its rows."""
    start: int
    stop: int

    @classmethod
    def of(cls, files: Sequence[tuple[AnyPath, int]], start: int, stop: int) -> Rows:
        """Return a range that knows no other files than those that it has rows of."""
        firsts = list(accumulate((count for _, count in files), initial=0))
        begin, end = bisect_right(firsts, start) - 1, bisect_left(firsts, stop)
        return cls(tuple(files[begin:end]), start - firsts[begin], stop - firsts[begin])


def read_rows(rows: Rows, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read a range of rows in order; row groups outside of it are not touched."""
    first = 0
    for path, count in rows.files:
        if first < rows.stop and first + count > rows.start:
            yield from _read_file(path, rows.start - first, rows.stop - first, schema)
        first += count


def parquet_input(path: AnyPath) -> Path | BinaryIO:
    """Return what pyarrow reads a Parquet file from: its path, or an object that was opened."""
    return path if isinstance(path, Path) else open_binary(path)


@contextmanager
def open_parquet(path: AnyPath, schema: pa.Schema | None = None) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file of a store.

    Args:
        path: of the file.
        schema: columns that it must have, with their types. Default None: whatever it has.

    Raises:
        StoreError: it is missing or damaged, also while it is being read; or a column is missing or has
            another type.
    """
    try:
        with pq.ParquetFile(parquet_input(path)) as file:
            if schema is not None:
                _require_columns(path, file.schema_arrow, schema)
            yield file
    except (pa.ArrowException, OSError) as error:
        if not _is_damage(error):
            raise
        raise StoreError(
            "a file of the store is missing or damaged",
            path=path,
            found=str(error).partition("\n")[0],
            hint="Run `hexdata verify` to see what else is; restore the file, or make the store again.",
        ) from error


def _require_columns(path: AnyPath, found: pa.Schema, schema: pa.Schema) -> None:
    for field in schema:
        index = found.get_field_index(field.name)  # -1 as well if several have the name
        if index < 0 or not found.field(index).equals(field):
            raise StoreError(
                "a file of the store has other columns than its table",
                path=path,
                record=f"column {field.name}",
                found="no such column, or several" if index < 0 else _kind(found.field(index)),
                expected=_kind(field),
                hint="Run `hexdata verify` to see what else is; restore the file, or make the store again.",
            )


def _kind(field: pa.Field) -> str:
    return f"{field.type}{'' if field.nullable else ', never null'}"


def check_table(path: AnyPath, schema: pa.Schema, rows: int) -> None:
    """Check that a Parquet file of a store has the columns of its table, and the rows that are stated of it.

    Raises:
        StoreError: it has others, or is missing or damaged.
    """
    with open_parquet(path, schema) as file:
        if file.schema_arrow.names != schema.names:
            raise StoreError(
                "a file of the store has other columns than its table",
                path=path,
                found=", ".join(file.schema_arrow.names),
                expected=", ".join(schema.names),
                hint="Restore the file, or make the store again.",
            )
        if file.metadata.num_rows != rows:
            raise StoreError(
                "the manifest states other rows of the file",
                path=path,
                found=f"{file.metadata.num_rows:,}",
                expected=f"{rows:,}",
                hint="Restore the file, or make the store again.",
            )


def _is_damage(error: Exception) -> bool:
    """Say whether the fault is the file's, and not that of the disk or of the memory at hand.

    A damaged page is an OSError without a number.
    """
    if isinstance(error, MemoryError):
        return False
    return not isinstance(error, OSError) or error.errno in (None, errno.ENOENT)


def read_parquet(
    path: AnyPath,
    columns: Sequence[str],
    filters: pc.Expression | None = None,
    schema: pa.Schema | None = None,
) -> pa.Table:
    """Read some columns of a small Parquet file of a store.

    Raises:
        StoreError: it is missing or damaged, or has other columns than the ``schema``, if one is given.
    """
    with open_parquet(path, schema) as file:
        if filters is None:
            return file.read(columns=list(columns))
        return file.read().filter(filters).select(list(columns))


def _read_file(path: AnyPath, start: int, stop: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with open_parquet(path, schema) as file:
        first = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            low, high = max(start - first, 0), min(stop - first, count)
            if low < high:
                table = file.read_row_group(group, columns=schema.names).cast(schema)
                yield from table.slice(low, high - low).to_batches()
            first += count
