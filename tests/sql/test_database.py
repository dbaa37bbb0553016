"""``STORE/hexdata.duckdb``: DuckDB reads the store through it from any folder."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.sql import DATABASE_NAME, open_catalog, write_database
from hexdata.sql import database as database_module
from hexdata.sql.views import VIEWS
from hexdata.store import Store
from hexdata.verify import verify_store

COUNTS = ", ".join(f"(SELECT count(*) FROM {view})" for view in VIEWS)
QUERY = f"SELECT {COUNTS}, (SELECT sum(rank) FROM shuffled), (SELECT min(trmph(game_id)) FROM games)"


def in_duckdb(folder: Path, *statements: str, database: str = ":memory:") -> str:
    """Run statements in a separate DuckDB process in ``folder``; return the last result or the error."""
    code = """
import sys, duckdb
con = duckdb.connect(sys.argv[1], read_only=sys.argv[1] != ":memory:")
for statement in sys.argv[2:]:
    con.execute(statement)
print(con.fetchall())
"""
    command = [sys.executable, "-c", code, database, *statements]
    child = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return child.stdout.strip() if child.returncode == 0 else child.stderr


def facts(store: Path) -> str:
    """Return the expected result of ``QUERY``."""
    with open_catalog(store, memory=500_000_000) as con:
        return str(con.sql(QUERY).fetchall())


@pytest.fixture
def store(tmp_path: Path, stores: dict[str, Path]) -> Path:
    """A store with all stages, in a folder whose name has unusual characters."""
    return shutil.copytree(stores["exported"], tmp_path / "st*r [a] b,c's\nd")


def test_it_opens_from_any_folder(tmp_path: Path, store: Path) -> None:
    expected = facts(store)
    (other := tmp_path / "other").mkdir()
    for folder, database in (
        (other, store / DATABASE_NAME),
        (store, Path(DATABASE_NAME)),
        (store / "games", Path("..") / DATABASE_NAME),
        (tmp_path, Path(store.name) / DATABASE_NAME),
    ):
        assert in_duckdb(folder, QUERY, database=str(database)) == expected, folder
    assert not list(store.glob(f"{DATABASE_NAME}.*"))


def test_it_moves_with_its_store(tmp_path: Path, store: Path) -> None:
    expected = facts(store)
    moved = store.rename(tmp_path / "moved")
    assert in_duckdb(tmp_path, QUERY, database=str(moved / DATABASE_NAME)) == expected


def test_an_attached_database_needs_its_folder(tmp_path: Path, stores: dict[str, Path]) -> None:
    store = shutil.copytree(stores["exported"], tmp_path / "store")
    expected, attach = facts(store), f"ATTACH '{store / DATABASE_NAME}' AS hexdata (READ_ONLY)"
    assert "No files found" in in_duckdb(tmp_path, attach, "SELECT count(*) FROM hexdata.games")
    search = f"SET file_search_path = '{store}'"
    assert in_duckdb(tmp_path, attach, search, "USE hexdata", QUERY) == expected
    assert in_duckdb(store, attach, "USE hexdata", QUERY) == expected


def test_another_temporary_folder_needs_the_store_folder(tmp_path: Path, stores: dict[str, Path]) -> None:
    store = shutil.copytree(stores["exported"], tmp_path / "store")
    expected, database = facts(store), str(store / DATABASE_NAME)
    spill, search = f"SET temp_directory = '{tmp_path}/spill'", f"SET file_search_path = '{store}'"
    assert "No files found" in in_duckdb(tmp_path, spill, QUERY, database=database)
    assert in_duckdb(tmp_path, spill, search, QUERY, database=database) == expected


def test_each_stage_updates_it(tmp_path: Path, demo_trmph: Callable[..., list[Path]]) -> None:
    demo_trmph(tmp_path / "games", games=12, files=2)
    store = tmp_path / "store"
    content = set()
    for stage in (
        lambda: convert_sources(tmp_path / "games" / "demo-00.trmph", store, ConvertOptions(workers=1)),
        lambda: convert_sources(tmp_path / "games", store, ConvertOptions(workers=1)),
        lambda: shuffle_store(store, ShuffleOptions(threads=1)),
        lambda: export_shards(store, ExportOptions(workers=1)),
        lambda: shuffle_store(store, ShuffleOptions(seed=1, threads=1)),
    ):
        stage()
        with duckdb.connect(store / DATABASE_NAME, read_only=True) as con:
            assert str(con.sql(QUERY).fetchall()) == facts(store)
        content.add((store / DATABASE_NAME).read_bytes())
    assert len(content) == 4  # another seed over as many buckets changes no name and no number of rows
    (store / DATABASE_NAME).unlink()
    assert shuffle_store(store, ShuffleOptions(seed=1, threads=1)).already_done
    assert (store / DATABASE_NAME).is_file()


def test_it_is_not_part_of_the_dataset(store: Path) -> None:
    assert DATABASE_NAME not in Store.open(store).manifest.files
    assert verify_store(store).ok
    (store / DATABASE_NAME).write_bytes(b"no database")
    assert verify_store(store).ok
    assert facts(store)


def test_the_same_store_gives_the_same_bytes_in_any_folder(tmp_path: Path, store: Path) -> None:
    before = (store / DATABASE_NAME).read_bytes()
    copy = shutil.copytree(store, tmp_path / "copy")
    (copy / DATABASE_NAME).unlink()
    database_module._contents.clear()
    write_database(Store.open(copy))
    assert (copy / DATABASE_NAME).read_bytes() == before
    assert str(tmp_path).encode() not in before


def test_one_process_creates_the_latest_databases_once(
    tmp_path: Path, store: Path, stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "_contents", contents := {})
    monkeypatch.setattr(database_module, "_MAX_CONTENTS", 1)
    opened, before = Store.open(store), (store / DATABASE_NAME).read_bytes()
    write_database(opened)
    with monkeypatch.context() as patch:
        patch.setattr(database_module, "duckdb_session", lambda **_: pytest.fail("created again"))
        (store / DATABASE_NAME).unlink()
        write_database(opened)
        assert (store / DATABASE_NAME).read_bytes() == before
        (store / DATABASE_NAME).write_bytes(b"no database")
        write_database(opened)
        assert (store / DATABASE_NAME).read_bytes() == before
    write_database(Store.open(shutil.copytree(stores["converted"], tmp_path / "converted")))
    assert len(contents) == 1


def test_an_unchanged_database_is_not_written_again(store: Path) -> None:
    before = (store / DATABASE_NAME).stat()
    write_database(Store.open(store))
    after = (store / DATABASE_NAME).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_store_without_positions_has_one(stores: dict[str, Path]) -> None:
    for kind in ("none", "one"):
        assert in_duckdb(stores[kind], QUERY, database=DATABASE_NAME) == facts(stores[kind])


def test_a_store_with_missing_files_has_one(tmp_path: Path, store: Path) -> None:
    shutil.rmtree(store / "positions")
    write_database(Store.open(store))
    database = str(store / DATABASE_NAME)
    assert in_duckdb(tmp_path, "SELECT count(*) > 0 FROM shuffled", database=database) == "[(True,)]"
    assert "missing or cut: positions" in in_duckdb(tmp_path, QUERY, database=database)


LIMITED = """
import resource, sys, warnings
from hexdata.sql import write_database
from hexdata.store import Store

store = Store.open(sys.argv[1])
size = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
with warnings.catch_warnings(record=True) as caught, store.writing("export"):
    warnings.simplefilter("always")
    write_database(store)
sys.stderr.write("\\n".join(str(warning.message) for warning in caught))
"""
"""Writes the database with a maximum file size in bytes.

It writes no bytecode: Python would leave cut files of it, which break every later import of the module.
"""


@pytest.mark.parametrize("size", [1_000, 14_000, 60_000])  # met at the start, in a commit, at the end
def test_a_full_disk_of_the_database_is_a_warning_with_its_path(
    store: Path, tmp_path: Path, size: int
) -> None:
    """It is created in the system's temporary folder, which may be on another disk than the store."""
    (store / DATABASE_NAME).unlink()
    folder = tmp_path / "temporary"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(store), str(size)],
        env={**os.environ, "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    named = re.fullmatch(
        rf"{DATABASE_NAME} was not written, the stage is complete: (.+)\. Run the stage again to write it\.",
        done.stderr,
        re.DOTALL,
    )
    assert named, done.stderr
    assert os.strerror(errno.EFBIG) in named[1]
    assert re.search(rf"{re.escape(str(folder))}/hexdata-[\w-]+/{DATABASE_NAME}", named[1])
    assert list(folder.iterdir()) == []
    assert not (store / DATABASE_NAME).exists()
