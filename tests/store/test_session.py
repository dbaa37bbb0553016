"""DuckDB sessions: any path can be read, limits apply, and failures become errors of hexdata."""

from __future__ import annotations

import errno
import itertools
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import BudgetError, StoreError
from hexdata.store.session import duckdb_session, path_list_sql, quote, read_parquet_sql
from tests.ctrl_c import ctrl_c_after

MEMORY = 200 << 20

FOLDERS = [
    "plain",
    "sp ace",
    "quo'te",
    'dou"ble',
    "x'); DROP TABLE t; --",
    "st*r",
    "what?",
    "br[a]cket",
    "[",
    "]",
    "{a,b}",
    "back\\slash",
    "seed=7",
    "split=train",
    "Stellung-ø-盤",
    "%20#;$~",
    "new\nline",
]


@pytest.mark.parametrize("name", FOLDERS)
def test_any_path_can_be_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    paths = [folder / "first", folder / "second"]
    for number, path in enumerate(paths):
        pq.write_table(pa.table({"n": [number, 10 + number]}), path)
    for other in {"stXr", "whatX", "bracket"} - {name}:  # names that match if the path is read as a pattern
        (tmp_path / other).mkdir()
        pq.write_table(pa.table({"n": [99]}), tmp_path / other / "first")
    with duckdb_session(memory=MEMORY, threads=1, spill=folder / "spill") as con:
        plain = con.sql(f"SELECT * FROM {read_parquet_sql(paths)} ORDER BY n")
        assert plain.columns == ["n"]
        assert plain.fetchall() == [(0,), (1,), (10,), (11,)]
        placed = con.sql(
            f"SELECT filename, file_row_number FROM {read_parquet_sql(paths, row_location=True)}"
        )
        assert sorted(placed.fetchall()) == [(str(path), row) for path in paths for row in (0, 1)]
        footers = con.sql(f"SELECT DISTINCT num_values FROM parquet_metadata({path_list_sql(paths)})")
        assert footers.fetchall() == [(2,)]


def test_a_quoted_text_is_one_literal() -> None:
    with duckdb_session(memory=MEMORY, threads=1) as con:
        for text in ("it's", "''", "\\'; SELECT 1", "ø"):
            assert con.sql(f"SELECT {quote(text)}").fetchall() == [(text,)]


def test_each_session_has_its_own_limits_and_temporary_folder(tmp_path: Path) -> None:
    names = ("threads", "memory_limit", "temp_directory", "preserve_insertion_order", "enable_progress_bar")
    with (
        duckdb_session(memory=MEMORY, threads=3, spill=tmp_path) as con,
        duckdb_session(memory=MEMORY, threads=3, spill=tmp_path),
    ):
        found = con.sql(f"SELECT {', '.join(f'current_setting({quote(n)})' for n in names)}").fetchall()[0]
        assert (found[0], found[1], *found[3:]) == (3, "200.0 MiB", False, False)
        assert Path(found[2]).is_absolute()
        assert Path(found[2]).parent == tmp_path
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_query_too_large_is_over_the_budget(tmp_path: Path) -> None:
    query = "SELECT list(i) FROM range(100_000_000) t(i)"
    with pytest.raises(BudgetError, match="Raise --memory"), duckdb_session(memory=0, threads=1) as con:
        con.sql(query).fetchall()


SPILLING = "SELECT max(i) FROM (SELECT i, hash(i) h FROM range(3_000_000) t(i) ORDER BY h)"


def test_a_full_spill_folder_is_a_full_disk(tmp_path: Path) -> None:
    """DuckDB may write no more, because too little of the disk would remain free."""
    with (
        pytest.raises(OSError, match="failed to offload") as caught,
        duckdb_session(memory=40 << 20, threads=1, spill=tmp_path) as con,
    ):
        con.execute(f"SET max_temp_directory_size = '1MB'; {SPILLING}").fetchall()
    assert caught.value.errno == errno.ENOSPC
    assert Path(caught.value.filename).parent == tmp_path
    assert "Memory" not in str(caught.value)


def test_a_full_spill_folder_is_a_full_disk_for_streamed_rows(tmp_path: Path) -> None:
    """Arrow reports the error in this case."""
    text = "Out of Memory Error: no room (1 MB used).\nThis limit was set by 'max_temp_directory_size'."
    with (
        pytest.raises(OSError, match=r"no room \(1 MB used\): ") as caught,
        duckdb_session(memory=MEMORY, threads=1, spill=tmp_path),
    ):
        raise OSError(text)
    assert caught.value.errno == errno.ENOSPC
    assert Path(caught.value.filename).parent == tmp_path


@pytest.mark.parametrize("content", [b"", b"no parquet", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_broken_file_is_an_error_of_the_store(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "part").write_bytes(content)
    with (
        pytest.raises(StoreError, match=r"query failed.*part"),
        duckdb_session(memory=MEMORY, threads=1) as con,
    ):
        con.sql(f"SELECT * FROM {read_parquet_sql([tmp_path / 'part'])}").fetchall()


@pytest.mark.parametrize("again", range(4))  # DuckDB may be in any phase of the query
def test_an_interrupt_stops_a_query(again: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    with (
        pytest.raises(KeyboardInterrupt),
        ctrl_c_after(0.3 + again / 10),
        duckdb_session(memory=MEMORY, threads=2) as con,
    ):
        con.sql("SELECT count(*) FROM range(1_000_000_000_000) t(i) WHERE i % 7 = 3").fetchall()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_stops_a_query_of_rows_from_python() -> None:
    """The KeyboardInterrupt is raised in the generator of the rows; DuckDB reports it as a query error."""
    schema = pa.schema([("i", pa.int64())])
    batch = pa.record_batch([pa.array(range(1000))], schema)
    endless = pa.RecordBatchReader.from_batches(schema, (batch for _ in itertools.count()))
    with (
        pytest.raises(KeyboardInterrupt),
        ctrl_c_after(0.3),
        duckdb_session(memory=MEMORY, threads=1) as con,
    ):
        con.from_arrow(endless).filter("i % 7 = 3").count("*").fetchall()


def test_sessions_may_end_in_any_order() -> None:
    """For example, if a stream of rows is not read to its end before it is collected."""
    before = signal.getsignal(signal.SIGINT)
    first, second = (duckdb_session(memory=MEMORY, threads=1) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGINT) is not before
    second.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_session_may_be_opened_in_any_thread() -> None:
    """No signal handler can be set there."""

    def answer() -> list[tuple[int]]:
        with duckdb_session(memory=MEMORY, threads=1) as con:
            return con.sql("SELECT 7").fetchall()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(answer).result() == [(7,)]


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="mine"), duckdb_session(memory=MEMORY, threads=1):
        raise RuntimeError("mine")


@pytest.mark.parametrize(("build_right", "kind"), [(False, "RIGHT"), (True, "LEFT")])
def test_joins_build_their_hash_table_from_the_right_side(build_right: bool, kind: str) -> None:
    """DuckDB swaps the sides and the kind of a join if it estimates that the left side is smaller."""
    query = "EXPLAIN SELECT * FROM range(10) a(i) LEFT JOIN range(1_000_000) b(i) USING (i)"
    with duckdb_session(memory=MEMORY, threads=1, build_right=build_right) as con:
        assert f"Join Type: {kind}" in con.sql(query).fetchall()[0][1]


def test_a_damaged_page_found_while_rows_are_streamed_is_an_error_of_the_store(tmp_path: Path) -> None:
    """Arrow passes DuckDB's message on as an OSError or a ValueError."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": list(range(1000))}), path, compression="zstd")
    whole = path.read_bytes()
    refused = 0
    for at in range(4, 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            with duckdb_session(memory=MEMORY, threads=1) as con:
                list(con.sql(f"FROM {read_parquet_sql([path])}").to_arrow_reader(100))
        except StoreError as error:
            assert "hexdata verify" in str(error)  # noqa: PT017 - other changes are not found
            refused += 1
    assert refused > 10
