"""Checks that a user's query is a single statement that only reads."""

from __future__ import annotations

from typing import Final

from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.sql.views import DAMAGED, VIEWS
from hexdata.store.integrity import BUCKETS_REMOVED
from hexdata.store.session import QUERY_ERRORS, DuckDBPyConnection
from hexdata.store.sql_tree import SyntaxNode, check_length, parse_sql, quote_sql, syntax_nodes

__all__ = ["check_query", "query_error"]

_NODES: Final = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
"""Query nodes that only read. A WITH clause may also insert, update, delete and copy to a file."""
_FUNCTIONS: Final = frozenset(
    {"duckdb_columns", "duckdb_functions", "duckdb_settings", "duckdb_types", "duckdb_views"}
    | {"generate_series", "histogram", "histogram_values", "json_each", "json_tree", "query_table"}
    | {"range", "repeat", "repeat_row", "summary", "unnest"}
)
"""Table functions that a query may use. DuckDB's other ones open files, change the session or run SQL from a
text.
"""
_PERMISSION_ERROR: Final = "Permission Error: "
"""Start of DuckDB's message for access to a file that is not in the manifest."""


def check_query(con: DuckDBPyConnection, text: str) -> frozenset[str]:
    """Check that a text is a single statement that only reads, and only from the store's views.

    Returns the names of the tables and views that it reads, in lower case.

    Args:
        con: Session of the store.
        text: SQL text.

    Raises:
        ConfigError: The text is too long, not valid SQL, or not such a statement.
    """
    check_length("the query", text)
    try:
        statements = con.extract_statements(text)
    except QUERY_ERRORS as error:
        raise query_error(str(error)) from error
    if len(statements) != 1:
        raise ConfigError(
            "the query has more than one statement" if statements else "the query is empty",
            found=quote_sql(text),
            expected="one SELECT statement",
        )
    kind = statements[0].type.name
    if kind != "SELECT":
        raise ConfigError(
            f"{kind.replace('MULTI', 'PIVOT')} is not allowed: queries can only read",
            found=quote_sql(text),
            expected="SELECT, FROM, VALUES, DESCRIBE, SHOW or SUMMARIZE",
            hint="List the values of the pivot: PIVOT … ON … IN (…)." if kind == "MULTI" else None,
        )
    try:
        tree = parse_sql(con, text)
    except ValueError as error:
        raise ConfigError(str(error), found=quote_sql(text), expected="one SELECT statement") from error
    read: set[str] = set()
    for node in syntax_nodes(tree):
        _check_node(node, text)
        if node.get("type") == "BASE_TABLE":
            read.add(str(node.get("table_name", "")).lower())
    return frozenset(read)


def _check_node(node: SyntaxNode, text: str) -> None:
    kind = node.get("type")
    if not isinstance(kind, str):
        return
    if kind.endswith("_NODE") and kind not in _NODES:
        raise ConfigError(
            f"the query contains {kind.removesuffix('_QUERY_NODE').removesuffix('_NODE')}",
            found=quote_sql(text),
            expected="a query that only reads",
        )
    if kind == "TABLE_FUNCTION":
        called = node["function"]
        name = called.get("function_name", "").lower()
        qualified = ".".join(filter(None, (called["catalog"], called["schema"], name or called["type"])))
        if name not in _FUNCTIONS or called["schema"] or called["catalog"]:
            raise ConfigError(
                f"the table function {qualified} is not allowed",
                found=quote_sql(text),
                expected=f"the tables {', '.join(VIEWS)} or the functions {', '.join(sorted(_FUNCTIONS))}",
            )


def query_error(message: str, root: str | None = None) -> HexdataError:
    """Return the exception for DuckDB's message about a wrong query or a damaged file of the store.

    The message repeats the line with the error and marks its position.

    Args:
        message: DuckDB's message.
        root: Path of the store, by which a damaged file is recognized; None if unknown (default).
    """
    if message.startswith(_PERMISSION_ERROR):
        return ConfigError(
            "queries can only read the tables of the store",
            found=message,
            expected=", ".join(VIEWS),
        )
    if BUCKETS_REMOVED in message:
        _, _, hint = message.partition(f"{BUCKETS_REMOVED}. ")
        return StoreError(BUCKETS_REMOVED, hint=hint.partition("\n")[0])
    if DAMAGED in message or (root is not None and root in message):
        hint = "Run `hexdata verify` to find the damaged files."
        return StoreError("a file of the store cannot be read", found=message.strip(), hint=hint)
    first, *others = message.strip().splitlines() or [""]
    marked = [f"  {line}" if line.startswith(("LINE ", " ")) else line for line in others if line]
    return ConfigError("the query failed", found=first, lines=marked)
