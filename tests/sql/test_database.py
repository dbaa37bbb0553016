"""``STORE/hexdata.duckdb``: DuckDB reads the store through it from any folder."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from pathlib import Path

import duckdb
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.sql import DATABASE_NAME, open_catalog, write_database
from hexdata.sql.views import VIEWS
from hexdata.store import Store
from tests.pairs import FULL

COUNTS = ", ".join(f"(SELECT count(*) FROM {view})" for view in VIEWS)
QUERY = f"SELECT {COUNTS}, (SELECT sum(rank) FROM shuffled), (SELECT min(trmph(game_id)) FROM games)"


def in_duckdb(database: object, *statements: str) -> str:
    """Run statements with DuckDB alone; return the last result or the error."""
    with duckdb.connect(str(database), read_only=database != ":memory:") as con:
        try:
            for statement in statements:
                con.execute(statement)
            return str(con.fetchall())
        except duckdb.Error as error:
            return str(error)


def expected_of(store: Path) -> str:
    with open_catalog(store, memory=500_000_000) as con:
        return str(con.sql(QUERY).fetchall())


@pytest.fixture
def store(tmp_path: Path, stores: dict[str, Path]) -> Path:
    """A store with all stages, in a folder whose name has unusual characters."""
    return shutil.copytree(stores["exported"], tmp_path / "st*r [a] b,c's\nd")


def test_it_opens_from_any_folder(tmp_path: Path, store: Path, monkeypatch) -> None:
    expected = expected_of(store)
    for folder, database in (
        (Path("/"), store / DATABASE_NAME),
        (store, Path(DATABASE_NAME)),
        (store / "games", Path("..") / DATABASE_NAME),
        (tmp_path, Path(store.name) / DATABASE_NAME),
    ):
        monkeypatch.chdir(folder)
        assert in_duckdb(database, QUERY) == expected, folder
    assert not list(store.glob(f"{DATABASE_NAME}.*"))


def test_another_database_or_temporary_folder_needs_the_folder_of_the_store(
    tmp_path: Path, stores: dict[str, Path], monkeypatch
) -> None:
    store = shutil.copytree(stores["exported"], tmp_path / "store")
    expected, database = expected_of(store), store / DATABASE_NAME
    search, spill = f"SET file_search_path = '{store}'", f"SET temp_directory = '{tmp_path}/spill'"
    attach = (f"ATTACH '{database}' AS hexdata (READ_ONLY)", "USE hexdata")
    monkeypatch.chdir(tmp_path)
    for opened, *before in ((":memory:", *attach), (database, spill)):
        assert "No files found" in in_duckdb(opened, *before, "SELECT count(*) FROM games")
        assert in_duckdb(opened, *before, search, QUERY) == expected
    monkeypatch.chdir(store)
    assert in_duckdb(":memory:", *attach, QUERY) == expected


def test_each_stage_updates_it(tmp_path: Path, demo_trmph) -> None:
    demo_trmph(tmp_path / "games", games=12, files=1)
    store, content = tmp_path / "store", set()
    for stage in (
        lambda: convert_sources(tmp_path / "games", store, ConvertOptions(workers=1)),
        lambda: shuffle_store(store, ShuffleOptions(threads=1)),
        lambda: export_shards(store, ExportOptions(workers=1)),
        lambda: shuffle_store(store, ShuffleOptions(seed=1, threads=1)),
    ):
        stage()
        assert in_duckdb(store / DATABASE_NAME, QUERY) == expected_of(store)
        content.add((store / DATABASE_NAME).read_bytes())
    assert len(content) == 3  # another seed over as many buckets changes no name and no number of rows
    (store / DATABASE_NAME).unlink()
    assert shuffle_store(store, ShuffleOptions(seed=1, threads=1)).already_done
    assert (store / DATABASE_NAME).is_file()


def test_the_same_store_gives_the_same_bytes_once(tmp_path: Path, store: Path) -> None:
    """In any folder. An unchanged database is not written again."""
    database = store / DATABASE_NAME
    before, facts = database.read_bytes(), database.stat()
    write_database(Store.open(store))
    assert (database.stat().st_ino, database.stat().st_mtime_ns) == (facts.st_ino, facts.st_mtime_ns)
    copy = shutil.copytree(store, tmp_path / "copy")
    (copy / DATABASE_NAME).unlink()
    write_database(Store.open(copy))
    assert (copy / DATABASE_NAME).read_bytes() == before
    assert str(tmp_path).encode() not in before


def test_a_store_with_missing_files_has_one(store: Path) -> None:
    shutil.rmtree(store / "positions")
    write_database(Store.open(store))
    assert in_duckdb(store / DATABASE_NAME, "SELECT count(*) > 0 FROM shuffled") == "[(True,)]"
    assert "missing or cut: positions" in in_duckdb(store / DATABASE_NAME, QUERY)


@pytest.mark.parametrize("size", [1_000, 14_000, 60_000] if FULL else [14_000])  # start, commit, end
def test_a_full_disk_of_the_database_is_a_warning_with_its_path(
    store: Path, temporary: Path, monkeypatch, size: int
) -> None:
    """It is created in the system's temporary folder, which may be on another disk than the store."""
    resource = pytest.importorskip("resource")
    (store / DATABASE_NAME).unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a cut file would break every later import
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.warns(UserWarning, match=re.escape(os.strerror(errno.EFBIG))) as caught:
            write_database(Store.open(store))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search(rf"{re.escape(str(temporary))}/hexdata-[\w-]+/{DATABASE_NAME}", str(caught[0].message))
    assert list(temporary.iterdir()) == []
    assert not (store / DATABASE_NAME).exists()
