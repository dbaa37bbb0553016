"""Checks that a user's query is a single statement that only reads."""

from __future__ import annotations

from typing import Final

from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.sql.views import DAMAGED, VIEWS
from hexdata.store.session import QUERY_ERRORS, DuckDBPyConnection
from hexdata.store.sql_tree import SyntaxNode, parse_sql, quote_sql, syntax_nodes

__all__ = ["check_query", "refused"]

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
_CLOSED_OFF: Final = "Permission Error: "
"""Start of DuckDB's message for access to a file that is not in the manifest."""


def check_query(con: DuckDBPyConnection, text: str) -> None:
    """Check that a text is a single statement that only reads, and only from the store's views.

    Args:
        con: Session of the store.
        text: SQL text.

    Raises:
        ConfigError: The text is invalid or not such a statement; the message says what it is.
    """
    try:
        statements = con.extract_statements(text)
    except QUERY_ERRORS as error:
        raise refused(str(error)) from error
    if len(statements) != 1:
        raise ConfigError(
            "the text holds more than one statement" if statements else "the text holds no statement",
            found=quote_sql(text),
            expected="one SELECT",
        )
    kind = statements[0].type.name
    if kind != "SELECT":
        raise ConfigError(
            f"{kind.replace('MULTI', 'PIVOT')} is no statement that only reads",
            found=quote_sql(text),
            expected="SELECT, FROM, VALUES, DESCRIBE, SHOW or SUMMARIZE",
            hint="List the values: PIVOT … ON … IN (…)." if kind == "MULTI" else None,
        )
    try:
        tree = parse_sql(con, text)
    except ValueError as error:
        raise ConfigError(str(error), found=quote_sql(text), expected="one SELECT") from error
    for node in syntax_nodes(tree):
        _check_node(node, text)


def _check_node(node: SyntaxNode, text: str) -> None:
    kind = node.get("type")
    if not isinstance(kind, str):
        return
    if kind.endswith("_NODE") and kind not in _NODES:
        raise ConfigError(
            f"the query holds a {kind.removesuffix('_QUERY_NODE').removesuffix('_NODE')}",
            found=quote_sql(text),
            expected="one that only reads",
        )
    if kind == "TABLE_FUNCTION":
        called = node["function"]
        name = called.get("function_name", "").lower()
        if name not in _FUNCTIONS or called["schema"] or called["catalog"]:
            raise ConfigError(
                f"the query reads from {name or called['type']}(…)",
                found=quote_sql(text),
                expected=f"the tables {', '.join(VIEWS)}; of functions, {', '.join(sorted(_FUNCTIONS))}",
            )


def refused(message: str, root: str | None = None) -> HexdataError:
    """Return the exception for DuckDB's message about a wrong query or a damaged file of the store.

    The message repeats the line with the error and marks its position.

    Args:
        message: DuckDB's message.
        root: Path of the store, by which a damaged file is recognized; None if unknown (default).
    """
    if message.startswith(_CLOSED_OFF):
        return ConfigError(
            "a query reads nothing but the store", found=message, expected=f"the tables {', '.join(VIEWS)}"
        )
    if DAMAGED in message or (root is not None and root in message):
        hint = "Run `hexdata verify` to see what is wrong."
        return StoreError("a file of the store cannot be read", found=message.strip(), hint=hint)
    return ConfigError("the query cannot be run", found=message.strip())
