"""The views and macros over a store, as SQL text.

The same statements are used for a session of hexdata, with absolute paths, and for ``STORE/hexdata.duckdb``,
whose paths DuckDB resolves when the file is opened.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from hexdata.board import MAX_SIZE, MIN_SIZE
from hexdata.errors import StoreError
from hexdata.schema import (
    SPLITS,
    positions_schema,
    sql_columns,
    table_schema,
)
from hexdata.storage import prefix_of
from hexdata.store import Store
from hexdata.store.columns import ViewColumn, select_sql, view_columns
from hexdata.store.commands import stage_command
from hexdata.store.integrity import BUCKETS_REMOVED
from hexdata.store.session import DuckDBPyConnection, quote

__all__ = ["DAMAGED", "MACROS", "VIEWS", "catalog_statements", "create_catalog", "select_files"]

VIEWS: Final = ("positions", "games", "sources", "rejected", "shuffled", "shards")
MACROS: Final = (
    "board_size",
    "cell",
    "policy_probability",
    "stones",
    "blue_stones",
    "red_stones",
    "planes",
    "trmph",
)

_SHARD_COLUMNS: Final = {
    "split": "VARCHAR",
    "name": "VARCHAR",
    "number": "INTEGER",
    "first_rank": "BIGINT",
    "positions": "BIGINT",
    "bytes": "BIGINT",
    "sha256": "VARCHAR",
}
DAMAGED: Final = "files of the store are missing or cut"
"""Error of a view whose files are missing or have another size."""
_SEPARATOR: Final = "|"
"""Separator of file names in a query's text; no name in a manifest contains it."""


def create_catalog(con: DuckDBPyConnection, store: Store, statements: Iterable[str]) -> None:
    """Create all views and macros.

    Args:
        con: Session in which to create them.
        store: Store whose manifest lists the files.
        statements: What ``catalog_statements`` returns for this store.

    Raises:
        StoreError: The manifest leads to more than one statement for a view.
    """
    for text in statements:
        parsed = con.extract_statements(text)
        if len(parsed) != 1:
            raise StoreError("a file name in the manifest cannot be used in a view", path=store.path)
        con.execute(parsed[0])


def catalog_statements(store: Store, root: str) -> tuple[str, ...]:
    """Return the statements that create all views and macros. Views of stages that have not run are empty.

    Args:
        store: Store whose manifest lists the files.
        root: SQL expression for the path of the store's folder with a final slash, or for an empty text.
    """
    size = store.manifest.board_size
    positions, shuffled = (
        view_columns(positions_schema(size or MIN_SIZE, store.manifest.targets_of(table)))
        for table in ("positions", "shuffled")
    )
    views = {"positions": _positions(store, positions, root)}
    for name in ("games", "sources", "rejected"):
        views[name] = _table(store, name, root)
    views["shuffled"] = _shuffled(store, shuffled, root)
    views["shards"] = _shards(store)
    return (*(f"CREATE VIEW {name} AS {query}" for name, query in views.items()), *_macros(size))


def select_files(store: Store, table: str, files: list[str]) -> str:
    """Return the query for the rows in some files of a table, with the columns of its view.

    Args:
        store: The store.
        table: "positions", "games", "sources" or "rejected".
        files: Names of the files, relative to the store, at least one.
    """
    root = quote(prefix_of(store.path.resolve()))
    rows = select_sql(table, store.manifest, lambda by_name: _read(files, root, by_name=by_name))
    if table != "positions":
        return rows
    schema = positions_schema(store.manifest.board_size or MIN_SIZE, store.manifest.targets)
    return f"SELECT {_selected(view_columns(schema))} FROM ({rows})"


# Views


def _table(store: Store, name: str, root: str) -> str:
    columns = sql_columns(table_schema(name, store.manifest.board_size))
    files = list(store.manifest.files_in(name))
    if not files:
        return _empty(columns)
    if missing := next(store.missing(name), None):
        return _damaged(missing, columns)
    return select_sql(name, store.manifest, lambda by_name: _read(files, root, by_name=by_name))


def _positions(store: Store, columns: dict[str, ViewColumn], root: str) -> str:
    files = list(store.manifest.files_in("positions"))
    if not files:
        return _empty(_types(columns))
    if missing := next(store.missing("positions"), None):
        return _damaged(missing, _types(columns))
    rows = select_sql("positions", store.manifest, lambda by_name: _read(files, root, by_name=by_name))
    return f"SELECT {_selected(columns)} FROM ({rows})"


def _shuffled(store: Store, columns: dict[str, ViewColumn], root: str) -> str:
    """Return the query for the shuffled positions. Split and bucket are taken from the file name.

    A single table function reads all splits in order, so that DuckDB can stream the rows.
    """
    types = _types(columns)
    added = {"split": "VARCHAR", "bucket": "INTEGER", "rank": "BIGINT"}
    by_split = {split: store.manifest.files_in(f"shuffled/{split}") for split in SPLITS}
    files = [name for listed in by_split.values() for name in listed]
    if store.manifest.removed_buckets:
        command = stage_command("shuffle", store.manifest.stages["shuffle"], "STORE")
        return _failing(f"{BUCKETS_REMOVED}. Run `{command}` to make them again.", added | types)
    if not files:
        return _empty(added | types)
    if missing := next(store.missing("shuffled"), None):
        return _damaged(missing, added | types)
    starts = " ".join(
        f"WHEN {quote(split)} THEN {[0, *accumulate(facts.rows for facts in listed.values())]}::BIGINT[]"
        for split, listed in by_split.items()
        if listed
    )
    rows = select_sql(
        "shuffled",
        store.manifest,
        lambda by_name: _read(files, root, ", filename = true, file_row_number = true", by_name=by_name),
        added=("filename", "file_row_number"),
    )
    return f"""
        SELECT
            split, bucket, (CASE split {starts} END)[bucket + 1] + file_row_number AS rank,
            {_selected(columns)}
        FROM (
            SELECT
                *,
                regexp_extract(filename, '([a-z]+)[^a-z]bucket-[0-9]+[.]parquet$', 1) AS split,
                regexp_extract(filename, 'bucket-([0-9]+)[.]parquet$', 1)::INTEGER AS bucket
            FROM ({rows})
        )"""


def _shards(store: Store) -> str:
    """Return the query for the shards, with their facts as values in its text."""
    files = {name.removeprefix("shards/"): f for name, f in store.manifest.files_in("shards").items()}
    rows = []
    for split in SPLITS:
        shards = {name: facts for name, facts in files.items() if name.startswith(f"{split}-")}
        first = 0
        for number, (name, facts) in enumerate(shards.items()):
            texts = (quote(split), quote(name), str(number), str(first))
            rows.append(f"({', '.join(texts)}, {facts.rows:d}, {facts.bytes:d}, {quote(facts.sha256)})")
            first += facts.rows
    if not rows:
        return _empty(_SHARD_COLUMNS)
    casts = ", ".join(f'"{name}"::{kind} AS "{name}"' for name, kind in _SHARD_COLUMNS.items())
    return f"SELECT {casts} FROM (VALUES {', '.join(rows)}) AS t ({_listed(_SHARD_COLUMNS)})"


def _read(files: list[str], root: str, more: str = "", *, by_name: bool = False) -> str:
    """Return the table function that reads files of the store, given by their names relative to it.

    Glob characters in the path of the store are escaped by brackets.
    """
    folder = rf"regexp_replace({root}, '([*?[])', '[\1]', 'g')"
    more += ", union_by_name = true" if by_name else ""
    names = f"string_split({quote(_SEPARATOR.join(files))}, {quote(_SEPARATOR)})"
    return f"read_parquet([{folder} || name FOR name IN {names}], hive_partitioning = false{more})"


def _empty(columns: dict[str, str]) -> str:
    nulls = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in columns.items())
    return f"SELECT {nulls} WHERE false"


def _damaged(missing: str, columns: dict[str, str]) -> str:
    """Return a failing query whose error names the file that is missing or has another size."""
    return _failing(f"{DAMAGED}: {missing}", columns)


def _failing(message: str, columns: dict[str, str]) -> str:
    """Return a query with these columns that always fails when it is executed, but not before."""
    fails = f"error({quote(message)})"
    columns_sql = ", ".join(f'{fails}::{kind} AS "{column}"' for column, kind in columns.items())
    return f"SELECT {columns_sql} WHERE {fails} IS NULL"


def _types(columns: dict[str, ViewColumn]) -> dict[str, str]:
    return {name: column.type for name, column in columns.items()}


def _selected(columns: dict[str, ViewColumn]) -> str:
    return ", ".join(f'{column.sql} AS "{name}"' for name, column in columns.items())


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)


# Macros


def _macros(size: int | None) -> list[str]:
    """Return the macros for boards of this size; without a size, ``board_size()`` is NULL.

    DuckDB substitutes a macro's arguments as text. The names of inner columns must therefore differ from any
    column name that an argument may contain.
    """
    n = "NULL::INTEGER" if size is None else f"{size:d}"
    cells = (size or MAX_SIZE) ** 2
    spare = -2 * cells % 8
    blue = f"'{'1' * cells}{'0' * (cells + spare)}'::BIT"
    red = f"'{'0' * cells}{'1' * cells}{'0' * spare}'::BIT"
    return [
        f"CREATE MACRO board_size() AS {n}",
        """CREATE MACRO cell(move) AS
            CASE
                WHEN move >= 0 AND move < board_size() * board_size()
                THEN CASE WHEN move % board_size() >= 26 THEN 'a' ELSE '' END
                    || chr((97 + move % board_size() % 26)::INTEGER) || (move // board_size() + 1)::INTEGER
            END""",
        """CREATE MACRO policy_probability(policy, cell) AS
            CASE
                WHEN policy IS NOT NULL
                THEN coalesce(
                    ["its item".probability FOR "its item" IN policy IF "its item".cell = cell][1],
                    0::FLOAT
                )
            END""",
        "CREATE MACRO stones(board) AS bit_count(board::BIT)::INTEGER",
        f"CREATE MACRO blue_stones(board) AS bit_count(board::BIT & {blue})::INTEGER",
        f"CREATE MACRO red_stones(board) AS bit_count(board::BIT & {red})::INTEGER",
        f"""CREATE MACRO planes(board) AS
            string_split(left(board::BIT::VARCHAR, {2 * cells}), '')::UTINYINT[{2 * cells}]""",
        """CREATE MACRO trmph(game) AS (
            SELECT
                '#' || board_size() || ',' || array_to_string([cell(m) FOR m IN "its moves"], '')
                || CASE "its winner" WHEN 'BLUE' THEN ' b' WHEN 'RED' THEN ' r' ELSE '' END
            FROM (SELECT game_id AS "its id", moves AS "its moves", winner AS "its winner" FROM games)
            WHERE "its id" = game
        )""",
    ]
