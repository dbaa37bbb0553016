"""Shuffles stopped at any moment and in any way are resumed by the same command."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hexdata.errors import StoreError
from hexdata.export import ExportOptions, export_shards
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from tests.ledger_units import read_units
from tests.pairs import FULL

if TYPE_CHECKING:
    from tests.conftest import CopyStore, KillAtEveryChange, StoreBytes

OPTIONS = {"seed": 7, "buckets": 3, "threads": 1}
BUCKETS = 3 + 1 + 1  # three for training, one for each split held out
LEDGER = ".work/shuffle/progress.json"


def shuffle_as(store: Path, **other: int) -> int:
    """Shuffle with ``OPTIONS``; return the number of buckets that were already written."""
    return shuffle_store(store, ShuffleOptions(**{**OPTIONS, **other})).resumed


@pytest.fixture(scope="module")
def undisturbed(
    odd_store: Path, tmp_path_factory: pytest.TempPathFactory, store_bytes: StoreBytes
) -> dict[str, str]:
    """The bytes of an uninterrupted shuffle."""
    store = shutil.copytree(odd_store, tmp_path_factory.mktemp("undisturbed") / "store")
    assert shuffle_as(store) == 0
    return store_bytes(store)


def finished(store: Path) -> list[str]:
    """Return the buckets in the ledger of a stopped shuffle."""
    return list(read_units(store / LEDGER))


def inodes(store: Path) -> dict[str, int]:
    """Return the inode of each bucket, which changes if the bucket is written again.

    A bucket that has not replaced an old one yet has the name of the old one.
    """
    new = store / ".work" / "shuffle" / "new"
    found = [(root, path) for root in (store, new) for path in (root / "shuffled").rglob("bucket-*.parquet")]
    return {path.relative_to(root).as_posix(): path.stat().st_ino for root, path in found}


def hidden_files(store: Path) -> list[str]:
    return [path.name for path in store.rglob(".*") if path.name not in (".lock", ".work")]


def test_killed_at_any_moment(
    odd_store: Path,
    undisturbed: dict[str, str],
    store_bytes: StoreBytes,
    copy_store: CopyStore,
    kill_at_every_change: KillAtEveryChange,
) -> None:
    """One shuffle replaces another and is killed. The old one stays until the new one is complete.

    Resuming the new one, and going back to the old one, gives the undisturbed bytes.

    It is killed at every third moment, or at every moment with ``HEXDATA_TESTS=full``.
    """
    first = copy_store(odd_store)
    shuffle_as(first, seed=8)
    export_shards(first, ExportOptions(workers=1, shard_size=512, block_size=64))
    whole = store_bytes(first)
    shuffle_as(replaced := copy_store(first, "replaced"))
    expected = store_bytes(replaced)
    assert {name for name in whole if name.startswith("shards")} <= expected.keys()
    assert undisturbed.items() >= {(n, d) for n, d in expected.items() if n.startswith("shuffled")}
    resumed = []
    every = 1 if FULL else 3
    for number, store in enumerate(kill_at_every_change("shuffle", first, OPTIONS, every)):
        if number % 4 == 1:
            back = copy_store(store, f"back-{number}")
            shuffle_as(back, seed=8)
            assert store_bytes(back) == whole
        published = Store.open(store).manifest.stages["shuffle"]["seed"] == 7
        assert published or store_bytes(store) == whole
        done, before = finished(store), inodes(store)
        resumed.append(shuffle_as(store))
        assert resumed[-1] == (0 if published else len(done))
        after = inodes(store)
        assert all(after[name] == before[name] for name in done)
        assert store_bytes(store) == expected
        assert not hidden_files(store)
        assert not (store / ".work" / "shuffle").exists()
    assert set(resumed) <= set(range(BUCKETS + 1))
    assert (min(resumed), max(resumed)) == (0, BUCKETS)
    assert len(set(resumed)) > BUCKETS // 2


class Stop(Silent):
    """Stops the stage at its n-th step, like Ctrl-C."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def advance(self, amount: int) -> None:
        self.steps -= bool(amount)
        if not self.steps:
            raise KeyboardInterrupt


def stop_after(store: Path, steps: int, **other: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        shuffle_store(store, ShuffleOptions(**{**OPTIONS, **other}), Stop(steps))


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_interrupted(
    odd_store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, copy_store: CopyStore, steps: int
) -> None:
    store = copy_store(odd_store)
    stop_after(store, steps)
    assert "shuffle" not in Store.open(store).manifest.stages
    assert not hidden_files(store)
    done = len(finished(store))
    assert 0 < done < BUCKETS
    assert shuffle_as(store) == done
    assert store_bytes(store) == undisturbed


def test_interrupted_again_and_again(
    odd_store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, copy_store: CopyStore
) -> None:
    store = copy_store(odd_store)
    for done in range(1, BUCKETS):
        stop_after(store, 1 if done == 1 else 2)  # the first step is that of the finished buckets
        assert len(finished(store)) == done
    assert shuffle_as(store) == BUCKETS - 1
    assert store_bytes(store) == undisturbed


def test_files_of_another_seed_are_not_used(
    odd_store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, copy_store: CopyStore
) -> None:
    """Return to a seed whose unfinished files were replaced by those of another seed."""
    store = copy_store(odd_store)
    stop_after(store, 4)
    stop_after(store, 1, seed=8)
    assert shuffle_as(store) == 0
    assert store_bytes(store) == undisturbed


def test_other_limits_resume_from_the_ledger(
    odd_store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, copy_store: CopyStore
) -> None:
    store = copy_store(odd_store)
    stop_after(store, 4)
    done = len(finished(store))
    assert shuffle_as(store, threads=2) == done > 0
    assert store_bytes(store) == undisturbed


def test_a_corrupt_ledger_is_named_and_its_hint_works(
    odd_store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, copy_store: CopyStore
) -> None:
    store = copy_store(odd_store)
    stop_after(store, 3)
    (store / LEDGER).write_text("{")
    with pytest.raises(StoreError, match=r"corrupt.*Remove progress.json"):
        shuffle_as(store)
    (store / LEDGER).unlink()
    assert shuffle_as(store) == 0
    assert store_bytes(store) == undisturbed


def test_only_the_missing_buckets_are_sorted(
    odd_store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, copy_store: CopyStore
) -> None:
    """Those that were written keep their files; one that was damaged since is written again."""
    store = copy_store(odd_store)
    stop_after(store, 3)
    damaged, *kept = (store / name for name in finished(store))
    before = [path.stat().st_ino for path in kept]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert shuffle_as(store) == 2
    assert [path.stat().st_ino for path in kept] == before
    assert store_bytes(store) == undisturbed
