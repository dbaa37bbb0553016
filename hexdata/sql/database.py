"""The database file ``STORE/hexdata.duckdb``: views and macros for the DuckDB shell, without any rows.

The views find the store's files relative to the database file, so it works from any folder and after the
store is moved. DuckDB itself resolves relative paths from the folder of the process. The views therefore use
the setting ``temp_directory``, which by default is the path of the opened database followed by ``.tmp``.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Final

from hexdata.errors import HexdataError
from hexdata.retry import on_disk, repeats_on_disk
from hexdata.sql.views import catalog_statements, create_catalog
from hexdata.storage import add_path_to_disk_full, storage_of
from hexdata.store import Store
from hexdata.store.files import write_bytes
from hexdata.store.session import duckdb_session, quote
from hexdata.temporary import temporary_folder

__all__ = ["DATABASE_NAME", "write_database"]

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
_MAX_CONTENTS: Final = 16
_MAX_STATEMENTS: Final = 1 << 18
"""Maximum number of characters of the statements of a file whose content is kept."""
_contents: Final[dict[tuple[str, ...], bytes]] = {}
"""Contents of the latest files, 0.3 MB each, by their statements: DuckDB takes 25 ms to make one."""


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
    try:
        _write(store, published)
    except (OSError, HexdataError) as error:
        warnings.warn(
            f"{DATABASE_NAME} was not written, the stage is complete: {error}. Run the stage again to "
            "write it.",
            stacklevel=2,
        )


def _write(store: Store, published: Path) -> None:
    statements = catalog_statements(store, _ROOT)
    content = _contents.get(statements)
    if content is None:
        content = _create(store, statements)
        if sum(map(len, statements)) <= _MAX_STATEMENTS:
            _contents[statements] = content
        if len(_contents) > _MAX_CONTENTS:
            _contents.pop(next(iter(_contents)), None)
    if not published.is_file() or on_disk(published.read_bytes) != content:
        write_bytes(published, content)


@repeats_on_disk
def _create(store: Store, statements: tuple[str, ...]) -> bytes:
    """Return the content of the file with these views and macros."""
    with (
        temporary_folder("views") as folder,
        add_path_to_disk_full(path := folder / DATABASE_NAME),
        duckdb_session(memory=_MEMORY, threads=1) as con,
    ):
        con.execute(f"ATTACH {quote(str(path))} AS hexdata (STORAGE_VERSION {quote(_STORAGE)})")
        con.execute("USE hexdata")
        con.execute(f"SET temp_directory = {quote(f'{store.path.resolve() / DATABASE_NAME}.tmp')}")
        con.execute("BEGIN")  # one transaction is synced once
        create_catalog(con, store, statements)
        con.execute("COMMIT")
        con.execute("USE memory")
        con.execute("DETACH hexdata")
        return path.read_bytes()
