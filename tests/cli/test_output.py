"""Escaping: no command prints control characters or line feeds of file names."""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.text import printable
from tests.cli.terminal import run_on_terminal
from tests.cli.test_cli import hexdata_run

CLI = Path(__file__).parents[2] / "hexdata" / "cli"

FORGED = "note: all is well"
HOSTILE = f"a\x1b[31m\x1b]0\x07\n{FORGED}\r\u202e\u2066\u2028\u200b\u0085\x9b2J\x7f [red]b [link=x]c :skull:"
"""A hostile name of a file."""
RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def check(text: str) -> None:
    """Check that all lines are printable, except for tabs in tables, and that none is part of a name."""
    assert not RAW.search(text), ascii(text)
    assert not any(line.startswith(FORGED) for line in text.split("\n")), text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain a_b-c.pkl.gz", "plain a_b-c.pkl.gz"),
        ("Bücher/棋.trmph", "Bücher/棋.trmph"),
        ("[red]x", "[red]x"),
        ("a\nb\r\t\x00", r"a\nb\r\t\x00"),
        ("\x1b[31m\x9b\x7f", r"\x1b[31m\x9b\x7f"),
        ("\u202a\u202e\u2066\u2069\u061c", r"\u202a\u202e\u2066\u2069\u061c"),
        ("\u2028\u2029\u0085\xa0", r"\u2028\u2029\x85\xa0"),
        ("\u200b\u200d\u2060\ufeff\u034f\u3164\ufe0f", r"\u200b\u200d\u2060\ufeff\u034f\u3164\ufe0f"),
        ("\udcff\U000e0001\U000e0100", r"\udcff\U000e0001\U000e0100"),
    ],
)
def test_printable_text_is_one_line_without_controls(text, shown):
    assert printable(text) == shown


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A folder of two valid files and a damaged one, with names that contain HOSTILE, and their store."""
    top = tmp_path_factory.mktemp("hostile")
    folder = top / "in"
    folder.mkdir()
    lines = "".join(f"#5,a1b1a2b2a3b3a4b4a{5 + i % 1}{'c1d1e1'[: 2 * (i % 3)]} b\n" for i in range(12))
    try:
        (folder / f"{HOSTILE}.trmph").write_text(lines + "#5,c3\x1b[2J\u202ed4 b\n")
        (folder / os.fsdecode(b"half\xff.trmph")).write_text("#5,c1c2 r\n")
        (folder / f"z{HOSTILE}.pkl.gz").write_bytes(b"no pickle \x1b[31m")
    except OSError:
        pytest.skip("this file system does not take such names")
    store = top / f"store{HOSTILE}"
    convert_sources([folder], store, ConvertOptions(workers=1, max_reject_rate=1.0, val=0, test=0))
    shuffle_store(store, ShuffleOptions(seed=1, buckets=1, threads=1))
    export_shards(store, ExportOptions(workers=1))
    return top


COMMANDS = [
    "convert IN STORE",
    "convert AGAIN STORE",
    "convert IN NEW",
    "convert IN NEW --max-reject-rate 1",
    "convert MISSING NEW",
    "convert IN STORE --HOSTILE",
    "convert IN STORE --memory HOSTILE",
    "HOSTILE",
    "shuffle STORE --seed 2 --plan",
    "shuffle STORE --balance-by source",
    "shuffle STORE --where HOSTILE",
    "export STORE",
    "export STORE --format pickle --order original",
    "export STORE --format HOSTILE",
    "verify STORE",
    "verify STORE --round-trip IN",
    "verify MISSING",
    "sql STORE @sources",
    "sql STORE @flags",
    "sql STORE @rejects",
    "sql STORE 'SELECT * FROM rejected'",
    "sql STORE HOSTILE",
    "sql STORE @HOSTILE",
    "show STORE 0",
    "show STORE --game 0",
    "show STORE --game 0 --svg NEW.svg",
    "show HOSTILE",
    "report STORE",
    "report STORE --output MISSING/x.html",
    "load STORE",
    "load STORE --mode HOSTILE",
    "load MISSING",
    "live IN --batches 1 --batch-size 4 --seconds 2 --pool-size 4 --reservoir 16",
    "live MISSING --seconds 0.2",
    "run MISSING",
    "run CONFIG",
    "demo --HOSTILE",
]


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_escapes_names(hostile, tmp_path, line):
    store = tmp_path / f"store{HOSTILE}"
    shutil.copytree(hostile / store.name, store)
    shutil.copytree(hostile / "in", again := tmp_path / f"again{HOSTILE}")
    (config := tmp_path / "config.toml").write_text(
        f"store = {json.dumps(str(tmp_path / 'x'))}\n[{json.dumps(HOSTILE)}]\n"
    )
    values = {
        "IN": hostile / "in",
        "AGAIN": again,
        "STORE": store,
        "NEW": tmp_path / f"new{HOSTILE}",
        "NEW.svg": tmp_path / f"new{HOSTILE}.svg",
        "MISSING": tmp_path / f"missing{HOSTILE}",
        "MISSING/x.html": tmp_path / f"missing{HOSTILE}" / "x.html",
        "CONFIG": config,
        "HOSTILE": HOSTILE,
        "@HOSTILE": f"@{HOSTILE}",
        "--HOSTILE": f"--{HOSTILE}",
    }
    command, _, query = line.partition("'")
    arguments = [str(values.get(word, word)) for word in command.split()]
    arguments += [query.rstrip("'")] if query else []
    ran = hexdata_run(*arguments)
    check(ran.err)
    check(ran.out)
    assert ran.out or ran.err
    if ran.status == 0:
        again = hexdata_run(*arguments, "--json")
        check(again.err)
        check(again.out)
        assert again.status == 0, again.err
        [json.loads(text) for text in (again.out.splitlines() if line.startswith("live") else [again.out])]


def test_json_contains_names_unchanged(hostile):
    ran = hexdata_run("sql", hostile / f"store{HOSTILE}", "SELECT name FROM sources ORDER BY name", "--json")
    names = [row["name"] for row in json.loads(ran.out)]
    assert f"in/{HOSTILE}.trmph" in names


TERMINAL = {"TERM": "xterm", "COLUMNS": "200"}
BAR = re.compile(r"\x1b\[[0-9;]*[mAK]|\x1b\[\?25[lh]|\r")
"""Control sequences of rich: styles, cursor movements and carriage returns."""


QUERIES = ("SELECT name FROM sources", f'SELECT 1 AS "{HOSTILE}"', "SELECT [name] FROM sources")


@pytest.mark.parametrize(
    ("form", "query"),
    [*zip(("--csv", "--json", "--csv"), QUERIES, strict=True), *((None, q) for q in QUERIES)],
)
def test_names_are_escaped_on_a_terminal(hostile, form, query):
    store = hostile / f"store{HOSTILE}"
    shown = run_on_terminal("sql", store, query, *([form] if form else []), **TERMINAL)
    check(BAR.sub("", shown))
    assert r"a\x1b[31m" in shown or r"a\\x1b[31m" in shown or r"a\u001b[31m" in shown


@pytest.mark.parametrize(
    "line",
    [
        "convert IN NEW --max-reject-rate 1",
        "verify STORE --round-trip IN",
        "load STORE",
        "sql STORE @sources",
    ],
)
def test_names_are_escaped_in_the_progress_bar(hostile, tmp_path, line):
    shutil.copytree(hostile / f"store{HOSTILE}", tmp_path / f"store{HOSTILE}")
    values = {
        "IN": hostile / "in",
        "NEW": tmp_path / f"new{HOSTILE}",
        "STORE": tmp_path / f"store{HOSTILE}",
    }
    shown = run_on_terminal(*(values.get(word, word) for word in line.split()), **TERMINAL)
    check(BAR.sub("", shown))


def test_csv_in_a_pipe_is_exact_even_with_force_color(hostile, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    query = f"SELECT name AS \"{HOSTILE}\" FROM sources, range(50) WHERE name LIKE '%red%trmph'"
    command = [sys.executable, "-m", "hexdata", "sql", str(hostile / f"store{HOSTILE}"), query]
    found = subprocess.run([*command, "--csv"], capture_output=True, check=True, timeout=300).stdout
    rows = list(csv.reader(io.StringIO(found.decode(), newline="")))
    assert rows == [[HOSTILE]] + [[f"in/{HOSTILE}.trmph"]] * 50
    shown = subprocess.run(command, capture_output=True, check=True, timeout=300).stdout.decode()
    assert shown.count("\n") == 51, "a pipe gets all rows"
    check(shown)


def test_brackets_and_colons_of_names_are_not_markup(hostile):
    ran = hexdata_run("sql", hostile / f"store{HOSTILE}", "@sources")
    assert "[red]b [link=x]c :skull:" in ran.out
    ran = hexdata_run("verify", hostile / f"store{HOSTILE}", "--round-trip", hostile / "in")
    assert "[red]b [link=x]c :skull:" in ran.out


@pytest.mark.parametrize("raised", [OSError(5, "Input/output error", HOSTILE), ValueError(HOSTILE)])
def test_unexpected_errors_are_escaped(monkeypatch, raised):
    def fail(*_, **__):
        warnings.simplefilter("always")  # until main returns
        warnings.warn(HOSTILE, stacklevel=1)
        raise raised

    monkeypatch.setattr("hexdata.verify.verify_store", fail)
    ran = hexdata_run("verify", "store")
    assert ran.status == 1
    check(ran.err)
    assert "[red]b" in ran.err
    assert ran.err.count("\\n" + FORGED) == 2, "the warning and the error"
    assert ("Traceback" in ran.err) == isinstance(raised, ValueError)


def test_the_bar_and_all_output_are_escaped(capsys):
    from hexdata.cli.render import Output, console
    from hexdata.progress_bar import ProgressBar

    output = Output(False)
    with ProgressBar(console(stderr=True)) as bar:
        bar.begin(HOSTILE, 3, "files")
        bar.note(HOSTILE)
    output.error(HOSTILE)
    output.line(HOSTILE)
    output.table([HOSTILE], [[HOSTILE + "\t"]])
    shown = capsys.readouterr()
    assert "\t" not in shown.out
    check(shown.out)
    check(shown.err)
    assert shown.err.startswith("note: a\\x1b[31m")


def test_all_output_passes_the_escaping_functions():
    """The commands print only with ``Output``, ``print_stderr`` or a ``Text`` of ``printable``."""
    allowed = {
        "app.py": {"typer.echo": 1, "sys.stderr.write": 1},
        "render.py": {"typer.echo": 2},
        "sql.py": {"typer.echo": 1},
    }
    for path in sorted(CLI.glob("*.py")):
        calls = [
            ast.unparse(n.func) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)
        ]
        raw = [c for c in calls if c in ("print", "typer.echo", "typer.secho", "Console", "Text.from_markup")
               or re.fullmatch(r"sys\.std(out|err)\.write", c)]  # fmt: skip
        found = {name: raw.count(name) for name in set(raw)}
        if path.name == "render.py":
            assert found.pop("Console") == 1
        assert found == allowed.get(path.name, {}), path
