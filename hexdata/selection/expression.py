"""Validation of SQL expressions given by users.

An accepted text is exactly one expression whose value depends only on the columns of its row. The same seed
therefore gives the same bytes on any machine, in any time zone, at any time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from hexdata.errors import ConfigError
from hexdata.store.session import (
    QUERY_ERRORS,
    DuckDBPyConnection,
    SyntaxNode,
    check_length,
    parse_sql,
    quote,
    quote_sql,
    syntax_nodes,
)

_CLASSES: Final = frozenset(
    {"BETWEEN", "CASE", "CAST", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION", "OPERATOR"}
    | {"TYPE"}
)
"""Node classes of DuckDB's parser that an expression may contain."""
_STRUCT: Final = "extra"
"""The column whose fields may be given after a dot."""
_CLAUSES: Final = ("where_clause", "group_expressions", "having", "sample", "qualify", "modifiers")
"""Clauses of a query that are not part of a single expression."""
_TYPES: Final = re.compile(
    r"u?(tiny|small|big|huge)int|u?integer|int[1248]?|signed|short|long|float[48]?|double|real|decimal|numeric"
    r"|bool(ean)?|char|varchar|text|string|blob|bytea|list"
)
"""Types allowed in casts. Dates and times are excluded because they depend on the machine's time zone."""
_ARITHMETIC: Final = frozenset({"+", "-", "add", "equi_width_bins", "isfinite", "isinf", "subtract"})
"""Functions allowed although they accept times too: an expression cannot produce a time as their argument."""
_VERSION_DEPENDENT: Final = frozenset(
    {"create_sort_key", "hash", "json_deserialize_sql", "json_serialize_plan", "json_serialize_sql"}
    | {"version"}
)
"""Functions whose results may change between releases of DuckDB."""
_NOT_SCALAR: Final = "is not a function of a single row"


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
    con: DuckDBPyConnection, option: str, text: str, columns: Mapping[str, str]
) -> Expression:
    """Parse a text and check that it is one expression that depends only on the given columns.

    Args:
        con: Open DuckDB session; parses and binds the expression, and evaluates it for no row.
        option: Name of the option, for error messages.
        text: The expression.
        columns: DuckDB's types of the columns that may be used, by name. The fields of a struct ``extra`` may
            be used as ``extra.NAME``.

    Raises:
        ConfigError: The text is too long, not an expression, or contains something that is not allowed.
    """
    check_length(option, text)
    empty = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in columns.items())
    try:
        names = _check(con, text, _names_of(con, columns))
        found = con.sql(f"SELECT (\n{text}\n) AS found FROM (SELECT {empty} FROM range(0))")
        kind = found.types[0]
        found.fetchall()  # over no rows: some invalid arguments are found only when a query starts
    except (ValueError, *QUERY_ERRORS) as error:
        # Errors of ``_check`` may have a hint as a second argument; those of DuckDB have one argument.
        reason, hint = (first_line(error), None) if len(error.args) != 2 else error.args
        raise ConfigError(f"{option}: {reason}", found=quote_sql(text), hint=hint) from error
    return Expression(option, text, frozenset(names), str(kind))


def check_condition(condition: Expression) -> None:
    """Check that the type of an expression is BOOLEAN.

    Raises:
        ConfigError: It has another type.
    """
    if condition.type != "BOOLEAN":
        reason, found = f"{condition.option} is not a condition", f"{condition.type} from {condition.text}"
        hint = "Write a comparison, such as value_sample_tier <= 1."
        raise ConfigError(reason, found=found, expected="BOOLEAN", hint=hint)


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


def _names_of(con: DuckDBPyConnection, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the names of columns, and of the fields of ``extra``, by their spelling in lower case."""
    names = {name.lower(): name for name in columns}
    if _STRUCT in columns:
        (struct,) = con.sql(f"SELECT NULL::{columns[_STRUCT]}").types
        names |= {f"{_STRUCT}.{field}".lower(): f"{_STRUCT}.{field}" for field, _ in struct.children}
    return names


def parse_expression(con: DuckDBPyConnection, text: str) -> SyntaxNode:
    """Return the syntax tree of the only expression in a text.

    Raises:
        ValueError: The text is something else.
    """
    statements = parse_sql(con, f"SELECT {text}")
    # Texts such as "1 FROM t" and "1; SELECT 2" parse, too, so only a plain SELECT of one value is accepted.
    query = statements[0]["node"]
    is_plain = query["type"] == "SELECT_NODE" and query["from_table"]["type"] == "EMPTY"
    if not is_plain or any(query[clause] for clause in _CLAUSES):
        raise ValueError("a whole query in place of an expression")
    selected: list[SyntaxNode] = query["select_list"]
    if len(statements) > 1 or len(selected) > 1:
        raise ValueError("more than one expression", "Join conditions with AND.")
    parse_sql(con, f"SELECT {text}\n AS name")  # fails after an alias, and after a comma, which makes a row
    return selected[0]


def _check(con: DuckDBPyConnection, text: str, columns: Mapping[str, str]) -> set[str]:
    """Check every node of the syntax tree of an expression and return the names that it uses.

    Args:
        con: Open DuckDB session.
        text: The expression.
        columns: Names that may be used, by their spelling in lower case.

    Raises:
        ValueError: It is not allowed. The arguments are the reason and, perhaps, a hint.
    """
    nodes = [node for node in syntax_nodes(parse_expression(con, text)) if "class" in node]
    functions = set()
    for node in nodes:
        kind = node["class"]
        if kind not in _CLASSES or node["type"] == "GROUPING_FUNCTION":
            raise ValueError(
                f"contains a {kind.lower()}, but must consist of columns, constants and functions"
            )
        if kind == "TYPE" and not _TYPES.fullmatch(node["type_name"].lower()):
            raise ValueError(f"a cast to {node['type_name']}, and not to a number, text, blob or boolean")
        if kind == "FUNCTION":
            name = node["function_name"].lower()
            functions.add(name)
            # DuckDB parses x.f() as the function f of the schema x.
            if node["schema"] or node["catalog"]:
                raise ValueError(f"{node['schema']}.{name} is not a function: write f(x)")
            # Only aggregates have these, whose values depend on other rows.
            if node["filter"] or node["distinct"] or node["order_bys"]["orders"]:
                raise ValueError(f"{name} {_NOT_SCALAR}")
    _check_functions(con, functions)
    return {_column(node["column_names"], columns) for node in nodes if node["class"] == "COLUMN_REF"}


def _column(path: list[str], columns: Mapping[str, str]) -> str:
    """Return the name of a column or a field of ``extra``."""
    found = ".".join(path)
    is_field = len(path) == 2 and path[0].lower() == _STRUCT
    if len(path) > 1 and not is_field:
        raise ValueError(f"{found}: a column name must not be qualified")
    name = found.lower()
    is_quoted = not is_field and "." in name  # "extra.NAME" in quotes is one name, not a field
    if name in columns and not is_quoted:
        return columns[name]
    # First names that contain the one given, such as a field of ``extra``; then similar spellings.
    similar = sorted(column for column in columns if name in column)
    similar = similar or difflib.get_close_matches(name, columns, n=1, cutoff=0.5)
    unquoted = ", without quotes" if is_quoted else ""
    hint = f"Did you mean {columns[similar[0]]}{unquoted}?" if similar else "Put text in single quotes."
    # Of the struct only its fields, if it has any.
    fields = [each for each in columns.values() if each.startswith(f"{_STRUCT}.")]
    known = sorted(each for each in columns.values() if each != _STRUCT or not fields)
    raise ValueError(f"no column {found!r}, only {', '.join(known)}", hint)


def _check_functions(con: DuckDBPyConnection, names: set[str]) -> None:
    """Check functions by DuckDB's catalog; a macro is checked by its definition."""
    if not names:
        return  # reading the catalog takes longer than the rest of the check
    listed = ", ".join(map(quote, sorted(names)))
    facts = con.sql(f"""
        SELECT lower(function_name), function_type, stability, macro_definition, parameters,
               regexp_matches(concat(return_type, parameter_types::VARCHAR), 'DATE|TIME')
        FROM duckdb_functions() WHERE lower(function_name) IN ({listed}) ORDER BY ALL
    """).fetchall()
    for name in sorted(names - {fact[0] for fact in facts}):
        raise ValueError(f"no function {name}")
    scalar = {name for name, kind, *_ in facts if kind == "scalar"}
    for name, kind, stability, definition, parameters, of_times in facts:
        if kind == "table" and name in scalar:  # repeat, for example: an expression calls the scalar one
            continue
        if of_times and name in _ARITHMETIC:  # these forms take a time, which no expression can produce
            continue
        # A macro is SQL, so it is allowed if its definition is, with its parameters as columns.
        if kind == "macro":
            _check(con, definition, {p.lower(): p for p in parameters})
        elif kind != "scalar":
            raise ValueError(f"{name} {_NOT_SCALAR}")
        elif stability != "CONSISTENT" or name in _VERSION_DEPENDENT:
            raise ValueError(f"{name}: its value may differ between runs")
        elif of_times:
            raise ValueError(f"{name}: dates and times are not allowed")
