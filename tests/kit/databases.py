"""In-memory databases of DuckDB for one session after another: to create one takes 15 ms."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

import duckdb

from hexdata.store import session

__all__ = ["databases_used_again"]

LEFT = """
SELECT format('DROP TABLE "{}"', table_name) FROM duckdb_tables() WHERE database_name = 'memory'
UNION ALL
SELECT format('DROP VIEW "{}"', view_name) FROM duckdb_views() WHERE database_name = 'memory' AND NOT internal
"""
"""The statements that remove what a session has created."""
RESET = """
RESET disabled_optimizers;
SET enable_external_file_cache = false;
SET enable_external_file_cache = true
"""


@contextmanager
def databases_used_again() -> Iterator[None]:
    """Give a session with one thread the database of an earlier one, without its tables and views.

    A database is closed if its session failed, spilled, locked its settings or registered a file system.
    A child process leaves those of its parent alone, whose threads it lacks.
    """
    connect, owners = duckdb.connect, {}
    of_processes: dict[int, list[Any]] = {}

    def take(database: str = ":memory:", *, config: Any = None, **others: Any) -> Any:
        if database != ":memory:" or (config or {}).get("threads") != "1":
            return connect(database, config=config or {}, **others)
        kept = of_processes.get(os.getpid())
        owner = kept.pop() if kept else connect(database, config=config)
        try:
            for name in ("memory_limit", "temp_directory"):
                owner.execute(f"SET {name} = {session.quote(config[name])}")
        except duckdb.Error:  # the earlier session has spilled
            owner.close()
            return take(database, config=config)
        taken = owner.cursor()
        owners[id(taken)] = owner
        return taken

    @contextmanager
    def closing(taken: Any) -> Iterator[Any]:
        owner, is_sound = owners.pop(id(taken), None), False
        try:
            yield taken
            is_sound = not taken.list_filesystems()
        finally:
            taken.close()
            with suppress(duckdb.Error):  # locked settings
                if owner is not None and is_sound:
                    owner.execute(RESET)
                    for (statement,) in owner.execute(LEFT).fetchall():
                        owner.execute(statement)
                    of_processes.setdefault(os.getpid(), []).append(owner)
                    owner = None
            if owner is not None:
                owner.close()

    with patch.object(duckdb, "connect", take), patch.object(session, "closing", closing):
        yield
    for owner in of_processes.get(os.getpid(), ()):
        owner.close()
