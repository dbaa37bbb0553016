"""What every benchmark uses: a store of generated games, and a timed pair.

Rates are compared with a rival's in the same run, turn about, so that a loaded machine slows both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.benchmarks.watched import watch_hexdata, write_games

POSITIONS = int(os.environ.get("HEXDATA_BENCH_POSITIONS", 2_000_000))
"""Of the store that is shuffled."""

Report = Callable[[str], None]
Versus = Callable[..., float]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Return ``report(line)``: prints a figure, whatever pytest captures."""

    def show(line: str) -> None:
        with capsys.disabled():
            print(f"\n    {line}")

    return show


@pytest.fixture
def versus(benchmark: Any, report: Report) -> Versus:
    """Return ``versus(ours, rival, units, rounds=5)``: the median over the rounds of ours / rival, as rates.

    Before each timed call of ``ours`` the rival is called and timed, over ``rival_units`` where it does not
    do the same amount. Both rates, in units a second, and the ratio are printed and kept in the
    benchmark's ``extra_info``.
    """

    def compare(
        ours: Callable[[], object],
        rival: Callable[[], object],
        units: int,
        rounds: int = 5,
        rival_units: int | None = None,
    ) -> float:
        rival_units = rival_units or units
        rival_seconds: list[float] = []

        def run_rival() -> None:
            start = time.perf_counter()
            rival()
            rival_seconds.append(time.perf_counter() - start)

        benchmark.pedantic(ours, setup=run_rival, rounds=rounds)
        seconds = benchmark.stats.stats.data
        pairs = zip(rival_seconds, seconds, strict=True)
        ratio: float = median(theirs / rival_units / (own / units) for theirs, own in pairs)
        rates = {
            "ours": units / median(seconds),
            "rival": rival_units / median(rival_seconds),
            "ratio": ratio,
        }
        benchmark.extra_info.update(rates, units=units)
        report(
            f"{rates['ours']:,.0f} positions/s, the rival {rates['rival']:,.0f}: {ratio:.2f} x "
            f"(median of {rounds} pairs, {units:,} positions)"
        )
        return ratio

    return compare


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of some ``POSITIONS`` positions, converted. Read only: copy it."""
    folder = tmp_path_factory.mktemp("store")
    write_games(folder / "games.trmph", POSITIONS)
    watch_hexdata("convert", folder / "games.trmph", folder / "store", "--workers", "1")
    return folder / "store"
