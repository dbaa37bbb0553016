"""The five commands of the README on real legacy files; skipped where there are none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LEGACY = Path(__file__).parents[3] / "shared" / "data" / "legacy"


@pytest.mark.skipif(not LEGACY.is_dir(), reason="no real legacy files here")
def test_the_five_commands(tmp_path: Path) -> None:
    store = str(tmp_path / "STORE")

    def hexdata(*arguments: str) -> dict:
        command = [sys.executable, "-m", "hexdata", *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    converted = hexdata("convert", str(LEGACY), store)
    assert converted["rejected"] == 0
    assert converted["positions"] == 374_527
    assert hexdata("shuffle", store, "--seed", "7")["positions"] == converted["positions"]
    assert hexdata("export", store)["positions"] == converted["positions"]
    proved = hexdata("verify", store)
    assert proved["ok"]
    assert not proved["skipped"]
    epochs = hexdata("load", store, "--epochs", "2")["epochs"]
    assert [epoch["delivered"] == epoch["positions"] for epoch in epochs] == [True, True]
    assert epochs[0]["first_ids"] != epochs[1]["first_ids"]
