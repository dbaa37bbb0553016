"""Queries can only read the store, and errors name the fault of the query or of the store."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import BudgetError, ConfigError, HexdataError, StoreError
from hexdata.sql import open_catalog, run_query
from hexdata.sql.run import start_query
from hexdata.store import Store
from tests.sql.conftest import ask

A_TABLE = pa.table({"a": [1]})
"""A variable that a replacement scan of DuckDB would find by its name."""
READING = (
    "SELECT count(*) AS found FROM positions",
    "FROM (SELECT count(*) AS found FROM positions);",
    "WITH p AS (FROM positions) SELECT count(*) AS found FROM p -- of all",
    "/* first */ (SELECT count(*) AS found FROM positions)",
    "SELECT count(*) AS found FROM query_table('positions')",
    "SELECT count(*) AS found FROM positions, (VALUES (1)) AS v",
)
REFUSED = {
    # Statements that write or change the session.
    "COPY (SELECT 1) TO '{out}'": "COPY",
    "WITH x AS (COPY (SELECT 1) TO '{out}') SELECT 1": "COPY",
    "WITH x AS (COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)) SELECT 1": "COPY",
    "WITH x AS (INSERT INTO games SELECT * FROM games RETURNING *) FROM x": "INSERT",
    "SELECT (WITH x AS (COPY (SELECT 1) TO '{out}') SELECT 1)": "COPY",
    "SELECT 1 FROM query('WITH x AS (COPY (SELECT 1) TO ''{out}'') SELECT 1')": "query is not allowed",
    "FROM json_execute_serialized_sql('{{}}')": "table function json_execute_serialized_sql",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{out}'": "EXPLAIN",
    "ATTACH '{out}' AS other": "ATTACH",
    "CREATE TABLE t (i INTEGER)": "CREATE",
    "INSERT INTO games VALUES (1)": "INSERT",
    "SET threads = 9": "SET",
    "PRAGMA database_size": "PRAGMA",
    "CALL pragma_version()": "CALL",
    "INSTALL httpfs": "can only read",
    "SELECT 1; DROP VIEW games": "more than one statement",
    "": "empty",
    "-- nothing": "empty",
    "PIVOT games ON winner USING count(*)": "List the values of the pivot",
    "FROM create_external_resource('a')": "table function create_external_resource",
    "FROM main.range(3)": r"table function main\.range",
    # Files, addresses and variables that are not of the store.
    "FROM read_csv('{secret}')": ".",
    "FROM glob('{folder}/*')": ".",
    "FROM parquet_metadata('{parquet}')": ".",
    "FROM '{secret}'": ".",
    "FROM '{link}'": ".",
    "FROM 'http://127.0.0.1:9/a.parquet'": ".",
    "SELECT * FROM query_table('{secret}')": ".",
    "SELECT * FROM read_text('{manifest}')": ".",
    "FROM duckdb_secrets()": ".",
    "FROM a_table": ".",
    "SELECT getenv('HOME')": ".",
    "FROM python_map_function((FROM games))": ".",
    # Mistakes, whose position is marked.
    "SELEC 1": 'syntax error at or near "SELEC"\n    LINE 1: SELEC 1\n            \\^',
    "SELECT nix FROM games": "LINE 1: SELECT nix FROM games\n                   \\^",
    "SELECT 1\nFROM game": "LINE 2: FROM game\n                 \\^",
    "\n" * 8 + "SELECT 1 FROM game": "LINE 9: SELECT 1 FROM game\n                          \\^",
    "SELECT ?": "parameters",
    "SELECT (winner || position_id)::INTEGER FROM positions": "Could not convert string",
    "SELECT 9223372036854775807 + position_id + 1 FROM positions": "Overflow",
    "SELECT " + "(" * 5000 + "1" + ")" * 5000: "nest|deep|depth",
}


def test_queries_read_the_store_and_nothing_else(tmp_path: Path, stores, store_bytes) -> None:
    store = shutil.copytree(stores["converted"], tmp_path / "store")
    expected = Store.open(store).manifest.counts["positions"]
    for text in READING:
        assert ask(store, text) == [{"found": expected}]
    paths = {"folder": tmp_path, "out": tmp_path / "out", "secret": tmp_path / "secret.csv"}
    paths |= {"parquet": tmp_path / "other.parquet", "link": store / "link.csv"}
    paths |= {"part": store / "games" / "part-000000.parquet", "manifest": store / "manifest.json"}
    paths["secret"].write_text("root,secret\n1,2\n")
    pq.write_table(A_TABLE, paths["parquet"])
    paths["link"].symlink_to(paths["secret"])
    a_table = A_TABLE  # noqa: F841 - a local variable, as in a notebook
    before, names = store_bytes(store), sorted(tmp_path.iterdir())
    opened = Store.open(store)
    with open_catalog(opened, memory=500_000_000) as con:
        for text, message in REFUSED.items():
            with pytest.raises((ConfigError, StoreError), match=message) as caught:
                list(start_query(con.cursor(), opened, text.format(**paths)).batches)
            assert "secret," not in str(caught.value)
            assert "Traceback" not in str(caught.value)
    assert (store_bytes(store), sorted(tmp_path.iterdir())) == (before, names)


def test_an_unknown_named_query_is_refused(stores) -> None:
    for name in ("dispersoin", "../run", "", "dispersion.sql", "/etc/passwd"):
        with pytest.raises(ConfigError, match=f"found '@{name}'; expected .*@neighbours") as caught:
            ask(stores["one"], f"@{name}")
        assert ("mean '@dispersion'" in str(caught.value)) == (name in ("dispersoin", "dispersion.sql"))


def test_a_store_can_be_in_a_folder_of_any_name(tmp_path: Path, stores) -> None:
    text = "SELECT (SELECT count(*) FROM shuffled) AS s, (SELECT count(*) FROM games) AS g"
    (expected,) = ask(stores["exported"], text)
    for name in ("a[b]", "a*b", "a?b", "[", "**", "a|b,c's\n", "split=train", "{a,b}", 'x"); \\--'):
        store = shutil.copytree(stores["exported"], tmp_path / name)
        assert ask(store, text) == [expected]
    assert min(expected.values()) > 0


def test_rows_are_in_the_order_of_the_tables(stores) -> None:
    rows = [row["position_id"] for row in ask(stores["exported"], "SELECT position_id FROM positions")]
    assert rows == list(range(len(rows)))
    shuffled = ask(stores["exported"], "SELECT rank FROM shuffled WHERE split = 'train'")
    assert [row["rank"] for row in shuffled] == list(range(len(shuffled)))
    assert len(ask(stores["exported"], "FROM positions LIMIT 3")) == 3


def test_rows_are_streamed(stores) -> None:
    """A result larger than any memory starts immediately and can be abandoned; a wrong value ends it."""
    with run_query(stores["one"], "FROM range(1_000_000_000_000)", memory=400_000_000) as result:
        assert next(result.batches)[0].to_pylist()[:3] == [0, 1, 2]
    text = "SELECT (CASE WHEN range = 3000000 THEN 'x' ELSE '1' END)::INTEGER FROM range(4000000)"
    with run_query(stores["one"], text) as result:
        seen = next(result.batches).num_rows
        with pytest.raises(ConfigError, match="Could not convert string 'x'"):
            seen += sum(batch.num_rows for batch in result.batches)
    assert 0 < seen <= 3_000_000


def test_memory_is_limited(stores) -> None:
    """Large intermediate results are spilled; a value that needs too much memory is refused."""
    counts = "SELECT range % 6_000_000 AS k, count(*) AS n FROM range(8_000_000) GROUP BY k"
    with run_query(
        stores["one"], f"SELECT sum(n) AS n FROM ({counts})", memory=400_000_000, threads=1
    ) as result:
        assert [batch.to_pylist() for batch in result.batches] == [[{"n": 8_000_000}]]
    with pytest.raises(BudgetError, match="Raise --memory"):
        ask(stores["one"], "SELECT list(range) FROM range(200_000_000)")


def test_a_changed_byte_is_found_before_a_query_of_its_table(tmp_path: Path, stores) -> None:
    """Most changes of a byte leave a table that can be read, with other values."""
    store = Store.open(shutil.copytree(stores["converted"], tmp_path / "store"))
    part = next(path for path in store.files("games"))
    whole = part.read_bytes()
    part.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with open_catalog(store, memory=500_000_000) as con:
        start_query(con.cursor(), store, "SELECT * FROM sources")
        for query in ("SELECT * FROM games", "SELECT trmph(0)", "FROM query_table('ga' || 'mes')"):
            with pytest.raises(StoreError, match=f"{part.name}: the file was altered"):
                start_query(con.cursor(), store, query)
        next(path for path in store.files("positions")).unlink()
        with pytest.raises(StoreError, match="and 1 other file damaged or missing"):
            start_query(con.cursor(), store, "FROM games, positions")
        part.write_bytes(whole)
        start_query(con.cursor(), store, "FROM Games")


def test_a_note_says_why_a_view_is_empty(stores) -> None:
    both = "SELECT (SELECT count(*) FROM shards), (SELECT count(*) FROM shuffled)"
    of_games = "SELECT * FROM games WHERE game_id IN (SELECT game_id FROM SHUFFLED)"
    for kind, text, notes in (
        ("converted", "SELECT count(*) FROM shuffled AS s", ["shuffled is empty .* `hexdata shuffle STORE`"]),
        ("converted", "@dispersion", ["shuffled is empty"]),
        ("converted", of_games, ["shuffled is empty"]),
        ("odd-shuffled", both, ["shards is empty"]),
        ("converted", "SELECT 'shuffled' AS shuffled FROM games", []),
        ("exported", both, []),
    ):
        with run_query(stores[kind], text) as result:
            found = [note.replace(str(stores[kind]), "STORE") for note in result.notes]
            list(result.batches)
        assert len(found) == len(notes)
        assert all(re.search(pattern, note) for pattern, note in zip(notes, found, strict=True)), found


def test_errors_of_the_caller_are_not_those_of_the_store(stores) -> None:
    with pytest.raises(BrokenPipeError), run_query(stores["one"], "SELECT 1"):
        raise BrokenPipeError
    with (
        pytest.raises(HexdataError, match="not a hexdata store"),
        run_query(stores["one"].parent, "SELECT 1"),
    ):
        pass
