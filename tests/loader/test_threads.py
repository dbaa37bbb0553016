"""Tests of ``Loader(threads=…)``: the same batches, prepared ahead in threads."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hexdata import Loader
from tests.shard_folder import ShardFolder


def assert_same(one: Any, other: Any) -> None:
    for batch, expected in zip(one, other, strict=True):
        assert batch.keys() == expected.keys()
        assert all(batch[name].tobytes() == expected[name].tobytes() for name in batch)


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_batches_of_shards_do_not_depend_on_threads(shards: ShardFolder, mode: Any, threads: int) -> None:
    options: dict[str, Any] = {"batch_size": 8, "mode": mode, "remainder": "pad", "symmetry": True}
    plain, threaded = Loader(shards.path, **options), Loader(shards.path, threads=threads, **options)
    for _ in range(2):
        assert_same(threaded, plain)
    assert threaded.epoch_digest == plain.epoch_digest
    assert threaded.state_dict() == plain.state_dict()


@pytest.mark.parametrize("threads", [2, 5])
def test_batches_of_games_do_not_depend_on_threads(trmph_store: Path, threads: int) -> None:
    plain, threaded = Loader(trmph_store, batch_size=33), Loader(trmph_store, batch_size=33, threads=threads)
    assert plain.options.mode == "games"
    for _ in range(2):
        assert_same(threaded, plain)
    assert threaded.epoch_digest == plain.epoch_digest


def test_a_state_counts_delivered_batches_only(trmph_store: Path) -> None:
    loader = Loader(trmph_store, batch_size=16, threads=3)
    for _ in islice(loader, 4):
        pass
    assert loader.batch == 4
    resumed = Loader(trmph_store, batch_size=16)
    resumed.load_state_dict(loader.state_dict())
    assert_same(loader, resumed)


def test_no_thread_remains_after_a_loop(trmph_store: Path) -> None:
    before = threading.active_count()
    loader = Loader(trmph_store, batch_size=16, threads=3)
    batches = iter(loader)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before
    for _ in loader:
        pass
    assert threading.active_count() == before
