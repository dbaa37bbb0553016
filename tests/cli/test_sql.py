"""``hexdata sql``: where the query is from, and what is printed on a terminal and into a pipe."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hexdata.sql import DATABASE_NAME, named_queries, run_query
from tests.kit.command_line import hexdata_run, run_on_terminal

HEXDATA = (sys.executable, "-m", "hexdata", "sql")
COUNT = "SELECT count(*) AS n\nFROM games;\n"


@pytest.mark.parametrize(
    ("query", "out"),
    [
        ("FROM (VALUES (-5, 'b', NULL), (1234567, 'a' || chr(10) || chr(27), 0.5)) AS t (n, word, 盤)",
         "n\tword\t盤\n-5\tb\tNULL\n1234567\ta\\n\\x1b\t0.5\n"),
        ("SELECT 1 AS one WHERE false", "one\n"),
        ("SELECT range AS n FROM range(2500)", "\n".join(["n", *map(str, range(2500)), ""])),
    ],
)  # fmt: skip
def test_a_pipe_gets_every_row_as_tab_separated_lines(trmph_store: Path, query: str, out: str) -> None:
    ran = hexdata_run("sql", trmph_store, query)
    assert (ran.status, ran.out, ran.err) == (0, out, "")


def test_json_csv_and_parquet_hold_the_same(tmp_path: Path, trmph_store: Path) -> None:
    query = (
        "SELECT game_id, cell(move) AS cell FROM positions WHERE position_in_game < 3 ORDER BY position_id"
    )
    rows = json.loads(hexdata_run("sql", trmph_store, query, "--json").out)
    assert len(rows) == 80 * 3
    found = csv.DictReader(io.StringIO(hexdata_run("sql", trmph_store, query, "--csv").out))
    assert [{"game_id": int(row["game_id"]), "cell": row["cell"]} for row in found] == rows
    ran = hexdata_run("sql", trmph_store, query, "--parquet", tmp_path / "rows.parquet")
    assert (ran.status, pq.read_table(tmp_path / "rows.parquet").to_pylist()) == (0, rows)
    assert "240 rows" in ran.out


def test_named_queries_are_listed_and_run(trmph_store: Path) -> None:
    listed = json.loads(hexdata_run("sql", trmph_store, "@", "--json").out)
    assert {query["name"]: query["description"] for query in listed} == named_queries()
    out = hexdata_run("sql", trmph_store, "@").out
    assert all(f"@{name}" in out for name in named_queries())
    limits = ("--memory", "700MB", "--threads", 1)
    rows = json.loads(hexdata_run("sql", trmph_store, "@neighbours", "--json", *limits).out)
    assert [row["rows"] for row in rows] == ["input"]


def test_the_query_of_a_file_and_of_standard_input(
    trmph_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my query.sql"
    file.write_text(f"-- the number of games\n{COUNT}", encoding="utf-8-sig")
    for arguments in (["-f", file], ["--file", file], [], ["-"], ["-f", "-"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(COUNT.encode())))
        ran = hexdata_run("sql", trmph_store, *arguments)
        assert (ran.status, ran.out, ran.err) == (0, "n\n80\n", ""), arguments
    assert json.loads(hexdata_run("sql", trmph_store, "-f", file, "--json").out) == [{"n": 80}]
    file.write_text("@tiers")
    assert hexdata_run("sql", trmph_store, "-f", file).out.startswith("tier\t")


def on_terminal(*arguments: object, columns: int = 80) -> list[str]:
    """Return the lines that a terminal shows, without control sequences."""
    shown = run_on_terminal("sql", *arguments, COLUMNS=str(columns))
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).splitlines()


def test_a_terminal_shows_the_first_rows_and_counts_the_others(trmph_store: Path) -> None:
    lines = on_terminal(trmph_store, "SELECT range AS n FROM range(1234)")
    assert [line.strip() for line in lines[:41]] == ["n", *map(str, range(40))]
    assert "1,194 rows are not shown" in lines[41]
    many = " ".join(on_terminal(trmph_store, "SELECT range AS n FROM range(1_000_000_000_000)"))
    assert "more than 1,000,000 rows are not shown" in many
    few = on_terminal(trmph_store, "SELECT range AS n, repeat('x', 5000) AS long FROM range(40)")
    assert len(few) == 41
    assert all(line.endswith("x…") for line in few[1:])


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_shows_rows_vertically(trmph_store: Path, width: int) -> None:
    lines = on_terminal(trmph_store, "SELECT * FROM games ORDER BY game_id", columns=width)
    assert lines[0] == "game_id          0"
    assert max(map(len, lines)) <= width
    assert "40 rows are not shown" in " ".join(lines[-2:])
    table = on_terminal(trmph_store, "SELECT game_id, source_id, winner FROM games", columns=width)
    assert table[0] == "game_id  source_id  winner"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is enforced on Linux")
@pytest.mark.parametrize(
    "query",
    [
        "SELECT len(list_resize([1], 1000000000, 1))",
        "SELECT length(repeat('x', 3000000000))",
        "SELECT sum(x) FROM (SELECT unnest(range(0, 300000000)) AS x)",
    ],
)
def test_no_value_exceeds_the_memory(trmph_store: Path, query: str) -> None:
    """These once took 6 to 16 GB under a limit of 600 MB."""
    code = (
        "import re, sys\nfrom pathlib import Path\nfrom hexdata.__main__ import run\n"
        "try:\n    run()\n"
        "finally:\n"
        "    status = Path('/proc/self/status').read_text()\n"  # ru_maxrss counts the process that forked
        "    sys.stderr.write('peak ' + re.search(r'VmHWM:\\s+(\\d+)', status)[1])"
    )
    command = [sys.executable, "-c", code, "sql", str(trmph_store), query, "--memory", "600MB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert "Raise --memory." in done.stderr
    assert "Traceback" not in done.stderr
    assert int(done.stderr.rpartition("peak ")[2]) * 1024 < 800_000_000


def test_the_limit_of_memory_ends_with_the_command(trmph_store: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert [hexdata_run("sql", trmph_store, f"SELECT {what}").status for what in ("1", "nothing")] == [0, 2]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_ctrl_c_ends_a_query_that_begins_just_then(
    trmph_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Thread.start

    def begin_at_ctrl_c(thread: threading.Thread) -> None:
        begin(thread)
        if thread.name == "hexdata-query":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "start", begin_at_ctrl_c)
    query = "SELECT sum(a) FROM range(1_000_000_000_000) t(a) WHERE hash(a) = 1"
    with pytest.raises(KeyboardInterrupt), run_query(trmph_store, query):
        pass


@pytest.mark.parametrize(
    ("installed", "arguments", "status", "message"),
    [
        (True, [], 0, "shell -readonly {}/" + DATABASE_NAME),
        (False, [], 2, "pip install duckdb-cli"),
        (True, ["--csv"], 2, "there is no query"),
    ],
)
def test_a_terminal_without_a_query_opens_the_duckdb_shell(
    trmph_store: Path, tmp_path: Path, installed: bool, arguments: list[str], status: int, message: str
) -> None:
    """The shell, a program of the search path that takes the place of the process, prints its arguments."""
    pty = pytest.importorskip("pty")
    if installed:
        (tmp_path / "duckdb").write_text('#!/bin/sh\necho "shell $@"\n')
        (tmp_path / "duckdb").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}/bin", "TERM": "dumb", "COLUMNS": "400"}
    master, slave = pty.openpty()
    command = [*HEXDATA, str(trmph_store), *arguments]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as child:
        os.close(slave)
        os.write(master, b"\x04")  # the end of the input, for a command that reads it
        written = b""
        with contextlib.suppress(OSError):
            while part := os.read(master, 1 << 16):
                written += part
    os.close(master)
    assert child.returncode == status
    assert message.format(trmph_store) in " ".join(written.decode().split())
