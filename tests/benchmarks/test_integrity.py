"""The cost of hashing inputs and of checksums in temporary files: shuffles and exports with and without.

Pairs alternate in one process, so that both sides see the same machine; the ratio of the best times counts.
"""

from __future__ import annotations

import shutil
import time
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
PAIRS = 5
MOST = 1.05
"""Times the duration without."""


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


def seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def ratio(with_checks: Callable[[], Any], without: Callable[[], Any], name: str) -> float:
    pairs = [(seconds(with_checks), seconds(without)) for _ in range(PAIRS)]
    checked, plain = (min(column) for column in zip(*pairs, strict=True))
    listed = ", ".join(f"{a / b:.3f}" for a, b in pairs)
    print(
        f"\n{name}: {checked:.2f} s with checks, {plain:.2f} s without: {checked / plain:.3f}; pairs {listed}"
    )
    return checked / plain


def test_the_cost_of_checks(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter(range(1_000))

    def without(module: Any, run: Callable[[], Any]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "require_intact", lambda *_, **__: None)
            patch.setattr(runs, "checksum_of", lambda *_: 0)
            run()

    def shuffle() -> None:
        shuffle_store(store, ShuffleOptions(seed=next(seeds)))

    def export() -> None:
        shutil.rmtree(store / "shards", ignore_errors=True)
        manifest = Manifest.load(store)
        manifest.stages.pop("export", None)
        manifest.files = {n: f for n, f in manifest.files.items() if not n.startswith("shards/")}
        manifest.save(store)
        export_shards(store, ExportOptions(workers=1))

    shuffle()
    found = {
        "shuffle": ratio(shuffle, lambda: without(stage, shuffle), "shuffle"),
        "export": ratio(export, lambda: without(shards, export), "export"),
    }
    assert max(found.values()) < MOST, found
