"""Fixtures with stores of every kind at every stage, for queries. Tests must not change them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store.manifest import Manifest

KINDS = ("none", "one", "converted", "shuffled", "exported", "odd", "odd-shuffled")
BUCKETS = 3


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory, trmph_store: Path, odd_store: Path) -> dict[str, Path]:
    """A store of each of ``KINDS``: with no game, with one game, at each stage, and with nulls everywhere."""
    folder = tmp_path_factory.mktemp("stores")
    made = {"converted": trmph_store, "odd": odd_store}
    for name, text in {"none": "#5,z9 b\n", "one": "#5,a1 b\n"}.items():
        (folder / f"{name}.trmph").write_text(text)
        options = ConvertOptions(workers=1, max_reject_rate=1.0)
        convert_sources(folder / f"{name}.trmph", folder / name, options)
        made[name] = folder / name
    for name, of in {"shuffled": "converted", "exported": "converted", "odd-shuffled": "odd"}.items():
        made[name] = shutil.copytree(made[of], folder / name)
        shuffle_store(made[name], ShuffleOptions(seed=7, buckets=BUCKETS, threads=1))
    export_shards(made["exported"], ExportOptions(workers=1, shard_size=1024, block_size=256))
    return made


@pytest.fixture(params=KINDS)
def any_store(request: pytest.FixtureRequest, stores: dict[str, Path]) -> Path:
    """Each of the stores in turn."""
    return stores[request.param]


@pytest.fixture
def sized_store(tmp_path: Path) -> Callable[[int], Path]:
    """Return ``sized_store(n)``: a store without files for boards of n x n, which has macros."""

    def make(size: int) -> Path:
        path = tmp_path / f"{size}"
        path.mkdir(exist_ok=True)
        Manifest(board_size=size).save(path)
        return path

    return make
