"""A DuckDB session that shows a store as views and macros. Writes nothing into the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hexdata.errors import BudgetError, ConfigError
from hexdata.pool import default_workers
from hexdata.sql.views import catalog_sql
from hexdata.store import Store
from hexdata.store.session import DuckDBPyConnection, duckdb_session, quote

__all__ = ["Limits", "open_catalog"]

BASE_MEMORY: Final = 200 << 20
"""Bytes held besides DuckDB's buffers: interpreter, libraries, Arrow batches, as measured."""
THREAD_MEMORY: Final = 60 << 20
"""Bytes that a thread of DuckDB holds besides, reading Parquet."""
THREAD_BUFFERS: Final = 100 << 20
"""Bytes of DuckDB's buffers that a thread needs to group millions of games; what is more is spilled."""


@dataclass(frozen=True)
class Limits:
    """What queries may use.

    Attributes:
        memory: bytes for everything together. What does not fit is spilled to the system's temporary
            folder (``TMPDIR``), never into the store, which may be read-only.
        threads: of DuckDB; None for one a core, as far as ``memory`` allows.

    Raises:
        ConfigError: on a value out of range.
        BudgetError: the memory is too small for so many threads, or for one.
    """

    memory: int = 1_000_000_000
    threads: int | None = None

    def __post_init__(self) -> None:
        threads = 1 if self.threads is None else self.threads
        if threads < 1:
            raise ConfigError("threads must be at least 1", found=self.threads)
        least = BASE_MEMORY + threads * (THREAD_MEMORY + THREAD_BUFFERS)
        if self.memory < least:
            raise BudgetError(
                f"too little memory for queries with {threads} thread{'s' if threads > 1 else ''}",
                found=f"{self.memory / 1e6:,.0f} MB",
                expected=f"at least {least / 1e6:,.0f} MB",
                cure="Raise --memory, or lower --threads.",
            )

    @property
    def duckdb_threads(self) -> int:
        """Threads of DuckDB."""
        room = (self.memory - BASE_MEMORY) // (THREAD_MEMORY + THREAD_BUFFERS)
        return self.threads or min(default_workers(), room)

    @property
    def duckdb_memory(self) -> int:
        """Bytes for DuckDB's buffers."""
        return self.memory - BASE_MEMORY - self.duckdb_threads * THREAD_MEMORY


@contextmanager
def open_catalog(
    store: str | Path, *, memory: int, threads: int | None = None
) -> Iterator[DuckDBPyConnection]:
    """Open a session with the views ``VIEWS`` and the macros ``MACROS`` over a store.

    Views of a stage that has not run are there, and empty.

    Args:
        store: the store's folder.
        memory: bytes for everything together, as ``Limits`` has it.
        threads: of DuckDB; None for one a core, as far as ``memory`` allows.

    Raises:
        StoreError: there is no store, or a query fails; a file of the store is damaged, for instance.
        BudgetError: the memory is too small.
    """
    limits, opened = Limits(memory, threads), Store.open(store)
    with duckdb_session(memory=limits.duckdb_memory, threads=limits.duckdb_threads) as con:
        root = quote(f"{opened.path.resolve()}/")
        for statement in catalog_sql(opened, root):
            con.execute(statement)
        yield con
