"""Output of query results as JSON, CSV or Parquet."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.csv

from hexdata.checks import check_suffix
from hexdata.errors import ConfigError, InputError
from hexdata.sql.run import QueryResult
from hexdata.storage import AnyPath, as_path, prefix_of, translate_errors
from hexdata.store.files import FileFacts
from hexdata.store.parquet import write_parquet
from hexdata.text import printable

_FLOATS: Final = (
    (pa.float32(), pa.string(), pa.float64()),
    (pa.list_(pa.float32()), pa.list_(pa.string()), pa.list_(pa.float64())),
)
_GROUP_ROWS: Final = 512
"""Rows converted to Python values at a time. A policy is ten times as large in Python as in Arrow."""


def _groups(batch: pa.RecordBatch) -> Iterator[list[pa.Array]]:
    """Yield the columns of a few rows at a time.

    A float32 becomes the float64 with the fewest digits: 0.1 instead of 0.10000000149011612. Columns are
    converted as a whole, since Arrow converts the items of all lists even for a slice.
    """
    columns = []
    for column in batch.columns:
        for kind, text, wide in _FLOATS:
            column = column.cast(text).cast(wide) if column.type == kind else column
        columns.append(column)
    for start in range(0, batch.num_rows, _GROUP_ROWS):
        yield [column.slice(start, _GROUP_ROWS) for column in columns]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Decimal):
        # DuckDB returns sums of integers as decimals.
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, date | time) else str(value)


def json_rows(result: QueryResult) -> Iterator[str]:
    """Yield a JSON array in parts, with one object per row and one row per line.

    Blobs are hexadecimal text, float32 values have the shortest exact digits, NaN and infinities are null,
    and times are ISO 8601 text.

    Raises:
        ConfigError: Two columns have the same name.
    """
    _check_names(result.schema)
    names, before = result.schema.names, "["
    for batch in result.batches:
        for columns in _groups(batch):
            rows = zip(*(column.to_pylist() for column in columns), strict=True)
            objects = (dict(zip(names, map(_plain, row), strict=True)) for row in rows)
            yield before + ",\n".join(map(_json_line, objects))
            before = ",\n"
    yield "[]\n" if before == "[" else "]\n"


def _json_line(row: dict[str, Any]) -> str:
    """Return a row as JSON. Non-ASCII characters are escaped only if the text is unsafe for a terminal."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return text if printable(text) == text else json.dumps(row, allow_nan=False)


def text_rows(batch: pa.RecordBatch) -> Iterator[list[str]]:
    """Yield each row as display texts: NULL for nulls, hexadecimal for blobs, JSON for lists and structs."""
    for columns in _groups(batch):
        for row in zip(*(column.to_pylist() for column in columns), strict=True):
            yield [_text(value) for value in row]


def _text(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def write_csv(file: BinaryIO, result: QueryResult, *, escaped: bool = False) -> None:
    """Write rows as CSV with a header, in UTF-8. NULL is empty and an empty text is ``""``.

    Lists and structs are JSON text, blobs hexadecimal text.

    Args:
        file: File opened for binary writing.
        result: Rows to write.
        escaped: Whether to escape characters that are unsafe for a terminal, also in column names (default:
            False, texts are exact).
    """
    texts = [not _is_plain(kind) or (escaped and kind == pa.string()) for kind in result.schema.types]
    names = [printable(name) if escaped else name for name in result.schema.names]
    shortened = [pa.float64() if kind == pa.float32() else kind for kind in result.schema.types]
    kinds = [pa.string() if text else kind for text, kind in zip(texts, shortened, strict=True)]
    schema = pa.schema([*map(pa.field, names, kinds)])
    with pyarrow.csv.CSVWriter(file, schema) as writer:
        for batch in result.batches:
            for columns in _groups(batch):
                written = [_as_text(c, escaped) if t else c for c, t in zip(columns, texts, strict=True)]
                writer.write_batch(pa.RecordBatch.from_arrays(written, schema=schema))


def _is_plain(kind: pa.DataType) -> bool:
    """Return whether CSV supports the values of a type; others are written as texts."""
    flat = pa.types.is_primitive(kind) and not pa.types.is_interval(kind)
    return flat or pa.types.is_decimal(kind) or pa.types.is_string(kind)


def _as_text(column: pa.Array, escaped: bool) -> pa.Array:
    texts = [None if value is None else _text(value) for value in column.to_pylist()]
    return pa.array([text and printable(text) for text in texts] if escaped else texts, pa.string())


def save_parquet(path: str | AnyPath, result: QueryResult) -> FileFacts:
    """Write rows to one Parquet file, atomically, and return its size, digest and row count.

    Args:
        path: File or address outside the store; its name must end with ".parquet".
        result: Rows to write.

    Raises:
        InputError: The file is inside the store or a folder, its name has another suffix, or a column has a
            type that Parquet does not support.
        ConfigError: Two columns have the same name.
        BudgetError: The disk is full.
    """
    path = as_path(path)
    if prefix_of(path.resolve()).startswith(prefix_of(result.store.resolve())):
        raise InputError("the output file must not be in the store", path=path, hint="Choose another path.")
    if isinstance(path, Path) and path.is_dir():
        raise InputError("the output path is a folder", path=path, expected="a file")
    check_suffix(path, "a Parquet file", [".parquet"], InputError)
    _check_names(result.schema)
    with translate_errors(path):
        try:
            return write_parquet(path, result.schema, result.batches)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            fault = "Parquet does not support a type or value of a column"
            hint = "Cast the column to VARCHAR."
            raise InputError(fault, path=path, found=str(error), hint=hint) from error


def _check_names(schema: pa.Schema) -> None:
    twice = [name for name, count in Counter(schema.names).items() if count > 1]
    if twice:
        raise ConfigError(f"the result has several columns called {twice[0]!r}: rename one with AS")
