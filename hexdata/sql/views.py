"""The views and macros over a store, as SQL text, and a read-only DuckDB session with them.

The same statements are used for a session of hexdata, with absolute paths, and for ``STORE/hexdata.duckdb``,
whose paths DuckDB resolves when the file is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from string import Template
from typing import ClassVar, Final

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.errors import StoreError
from hexdata.options import describe_options
from hexdata.schema import SPLITS, sql_columns, table_schema, view_columns
from hexdata.storage import AnyPath, prefix_of, translate_errors
from hexdata.store import Store
from hexdata.store.commands import stage_command
from hexdata.store.integrity import BUCKETS_REMOVED, check_tables, require_intact_once
from hexdata.store.session import STATEMENT_ERRORS, DuckDBPyConnection, QueryLimits, duckdb_session, quote

VIEWS: Final = ("positions", "games", "sources", "rejected", "shuffled", "shards")
_SHARDS: Final = """
    SELECT
        split_part(name, '-', 1) AS split,
        name::VARCHAR AS name,
        (row_number() OVER of_split - 1)::INTEGER AS number,
        (sum(positions) OVER of_split - positions)::BIGINT AS first_rank,
        positions::BIGINT AS positions,
        bytes::BIGINT AS bytes,
        sha256::VARCHAR AS sha256
    FROM (VALUES {rows}) AS t (name, positions, bytes, sha256)
    WHERE name IS NOT NULL
    WINDOW of_split AS (PARTITION BY split_part(name, '-', 1) ORDER BY name)
    ORDER BY list_position({splits}, split_part(name, '-', 1)), name
"""
DAMAGED: Final = "files of the store are missing or cut"
"""Error of a view whose files are missing or have another size."""
_SEPARATOR: Final = "|"
"""Separator of file names in a query's text; no name in a manifest contains it."""


@describe_options
@dataclass(frozen=True)
class SqlLimits(QueryLimits):
    """Limits of the queries over a store."""

    BASE: ClassVar[int] = 200 << 20
    THREAD: ClassVar[int] = 60 << 20
    BUFFERS: ClassVar[int] = 100 << 20
    """Enough to group millions of games; larger queries spill to disk."""


@contextmanager
def open_catalog(
    store: str | AnyPath | Store, *, memory: int, threads: int | None = None
) -> Iterator[DuckDBPyConnection]:
    """Open a session with the views ``VIEWS`` and the macros over a store.

    The session can read only the files in the manifest, writes no files, and its settings are locked. Views
    of stages that have not run are empty.

    Args:
        store: Store, its folder or its address.
        memory: Total memory in bytes, as in ``SqlLimits``.
        threads: Number of DuckDB threads; None for one per core, as far as ``memory`` allows (default).

    Yields:
        The DuckDB connection.

    Raises:
        ConfigError: An argument is out of range.
        StoreError: There is no store, or a query fails, for example because a file of the store is damaged.
        BudgetError: The memory is too small, or the disk for spilled rows is full.
    """
    limits = SqlLimits(memory, threads)
    opened = store if isinstance(store, Store) else Store.open(store)
    files = [opened.path.resolve() / name for name in opened.manifest.files]
    with (
        translate_errors(opened.path),
        duckdb_session(**limits.session(opened.reader_memory()), store=opened.path, only=files) as con,
    ):
        create_catalog(con, opened, catalog_statements(opened, quote(prefix_of(opened.path.resolve()))))
        yield con


def create_catalog(con: DuckDBPyConnection, store: Store, statements: Iterable[str]) -> None:
    """Create all views and macros.

    Args:
        con: Session in which to create them.
        store: Store whose manifest lists the files.
        statements: What ``catalog_statements`` returns for this store.

    Raises:
        StoreError: The manifest leads to more than one statement for a view, or a file has other columns.
    """
    for text in statements:
        parsed = con.extract_statements(text)
        if len(parsed) != 1:
            raise StoreError("a file name in the manifest cannot be used in a view", path=store.path)
        try:
            con.execute(parsed[0])
        except STATEMENT_ERRORS:
            # DuckDB has read the end of each file, and some of its errors do not name the file.
            require_intact_once(store, (name for name in store.manifest.files if name.endswith(".parquet")))
            check_tables(store, store.manifest.files)  # names a file that lacks a column of its table
            raise


def catalog_statements(store: Store, root: str) -> tuple[str, ...]:
    """Return the statements that create all views and macros. Views of stages that have not run are empty.

    Args:
        store: Store whose manifest lists the files.
        root: SQL expression for the path of the store's folder with a final slash, or for an empty text.
    """
    views = {name: _view(store, name, root) for name in VIEWS if name != "shards"}
    views["shards"] = _shards(store)
    statements = (f"CREATE VIEW {name} AS {query}" for name, query in views.items())
    return (*statements, *_macros(store.manifest.board_size))


# Views


def _view(store: Store, table: str, root: str) -> str:
    """Return the query for the rows of a table.

    Split, bucket and rank of shuffled positions are taken from the file name and the row number. A single
    table function reads all splits in order, so that DuckDB can stream the rows.
    """
    manifest = store.manifest
    schema = table_schema(table, manifest.board_size or MIN_SIZE, manifest.targets_of(table))
    if table in ("positions", "shuffled"):
        columns = {name: (column.type, column.sql) for name, column in view_columns(schema).items()}
    else:
        columns = {name: (kind, f'"{name}"') for name, kind in sql_columns(schema).items()}
    if table == "shuffled":
        by_split = {split: manifest.files_in(f"shuffled/{split}") for split in SPLITS}
        files = [name for listed in by_split.values() for name in listed]
        # The rank of the first row of each bucket.
        firsts = " ".join(
            f"WHEN {quote(split)} THEN {[0, *accumulate(facts.rows for facts in listed.values())]}::BIGINT[]"
            for split, listed in by_split.items()
            if listed
        )
        rank = f"(CASE split {firsts} END)[bucket + 1] + file_row_number"
        added = {"split": ("VARCHAR", "split"), "bucket": ("INTEGER", "bucket"), "rank": ("BIGINT", rank)}
        columns = {**added, **columns}
    else:
        files = list(manifest.files_in(table))
    types = {name: kind for name, (kind, _) in columns.items()}
    if table == "shuffled" and manifest.removed_buckets:
        command = stage_command("shuffle", manifest.stages["shuffle"], "STORE")
        return _no_rows(types, f"{BUCKETS_REMOVED}. Run `{command}` to make them again.")
    if not files:
        return _no_rows(types)
    if missing := next(store.missing(table), None):
        return _no_rows(types, f"{DAMAGED}: {missing}")
    # Glob characters in the path of the store are escaped by brackets.
    folder = rf"regexp_replace({root}, '([*?[])', '[\1]', 'g')"
    names = f"string_split({quote(_SEPARATOR.join(files))}, {quote(_SEPARATOR)})"
    located = ", filename = true, file_row_number = true" if table == "shuffled" else ""
    rows = f"read_parquet([{folder} || name FOR name IN {names}], hive_partitioning = false{located})"
    if table == "shuffled":
        rows = f"""(
            SELECT
                *,
                regexp_extract(filename, '([a-z]+)[^a-z]bucket-[0-9]+[.]parquet$', 1) AS split,
                regexp_extract(filename, 'bucket-([0-9]+)[.]parquet$', 1)::INTEGER AS bucket
            FROM {rows}
        )"""
    selected = ", ".join(f'{sql} AS "{name}"' for name, (_, sql) in columns.items())
    return f"SELECT {selected} FROM {rows}"


def _no_rows(columns: dict[str, str], message: str | None = None) -> str:
    """Return a query with these columns and without rows; with a message, it fails when it is executed."""
    value = "NULL" if message is None else f"error({quote(message)})"
    selected = ", ".join(f'{value}::{kind} AS "{name}"' for name, kind in columns.items())
    return f"SELECT {selected} WHERE {'false' if message is None else f'{value} IS NULL'}"


def _shards(store: Store) -> str:
    """Return the query for the shards, with their facts as values in its text."""
    rows = [
        f"({quote(name.removeprefix('shards/'))}, {facts.rows:d}, {facts.bytes:d}, {quote(facts.sha256)})"
        for name, facts in store.manifest.files_in("shards").items()
        if name.endswith(".tar")
    ]
    return _SHARDS.format(rows=", ".join(rows or ["(NULL, NULL, NULL, NULL)"]), splits=list(SPLITS))


# Macros


def _macros(size: int | None) -> list[str]:
    """Return the macros of ``macros.sql`` for boards of this size; without one, ``board_size()`` is NULL."""
    cells = (size or MAX_SIZE) ** 2
    # Boards are whole bytes, and DuckDB combines bit strings of equal lengths only.
    spare = "0" * (-2 * cells % 8)
    values = {
        "size": "NULL::INTEGER" if size is None else str(size),
        "bits": str(2 * cells),
        "blue": "1" * cells + "0" * cells + spare,
        "red": "0" * cells + "1" * cells + spare,
    }
    text = (resources.files("hexdata.sql") / "macros.sql").read_text(encoding="utf-8")
    return Template(text).substitute(values).split(";\n")[:-1]
