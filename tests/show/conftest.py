"""A store with shards for tests of positions and games."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, trmph_store: Path) -> Path:
    """A shuffled and exported copy of ``trmph_store``. Read only: copy it."""
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("shown") / "store")
    shuffle_store(store, ShuffleOptions(threads=1))
    export_shards(store, ExportOptions(workers=1))
    return store
