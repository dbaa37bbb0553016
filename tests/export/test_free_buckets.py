"""Export that removes each bucket of the shuffle as soon as its shards are written."""

from __future__ import annotations

import shutil
from functools import partial

import pytest

from hexdata.errors import StoreError
from hexdata.export import ExportOptions, export_shards
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, plan_shuffle, shuffle_store
from hexdata.store import Store
from tests.conftest import DERIVED

SIZES = {"shard_size": 96, "block_size": 32, "workers": 1}
KEEP, FREE = ExportOptions(**SIZES), ExportOptions(**SIZES, free_buckets=True)
SHUFFLE = ShuffleOptions(seed=7, buckets=5, threads=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory, odd_store):
    """The odd store, shuffled; exported with its buckets; and exported without them. Read only: copy them."""
    folder = tmp_path_factory.mktemp("made")
    shuffled, plain, freed = (folder / name for name in ("shuffled", "plain", "freed"))
    shutil.copytree(odd_store, shuffled)
    shuffle_store(shuffled, SHUFFLE)
    for store in (plain, freed):
        shutil.copytree(shuffled, store)
    export_shards(plain, KEEP)
    assert export_shards(freed, FREE).buckets_removed == 7
    return shuffled, plain, freed


class Watch(Silent):
    """Records after each shard the shards and the buckets on disk; stops like Ctrl-C at the n-th shard."""

    def __init__(self, store, stop=1_000):
        self.store, self.stop, self.seen = store, stop, []

    def advance(self, amount):
        shards = len(list(self.store.glob("shards/*.tar")))
        if amount:
            left = [path.relative_to(self.store).as_posix() for path in self.store.glob("shuffled/*/*")]
            self.seen.append((shards, left))
        if shards == self.stop:
            raise KeyboardInterrupt


def test_the_shards_are_those_of_a_plain_export(made, store_bytes):
    _, plain, freed = made
    assert not (freed / "shuffled").exists()
    expected, found = store_bytes(plain), store_bytes(freed)
    same = {name for name in expected if not name.startswith("shuffled/")}
    assert found.keys() == same
    assert all(found[name] == expected[name] for name in same - {"manifest.json", *DERIVED})
    before, after = Store.open(plain).manifest, Store.open(freed).manifest
    assert after.stages["export"] == before.stages["export"]
    assert after.removed_buckets == after.buckets() == before.files_in("shuffled")
    assert not after.files_in("shuffled")


def test_each_bucket_is_removed_after_its_last_shard(made, copy_store):
    store = copy_store(made[0])
    files = Store.open(store).manifest.files_in("shuffled/train")
    watch, rows = Watch(store), sum(facts.rows for facts in files.values())
    export_shards(store, FREE, watch)
    assert watch.seen
    for shards, left in watch.seen:
        end = 0
        for name, facts in files.items():
            end += facts.rows
            assert (name in left) == (end > min(shards * 96, rows))


def test_a_finished_export_removes_the_buckets_later_and_is_then_done(made, copy_store, store_bytes):
    store = copy_store(made[1])
    for options, removed in ((FREE, 7), (FREE, 0), (KEEP, 0)):
        result = export_shards(store, options)
        assert (result.already_done, result.buckets_removed) == (True, removed)
        assert store_bytes(store) == store_bytes(made[2])


def test_other_options_after_an_interruption_lose_nothing(made, copy_store, store_bytes):
    store = copy_store(made[0])
    with pytest.raises(KeyboardInterrupt):
        export_shards(store, FREE, Watch(store, stop=4))
    with pytest.raises(StoreError, match=r"missing, and .* must be written.*hexdata shuffle"):
        export_shards(store, ExportOptions(**SIZES | {"shard_size": 192}, free_buckets=True))
    assert export_shards(store, FREE).resumed > 0
    assert store_bytes(store) == store_bytes(made[2])


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_damaged_shard_needs_the_shuffle_again(made, copy_store, store_bytes, interrupted):
    store = copy_store(made[0] if interrupted else made[2])
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            export_shards(store, FREE, Watch(store, stop=4))
    with (store / "shards" / "train-000000.tar").open("ab") as file:
        file.write(b"x")
    message = r"missing, and .*train-000000.tar must be written.*--seed 7 --buckets 5"
    with pytest.raises(StoreError, match=message):
        export_shards(store, FREE)
    inode = partial((store / "shards" / "train-000001.tar").stat)
    before = inode().st_ino
    assert not shuffle_store(store, SHUFFLE).already_done
    assert len(list(store.glob("shuffled/*/*"))) == 7
    export_shards(store, FREE)
    assert inode().st_ino == before
    assert store_bytes(store) == store_bytes(made[2])


def test_the_shard_that_needs_a_missing_bucket_is_named(made, copy_store):
    store = copy_store(made[2])
    for split in ("train", "test"):
        (store / "shards" / f"{split}-000000.tar").unlink()
    message = r"shuffled/test.*missing, and shards/test-000000.tar must be written"
    with pytest.raises(StoreError, match=message):
        export_shards(store, FREE)


def test_the_same_shuffle_makes_the_buckets_again_and_keeps_the_shards(made, copy_store, store_bytes):
    store = copy_store(made[2])
    plan = plan_shuffle(store, SHUFFLE)
    assert (plan.already_done, plan.disk_freed) == (False, 0)
    assert not shuffle_store(store, SHUFFLE).already_done
    assert store_bytes(store) == store_bytes(made[1])
    assert shuffle_store(store, SHUFFLE).already_done
    assert export_shards(store, KEEP).already_done
