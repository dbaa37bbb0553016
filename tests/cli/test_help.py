"""Help of the commands, and shell completion."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
import typer

from hexdata.cli import app
from tests.cli.test_cli import COMMANDS, hexdata_run

GROUP = typer.main.get_command(app)
TYPES = re.compile(r"<[^<>]+>|\{[A-Z_]+\}|x>=|<=x")
"""Types and ranges as programmers write them."""


@pytest.mark.parametrize("command", COMMANDS)
def test_types_ranges_and_choices_are_in_plain_words(command):
    shown = hexdata_run(command, "--help").out
    assert not TYPES.search(shown)
    for parameter in GROUP.commands[command].params:
        choices = getattr(parameter.type_descriptor, "choices", None) if not parameter.hidden else None
        if choices and not parameter.is_flag:
            assert f"{parameter.opts[0]} {'|'.join(choices)}" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_that_parse(command):
    verb = GROUP.commands[command]
    assert verb.examples
    shown = hexdata_run(command, "--help").out
    for example in verb.examples:
        program, name, *arguments = shlex.split(re.split(r" [<>] ", example)[0])
        assert (program, name) == ("hexdata", command)
        verb.make_context(
            name, arguments
        )  # raises for an unknown option, a missing argument or a wrong value
        assert f"  {example}\n" in shown
        assert len(f"  {example}") <= 60, "a narrow terminal would break a word"
    assert shown.count("Examples:") == 1


def test_options_are_grouped():
    titles = re.findall(r"^([A-Z].*):$", hexdata_run("shuffle", "--help").out, re.MULTILINE)
    assert titles == [
        "Arguments", "Options", "Arrange positions", "Select positions", "Memory and processors", "Examples",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert"], "Missing argument 'INPUT'.\nExample: hexdata convert legacy/ store\n"),
        (["convert", "FOLDER"], "Missing argument 'STORE'.\nExample: hexdata convert legacy/ store\n"),
        (["verify"], "Missing argument 'STORE'.\nExample: hexdata verify store\n"),
        (["load", "s", "--mode", "exactly"], "'exactly' is not one of 'games', 'exact', 'stream'"),
        (["shuffle", "s", "--sede", "1"], "No such option: --sede (Possible options: "),
        (["conver", "a", "b"], "Did you mean 'convert'?"),
    ],
)
def test_wrong_usage_says_what_to_write(arguments, message):
    ran = hexdata_run(*arguments)
    assert ran.status == 2
    assert message in ran.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("hexdata sh", {"shuffle", "show"}),
        ("hexdata load --mo", {"--mode"}),
        ("hexdata load store --mode ", {"games", "exact", "stream"}),
    ],
)
def test_bash_completes_commands_options_and_choices(words, offered):
    asked = {
        "_HEXDATA_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "hexdata"], env=os.environ | asked, capture_output=True, text=True, check=False
    )
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize(("shell", "file"), [("bash", ".bashrc"), ("zsh", ".zshrc"), ("fish", None)])
def test_completion_is_installed(shell, file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    ran = hexdata_run("--install-completion")
    assert ran.status == 0, ran.err
    assert f"{shell} completion installed" in ran.out
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_HEXDATA_COMPLETE" in path.read_text() for path in files)
    assert file is None or "hexdata" in (tmp_path / file).read_text() or shell == "zsh"
