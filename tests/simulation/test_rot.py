"""A sample of the cases of ``rot.py``, and the cases that once failed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.simulation import rot

FOUND = (
    ("store/positions/part-000000.parquet", 100, 2),  # sql and show gave other values
    ("store/games/part-000001.parquet", 125, 6),  # sql ended without an error of hexdata
    ("store/games/part-000001.parquet", 1701, 0),  # so did info
    ("cache/browse/*/*/games.npy", 500, 6),  # browse showed other games
)
"""File, offset and bit of the changes that found a fault."""
READERS = ("load games, sizes", "load exact, digests", "sql", "show", "info", "browse")
UNFINISHED = ("convert-24", "shuffle-8")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> rot.Bench:
    """The files of the largest scenario, with some readers. The working directory is restored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEXDATA_CACHE", str(tmp_path / "cache"))
    whole = rot.SCENARIOS["store"]
    readers = tuple(reader for reader in whole.readers if reader.name in READERS)
    assert len(readers) == len(READERS)
    monkeypatch.setitem(rot.SCENARIOS, "store", rot.Scenario(whole.prepare, readers, whole.files))
    return rot.Bench("store", tmp_path / "store")


@pytest.mark.slow
def test_changed_bytes_of_a_store_are_found(bench: rot.Bench) -> None:
    failures, outcomes = [], Counter[str]()
    # A bench has the smallest file of each kind, which need not be that of the fault.
    bench.paths |= {name: name for name, _, _ in FOUND if Path(name).exists()}
    for file in bench.paths:
        flips = [rot.Flip("store", file, at, bit) for name, at, bit in FOUND if name == file]
        if bench.paths[file] in bench.listed:
            flips.append(rot.Flip("store", file, Path(bench.paths[file]).stat().st_size // 2, rot.ALL_BITS))
        readers = [reader for reader in bench.scenario.readers if not rot.may_differ(reader.name, file)]
        for flip in flips:
            for outcome, wrong in bench.check(flip, readers):
                outcomes[outcome] += 1
                if wrong:
                    failures.append((str(flip), wrong))
    assert failures == []
    assert {name for name, _, _ in FOUND} <= bench.paths.keys()
    assert outcomes["verify: named"] > 8
    assert all(outcomes[f"{name}: error"] for name in READERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNFINISHED)
def test_changed_bytes_of_unfinished_work_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEXDATA_CACHE", str(tmp_path / "cache"))
    failures: list[str] = []
    rot.load_libraries()
    bench = rot.Bench(name, tmp_path / name)
    for file, path in bench.paths.items():
        flip = rot.Flip(name, file, Path(path).stat().st_size // 2, 3)
        failures += [f"{flip}: {wrong}" for _, wrong in bench.check(flip, [*bench.scenario.readers]) if wrong]
    assert failures == []


def test_the_same_seed_gives_the_same_cases() -> None:
    assert rot.offsets(100, 1000, "1") == list(range(100))
    spread = rot.offsets(100_000, 500, "1")
    assert spread == rot.offsets(100_000, 500, "1") != rot.offsets(100_000, 500, "2")
    assert all(200 * number <= at < 200 * (number + 1) for number, at in enumerate(spread))
