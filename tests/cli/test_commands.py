"""Commands: results as text and as JSON, exit statuses, and what only a process of its own can show."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import hexdata
from hexdata.cli.app import INTERRUPTED
from hexdata.cli.render import Output
from hexdata.demo.games import make_games
from hexdata.errors import StoreError
from hexdata.formats.trmph import write_trmph
from hexdata.progress_bar import ProgressBar
from tests.kit.command_line import hexdata_run, run_on_terminal

if TYPE_CHECKING:
    from tests.conftest import CopyStore

CONFIG = 'store = "{0}/other"\n[convert]\ninputs = ["{0}/legacy"]\n[shuffle]\nbuckets = 2\n[verify]\n'


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "legacy"
    folder.mkdir()
    write_trmph(folder / "a.trmph", make_games(40, seed=1, board_size=5), 5)
    (folder.parent / "run.toml").write_text(CONFIG.format(folder.parent))
    return folder


@pytest.fixture(scope="module")
def ran(legacy: Path) -> dict[str, tuple[str, Any]]:
    """What each command prints, in the order of the pipeline, and the JSON that --json would print."""
    top, made, results = legacy.parent, list[Any](), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Output, "print_json", lambda _, result: made.append(result))
        for command, *rest in (
            ("convert", legacy, top / "store", "--val", "0.2"),
            ("shuffle", top / "store", "--seed", "7", "--buckets", "2"),
            ("export", top / "store", "--shard-size", "256", "--block-size", "64"),
            ("info", top / "store"),
            ("verify", top / "store"),
            ("report", top / "store"),
            ("load", top / "store", "--epochs", "2", "--batch-size", "64"),
            ("run", top / "run.toml"),
        ):
            text = hexdata_run(command, *rest)
            assert (text.status, text.err) == (0, ""), command
            results[command] = text.out, msgspec.to_builtins(made[-1])
    return results


def test_every_command_prints_its_result_as_text_or_as_json(
    ran: dict[str, tuple[str, Any]], legacy: Path
) -> None:
    for command, (_, facts) in ran.items():
        json.dumps(facts, allow_nan=False)
        assert facts, command
    shown = {command: text for command, (text, _) in ran.items()}
    facts = {command: facts for command, (_, facts) in ran.items()}
    positions = facts["convert"]["positions"]
    assert facts["convert"]["games"] == 40
    assert facts["convert"]["records"] == positions + facts["convert"]["rejected"]
    assert facts["shuffle"]["positions"] == facts["export"]["positions"] == positions
    assert facts["shuffle"]["seed"] == 7
    assert facts["verify"]["ok"]
    assert all(check["ok"] for check in facts["verify"]["checks"])
    assert [epoch["epoch"] for epoch in facts["load"]["epochs"]] == [0, 1]
    assert all(epoch["digest"] in shown["load"] for epoch in facts["load"]["epochs"])
    assert [stage["stage"] for stage in facts["run"]["stages"]] == ["convert", "shuffle", "verify"]
    assert shown["convert"].split("\t")[:3] == ["sources", "records", "positions"]
    assert all(f"{positions:,}" in shown[name] for name in ("convert", "shuffle", "export", "info"))
    assert "FAILED" not in shown["verify"]
    page = Path(facts["report"]["path"]).read_text("utf-8")
    assert f"<span>{shown['report'].splitlines()[0]}</span>" in page
    assert hexdata_run("verify", legacy.parent / "store", "--json").facts["ok"]


def test_stages_that_are_complete_are_one_line(legacy: Path, ran: object) -> None:
    again = hexdata_run("run", legacy.parent / "run.toml")
    assert "already complete: convert, shuffle\n" in again.out
    assert "positions/s" in again.out, "verify runs again"
    with (legacy.parent / "run.toml").open("a") as file:
        file.write("[load]\n")
    assert "\nload\t" in hexdata_run("run", legacy.parent / "run.toml").out


def test_a_folder_as_it_is(legacy: Path, tmp_path: Path) -> None:
    """Files that are no sources, a pipe and a device are named; nothing waits for them."""
    root = tmp_path / "data"
    root.mkdir()
    (root / "a.trmph").write_bytes((legacy / "a.trmph").read_bytes())
    (root / "none.pkl").write_bytes(pickle.dumps({"examples": []}))
    for name in ("README.md", "x1.pt", ".DS_Store"):
        (root / name).write_bytes(b"PK")
    for name in ("pipe", "pipe.trmph"):
        os.mkfifo(root / name)
    (root / "zero.pkl").symlink_to("/dev/zero")
    facts = hexdata_run("convert", root, tmp_path / "store", "--json").facts
    assert (facts["sources"], facts["skipped"], facts["rejected"]) == (2, 5, 0)
    assert facts["duplicate_games"] == 0
    unknown = dict.fromkeys(["data/README.md", "data/pipe", "data/x1.pt"], "unknown-name")
    assert unknown.items() <= facts["skipped_files"].items()
    assert facts["file_notes"] == {"data/none.pkl": ["contains no records"]}
    with (root / "a.trmph").open("rb+") as file:
        lines = file.readlines()
        file.write(lines[-1])
    ran = hexdata_run("convert", root, tmp_path / "other")
    assert ran.status == 0
    assert f"1 of {facts['games'] + 1} games" in ran.out
    assert "rejected records" not in ran.out
    assert sorted(ran.err.splitlines()) == [
        "note: data/none.pkl: contains no records",
        "note: skipped 2 files (no-file): data/pipe.trmph, data/zero.pkl",
        "note: skipped 3 files (unknown-name): data/README.md, data/pipe, data/x1.pt",
    ]
    again = hexdata_run("convert", root / "none.pkl", tmp_path / "other")
    assert (again.status, again.out, again.err.count("\n")) == (0, "", 1)
    assert "none.pkl" in again.err


def test_rejected_files_are_listed_by_cause(legacy: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (root / "a.trmph").write_bytes((legacy / "a.trmph").read_bytes())
    (root / "other.pkl").write_bytes(b"\x80\x04")
    for number in range(8):
        (root / f"{number}.pkl").write_bytes(pickle.dumps({"lr": number}))
    ran = hexdata_run("convert", root, tmp_path / "store")
    assert (ran.status, ran.out) == (1, "")
    first, *lines = ran.err.splitlines()
    assert "found 9 of 10 files" in first
    assert lines[0].startswith("  data/other.pkl: truncated: ")
    assert lines[1].startswith("  8 files: unknown-layout: ")
    assert lines[2:8] == [*(f"    data/{number}.pkl" for number in range(5)), "    … and 3 more"]
    assert "--max-reject-rate" in lines[8]
    ran = hexdata_run("convert", root, tmp_path / "store", "--max-reject-rate", "1")
    assert ran.status == 0
    assert ran.err.startswith("note: 8 files: rejected as a whole: unknown-layout: ")
    assert "unknown-layout" in ran.out


# --- exit statuses: 1 failed, 2 wrong usage (test_usage), 130 interrupted; one message each -------------


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "same command again"),
        (MemoryError(), 1, "--memory"),
        (OSError(errno.EIO, os.strerror(errno.EIO), "a file"), 1, "hexdata: a file: Input/output error"),
        (StoreError("broken", path="p", record=3, found="a", expected="b", hint="Mend it."), 1,
         "hexdata: p: record 3: broken; found a; expected b. Mend it.\n"),
    ],
)  # fmt: skip
def test_a_failure_is_one_message(
    legacy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Any, status: int, message: str
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("hexdata.convert.convert_sources", failing)
    ran = hexdata_run("convert", legacy, tmp_path / "store", "--json")
    assert (ran.status, ran.out, ran.err.count("\n")) == (status, "", 1)
    assert message in ran.err


def test_a_warning_is_a_note(trmph_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hexdata.verify import verify_store

    def warning(*arguments: Any) -> Any:
        warnings.simplefilter("always")  # until main returns
        warnings.warn("the shuffle is older", stacklevel=1)
        return verify_store(*arguments)

    monkeypatch.setattr("hexdata.verify.verify_store", warning)
    ran = hexdata_run("verify", trmph_store)
    assert (ran.status, ran.err.splitlines()[0]) == (0, "note: the shuffle is older")


def test_an_altered_store_fails_verify(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    path = next((store / "positions").iterdir())
    path.write_bytes(path.read_bytes() + b"x")
    ran = hexdata_run("verify", store)
    assert (ran.status, "FAILED" in ran.out) == (1, True)
    ran = hexdata_run("verify", store, "--json")
    assert (ran.status, ran.facts["ok"]) == (1, False)


def test_a_long_table_of_groups_states_how_many_are_left_out(trmph_store: Path) -> None:
    arguments = ("shuffle", trmph_store, "--balance-by", "game_id", "--dry-run")
    balance, shown = hexdata_run(*arguments, "--json").facts["balance"], hexdata_run(*arguments).out
    left_out = 0
    for split in ("train", "val", "test"):
        more = re.search(rf"^{split}\t([\d,]+) more, see --json", shown, re.MULTILINE)
        named = len(re.findall(rf"^{split}\t\d+\tall", shown, re.MULTILINE))
        assert named + int(more[1] if more else 0) == sum(each["split"] == split for each in balance) - 1
        left_out += bool(more)
    assert left_out, "train has more games than the table has rows"


def test_a_read_only_store_is_named_with_a_remedy(
    trmph_store: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The superuser may write anywhere, so the answer of the system is replaced."""
    store, path_open = copy_store(trmph_store), Path.open

    def refuse(path: Path, mode: str = "r", *others: Any, **named: Any) -> Any:
        if "r" not in mode and path.is_relative_to(store):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return path_open(path, mode, *others, **named)

    monkeypatch.setattr(Path, "open", refuse)
    (store / ".lock").unlink(missing_ok=True)
    for command in ("shuffle", "export"):
        ran = hexdata_run(command, store)
        assert ran.status == 1
        assert all(part in ran.err for part in (f"{store}: ", os.strerror(errno.EACCES), "the permissions"))
    assert hexdata_run("info", store).status == 0


# --- a process of its own -------------------------------------------------------------------------------

HEXDATA = (sys.executable, "-m", "hexdata")


def test_a_closed_standard_output_is_no_error(trmph_store: Path) -> None:
    command = shlex.join([*HEXDATA, "verify", str(trmph_store)])
    done = subprocess.run(["bash", "-c", f"{command} >&-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)


def test_a_closed_pipe_is_no_error(trmph_store: Path) -> None:
    """As in ``hexdata sql STORE QUERY | head -0``."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [*HEXDATA, "sql", str(trmph_store), "FROM range(1_000_000_000_000)", "--csv"]
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=300
    )
    os.close(writing)
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


def test_ctrl_c_ends_a_query(trmph_store: Path) -> None:
    command = [*HEXDATA, "sql", str(trmph_store), "FROM range(1_000_000_000_000)", "--csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()  # it runs
        child.send_signal(signal.SIGINT)
        while child.stdout.read(1 << 20):
            pass
        assert child.stderr.read() == f"hexdata: {INTERRUPTED}\n".encode()
    assert child.returncode == 130


def test_a_page_is_served_until_ctrl_c(trmph_store: Path, tmp_path: Path) -> None:
    for library in ("starlette", "uvicorn"):
        pytest.importorskip(library)
    command = [*HEXDATA, "browse", str(trmph_store), "--port", "0", "--no-open", "--json"]
    environment = {**os.environ, "HEXDATA_CACHE": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as served:
        try:
            assert served.stdout is not None
            assert served.stderr is not None
            facts = json.loads(served.stdout.readline())
            assert facts["store"] == str(trmph_store)
            with urllib.request.urlopen(facts["address"]) as answer:
                assert b"<title>hexdata</title>" in answer.read()
            served.send_signal(signal.SIGINT)
            assert served.wait(60) == 0
            assert "Traceback" not in served.stderr.read()
        finally:
            served.kill()


def test_python_m_hexdata() -> None:
    done = subprocess.run([*HEXDATA, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == hexdata_run("--version").out == f"hexdata {hexdata.__version__}\n"


# --- the progress bar -----------------------------------------------------------------------------------


def test_every_step_of_a_shuffle_has_a_line_on_a_terminal(trmph_store: Path, copy_store: CopyStore) -> None:
    store = copy_store(trmph_store)
    shown = run_on_terminal("shuffle", store, "--balance-by", "winner", TERM="xterm", COLUMNS="120")
    assert all(words in shown for words in ("\x1b[", "check files", "sort", "100%", "memory"))
    select = re.findall(r"select .*", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown))[-1]
    assert "100%" in select, "a step of unknown length is complete"
    assert "memory" not in select, "memory is shown for the running step only"


def test_without_a_terminal_only_notes_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as bar:
        bar.begin("sort", 2, "positions")
        bar.advance(2)
        bar.note("x" * 200)
    assert capsys.readouterr() == ("", f"note: {'x' * 200}\n")
