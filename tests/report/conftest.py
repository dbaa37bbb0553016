"""Stores at every stage, created once per session."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo import DemoOptions, make_legacy
from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store


@pytest.fixture(scope="session")
def demo_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 20 demo games after every stage, with forty buckets. Read only: copy it."""
    folder = tmp_path_factory.mktemp("report")
    make_legacy(folder / "legacy", DemoOptions(games=20))
    convert_sources([folder / "legacy"], folder / "store", ConvertOptions(workers=1, val=0.1, test=0.05))
    shuffle_store(folder / "store", ShuffleOptions(threads=1, buckets=40, seed=3))
    export_shards(folder / "store", ExportOptions(workers=1, shard_size=2048, block_size=512))
    return folder / "store"


@pytest.fixture(scope="session")
def odd_shuffled(tmp_path_factory: pytest.TempPathFactory, odd_store: Path) -> Path:
    """The odd store, shuffled into few buckets, without shards. Read only: copy it."""
    store = shutil.copytree(odd_store, tmp_path_factory.mktemp("report") / "odd")
    shuffle_store(store, ShuffleOptions(threads=1, buckets=3))
    return store
