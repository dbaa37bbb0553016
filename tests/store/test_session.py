"""DuckDB sessions: any path can be read, limits apply, and failures become errors of hexdata."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hexdata.errors import BudgetError, StoreError
from hexdata.store import session
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


# --- one instance for several sessions ----------------------------------------------------------------


@pytest.fixture
def no_idle() -> None:
    session._close_idle()


def settings_of(con: session.DuckDBPyConnection) -> dict[str, str]:
    return dict(con.sql("SELECT name, value FROM duckdb_settings()").fetchall())


@pytest.mark.usefixtures("no_idle")
def test_a_session_receives_nothing_from_the_one_before_it(tmp_path: Path) -> None:
    with duckdb_session(memory=MEMORY, threads=1, spill=tmp_path) as con:
        fresh = settings_of(con), con.sql("SHOW ALL TABLES").fetchall()
    with duckdb_session(memory=MEMORY // 2, threads=3, spill=tmp_path / "other") as con:
        con.execute("CREATE TABLE a AS FROM range(10)")
        con.execute("CREATE TEMP TABLE b AS FROM range(10)")
        con.execute("CREATE MACRO c(n) AS n + 1")
        con.register("d", pa.table({"n": [1]}))
        other = settings_of(con)
    assert len(session._idle) == 1
    with duckdb_session(memory=MEMORY, threads=1, spill=tmp_path) as con:
        assert session._idle == []
        again = settings_of(con), con.sql("SHOW ALL TABLES").fetchall()
        for name in "abd":
            with pytest.raises(duckdb.CatalogException):
                con.sql(f"FROM {name}")
        with pytest.raises(duckdb.CatalogException):
            con.sql("SELECT c(1)")
    differ = {name for name, value in again[0].items() if value != fresh[0][name]}
    assert differ == {"temp_directory"}
    assert again[1] == fresh[1] == []
    assert {"memory_limit", "threads"} <= {name for name, value in other.items() if value != fresh[0][name]}


@pytest.mark.usefixtures("no_idle")
def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """Also if its size and time are the same."""
    path = tmp_path / "file"
    for number in (1, 2):
        pq.write_table(pa.table({"n": [number]}), path)
        os.utime(path, ns=(10**18, 10**18))
        with duckdb_session(memory=MEMORY, threads=1) as con:
            assert con.sql(f"FROM {read_parquet_sql([path])}").fetchall() == [(number,)]


@pytest.mark.usefixtures("no_idle")
def test_some_instances_are_not_used_again(tmp_path: Path) -> None:
    """Those of a session that failed, that has spilled or that changes settings."""
    with pytest.raises(StoreError), duckdb_session(memory=MEMORY, threads=1) as con:
        con.sql("FROM nothing")
    assert session._idle == []
    with duckdb_session(memory=MEMORY, threads=1, own_instance=True) as con:
        con.execute("SET lock_configuration = true")
    assert session._idle == []
    with duckdb_session(memory=40 << 20, threads=1, spill=tmp_path) as con:
        con.execute("CREATE TABLE a AS SELECT range, repeat('x', 200) || range FROM range(500000)")
        assert con.sql("FROM duckdb_temporary_files()").fetchall()
    assert session._idle == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_idle")
def test_few_instances_are_kept() -> None:
    with ExitStack() as stack:
        for _ in range(session._MAX_IDLE + 2):
            stack.enter_context(duckdb_session(memory=MEMORY, threads=1))
    assert len(session._idle) == session._MAX_IDLE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("no_idle")
def test_a_fork_has_no_instance_of_its_parent() -> None:
    with duckdb_session(memory=MEMORY, threads=4):
        pass
    assert len(session._idle) == 1
    child = os.fork()
    if not child:
        os._exit(len(session._idle))
    assert os.waitpid(child, 0)[1] == 0
    assert session._idle == []
