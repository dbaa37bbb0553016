"""Reading and converting legacy files, against the bare `pickle.load(gzip.open(f))` of the same file."""

from __future__ import annotations

import gzip
import itertools
import pickle
import shutil
from pathlib import Path

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo import DemoOptions, make_legacy
from hexdata.formats import open_source
from tests.benchmarks.watched import MEMORY, watch_hexdata, write_games

pytestmark = pytest.mark.usefixtures("hex_ai")

GAMES = 1_470
"""Games of a file, of some 100,000 positions."""
LARGE = 1_000_000
LAYOUTS = {"tuples": "v1-tuples", "dicts-player": "v2-dicts", "dicts-enums": "v2-enums"}
VARIANTS = [*LAYOUTS, "shuffled-with-ids"]


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each variant."""
    folder = tmp_path_factory.mktemp("legacy")
    make_legacy(folder / "demo", DemoOptions(games=8 * GAMES))
    files = {name: min((folder / "demo" / layout).glob("*.pkl.gz")) for name, layout in LAYOUTS.items()}
    store = folder / "store"
    watch_hexdata("convert", files["dicts-player"], store)
    watch_hexdata("shuffle", store, "--buckets", "1")
    watch_hexdata("export", store, "--format", "pickle")
    return files | {
        "shuffled-with-ids": max((store / "pickles").rglob("*.gz"), key=lambda p: p.stat().st_size)
    }


def bare_load(path: Path) -> None:
    """What every user of these files does now."""
    with gzip.open(path) as file:
        pickle.load(file)


def read_all(path: Path) -> int:
    with open_source(path) as reader:
        return sum(batch.records for batch in reader.batches())


@pytest.mark.parametrize("variant", VARIANTS)
def test_reading(legacy, versus, variant):
    path = legacy[variant]
    assert versus(lambda: read_all(path), lambda: bare_load(path), read_all(path)) > 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_converting(legacy, versus, tmp_path, variant):
    path, stores = legacy[variant], itertools.count()
    positions = read_all(path)

    def convert() -> None:
        options = ConvertOptions(workers=1)
        assert convert_sources([path], tmp_path / f"store-{next(stores)}", options).positions == positions

    assert versus(convert, lambda: bare_load(path), positions, rounds=3) > 1
    shutil.rmtree(tmp_path)


def test_memory_of_one_large_file(tmp_path, report):
    write_games(tmp_path / "games.trmph", LARGE)
    watch_hexdata("convert", tmp_path / "games.trmph", tmp_path / "first", "--workers", "1")
    watch_hexdata("export", tmp_path / "first", "--format", "pickle", "--order", "original")
    (path,) = (tmp_path / "first" / "pickles").rglob("*.gz")
    done = watch_hexdata("convert", path, tmp_path / "store", "--workers", "1")
    report(f"{done.peak / 1e6:,.0f} MB at the peak, {LARGE / done.seconds:,.0f} positions/s, {LARGE:,}")
    assert done.peak < MEMORY
