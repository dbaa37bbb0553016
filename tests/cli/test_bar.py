"""The progress bar of a command on a terminal: one line per stage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import CopyStore


def on_a_terminal(*arguments: str | Path) -> str:
    """Run hexdata with standard error on a terminal of 120 columns; return its output."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "24"}
    command = [sys.executable, "-m", "hexdata", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 1 << 16):
                shown += part
        except OSError:  # raised when the process has closed the terminal
            pass
        finally:
            os.close(ours)
        assert process.wait() == 0, shown
    return shown.decode()


def test_every_stage_of_a_shuffle_has_a_line(trmph_store: Path, copy_store: CopyStore) -> None:
    shown = on_a_terminal("shuffle", copy_store(trmph_store), "--balance-by", "winner")
    for words in ("check files", "select", "sort", "100%", "memory"):
        assert words in shown
    last = shown[shown.rindex("select") :]
    first_line = last.partition("\n")[0]
    assert "100%" in first_line, "the stage of unknown length is complete"
    assert "memory" not in first_line, "memory is shown for the running stage only"
