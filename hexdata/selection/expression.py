"""Validation of SQL expressions given by users.

An accepted text is exactly one expression whose value depends only on the columns of its row. The same seed
therefore gives the same bytes on any machine, in any time zone, at any time.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from hexdata.errors import ConfigError
from hexdata.store.session import QUERY_ERRORS, DuckDBPyConnection, quote
from hexdata.store.sql_tree import SyntaxNode, check_length, parse_sql, quote_sql, syntax_nodes

__all__ = ["Expression", "check_condition", "check_expression", "explain_failures"]

_CLASSES: Final = frozenset(
    {"BETWEEN", "CASE", "CAST", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION", "OPERATOR"}
    | {"TYPE"}
)
"""Node classes of DuckDB's parser that an expression may contain."""
_CLASS_NAMES: Final = {
    "COLLATE": "a collation: compare lower(…) instead",
    "DEFAULT": "DEFAULT",
    "LAMBDA": "a lambda: use functions of whole lists such as list_contains instead",
    "PARAMETER": "a parameter",
    "POSITIONAL_REFERENCE": "a reference to a column by number",
    "STAR": "a star",
    "SUBQUERY": "a subquery",
    "WINDOW": "a window function",
}
_STRUCT: Final = "extra"
"""The column whose fields may be given after a dot."""
_CLAUSES: Final = ("where_clause", "group_expressions", "having", "sample", "qualify", "modifiers")
"""Clauses of a query that are not part of a single expression."""
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
"""Types allowed in casts. Dates and times are excluded because they depend on the machine's time zone."""
_ARITHMETIC: Final = frozenset({"+", "-", "add", "equi_width_bins", "isfinite", "isinf", "subtract"})
"""Functions allowed although they accept times too: an expression cannot produce a time as their argument."""
_VERSION_DEPENDENT: Final = frozenset(
    {
        "create_sort_key",
        "hash",
        "json_deserialize_sql",
        "json_serialize_plan",
        "json_serialize_sql",
        "version",
    }
)
"""Functions whose results may change between releases of DuckDB."""
_NOT_REPEATABLE: Final = "its value may differ between runs"


@dataclass(frozen=True)
class Expression:
    """A validated expression.

    Attributes:
        option: Name of the option that it was given for.
        text: The expression as given.
        names: Names of the columns it uses. Of the struct ``extra``, the fields ``extra.NAME`` that it uses;
            or ``extra`` itself, if it uses the whole struct.
        type: DuckDB's name of its type.
    """

    option: str
    text: str
    names: frozenset[str]
    type: str

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns it uses: ``extra`` for every field of that struct."""
        return frozenset(name.partition(".")[0] for name in self.names)

    @property
    def sql(self) -> str:
        """The expression in parentheses, for use in a query."""
        return f"(\n{self.text}\n)"  # the line break ends a comment


def check_expression(
    con: DuckDBPyConnection,
    option: str,
    text: str,
    columns: Mapping[str, str],
    hints: Mapping[str, str] = MappingProxyType({}),
) -> Expression:
    """Parse a text and check that it is one expression that depends only on the given columns.

    Args:
        con: Open DuckDB session; parses and binds the expression, and evaluates it for no row.
        option: Name of the option, for error messages.
        text: The expression.
        columns: DuckDB's types of the columns that may be used, by name. The fields of a struct ``extra`` may
            be used as ``extra.NAME``.
        hints: Hints of the errors for some names that are not columns (default: none).

    Raises:
        ConfigError: The text is too long, not an expression, or contains something that is not allowed.
    """
    check_length(option, text)
    check = _ExpressionCheck(con, option, text, hints)
    node = check.parse()
    names = check.walk(node, check.names_of(columns))
    empty = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in columns.items())
    try:
        found = con.sql(f"SELECT (\n{text}\n) AS found FROM (SELECT {empty} FROM range(0))")
        kind = found.types[0]
        found.fetchall()  # over no rows: some invalid arguments are found only when a query starts
    except QUERY_ERRORS as error:
        raise check.error(first_line(error), "an expression that DuckDB can evaluate") from error
    return Expression(option, text, frozenset(names), str(kind))


def check_condition(name: str, condition: Expression) -> Expression:
    """Return ``condition`` if its type is BOOLEAN.

    Raises:
        ConfigError: It has another type.
    """
    if condition.type != "BOOLEAN":
        raise ConfigError(
            f"{name} is not a condition",
            found=f"{condition.type} from {condition.text}",
            expected="BOOLEAN",
            hint="Write a comparison, such as value_sample_tier <= 1.",
        )
    return condition


@contextmanager
def explain_failures(expression: Expression) -> Iterator[None]:
    """Turn errors of queries that evaluate ``expression`` into errors that name it.

    Raises:
        ConfigError: The expression failed for a row, for example because a cast failed.
    """
    try:
        yield
    except QUERY_ERRORS as error:
        raise ConfigError(
            f"{expression.option} fails for a position: {first_line(error)}",
            found=quote_sql(expression.text),
            hint="Use try_cast, which returns NULL if a cast fails.",
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of DuckDB's message."""
    return str(error).partition("\n")[0]


class _ExpressionCheck:
    """Check of one expression."""

    def __init__(self, con: DuckDBPyConnection, option: str, text: str, hints: Mapping[str, str]) -> None:
        self.con = con
        self.option = option
        self.text = text
        self.hints = hints

    def error(self, reason: str, expected: str, hint: str | None = None) -> ConfigError:
        return ConfigError(
            f"{self.option}: {reason}", found=quote_sql(self.text), expected=expected, hint=hint
        )

    def parse(self) -> SyntaxNode:
        """Return the syntax tree, which must be the same with and without parentheses around the text."""
        bare, enclosed = self._parsed(self.text), self._parsed(f"(\n{self.text}\n)")
        if _without_locations(bare) != _without_locations(enclosed):
            raise self.error("different in parentheses", "one expression", "Remove the comma at its end.")
        return bare

    def _parsed(self, text: str) -> SyntaxNode:
        try:
            statements = parse_sql(self.con, f"SELECT {text}")
        except ValueError as error:
            raise self.error(str(error), "an SQL expression") from error
        if len(statements) != 1:
            raise self.error("more than one statement", "one expression", "Remove the semicolon.")
        return self._only_expression(statements[0]["node"])

    def _only_expression(self, query: SyntaxNode) -> SyntaxNode:
        """Return the only expression of a SELECT that has no other clause."""
        plain = query["type"] == "SELECT_NODE" and query["from_table"]["type"] == "EMPTY"
        if not plain or any(query[clause] for clause in _CLAUSES):
            raise self.error("a whole query", "one expression")
        selected = query["select_list"]
        if len(selected) != 1:
            raise self.error(f"{len(selected)} expressions", "one expression", "Join conditions with AND.")
        if selected[0]["alias"]:
            raise self.error("an expression with an alias", "an expression without AS")
        node: SyntaxNode = selected[0]
        return node

    def names_of(self, columns: Mapping[str, str]) -> dict[str, str]:
        """Return the names of columns, and of the fields of ``extra``, by their spelling in lower case."""
        names = {name.lower(): name for name in columns}
        if _STRUCT in columns:
            try:
                (struct,) = self.con.sql(f"SELECT NULL::{columns[_STRUCT]}").types
            except QUERY_ERRORS as error:  # names that differ only in case
                raise self.error(first_line(error), f"a column {_STRUCT} that DuckDB can read") from error
            fields = [f"{_STRUCT}.{field}" for field, _ in struct.children]
            names |= {name.lower(): name for name in fields}
        return names

    def walk(self, tree: SyntaxNode, columns: Mapping[str, str]) -> set[str]:
        """Check every node of a syntax tree and return the names that it uses.

        Args:
            tree: The tree.
            columns: Names that may be used, by their spelling in lower case.
        """
        nodes = [node for node in syntax_nodes(tree) if "class" in node]
        for node in nodes:
            self._check_class(node)
        self._check_functions({n["function_name"].lower() for n in nodes if n["class"] == "FUNCTION"})
        return {self._column(n["column_names"], columns) for n in nodes if n["class"] == "COLUMN_REF"}

    def _check_class(self, node: SyntaxNode) -> None:
        kind = node["class"]
        if kind not in _CLASSES or node["type"] == "GROUPING_FUNCTION":
            raise self.error(
                f"contains {_CLASS_NAMES.get(kind, node['type'])}",
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
            raise self._not_scalar_error(node["function_name"])

    def _not_scalar_error(self, name: str) -> ConfigError:
        return self.error(f"{name} is not a function of a single row", "functions of a single row")

    def _column(self, path: list[str], columns: Mapping[str, str]) -> str:
        is_field = len(path) == 2 and path[0].lower() == _STRUCT
        if len(path) > 1 and not is_field:
            raise self.error(
                f"{'.'.join(path)}: a column name must not be qualified", "the name of the column alone"
            )
        found = ".".join(path)
        name = found.lower()
        is_quoted = not is_field and "." in name  # "extra.NAME" in quotes is one name, not a field
        if name in columns and not is_quoted:
            return columns[name]
        hint = self.hints.get(name) or self._similar_column(name, columns, is_quoted=is_quoted)
        raise self.error(f"no column {found!r}", f"one of {', '.join(_listed(columns))}", hint)

    def _similar_column(self, name: str, columns: Mapping[str, str], *, is_quoted: bool) -> str:
        """Return a hint for a name that is not a column."""
        within = sorted(column for column in columns if name in column)
        similar = within or difflib.get_close_matches(name, columns, n=1, cutoff=0.5)
        if not similar:
            return "Put text in single quotes."
        return f"Did you mean {columns[similar[0]]}{', without quotes' if is_quoted else ''}?"

    def _check_functions(self, names: set[str]) -> None:
        """Check functions by DuckDB's catalog; a macro is checked by its definition."""
        if not names:
            return  # reading the catalog takes longer than the rest of the check
        listed = ", ".join(map(quote, sorted(names)))
        facts = self.con.sql(f"""
            SELECT lower(function_name), function_type, stability, macro_definition, parameters,
                   regexp_matches(concat(return_type, parameter_types::VARCHAR), 'DATE|TIME')
            FROM duckdb_functions() WHERE lower(function_name) IN ({listed}) ORDER BY ALL
        """).fetchall()
        for name in sorted(names - {fact[0] for fact in facts}):
            raise self.error(f"no function {name}", "a function of DuckDB")
        scalar = {name for name, kind, *_ in facts if kind == "scalar"}
        for name, kind, stability, definition, parameters, of_times in facts:
            if kind == "table" and name in scalar:  # repeat, for example: an expression calls the scalar one
                continue
            if of_times and name in _ARITHMETIC:  # these forms take a time, which no expression can produce
                continue
            if kind == "macro":
                self.walk(self._parsed(definition), {p.lower(): p for p in parameters})
            elif kind != "scalar":
                raise self._not_scalar_error(name)
            elif stability != "CONSISTENT" or name in _VERSION_DEPENDENT:
                raise self.error(f"{name}: {_NOT_REPEATABLE}", "functions of the row only")
            elif of_times:
                raise self.error(
                    f"{name}: dates and times are not allowed", "functions of numbers, texts and lists"
                )


def _listed(columns: Mapping[str, str]) -> list[str]:
    """Return the sorted names of columns; of the struct ``extra`` only its fields."""
    has_fields = any(name.startswith(f"{_STRUCT}.") for name in columns)
    return sorted(name for name in columns.values() if not (has_fields and name == _STRUCT))


def _without_locations(tree: SyntaxNode) -> str:
    """Return a syntax tree as JSON without the nodes' locations in the text."""
    for node in syntax_nodes(tree):
        node.pop("query_location", None)
        node.pop("query_location_length", None)
    return json.dumps(tree)
