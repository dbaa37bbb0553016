"""Usage of the commands: help, completion, and one message for wrong arguments."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from hexdata.browse import BrowseOptions
from hexdata.cli import app
from hexdata.convert import ConvertOptions
from hexdata.demo import DemoOptions
from hexdata.loader.trial import LoadOptions
from hexdata.show import ShowOptions
from hexdata.shuffle import ShuffleOptions
from hexdata.sql import SqlLimits
from hexdata.units import parse_bytes
from hexdata.verify import VerifyOptions
from tests.kit.command_line import hexdata_run

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TYPES = re.compile(r"<[^<>]+>|\{[A-Z_]+\}|x>=|<=x")
"""Types and ranges as programmers write them."""


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command(command: str) -> None:
    verb = COMMANDS[command]
    ran = hexdata_run(command, "--help", COLUMNS="80")
    assert ran == hexdata_run(command, "-h", COLUMNS="80")
    assert (ran.status, ran.err, "--json" in ran.out) == (0, "", True)
    assert verb.help.splitlines()[0][:40] in " ".join(ran.out.split())
    assert not TYPES.search(ran.out)
    assert max(map(len, ran.out.splitlines())) <= 80
    for parameter in verb.params:
        assert parameter.help
        choices = getattr(parameter.type_descriptor, "choices", None) if not parameter.hidden else None
        if choices and not parameter.is_flag:
            assert f"{parameter.opts[0]} {'|'.join(choices)}" in ran.out
    assert verb.examples
    for example in verb.examples:
        program, name, *arguments = shlex.split(re.split(r" [<>] ", example)[0])
        assert (program, name) == ("hexdata", command)
        verb.make_context(name, arguments)  # raises for what is no argument of it
        assert f"  {example}\n" in ran.out
        assert len(f"  {example}") <= 60, "a narrow terminal would break a word"


def test_the_help_of_hexdata_lists_every_command() -> None:
    ran = hexdata_run("--help", COLUMNS="80")
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if line.startswith("  ")} >= COMMANDS.keys()
    assert not [line for line in lines if line.endswith("...") and "Usage" not in line], "a summary is cut"
    alone = hexdata_run(COLUMNS="80")
    assert ran.out.strip() in (alone.out + alone.err)
    assert "..." not in hexdata_run("--help", COLUMNS="60").out.replace("[ARGS]...", "")


def test_options_are_grouped() -> None:
    titles = re.findall(r"^([A-Z].*):$", hexdata_run("shuffle", "--help").out, re.MULTILINE)
    assert titles == ["Arguments", "Options", "Selection", "Memory and processors", "Examples"]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("browse", BrowseOptions),
        ("convert", ConvertOptions),
        ("demo", DemoOptions),
        ("load", LoadOptions),
        ("report", SqlLimits),
        ("show", ShowOptions),
        ("shuffle", ShuffleOptions),
        ("verify", VerifyOptions),
    ],
)
def test_options_have_the_defaults_of_the_library(command: str, kind: Any) -> None:
    sizes = ("memory", "cache_size")
    given = {
        parameter.name: parse_bytes(parameter.default) if parameter.name in sizes else parameter.default
        for parameter in COMMANDS[command].params
    }
    other = {"cache", "fields"}  # the command makes them from texts and from two options
    shared = {field.name: field.default for field in fields(kind) if field.name in given.keys() - other}
    assert shared
    assert {name: given[name] for name in shared} == shared


def test_bash_completes_choices() -> None:
    words = "hexdata load store --mode "
    asked = {"_HEXDATA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "4"}
    command = [sys.executable, "-m", "hexdata"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == {"games", "exact", "stream"}, done.stderr


def test_python_without_docstrings_is_refused() -> None:
    command = [sys.executable, "-OO", "-m", "hexdata", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "-OO" in done.stderr, len(done.stderr.splitlines())) == (1, True, 1)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    ran = hexdata_run("--install-completion", HOME=str(tmp_path))
    assert (ran.status, f"{shell} completion installed" in ran.out) == (0, True)
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_HEXDATA_COMPLETE" in text for text in files)


WRONG: list[tuple[str, str]] = [
    ("conver a b", "Did you mean 'convert'?"),
    ("convert", "INPUT... STORE.\nExample: hexdata convert legacy/ store\n"),
    ("convert FOLDER", "INPUT... STORE.\nExample: hexdata convert legacy/ store\n"),
    ("convert in STORE --max-reject-rate 2", "max_reject_rate"),
    ("convert in STORE --max-reject-rate x", "--max-reject-rate cannot be used; found 'x'; expected a n"),
    ("convert in STORE --val 1", "val and test"),
    ("convert in STORE --value-convention red-is-7", "red-is-7"),
    ("verify", "STORE.\nExample: hexdata verify store\n"),
    ("verify STORE --sede 1", "--sede"),
    ("shuffle STORE --sede 1", "--sede (Possible options: "),
    ("shuffle STORE --seed x", "--seed cannot be used; found 'x'; expected a whole number\n"),
    ("shuffle STORE --buckets 0", "buckets"),
    ("shuffle STORE --memory 2", "such as 1GB"),
    ("shuffle STORE --where a b", "Quote a query"),
    ("export STORE --memory much", "not a size"),
    ("export STORE --format pickle --level 10", "level"),
    ("export STORE --level 3", "--level cannot be used with --format webdataset"),
    ("export STORE --format pickle --block-size 2", "--block-size cannot be used with --format pickle"),
    ("run missing.toml", "missing.toml: "),
    ("demo STORE", "`hexdata info STORE`"),
    ("browse STORE --port 70000", "port"),
    ("show STORE", "no position or --game"),
    ("show STORE abc", "POSITION_ID cannot be used; found 'abc'; expected a whole number\n"),
    ("show STORE 1 --game 8", "not both"),
    ("load STORE --batch-size 1.5", "--batch-size cannot be used; found '1.5'; expected a whole number\n"),
    ("load STORE --cache a --no-cache", "--no-cache"),
    ("load STORE --fields bord", "Did you mean 'board'?\n"),
    ("load STORE --fields board,visits", "found visits"),
    ("load STORE --mode exat", "'games', 'exact', 'stream'. Did you mean 'exact'?\n"),
    ("load STORE --mode zzz", "'games', 'exact', 'stream'.\n"),
    ("load STORE --where move 5", "Quote a query"),
    ("live STORE --seconds 1", "a store"),
    ("demo ''", "FOLDER must not be empty\n"),
    ("report STORE --output ''", "--output must not be empty\n"),
    ("sql 'SELECT 1' STORE", "found SELECT 1; expected hexdata sql STORE QUERY\n"),
    ("sql STORE SELECT 1", "Quote a query"),
    ("sql STORE my.sql", "Use -f my.sql."),
    ("sql STORE -f missing.sql", "missing.sql: the query cannot be read"),
    ("sql STORE -f latin.sql", "latin.sql: the query is not valid UTF-8"),
    ("sql STORE -f empty.sql", "the query is empty"),
    ("sql STORE 'FROM games' -f my.sql", "the query is given twice"),
    ("sql STORE 'SELECT 1' --csv --json", "more than one output format"),
    ("sql STORE 'SELECT nix FROM games'", '"nix"'),
    ("sql STORE 'DROP VIEW games'", "DROP is not allowed"),
    ("sql STORE @nix", "found '@nix'; expected '@dispersion'"),
    ("report STORE --output .", ".: the report cannot be written"),
]
"""Arguments, and a part of the message. ``STORE`` is a store of 80 games."""
FAILING: list[tuple[str, str]] = [
    ("shuffle nowhere", "`hexdata convert INPUT... "),
    ("sql STORE 'SELECT 1' --memory 10MB", "Raise --memory"),
    ("sql STORE 'SELECT 1' --parquet STORE/x", "must not be in the store"),
    ("report STORE --memory 377490kB --threads 1", "too little memory"),  # enough without its files
    ("verify STORE --memory 392170kB --threads 1", "too little memory"),
    ("browse STORE --memory 1MB", "expected at least 640 MB. Raise --memory.\n"),
    ("show STORE 99999", "found position 99999; expected 0 to"),
    ("show STORE --game 80", "found game 80; expected 0 to 79"),
    ("show STORE --game 8 --ply 999", "found ply 999"),
    ("show nowhere.tar:3", "nowhere.tar: No such file"),
    ("show '#3,b2z9'", "found 'z9'; expected a1 to c3"),
    ("show '#3,b2' --ply 2", "found ply 2; expected 0 to 1"),
    ("show '#3,b2a1c1 b' --svg folder.svg", "folder.svg"),
    ("convert locked.trmph locked", "locked/.lock: "),
]


@pytest.mark.parametrize(
    ("status", "line", "message"), [*((2, *case) for case in WRONG), *((1, *case) for case in FAILING)]
)
def test_what_is_wrong_is_said_in_one_message(
    trmph_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, line: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.sql").write_bytes("SELECT 'é'".encode("latin-1"))
    Path("empty.sql").write_text("\n")
    Path("my.sql").write_text("SELECT 1")
    Path("folder.svg").mkdir()
    Path("locked", ".lock").mkdir(parents=True)
    Path("locked.trmph").write_text("#5,a1b2 b\n")
    before = sorted(path.name for path in trmph_store.iterdir())
    words = [word.replace("STORE", str(trmph_store)) for word in shlex.split(line)]
    ran = hexdata_run(*words)
    shown = ran.err.replace(str(trmph_store), "STORE")
    assert (ran.status, ran.out, "Traceback" in shown) == (status, "", False), shown
    assert message in shown
    first, *others = shown.splitlines()
    assert first.startswith(("Usage: hexdata ", "hexdata: "))
    assert first.startswith("Usage: ") or all(line.startswith("  ") for line in others)
    assert sorted(path.name for path in trmph_store.iterdir()) == before
