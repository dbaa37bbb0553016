"""Columns of the tables of a store, read as those of the current schema whatever the store's version.

A Parquet file of positions may lack optional columns, which are null then. A file of schema version 1 has the
column ``extra`` instead of ``metadata``, dense policies, and fewer columns of games and sources. All readers
of tables convert columns here: Arrow readers by ``convert_columns``, DuckDB by ``select_sql``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from hexdata.board import MIN_SIZE
from hexdata.policy import SparsePolicies
from hexdata.schema import (
    EXTRA_PREFIX,
    POLICY_TYPE,
    SCHEMA_VERSION,
    TARGETS,
    board_size_of,
    is_target,
    sql_columns,
    table_schema,
)
from hexdata.store.manifest import Manifest

__all__ = ["ViewColumn", "convert_columns", "select_sql", "stored_fields", "view_columns"]

_RENAMED: Final = {"metadata": "extra"}
"""Names in schema version 1 of the columns that were renamed."""
_DENSE_POLICY: Final = pa.list_(pa.float32())
"""Type of policies in schema version 1: one number per cell."""
_ADDED: Final = frozenset(
    {"end_reason", "swap", "model", "simulations", "temperature", "seed", "commit", "date"}
)
"""Columns of games and sources that schema version 1 does not have."""


def stored_fields(schema: pa.Schema, version: int = SCHEMA_VERSION) -> dict[str, pa.Field | None]:
    """Return the field in which a file stores each column of ``schema``; None if it has none in this version.

    Args:
        schema: Columns of a table in the current version.
        version: Schema version of the store.
    """
    if version == SCHEMA_VERSION:
        return {field.name: field for field in schema}
    stored: dict[str, pa.Field | None] = {}
    for field in schema:
        if field.name in _ADDED or is_target(field.name):
            stored[field.name] = None
        elif field.type.equals(POLICY_TYPE):
            stored[field.name] = field.with_type(_DENSE_POLICY)
        else:
            stored[field.name] = field.with_name(_RENAMED.get(field.name, field.name))
    return stored


def convert_columns(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows read from a file of a store as a table with the columns of ``schema``.

    Args:
        rows: Columns of the file, of any version. Missing columns become null.
        schema: Columns to return, in the current version.

    Raises:
        StoreError: A dense policy is not valid.
    """
    columns = []
    for field in schema:
        name = field.name if field.name in rows.column_names else _RENAMED.get(field.name, field.name)
        if name not in rows.column_names:
            column = pa.nulls(rows.num_rows, field.type)
        elif rows.schema.field(name).type.equals(_DENSE_POLICY) and field.type.equals(POLICY_TYPE):
            column = _sparse(rows.column(name), schema)
        else:
            column = rows.column(name).cast(field.type)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def _sparse(column: pa.ChunkedArray, schema: pa.Schema) -> pa.Array:
    """Return dense policies of schema version 1 as sparse ones.

    Args:
        column: The policies.
        schema: Columns to return. The size of the board, if it is among them, gives the number of cells;
            otherwise the first policy does.
    """
    policies = column.combine_chunks()
    known = policies.drop_null()
    cells = len(known[0]) if len(known) else 0
    board = schema.get_field_index("board")
    if board >= 0:
        cells = board_size_of(schema.field(board).type.byte_width) ** 2
    rows, sparse = SparsePolicies.from_arrow(policies, cells)
    valid = np.zeros(len(policies), bool)
    valid[rows] = True
    return sparse.to_arrow(valid)


def select_sql(
    table: str, manifest: Manifest, read: Callable[[bool], str], *, added: Iterable[str] = ()
) -> str:
    """Return a query for the rows of Parquet files of a store, with the columns of the current schema.

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
    stored = stored_fields(schema, manifest.schema_version)
    columns = [_column_sql(name, kind, stored[name]) for name, kind in types.items()]
    return f"SELECT {', '.join([*columns, *added])} FROM {source}"


def _column_sql(name: str, kind: str, stored: pa.Field | None) -> str:
    if stored is None:
        return f'NULL::{kind} AS "{name}"'
    if stored.type.equals(_DENSE_POLICY):
        return f"""[
            {{'cell': (i - 1)::USMALLINT, 'probability': p}}
            FOR p, i IN "{stored.name}" IF p <> 0 OR signbit(p)
        ] AS "{name}\""""
    return f'"{name}"' if stored.name == name else f'"{stored.name}" AS "{name}"'


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
