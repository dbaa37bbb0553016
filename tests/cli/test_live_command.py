"""``hexdata live``: its metrics as a summary, as JSON and as a view, and how it ends."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console

from hexdata.cli.view import View
from hexdata.errors import ConfigError
from hexdata.live import LiveLoader, LiveOptions
from hexdata.live.trial import LiveMetrics, run_live_trial, same_game_pairs
from tests.ctrl_c import ctrl_c_after
from tests.kit.command_line import hexdata_run, run_on_terminal

if TYPE_CHECKING:
    from tests.conftest import DemoTrmph

SMALL = ("--reservoir", 100, "--batch-size", 16)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, demo_trmph: DemoTrmph) -> Path:
    folder = tmp_path_factory.mktemp("live")
    demo_trmph(folder, 60, 2, board_size=5)
    (folder / "bad.trmph").write_text("no game\n")
    return folder


def run(*arguments: Any) -> tuple[int, str, str]:
    ran = hexdata_run("live", *arguments)
    return ran.status, ran.out, ran.err


def last(*arguments: Any) -> dict[str, Any]:
    status, out, _ = run(*arguments, "--json")
    assert status == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    assert [line["ended"] for line in lines[:-1]] == [None] * (len(lines) - 1)
    return lines[-1]


def test_the_summary_and_the_view_show_every_stage(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run(directory, *SMALL, "--batches", 5)
    assert status == 0
    assert re.search(r"positions +[\d,]+/s, 80 so far", out)
    assert re.search(r"batches +5, [\d.]+ same-game pairs", out)
    for name in ("FilePathProvider", "TensorGenerator", "demo-01.trmph", "bad file bad.trmph"):
        assert name in out
    monkeypatch.setitem(run_live_trial.__kwdefaults__, "every", 0.02)
    shown = run_on_terminal("live", directory, *SMALL, "--batches", 300)
    assert shown.count("TensorGenerator ") > 1, "views during the run, and the summary"
    with ctrl_c_after(0.3):
        status, out, _ = run(directory, *SMALL)
    assert (status, out.count("TensorGenerator ")) == (130, 1)


def test_the_metrics_match_the_batches(directory: Path, tmp_path: Path) -> None:
    config = tmp_path / "small.toml"
    config.write_text("batch_size = 32\nreservoir = 100\nval = 0.0\ntest = 0.0\nwatch = false\n")
    found = last(directory, "--config", config, "--pool-size", 30, "--batches", 50)
    with LiveLoader(directory, config=config, pool_size=30, fields=("game_id",)) as loader:
        pairs = [same_game_pairs(batch["game_id"]) for batch in itertools.islice(loader, 50)]
    assert [found[name] for name in ("batches", "positions", "ended")] == [50, 1600, "batches"]
    pool = next(stage["counts"] for stage in found["stages"] if stage["name"] == "ShufflingChunkPool")
    assert [pool[name] for name in ("entered", "chunks")] == [60, 30]
    assert found["notes"]["ShufflingChunkPool"]["newest"] == "demo-01.trmph"
    assert found["pairs"] == pytest.approx(np.mean(pairs))
    assert found["positions_per_second"] == pytest.approx(1600 / found["seconds"], rel=0.01)
    assert pool["uses"] > 1
    assert found["stages"][-2]["counts"]["size"] == 100
    assert last(directory, "--config", config, *SMALL, "--batches", 3)["positions"] == 48


def test_a_run_ends_with_its_input_its_time_or_ctrl_c(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LiveOptions(val=0.0, test=0.0, pool_size=30, reservoir=100, batch_size=32, watch=False)
    found = run_live_trial(directory, live.with_stage("ShufflingChunkPool", passes=2))
    unpacked = found.stages[4]["counts"]
    assert (found.ended, unpacked["games"], found.positions) == ("input", 60, unpacked["positions"])
    found = run_live_trial(directory, live, lambda facts: signal.raise_signal(signal.SIGINT), every=0.01)
    assert found.ended == "interrupted"

    shown: list[LiveMetrics] = []
    found = run_live_trial(tmp_path, None, shown.append, seconds=0.2, every=0.01)
    assert (found.ended, found.batches, found.pairs) == ("seconds", 0, None)
    assert found.seconds >= 0.2
    assert all(each.ended is None for each in shown)
    monkeypatch.setitem(run_live_trial.__kwdefaults__, "every", 0.1)
    _, out, err = run(tmp_path, *SMALL, "--seconds", 1.5)
    for text in (found.waiting, out, err):
        assert text is not None
        assert text.count("waiting for files named") == 1, "each reason is noted once"
    wrong: list[dict[str, Any]] = [{"batches": 0}, {"batches": 1.5}, {"seconds": 0}, {"seconds": math.inf}]
    for each in wrong:
        with pytest.raises(ConfigError, match="cannot be used"):
            run_live_trial(tmp_path, live, **each)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--config", "missing.toml"], 2, "missing.toml"),
        (["--split", "training"], 2, "training"),
        (["--batch-size", 0], 2, "batch_size"),
        (["--seed", "x"], 2, "--seed"),
        (["--prometheus", 0, "--prometheus-host", "192.0.2.1"], 2, "192.0.2.1:0"),
    ],
)
def test_wrong_arguments_are_refused(
    directory: Path, arguments: list[Any], status: int, message: str
) -> None:
    found, out, err = run(directory, *arguments)
    assert (found, out) == (status, "")
    assert message in err
    assert run(directory / "nowhere", *SMALL)[0] == 1


def test_a_view_fits_every_terminal(directory: Path) -> None:
    facts = LiveMetrics(**last(directory, *SMALL, "--batches", 5))
    facts.stages[5] |= {"per_second": 1234.5, "busy": 0.75, "queued": 6, "counts": {"held": 5}}
    facts.notes["FilePathProvider"] = {"unavailable": "/games"}

    def drawn(width: int, encoding: str = "utf-8") -> list[str]:
        raw = io.BytesIO()
        file = io.TextIOWrapper(raw, encoding=encoding)
        Console(file=file, width=width, color_system=None).print(View("hexdata live \udce4\x1b[2J", facts))
        file.flush()
        lines = raw.getvalue().decode(encoding).splitlines()
        assert max(map(len, lines)) <= width
        return [line.rstrip() for line in lines]

    lines = drawn(72)
    assert lines[0].startswith(r"hexdata live \udce4\x1b[2J  0:00:0")
    assert "ShufflingFrameSampler  1,234.5    6/4  ━━━━━━━━  0.8 of 1" in lines
    assert "ShufflingFrameSampler: held 5" in lines
    assert "waiting for the missing directory: /games" in lines
    assert any(line.startswith("bad file bad.trmph: no-positions") for line in lines)
    assert "━" not in "".join(drawn(71))
    assert any(line.startswith("newest file ") for line in drawn(20))
    assert any("6/4  -------- " in line for line in drawn(90, "ascii"))
