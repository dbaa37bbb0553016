"""DuckDB sessions: any path can be read, limits apply, and failures become errors of hexdata."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hexdata.errors import BudgetError
from hexdata.store.session import duckdb_session, quote

MEMORY = 200 << 20


def test_each_session_has_its_own_limits_and_temporary_folder(tmp_path):
    names = ("threads", "memory_limit", "temp_directory", "preserve_insertion_order", "enable_progress_bar")
    settings = ", ".join(f"current_setting({quote(name)})" for name in names)
    limits = {"memory": MEMORY, "threads": 3, "spill": tmp_path}
    with duckdb_session(**limits) as con, duckdb_session(**limits):
        threads, memory, folder, *flags = con.sql(f"SELECT {settings}").fetchall()[0]
        assert (threads, memory, flags) == (3, "200.0 MiB", [False, False])
        assert Path(folder).parent == tmp_path.resolve()
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_query_too_large_is_over_the_budget():
    query = "SELECT list(i) FROM range(100_000_000) t(i)"
    with pytest.raises(BudgetError, match="Raise --memory"), duckdb_session(memory=0, threads=1) as con:
        con.sql(query).fetchall()


def test_a_full_spill_folder_is_a_full_disk(tmp_path):
    """DuckDB may write no more, because too little of the disk would remain free."""
    query = "SELECT max(i) FROM (SELECT i, hash(i) h FROM range(3_000_000) t(i) ORDER BY h)"
    with (
        pytest.raises(OSError, match="failed to offload") as caught,
        duckdb_session(memory=40 << 20, threads=1, spill=tmp_path) as con,
    ):
        con.execute(f"SET max_temp_directory_size = '1MB'; {query}").fetchall()
    assert caught.value.errno == errno.ENOSPC
    assert Path(caught.value.filename).parent == tmp_path
    assert "Memory" not in str(caught.value)
