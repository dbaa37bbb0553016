"""Commands: output streams, JSON, help and exit status."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import hexdata
from hexdata.cli import app, main
from hexdata.errors import StoreError
from hexdata.formats.trmph import write_trmph
from tests.demo_games import demo_games

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(typer.main.get_command(app).commands)


class CommandResult:
    """Exit status and output of a command."""

    def __init__(self, status, out, err):
        self.status, self.out, self.err = status, out, err

    @property
    def facts(self):
        """The result on standard output, which must be one line of JSON."""
        (line,) = self.out.splitlines()
        return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def hexdata_run(*arguments):
    """Run the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["hexdata", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        status = 0
    except SystemExit as end:
        status = end.code or 0
    finally:
        sys.argv = before
    return CommandResult(status, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module", autouse=True)
def one_core():
    """Make every stage run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
        yield


@pytest.fixture(scope="module")
def legacy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "legacy"
    folder.mkdir()
    write_trmph(folder / "a.trmph", demo_games(40, seed=1, board_size=5), 5)
    return folder


CONFIG = """
store = "{store}"
[convert]
inputs = ["{legacy}"]
[verify]
"""


@pytest.fixture(scope="module", params=["text", "json"])
def story(request, legacy, tmp_path_factory):
    """Every command once, in the order of the pipeline, as text and with --json."""
    folder = tmp_path_factory.mktemp("story")
    store = folder / "store"
    (folder / "run.toml").write_text(CONFIG.format(store=folder / "other", legacy=legacy))
    json_flag = ["--json"] if request.param == "json" else []
    lines = {
        "convert": [legacy, store, "--val", "0.2"],
        "shuffle": [store, "--seed", "7", "--buckets", "2"],
        "export": [store, "--shard-size", "256", "--block-size", "64"],
        "verify": [store],
        "load": [store, "--epochs", "2", "--batch-size", "64"],
        "run": [folder / "run.toml"],
    }
    return {
        command: hexdata_run(command, *rest, *json_flag) for command, rest in lines.items()
    }, request.param


def test_every_command_succeeds(story):
    ran, _ = story
    assert {command: r.status for command, r in ran.items()} == dict.fromkeys(ran, 0)
    assert all(r.out for r in ran.values())
    assert {command: r.err for command, r in ran.items()} == dict.fromkeys(ran, "")


def test_json_is_one_line_and_text_is_not_json(story):
    ran, form = story
    if form == "text":
        assert all(not r.out.lstrip().startswith("{") for r in ran.values())
        assert all(word in ran["convert"].out for word in ("sources", "positions", "rejected", "duplicates"))
        assert "seed 7" in ran["shuffle"].out
        assert "FAILED" not in ran["verify"].out
        return
    facts = {command: r.facts for command, r in ran.items()}
    positions = facts["convert"]["positions"]
    assert facts["convert"]["games"] == 40
    assert facts["convert"]["records"] == positions + facts["convert"]["rejected"]
    assert facts["shuffle"]["positions"] == facts["export"]["positions"] == positions
    assert facts["shuffle"]["seed"] == 7
    assert facts["verify"]["ok"] is True
    assert [check["ok"] for check in facts["verify"]["checks"]] == [True] * len(facts["verify"]["checks"])
    assert [epoch["epoch"] for epoch in facts["load"]["epochs"]] == [0, 1]
    assert [stage["stage"] for stage in facts["run"]["stages"]] == ["convert", "verify"]


@pytest.mark.parametrize("flags", ["", "--json"])
def test_a_closed_standard_output_is_no_error(flags, legacy, tmp_path):
    convert = shlex.join([sys.executable, "-m", "hexdata", "convert", str(legacy), str(tmp_path / "store")])
    done = subprocess.run(
        ["bash", "-c", f"{convert} {flags} >&-"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_text_and_json_contain_the_same_numbers(legacy, tmp_path):
    text = hexdata_run("convert", legacy, tmp_path / "one").out
    facts = hexdata_run("convert", legacy, tmp_path / "two", "--json").facts
    assert f"{facts['positions']:,}" in text.split()


# Exit statuses: 1 failed, 2 wrong usage, 130 interrupted; one message each.


def check_message(ran, status, *parts):
    assert ran.status == status, ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert all(part in ran.err for part in parts), ran.err


def test_a_failure_has_status_1_and_one_message(tmp_path):
    ran = hexdata_run("shuffle", tmp_path / "nowhere")
    check_message(ran, 1, f"hexdata: {tmp_path / 'nowhere'}: ", "no such folder", "hexdata convert INPUT... ")
    assert ran.err.count("\n") == 1


def test_too_many_rejections_have_status_1_and_name_the_option(tmp_path):
    bad = tmp_path / "legacy" / "a.pkl.gz"
    bad.parent.mkdir()
    bad.write_bytes(b"not a pickle")
    check_message(hexdata_run("convert", bad, tmp_path / "store"), 1, "unknown-layout", "--max-reject-rate")
    ran = hexdata_run("convert", bad, tmp_path / "store", "--max-reject-rate", "1")
    assert ran.status == 0
    assert "legacy/a.pkl.gz: rejected as a whole: unknown-layout" in ran.err
    assert "unknown-layout" in ran.out


def test_an_altered_store_fails_verify(legacy, tmp_path):
    hexdata_run("convert", legacy, tmp_path / "store")
    (part,) = (tmp_path / "store" / "positions").iterdir()
    part.write_bytes(part.read_bytes() + b"x")
    ran = hexdata_run("verify", tmp_path / "store")
    assert ran.status == 1
    assert "FAILED" in ran.out
    as_json = hexdata_run("verify", tmp_path / "store", "--json")
    assert (as_json.status, as_json.facts["ok"]) == (1, False)


def test_a_folder_in_place_of_a_file_has_status_1(legacy, tmp_path):
    lock = tmp_path / "store" / ".lock"
    lock.mkdir(parents=True)
    check_message(
        hexdata_run("convert", legacy, lock.parent), 1, f"hexdata: {lock}: ", "a folder", "Remove it"
    )


WRONG = {
    "no such command": (["conver"], "conver"),
    "no such option": (["verify", "STORE", "--sede", "1"], "--sede"),
    "missing argument": (["verify"], "STORE"),
    "no number": (["shuffle", "STORE", "--seed", "x"], "--seed"),
    "out of range": (["convert", "IN", "STORE", "--max-reject-rate", "2"], "--max-reject-rate"),
    "shares": (["convert", "IN", "STORE", "--val", "1"], "val and test"),
    "sense": (["convert", "IN", "STORE", "--value-convention", "red-is-7"], "red-is-7"),
    "no size": (["export", "STORE", "--memory", "much"], "not a size"),
    "layout": (["export", "STORE", "--layout", "block"], "layout"),
    "no config": (["run", "missing.toml"], "missing.toml: the config does not exist"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_usage_has_status_2(case):
    arguments, part = WRONG[case]
    check_message(hexdata_run(*arguments), 2, part)


def test_an_interrupt_has_status_130_and_says_how_to_resume(legacy, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("hexdata.convert.convert_sources", interrupted)
    ran = hexdata_run("convert", legacy, tmp_path / "store")
    check_message(ran, 130, "interrupted", "same command again")


def test_a_message_has_path_record_reason_finding_and_hint(legacy, tmp_path, monkeypatch):
    def failing(*args, **kwargs):
        raise StoreError("broken", path=tmp_path, record=3, found="a", expected="b", hint="Mend it.")

    monkeypatch.setattr("hexdata.convert.convert_sources", failing)
    ran = hexdata_run("convert", legacy, tmp_path / "store", "--json")
    check_message(ran, 1)
    assert ran.err == f"hexdata: {tmp_path}: record 3: broken; found a; expected b. Mend it.\n"


# Help.


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help(command, flag):
    ran = hexdata_run(command, flag)
    assert (ran.status, ran.err) == (0, "")
    assert "--json" in ran.out
    verb = typer.main.get_command(app).commands[command]
    assert verb.help.splitlines()[0][:40] in " ".join(ran.out.split())
    assert all(parameter.help for parameter in verb.params)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = hexdata_run(*([command] if command else []), "--help").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith("...") and "Usage" not in line], "a summary is cut"


def test_hexdata_alone_shows_its_commands():
    ran = hexdata_run("--help")
    assert ran.status == 0
    assert all(command in ran.out for command in COMMANDS)
    assert all(command in hexdata_run().out + hexdata_run().err for command in COMMANDS)


def test_the_version():
    ran = hexdata_run("--version")
    assert (ran.status, ran.out) == (0, f"hexdata {hexdata.__version__}\n")


# In a separate process.


def process(*arguments, **more):
    command = [sys.executable, "-m", "hexdata", *map(str, arguments)]
    return subprocess.run(command, check=False, cwd=ROOT, timeout=300, **more)


def test_python_m_hexdata():
    done = process("--version", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"hexdata {hexdata.__version__}\n")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_closed_pipe_is_no_error(legacy, tmp_path, flags):
    """As in ``hexdata verify STORE | head -0``."""
    hexdata_run("convert", legacy, tmp_path / "store")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = process(
            "verify", tmp_path / "store", *flags, stdout=writing, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writing)
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


def on_a_terminal(*arguments):
    """Run with standard error on a terminal of 120 columns: (status, standard output, what it shows)."""
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "hexdata", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm"}
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    shown = bytearray()
    with contextlib.suppress(OSError):  # raised when the process has closed the terminal
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    out, _ = child.communicate(timeout=300)
    return child.returncode, out.decode(), shown.decode()


def test_a_bar_is_drawn_on_terminals_only(legacy, tmp_path):
    status, out, shown = on_a_terminal("convert", legacy, tmp_path / "one", "--json", "--workers", "1")
    assert status == 0
    assert json.loads(out)["games"] == 40
    assert "\x1b[" in shown
    assert "read" in shown
    assert "write" in shown
    done = process(
        "convert", legacy, tmp_path / "two", "--json", "--workers", "1", capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == out
