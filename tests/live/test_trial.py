"""Tests of trial runs: their metrics, and every reason for their end."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.batch import BatchOptions
from hexdata.errors import ConfigError, HexdataError
from hexdata.live import LiveLoader, LiveOptions, StageOptions
from hexdata.live.metrics import LiveMetrics
from hexdata.live.trial import LiveTrialOptions, run_live_trial, same_game_pairs

if TYPE_CHECKING:
    from tests.conftest import DemoTrmph

GAMES = 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, demo_trmph: DemoTrmph) -> Path:
    folder = tmp_path_factory.mktemp("games")
    demo_trmph(folder, GAMES, 2, board_size=5)
    (folder / "bad.trmph").write_text("no game\n")
    return folder


pytestmark = pytest.mark.usefixtures("no_thread_survives")


def options(**more: Any) -> LiveOptions:
    small = {"val": 0.0, "test": 0.0, "pool_size": 30, "reservoir": 100, "batch_size": 32, "watch": False}
    return LiveOptions(**{**small, **more})


def test_the_metrics_match_the_batches(directory: Path) -> None:
    facts = run_live_trial(directory, options(), LiveTrialOptions(batches=50))
    with LiveLoader(directory, config=options(batch=BatchOptions(fields=("game_id",)))) as loader:
        games = [batch["game_id"] for batch in itertools.islice(loader, 50)]
    assert (facts.batches, facts.positions, facts.ended) == (50, 50 * 32, "batches")
    assert facts.positions_per_second == pytest.approx(facts.positions / facts.seconds, rel=0.01)
    assert (facts.games, facts.pool, facts.newest_file) == (GAMES, 30, "demo-01.trmph")
    assert facts.average_uses is not None
    assert facts.average_uses > 1
    assert facts.pairs == pytest.approx(np.mean([same_game_pairs(batch) for batch in games]))
    assert [stage.name for stage in facts.stages] == [stage.name for stage in options().stages]
    bad = facts.notes["ChunkSourceLoader"]["bad"]
    assert [name for name, _ in bad] == ["bad.trmph"]


@given(st.lists(st.integers(0, 5), max_size=40))
def test_same_game_pairs_are_counted(games: list[int]) -> None:
    expected = sum(one == other for one, other in itertools.combinations(games, 2))
    assert same_game_pairs(np.array(games, np.int64)) == expected


def test_the_run_ends_with_its_input(directory: Path) -> None:
    """Two passes over the 30 games of the window deliver each of their positions once per pass."""
    live = options().with_stage("ShufflingChunkPool", passes=2)
    facts = run_live_trial(directory, live)
    unpacked = next(stage for stage in facts.stages if stage.name == "ChunkUnpacker")
    assert facts.ended == "input"
    assert unpacked.counts["games"] == 60
    assert facts.positions == unpacked.counts["positions"]


def test_the_run_ends_after_its_time_limit_without_a_batch(tmp_path: Path) -> None:
    shown: list[LiveMetrics] = []
    facts = run_live_trial(
        tmp_path, options(watch=True), LiveTrialOptions(seconds=0.2, every=0.01), shown.append
    )
    assert (facts.ended, facts.batches, facts.pairs, facts.newest_file) == ("seconds", 0, None, None)
    assert facts.seconds >= 0.2
    assert facts.waiting is not None
    assert facts.waiting.startswith("no complete game file has been found; waiting for files named *.")
    assert all(report.ended is None for report in shown)


def test_reports_cover_the_time_since_the_last_report(directory: Path) -> None:
    """Rates cover the time between two reports, and totals the whole run; both agree."""
    shown: list[LiveMetrics] = []
    run_live_trial(directory, options(), LiveTrialOptions(batches=20, every=1e-6), shown.append)
    assert {facts.batches for facts in shown} >= set(range(1, 20))
    for before, after in itertools.pairwise(shown):
        total = after.positions - before.positions
        assert after.positions_per_second * (after.seconds - before.seconds) == pytest.approx(total)


def test_ctrl_c_ends_the_run(directory: Path) -> None:
    def interrupt(facts: LiveMetrics) -> None:
        signal.raise_signal(signal.SIGINT)

    facts = run_live_trial(directory, options(), LiveTrialOptions(every=0.01), interrupt)
    assert facts.ended == "interrupted"


def test_an_error_of_a_stage_is_raised(directory: Path) -> None:
    def refuse(chunk: Any, block: Any) -> None:
        raise ValueError("no")

    kinds = [stage.kind for stage in options().stages]
    stages = [StageOptions(kind) for kind in kinds]
    stages.insert(4, StageOptions("ChunkRelabeller", {"relabel": refuse}))
    with pytest.raises(HexdataError, match=r"demo-0[01]\.trmph"):
        run_live_trial(directory, options(stages=tuple(stages)))


def test_metrics_are_served_during_the_run(directory: Path) -> None:
    reports = []

    @contextlib.contextmanager
    def serve(metrics: Callable[[], Any]) -> Iterator[None]:
        reports.append(metrics())
        yield
        reports.append(metrics())

    run_live_trial(directory, options(), LiveTrialOptions(batches=5), serve=serve)
    before, after = (metrics["TensorGenerator"].get("batches", 0) for metrics in reports)
    assert before == 0
    assert after >= 5


@pytest.mark.parametrize(
    "wrong", [{"batches": 0}, {"batches": 1.5}, {"seconds": 0}, {"seconds": math.inf}, {"every": math.nan}]
)
def test_invalid_limits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        LiveTrialOptions(**wrong)
