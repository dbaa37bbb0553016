"""Runs a command in this process with both outputs on a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

import pytest

from hexdata.cli import main

__all__ = ["run_on_terminal"]


def run_on_terminal(*arguments: object, **environment: str) -> str:
    """Run ``hexdata`` with these arguments, which must succeed.

    Args:
        arguments: Arguments of the command.
        environment: Environment variables to set.

    Returns:
        What the terminal received, with line feeds as written.
    """
    ours, theirs = os.openpty()
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # raised when the other side is closed
            while piece := os.read(ours, 1 << 16):
                shown.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    status: object = 0
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["hexdata", *map(str, arguments)])
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
                main()
        except SystemExit as end:
            status = end.code or 0
    reader.join()
    os.close(ours)
    assert status == 0, shown
    return shown.decode().replace("\r\n", "\n")
