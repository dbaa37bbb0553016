"""JSON, CSV and Parquet contain the rows of the query; a Parquet file is complete or absent."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import ConfigError, InputError
from hexdata.sql import json_rows, run_query, save_parquet, text_rows, write_csv
from tests.sql.conftest import ask

ODD = """
    SELECT * FROM (VALUES
        (1, 0.1::FLOAT, 'a"b,' || chr(10) || 'ø', '\\x00\\xff'::BLOB, [1, NULL], {'k': 'v'}, true, 1.25,
            DATE '2020-02-29'),
        (NULL, 'nan'::FLOAT, '', ''::BLOB, [], {'k': NULL}, false, NULL, NULL),
        (-3, NULL, NULL, NULL, NULL, NULL, NULL, -7, DATE '1970-01-01')
    ) AS t (i, f, s, b, l, d, t, n, day)
"""
NAMES = ("i", "f", "s", "b", "l", "d", "t", "n", "day")
EXPECTED = (
    (1, 0.1, 'a"b,\nø', "00ff", [1, None], {"k": "v"}, True, 1.25, "2020-02-29"),
    (None, None, "", "", [], {"k": None}, False, None, None),
    (-3, None, None, None, None, None, None, -7, "1970-01-01"),
)


def as_json(store: Path, text: str) -> Any:
    with run_query(store, text) as result:
        lines = "".join(json_rows(result)).splitlines()
    rows = json.loads("\n".join(lines))
    assert len(lines) == max(len(rows), 1)  # one row per line
    return rows


def as_csv(store: Path, text: str) -> str:
    with run_query(store, text) as result:
        write_csv(file := io.BytesIO(), result)
    return file.getvalue().decode()


def test_json_contains_every_value(stores: dict[str, Path]) -> None:
    assert [tuple(row.values()) for row in as_json(stores["one"], ODD)] == [*EXPECTED]
    assert tuple(as_json(stores["one"], ODD)[0]) == NAMES
    assert as_json(stores["one"], "SELECT 1 AS a WHERE false") == []
    numbers = as_json(stores["one"], "FROM range(70000)")
    assert [row["range"] for row in numbers] == list(range(70_000))
    text = "SELECT position_id, value, policy, metadata FROM positions"
    rows, expected = as_json(stores["odd-shuffled"], text), ask(stores["odd-shuffled"], text)
    for row, known in zip(rows, expected, strict=True):
        assert row["metadata"] == known["metadata"]
        assert row["value"] == pytest.approx(known["value"], rel=1e-7)
        assert [item["cell"] for item in row["policy"] or ()] == [i["cell"] for i in known["policy"] or ()]
        shares = [item["probability"] for item in row["policy"] or ()]
        assert shares == pytest.approx([i["probability"] for i in known["policy"] or ()], rel=1e-7)


def test_csv_distinguishes_null_from_empty(stores: dict[str, Path]) -> None:
    text = as_csv(stores["one"], ODD)
    first, second, third = csv.DictReader(io.StringIO(text))
    assert tuple(first) == NAMES
    assert (first["s"], second["s"], third["s"]) == ('a"b,\nø', "", "")
    assert '""' in text.splitlines()[3]
    assert text.splitlines()[-1] == "-3,,,,,,,-7.00,1970-01-01"
    lists = (first["b"], json.loads(first["l"]), json.loads(first["d"]))
    assert lists == ("00ff", [1, None], {"k": "v"})
    assert (first["f"], second["f"]) == ("0.1", "nan")
    assert as_csv(stores["one"], "SELECT 1 AS a, 2 AS a WHERE false") == '"a","a"\n'


def test_display_texts_show_nulls(stores: dict[str, Path]) -> None:
    with run_query(stores["one"], ODD) as result:
        rows = [row for batch in result.batches for row in text_rows(batch)]
    assert rows[0] == ["1", "0.1", 'a"b,\nø', "00ff", "[1, null]", '{"k": "v"}', "true", "1.25", "2020-02-29"]
    assert rows[1] == ["NULL", "nan", "", "", "[]", '{"k": null}', "false", "NULL", "NULL"]


def test_parquet_contains_every_row(tmp_path: Path, stores: dict[str, Path]) -> None:
    path, text = tmp_path / "new" / "rows.parquet", "FROM shuffled ORDER BY position_id"
    with run_query(stores["exported"], text) as result:
        facts = save_parquet(path, result)
    with run_query(stores["exported"], text) as result:
        expected = pa.Table.from_batches(result.batches, result.schema)
    assert pq.read_table(path).equals(expected)
    assert (facts.rows, facts.bytes) == (expected.num_rows, path.stat().st_size)


def test_what_cannot_be_a_parquet_file_is_refused(tmp_path: Path, stores: dict[str, Path]) -> None:
    """A file that exists remains as it is."""
    store, path, link = stores["one"], tmp_path / "rows.parquet", tmp_path / "link"
    path.write_bytes(b"earlier content")
    link.symlink_to(store)
    late = "SELECT (CASE WHEN range = {} THEN 'x' ELSE '1' END)::INTEGER AS n FROM range(80_000)"
    for query, output, message in (
        (late.format(0), path, "Could not convert"),
        (late.format(70_000), path, "Could not convert"),
        ("SELECT 1 AS a", store / "x.parquet", "must not be in the store"),
        ("SELECT 1 AS a", link / "positions" / "part-000000.parquet", "must not be in the store"),
        ("SELECT 1 AS a, 2 AS a", path, "several columns called 'a'"),
        ("SELECT INTERVAL 1 DAY AS i", path, "does not support a type"),
        ("SELECT MAP {} AS m", path, "does not support a type"),
        ("SELECT '-infinity'::TIMESTAMP_S AS t", path, "does not support a type or value"),
        ("SELECT 1", tmp_path, "folder"),
        ("SELECT 1", tmp_path / "notes.txt", r"expected \.parquet"),
    ):
        with pytest.raises((ConfigError, InputError), match=message), run_query(store, query) as result:
            save_parquet(output, result)
    assert path.read_bytes() == b"earlier content"
    assert {*tmp_path.iterdir()} == {path, link}
    assert not (store / "x.parquet").exists()
    with pytest.raises(ConfigError, match="called 'a'"):
        as_json(store, "SELECT 1 AS a, 2 AS a")
