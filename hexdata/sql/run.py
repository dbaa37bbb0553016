"""Runs one query of a user's over a store, closed in: it reads the store's tables and nothing else.

Rows come as a stream of Arrow batches; nothing is written here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from hexdata.remote import AnyPath, prefix_of
from hexdata.sql.catalog import open_catalog
from hexdata.sql.check import check_query, refused
from hexdata.sql.named import named_query
from hexdata.store import Store
from hexdata.store.session import QUERY_ERRORS, DuckDBPyConnection

__all__ = ["QueryResult", "run_query"]

_BATCH_ROWS: Final = 8_192
"""Rows of a batch: few, as DuckDB holds some ahead, and a row with a policy has kilobytes."""
_NAMED: Final = "@"
_STREAMED: Final = re.compile(r"(Conversion|Invalid Input|Mismatch Type|Out of Range) Error: ")
"""What is wrong with a value, as it comes through Arrow, where a query fails amid its rows."""

_PLACE: Final = re.compile(r"LINE (?P<line>[0-9]+): (?P<text>.*)\n(?P<mark> *\^)")


@dataclass(frozen=True)
class QueryResult:
    """The rows of a query, to be read once, while it is open.

    Attributes:
        store: the folder, or the address, of the store that they are of.
        schema: of the rows. Names may repeat, as SQL allows.
        batches: the rows, in the query's order.
    """

    store: AnyPath
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers."""
        tests = pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal
        return [any(test(kind) for test in tests) for kind in self.schema.types]


@contextmanager
def run_query(
    store: str | AnyPath, text: str, *, memory: int = 1_000_000_000, threads: int | None = None
) -> Iterator[QueryResult]:
    """Run one query over a store's views and macros and give its rows while the context is open.

    Rows of a query without ORDER BY come in the order of the tables. Nothing but the store can be read: no
    other file, no other address, no variable of the program; and nothing can be written.

    Args:
        store: the store's folder, or its address.
        text: one SQL statement that reads; or ``@NAME``, a named query.
        memory: bytes for everything together. What does not fit is spilled to the system's temporary
            folder (``TMPDIR``).
        threads: of DuckDB; None for one a core, as far as ``memory`` allows.

    Raises:
        ConfigError: the text is no such query; also while rows are read, where a value cannot be computed.
        StoreError: there is no store, or a file of it is missing or damaged.
        BudgetError: the memory is too small, or the disk full that rows are spilled to.
        KeyboardInterrupt: the user interrupted it.
    """
    query = named_query(text[len(_NAMED) :]) if text.startswith(_NAMED) else text
    opened = Store.open(store)
    root = prefix_of(opened.path.resolve())
    with open_catalog(opened, memory=memory, threads=threads) as con:
        check_query(con, query)
        con.execute("BEGIN TRANSACTION READ ONLY")
        try:
            reader = con.sql(query).to_arrow_reader(_BATCH_ROWS)
        except QUERY_ERRORS as error:
            raise refused(_with_place(con, query) or str(error), root) from error
        yield QueryResult(opened.path, reader.schema, _rows(reader, root))


def _rows(reader: pa.RecordBatchReader, root: str) -> Iterator[pa.RecordBatch]:
    try:
        yield from reader
    except QUERY_ERRORS as error:
        raise refused(str(error), root) from error
    except (OSError, ValueError) as error:
        if _STREAMED.match(str(error)):
            raise refused(str(error), root) from error
        raise


def _with_place(con: DuckDBPyConnection, query: str) -> str | None:
    """Return DuckDB's message on a wrong query with its line, which relations leave out."""
    con.execute("ROLLBACK")
    try:
        con.execute(f"EXPLAIN\n{query}")
    except QUERY_ERRORS as error:
        return _PLACE.sub(_one_line_up, str(error))
    return None


def _one_line_up(place: re.Match[str]) -> str:
    """Take the line of EXPLAIN off a place; its mark moves where the number has a digit less.

    A place in that line itself is none: so DuckDB says that it does not know.
    """
    line = str(int(place["line"]) - 1)
    if line == "0":
        return ""
    mark = place["mark"][len(place["line"]) - len(line) :]
    return f"LINE {line}: {place['text']}\n{mark}"
