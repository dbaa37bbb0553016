"""SQL expressions that a user gives: read, checked and bound before they meet a store. Runs none of them.

What passes is one expression whose value follows from its row alone, so that the same seed still names
the same bytes: on any machine, in any time zone, on any day.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from hexdata.errors import ConfigError
from hexdata.store.session import QUERY_ERRORS, DuckDBPyConnection, quote

__all__ = ["Expression", "check_condition", "check_expression", "explained"]

Node = dict[str, Any]

_CLASSES: Final = frozenset(
    {"BETWEEN", "CASE", "CAST", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION", "OPERATOR"}
    | {"TYPE"}
)
"""What an expression may be made of, as DuckDB's parser names it."""
_CLASS_NAMES: Final = {
    "COLLATE": "a collation: compare lower(…) instead",
    "DEFAULT": "DEFAULT",
    "LAMBDA": "a lambda: functions of whole lists, such as list_contains, do",
    "PARAMETER": "a parameter",
    "POSITIONAL_REFERENCE": "a column by its number",
    "STAR": "a star",
    "SUBQUERY": "a subquery",
    "WINDOW": "a window function",
}
_CLAUSES: Final = ("where_clause", "group_expressions", "having", "sample", "qualify", "modifiers")
"""What a whole query may have beyond what it selects."""
_TYPES: Final = frozenset(
    {"bigint", "blob", "bool", "boolean", "bytea", "char", "decimal", "double", "float", "float4", "float8"}
    | {
        "hugeint",
        "int",
        "int1",
        "int2",
        "int4",
        "int8",
        "integer",
        "list",
        "long",
        "numeric",
        "real",
        "short",
    }
    | {"signed", "smallint", "string", "text", "tinyint", "ubigint", "uhugeint", "uinteger", "usmallint"}
    | {"utinyint", "varchar"}
)
"""What a value may be cast to: no time, since those follow the time zone of the machine."""
_ARITHMETIC: Final = frozenset({"+", "-", "add", "equi_width_bins", "isfinite", "isinf", "subtract"})
"""Functions of numbers that take times too, which no expression can come to hold."""
_OF_THE_RELEASE: Final = frozenset(
    {
        "create_sort_key",
        "hash",
        "json_deserialize_sql",
        "json_serialize_plan",
        "json_serialize_sql",
        "version",
    }
)
"""Functions whose values another release of DuckDB need not share."""
_ANOTHER_RUN: Final = "its value may be another in another run"
_SHOWN: Final = 300
"""Letters of an expression that a message repeats."""


@dataclass(frozen=True)
class Expression:
    """An expression that passed.

    Attributes:
        option: the choice that it is given for.
        text: as it was given.
        columns: the names it uses.
        type: DuckDB's name for what it gives.
    """

    option: str
    text: str
    columns: frozenset[str]
    type: str

    @property
    def sql(self) -> str:
        """The expression in parentheses, to stand in a query."""
        return f"(\n{self.text}\n)"  # the line break ends a comment


def check_expression(con: DuckDBPyConnection, option: str, text: str, columns: dict[str, str]) -> Expression:
    """Read an expression and check that it is one, and a function of the columns alone.

    Args:
        con: a session; its parser, its list of functions and its binder are asked.
        option: the choice it is given for, as errors name it.
        text: of the expression.
        columns: DuckDB's types by name, of the columns it may use.

    Raises:
        ConfigError: it is no expression, or holds more than may be; the message gives the text, what was
            found in it and what to write instead.
    """
    check = _Check(con, option, text)
    node = check.parse()
    names = check.walk(node, columns)
    empty = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in columns.items())
    try:
        kind = con.sql(f"SELECT (\n{text}\n) AS found FROM (SELECT {empty} WHERE false)").types[0]
    except QUERY_ERRORS as error:
        raise check.error(first_line(error), "an expression that DuckDB can evaluate") from error
    return Expression(option, text, frozenset(names), str(kind))


def check_condition(name: str, condition: Expression) -> Expression:
    """Return an expression that is true or false of a row.

    Raises:
        ConfigError: it is of another type.
    """
    if condition.type != "BOOLEAN":
        raise ConfigError(
            f"{name} is no condition",
            found=f"{condition.type} from {condition.text}",
            expected="BOOLEAN",
            hint="Compare it with something, as in value_sample_tier <= 1.",
        )
    return condition


@contextmanager
def explained(expression: Expression) -> Iterator[None]:
    """Run queries that evaluate an expression; where it fails on some row, say that it was this one.

    Raises:
        ConfigError: a value could not be cast, or was out of range.
    """
    try:
        yield
    except QUERY_ERRORS as error:
        raise ConfigError(
            f"{expression.option} fails on some position: {first_line(error)}",
            found=_shown(expression.text),
            hint="Use try_cast, which gives NULL where a cast fails.",
        ) from error


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def first_line(error: Exception) -> str:
    """Return the first line of DuckDB's message."""
    return str(error).partition("\n")[0]


class _Check:
    """One expression while it is read."""

    def __init__(self, con: DuckDBPyConnection, option: str, text: str) -> None:
        self.con = con
        self.option = option
        self.text = text

    def error(self, reason: str, expected: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self.option}: {reason}", found=_shown(self.text), expected=expected, hint=hint)

    def parse(self) -> Node:
        """Return the tree of the one expression that the text is, alone as well as in parentheses."""
        alone, enclosed = self._parsed(self.text), self._parsed(f"(\n{self.text}\n)")
        if _without_places(alone) != _without_places(enclosed):
            raise self.error("another one in parentheses", "one expression", "Leave a comma at its end out.")
        return alone

    def _parsed(self, text: str) -> Node:
        try:
            answer = self.con.sql("SELECT json_serialize_sql($q)", params={"q": f"SELECT {text}"}).fetchall()
            content = json.loads(answer[0][0])
        except (RecursionError, *QUERY_ERRORS) as error:
            raise self.error("too deeply nested to be read", "a shorter expression") from error
        if content["error"]:
            raise self.error(content["error_message"], "an SQL expression")
        if len(content["statements"]) != 1:
            raise self.error("more than one statement", "one expression", "Leave the semicolon out.")
        return self._only_expression(content["statements"][0]["node"])

    def _only_expression(self, query: Node) -> Node:
        """Return what a SELECT selects, if that is all there is to it."""
        plain = query["type"] == "SELECT_NODE" and query["from_table"]["type"] == "EMPTY"
        if not plain or any(query[clause] for clause in _CLAUSES):
            raise self.error("a whole query", "one expression")
        selected = query["select_list"]
        if len(selected) != 1:
            raise self.error(f"{len(selected)} expressions", "one expression", "Join conditions with AND.")
        if selected[0]["alias"]:
            raise self.error("an expression with a name", "one without")
        node: Node = selected[0]
        return node

    def walk(self, tree: Node, columns: Collection[str]) -> set[str]:
        """Check every part of a tree; return the columns that it uses."""
        nodes = list(_nodes(tree))
        for node in nodes:
            self._check_class(node)
        self._check_functions({n["function_name"].lower() for n in nodes if n["class"] == "FUNCTION"})
        return {self._column(n["column_names"], columns) for n in nodes if n["class"] == "COLUMN_REF"}

    def _check_class(self, node: Node) -> None:
        kind = node["class"]
        if kind not in _CLASSES or node["type"] == "GROUPING_FUNCTION":
            raise self.error(
                f"it holds {_CLASS_NAMES.get(kind, node['type'])}",
                "columns, constants, operators and functions",
            )
        if kind == "TYPE" and node["type_name"].lower() not in _TYPES:
            raise self.error(
                f"a cast to {node['type_name']}", "a cast to a number, to text, to a blob or to a boolean"
            )
        if kind == "FUNCTION" and (node["schema"] or node["catalog"]):
            raise self.error(
                f"{node['schema']}.{node['function_name']}",
                "a function and its arguments in parentheses: f(x)",
            )
        if kind == "FUNCTION" and (node["filter"] or node["distinct"] or node["order_bys"]["orders"]):
            raise self._no_aggregate(node["function_name"])

    def _no_aggregate(self, name: str) -> ConfigError:
        return self.error(f"{name} is no function of one row", "functions of one row")

    def _column(self, path: list[str], columns: Collection[str]) -> str:
        name = path[-1].lower()
        if len(path) > 1:
            raise self.error(
                f"{'.'.join(path)}: a column stands without the name of its table", "the column's own name"
            )
        if name not in columns:
            within = sorted(column for column in columns if name in column)
            near = within or difflib.get_close_matches(name, columns, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]}?" if near else "Texts stand in single quotes."
            raise self.error(f"no column {path[-1]!r}", f"one of {', '.join(sorted(columns))}", hint)
        return name

    def _check_functions(self, names: set[str]) -> None:
        """Check functions by what DuckDB says of them; a macro, by what it stands for."""
        listed = ", ".join(map(quote, sorted(names))) or "NULL"
        facts = self.con.sql(f"""
            SELECT lower(function_name), function_type, stability, macro_definition, parameters,
                   regexp_matches(concat(return_type, parameter_types::VARCHAR), 'DATE|TIME')
            FROM duckdb_functions() WHERE lower(function_name) IN ({listed}) ORDER BY ALL
        """).fetchall()
        for name in sorted(names - {fact[0] for fact in facts}):
            raise self.error(f"no function {name}", "a function of DuckDB")
        scalar = {name for name, kind, *_ in facts if kind == "scalar"}
        for name, kind, stability, definition, parameters, of_times in facts:
            if kind == "table" and name in scalar:  # such as repeat: as an expression it is the scalar one
                continue
            if kind == "macro":
                self.walk(self._parsed(definition), [p.lower() for p in parameters])
            elif kind != "scalar":
                raise self._no_aggregate(name)
            elif stability != "CONSISTENT" or name in _OF_THE_RELEASE:
                raise self.error(f"{name}: {_ANOTHER_RUN}", "functions of the row alone")
            elif of_times and name not in _ARITHMETIC:
                raise self.error(f"{name}: a store holds no times", "functions of numbers, texts and lists")


def _nodes(tree: Any) -> Iterator[Node]:
    """Yield every node of a tree that has a class, without recursion."""
    todo = [tree]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            if "class" in value:
                yield value
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def _without_places(tree: Any) -> str:
    """Return a tree as text, without the places in the text that its nodes were read from."""
    todo = [tree]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            value.pop("query_location", None)
            value.pop("query_location_length", None)
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return json.dumps(tree)
