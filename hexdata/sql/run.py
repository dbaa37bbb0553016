"""Runs a user's query over a store. The query can only read the store's tables.

Rows are returned as a stream of Arrow batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final

import pyarrow as pa

from hexdata.errors import HexdataError
from hexdata.retry import on_disk
from hexdata.sql.catalog import open_catalog
from hexdata.sql.check import check_query, query_error
from hexdata.sql.named import named_query
from hexdata.storage import AnyPath, prefix_of
from hexdata.store import Store
from hexdata.store.disk_space import translate_disk_full
from hexdata.store.integrity import require_intact_once
from hexdata.store.session import QUERY_ERRORS, DuckDBPyConnection

__all__ = ["QueryResult", "run_query", "start_query"]

_BATCH_ROWS: Final = 8_192
"""Rows per batch. It is small because DuckDB keeps several batches ahead, and a row with a policy takes
kilobytes.
"""
_NAMED: Final = "@"
_FOLDERS: Final = ("positions", "games", "sources", "rejected", "shuffled")
"""Views with files, and the folders of these."""
_STREAMED: Final = re.compile(r"(Conversion|Invalid Input|Mismatch Type|Out of Range) Error: ")
"""Start of the messages, passed on by Arrow, about a value on which a query fails while rows are read."""

_ERROR_LINE: Final = re.compile(r"LINE (?P<line>[0-9]+): (?P<text>.*)\n(?P<mark> *\^)")


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
    query = named_query(text[len(_NAMED) :]) if text.startswith(_NAMED) else text
    opened = Store.open(store)
    of_caller: OSError | None = None
    try:
        with translate_disk_full(opened.path), ExitStack() as stack:
            result = on_disk(_begin, stack, opened, query, memory, threads)
            try:
                yield result
            except OSError as error:
                of_caller = error
                raise
    except HexdataError as error:
        if of_caller is not None and error.__cause__ is of_caller:
            raise of_caller from None
        raise


def _begin(stack: ExitStack, store: Store, query: str, memory: int, threads: int | None) -> QueryResult:
    """Open a session on a stack and run a query until its first rows. An error leaves nothing open."""
    with ExitStack() as attempt:
        con = attempt.enter_context(open_catalog(store, memory=memory, threads=threads))
        result = start_query(con, store, query)
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
    require_intact_once(store, _files_of(store, query))
    con.execute("BEGIN TRANSACTION READ ONLY")
    try:
        reader = con.sql(query).to_arrow_reader(_BATCH_ROWS)
    except QUERY_ERRORS as error:
        raise query_error(_message_with_line(con, query) or str(error), root) from error
    return QueryResult(store.path, reader.schema, _rows(reader, root), tuple(_notes(store, read)))


def _files_of(store: Store, query: str) -> Iterator[str]:
    """Yield the names of the files of views in a query, and of the games for the macro ``trmph``."""
    text = query.lower()
    for folder in _FOLDERS:
        if folder in text or (folder == "games" and "trmph" in text):
            yield from store.manifest.files_in(folder)


def _notes(store: Store, read: frozenset[str]) -> Iterator[str]:
    """Yield why views of these names have no rows, or rows of an earlier state of the store."""
    for view, stage, wanted in (("shuffled", "shuffle", "shuffled"), ("shards", "export", "exported")):
        if view not in read:
            continue
        lineage = store.manifest.stages.get(stage)
        if lineage is None:
            command = store.next_command(stage)
            yield f"{view} is empty because the store has not been {wanted}; `{command}` fills it"
        elif lineage["of"] != store.input_digest(stage):
            command = store.next_command(stage)
            yield f"{view} is older than the positions of the store; `{command}` brings it up to date"


def _rows(reader: pa.RecordBatchReader, root: str) -> Iterator[pa.RecordBatch]:
    try:
        yield from reader
    except QUERY_ERRORS as error:
        raise query_error(str(error), root) from error
    except (OSError, ValueError) as error:
        if _STREAMED.match(str(error)):
            raise query_error(str(error), root) from error
        raise


def _message_with_line(con: DuckDBPyConnection, query: str) -> str | None:
    """Return DuckDB's message about an invalid query with the line number, which relations omit."""
    con.execute("ROLLBACK")
    try:
        con.execute(f"EXPLAIN\n{query}")
    except QUERY_ERRORS as error:
        return _ERROR_LINE.sub(_subtract_explain_line, str(error))
    return None


def _subtract_explain_line(match: re.Match[str]) -> str:
    """Subtract the EXPLAIN line from a line number, and move the mark if the number gets shorter.

    DuckDB reports the EXPLAIN line itself if the position is unknown; that position is removed.
    """
    line = str(int(match["line"]) - 1)
    if line == "0":
        return ""
    mark = match["mark"][len(match["line"]) - len(line) :]
    return f"LINE {line}: {match['text']}\n{mark}"
