"""``hexdata live``: as lines, as a view on a terminal, as an endpoint; and how it ends."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from hexdata.cli import main
from hexdata.cli.live import _WaitNotes
from hexdata.cli.render import Output
from hexdata.cli.view import View
from hexdata.live.metrics import LiveMetrics, StageMetrics

if TYPE_CHECKING:
    from tests.conftest import DemoTrmph

PATIENCE = 120.0
"""Seconds after which a test gives up."""
SMALL = ("--reservoir", "100", "--batch-size", "16")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, demo_trmph: DemoTrmph) -> Path:
    folder = tmp_path_factory.mktemp("live")
    demo_trmph(folder, 60, 2, board_size=5)
    return folder


def run(*arguments: object) -> tuple[int, str, str]:
    """Run ``hexdata live`` in this process: (status, standard output, standard error)."""
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["hexdata", "live", *map(str, arguments)])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as end:
                status = end.code or 0
    return status, out.getvalue(), err.getvalue()


def test_it_ends_with_a_summary(directory: Path) -> None:
    status, out, err = run(directory, *SMALL, "--batches", 5)
    assert (status, err) == (0, "")
    assert f"hexdata live {directory}" in out
    assert re.search(r"positions +[\d,]+/s, 80 so far", out)
    assert re.search(r"batches +5, [\d.]+ same-game pairs", out)
    for name in ("FilePathProvider", "ShufflingChunkPool", "TensorGenerator", "demo-01.trmph"):
        assert name in out


def test_json_is_a_line_a_look_and_a_last_one(directory: Path) -> None:
    """As many looks as there are seconds, on a machine that has time for them."""
    status, out, err = run(directory, *SMALL, "--seconds", 1.5, "--seed", 3, "--json")
    assert (status, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["ended"] for line in lines] == [None] * (len(lines) - 1) + ["seconds"]
    assert lines[-1]["positions"] == 16 * lines[-1]["batches"]
    assert len(lines[-1]["stages"]) == 7


def test_options_come_before_the_config(directory: Path, tmp_path: Path) -> None:
    config = tmp_path / "small.toml"
    config.write_text(
        "batch_size = 8\nreservoir = 50\nval = 0.0\ntest = 0.0\n[ChunkUnpacker]\npositions_per_game = 2\n"
    )
    status, out, _ = run(directory, "--config", config, "--batches", 3, "--json")
    facts = json.loads(out.splitlines()[-1])
    assert (status, facts["positions"], facts["games"], facts["pool"]) == (0, 24, 60, 60)
    more = ("--batch-size", 4, "--pool-size", 10, "--reservoir", 20)
    _, out, _ = run(directory, "--config", config, "--batches", 3, *more, "--json")
    facts = json.loads(out.splitlines()[-1])
    stages = {stage["name"]: stage for stage in facts["stages"]}
    assert (facts["positions"], facts["games"], facts["pool"]) == (12, 60, 10)
    assert stages["ShufflingFrameSampler"]["counts"]["size"] == 20


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--config", "missing.toml"], 2, "missing.toml: the config does not exist"),
        (["--split", "training"], 2, "is not one of"),
        (["--batch-size", 0], 2, "batch_size"),
        (["--batches", 0], 2, "batches cannot be used"),
        (["--seconds", -1], 2, "seconds cannot be used"),
        (["--seed", "x"], 2, "--seed"),
    ],
)
def test_what_cannot_be_is_refused(directory: Path, arguments: list[Any], status: int, message: str) -> None:
    found, out, err = run(directory, *arguments)
    assert (found, out) == (status, "")
    assert message in err
    assert "Traceback" not in err


def test_a_directory_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    status, out, err = run(tmp_path / "nowhere")
    assert (status, out) == (1, "")
    assert "nowhere: no such directory" in err


def test_metrics_are_served_if_asked(directory: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    status, _, err = run(directory, *SMALL, "--batches", 2, "--prometheus", 0)
    assert (status, err) == (0, "")
    status, _, err = run(directory, *SMALL, "--prometheus", 0, "--prometheus-host", "192.0.2.1")
    assert status == 2
    assert "the metrics cannot be served at this address; found 192.0.2.1:0" in err


class OnATerminal:
    """``hexdata live`` as a process with standard error on a terminal of so many columns."""

    def __init__(self, columns: int, *arguments: object) -> None:
        fcntl, pty, termios = (pytest.importorskip(name) for name in ("fcntl", "pty", "termios"))
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        command = [sys.executable, "-m", "hexdata", "live", *map(str, arguments)]
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=theirs, env={**environment, "TERM": "xterm"}, text=True
        )
        os.close(theirs)

    def read_until(self, word: bytes | None) -> str:
        """Return what is shown until a word has been; None reads to the end."""
        shown = b""
        with contextlib.suppress(OSError):  # what a terminal gives when the other side has gone
            while word is None or word not in shown:
                assert select.select([self._ours], [], [], PATIENCE)[0], shown
                shown += os.read(self._ours, 1 << 16)
        return shown.decode()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Wait for the end: (status, standard output)."""
        self.read_until(None)  # what nobody reads would hold it up
        out, _ = self._process.communicate(timeout=PATIENCE)
        os.close(self._ours)
        return self._process.returncode, out


def test_on_a_terminal_there_is_a_view_until_ctrl_c(directory: Path) -> None:
    """The view goes to standard error and the summary to standard output; the status is that of Ctrl-C."""
    terminal = OnATerminal(100, directory, *SMALL)
    shown = terminal.read_until(b"TensorGenerator:")
    assert "same-game pairs" in shown
    assert "ShufflingFrameSampler" in shown
    terminal.interrupt()
    status, out = terminal.end()
    assert status == 130
    assert out.startswith(f"hexdata live {directory}")


def facts(**more: Any) -> LiveMetrics:
    stage = {
        "threads": 2,
        "busy": 1.25,
        "per_second": 1234.5,
        "out": 10,
        "dropped": 0,
        "queued": 1,
        "capacity": 4,
    }
    stages = [
        StageMetrics(name="FilePathProvider", **stage),
        StageMetrics(
            name="ShufflingFrameSampler", **{**stage, "dropped": 12, "queued": 6}, counts={"held": 5}
        ),
    ]
    whole = {"seconds": 3725.9, "batches": 1234, "positions": 1_263_616, "positions_per_second": 210_345.4}
    whole |= {"games": 2000, "pool": 1500, "newest_file": "a/games.trmph", "average_uses": 3.25, "pairs": 0.5}
    return LiveMetrics(**{**whole, "stages": stages, **more})


def drawn(
    found: LiveMetrics, width: int, encoding: str = "utf-8", title: str = "hexdata live games"
) -> list[str]:
    """Return the lines of a view on a terminal of so many columns."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=width, color_system=None).print(View(title, found))
    file.flush()
    lines = raw.getvalue().decode(encoding).splitlines()
    assert max(map(len, lines)) <= width
    return [line.rstrip() for line in lines]


def test_the_view_shows_it_all() -> None:
    notes = {"ChunkSourceLoader": {"bad": [[f"{i}.trmph", "gone: No such file"] for i in range(9)]}}
    lines = drawn(facts(notes=notes), 90)
    assert lines == [
        "hexdata live games  1:02:05",
        "positions    210,345/s, 1,263,616 so far",
        "batches      1,234, 0.50 same-game pairs in each",
        "games        2,000 seen, 1,500 in the pool, each used 3.25 times",
        "newest file  a/games.trmph",
        "",
        "stage                  items/s  queue            dropped      busy",
        "FilePathProvider       1,234.5    1/4  ██              0  1.2 of 2",
        "ShufflingFrameSampler  1,234.5    6/4  ████████       12  1.2 of 2",
        "ShufflingFrameSampler: held 5",
        "bad file 6.trmph: gone: No such file",
        "bad file 7.trmph: gone: No such file",
        "bad file 8.trmph: gone: No such file",
    ]


def test_the_view_shows_a_missing_directory() -> None:
    notes = {"FilePathProvider": {"unavailable": "/games: No such file or directory"}}
    assert (
        drawn(facts(notes=notes), 90)[-1]
        == "waiting for the missing directory: /games: No such file or directory"
    )
    assert not [line for line in drawn(facts(), 90) if "missing" in line]


def test_the_view_says_why_there_is_no_batch() -> None:
    assert "no batch: the pool is empty" in drawn(facts(waiting="the pool is empty"), 90)
    assert not [line for line in drawn(facts(), 90) if "no batch" in line]


def test_without_a_terminal_each_reason_is_noted_once(tmp_path: Path) -> None:
    output = Output(False)
    with pytest.MonkeyPatch.context() as patch:
        noted: list[str] = []
        patch.setattr(output, "note", noted.append)
        note = _WaitNotes(output)
        for waiting in ("3 of 9", "4 of 9", None, "no file", "no file"):
            note(facts(waiting=waiting))
    assert noted == ["no batch: 3 of 9", "no batch: no file"]


def test_it_says_what_files_it_waits_for(tmp_path: Path) -> None:
    _, out, err = run(tmp_path, *SMALL, "--seconds", 1.5)
    assert err.count("note: no batch: no complete game file has been found; waiting for files named *.") == 1
    assert "no batch: no complete game file" in out


def test_a_narrow_view_leaves_out_the_least() -> None:
    lines = drawn(facts(), 48)
    (stage,) = (line for line in lines if line.startswith("ShufflingFrameSampler 1"))
    assert stage.split() == ["ShufflingFrameSampler", "1,234.5", "6/4", "12"]
    assert "█" not in "".join(lines)
    assert drawn(facts(), 20), "whatever the width"


def test_a_view_needs_no_more_than_ascii() -> None:
    assert any("##......" in line for line in drawn(facts(), 90, "ascii"))


def test_what_no_stage_tells_is_left_out() -> None:
    lines = drawn(facts(games=None, pool=None, newest_file=None, average_uses=None, pairs=None), 90)
    assert not any(line.startswith("games") for line in lines)
    assert "newest file  none yet" in lines
    assert "batches      1,234" in lines


def test_the_name_of_a_directory_may_be_odd() -> None:
    assert drawn(facts(), 90, title="hexdata live \udce4\x1b[2J")[0].startswith(r"hexdata live \udce4\x1b[2J")
