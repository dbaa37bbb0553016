"""Every stage gives the same bytes on every engine, also after deaths of workers and nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.engine import LOCAL
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store

SHUFFLE = ShuffleOptions(seed=7, buckets=5, threads=1)


@pytest.fixture(scope="module")
def whole(odd_store, tmp_path_factory, store_bytes):
    """The bytes of all stages of the odd store from this process."""
    import shutil

    store = shutil.copytree(odd_store, tmp_path_factory.mktemp("whole") / "store")
    run_stages(store, LOCAL)
    return store_bytes(store)


def run_stages(store, engine):
    shuffle_store(store, SHUFFLE, engine=engine)
    export_shards(store, ExportOptions(workers=1, shard_size=128, block_size=64), engine=engine)
    export_pickles(store, PicklesOptions(workers=1), engine=engine)


def hidden_files(store):
    return [path.name for path in store.rglob(".*") if path.name not in (".lock", ".work")]


@pytest.mark.usefixtures("one_source_a_batch")
def test_convert(engine, trmph_store, tmp_path, store_bytes, monkeypatch):
    """With paths relative to the working directory of the caller."""
    monkeypatch.chdir(tmp_path)
    options = ConvertOptions(workers=2, val=0.15, test=0.1)
    Path("games").symlink_to(trmph_store.parent / "games")
    result = convert_sources("games", "store", options, engine=engine)
    assert result.rejected == 1
    assert store_bytes(Path("store")) == store_bytes(trmph_store)
    assert not hidden_files(Path("store"))


def test_shuffle_and_export(engine, odd_store, copy_store, whole, store_bytes):
    store = copy_store(odd_store)
    run_stages(store, engine)
    assert store_bytes(store) == whole
    assert not hidden_files(store)


class ActingProgress(Silent):
    """Calls ``act`` at each step of a stage until it returns true."""

    def __init__(self, stage, act):
        self.target = stage
        self.act = act
        self.stage = ""
        self.done = False

    def begin(self, stage, total, unit):
        self.stage = stage

    def advance(self, amount):
        if amount and self.stage == self.target and not self.done:
            self.done = self.act()


def interrupt():
    raise KeyboardInterrupt


def test_an_interrupted_shuffle_is_resumed_by_the_other_engine(
    engine, ray_engine, odd_store, copy_store, whole, store_bytes
):
    store = copy_store(odd_store)
    with pytest.raises(KeyboardInterrupt):
        shuffle_store(store, SHUFFLE, ActingProgress("sort", interrupt), engine=engine)
    assert "shuffle" not in Store.open(store).manifest.stages
    assert not hidden_files(store)
    other = ray_engine if engine is LOCAL else LOCAL
    assert shuffle_store(store, SHUFFLE, engine=other).resumed > 0
    shuffled = {name: digest for name, digest in whole.items() if name.startswith("shuffled")}
    assert {k: v for k, v in store_bytes(store).items() if k.startswith("shuffled")} == shuffled


def test_a_removed_node_changes_nothing(
    cluster, ray_engine, third_node, odd_store, copy_store, whole, store_bytes
):
    store = copy_store(odd_store)
    with third_node() as node:

        def remove():
            cluster.remove_node(node, allow_graceful=False)
            return True

        watcher = ActingProgress("sort", remove)
        shuffle_store(store, SHUFFLE, watcher, engine=ray_engine)
    run_stages(store, ray_engine)
    assert watcher.done
    assert store_bytes(store) == whole
    assert not hidden_files(store)
