"""Views contain the rows of the store's files at every stage, and macros agree with ``hexdata.board``."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.board import MAX_SIZE, MIN_SIZE, cell_name, format_moves, pack_boards, split_trmph
from hexdata.errors import StoreError
from hexdata.report import write_report
from hexdata.schema import SPLITS, TARGETS, games_schema, positions_schema, rejected_schema, sources_schema
from hexdata.show import read_position
from hexdata.sql import open_catalog
from hexdata.store.files import canonical_json
from hexdata.store.manifest import Manifest
from hexdata.verify import verify_store
from tests.conftest import odd_positions
from tests.sql.conftest import TARGETS as SEARCHED
from tests.sql.conftest import ask

MEMORY = 500_000_000
COLUMNS = {
    "positions": [*positions_schema(5).names, *TARGETS],  # the last ones exist in the view of every store
    "games": games_schema().names,
    "sources": sources_schema().names,
    "rejected": rejected_schema().names,
}
UNKNOWN = {**dict.fromkeys(TARGETS), "policy_weight": 1.0}
"""What these columns contain where a store has no results of a search."""


def rows_of(store: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows of a file as its view shows them."""
    rows = pq.read_table(store / name).to_pylist()
    if not name.startswith(("positions", "shuffled")):
        return rows
    for row in rows:
        extra = [each for each in row if each.startswith("extra.")]
        row |= {"extra": {each.removeprefix("extra."): row.pop(each) for each in extra}} if extra else {}
    return [UNKNOWN | row for row in rows]


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """Compare rows in any order; NaN equals itself."""
    return sorted(repr(sorted(row.items())) for row in found) == sorted(
        repr(sorted(row.items())) for row in expected
    )


def test_each_view_contains_the_rows_of_its_files(any_store: Path) -> None:
    manifest = Manifest.load(any_store)
    with open_catalog(any_store, memory=MEMORY) as con:
        for view, columns in COLUMNS.items():
            found = con.sql(f"FROM {view}").to_arrow_table()
            names = [name for name in found.schema.names if name != "extra"]
            assert names == columns
            assert ("extra" in found.schema.names) == (view == "positions" and bool(manifest.targets))
            expected = [row for name in manifest.files_in(view) for row in rows_of(any_store, name)]
            assert same(found.to_pylist(), expected), view
        order = "list_position(['train', 'val', 'test'], split), rank"
        shuffled = con.sql(f"FROM shuffled ORDER BY {order}").to_arrow_table()
        shards = con.sql("FROM shards").to_arrow_table()
    added = {"split": pa.string(), "bucket": pa.int32(), "rank": pa.int64()}
    assert shuffled.schema.names[:3] == list(added)
    assert shuffled.schema.types[:3] == list(added.values())
    expected, names = [], []
    for split in SPLITS:
        rank = first = 0
        for bucket, name in enumerate(manifest.files_in(f"shuffled/{split}")):
            for row in rows_of(any_store, name):
                expected.append({"split": split, "bucket": bucket, "rank": rank} | row)
                rank += 1
        of_split = {n: f for n, f in manifest.files_in("shards").items() if n.startswith(f"shards/{split}-")}
        for number, (name, facts) in enumerate(of_split.items()):
            told = (split, name.removeprefix("shards/"), number, first, facts.rows, facts.bytes, facts.sha256)
            names.append(told)
            first += facts.rows
    assert same(shuffled.to_pylist(), expected)
    assert shuffled["rank"].to_pylist() == [row["rank"] for row in expected]
    assert shards.schema.names == ["split", "name", "number", "first_rank", "positions", "bytes", "sha256"]
    assert [tuple(row.values()) for row in shards.to_pylist()] == names
    assert any_store.name != "exported" or len(names) > 3


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


@pytest.mark.parametrize("key", ["rows", "bytes", "sha256"])
def test_texts_of_a_manifest_are_not_executed(stores, copy_store, tmp_path, key) -> None:
    """Such a text used to end the list of shards and to run a COPY statement."""
    store, target = copy_store(stores["exported"]), tmp_path / "run.pth"
    for closing in ("0, '')", "')", "0, 0, '')"):
        attack = (
            f"{closing}) AS t (split, name, number, first_rank, positions, bytes, sha256); "
            f"COPY (SELECT 'import os') TO '{target}' (HEADER false); "
            "CREATE OR REPLACE VIEW shards AS SELECT * FROM (VALUES ('train', 'x', 0, 0, 0, 0, ''"
        )
        content = json.loads((stores["exported"] / "manifest.json").read_bytes())
        del content["digest"]
        content["files"]["shards/train-000000.tar"][key] = attack
        content["digest"] = hashlib.sha256(canonical_json(content)).hexdigest()
        (store / "manifest.json").write_bytes(canonical_json(content))
        for run in (lambda: ask(store, "SELECT 1"), lambda: write_report(store), lambda: verify_store(store)):
            with pytest.raises(StoreError, match=rf"at files\S+\.{key}: "):
                run()
    assert not target.exists()


def test_only_queries_of_a_missing_file_fail(stores, copy_store) -> None:
    views = (*COLUMNS, "shuffled")
    for folder in views:
        store = copy_store(stores["exported"], folder)
        (lost := next((store / folder).rglob("*.parquet"))).unlink()
        with open_catalog(store, memory=MEMORY) as con:
            others = [name for name in views if name != folder]
            assert all(con.sql(f"SELECT count(*) FROM {name}").fetchall()[0][0] for name in others)
        for asked in ("count(*)", "*"):
            with (
                pytest.raises(StoreError, match=f"missing or cut: {lost.relative_to(store)}"),
                open_catalog(store, memory=MEMORY) as con,
            ):
                con.sql(f"SELECT {asked} FROM {folder}").fetchall()


# --- optional columns -----------------------------------------------------------------------------------


def test_optional_columns_are_facts_of_a_drawing(stores) -> None:
    """They are null in one part."""
    expected = odd_positions(300, SEARCHED).to_pylist()
    expected[100:200] = [row | dict.fromkeys(SEARCHED) for row in expected[100:200]]
    for number, given in list(enumerate(expected))[::17]:
        position = read_position(stores["searched"], number)
        extra = {"odd": given["extra.odd"], "temperature": given["extra.temperature"]}
        for known in ("root_value", "visits", "weight"):
            assert getattr(position, known) == given[known] == position.to_json()[known]
        assert position.extra == position.to_json()["extra"] == extra
        assert (f"{given['visits']} visits" in str(position)) == (given["visits"] is not None)


# --- macros ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [MIN_SIZE, 5, 8, 13, MAX_SIZE])
def test_cells_are_named_and_stones_counted(tmp_path: Path, size: int) -> None:
    Manifest(board_size=size).save(tmp_path)
    owner = np.random.default_rng(size).integers(0, 3, (12, size, size))
    owner[0], owner[1], owner[2] = 0, 1, 2
    planes = np.stack([owner == 1, owner == 2], axis=1)
    with open_catalog(tmp_path, memory=MEMORY) as con:
        cells = con.sql(f"SELECT cell(i::USMALLINT) FROM range({size**2}) t(i) ORDER BY i").fetchall()
        assert [name for (name,) in cells] == [cell_name(i, size) for i in range(size**2)]
        none = f"cell(NULL), cell({size**2}), cell(65535::USMALLINT), cell(-1), planes(NULL::BLOB)"
        nulls = f"{none}, stones(NULL::BLOB), red_stones(NULL::BLOB), board_size()"
        assert con.sql(f"SELECT {nulls}").fetchall() == [(None,) * 7 + (size,)]
        for board, (blue, red) in zip(pack_boards(planes), planes, strict=True):
            counts = "stones(b), blue_stones(b), red_stones(b), planes(b)"
            ((*found, cells_of),) = con.sql(
                f"SELECT {counts} FROM (SELECT from_hex('{board.tobytes().hex()}') b)"
            ).fetchall()
            assert found == [blue.sum() + red.sum(), blue.sum(), red.sum()]
            assert np.array_equal(np.array(cells_of).reshape(2, size, size), (blue, red))


def test_a_game_is_a_line_of_trmph(stores: dict[str, Path]) -> None:
    games = ask(stores["converted"], "FROM games")
    with open_catalog(stores["converted"], memory=MEMORY) as con:
        lines = dict(con.sql("SELECT DISTINCT game_id, trmph(game_id) FROM positions").fetchall())
        assert con.sql("SELECT trmph(-5), trmph(NULL)").fetchall() == [(None, None)]
        # DuckDB inserts arguments as text, so no inner name of a macro may capture them.
        for name in ("game_id", "id", "moves", "played", "winner", "won", "game", "m", "move"):
            query = f"SELECT trmph({name}) FROM (SELECT game_id AS {name} FROM games) ORDER BY {name}"
            assert [line for (line,) in con.sql(query).fetchall()] == [lines[i] for i in range(len(games))]
    assert len(lines) == len(games) > 50
    for game in games:
        ending = {"BLUE": " b", "RED": " r"}[game["winner"]]
        assert lines[game["game_id"]] == f"#7,{format_moves(game['moves'], 7)}{ending}"
        assert split_trmph(lines[game["game_id"]]).board_size == 7
    assert ask(stores["odd-shuffled"], "SELECT count(trmph(game_id)) AS n FROM games") == [{"n": 0}]
    nothing = ask(stores["none"], "SELECT board_size() AS size, cell(3) AS cell, trmph(0) AS game")
    assert nothing == [{"size": None, "cell": None, "game": None}]


def test_the_probability_of_a_cell(stores: dict[str, Path]) -> None:
    for row in ask(stores["searched"], "SELECT policy, policy_probability(policy, 4) AS p FROM positions"):
        given = {item["cell"]: item["probability"] for item in row["policy"] or []}
        assert row["p"] == (None if row["policy"] is None else given.get(4, 0.0))
