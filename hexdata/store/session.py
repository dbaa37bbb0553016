"""DuckDB sessions: the only module that opens a connection, limits it, closes it in and interrupts it.

It also reads SQL texts with DuckDB's parser.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from types import FrameType
from typing import Any, ClassVar, Final, TypeVar

import duckdb
from duckdb import DuckDBPyConnection as DuckDBPyConnection

from hexdata.checks import check_fields
from hexdata.errors import BudgetError, ConfigError, StoreError
from hexdata.pool import fitting
from hexdata.retry import DISK_FULL, TRANSIENT
from hexdata.storage import AnyPath, ObjectStorage
from hexdata.storage.errors import VERIFY_HINT
from hexdata.system import default_workers
from hexdata.temporary import temporary_folder

T = TypeVar("T")

STATEMENT_ERRORS: Final = (duckdb.Error, UnicodeDecodeError)
"""All errors of a statement. That of a damaged file may be of no more special class."""
QUERY_ERRORS: Final = (
    duckdb.DataError,
    duckdb.NotSupportedError,
    duckdb.PermissionException,
    duckdb.ProgrammingError,
    UnicodeDecodeError,
)
"""DuckDB's errors for an invalid query or value, a missing permission or an unsupported feature.

They are not raised for a lack of memory or a failing disk. ``UnicodeDecodeError`` is among them, as not all
messages of DuckDB are UTF-8.
"""

_INTERRUPTED: Final = "Query interrupted"
"""Text of the RuntimeError that DuckDB raises on Ctrl-C."""
_OUT_OF_MEMORY: Final = "Out of Memory Error"
"""Start of DuckDB's out-of-memory message in any type of exception."""
_SPILL_SETTING: Final = "max_temp_directory_size"
"""Setting that DuckDB names when it cannot spill more. By default a tenth of the free disk stays unused."""
_FILE_IN_TEXT: Final = re.compile(r'file "([^"]+)"')
"""The file in such a text."""
_DUCKDB_ERROR: Final = re.compile("[A-Z][A-Za-z ]* Error: ")
"""Start of DuckDB's messages, which Arrow passes on if a query fails while rows are streamed."""
_DISK_EXCEPTIONS: Final = (duckdb.IOException, duckdb.TransactionException, duckdb.FatalException)
"""Exceptions with such a text: raised on reading or writing, at the end of a transaction, and afterwards."""


@dataclass(frozen=True)
class QueryLimits:
    """Limits for the queries of one command.

    Attributes:
        memory: Total memory in bytes (default: 1 GB). Data that does not fit is spilled to the system's
            temporary folder (``TMPDIR``), never into the store, which may be read-only.
        threads: Number of DuckDB threads; None for one per core, as far as ``memory`` allows (default).

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The memory is too small for this number of threads, or for one thread.
    """

    BASE: ClassVar[int]
    """Measured memory in bytes outside DuckDB's buffers: interpreter, libraries and Arrow batches."""
    THREAD: ClassVar[int]
    """Memory in bytes that each DuckDB thread uses outside the buffers to read Parquet."""
    BUFFERS: ClassVar[int]
    """Buffer bytes needed per thread."""
    memory: int = 1_000_000_000
    threads: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, {"threads": 1, "memory": 0})
        self.session()

    def session(self, reserved: int = 0) -> dict[str, Any]:
        """Return the arguments ``memory`` and ``threads`` of a session.

        Args:
            reserved: Bytes that the store takes beside the session, of ``Store.reader_memory``. Default 0.

        Raises:
            BudgetError: The memory is too small.
        """
        # What libraries and readers of Parquet take outside DuckDB's buffers is subtracted.
        base, each = self.BASE + reserved, self.THREAD + self.BUFFERS
        threads = fitting(self.memory, self.threads, default_workers(), each, base, "thread")
        return {"memory": self.memory - base - threads * self.THREAD, "threads": threads}


@contextmanager
def duckdb_session(
    *,
    memory: int,
    threads: int,
    spill: Path | None = None,
    store: AnyPath | None = None,
    only: Sequence[AnyPath] | None = None,
) -> Iterator[DuckDBPyConnection]:
    """Open an in-memory DuckDB database. No extension is installed or loaded.

    Insertion order is not preserved, so a query that needs an order must state it.

    Args:
        memory: Bytes for DuckDB's buffer manager, at least 32 MiB. Parquet buffers and Arrow batches are not
            included.
        threads: Number of worker threads.
        spill: Folder in which the session creates a temporary folder, removed at the end; None for the
            system's folder (default).
        store: A path of the store to query. An object store is read through its file system. None if no store
            is queried (default).
        only: The only files that the session can read, for queries of users: it writes no files, reads no
            Python variables, preserves the order of rows, and its settings are locked. None for no
            restriction (default).

    Yields:
        The connection.

    Raises:
        BudgetError: A query needs more memory.
        OSError: A disk is full or has failed; the error has its number.
        StoreError: A query has failed, for example on a corrupt file.
        KeyboardInterrupt: The user has interrupted a query.
    """
    system = None
    if store is not None and not isinstance(store, Path):
        from hexdata.storage.query_filesystem import QueryFileSystem  # loads fsspec

        system = QueryFileSystem(ObjectStorage(store))
    with temporary_folder("duckdb", spill) as folder:
        temporary = str(folder.resolve())
        settings: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": f"{max(memory, 32 << 20)}B",
            "threads": str(threads),
            "temp_directory": temporary,
            # Preserving the order would need more memory; queries that need an order have an ORDER BY.
            "preserve_insertion_order": "false",
            # DuckDB would download extensions and run their code.
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        }
        try:
            with (
                closing(duckdb.connect(":memory:", config=settings)) as connection,
                _interrupt_on_ctrl_c(connection),
            ):
                if system is not None:
                    connection.register_filesystem(system)
                # A progress bar would be written to standard output. Where it is off, as in Jupyter, DuckDB
                # may refuse the setting.
                if connection.sql("SELECT current_setting('enable_progress_bar')").fetchall() == [(True,)]:
                    connection.execute("SET enable_progress_bar = false")
                if only is not None:
                    _close_in(connection, only)
                yield connection
        except (duckdb.Error, MemoryError, OSError, ValueError, RuntimeError) as error:
            failure = None if system is None else system.failure
            if failure is None or isinstance(error, MemoryError | RuntimeError):
                translated = _translate(error, memory, temporary)
            elif isinstance(failure, FileNotFoundError):
                translated = StoreError("a file is missing", path=failure.filename, hint=VERIFY_HINT)
            else:
                translated = failure  # of which DuckDB has only the text
            if translated is error:
                raise
            raise translated from translated.__cause__ or error


def _close_in(connection: DuckDBPyConnection, files: Sequence[AnyPath]) -> None:
    """Restrict a session to reading some files, and lock its settings.

    Each file is allowed under two forms: its plain path, and the escaped pattern of ``read_parquet_sql``.
    """
    plain = ", ".join(quote(str(path)) for path in files)
    for statement in (
        "SET preserve_insertion_order = true",
        # A query could otherwise read Python variables by their names.
        "SET python_enable_replacements = false",
        f"SET allowed_paths = {path_list_sql(files)} || [{plain}]",
        # After the paths, which cannot be set once access is disabled.
        "SET enable_external_access = false",
        # Last: from now on no setting can be changed, not even by the query of a user.
        "SET lock_configuration = true",
    ):
        connection.execute(statement)


@contextmanager
def _interrupt_on_ctrl_c(connection: DuckDBPyConnection) -> Iterator[None]:
    """Interrupt the running query on Ctrl-C. By default DuckDB's threads finish their part of it: seconds."""
    before, is_interrupted = signal.getsignal(signal.SIGINT), False
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        with suppress(duckdb.Error):  # of a session that ended before an older one, and so left its handler
            connection.interrupt()
        # The handler from before raises KeyboardInterrupt, or does what the program of the caller chose.
        before(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except duckdb.Error as error:  # for example while DuckDB reads rows from Python
        if is_interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        # A stream of rows that was not read to its end may be collected in any thread.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def in_thread(con: DuckDBPyConnection, items: Iterator[T], ahead: int = 0) -> Generator[T]:
    """Yield items that a thread computes with a session. A signal can interrupt the computation.

    Python handles signals between two bytecodes of the main thread, and DuckDB may search for the next rows
    of a stream for hours without looking for signals. Here, the main thread waits in Python.

    Args:
        con: The session; the caller must not use it before the last item.
        items: The items, none of which is None.
        ahead: Number of items to compute while the caller uses an earlier one. Default 0.
    """
    wanted, results, stopped = threading.Semaphore(ahead), Queue[tuple[T | None, Any]](), threading.Event()

    def compute() -> None:
        while wanted.acquire() and not stopped.is_set():
            try:
                results.put((next(items, None), None))
            except BaseException as error:  # noqa: BLE001 - raised in the other thread
                results.put((None, error))

    # The thread exists before it runs, so a signal at any moment leaves no query that nobody waits for. To
    # block signals is not enough: the system gives them to one of DuckDB's threads.
    thread = threading.Thread(target=compute, name="hexdata-query", daemon=True)
    try:
        thread.start()
        while True:
            wanted.release()
            found = None
            while found is None:
                with suppress(Empty):  # Windows does not interrupt a wait without a limit
                    found = results.get(timeout=0.1)
            item, error = found
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        stopped.set()
        wanted.release()
        # Again and again, because a query that begins just then has forgotten the first interrupt.
        while thread.is_alive():
            thread.join(0.01)
            with suppress(duckdb.Error):  # the session has ended, so the thread only waits
                con.interrupt()


def _translate(error: Exception, memory: int, temporary: str) -> BaseException:
    """Return hexdata's error for one of DuckDB, or the same error if it is of another origin.

    While rows are streamed, Arrow passes DuckDB's errors on as an OSError without a number or a ValueError.

    Args:
        error: The error.
        memory: Bytes for DuckDB's buffers.
        temporary: Folder to which the session spills.
    """
    text = str(error)
    first_line = text.partition("\n")[0]
    of_arrow = isinstance(error, OSError | ValueError) and getattr(error, "errno", None) is None
    if isinstance(error, duckdb.InterruptException) or text == _INTERRUPTED:
        return KeyboardInterrupt()
    # DuckDB reports a full spill folder as a lack of memory, too; the name of the setting tells them apart.
    is_memory = isinstance(error, duckdb.OutOfMemoryException | MemoryError)
    if is_memory or (of_arrow and _OUT_OF_MEMORY in text):
        if _SPILL_SETTING in text:
            return OSError(errno.ENOSPC, first_line.removeprefix(f"{_OUT_OF_MEMORY}: "), temporary)
        reason = f"DuckDB ran out of its memory of {memory / 1e6:,.0f} MB"
        return BudgetError(reason, found=first_line, hint="Raise --memory.")
    if isinstance(error, _DISK_EXCEPTIONS) or (of_arrow and isinstance(error, OSError)):
        # A file in the spill folder is named by that folder, which still exists afterwards.
        # DuckDB's exceptions have no error number, only the text that the system has for it.
        for code in (*DISK_FULL, *TRANSIENT):
            for line in text.splitlines():
                if os.strerror(code) in line:
                    named = _FILE_IN_TEXT.search(line)
                    return OSError(code, line.strip(), temporary if temporary in line else named and named[1])
    if isinstance(error, duckdb.Error) or (of_arrow and _DUCKDB_ERROR.match(text)):
        return StoreError("a query failed", found=first_line, hint=VERIFY_HINT)
    return error


def quote(text: str) -> str:
    """Return ``text`` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def read_parquet_sql(paths: Sequence[AnyPath], *, row_location: bool = False) -> str:
    """Return the SQL table function that reads these Parquet files, in order, as one table.

    A folder name such as ``seed=7`` does not add a column.

    Args:
        paths: Files to read.
        row_location: Whether to add the columns ``filename`` and ``file_row_number`` (default: False).
    """
    more = ", filename = true, file_row_number = true" if row_location else ""
    return f"read_parquet({path_list_sql(paths)}, hive_partitioning = false{more})"


def path_list_sql(paths: Sequence[AnyPath]) -> str:
    """Return these paths as an SQL list, with glob characters escaped by brackets."""
    patterns = ("".join(f"[{c}]" if c in "*?[" else c for c in str(path)) for path in paths)
    return f"[{', '.join(map(quote, patterns))}]"


# --- syntax trees of SQL texts, as DuckDB's parser serializes them ---------------------------------------

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
        raise ConfigError(f"{name} is too long: {len(text):,} characters, at most {longest:,} are read")


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
    return list(content["statements"])


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
