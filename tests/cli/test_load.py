"""``hexdata load`` and ``hexdata demo``: arguments and output."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hexdata.cli import main
from hexdata.convert import ConvertOptions, convert_sources
from hexdata.export import ExportOptions, export_shards
from hexdata.formats.trmph import write_trmph
from hexdata.loader import Loader
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.demo_games import demo_games
from tests.legacy_pickles import example, save_pickle, top_level


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load")
    write_trmph(folder / "a.trmph", demo_games(40, seed=1, board_size=5), 5)
    convert_sources([folder / "a.trmph"], folder / "store", ConvertOptions(workers=1))
    shuffle_store(folder / "store", ShuffleOptions(threads=1))
    export_shards(folder / "store", ExportOptions(workers=1))
    return folder / "store"


def run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *arguments: object,
    command: str = "load",
) -> str:
    monkeypatch.setattr("sys.argv", ["hexdata", command, *map(str, arguments)])
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
        assert (facts["mode"], facts["seed"], facts["positions"]) == (mode, 0, loader.positions)
        assert facts["seconds_to_open"] > 0
        assert 0 < facts["seconds_to_first_batch"] < facts["epochs"][0]["seconds"]
    for mode in ("games", "stream"):
        assert json.loads(run(capsys, monkeypatch, store, "--mode", mode, "--json"))["mode"] == mode


def test_the_output_describes_the_epoch(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(store, batch_size=64)
    batches = list(loader)
    out = run(capsys, monkeypatch, store, "--batch-size", 64)
    for part in (f"{len(batches):,}", f"{loader.positions:,}", str(loader.epoch_digest), "board float32"):
        assert part in out
    assert re.search(r"exact mode, seed 0: opened in \d+\.\d{3} s, first batch \d+\.\d{3} s later", out)


def test_the_output_of_games_mode_counts_the_packed_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trmph(tmp_path / "a.trmph", demo_games(40, seed=1, board_size=5), 5)
    save_pickle(tmp_path / "b.pkl.gz", top_level([example(0, ply, 10) for ply in range(3, 10)]))
    inputs = [tmp_path / "a.trmph", tmp_path / "b.pkl.gz"]
    convert_sources(inputs, tmp_path / "store", ConvertOptions(workers=1, val=0, test=0))
    out = run(capsys, monkeypatch, tmp_path / "store")
    games = Loader(tmp_path / "store").positions - 7
    assert f"{games:,} positions of 40 games, and 7 packed positions\n" in out
    assert re.search(r"games mode, seed 0: opened in \d+\.\d{3} s, first batch \d+\.\d{3} s later", out)


def test_the_output_contains_the_sum_of_the_weights(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = run(capsys, monkeypatch, store, "--weights", "0.5").splitlines()
    count = Loader(store).positions
    (line,) = (line for line in lines if line.startswith("epoch 0: "))
    assert line.endswith(f"the weights add up to {count / 2:,.2f}")


def test_a_condition_selects_positions(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "position_in_game < 3"
    selected = Loader(store, where=where).positions
    assert 0 < selected < Loader(store).positions
    result = json.loads(run(capsys, monkeypatch, store, "--where", where, "--json"))
    assert [epoch["positions"] for epoch in result["epochs"]] == [selected]


def test_the_demo_prints_lines_that_train_from_its_games(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run(capsys, monkeypatch, tmp_path, "--games", 8, command="demo")
    lines = out[out.index("To train") :].splitlines()[1:]
    names: dict[str, Any] = {}
    exec(textwrap.dedent("\n".join(lines)), names)
    assert (names["loader"].options.mode, names["loader"].epoch) == ("games", 1)
    assert len(names["board"]) == len(names["policy"]) == len(names["value"]) > 0


def test_a_warning_is_a_note(store: Path, tmp_path: Path) -> None:
    """Run in a separate process, because pytest turns warnings into errors."""
    grown = shutil.copytree(store, tmp_path / "store")
    write_trmph(tmp_path / "b.trmph", demo_games(2, seed=2, board_size=5), 5)
    convert_sources([tmp_path / "b.trmph"], grown, ConvertOptions(workers=1))
    command = [sys.executable, "-m", "hexdata", "load", str(grown)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"note: {grown}: the shuffle stage is older than the positions")
    assert "first ids" in done.stdout


def test_fields_of_batches_can_be_chosen(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run(capsys, monkeypatch, store, "--fields", "move, policy_mask", "--batch-size", 8, "--json")
    assert list(json.loads(out)["fields"]) == ["move", "policy_mask", "value", "position_id"]
    monkeypatch.setattr("sys.argv", ["hexdata", "load", str(store), "--fields", "board,visits"])
    with pytest.raises(SystemExit):
        main()
    error = " ".join(capsys.readouterr().err.split())
    assert "the store does not have these fields" in error
    assert "found visits" in error


@pytest.mark.parametrize("location", ["http://127.0.0.1:9/x/{name}?token=geheim", "s3://bucket/shards"])
def test_the_first_failed_request_is_reported_before_the_others(location: str) -> None:
    """One line without secrets says that the request is tried again, long before the last attempt."""
    if location.startswith("s3:"):
        pytest.importorskip("s3fs")
    access = {f"AWS_{name}": "geheim" for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")}
    with subprocess.Popen(
        [sys.executable, "-m", "hexdata", "load", location],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **access, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        with pytest.raises(subprocess.TimeoutExpired):  # it tries again
            process.wait(2)
        process.terminate()
        others = process.stderr.read()
    assert "127.0.0.1:9" in first
    assert "again" in first
    assert "127.0.0.1:9" not in others
    assert "geheim" not in first
