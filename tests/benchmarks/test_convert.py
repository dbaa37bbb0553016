"""Reading and converting legacy files, against the bare `pickle.load(gzip.open(f))` of the same file."""

from __future__ import annotations

import functools
import gzip
import itertools
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.formats import open_source
from hexdata.formats.legacy import write_legacy

pytestmark = pytest.mark.usefixtures("hex_ai")

N = 13
POSITIONS = 100_000
LARGE = 1_000_000
SHUFFLED = "shuffled-with-ids"
VARIANTS = ["tuples", "dicts-player", "dicts-enums", SHUFFLED]
TRMPH_TARGET = 500_000
"""Positions a second and worker."""


class Legacy(NamedTuple):
    """A file of one variant."""

    path: Path
    positions: int


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory, write_games) -> Callable[[str], Legacy]:
    """Return ``legacy(variant)``: a file of some ``POSITIONS`` positions, in a folder of its own."""
    folder = tmp_path_factory.mktemp("legacy")
    games = write_games(folder / "games", POSITIONS)

    @functools.cache
    def make(variant: str) -> Legacy:
        (folder / variant).mkdir()
        path = folder / variant / "games_processed.pkl.gz"
        return Legacy(path, write_variant(path, variant, games))

    return make


def write_variant(path: Path, variant: str, games: Path) -> int:
    """Write the games as one file of a variant; the number of positions."""
    header: dict[str, object] = {"source_file": "games.trmph"}
    batches: Iterator[pa.RecordBatch] = read_games(games)
    if variant == SHUFFLED:
        header = {"shuffling_stats": {"bucket_id": 0}}
        table = pa.Table.from_batches(batches).combine_chunks()
        order = np.random.default_rng(1).permutation(len(table))
        batches = iter(table.take(order).to_batches())
    dialect = "dicts-player" if variant == SHUFFLED else variant
    with path.open("wb") as file:
        return write_legacy(file, batches, board_size=N, dialect=dialect, header=header, level=6)


def read_games(games: Path) -> Iterator[pa.RecordBatch]:
    """Read raw games as the legacy tool saw them: an id each, a tier, and the file that they are from."""
    for file_idx, path in enumerate(sorted(games.iterdir())):
        with open_source(path) as reader:
            for batch in reader.batches():
                yield as_processed(batch.positions, file_idx)


def as_processed(batch: pa.RecordBatch, file_idx: int) -> pa.RecordBatch:
    tiers = pc.min_element_wise(pc.divide(batch["position_in_game"], pa.scalar(5, pa.uint16())), 3)
    columns = {
        "file_idx": pa.array(np.full(len(batch), file_idx, np.int32)),
        "value_sample_tier": tiers.cast(pa.uint8()),
        "extra": pa.array(['{"source_file": "games.trmph"}'] * len(batch)),
    }
    for name, column in columns.items():
        batch = batch.set_column(batch.schema.get_field_index(name), name, column)
    return batch


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


def test_memory_of_one_large_file(tmp_path, write_games, watch, memory, report):
    games = write_games(tmp_path / "games", LARGE)
    path = tmp_path / "games_processed.pkl.gz"
    positions = write_variant(path, "dicts-enums", games)
    done = watch("-m", "hexdata", "convert", path, tmp_path / "store", "--workers", "1")
    report(
        f"{done.peak / 1e6:,.0f} MB at the peak, {positions / done.seconds:,.0f} positions/s, {positions:,}"
    )
    assert positions >= LARGE
    assert done.peak < memory
