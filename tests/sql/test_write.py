"""JSON, CSV and Parquet contain the rows of the query; a Parquet file is complete or absent."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import ConfigError, InputError
from hexdata.sql import json_rows, run_query, save_parquet, text_rows, write_csv

ODD = """
    SELECT * FROM (VALUES
        (1, 0.1::FLOAT, 'a"b,' || chr(10) || 'ø', '\\x00\\xff'::BLOB, [1, NULL], {'k': 'v'}, true, 1.25,
            DATE '2020-02-29'),
        (NULL, 'nan'::FLOAT, '', ''::BLOB, [], {'k': NULL}, false, NULL, NULL),
        (-3, NULL, NULL, NULL, NULL, NULL, NULL, -7, DATE '1970-01-01')
    ) AS t (i, f, s, b, l, d, t, n, day)
"""
EXPECTED = [
    {"i": 1, "f": 0.1, "s": 'a"b,\nø', "b": "00ff", "l": [1, None], "d": {"k": "v"}, "t": True, "n": 1.25}
    | {"day": "2020-02-29"},
    {"i": None, "f": None, "s": "", "b": "", "l": [], "d": {"k": None}, "t": False, "n": None, "day": None},
    {"i": -3, "f": None, "s": None, "b": None, "l": None, "d": None, "t": None, "n": -7, "day": "1970-01-01"},
]


def as_json(store: Path, text: str) -> Any:
    with run_query(store, text) as result:
        return json.loads("".join(json_rows(result)))


def as_csv(store: Path, text: str) -> str:
    with run_query(store, text) as result:
        write_csv(file := io.BytesIO(), result)
    return file.getvalue().decode()


def test_json_contains_every_value(stores: dict[str, Path]) -> None:
    assert as_json(stores["one"], ODD) == EXPECTED
    assert as_json(stores["one"], "SELECT 1 AS a WHERE false") == []
    rows = as_json(stores["odd"], "SELECT position_id, value, policy, metadata FROM positions")
    parts = [pq.read_table(path) for path in sorted((stores["odd"] / "positions").iterdir())]
    table = pa.concat_tables(parts).select(["position_id", "value", "policy", "metadata"])
    assert [row["metadata"] for row in rows] == table["metadata"].to_pylist()
    for row, value, policy in zip(rows, table["value"].to_pylist(), table["policy"].to_pylist(), strict=True):
        assert math.isclose(row["value"], value, rel_tol=1e-7)
        assert row["policy"] == policy or row["policy"] == pytest.approx(policy, rel=1e-7)


def test_json_has_one_row_per_line(stores: dict[str, Path]) -> None:
    with run_query(stores["one"], "FROM range(70000)") as result:
        lines = "".join(json_rows(result)).splitlines()
    assert len(lines) == 70_000
    assert [json.loads(line.strip("[],"))["range"] for line in lines] == list(range(70_000))


def test_large_sums_keep_every_digit(stores: dict[str, Path]) -> None:
    assert as_json(stores["one"], "SELECT sum(9223372036854775807) AS n FROM range(3)") == [
        {"n": 3 * 9223372036854775807}
    ]


def test_csv_distinguishes_null_from_empty(stores: dict[str, Path]) -> None:
    text = as_csv(stores["one"], ODD)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == list(EXPECTED[0])
    assert [row["s"] for row in rows] == ['a"b,\nø', "", ""]
    assert text.splitlines()[-1] == "-3,,,,,,,-7.00,1970-01-01"
    assert '""' in text.splitlines()[3]
    assert (rows[0]["b"], json.loads(rows[0]["l"]), json.loads(rows[0]["d"])) == (
        "00ff",
        [1, None],
        {"k": "v"},
    )
    assert (rows[0]["f"], rows[1]["f"]) == ("0.1", "nan")
    assert as_csv(stores["one"], "SELECT 1 AS a, 2 AS a WHERE false") == '"a","a"\n'


def test_display_texts_show_nulls(stores: dict[str, Path]) -> None:
    with run_query(stores["one"], ODD) as result:
        rows = [row for batch in result.batches for row in text_rows(batch)]
    assert rows[0] == ["1", "0.1", 'a"b,\nø', "00ff", "[1, null]", '{"k": "v"}', "true", "1.25", "2020-02-29"]
    assert rows[1] == ["NULL", "nan", "", "", "[]", '{"k": null}', "false", "NULL", "NULL"]


def test_slices_of_a_batch_can_be_shown(stores: dict[str, Path]) -> None:
    """Lists stay with their rows if a batch is a slice."""
    with run_query(stores["odd"], "SELECT policy, value FROM positions") as result:
        batch = next(result.batches)
    whole = list(text_rows(batch))
    assert [policy == "NULL" for policy, _ in whole] == batch.column(0).is_null().to_pylist()
    assert list(text_rows(batch.slice(5, 700))) == whole[5:705]


def test_few_rows_at_a_time_are_converted_to_text(stores: dict[str, Path]) -> None:
    """A row may have kilobytes, and ten times as much as Python values."""
    with run_query(stores["odd"], "FROM positions") as result:
        pieces = list(json_rows(result))
    assert sum(piece.count("position_id") for piece in pieces) == 900
    assert max(piece.count("position_id") for piece in pieces) < 900


def test_parquet_contains_every_row(tmp_path: Path, stores: dict[str, Path]) -> None:
    path = tmp_path / "new" / "rows.parquet"
    with run_query(stores["shuffled"], "FROM shuffled ORDER BY position_id") as result:
        facts = save_parquet(path, result)
    with run_query(stores["shuffled"], "FROM shuffled ORDER BY position_id") as result:
        expected = pa.Table.from_batches(result.batches, result.schema)
    found = pq.read_table(path)
    assert found.equals(expected)
    assert (facts.rows, facts.bytes) == (expected.num_rows, path.stat().st_size)


@pytest.mark.parametrize("rows", [0, 70_000])
def test_parquet_files_are_complete_or_absent(tmp_path: Path, stores: dict[str, Path], rows: int) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"earlier content")
    text = f"SELECT (CASE WHEN range = {rows} THEN 'x' ELSE '1' END)::INTEGER AS n FROM range(80_000)"
    with pytest.raises(ConfigError, match="Could not convert"), run_query(stores["one"], text) as result:
        save_parquet(path, result)
    assert path.read_bytes() == b"earlier content"
    assert list(tmp_path.iterdir()) == [path]


def test_parquet_is_not_written_into_the_store(tmp_path: Path, stores: dict[str, Path]) -> None:
    link = tmp_path / "link"
    link.symlink_to(stores["one"])
    for path in (stores["one"] / "x.parquet", link / "x.parquet", link / "positions" / "part-000000.parquet"):
        with (
            pytest.raises(InputError, match="must not be in the store"),
            run_query(stores["one"], "SELECT 1 AS a") as result,
        ):
            save_parquet(path, result)
    assert not (stores["one"] / "x.parquet").exists()


def test_unsupported_parquet_types_are_refused(tmp_path: Path, stores: dict[str, Path]) -> None:
    for text, error in {
        "SELECT 1 AS a, 2 AS a": "the result has several columns called 'a'",
        "SELECT INTERVAL 1 DAY AS i": "does not support the type of column 'i'",
    }.items():
        with pytest.raises((ConfigError, InputError), match=error), run_query(stores["one"], text) as result:
            save_parquet(tmp_path / "rows.parquet", result)
    with pytest.raises(InputError, match="folder"), run_query(stores["one"], "SELECT 1") as result:
        save_parquet(tmp_path, result)
    with (
        pytest.raises(InputError, match=r"expected \.parquet"),
        run_query(stores["one"], "SELECT 1") as result,
    ):
        save_parquet(tmp_path / "notes.txt", result)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="called 'a'"):
        as_json(stores["one"], "SELECT 1 AS a, 2 AS a")
