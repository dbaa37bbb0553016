"""The DuckDB session: the one place that opens a connection and sets its limits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

__all__ = ["duckdb_session", "quote", "read_parquet_sql"]


@contextmanager
def duckdb_session(
    *, memory: int, threads: int, spill: Path | None = None
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an in-memory DuckDB for one piece of work.

    Args:
        memory: bytes for DuckDB's buffer manager. Parquet buffers and Arrow batches come on top.
        threads: worker threads.
        spill: folder below which the session makes its own absolute temporary folder, removed at the
            end; None takes the system's.

    DuckDB keeps insertion order off: every query here that needs an order says so.
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
            yield connection
        finally:
            connection.close()


def quote(text: str) -> str:
    """Return ``text`` as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def read_parquet_sql(paths: list[Path], *, filename: bool = False) -> str:
    """Return the SQL table function that reads these Parquet files as one table, in their order.

    A path that holds a glob character would be read as a pattern, so such characters are bracketed.
    With ``filename``, a column of that name holds each row's path.
    """
    listed = ", ".join(quote(_literal_glob(path)) for path in paths)
    return f"read_parquet([{listed}]{', filename = true' if filename else ''})"


def _literal_glob(path: Path) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in str(path))
