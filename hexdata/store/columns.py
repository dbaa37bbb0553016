"""Columns of the tables of a store, with null for the optional columns that a file of positions lacks.

All readers of tables add these columns here: Arrow readers by ``convert_columns``, DuckDB by ``select_sql``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import pyarrow as pa

from hexdata.board import MIN_SIZE
from hexdata.schema import (
    EXTRA_PREFIX,
    TARGETS,
    is_target,
    sql_columns,
    table_schema,
)
from hexdata.store.manifest import Manifest

__all__ = ["ViewColumn", "convert_columns", "select_sql", "view_columns"]


def convert_columns(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows read from a file of a store as a table with the columns of ``schema``.

    Args:
        rows: Columns of the file. Missing columns become null.
        schema: Columns to return.
    """
    columns = [
        rows.column(field.name).cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def select_sql(
    table: str, manifest: Manifest, read: Callable[[bool], str], *, added: Iterable[str] = ()
) -> str:
    """Return a query for the rows of Parquet files of a store, with all columns of their table.

    The columns are those of ``schema.table_schema`` with the targets of the manifest, then ``added``. They
    keep their order if the session preserves the order of rows.

    Args:
        table: Folder of the files: "positions", "shuffled", "games", "sources" or "rejected".
        manifest: Manifest of the store.
        read: Returns the SQL table function that reads the files. Its argument is whether files with
            different columns must be united by name.
        added: Names of other columns that the table function gives (default: none).
    """
    schema = table_schema(table, manifest.board_size or MIN_SIZE, manifest.targets_of(table))
    types = sql_columns(schema)
    optional = {name: kind for name, kind in types.items() if is_target(name) and table == "positions"}
    source = read(bool(optional))
    if optional:  # none of these files may have the column
        nulls = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in optional.items())
        source = f"(SELECT * FROM (SELECT {nulls} WHERE false) UNION ALL BY NAME SELECT * FROM {source})"
    columns = [f'"{name}"' for name in types]
    return f"SELECT {', '.join([*columns, *added])} FROM {source}"


class ViewColumn(NamedTuple):
    """A column of a view."""

    type: str
    """DuckDB's type."""
    sql: str
    """Expression over the columns of ``schema.positions_schema``."""


def view_columns(positions: pa.Schema) -> dict[str, ViewColumn]:
    """Return the columns of positions that queries and expressions use, by name.

    ``root_value``, ``visits`` and ``weight`` always exist and are NULL in a store without them. The columns
    ``extra.NAME`` are the fields of one struct ``extra``, which a store without them does not have.

    Args:
        positions: ``schema.positions_schema`` of the store.
    """
    types = sql_columns(positions)
    columns = {name: ViewColumn(kind, f'"{name}"') for name, kind in types.items() if not is_target(name)}
    for name, kind in sql_columns(pa.schema(TARGETS.items())).items():
        columns[name] = ViewColumn(kind, f'"{name}"' if name in types else f"NULL::{kind}")
    extras = {name.removeprefix(EXTRA_PREFIX): kind for name, kind in types.items() if "." in name}
    if extras:
        kinds = ", ".join(f'"{name}" {kind}' for name, kind in extras.items())
        values = ", ".join(f'"{name}" := "{EXTRA_PREFIX}{name}"' for name in extras)
        columns["extra"] = ViewColumn(f"STRUCT({kinds})", f"struct_pack({values})")
    return columns
