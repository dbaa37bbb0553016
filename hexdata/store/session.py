"""The DuckDB session: the one place that opens a connection and sets its limits."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import duckdb
from duckdb import DuckDBPyConnection

from hexdata.errors import BudgetError, StoreError

__all__ = ["DuckDBPyConnection", "duckdb_session", "path_list_sql", "quote", "read_parquet_sql"]

_INTERRUPTED: Final = "Query interrupted"
"""What DuckDB makes of a Ctrl-C: a RuntimeError that says this."""


@contextmanager
def duckdb_session(*, memory: int, threads: int, spill: Path | None = None) -> Iterator[DuckDBPyConnection]:
    """Open an in-memory DuckDB for one piece of work.

    Args:
        memory: bytes for DuckDB's buffer manager. Parquet buffers and Arrow batches come on top.
        threads: worker threads.
        spill: folder below which the session makes its own absolute temporary folder, removed at the
            end; None takes the system's.

    DuckDB keeps insertion order off: every query here that needs an order says so.

    Raises:
        BudgetError: a query needs more memory.
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
            connection.execute("SET enable_progress_bar = false")  # it would go to standard output
            with _interrupting(connection):
                yield connection
        except duckdb.OutOfMemoryException as error:
            raise BudgetError(
                "DuckDB ran out of the memory it was given",
                found=_first_line(error),
                expected=f"{memory / 1e6:,.0f} MB for DuckDB",
                cure="Raise --memory.",
            ) from error
        except duckdb.InterruptException as error:
            raise KeyboardInterrupt from error
        except duckdb.Error as error:
            raise StoreError("a query failed", found=_first_line(error)) from error
        except RuntimeError as error:
            if str(error) == _INTERRUPTED:
                raise KeyboardInterrupt from error
            raise
        finally:
            connection.close()


@contextmanager
def _interrupting(connection: DuckDBPyConnection) -> Iterator[None]:
    """Let Ctrl-C stop a query at once: left alone, DuckDB's threads finish their part of it first."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        connection.interrupt()
        before(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def quote(text: str) -> str:
    """Return ``text`` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def read_parquet_sql(paths: list[Path], *, places: bool = False) -> str:
    """Return the SQL table function that reads these Parquet files as one table, in their order.

    A folder named ``seed=7`` adds no column. With ``places``, the columns ``filename`` and
    ``file_row_number`` say where each row stands.
    """
    return (
        f"read_parquet({path_list_sql(paths)}, hive_partitioning = false"
        f"{', filename = true, file_row_number = true' if places else ''})"
    )


def path_list_sql(paths: list[Path]) -> str:
    """Return these paths as an SQL list.

    A path that holds a glob character would be read as a pattern, so such characters are bracketed.
    """
    return f"[{', '.join(quote(_literal_glob(path)) for path in paths)}]"


def _literal_glob(path: Path) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in str(path))
