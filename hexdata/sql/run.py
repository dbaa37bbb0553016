"""Runs a user's query over a store. The query can only read the store's tables.

Rows are returned as a stream of Arrow batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from itertools import chain, islice, takewhile
from typing import Any, Final

import pyarrow as pa

from hexdata.checks import check_choice
from hexdata.errors import ConfigError, HexdataError, StoreError
from hexdata.retry import on_disk
from hexdata.sql.views import DAMAGED, VIEWS, open_catalog
from hexdata.storage import AnyPath, prefix_of, translate_errors
from hexdata.storage.errors import VERIFY_HINT
from hexdata.store import Store, session
from hexdata.store.integrity import BUCKETS_REMOVED, require_intact_once
from hexdata.store.session import QUERY_ERRORS, DuckDBPyConnection, in_thread, quote_sql

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
_BATCH_ROWS: Final = 8_192
"""Rows per batch. It is small because DuckDB keeps several batches ahead, and a row with a policy takes
kilobytes.
"""
_STREAMED: Final = re.compile(r"(Conversion|Invalid Input|Mismatch Type|Out of Range) Error: ")
"""Start of the messages, passed on by Arrow, about a value on which a query fails while rows are read."""
_EXPLAINED: Final = re.compile(r"(LINE 1: )EXPLAIN (.*\n) {8}")
"""The first line of a query that is explained, and the mark below it."""


@dataclass(frozen=True)
class QueryResult:
    """The result of a query. The rows can be read once, while the query is open.

    Attributes:
        store: Folder or address of the store.
        schema: Arrow schema of the rows. Column names may repeat, as in SQL.
        batches: The rows, in the order of the query.
        notes: Why a view that the query reads is empty or out of date, and the command that changes it.
    """

    store: AnyPath
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    notes: tuple[str, ...] = ()

    @property
    def numeric(self) -> list[bool]:
        """Return for each column whether it contains numbers."""
        tests = pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal
        return [any(test(kind) for test in tests) for kind in self.schema.types]


@contextmanager
def run_query(
    store: str | AnyPath, text: str, *, memory: int = 1_000_000_000, threads: int | None = None
) -> Iterator[QueryResult]:
    """Run one query over a store's views and macros. Its rows can be read while the context is open.

    The files of the views that the query names are compared with their digests first, except in an object
    store. Without ORDER BY, rows are in the order of the tables. The query cannot read other files,
    addresses or Python variables, and cannot write.

    Args:
        store: Folder or address of the store.
        text: One SQL statement that only reads, or ``@NAME`` for a named query.
        memory: Total memory in bytes (default: 1 GB). Data that does not fit is spilled to the system's
            temporary folder (``TMPDIR``).
        threads: Number of DuckDB threads; None for one per core, as far as ``memory`` allows (default).

    Yields:
        The result of the query.

    Raises:
        ConfigError: The text is not a valid query, or a value cannot be computed while rows are read.
        StoreError: There is no store, one of these files is missing or damaged, or the disk fails.
        BudgetError: The memory is too small, or the disk for spilled rows is full.
        KeyboardInterrupt: The user has interrupted the query.
    """
    query = named_query(text[1:]) if text.startswith("@") else text
    opened = Store.open(store)
    of_caller: OSError | None = None
    with translate_errors(opened.path), ExitStack() as stack:
        result = on_disk(_begin, stack, opened, query, memory, threads)
        try:
            yield result
        except OSError as error:  # of the output, such as a closed pipe: not reported as one of the store
            of_caller = error
    if of_caller is not None:
        raise of_caller


def _begin(stack: ExitStack, store: Store, query: str, memory: int, threads: int | None) -> QueryResult:
    """Open a session on a stack and run a query until its first rows. An error leaves nothing open."""
    with ExitStack() as attempt:
        con = attempt.enter_context(open_catalog(store, memory=memory, threads=threads))
        result = start_query(con, store, query)
        # The thread of the query ends before its session, also if not all rows are read.
        attempt.enter_context(closing(result.batches))  # type: ignore[type-var]
        # Temporary errors up to the first rows can be repeated, because the caller has received nothing yet.
        first = list(islice(result.batches, 1))
        stack.enter_context(attempt.pop_all())
    return replace(result, batches=chain(first, result.batches))


def start_query(con: DuckDBPyConnection, store: Store, query: str) -> QueryResult:
    """Check a query and start it in a session of :func:`open_catalog`, or in a cursor of it.

    Args:
        con: The session, which is in no transaction. One is open afterwards.
        store: The store of the session.
        query: One SQL statement that only reads.

    Raises:
        ConfigError: The text is not a valid query; the message repeats the line with the error.
        StoreError: A file of the store is missing or damaged.
    """
    root = prefix_of(store.path.resolve())
    read = check_query(con, query)
    text = query.lower().replace("trmph", "games")  # the macro reads the games
    # A name of a view in a comment or a string only causes a superfluous check. DuckDB's functions query and
    # query_table put the names together themselves.
    folders = [name for name in VIEWS if name != "shards" and (name in text or "query" in text)]
    named = map(store.manifest.files_in, folders)
    require_intact_once(store, chain.from_iterable(named))
    # check_query refuses statements that write; DuckDB also refuses them in this transaction.
    con.execute("BEGIN TRANSACTION READ ONLY")
    try:
        stream = in_thread(con, _stream(con, query))
        schema = next(stream)
    except QUERY_ERRORS as error:
        message = str(error)
        con.execute("ROLLBACK")
        try:
            con.execute(f"EXPLAIN {query}")  # relations omit the line of the error
        except QUERY_ERRORS as explained:
            message = _EXPLAINED.sub(r"\1\2", str(explained))
        raise query_error(message, root) from error
    return QueryResult(store.path, schema, _rows(stream, root), tuple(_notes(store, read)))


def _notes(store: Store, read: frozenset[str]) -> Iterator[str]:
    """Yield why views of these names have no rows, or rows of an earlier state of the store."""
    for view, stage, wanted in (("shuffled", "shuffle", "shuffled"), ("shards", "export", "exported")):
        lineage = store.manifest.stages.get(stage)
        if view in read and lineage is None:
            fault = f"{view} is empty because the store has not been {wanted}"
            yield f"{fault}; `{store.next_command(stage)}` fills it"
        elif view in read and lineage and lineage["of"] != store.input_digest(stage):
            fault = f"{view} is older than the positions of the store"
            yield f"{fault}; `{store.next_command(stage)}` brings it up to date"


def _stream(con: DuckDBPyConnection, query: str) -> Iterator[Any]:
    """Yield the schema and the batches of rows of a query."""
    reader = con.sql(query).to_arrow_reader(_BATCH_ROWS)
    yield reader.schema
    yield from reader


def _rows(batches: Iterator[pa.RecordBatch], root: str) -> Iterator[pa.RecordBatch]:
    try:
        yield from batches
    except QUERY_ERRORS as error:
        raise query_error(str(error), root) from error
    except (OSError, ValueError) as error:
        if _STREAMED.match(str(error)):
            raise query_error(str(error), root) from error
        raise


# --- what a query may do, and what its errors say ------------------------------------------------------


def check_query(con: DuckDBPyConnection, text: str) -> frozenset[str]:
    """Check that a text is a single statement that only reads, and only from the store's views.

    Returns the names of the tables and views that it reads, in lower case.

    Args:
        con: Session of the store.
        text: SQL text.

    Raises:
        ConfigError: The text is too long, not valid SQL, or not such a statement.
    """
    session.check_length("the query", text)
    try:
        statements = con.extract_statements(text)
    except QUERY_ERRORS as error:
        raise query_error(str(error)) from error
    if len(statements) != 1:
        fault = "the query has more than one statement" if statements else "the query is empty"
        raise ConfigError(fault, found=quote_sql(text) or None, expected="one SELECT statement")
    kind = statements[0].type.name
    if kind != "SELECT":
        fault = f"{kind.replace('MULTI', 'PIVOT')} is not allowed: queries can only read"
        hint = "List the values of the pivot: PIVOT … ON … IN (…)." if kind == "MULTI" else None
        raise ConfigError(fault, found=quote_sql(text), hint=hint)
    try:
        tree = session.parse_sql(con, text)
    except ValueError as error:
        raise ConfigError(str(error), found=quote_sql(text), expected="one SELECT statement") from error
    read: set[str] = set()
    for node in session.syntax_nodes(tree):
        form = node.get("type")
        if not isinstance(form, str):
            continue
        if form == "BASE_TABLE":
            read.add(str(node.get("table_name", "")).lower())
        elif form.endswith("_NODE") and form not in _NODES:
            name = form.removesuffix("_QUERY_NODE").removesuffix("_NODE")
            raise ConfigError(f"the query contains {name}, and can only read", found=quote_sql(text))
        elif form == "TABLE_FUNCTION":
            called = node["function"]
            name = called.get("function_name", "").lower()
            # A qualified name could be another function than the one in the list.
            if name not in _FUNCTIONS or called["schema"] or called["catalog"]:
                qualified = ".".join(filter(None, (called["catalog"], called["schema"], name)))
                fault = f"the table function {qualified or called['type']} is not allowed"
                allowed = f"the tables {', '.join(VIEWS)} or the functions {', '.join(sorted(_FUNCTIONS))}"
                raise ConfigError(fault, found=quote_sql(text), expected=allowed)
    return frozenset(read)


def query_error(message: str, root: str | None = None) -> HexdataError:
    """Return the exception for DuckDB's message about a wrong query or a damaged file of the store.

    The message repeats the line with the error and marks its position.

    Args:
        message: DuckDB's message.
        root: Path of the store, by which a damaged file is recognized; None if unknown (default).
    """
    if message.startswith(_PERMISSION_ERROR):
        return ConfigError(f"queries can only read the tables {', '.join(VIEWS)}", found=message)
    if BUCKETS_REMOVED in message:
        _, _, hint = message.partition(f"{BUCKETS_REMOVED}. ")
        return StoreError(BUCKETS_REMOVED, hint=hint.partition("\n")[0])
    if DAMAGED in message or (root is not None and root in message):
        return StoreError("a file of the store cannot be read", found=message.strip(), hint=VERIFY_HINT)
    first, *others = message.strip().splitlines() or [""]
    marked = [f"  {line}" if line.startswith(("LINE ", " ")) else line for line in others if line]
    return ConfigError("the query failed", found=first, lines=marked)


# --- named queries: one ``.sql`` file each in ``queries/`` ---------------------------------------------


def named_query(name: str) -> str:
    """Return the SQL text of a named query.

    Raises:
        ConfigError: There is no query of this name; the message lists the existing ones.
    """
    texts = _named()
    check_choice("named query", f"@{name}", [f"@{known}" for known in texts])
    return texts[name]


def named_queries() -> dict[str, str]:
    """Return the description of each named query, from the comment at its start, sorted by name."""
    found = {}
    for name, text in _named().items():
        comment = takewhile(lambda line: line.startswith("--"), text.splitlines())
        found[name] = " ".join(line.removeprefix("--").strip() for line in comment)
    return found


def _named() -> dict[str, str]:
    files = (resources.files("hexdata.sql") / "queries").iterdir()
    texts = {file.name.removesuffix(".sql"): file.read_text(encoding="utf-8") for file in files}
    return dict(sorted(texts.items()))
