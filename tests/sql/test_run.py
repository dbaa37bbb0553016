"""Queries can only read the store, and errors name the fault of the query or of the store."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.errors import BudgetError, ConfigError, HexdataError, StoreError
from hexdata.sql import named_queries, named_query, open_catalog, run_query
from hexdata.sql.check import check_query
from hexdata.sql.run import start_query
from hexdata.store import Store
from tests.conftest import CopyStore

StoreBytes = Callable[[Path], dict[str, str]]

A_TABLE = pa.table({"a": [1]})
"""A variable that a replacement scan of DuckDB would find by its name."""


def ask(store: Path, text: str) -> list[dict[str, object]]:
    with run_query(store, text, memory=500_000_000) as result:
        return [row for batch in result.batches for row in batch.to_pylist()]


@pytest.mark.parametrize(
    "text",
    [
        "SELECT count(*) AS found FROM positions",
        "FROM (SELECT count(*) AS found FROM positions);",
        "WITH p AS (FROM positions) SELECT count(*) AS found FROM p -- of all",
        "/* first */ (SELECT count(*) AS found FROM positions)",
        "SELECT count(*) AS found FROM query_table('positions')",
        "SELECT count(*) AS found FROM positions, (VALUES (1)) AS v",
    ],
)
def test_reading_statements_run(stores: dict[str, Path], text: str) -> None:
    expected = Store.open(stores["converted"]).manifest.counts["positions"]
    assert ask(stores["converted"], text) == [{"found": expected}]


@pytest.mark.parametrize("text", ["DESCRIBE games", "SHOW TABLES", "SUMMARIZE sources", "VALUES (1), (2)"])
def test_describing_statements_run(stores: dict[str, Path], text: str) -> None:
    assert len(ask(stores["converted"], text)) >= 2


REFUSED = {
    "COPY (SELECT 1) TO '{out}'": "COPY is not allowed: queries can only read",
    "WITH x AS (COPY (SELECT 1) TO '{out}') SELECT 1": "query contains COPY",
    "WITH x AS (COPY (SELECT 1) TO '{part}' (USE_TMP_FILE false)) SELECT 1": "query contains COPY",
    "WITH x AS (INSERT INTO games SELECT * FROM games RETURNING *) FROM x": "query contains INSERT",
    "WITH x AS (DELETE FROM games RETURNING *) FROM x": "query contains DELETE",
    "SELECT (WITH x AS (COPY (SELECT 1) TO '{out}') SELECT 1)": "query contains COPY",
    "SELECT 1 FROM query('WITH x AS (COPY (SELECT 1) TO ''{out}'') SELECT 1')": "query is not allowed",
    "FROM json_execute_serialized_sql('{{}}')": "table function json_execute_serialized_sql is not allowed",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{out}'": "EXPLAIN is not allowed",
    "EXPORT DATABASE '{out}'": "not allowed: queries can only read",
    "ATTACH '{out}' AS other": "ATTACH is not allowed",
    "CREATE TABLE t (i INTEGER)": "CREATE is not allowed",
    "CREATE TEMP TABLE t (i INTEGER)": "CREATE is not allowed",
    "DROP VIEW games": "DROP is not allowed",
    "INSERT INTO games VALUES (1)": "INSERT is not allowed",
    "SET threads = 9": "SET is not allowed",
    "SET VARIABLE x = 1": "SET is not allowed",
    "RESET lock_configuration": "not allowed: queries can only read",
    "PRAGMA threads = 9": "SET is not allowed",
    "PRAGMA database_size": "PRAGMA is not allowed",
    "CALL pragma_version()": "CALL is not allowed",
    "LOAD httpfs": "LOAD is not allowed",
    "INSTALL httpfs": "not allowed: queries can only read",
    "PREPARE p AS SELECT 1": "PREPARE is not allowed",
    "BEGIN": "TRANSACTION is not allowed",
    "SELECT 1; DROP VIEW games": "more than one statement",
    "": "the query is empty",
    "-- nothing": "the query is empty",
    "PIVOT games ON winner USING count(*)": "List the values of the pivot: PIVOT",
    "FROM create_external_resource('a')": "table function create_external_resource is not allowed",
    "FROM main.range(3)": r"table function main\.range is not allowed",
}


@pytest.mark.parametrize("text", REFUSED)
def test_other_statements_are_refused(
    tmp_path: Path, stores: dict[str, Path], store_bytes: StoreBytes, text: str
) -> None:
    store = shutil.copytree(stores["converted"], tmp_path / "store")
    before = store_bytes(store)
    query = text.format(out=tmp_path / "out", part=store / "games" / "part-000000.parquet")
    with pytest.raises(ConfigError, match=REFUSED[text]):
        ask(store, query)
    assert store_bytes(store) == before
    assert list(tmp_path.iterdir()) == [store]


@pytest.mark.parametrize(
    "text",
    [
        "FROM read_csv('{secret}')",
        "FROM read_text('{secret}')",
        "FROM read_blob('{secret}')",
        "FROM read_json('{secret}')",
        "FROM glob('{folder}/*')",
        "FROM sniff_csv('{secret}')",
        "FROM parquet_metadata('{parquet}')",
        "FROM read_parquet('{parquet}')",
        "FROM '{secret}'",
        "FROM '{parquet}'",
        "FROM '{folder}/*.csv'",
        "FROM '{link}'",
        'FROM "{secret}"',
        "FROM 'http://127.0.0.1:9/a.parquet'",
        "SELECT * FROM query_table('{secret}')",
        "SELECT * FROM read_text('{manifest}')",
        "FROM duckdb_secrets()",
        "FROM A_TABLE",
        "FROM a_table",
        "FROM query_table('a_table')",
        "SELECT getenv('HOME')",
        "FROM python_map_function((FROM games))",
    ],
)
def test_only_the_store_can_be_read(tmp_path: Path, stores: dict[str, Path], text: str) -> None:
    store = shutil.copytree(stores["converted"], tmp_path / "store")
    secret, parquet, link = tmp_path / "secret.csv", tmp_path / "other.parquet", store / "link.csv"
    secret.write_text("root,secret\n1,2\n")
    pq.write_table(A_TABLE, parquet)
    link.symlink_to(secret)
    a_table = A_TABLE  # noqa: F841 - a local variable, as in a notebook
    names = {"secret": secret, "parquet": parquet, "link": link, "folder": tmp_path}
    query = text.format(**names, manifest=store / "manifest.json")
    with pytest.raises((ConfigError, StoreError)) as caught:
        ask(store, query)
    assert "secret," not in str(caught.value)


def test_a_file_outside_the_store_is_an_error_of_the_query(stores: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"only read the tables of the store; .*expected positions"):
        ask(stores["one"], "FROM '/elsewhere/a.parquet'")
    with pytest.raises(ConfigError) as caught:
        ask(stores["one"], "FROM query_table('nix')")
    assert "EXPLAIN" not in str(caught.value)


@pytest.mark.parametrize("name", ["a[b]", "a*b", "a?b", "[", "**", "a|b,c's\n"])
def test_a_store_can_be_in_a_folder_of_any_name(tmp_path: Path, stores: dict[str, Path], name: str) -> None:
    store = shutil.copytree(stores["exported"], tmp_path / name)
    text = "SELECT (SELECT count(*) FROM shuffled) AS s, (SELECT count(*) FROM games) AS g"
    assert ask(store, text) == ask(stores["exported"], text) != [{"s": 0, "g": 0}]


def test_column_names_and_texts_are_not_checked_as_functions(stores: dict[str, Path]) -> None:
    """Checks use the types of syntax nodes, so texts and names that look like functions are allowed."""
    text = "SELECT 'COPY_QUERY_NODE' AS type, 'X_NODE' AS \"COPY_NODE\""
    assert ask(stores["one"], text) == [{"type": "COPY_QUERY_NODE", "COPY_NODE": "X_NODE"}]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("SELEC 1", 'syntax error at or near "SELEC"\n    LINE 1: SELEC 1\n            ^'),
        ("SELECT nix FROM games", "LINE 1: SELECT nix FROM games\n                   ^"),
        ("SELECT 1\nFROM game", "LINE 2: FROM game\n                 ^"),
        ("\n" * 8 + "SELECT 1 FROM game", "LINE 9: SELECT 1 FROM game\n                          ^"),
        ("SELECT 1 +", "syntax error"),
        ("SELECT ?", "Expected number of parameters|parameters"),
        ("SELECT 'x'::INTEGER", "Could not convert string 'x'"),
        ("SELECT (winner || position_id)::INTEGER FROM positions", "Could not convert string"),
        ("SELECT error('so')", "so"),
        ("SELECT 9223372036854775807 + position_id + 1 FROM positions", "Overflow"),
        ("SELECT " + "(" * 5000 + "1" + ")" * 5000, "nest|deep|depth"),
    ],
)
def test_errors_mark_the_position_in_the_query(stores: dict[str, Path], text: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(stores["converted"], text)
    message = str(caught.value)
    assert any(part in message for part in found.split("|")), message
    assert "Traceback" not in message


def test_an_invalid_value_fails_while_rows_are_read(stores: dict[str, Path]) -> None:
    text = "SELECT (CASE WHEN range = 3000000 THEN 'x' ELSE '1' END)::INTEGER FROM range(4000000)"
    with run_query(stores["one"], text) as result:
        seen = next(result.batches).num_rows
        with pytest.raises(ConfigError, match="Could not convert string 'x'"):
            seen += sum(batch.num_rows for batch in result.batches)
    assert 0 < seen <= 3_000_000


def test_rows_are_in_the_order_of_the_tables(stores: dict[str, Path]) -> None:
    rows = [row["position_id"] for row in ask(stores["exported"], "SELECT position_id FROM positions")]
    assert rows == list(range(len(rows)))
    shuffled = ask(stores["exported"], "SELECT rank FROM shuffled WHERE split = 'train'")
    assert [row["rank"] for row in shuffled] == list(range(len(shuffled)))
    assert len(ask(stores["exported"], "FROM positions LIMIT 3")) == 3


def test_rows_are_streamed(stores: dict[str, Path]) -> None:
    """A result larger than any memory starts immediately and can be abandoned."""
    with run_query(stores["one"], "FROM range(1_000_000_000_000)", memory=400_000_000) as result:
        assert next(result.batches)[0].to_pylist()[:3] == [0, 1, 2]


def test_large_intermediate_results_are_spilled(stores: dict[str, Path]) -> None:
    counts = "SELECT range % 6_000_000 AS k, count(*) AS n FROM range(8_000_000) GROUP BY k"
    text = f"SELECT sum(n) AS n FROM ({counts})"
    with run_query(stores["one"], text, memory=400_000_000, threads=1) as result:
        assert [batch.to_pylist() for batch in result.batches] == [[{"n": 8_000_000}]]


def test_an_error_that_is_not_utf8_is_explained(stores: dict[str, Path]) -> None:
    """DuckDB's message about this text ends within a character."""
    with (
        pytest.raises(ConfigError, match="the query failed"),
        run_query(stores["converted"], "SELECT x'0\ufffd'"),
    ):
        pass


def test_too_little_memory_is_refused(stores: dict[str, Path]) -> None:
    with pytest.raises(BudgetError, match="Raise --memory"):
        ask(stores["one"], "SELECT list(range) FROM range(200_000_000)")


def test_a_damaged_file_is_an_error_of_the_store(tmp_path: Path, stores: dict[str, Path]) -> None:
    store = shutil.copytree(stores["converted"], tmp_path / "store")
    part = next((store / "games").iterdir())
    part.write_bytes(bytes(part.stat().st_size))
    with pytest.raises(StoreError, match="the file was altered"):
        ask(store, "SELECT sum(positions) FROM games")


def test_a_changed_byte_is_found_before_a_query_and_once_for_a_session(
    tmp_path: Path, stores: dict[str, Path]
) -> None:
    """Most changes of a byte leave a table that can be read, with other values."""
    store = Store.open(shutil.copytree(stores["converted"], tmp_path / "store"))
    part = next(path for path in store.files("games"))
    whole = part.read_bytes()
    with open_catalog(store, memory=500_000_000) as con:
        start_query(con.cursor(), store, "SELECT * FROM sources")
        part.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        start_query(con.cursor(), store, "SELECT * FROM sources")
        for query in ("SELECT * FROM games", "SELECT trmph(0)"):
            with pytest.raises(StoreError, match=f"{part.name}: the file was altered"):
                start_query(con.cursor(), store, query)
        part.write_bytes(whole)
        start_query(con.cursor(), store, "FROM Games")
        assert store.intact >= {f"games/{part.name}", "sources/part-000000.parquet"}


def test_every_named_query_runs_at_every_stage(any_store: Path) -> None:
    with open_catalog(any_store, memory=500_000_000) as con:
        for name in named_queries():
            result = con.sql(named_query(name))
            assert len(set(result.columns)) == len(result.columns) > 1, name
            assert len(result.fetchall()) < 1_000, name


def test_every_named_query_passes_the_checks_and_has_a_description(stores: dict[str, Path]) -> None:
    with open_catalog(stores["one"], memory=500_000_000) as con:
        for name, answers in named_queries().items():
            check_query(con, named_query(name))
            assert len(answers) > 20, name
            assert answers.endswith("."), name
    assert ask(stores["one"], "@splits") == ask(stores["one"], named_query("splits"))


def test_an_unknown_name_lists_all_names(stores: dict[str, Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"found @dispersoin; expected one of .*@neighbours.*Did you mean @dispersion"
    ):
        ask(stores["one"], "@dispersoin")
    for name in ("../run", "", "dispersion.sql", "/etc/passwd"):
        with pytest.raises(HexdataError, match="unknown named query"):
            ask(stores["one"], f"@{name}")


@pytest.mark.parametrize(
    ("kind", "text", "notes"),
    [
        ("converted", "SELECT count(*) FROM shuffled AS s", ["shuffled is empty .* `hexdata shuffle STORE`"]),
        ("converted", "@dispersion", ["shuffled is empty"]),
        (
            "converted",
            "SELECT * FROM games WHERE game_id IN (SELECT game_id FROM SHUFFLED)",
            ["shuffled is empty"],
        ),
        (
            "shuffled",
            "SELECT (SELECT count(*) FROM shards), (SELECT count(*) FROM shuffled)",
            ["shards is empty"],
        ),
        ("converted", "SELECT 'shuffled' AS shuffled FROM games", []),
        ("exported", "SELECT (SELECT count(*) FROM shards), (SELECT count(*) FROM shuffled)", []),
    ],
)
def test_a_note_says_why_a_view_is_empty(
    stores: dict[str, Path], kind: str, text: str, notes: list[str]
) -> None:
    with run_query(stores[kind], text) as result:
        found = [note.replace(str(stores[kind]), "STORE") for note in result.notes]
        list(result.batches)
    assert len(found) == len(notes)
    assert all(re.search(pattern, note) for pattern, note in zip(notes, found, strict=True)), found


def test_a_note_says_that_the_shuffle_is_older(
    stores: dict[str, Path], copy_store: CopyStore, tmp_path: Path
) -> None:
    store = copy_store(stores["shuffled"])
    (tmp_path / "new.trmph").write_text("#7,a1b2c3 b\n")
    convert_sources(tmp_path / "new.trmph", store, ConvertOptions(workers=1, val=0.15, test=0.1))
    with run_query(store, "SELECT count(*) FROM shuffled") as result:
        assert "`hexdata shuffle" in result.notes[0]
        assert "older than the positions" in result.notes[0]
        list(result.batches)
