"""Reading and converting legacy files, against the bare `pickle.load(gzip.open(f))` of the same file."""

from __future__ import annotations

import functools
import gzip
import itertools
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.formats import open_source

pytestmark = pytest.mark.usefixtures("hex_ai")

N = 13
POSITIONS = 100_000
LARGE = 1_000_000
VARIANTS = ["tuples", "dicts-player", "dicts-enums", "shuffled-with-ids"]
TRMPH_TARGET = 500_000
"""Positions a second and worker."""


class Legacy(NamedTuple):
    """A file of one variant."""

    path: Path
    positions: int


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory, write_games, write_variant) -> Callable[[str], Legacy]:
    """Return ``legacy(variant)``: a file of some ``POSITIONS`` positions, in a folder of its own."""
    folder = tmp_path_factory.mktemp("legacy")
    games = write_games(folder / "games", POSITIONS)

    @functools.cache
    def make(variant: str) -> Legacy:
        (folder / variant).mkdir()
        path = folder / variant / "games_processed.pkl.gz"
        return Legacy(path, write_variant(path, variant, games))

    return make


def bare_load(path: Path) -> None:
    """What every user of these files does now."""
    with gzip.open(path) as file:
        pickle.load(file)


def read_all(path: Path) -> int:
    with open_source(path) as reader:
        return sum(batch.records for batch in reader.batches())


@pytest.mark.parametrize("variant", VARIANTS)
def test_reading(legacy, versus, variant):
    path, positions = legacy(variant)
    assert versus(lambda: read_all(path), lambda: bare_load(path), positions) > 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_converting(legacy, versus, tmp_path, variant):
    path, positions = legacy(variant)
    stores = itertools.count()

    def convert() -> None:
        options = ConvertOptions(workers=1, value_convention="blue-is-0")
        assert convert_sources([path], tmp_path / f"store-{next(stores)}", options).positions == positions

    assert versus(convert, lambda: bare_load(path), positions, rounds=3) > 1
    shutil.rmtree(tmp_path)


def test_reading_trmph(benchmark, tmp_path, write_games, report):
    paths = sorted(write_games(tmp_path / "games", 2 * POSITIONS).iterdir())
    positions = benchmark.pedantic(lambda: sum(map(read_all, paths)), rounds=5)
    rate = positions / benchmark.stats.stats.median
    report(f"{rate:,.0f} TRMPH positions/s a worker (target {TRMPH_TARGET:,})")
    benchmark.extra_info.update(rate=rate, units=positions)


def test_memory_of_one_large_file(tmp_path, write_games, write_variant, watch, memory, report):
    games = write_games(tmp_path / "games", LARGE)
    path = tmp_path / "games_processed.pkl.gz"
    positions = write_variant(path, "dicts-enums", games)
    done = watch("-m", "hexdata", "convert", path, tmp_path / "store", "--workers", "1")
    report(
        f"{done.peak / 1e6:,.0f} MB at the peak, {positions / done.seconds:,.0f} positions/s, {positions:,}"
    )
    assert positions >= LARGE
    assert done.peak < memory
