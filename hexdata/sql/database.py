"""The database file ``STORE/hexdata.duckdb``: views and macros for the DuckDB shell, without any rows.

The views find the store's files relative to the database file, so it works from any folder and after the
store is moved. DuckDB itself resolves relative paths from the folder of the process. The views therefore use
the setting ``temp_directory``, which by default is the path of the opened database followed by ``.tmp``.
"""

from __future__ import annotations

from typing import Final

from hexdata.retry import on_disk, repeats_on_disk
from hexdata.sql.views import catalog_statements, create_catalog
from hexdata.storage import storage_of
from hexdata.storage.errors import add_path_to_error
from hexdata.store import Store
from hexdata.store.files import may_be_missing, write_bytes
from hexdata.store.session import duckdb_session, quote
from hexdata.temporary import temporary_folder

DATABASE_NAME: Final = "hexdata.duckdb"
_ROOT: Final = (
    "regexp_extract(current_setting('temp_directory'), "
    r"'(?s)^((.*[/\\])?)[^/\\]*[.]duckdb[^/\\]*[.]tmp$', 1)"
)
"""SQL expression for the folder of the opened database.

It is an empty text if another temporary folder is set or the file was attached to another database. File
names are then resolved through ``file_search_path`` and the folder of the process.
"""
_STORAGE: Final = "v1.2.0"
"""Storage version of the oldest DuckDB release that can read the file."""
_MEMORY: Final = 64 << 20


def write_database(store: Store) -> None:
    """Write ``STORE/hexdata.duckdb`` for the current manifest, atomically, if its content has changed.

    Call this last in a stage, while the store is locked. The file is not in the manifest because it can be
    recreated at any time. The same manifest and DuckDB release give the same bytes.

    Nothing is written in an object store, where DuckDB could not open the file. If the file cannot be
    written, a warning is issued and the stage is complete.
    """
    published = storage_of(store.path / DATABASE_NAME).local
    if published is None:
        return
    with may_be_missing(DATABASE_NAME):
        content = _create(store)
        if not published.is_file() or on_disk(published.read_bytes) != content:
            write_bytes(published, content)


@repeats_on_disk
def _create(store: Store) -> bytes:
    """Return the content of the file with the views and macros of a store."""
    with (
        temporary_folder("views") as folder,
        add_path_to_error(path := folder / DATABASE_NAME),
        duckdb_session(memory=_MEMORY, threads=1) as con,
    ):
        con.execute(f"ATTACH {quote(str(path))} AS hexdata (STORAGE_VERSION {quote(_STORAGE)})")
        con.execute("USE hexdata")
        # The views are checked when they are created, so the files must be found as in the opened database.
        con.execute(f"SET temp_directory = {quote(f'{store.path.resolve() / DATABASE_NAME}.tmp')}")
        con.execute("BEGIN")  # one transaction is synced once
        create_catalog(con, store, catalog_statements(store, _ROOT))
        con.execute("COMMIT")
        con.execute("USE memory")
        con.execute("DETACH hexdata")
        return path.read_bytes()
