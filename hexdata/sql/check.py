"""Checks that a user's query is a single statement that only reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.sql.views import DAMAGED, VIEWS
from hexdata.store.session import QUERY_ERRORS, DuckDBPyConnection

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
_SHOWN: Final = 300
"""Maximum number of characters of a query that a message repeats."""


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
            found=_shown(text),
            expected="one SELECT",
        )
    kind = statements[0].type.name
    if kind != "SELECT":
        raise ConfigError(
            f"{kind.replace('MULTI', 'PIVOT')} is no statement that only reads",
            found=_shown(text),
            expected="SELECT, FROM, VALUES, DESCRIBE, SHOW or SUMMARIZE",
            hint="List the values: PIVOT … ON … IN (…)." if kind == "MULTI" else None,
        )
    for node in _nodes(_tree(con, text)):
        _check_node(node, text)


def _tree(con: DuckDBPyConnection, text: str) -> Any:
    """Return the syntax tree of a query from DuckDB's parser."""
    try:
        answer = con.sql("SELECT json_serialize_sql($q)", params={"q": text}).fetchall()
        content = json.loads(answer[0][0])
    except (RecursionError, *QUERY_ERRORS) as error:
        raise ConfigError(
            "the query is too deeply nested to be read", found=_shown(text), expected="a shorter one"
        ) from error
    if content["error"]:
        raise ConfigError(content["error_message"], found=_shown(text), expected="one SELECT")
    return content


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield every node of a tree that has a type, without recursion."""
    todo = [tree]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            if isinstance(value.get("type"), str):
                yield value
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def _check_node(node: dict[str, Any], text: str) -> None:
    kind = node["type"]
    if kind.endswith("_NODE") and kind not in _NODES:
        raise ConfigError(
            f"the query holds a {kind.removesuffix('_QUERY_NODE').removesuffix('_NODE')}",
            found=_shown(text),
            expected="one that only reads",
        )
    if kind == "TABLE_FUNCTION":
        called = node["function"]
        name = called.get("function_name", "").lower()
        if name not in _FUNCTIONS or called["schema"] or called["catalog"]:
            raise ConfigError(
                f"the query reads from {name or called['type']}(…)",
                found=_shown(text),
                expected=f"the tables {', '.join(VIEWS)}; of functions, {', '.join(sorted(_FUNCTIONS))}",
            )


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


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
