"""``STORE/hexdata.duckdb``: the views and macros for DuckDB itself. Holds no row of the store.

The file names the store's files relative to itself, so it works from any folder and when the store moves.
DuckDB completes relative names from the process's folder, not from the file; but its setting
``temp_directory`` is by default the path of the database that was opened and ``.tmp``, and a view may ask
for a setting.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Final

from hexdata.errors import HexdataError
from hexdata.sql.views import create_catalog
from hexdata.store import Store
from hexdata.store.files import write_bytes
from hexdata.store.room import naming_full
from hexdata.store.session import duckdb_session, quote

__all__ = ["DATABASE_NAME", "write_database"]

DATABASE_NAME: Final = "hexdata.duckdb"
_ROOT: Final = (
    "regexp_extract(current_setting('temp_directory'), "
    r"'(?s)^((.*[/\\])?)[^/\\]*[.]duckdb[^/\\]*[.]tmp$', 1)"
)
"""The folder of the database that was opened, as SQL.

No text where another temporary folder is set or the file was attached to another database: the names of the
store's files are then looked up in ``file_search_path`` and in the process's folder.
"""
_STORAGE: Final = "v1.2.0"
"""The oldest DuckDB that is to read the file."""
_MEMORY: Final = 64 << 20


def write_database(store: Store) -> None:
    """Write ``STORE/hexdata.duckdb`` for what the manifest names now, atomically, if it says something else.

    It can be made again at any time from the rest, so no manifest names it. Call it last in a stage, while
    the store is locked. The same manifest and release of DuckDB give the same bytes.

    Not in an object store, where DuckDB could not open it. Where it cannot be written, the stage is complete
    all the same, and a warning says so.
    """
    if not isinstance(store.path, Path):
        return
    try:
        _write(store, store.path / DATABASE_NAME)
    except (OSError, HexdataError) as error:
        warnings.warn(
            f"{DATABASE_NAME} was not written, the stage is complete: {error}. Run the stage again to "
            "write it.",
            stacklevel=2,
        )


def _write(store: Store, published: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="hexdata-") as folder,
        naming_full(path := Path(folder) / DATABASE_NAME),
        duckdb_session(memory=_MEMORY, threads=1) as con,
    ):
        con.execute(f"ATTACH {quote(str(path))} AS hexdata (STORAGE_VERSION {quote(_STORAGE)})")
        con.execute("USE hexdata")
        con.execute(f"SET temp_directory = {quote(f'{store.path.resolve() / DATABASE_NAME}.tmp')}")
        create_catalog(con, store, _ROOT)
        con.execute("USE memory")
        con.execute("DETACH hexdata")
        content = path.read_bytes()
        if not published.is_file() or published.read_bytes() != content:
            write_bytes(published, content)
