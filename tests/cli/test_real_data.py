"""The five commands of the README on real legacy files; skipped where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pairs import FULL

if TYPE_CHECKING:
    from tests.conftest import RunCli

LEGACY = Path(__file__).parents[3] / "shared" / "data" / "legacy"
INPUT, POSITIONS = (LEGACY, 374_527) if FULL else (LEGACY / "v1", 102_183)


@pytest.mark.skipif(not LEGACY.is_dir(), reason="no real legacy files here")
def test_the_five_commands(tmp_path: Path, run_cli: RunCli) -> None:
    store = str(tmp_path / "STORE")

    def hexdata(*arguments: str) -> dict:
        done = run_cli(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    converted = hexdata("convert", str(INPUT), store)
    assert converted["rejected"] == 0
    assert converted["positions"] == POSITIONS
    assert hexdata("shuffle", store, "--seed", "7")["positions"] == converted["positions"]
    assert hexdata("export", store)["positions"] == converted["positions"]
    proved = hexdata("verify", store)
    assert proved["ok"]
    assert not proved["skipped"]
    epochs = hexdata("load", store, "--epochs", "2")["epochs"]
    assert [epoch["delivered"] == epoch["positions"] for epoch in epochs] == [True, True]
    assert epochs[0]["first_ids"] != epochs[1]["first_ids"]
