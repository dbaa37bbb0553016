"""A store to damage, and the checks that fail."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.verify.altered import SEED, Altered

if TYPE_CHECKING:
    from tests.conftest import CopyStore


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, odd_store: Path) -> Path:
    """The odd store with all stages. Read only: copy it."""
    store = shutil.copytree(odd_store, tmp_path_factory.mktemp("exported") / "store")
    shuffle_store(store, ShuffleOptions(seed=SEED, buckets=3))
    export_shards(store, ExportOptions(shard_size=192, block_size=32, workers=1))
    return store


@pytest.fixture
def store(exported: Path, copy_store: CopyStore) -> Altered:
    """A copy of the odd store with all stages, to damage."""
    return Altered(copy_store(exported))
