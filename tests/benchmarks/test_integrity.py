"""The cost of hashing inputs and of checksums in temporary files, as a share of the CPU time of a stage.

CPU seconds and not the clock: on a busy machine, whole runs differ by more than what is measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hexdata.convert import convert_sources
from hexdata.demo.games import make_games
from hexdata.export import ExportOptions, export_shards, shards
from hexdata.formats.trmph import write_trmph
from hexdata.shuffle import ShuffleOptions, runs, shuffle_store, stage
from hexdata.store.manifest import Manifest

GAMES, FILES = 1_500, 24
MOST = 0.05
"""Of the CPU seconds of all else."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of more than 2 million positions: the same games in another order in each file."""
    folder = tmp_path_factory.mktemp("integrity")
    games = list(make_games(GAMES, 1, 13))
    (folder / "inputs").mkdir()
    for number in range(FILES):
        write_trmph(folder / "inputs" / f"{number:02d}.trmph", games[number:] + games[:number], 13)
    convert_sources(folder / "inputs", folder / "store")
    assert Manifest.load(folder / "store").counts["positions"] >= 2_000_000
    return folder / "store"


class Spent:
    """Counts the CPU seconds of all calls of a function, by the clock given."""

    def __init__(self, function: Callable[..., Any], clock: Callable[[], float]) -> None:
        self.function, self.clock, self.calls = function, clock, deque[float]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = self.clock()
        result = self.function(*args, **kwargs)
        self.calls.append(self.clock() - begin)
        return result


@pytest.mark.parametrize("name", ["shuffle", "export"])
def test_the_cost_of_checks(name: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = stage if name == "shuffle" else shards
    # Nothing else runs while inputs are hashed, in threads; checksums are made by the threads that work.
    hashes = Spent(module.require_intact, time.process_time)
    checksums = Spent(runs.checksum_of, time.thread_time)
    monkeypatch.setattr(module, "require_intact", hashes)
    monkeypatch.setattr(runs, "checksum_of", checksums)
    if name == "export":
        shuffle_store(store, ShuffleOptions(seed=1))
        checksums.calls.clear()
    begin = time.process_time()
    if name == "shuffle":
        result: Any = shuffle_store(store, ShuffleOptions(seed=2))
    else:
        result = export_shards(store, ExportOptions(workers=1))
    total = time.process_time() - begin
    spent = sum(hashes.calls) + sum(checksums.calls)
    print(
        f"\n{name} of {result.positions:,} positions: {sum(hashes.calls):.3f} s hash inputs, "
        f"{sum(checksums.calls):.3f} s make checksums, of {total:.2f} s: {spent / (total - spent):.2%}"
    )
    assert hashes.calls
    assert bool(checksums.calls) == (name == "shuffle")
    assert spent < MOST * (total - spent)
