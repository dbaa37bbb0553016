"""The DuckDB session: the one place that opens a connection and sets its limits."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import duckdb
from duckdb import DuckDBPyConnection

from hexdata.errors import BudgetError, StoreError
from hexdata.remote import AnyPath, file_system

__all__ = [
    "QUERY_ERRORS",
    "DuckDBPyConnection",
    "Interrupts",
    "duckdb_session",
    "path_list_sql",
    "quote",
    "read_parquet_sql",
]

QUERY_ERRORS: Final = (
    duckdb.DataError,
    duckdb.NotSupportedError,
    duckdb.PermissionException,
    duckdb.ProgrammingError,
)
"""What DuckDB raises where a query, or a value that it meets, is wrong, or asks for what it may not have or
DuckDB has not; not where memory or a disk is."""

_INTERRUPTED: Final = "Query interrupted"
"""What DuckDB makes of a Ctrl-C: a RuntimeError that says this."""
_OUT_OF_MEMORY: Final = "Out of Memory Error"
"""How such an error of DuckDB begins, in whatever exception it comes."""
_SPILL_SETTING: Final = "max_temp_directory_size"
"""What DuckDB names where it may not spill any more: by default it leaves a tenth of the free disk alone."""
_DEVICE_ERRORS: Final = tuple(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO", "EAGAIN", "EBUSY", "ESTALE", "ETIMEDOUT", "EREMOTEIO")
    if hasattr(errno, name)
)
"""Errors of a disk rather than of a file, which DuckDB gives as text."""
_OF_FILES: Final = (duckdb.IOException, duckdb.TransactionException, duckdb.FatalException)
"""In which exceptions it does: while it reads or writes, at the end of a transaction, and ever after."""


class Interrupts:
    """The sessions of some threads, so that another thread can end their queries."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: set[DuckDBPyConnection] = set()

    @contextmanager
    def watching(self, connection: DuckDBPyConnection) -> Iterator[None]:
        """Let this connection be interrupted while it is open."""
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)

    def interrupt(self) -> None:
        """End the queries that run now, with a KeyboardInterrupt where they were called."""
        with self._lock:
            for connection in self._connections:
                connection.interrupt()


@contextmanager
def duckdb_session(
    *,
    memory: int,
    threads: int,
    spill: Path | None = None,
    interrupts: Interrupts | None = None,
    place: AnyPath | None = None,
) -> Iterator[DuckDBPyConnection]:
    """Open an in-memory DuckDB for one piece of work.

    Args:
        memory: bytes for DuckDB's buffer manager. Parquet buffers and Arrow batches come on top.
        threads: worker threads.
        spill: folder below which the session makes its own absolute temporary folder, removed at the
            end; None takes the system's.
        interrupts: by which other threads can end its queries. Ctrl-C ends those of the main thread.
        place: a path of the store that is queried; one in an object store is read through its file system.

    DuckDB keeps insertion order off: every query here that needs an order says so.

    Raises:
        BudgetError: a query needs more memory.
        OSError: a disk is full, or failed; with the number of the error.
        StoreError: a query failed, on a corrupt file for instance.
        KeyboardInterrupt: the user interrupted one.
    """
    if spill is not None:
        spill.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="duckdb-", dir=spill) as temporary:
        connection = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": f"{max(memory, 32 << 20)}B",
                "threads": str(threads),
                "temp_directory": str(Path(temporary).resolve()),
                "preserve_insertion_order": "false",
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
            },
        )
        try:
            # It would go to standard output. Where it is off, as in Jupyter, DuckDB may refuse to set it.
            if connection.sql("SELECT current_setting('enable_progress_bar')").fetchall() == [(True,)]:
                connection.execute("SET enable_progress_bar = false")
            with (
                _interrupting(connection),
                (interrupts or Interrupts()).watching(connection),
                _reading(connection, place),
            ):
                yield connection
        except duckdb.OutOfMemoryException as error:
            raise _out_of_memory(error, memory, temporary) from error
        except duckdb.InterruptException as error:
            raise KeyboardInterrupt from error
        except duckdb.Error as error:
            if code := _device_error(error):
                raise _told(code, error, temporary) from error
            raise StoreError(
                "a query failed",
                found=_first_line(error),
                hint="Run `hexdata verify` to see whether a file of the store is damaged.",
            ) from error
        except MemoryError as error:
            raise _out_of_memory(error, memory, temporary) from error
        except (OSError, ValueError) as error:  # as Arrow gives it, where rows are streamed
            if _OUT_OF_MEMORY in str(error):
                raise _out_of_memory(error, memory, temporary) from error
            if code := _device_error(error):
                raise _told(code, error, temporary) from error
            raise
        except RuntimeError as error:
            if str(error) == _INTERRUPTED:
                raise KeyboardInterrupt from error
            raise
        finally:
            connection.close()


@contextmanager
def _reading(connection: DuckDBPyConnection, place: AnyPath | None) -> Iterator[None]:
    """Let a session read an object store. What fails there comes out as it was; DuckDB has only its text."""
    if place is None or isinstance(place, Path):
        yield
        return
    from hexdata.remote.steady import SteadyFileSystem  # loads fsspec

    system = SteadyFileSystem(file_system(place), place.protocol)
    connection.register_filesystem(system)
    try:
        yield
    except (duckdb.Error, OSError, ValueError):
        failure = system.failure
        if failure is None:
            raise
        if isinstance(failure, FileNotFoundError):
            raise StoreError(
                "a file of the store is missing",
                path=failure.filename,
                hint="Run `hexdata verify` to see what else is.",
            ) from failure
        raise failure from failure.__cause__


@contextmanager
def _interrupting(connection: DuckDBPyConnection) -> Iterator[None]:
    """Let Ctrl-C stop a query at once: left alone, DuckDB's threads finish their part of it first."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    own = _Interrupt(connection, before)
    signal.signal(signal.SIGINT, own)
    try:
        yield
    except duckdb.Error as error:  # as where DuckDB was taking rows from Python
        if own.came:
            raise KeyboardInterrupt from error
        raise
    finally:
        own.ended = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, _in_force())


class _Interrupt:
    """The handler of Ctrl-C while one session is open. Sessions may end in any order."""

    def __init__(self, connection: DuckDBPyConnection, before: Callable[..., Any]) -> None:
        self.before = before
        self.came = self.ended = False
        self._connection = connection

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.ended:
            self.came = True
            self._connection.interrupt()
        self.before(number, frame)


def _in_force() -> Any:
    """Return the handler of the latest session that is still open, or the one before them all."""
    handler = signal.getsignal(signal.SIGINT)
    while isinstance(handler, _Interrupt) and handler.ended:
        handler = handler.before
    return handler


def _out_of_memory(error: Exception, memory: int, temporary: str) -> BudgetError | OSError:
    """Return the error of a query that had too little memory, or too little room for its spill."""
    if _SPILL_SETTING in str(error):
        text = _first_line(error).removeprefix(f"{_OUT_OF_MEMORY}: ").removesuffix(".")
        return OSError(errno.ENOSPC, text, temporary)
    return BudgetError(
        "DuckDB ran out of the memory it was given",
        found=_first_line(error),
        expected=f"{memory / 1e6:,.0f} MB for DuckDB",
        hint="Raise --memory.",
    )


def _device_error(error: Exception) -> int | None:
    """Return the number of the system's error that a text of DuckDB's tells of, if it is one of a disk."""
    if not (isinstance(error, _OF_FILES) or (isinstance(error, OSError) and error.errno is None)):
        return None
    return next((code for code in _DEVICE_ERRORS if os.strerror(code) in str(error)), None)


def _told(code: int, error: Exception, temporary: str) -> OSError:
    """Return the system's error of which DuckDB gives a text; it names the spill if that has met it."""
    text = next(line.strip() for line in str(error).splitlines() if os.strerror(code) in line)
    spilled = str(Path(temporary).resolve()) in text
    return OSError(code, text, temporary) if spilled else OSError(code, text)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def quote(text: str) -> str:
    """Return ``text`` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def read_parquet_sql(paths: Sequence[AnyPath], *, places: bool = False) -> str:
    """Return the SQL table function that reads these Parquet files as one table, in their order.

    A folder named ``seed=7`` adds no column. With ``places``, the columns ``filename`` and
    ``file_row_number`` say where each row stands.
    """
    return (
        f"read_parquet({path_list_sql(paths)}, hive_partitioning = false"
        f"{', filename = true, file_row_number = true' if places else ''})"
    )


def path_list_sql(paths: Sequence[AnyPath]) -> str:
    """Return these paths as an SQL list.

    A path that holds a glob character would be read as a pattern, so such characters are bracketed.
    """
    return f"[{', '.join(quote(_literal_glob(path)) for path in paths)}]"


def _literal_glob(path: AnyPath) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in str(path))
