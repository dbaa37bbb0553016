"""Every option of every command changes what the library receives from it."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from hexdata.cli import main
from hexdata.live import LiveOptions
from tests.kit.options import COMMANDS, OptionCase, option_cases

CASES = list(option_cases())
SHARED = ("hexdata.cli.render:Output", "hexdata.engine:open_engine")
"""Receivers of the options that most commands have."""


class Receivers:
    """Replaces the functions that a command calls, and records their arguments as text."""

    def __init__(self, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for receiver in (*COMMANDS[command].receivers, *SHARED):
            module, _, name = receiver.partition(":")
            monkeypatch.setattr(importlib.import_module(module), name, self._recorder(name))

    def _recorder(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            text = f"{name}{arguments}{named}"
            self.calls.append(re.sub(r"0x[0-9a-f]+|id='\d+'", "", text))
            if "ready" in named:
                named["ready"]("http://127.0.0.1:9/")
            if name == "load_live_config":
                return LiveOptions()
            return MagicMock(as_json=False, print_json=lambda _: False)  # an Output then prints text

        return call


def received(command: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run a command line, and return what its receivers got."""
    with monkeypatch.context() as patch:
        receivers = Receivers(command, patch)
        patch.setattr(sys, "argv", ["hexdata", *words])
        try:
            main()
        except (Exception, SystemExit):  # noqa: BLE001 - what a replaced function returns cannot always be printed
            assert receivers.calls, "the command refuses its words"
        return receivers.calls


@pytest.mark.parametrize("case", CASES, ids=[f"{case.command} {case.name}" for case in CASES])
def test_an_option_reaches_the_library(
    case: OptionCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "live.toml").write_text("seed = 3\n")
    (tmp_path / "query.sql").write_text("SELECT 2")
    without = received(case.command, case.without, monkeypatch)
    with_option = received(case.command, case.with_option, monkeypatch)
    assert len(without) > 1, "the command did not reach the library"
    assert with_option != without
    assert len(with_option) > 1, "the command refuses the option"
    assert received(case.command, case.without, monkeypatch) == without, "equal words give equal calls"
