"""Syntax trees of SQL texts, as DuckDB's parser serializes them to JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from hexdata.errors import ConfigError
from hexdata.store.session import QUERY_ERRORS, DuckDBPyConnection

__all__ = ["SyntaxNode", "check_length", "parse_sql", "quote_sql", "syntax_nodes"]

SyntaxNode = dict[str, Any]

_LONGEST: Final = 20_000
"""Maximum number of characters of an SQL text: DuckDB's parser has no limit of memory."""
_QUOTED_CHARACTERS: Final = 300
"""Maximum number of characters of an SQL text that a message quotes."""


def check_length(name: str, text: str, longest: int = _LONGEST) -> None:
    """Check the length of an SQL text, before DuckDB parses it.

    Args:
        name: What the text is, for messages.
        text: The text.
        longest: Maximum number of characters (default: 20,000).

    Raises:
        ConfigError: The text is too long.
    """
    if len(text) > longest:
        raise ConfigError(
            f"{name} is too long", found=f"{len(text):,} characters", expected=f"at most {longest:,}"
        )


def parse_sql(con: DuckDBPyConnection, text: str) -> list[SyntaxNode]:
    """Return the syntax tree of each statement in a text, without running it.

    Args:
        con: Open DuckDB session.
        text: SQL text; DuckDB serializes only SELECT statements.

    Raises:
        ValueError: The text is not valid SQL, or it is too deeply nested. The message is the reason.
    """
    try:
        answer = con.sql("SELECT json_serialize_sql($text)", params={"text": text}).fetchall()
        if not answer[0][0]:  # DuckDB's message about the error is not UTF-8
            raise ValueError("the SQL is not valid")
        content = json.loads(answer[0][0])
    except (RecursionError, *QUERY_ERRORS) as error:
        raise ValueError("the SQL is too deeply nested") from error
    if content["error"]:
        raise ValueError(content["error_message"])
    statements: list[SyntaxNode] = content["statements"]
    return statements


def syntax_nodes(tree: Any) -> Iterator[SyntaxNode]:
    """Yield every object in a syntax tree. Not recursive, because trees may be deep."""
    todo = [tree]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield value
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def quote_sql(text: str) -> str:
    """Return an SQL text for a message, shortened to 300 characters."""
    return text if len(text) <= _QUOTED_CHARACTERS else f"{text[:_QUOTED_CHARACTERS]}…"
