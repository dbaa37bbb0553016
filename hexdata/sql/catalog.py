"""A DuckDB session that shows a store as views and macros. Writes nothing into the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from hexdata.remote import AnyPath, prefix_of
from hexdata.sql.views import create_catalog
from hexdata.store import Store
from hexdata.store.limits import QueryLimits
from hexdata.store.room import telling_full_temporary
from hexdata.store.session import DuckDBPyConnection, duckdb_session, path_list_sql, quote

__all__ = ["Limits", "open_catalog"]


@dataclass(frozen=True)
class Limits(QueryLimits):
    """What queries may use: ``memory`` in bytes, and ``threads`` of DuckDB."""

    BASE: ClassVar[int] = 200 << 20
    BUFFERS: ClassVar[int] = 0
    THREAD: ClassVar[int] = 60 << 20
    THREAD_BUFFERS: ClassVar[int] = 100 << 20
    """To group millions of games; what is more is spilled."""


@contextmanager
def open_catalog(
    store: str | AnyPath | Store, *, memory: int, threads: int | None = None
) -> Iterator[DuckDBPyConnection]:
    """Open a session with the views ``VIEWS`` and the macros ``MACROS`` over a store.

    The session reads the files that the manifest names, and no other; it writes none, and its settings are
    locked.

    Views of a stage that has not run are there, and empty.

    Args:
        store: the store, its folder, or its address.
        memory: bytes for everything together, as ``Limits`` has it.
        threads: of DuckDB; None for one a core, as far as ``memory`` allows.

    Raises:
        StoreError: there is no store, or a query fails; a file of the store is damaged, for instance.
        BudgetError: the memory is too small, or the disk full that rows are spilled to.
    """
    limits = Limits(memory, threads)
    opened = store if isinstance(store, Store) else Store.open(store)
    with (
        telling_full_temporary(),
        duckdb_session(**limits.share(opened.path)._asdict(), place=opened.path) as con,
    ):
        _close_in(con, opened)
        create_catalog(con, opened, quote(prefix_of(opened.path.resolve())))
        yield con


def _close_in(con: DuckDBPyConnection, store: Store) -> None:
    """Leave the session nothing but the files that the store's manifest names, for reading.

    Each is named twice: as it is, and as the pattern by which a view finds it. The settings are locked after
    this.
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
