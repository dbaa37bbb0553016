"""Runs hexdata in this process, which saves the start of another: with captured outputs, or on a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from hexdata.cli import main

__all__ = ["Ran", "hexdata_run", "run_on_terminal"]


@dataclass(frozen=True)
class Ran:
    """Exit status and outputs of a command."""

    status: int
    out: str
    err: str

    @property
    def facts(self) -> Any:
        """The result on standard output, which must be one line of JSON."""
        (line,) = self.out.splitlines()
        return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def _run(arguments: tuple[object, ...], out: Any, err: Any, environment: dict[str, str]) -> int:
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["hexdata", *map(str, arguments)])
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def hexdata_run(*arguments: object, encoding: str = "utf-8", **environment: str) -> Ran:
    """Run ``hexdata`` with these arguments and environment variables; both outputs have the encoding."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n") for _ in range(2))
    status = _run(arguments, out, err, environment)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode(encoding))  # type: ignore[attr-defined]  # a BytesIO
    return Ran(status, *texts)


def run_on_terminal(*arguments: object, **environment: str) -> str:
    """Run ``hexdata``, which must succeed, with both outputs on a terminal; return what it received."""
    ours, theirs = os.openpty()
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # raised when the other side is closed
            while piece := os.read(ours, 1 << 16):
                shown.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        status = _run(arguments, terminal, terminal, environment)
    reader.join()
    os.close(ours)
    assert status == 0, shown
    return shown.decode().replace("\r\n", "\n")
