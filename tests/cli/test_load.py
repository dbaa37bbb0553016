"""``hexdata load``: arguments and output."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hexdata.cli import main
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo.games import make_games
from hexdata.export import ExportOptions, export_shards
from hexdata.formats.trmph import write_trmph
from hexdata.loader import Loader
from hexdata.shuffle import ShuffleOptions, shuffle_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load")
    write_trmph(folder / "a.trmph", make_games(40, seed=1, board_size=5), 5)
    convert_sources([folder / "a.trmph"], folder / "store", ConvertOptions(workers=1))
    shuffle_store(folder / "store", ShuffleOptions(threads=1))
    export_shards(folder / "store", ExportOptions(workers=1))
    return folder / "store"


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    monkeypatch.setattr("sys.argv", ["hexdata", "load", *map(str, arguments)])
    with contextlib.suppress(SystemExit):  # a failure leaves nothing on standard output
        main()
    return capsys.readouterr().out


def test_the_argument_is_a_store_its_shards_or_a_command(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like the first argument of ``Loader``. The default mode depends on it."""
    loader = Loader(store, batch_size=64)
    locations = {
        store: "exact",
        store / "shards": "exact",
        f"file://{store}": "exact",
        f"pipe:cat {store}/shards/{{name}}": "stream",
    }
    for location, mode in locations.items():
        facts = json.loads(run(capsys, monkeypatch, location, "--batch-size", 64, "--json"))
        assert (facts["mode"], facts["positions"]) == (mode, loader.positions)
        assert facts["seconds_to_open"] > 0
        assert 0 < facts["seconds_to_first_batch"] < facts["epochs"][0]["seconds"]
    assert json.loads(run(capsys, monkeypatch, store, "--mode", "stream", "--json"))["mode"] == "stream"


def test_the_output_describes_the_epoch(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(store, batch_size=64)
    batches = list(loader)
    out = run(capsys, monkeypatch, store, "--batch-size", 64)
    for part in (f"{len(batches):,}", f"{loader.positions:,}", str(loader.epoch_digest), "board float32"):
        assert part in out
    assert re.search(r"exact mode: opened in \d+\.\d{3} s, first batch \d+\.\d{3} s later", out)


def test_a_warning_is_a_note(store: Path, tmp_path: Path) -> None:
    """Run in a separate process, because pytest turns warnings into errors."""
    grown = shutil.copytree(store, tmp_path / "store")
    write_trmph(tmp_path / "b.trmph", make_games(2, seed=2, board_size=5), 5)
    convert_sources([tmp_path / "b.trmph"], grown, ConvertOptions(workers=1))
    command = [sys.executable, "-m", "hexdata", "load", str(grown)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"note: {grown}: the shuffle stage is older than the positions")
    assert "first ids" in done.stdout
