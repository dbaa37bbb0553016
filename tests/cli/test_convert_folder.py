"""``hexdata convert`` on a folder as people have it: notes and errors with one line per file."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys

import pytest
from rich.console import Console

from hexdata.cli.app import print_stderr
from hexdata.cli.render import Output
from hexdata.demo.games import make_games
from hexdata.errors import InputError
from hexdata.formats.trmph import write_trmph
from tests.cli.test_cli import hexdata_run

TERMINAL_WIDTH = 40


@pytest.fixture
def folder(tmp_path):
    """A folder with one file of games, and a function that writes more files."""
    root = tmp_path / "data"
    root.mkdir()
    write_trmph(root / "a.trmph", make_games(40, seed=1, board_size=5), 5)

    def write(**files):
        for name, content in files.items():
            (root / name.replace("__", ".")).write_bytes(content)
        return root

    return write


def test_a_folder_as_it_is(folder, tmp_path):
    root = folder(
        README__md=b"# notes",
        x1__pt=b"PK",
        x2__pt=b"PK",
        __DS_Store=b"",
        none__pkl=pickle.dumps({"examples": []}),
    )
    ran = hexdata_run("convert", root, tmp_path / "store")
    assert ran.status == 0
    assert ran.err.splitlines() == [
        "note: skipped 3 files of unknown type: 2 *.pt, 1 *.md",
        "note: data/none.pkl: contains no examples",
    ]
    facts = hexdata_run("convert", root, tmp_path / "other", "--json").facts
    assert (facts["sources"], facts["skipped"], facts["rejected"]) == (2, 3, 0)
    assert facts["skipped_files"] == dict.fromkeys(
        ["data/README.md", "data/x1.pt", "data/x2.pt"], "unknown-name"
    )
    assert facts["file_notes"] == {"data/none.pkl": ["contains no examples"]}


def test_pipes_and_devices_in_a_folder_do_not_block(folder, tmp_path):
    root = folder()
    for name in ("pipe", "pipe.trmph", "processing_stats.json"):
        os.mkfifo(root / name)
    (root / "zero.pkl").symlink_to("/dev/zero")
    command = [sys.executable, "-m", "hexdata", "convert", str(root), str(tmp_path / "store")]
    ran = subprocess.run(command, timeout=300, check=True, capture_output=True, text=True)
    assert (
        "skipped 2 files that are no files: data/pipe.trmph (a pipe (FIFO)), data/zero.pkl (a device)"
        in ran.stderr
    )
    assert "skipped 1 file of unknown type: 1 pipe" in ran.stderr


def test_rejected_files_are_listed_by_cause(folder, tmp_path):
    root = folder(empty__pkl=b"")
    for number in range(8):
        (root / f"{number}.pkl").write_bytes(pickle.dumps({"lr": number}))
    ran = hexdata_run("convert", root, tmp_path / "store")
    assert (ran.status, ran.out) == (1, "")
    first, *lines = ran.err.splitlines()
    assert first.endswith("found 9 of 10 files; expected at most 1.00% of the records and of the bytes")
    assert lines[0].startswith("  data/empty.pkl: empty-file: the file is empty")
    assert lines[1].startswith("  8 files: unknown-layout: not a legacy file of examples; found top-level")
    assert lines[2:8] == [*(f"    data/{number}.pkl" for number in range(5)), "    … and 3 more"]
    assert lines[8].startswith("  Check the files")
    ran = hexdata_run("convert", root, tmp_path / "store", "--max-reject-rate", "1")
    assert ran.status == 0
    assert ran.err.splitlines()[1].startswith("note: 8 files: rejected as a whole: unknown-layout: ")
    assert ran.err.splitlines()[2] == "    data/0.pkl"


def test_the_commands_for_each_board_size_work(folder, tmp_path):
    root = folder()
    write_trmph(root / "it's b.trmph", make_games(10, seed=1, board_size=4), 4)
    ran = hexdata_run("convert", root, tmp_path / "my store")
    assert ran.status == 1
    commands = [line.strip() for line in ran.err.splitlines() if line.strip().startswith("hexdata ")]
    assert len(commands) == 2
    for command in commands:
        words = command.replace("hexdata", f"{sys.executable} -m hexdata", 1)
        subprocess.run(["bash", "-c", words], timeout=300, check=True, capture_output=True)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "my store", "my store-4x4"}


def test_names_in_lists_are_escaped(folder, tmp_path):
    root = folder()
    for number in range(3):
        (root / f"{number}\n\x1b[31mnote: all is well.pkl").write_bytes(pickle.dumps({}))
    (root / "x.\x1b[31m\nnote: all is well").write_bytes(b"")
    for rate in ("0", "1"):
        ran = hexdata_run("convert", root, tmp_path / "store", "--max-reject-rate", rate)
        assert "\x1b" not in ran.err
        assert not [line for line in ran.err.splitlines() if line.strip().startswith("note: all")]


@pytest.fixture
def terminal(monkeypatch):
    """Standard error as a terminal of ``TERMINAL_WIDTH`` columns."""
    output, text = Output(as_json=False), io.StringIO()
    output.err = Console(
        file=text, width=TERMINAL_WIDTH, force_terminal=True, color_system=None, soft_wrap=True
    )
    return output, text


def test_a_terminal_shows_each_file_on_one_line(terminal):
    output, text = terminal
    name = "data/" + "long" * 20
    output.note_line(f"  {name}.pkl")
    output.note_line("3 files: a cause that is longer than one line of the terminal")
    output.note_line(f"hexdata convert {name} store --board-size 13", is_command=True)
    cut, *wrapped, command = text.getvalue().splitlines()
    assert (len(cut), cut[-1]) == (TERMINAL_WIDTH, "…")
    assert " ".join(line.strip() for line in wrapped).endswith("longer than one line of the terminal")
    assert all(len(line) <= TERMINAL_WIDTH for line in wrapped)
    assert command == f"  hexdata convert {name} store --board-size 13"


def test_results_are_wrapped_at_spaces_except_for_indented_commands():
    output, text = Output(as_json=False), io.StringIO()
    output.out = Console(file=text, width=20, force_terminal=True, color_system=None, soft_wrap=True)
    output.line("fields: board float32 (1024, 2, 13, 13)")
    output.line("    hexdata convert a-long-name store")
    assert text.getvalue().splitlines() == [
        "fields: board",
        "  float32 (1024, 2,",
        "  13, 13)",
        "    hexdata convert a-long-name store",
    ]


def test_errors_are_wrapped_at_spaces_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = io.StringIO()
    text.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", text)
    print_stderr("hexdata: d: not a store: no such folder. Create one with `hexdata convert INPUT... STORE`.")
    assert text.getvalue().splitlines() == [
        "hexdata: d: not a store: no such folder.",
        "  Create one with",
        "  `hexdata convert INPUT... STORE`.",
    ]


def test_a_message_with_lines_ends_with_the_hint_and_the_commands():
    error = InputError("wrong", path="x", found=1, hint="Run this:", lines=["a", "  b"], commands=["c"])
    assert error.report() == ["x: wrong; found 1", "a", "  b", "Run this:", "c"]
    assert str(error) == "x: wrong; found 1\n  a\n    b\n  Run this:\n  c"
    copy = pickle.loads(pickle.dumps(error))
    assert copy.report() == error.report()
