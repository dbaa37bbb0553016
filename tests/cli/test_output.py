"""Output: tables on terminals of several widths and in pipes, wrapped lines, and escaped names of files."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hexdata.cli.messages import print_stderr
from hexdata.cli.render import Output
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.export import ExportOptions, export_shards
from hexdata.progress_bar import ProgressBar
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.kit.command_line import hexdata_run, run_on_terminal

# --- tables and lines -----------------------------------------------------------------------------------

STAGES = ["stage", "positions", "games", "on disk", "seconds", "positions/s", "location"]
RUN = [
    ["convert", "97,000,000", "1,400,000", "1.13 GB", "812.07", "119,448", "hexdata-demo/store/positions"],
    ["verify", "97,000,000", "", "", "61.20", "1,584,967", ""],
]
QUALITY = ["shuffle of the train split", "status", "before", "after", "expected", "s.d.", "deviation", "note"]
FIGURES = [
    ["neighbours of the same game, one row apart", "ok", "98.54%", "1.856%", "1.74%", "0.2%", "+0.6 s.d.",
     "rows of known games only"],
    ["correlation of the values of neighbours", "-", "0.93", "0.0012", "0", "0.0157", "-0.1 s.d.", ""],
]  # fmt: skip
WINNERS = ["file", "games", "winner"]
FILES = [["a.trmph", "12", "red"], ["b.trmph", "1,234", "blue"]]
Capture = pytest.CaptureFixture[str]


def printed(
    capsys: Capture, names: list[str], rows: list[list[str]], width: int, **options: Any
) -> list[str]:
    """Return the lines of a table on a terminal of a width."""
    output = Output(False)
    output.out = Console(width=width, force_terminal=True, color_system=None, highlight=False, soft_wrap=True)
    output.table(names, rows, **options)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [50, 60, 80, 120])
@pytest.mark.parametrize(
    ("names", "rows", "optional"),
    [(STAGES, RUN, ["location", "positions/s"]), (QUALITY, FIGURES, ["note", "s.d.", "expected"])],
)
def test_tables_fit_without_cut_headers_or_broken_words(
    names: list[str], rows: list[list[str]], optional: list[str], width: int, capsys: Capture
) -> None:
    lines = printed(capsys, names, rows, width, optional=optional)
    assert max(map(len, lines)) <= width
    assert not any(line.endswith(" ") for line in lines)
    shown = set(" ".join(lines).split())

    def words(columns: Sequence[str]) -> set[str]:
        return {word for row in rows for name in columns for word in row[names.index(name)].split()}

    required = [name for name in names if name not in optional]
    assert {word for name in required for word in name.split()} | words(required) <= shown
    left_out = [name for name in optional if not set(name.split()) <= shown]
    assert not (words(left_out) - words(required)) & shown, "a column is left out with its texts"


@pytest.mark.parametrize(
    ("names", "rows", "width", "options", "lines"),
    [
        (WINNERS, FILES, 40, {},
         ["file     games  winner", "a.trmph     12  red", "b.trmph  1,234  blue"]),
        (WINNERS, FILES, 20, {}, ["file    a.trmph", "games   12", "winner  red", "",
                                  "file    b.trmph", "games   1,234", "winner  blue"]),
        (["a", "bbbb", "cccc"], [["1", "2222", "3333"]], 13, {"optional": ["bbbb", "cccc"]},
         ["a  bbbb  cccc", "1  2222  3333"]),
        (["a", "bbbb", "cccc"], [["1", "2222", "3333"]], 12, {"optional": ["bbbb", "cccc"]},
         ["a  cccc", "1  3333"]),
        (["a", "bbbb", "cccc"], [["1", "2222", "3333"]], 5, {"optional": ["bbbb", "cccc"]}, ["a", "1"]),
        (["name", "positions"], [["x" * 100, "1234567890123"]], 40, {"shorten": True},
         ["name                           positions", "x" * 24 + "…  1234567890123"]),
        (["a", "b", "c"], [["3 files", "1.5 kB", "-0.1 s.d."], ["10 files", "2 B", "-"]], 40, {},
         ["a              b          c", "3 files   1.5 kB  -0.1 s.d.", "10 files     2 B          -"]),
        (["盤", "n"], [["将棋" * 30, "5"]], 20, {"shorten": True},
         ["盤                 n", "将棋将棋将棋将棋…  5"]),
    ],
)  # fmt: skip
def test_a_table_at_a_width(
    names: list[str], rows: list[list[str]], width: int, options: Any, lines: list[str], capsys: Capture
) -> None:
    assert printed(capsys, names, rows, width, **options) == lines


def test_a_pipe_gets_tab_separated_lines_without_padding(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    Output(False).table(STAGES, RUN, optional=["location"])
    assert [line.split("\t") for line in capsys.readouterr().out.splitlines()] == [STAGES, *RUN]


def test_a_terminal_wraps_errors_but_neither_files_nor_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text, name = io.StringIO(), "data/" + "long" * 20
    monkeypatch.setattr(text, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", text)
    print_stderr("hexdata: d: not a store: no such folder. Create one with `hexdata convert INPUT... STORE`.")
    print_stderr("  3 files: a cause that is longer than one line of the terminal")
    print_stderr(f"    {name}.pkl")
    print_stderr(f"  hexdata convert {name} store --board-size 13", whole=True)
    *wrapped, cause, rest, cut, command = text.getvalue().splitlines()
    assert wrapped == [
        "hexdata: d: not a store: no such folder.",
        "  Create one with",
        "  `hexdata convert INPUT... STORE`.",
    ]
    assert max(len(cause), len(rest)) <= 40
    assert (len(cut), cut[-1]) == (40, "…")
    assert command == f"  hexdata convert {name} store --board-size 13"


# --- no command prints control characters or line feeds of names ----------------------------------------

FORGED = "note: all is well"
HOSTILE = f"a\x1b[31m\x1b]0\x07\n{FORGED}\r\u202e\u2066\u2028\u200b\u0085\x9b2J\x7f [red]b [link=x]c :skull:"
"""A hostile name of a file."""
RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
STYLES = re.compile(r"\x1b\[[0-9;]*[mAK]|\x1b\[\?25[lh]|\r")
"""Control sequences of rich: styles, cursor movements and carriage returns."""
MARKUP = "[red]b [link=x]c :skull:"


def check(text: str) -> None:
    """Check that all lines are printable, except for tabs in tables, and that none is part of a name."""
    assert not RAW.search(text), ascii(text)
    assert not any(line.startswith(FORGED) for line in text.split("\n")), text


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two valid files and a damaged one, with names that contain HOSTILE, and their store."""
    top = tmp_path_factory.mktemp("hostile")
    (folder := top / "in").mkdir()
    lines = "".join(f"#5,a1b1a2b2a3b3a4b4a5{'c1d1e1'[: 2 * (i % 3)]} b\n" for i in range(12))
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
    "convert IN STORE --HOSTILE",
    "convert IN STORE --memory HOSTILE",
    "HOSTILE",
    "shuffle STORE --balance-by source",
    "shuffle STORE --where HOSTILE",
    "export STORE --format pickle --order original",
    "export STORE --format HOSTILE",
    "info STORE",
    "verify STORE --round-trip IN",
    "verify MISSING",
    "sql STORE @sources",
    "sql STORE 'SELECT * FROM rejected'",
    "sql STORE HOSTILE",
    "sql STORE @HOSTILE",
    "show STORE 0",
    "show STORE --game 0 --svg NEW.svg",
    "show HOSTILE",
    "report STORE --output MISSING/x.html",
    "load STORE",
    "load STORE --mode HOSTILE",
    "live IN --batches 1 --batch-size 4 --seconds 2 --pool-size 4 --reservoir 16",
    "live MISSING --seconds 0.2",
    "run MISSING",
    "run CONFIG",
    "demo --HOSTILE",
]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_escapes_names(hostile: Path, tmp_path: Path, line: str) -> None:
    store = shutil.copytree(hostile / f"store{HOSTILE}", tmp_path / f"store{HOSTILE}")
    shutil.copytree(hostile / "in", again := tmp_path / f"again{HOSTILE}")
    (config := tmp_path / "config.toml").write_text(
        f"store = {json.dumps(str(tmp_path / 'x'))}\n[{json.dumps(HOSTILE)}]\n"
    )
    places = {"IN": hostile / "in", "AGAIN": again, "STORE": store, "CONFIG": config}
    places |= {"NEW": tmp_path / f"new{HOSTILE}", "MISSING": tmp_path / f"missing{HOSTILE}"}

    def word(text: str) -> str:
        for name, place in places.items():
            text = re.sub(rf"^{name}\b", lambda _, place=place: str(place), text)
        return text.replace("HOSTILE", HOSTILE)

    command, _, query = line.partition("'")
    arguments = [*map(word, command.split()), *([query.rstrip("'")] if query else [])]
    ran = hexdata_run(*arguments)
    check(ran.err)
    check(ran.out)
    assert ran.out or ran.err
    if ran.status == 0 and line.startswith(("convert", "info", "verify", "load", "live", "show", "sql")):
        again_as_json = hexdata_run(*arguments, "--json")
        check(again_as_json.err)
        check(again_as_json.out)
        assert again_as_json.status == 0, again_as_json.err
        outputs = again_as_json.out.splitlines() if line.startswith("live") else [again_as_json.out]
        assert all(isinstance(json.loads(text), dict | list) for text in outputs)


@pytest.mark.parametrize(
    "line",
    [
        "convert IN NEW --max-reject-rate 1",
        "verify STORE --round-trip IN",
        "sql STORE @sources",
        "sql STORE 'SELECT [name] FROM sources'",
        f"sql STORE 'SELECT 1 AS \"{HOSTILE}\"'",
        "sql STORE 'SELECT name FROM sources' --csv",
        "sql STORE 'SELECT name FROM sources' --json",
    ],
)
def test_names_are_escaped_on_a_terminal(hostile: Path, tmp_path: Path, line: str) -> None:
    places = {"IN": hostile / "in", "NEW": tmp_path / f"new{HOSTILE}", "STORE": hostile / f"store{HOSTILE}"}
    before, query, after = line.partition("'")[0], line.split("'")[1:2], line.split("'")[2:]
    words = [places.get(word, word) for word in before.split()] + query + "".join(after).split()
    shown = STYLES.sub("", run_on_terminal(*words, TERM="xterm", COLUMNS="200"))
    check(shown)
    assert any(escape in shown for escape in (r"a\x1b[31m", r"a\\x1b[31m", r"a\u001b[31m"))


def test_names_in_a_pipe_are_exact_and_no_markup(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    store = hostile / f"store{HOSTILE}"
    query = f"SELECT name AS \"{HOSTILE}\" FROM sources, range(50) WHERE name LIKE '%red%trmph'"
    rows = list(csv.reader(io.StringIO(hexdata_run("sql", store, query, "--csv").out, newline="")))
    assert rows == [[HOSTILE]] + [[f"in/{HOSTILE}.trmph"]] * 50
    rows = json.loads(hexdata_run("sql", store, query, "--json").out)
    assert rows == [{HOSTILE: f"in/{HOSTILE}.trmph"}] * 50
    shown = hexdata_run("sql", store, query).out
    check(shown)
    assert shown.count(MARKUP) == shown.count("\n") == 51
    assert MARKUP in hexdata_run("verify", store, "--round-trip", hostile / "in").out


@pytest.mark.parametrize("raised", [OSError(5, "Input/output error", HOSTILE), ValueError(HOSTILE)])
def test_unexpected_errors_are_escaped(monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        warnings.simplefilter("always")  # until main returns
        warnings.warn(HOSTILE, stacklevel=1)
        raise raised

    monkeypatch.setattr("hexdata.verify.verify_store", fail)
    ran = hexdata_run("verify", "store")
    assert ran.status == 1
    check(ran.err)
    assert ran.err.count("\\n" + FORGED) == ran.err.count("[red]b") == 2, "the warning and the error"
    assert ("Traceback" in ran.err) == isinstance(raised, ValueError)


def test_the_bar_and_all_output_are_escaped(capsys: Capture) -> None:
    output = Output(False)
    with ProgressBar() as bar:
        bar.begin(HOSTILE, 3, "files")
        bar.note(HOSTILE)
    output.note(HOSTILE)
    output.line(HOSTILE)
    output.table([HOSTILE], [[HOSTILE + "\t"]])
    shown = capsys.readouterr()
    assert "\t" not in shown.out
    check(shown.out)
    check(shown.err)
    assert shown.err.startswith("note: a\\x1b[31m")
