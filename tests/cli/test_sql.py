"""``hexdata sql``: what it prints, on a terminal and into a pipe, and how it ends."""

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
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hexdata.cli import main
from hexdata.sql import DATABASE_NAME, named_queries
from tests.cli.terminal import run_on_terminal
from tests.conftest import CopyStore

Ask = Callable[..., tuple[int, str, str]]
HEXDATA = (sys.executable, "-m", "hexdata", "sql")


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return ``ask(*arguments)``: the exit status of ``hexdata sql``, and what it wrote to both outputs."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["hexdata", "sql", *map(str, arguments)])
        status = 0
        with contextlib.suppress(SystemExit):
            try:
                main()
            except SystemExit as end:
                status = end.code or 0  # type: ignore[assignment]  # main gives numbers
        return (status, *capfd.readouterr())

    return run


def test_a_pipe_gets_tab_separated_lines(trmph_store: Path, ask: Ask) -> None:
    query = (
        "SELECT * FROM (VALUES (-5, 'b', NULL), (1234567, 'a' || chr(10) || chr(27), 0.5)) AS t (n, word, 盤)"
    )
    assert ask(trmph_store, query) == (
        0,
        "n\tword\t盤\n-5\tb\tNULL\n1234567\ta\\n\\x1b\t0.5\n",
        "",
    )
    assert ask(trmph_store, "SELECT 1 AS one WHERE false") == (0, "one\n", "")


def test_a_pipe_gets_every_row(trmph_store: Path, ask: Ask) -> None:
    status, out, err = ask(trmph_store, "SELECT range AS n FROM range(2500)")
    assert (status, err) == (0, "")
    assert [line.strip() for line in out.splitlines()] == ["n", *map(str, range(2500))]


def test_json_csv_and_parquet_hold_the_same(tmp_path: Path, trmph_store: Path, ask: Ask) -> None:
    query = (
        "SELECT game_id, cell(move) AS cell FROM positions WHERE position_in_game < 3 ORDER BY position_id"
    )
    rows = json.loads(ask(trmph_store, query, "--json")[1])
    assert len(rows) == 80 * 3
    found = csv.DictReader(io.StringIO(ask(trmph_store, query, "--csv")[1]))
    assert [{"game_id": int(row["game_id"]), "cell": row["cell"]} for row in found] == rows
    status, out, _ = ask(trmph_store, query, "--parquet", tmp_path / "rows.parquet")
    assert (status, pq.read_table(tmp_path / "rows.parquet").to_pylist()) == (0, rows)
    assert "rows.parquet: 240 rows, " in out


def test_named_queries_are_listed_and_run(trmph_store: Path, ask: Ask) -> None:
    listed = json.loads(ask(trmph_store, "@", "--json")[1])
    assert {query["name"]: query["description"] for query in listed} == named_queries()
    out = ask(trmph_store, "@")[1]
    assert all(f"@{name}" in out for name in named_queries())
    rows = json.loads(ask(trmph_store, "@neighbours", "--json", "--memory", "700MB", "--threads", 1)[1])
    assert [row["rows"] for row in rows] == ["input"]


def test_what_is_wrong_is_said_once(tmp_path: Path, trmph_store: Path, ask: Ask) -> None:
    wrong = [
        ((trmph_store, "SELECT nix FROM games"), 2, 'found Binder Error: Referenced column "nix"'),
        ((trmph_store, "DROP VIEW games"), 2, "DROP is not allowed: queries can only read"),
        ((trmph_store, "@nix"), 2, "unknown named query; found @nix; expected one of @dispersion"),
        ((trmph_store, "SELECT 1", "--csv", "--json"), 2, "more than one output format"),
        ((trmph_store, "SELECT 1", "--memory", "10MB"), 1, "Raise --memory"),
        ((trmph_store, "SELECT 1", "--memory", "much"), 2, "not a size"),
        ((trmph_store, "SELECT 1", "--parquet", trmph_store / "x"), 1, "must not be in the store"),
        ((tmp_path, "SELECT 1"), 1, "not a hexdata store"),
    ]
    for arguments, status, message in wrong:
        found, out, err = ask(*arguments)
        assert (found, out) == (status, ""), arguments
        assert err.startswith("hexdata: ")
        assert message in err
        assert "Traceback" not in err


def on_terminal(*arguments: object) -> str:
    """Run ``hexdata sql`` on a terminal; return what it wrote there, without control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", run_on_terminal("sql", *arguments))


def test_a_terminal_shows_the_first_rows_and_says_how_many_more_there_are(trmph_store: Path) -> None:
    lines = on_terminal(trmph_store, "SELECT range AS n FROM range(1234)").splitlines()
    assert [line.strip() for line in lines[:41]] == ["n", *map(str, range(40))]
    assert "1,194 rows are not shown" in lines[41]
    many = on_terminal(trmph_store, "SELECT range AS n FROM range(1_000_000_000_000)")
    assert "more than 1,000,000 rows are not shown" in many
    few = on_terminal(trmph_store, "SELECT range AS n, repeat('x', 5000) AS long FROM range(40)")
    assert "not shown" not in few
    assert all(line.endswith("x…") for line in few.splitlines()[1:])


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_shows_rows_vertically(trmph_store: Path, monkeypatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = on_terminal(trmph_store, "SELECT * FROM games ORDER BY game_id").splitlines()
    assert lines[0] == "game_id          0"
    assert max(map(len, lines)) <= width
    assert "75 rows are not shown" in " ".join(lines[-2:])
    table = on_terminal(trmph_store, "SELECT game_id, source_id, winner FROM games").splitlines()
    assert table[0] == "game_id  source_id  winner"


def test_ctrl_c_ends_a_query(trmph_store: Path) -> None:
    command = [*HEXDATA, str(trmph_store), "FROM range(1_000_000_000_000)", "--csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()  # it runs
        child.send_signal(signal.SIGINT)
        while child.stdout.read(1 << 20):
            pass
        assert child.stderr.read() == b"hexdata: interrupted\n"
    assert child.returncode == 130


def test_a_reader_may_leave(trmph_store: Path) -> None:
    for form in (["--csv"], []):
        command = [*HEXDATA, str(trmph_store), "FROM range(1_000_000_000_000)", *form]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            child.stdout.readline()
            child.stdout.close()
            assert b"Traceback" not in child.stderr.read()
        assert child.returncode != 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is enforced on Linux")
@pytest.mark.parametrize(
    "query",
    [
        "SELECT len(list_resize([1], 1000000000, 1))",
        "SELECT len(range(0, 500000000))",
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


def test_the_limit_of_memory_ends_with_the_command(ask: Ask, trmph_store: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert ask(trmph_store, "SELECT 1")[0] == 0
    assert ask(trmph_store, "SELECT nothing")[0] == 2
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


# The query from a file, from standard input, and from the DuckDB shell.


def test_the_query_of_a_file(trmph_store: Path, ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "my query.sql"
    file.write_text("-- the number of games\nSELECT count(*) AS n\nFROM games;\n", encoding="utf-8-sig")
    assert ask(trmph_store, "-f", file) == ask(trmph_store, "--file", file) == (0, "n\n80\n", "")
    assert json.loads(ask(trmph_store, "-f", file, "--json")[1]) == [{"n": 80}]
    file.write_text("@tiers")
    assert ask(trmph_store, "-f", file)[1].startswith("tier\t")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-f", "missing.sql"], "missing.sql: the query cannot be read"),
        (["-f", "latin.sql"], "latin.sql: the query is not valid UTF-8"),
        (["FROM games", "-f", "q.sql"], "the query is given twice"),
        (["-f", "empty.sql"], "the query is empty"),
    ],
)
def test_a_query_file_that_cannot_be_used(
    trmph_store: Path,
    ask: Ask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.sql").write_bytes("SELECT 'é'".encode("latin-1"))
    Path("empty.sql").write_text("\n")
    status, out, err = ask(trmph_store, *arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("arguments", [(), ("-",), ("-f", "-")])
def test_the_query_from_standard_input(
    trmph_store: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    query = io.BytesIO(b"SELECT count(*) AS n\nFROM games;\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(query))
    assert ask(trmph_store, *arguments) == (0, "n\n80\n", "")


@pytest.mark.parametrize("installed", [True, False])
def test_a_terminal_without_a_query_opens_the_duckdb_shell(
    trmph_store: Path, copy_store: CopyStore, tmp_path: Path, installed: bool
) -> None:
    """The shell is a program of the search path; the one of this test prints its arguments."""
    pty = pytest.importorskip("pty")
    store = copy_store(trmph_store)
    folder = tmp_path / "bin"
    folder.mkdir()
    if installed:
        (folder / "duckdb").write_text('#!/bin/sh\necho "shell $@"\n')
        (folder / "duckdb").chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}/bin", "TERM": "dumb", "COLUMNS": "400"}
    master, slave = pty.openpty()
    child = subprocess.Popen([*HEXDATA, str(store)], stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    written = b""
    with contextlib.suppress(OSError):
        while part := os.read(master, 1 << 16):
            written += part
    os.close(master)
    text = " ".join(written.decode().split())
    if installed:
        assert (child.wait(), text) == (0, f"shell -readonly {store / DATABASE_NAME}")
    else:
        assert child.wait() == 2
        assert "pip install duckdb-cli" in text


def test_an_output_option_needs_a_query(trmph_store: Path) -> None:
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    ran = subprocess.run(
        [*HEXDATA, str(trmph_store), "--csv"], stdin=slave, stdout=slave, stderr=subprocess.PIPE
    )
    os.close(slave)
    os.close(master)
    assert ran.returncode == 2
    assert b"there is no query" in ran.stderr
