"""A fork server that has imported PyTorch, so that its workers start in milliseconds, and shards."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store


@pytest.fixture(scope="session", autouse=True)
def preloaded_fork_server() -> None:
    multiprocessing.set_forkserver_preload(["hexdata.torch"])


@pytest.fixture(scope="session", autouse=True)
def short_waits_for_workers() -> Iterator[None]:
    """Let PyTorch wait less for the workers of a DataLoader that a test left to the garbage collector."""
    utils = pytest.importorskip("torch.utils.data._utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
        yield


@pytest.fixture(scope="session")
def shards(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 256 with some 2,000 positions. Read only: copy them."""
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("torch") / "store")
    shuffle_store(store, ShuffleOptions(seed=3, threads=1))
    export_shards(store, ExportOptions(shard_size=256, block_size=64, workers=1))
    return store / "shards"
