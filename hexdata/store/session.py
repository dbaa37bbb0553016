"""The DuckDB session: the only module that opens a connection and sets its limits."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

import duckdb
from duckdb import DuckDBPyConnection

from hexdata.errors import BudgetError, StoreError
from hexdata.retry import DISK_FULL, TRANSIENT
from hexdata.storage import AnyPath, storage_of
from hexdata.system import before_fork
from hexdata.temporary import temporary_folder

__all__ = [
    "QUERY_ERRORS",
    "DuckDBPyConnection",
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
_WORK: Final = "session"
"""Name of the database in which a session creates its tables and views."""
_MAX_IDLE: Final = 2
_idle: Final[list[DuckDBPyConnection]] = []
"""Instances of ended sessions, for later ones: DuckDB takes 11 ms to start a new one."""
_DISK_EXCEPTIONS: Final = (duckdb.IOException, duckdb.TransactionException, duckdb.FatalException)
"""Exceptions with such a text: raised on reading or writing, at the end of a transaction, and afterwards."""


@contextmanager
def duckdb_session(
    *,
    memory: int,
    threads: int,
    spill: Path | None = None,
    store: AnyPath | None = None,
    own_instance: bool = False,
) -> Iterator[DuckDBPyConnection]:
    """Open an in-memory DuckDB connection.

    Insertion order is not preserved, so a query that needs an order must state it. A session may use the
    instance of an ended one, but nothing that was created in it.

    Args:
        memory: Bytes for DuckDB's buffer manager, at least 32 MiB. Parquet buffers and Arrow batches are not
            included.
        threads: Number of worker threads.
        spill: Folder in which the session creates a temporary folder, removed at the end; None for the
            system's folder (default).
        store: A path of the store to query. An object store is read through its file system. None if no store
            is queried (default).
        own_instance: Whether this session changes settings, so that no other one may use its instance
            (default: False).

    Yields:
        The connection.

    Raises:
        BudgetError: A query needs more memory.
        OSError: A disk is full or has failed; the error has its number.
        StoreError: A query has failed, for example on a corrupt file.
        KeyboardInterrupt: The user has interrupted a query.
    """
    with temporary_folder("duckdb", spill) as folder:
        temporary = str(folder.resolve())
        settings = {
            "memory_limit": f"{max(memory, 32 << 20)}B",
            "threads": str(threads),
            "temp_directory": temporary,
        }
        is_shared = not own_instance and (store is None or storage_of(store).query_filesystem() is None)
        instance = (_idle_instance(settings) if is_shared else None) or _new_instance(settings)
        connection = instance.cursor()
        has_ended = False
        try:
            if is_shared:
                connection.execute(f"ATTACH ':memory:' AS {_WORK}; USE {_WORK}")
            # A progress bar would be written to standard output. Where it is off, as in Jupyter, DuckDB may
            # refuse the setting.
            if connection.sql("SELECT current_setting('enable_progress_bar')").fetchall() == [(True,)]:
                connection.execute("SET enable_progress_bar = false")
            with (
                _interrupt_on_ctrl_c(connection),
                _register_storage(connection, store),
            ):
                yield connection
            has_ended = True
        except duckdb.OutOfMemoryException as error:
            raise _out_of_memory(error, memory, temporary) from error
        except duckdb.InterruptException as error:
            raise KeyboardInterrupt from error
        except duckdb.Error as error:
            if code := _disk_error_code(error):
                raise _disk_error(code, error, temporary) from error
            raise _failed_query(error) from error
        except MemoryError as error:
            raise _out_of_memory(error, memory, temporary) from error
        except (OSError, ValueError) as error:  # raised by Arrow for streamed rows
            if _OUT_OF_MEMORY in str(error):
                raise _out_of_memory(error, memory, temporary) from error
            if code := _disk_error_code(error):
                raise _disk_error(code, error, temporary) from error
            if _DUCKDB_ERROR.match(str(error)) and getattr(error, "errno", None) is None:
                raise _failed_query(error) from error
            raise
        except RuntimeError as error:
            if str(error) == _INTERRUPTED:
                raise KeyboardInterrupt from error
            raise
        finally:
            connection.close()
            if not (has_ended and is_shared and _keep(instance)):
                instance.close()


def _new_instance(settings: dict[str, str]) -> DuckDBPyConnection:
    fixed = {
        "preserve_insertion_order": "false",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
    }
    return duckdb.connect(":memory:", config={**settings, **fixed})


def _idle_instance(settings: dict[str, str]) -> DuckDBPyConnection | None:
    """Return the instance of an ended session, with these settings; None if there is none."""
    try:
        instance = _idle.pop()
    except IndexError:
        return None
    try:
        instance.execute("; ".join(f"SET {name} = {quote(value)}" for name, value in settings.items()))
    except duckdb.Error:
        instance.close()
        return None
    return instance


def _keep(instance: DuckDBPyConnection) -> bool:
    """Clear the instance of an ended session and keep it for another; return whether this is possible.

    It is not if the session has spilled: DuckDB cannot leave a temporary folder that it has used.
    """
    if len(_idle) >= _MAX_IDLE:
        return False
    try:
        instance.execute(f"DETACH {_WORK}; SET threads = 1; SET temp_directory = ''")
    except duckdb.Error:
        return False
    _idle.append(instance)
    return True


def _close_idle() -> None:
    with suppress(IndexError):  # another thread may take the last one
        while True:
            _idle.pop().close()


before_fork(_close_idle)  # the threads of an instance do not survive a fork


@contextmanager
def _register_storage(connection: DuckDBPyConnection, store: AnyPath | None) -> Iterator[None]:
    """Give a session access to an object store, and raise its original errors instead of DuckDB's."""
    system = None if store is None else storage_of(store).query_filesystem()
    if system is None:
        yield
        return
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
                hint="Run `hexdata verify` to list all missing and damaged files.",
            ) from failure
        raise failure from failure.__cause__


@contextmanager
def _interrupt_on_ctrl_c(connection: DuckDBPyConnection) -> Iterator[None]:
    """Interrupt the running query on Ctrl-C. By default DuckDB's threads would finish their part of it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    handler = _InterruptHandler(connection, before)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    except duckdb.Error as error:  # for example while DuckDB reads rows from Python
        if handler.received:
            raise KeyboardInterrupt from error
        raise
    finally:
        handler.ended = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, _current_handler())


class _InterruptHandler:
    """The signal handler for Ctrl-C of one session. Sessions may end in any order."""

    def __init__(self, connection: DuckDBPyConnection, before: Callable[..., Any]) -> None:
        self.before = before
        self.received = self.ended = False
        self._connection = connection

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.ended:
            self.received = True
            self._connection.interrupt()
        self.before(number, frame)


def _current_handler() -> Any:
    """Return the handler of the latest open session, or the original one if all have ended."""
    handler = signal.getsignal(signal.SIGINT)
    while isinstance(handler, _InterruptHandler) and handler.ended:
        handler = handler.before
    return handler


def _out_of_memory(error: Exception, memory: int, temporary: str) -> BudgetError | OSError:
    """Return the error for a query that ran out of memory or of disk space for spilling."""
    if _SPILL_SETTING in str(error):
        text = _first_line(error).removeprefix(f"{_OUT_OF_MEMORY}: ").removesuffix(".")
        return OSError(errno.ENOSPC, text, temporary)
    return BudgetError(
        "DuckDB ran out of memory",
        found=_first_line(error),
        expected=f"{memory / 1e6:,.0f} MB for DuckDB",
        hint="Raise --memory.",
    )


def _disk_error_code(error: Exception) -> int | None:
    """Return the error number of a disk error that DuckDB reports as text; None for other errors."""
    if not (isinstance(error, _DISK_EXCEPTIONS) or (isinstance(error, OSError) and error.errno is None)):
        return None
    return next((code for code in (*DISK_FULL, *TRANSIENT) if os.strerror(code) in str(error)), None)


def _disk_error(code: int, error: Exception, temporary: str) -> OSError:
    """Return the system's error for DuckDB's text, with the file that the text names.

    A file in the spill folder is named by that folder, which still exists afterwards.
    """
    text = next(line.strip() for line in str(error).splitlines() if os.strerror(code) in line)
    spilled = temporary in text
    named = _FILE_IN_TEXT.search(text)
    return OSError(code, text, temporary if spilled else named and named[1])


def _failed_query(error: Exception) -> StoreError:
    return StoreError(
        "a query failed",
        found=_first_line(error),
        hint="Run `hexdata verify` to check the store for damaged files.",
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def quote(text: str) -> str:
    """Return ``text`` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def read_parquet_sql(paths: Sequence[AnyPath], *, row_location: bool = False, by_name: bool = False) -> str:
    """Return the SQL table function that reads these Parquet files, in order, as one table.

    A folder name such as ``seed=7`` does not add a column.

    Args:
        paths: Files to read.
        row_location: Whether to add the columns ``filename`` and ``file_row_number`` (default: False).
        by_name: Whether files may have different columns; missing ones are NULL (default: False).
    """
    return (
        f"read_parquet({path_list_sql(paths)}, hive_partitioning = false"
        f"{', filename = true, file_row_number = true' if row_location else ''}"
        f"{', union_by_name = true' if by_name else ''})"
    )


def path_list_sql(paths: Sequence[AnyPath]) -> str:
    """Return these paths as an SQL list, with glob characters escaped by brackets."""
    return f"[{', '.join(quote(_literal_glob(path)) for path in paths)}]"


def _literal_glob(path: AnyPath) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in str(path))
