"""A read-only DuckDB session with views and macros over a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from hexdata.sql.views import catalog_statements, create_catalog
from hexdata.storage import AnyPath, prefix_of
from hexdata.store import Store
from hexdata.store.disk_space import translate_temporary_disk_full
from hexdata.store.limits import QueryLimits
from hexdata.store.session import DuckDBPyConnection, duckdb_session, path_list_sql, quote

__all__ = ["SqlLimits", "open_catalog"]


@dataclass(frozen=True)
class SqlLimits(QueryLimits):
    """SqlLimits of the queries over a store: ``memory`` in bytes and ``threads`` of DuckDB."""

    BASE: ClassVar[int] = 200 << 20
    BUFFERS: ClassVar[int] = 0
    THREAD: ClassVar[int] = 60 << 20
    THREAD_BUFFERS: ClassVar[int] = 100 << 20
    """Enough to group millions of games; larger queries spill to disk."""


@contextmanager
def open_catalog(
    store: str | AnyPath | Store, *, memory: int, threads: int | None = None
) -> Iterator[DuckDBPyConnection]:
    """Open a session with the views ``VIEWS`` and the macros ``MACROS`` over a store.

    The session can read only the files in the manifest, writes no files, and its settings are locked. Views
    of stages that have not run are empty.

    Args:
        store: Store, its folder or its address.
        memory: Total memory in bytes, as in ``SqlLimits``.
        threads: Number of DuckDB threads; None for one per core, as far as ``memory`` allows (default).

    Yields:
        The DuckDB connection.

    Raises:
        ConfigError: An argument is out of range.
        StoreError: There is no store, or a query fails, for example because a file of the store is damaged.
        BudgetError: The memory is too small, or the disk for spilled rows is full.
    """
    limits = SqlLimits(memory, threads)
    opened = store if isinstance(store, Store) else Store.open(store)
    with (
        translate_temporary_disk_full(),
        duckdb_session(**limits.session(opened.path)._asdict(), store=opened.path, own_instance=True) as con,
    ):
        _close_in(con, opened)
        create_catalog(con, opened, catalog_statements(opened, quote(prefix_of(opened.path.resolve()))))
        yield con


def _close_in(con: DuckDBPyConnection, store: Store) -> None:
    """Restrict the session to reading the files in the store's manifest, and lock its settings.

    Each file is allowed under two forms: its plain path, and the escaped pattern that the views use.
    """
    paths = [store.path.resolve() / name for name in store.manifest.files]
    allowed = f"{path_list_sql(paths)} || [{', '.join(quote(str(path)) for path in paths)}]"
    for statement in (
        "SET preserve_insertion_order = true",
        "SET python_enable_replacements = false",
        f"SET allowed_paths = {allowed}",
        "SET enable_external_access = false",
        "SET lock_configuration = true",
    ):
        con.execute(statement)
