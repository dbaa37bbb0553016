"""Views contain the rows of the store's files at every stage; views without files are empty."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import BudgetError, ConfigError, StoreError
from hexdata.report import write_report
from hexdata.schema import SPLITS, TARGETS, games_schema, positions_schema, rejected_schema, sources_schema
from hexdata.shards.manifest import ShardManifest
from hexdata.sql import open_catalog, run_query
from hexdata.sql.catalog import SqlLimits
from hexdata.sql.views import MACROS, VIEWS
from hexdata.store import Store
from hexdata.store.files import canonical_json
from hexdata.verify import verify_store

if TYPE_CHECKING:
    from tests.conftest import CopyStore

MEMORY = 500_000_000
SCHEMAS = {
    "positions": positions_schema(5),
    "games": games_schema(),
    "sources": sources_schema(),
    "rejected": rejected_schema(),
}
ADDED = ["split", "bucket", "rank"]
COLUMNS = {name: schema.names for name, schema in SCHEMAS.items()}
COLUMNS["positions"] = [*COLUMNS["positions"], *TARGETS]
"""Columns of views. Those of positions always have the columns in ``TARGETS``."""
SHARD_COLUMNS = ["split", "name", "number", "first_rank", "positions", "bytes", "sha256"]


def with_entry(store: Path, file: str, key: str, value: object) -> None:
    """Change one entry of the manifest, and its digest with it, as an attacker would."""
    content = json.loads((store / "manifest.json").read_bytes())
    del content["digest"]
    content["files"][file][key] = value
    content["digest"] = hashlib.sha256(canonical_json(content)).hexdigest()
    (store / "manifest.json").write_bytes(canonical_json(content))


def query(store: Path) -> None:
    with run_query(store, "SELECT 1") as result:
        list(result.batches)


ASK = {"sql": query, "report": write_report, "verify": verify_store}


@pytest.mark.parametrize("key", ["rows", "bytes", "sha256"])
@pytest.mark.parametrize("ask", ASK)
def test_texts_of_a_manifest_are_not_executed(
    stores: dict[str, Path], copy_store: CopyStore, tmp_path: Path, ask: str, key: str
) -> None:
    """Such a text used to end the list of shards and to run a COPY statement."""
    store, target = copy_store(stores["exported"]), tmp_path / "run.pth"
    columns = ", ".join(f'"{name}"' for name in SHARD_COLUMNS)
    for closing in ("0, '')", "')", "0, 0, '')"):
        attack = (
            f"{closing}) AS t ({columns}); COPY (SELECT 'import os') TO '{target}' (HEADER false); "
            "CREATE OR REPLACE VIEW shards AS SELECT * FROM (VALUES ('train', 'x', 0, 0, 0, 0, ''"
        )
        with_entry(store, "shards/train-000000.tar", key, attack)
        with pytest.raises(StoreError, match=rf"files\.shards/train-000000\.tar\.{key}; found .*; expected"):
            ASK[ask](store)
        assert not target.exists()


def test_access_is_restricted_before_views_are_created(stores: dict[str, Path], tmp_path: Path) -> None:
    target, other = tmp_path / "other.csv", tmp_path / "there.csv"
    other.write_text("a")
    with open_catalog(stores["exported"], memory=MEMORY) as con:
        for attack in (
            f"COPY (SELECT 1) TO '{target}'",
            f"FROM read_text('{other}')",
            f"ATTACH '{target}' AS more",
            "SET enable_external_access = true",
            "INSTALL httpfs",
        ):
            with pytest.raises(duckdb.Error, match=r"disabled|locked|external|Permission"):
                con.execute(attack)
        assert con.sql("SELECT count(*) > 0 FROM positions").fetchall() == [(True,)]
    assert not target.exists()


def rows_of(store: Path, folder: str) -> list[dict[str, object]]:
    """Return the rows of a folder's files in order, as Arrow reads them."""
    names = Store.open(store).manifest.files_in(folder)
    nulls = dict.fromkeys(TARGETS if folder == "positions" else ())
    return [row | nulls for name in names for row in pq.read_table(store / name).to_pylist()]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_view_contains_the_rows_of_its_files(any_store: Path, name: str) -> None:
    with open_catalog(any_store, memory=MEMORY) as con:
        found = con.sql(f"FROM {name} ORDER BY ALL").to_arrow_table()
    assert found.schema.names == COLUMNS[name]
    assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, rows_of(any_store, name)))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_view_has_the_same_types_empty_or_not(stores: dict[str, Path], name: str) -> None:
    types = set()
    for store in stores.values():
        with open_catalog(store, memory=MEMORY) as con:
            types.add(str(con.sql(f"FROM {name}").types))
    assert len(types) == 1


def test_shuffled_rows_have_their_split_bucket_and_rank(any_store: Path) -> None:
    expected = []
    for split in SPLITS:
        rank = 0
        files = Store.open(any_store).manifest.files_in(f"shuffled/{split}")
        for bucket, name in enumerate(files):
            for row in pq.read_table(any_store / name).to_pylist():
                expected.append(
                    {"split": split, "bucket": bucket, "rank": rank, **row, **dict.fromkeys(TARGETS)}
                )
                rank += 1
    with open_catalog(any_store, memory=MEMORY) as con:
        order = "list_position(['train', 'val', 'test'], split), rank"
        found = con.sql(f"FROM shuffled ORDER BY {order}").to_arrow_table()
    assert found.schema.names == [*ADDED, *COLUMNS["positions"]]
    assert [found.schema.field(name).type for name in ADDED] == [pa.string(), pa.int32(), pa.int64()]
    assert repr(found.to_pylist()) == repr(expected)


def test_shards_agree_with_their_manifest(stores: dict[str, Path]) -> None:
    manifest = ShardManifest.load(stores["exported"] / "shards")
    expected = []
    for split in SPLITS:
        first = 0
        for number, shard in enumerate(manifest.splits[split]):
            facts = (shard.positions, shard.bytes, shard.sha256)
            expected.append((split, shard.name, number, first, *facts))
            first += shard.positions
    assert len(expected) > len(SPLITS)
    with open_catalog(stores["exported"], memory=MEMORY) as con:
        found = con.sql("FROM shards")
        assert (found.columns, found.fetchall()) == (SHARD_COLUMNS, expected)
    with open_catalog(stores["shuffled"], memory=MEMORY) as con:
        assert (con.sql("FROM shards").columns, con.sql("FROM shards").fetchall()) == (SHARD_COLUMNS, [])


def test_all_listed_views_and_macros_exist(stores: dict[str, Path]) -> None:
    with open_catalog(stores["one"], memory=MEMORY) as con:
        views = con.sql("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()
        macros = con.sql("SELECT function_name FROM duckdb_functions() WHERE schema_name = 'main'").fetchall()
    assert sorted(name for (name,) in views) == sorted(VIEWS)
    assert set(MACROS) <= {name for (name,) in macros}


@pytest.mark.parametrize("name", ["st*r", "br[a]c?ket", "quo'te", "sp ace|pipe", "seed=7", "Stellung-ø"])
def test_a_store_can_be_in_any_folder(tmp_path: Path, stores: dict[str, Path], name: str) -> None:
    store = shutil.copytree(stores["shuffled"], tmp_path / name)
    with open_catalog(store, memory=MEMORY) as con:
        for folder in ("positions", "shuffled"):
            count = con.sql(f"SELECT count(*) FROM {folder}").fetchall()[0][0]
            assert count == len(rows_of(store, folder))


@pytest.mark.parametrize("folder", [*SCHEMAS, "shuffled"])
def test_only_queries_of_a_missing_file_fail(tmp_path: Path, stores: dict[str, Path], folder: str) -> None:
    store = shutil.copytree(stores["shuffled"], tmp_path / "store")
    (lost := next((store / folder).rglob("*.parquet"))).unlink()
    with open_catalog(store, memory=MEMORY) as con:
        others = [name for name in (*SCHEMAS, "shuffled") if name != folder]
        assert all(con.sql(f"SELECT count(*) FROM {name}").fetchall()[0][0] for name in others)
    for asked in ("count(*)", "*"):
        with (
            pytest.raises(StoreError, match=f"missing or cut: {lost.relative_to(store)}"),
            open_catalog(store, memory=MEMORY) as con,
        ):
            con.sql(f"SELECT {asked} FROM {folder}").fetchall()


def test_without_a_store_there_is_no_catalog(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no manifest"), open_catalog(tmp_path, memory=MEMORY):
        pass
    assert list(tmp_path.iterdir()) == []


def test_too_small_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads cannot be used; found 0"):
        SqlLimits(threads=0)
    with pytest.raises(BudgetError, match="with 4 threads; found 500 MB; expected at least"):
        SqlLimits(500_000_000, threads=4)
    least = SqlLimits(400_000_000)
    assert least.session(Path()).threads == 1
    assert 0 < least.session(Path()).memory < 400_000_000


def test_a_session_has_its_limits(stores: dict[str, Path]) -> None:
    limits = SqlLimits(MEMORY, threads=1).session(stores["one"])
    settings = "current_setting('threads'), current_setting('memory_limit')"
    with open_catalog(stores["one"], memory=MEMORY, threads=1) as con:
        threads, memory = con.sql(f"SELECT {settings}").fetchall()[0]
    assert (threads, memory) == (1, f"{limits.memory / 2**20:.1f} MiB")


def test_a_failed_spill_is_a_full_disk(stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = "SET memory_limit = '40MB'; SET max_temp_directory_size = '1MB'"
    monkeypatch.setattr("hexdata.sql.catalog._close_in", lambda con, store: con.execute(settings))
    query = "SELECT max(i) FROM (SELECT i, hash(i) h FROM range(3_000_000) t(i) ORDER BY h)"
    with (
        pytest.raises(
            BudgetError,
            match=r"/hexdata-duckdb-[\w-]+: the disk is full; found failed to .*Free disk space there",
        ),
        open_catalog(stores["exported"], memory=MEMORY, threads=1) as con,
    ):
        con.execute(query).fetchall()
