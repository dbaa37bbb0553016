"""A shuffle that was stopped, at any moment and in any way, and the same command again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hexdata.errors import StoreError
from hexdata.export import ExportOptions, export_shards
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, layout, shuffle_store
from hexdata.store import Store

if TYPE_CHECKING:
    from tests.conftest import CopyStore, KillAtEveryChange, StoreBytes

MAX_ROWS = 480
"""What makes two slices of the odd store, and one unit of each of its three buckets."""
OPTIONS = {"seed": 7, "buckets": 3, "threads": 1}
UNITS = 2 + 3 + 1 + 1  # two runs; three buckets for training, one for each split held out
LEDGER = ".work/shuffle/shuffling_progress.json"


@pytest.fixture(autouse=True)
def two_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_ROWS", MAX_ROWS)


def shuffle_as(store: Path, **other: int) -> int:
    """Shuffle with ``OPTIONS``; return how many units were there already."""
    return shuffle_store(store, ShuffleOptions(**{**OPTIONS, **other})).resumed


@pytest.fixture
def undisturbed(odd_store: Path, copy_store: CopyStore, store_bytes: StoreBytes) -> dict[str, str]:
    """The bytes of a shuffle that nobody stopped."""
    store = copy_store(odd_store, "undisturbed")
    assert shuffle_as(store) == 0
    return store_bytes(store)


def finished(store: Path) -> list[str]:
    """Return the units that the ledger of a stopped shuffle says are done."""
    ledger = store / LEDGER
    done = json.loads(ledger.read_bytes())["done"] if ledger.exists() else {}
    return [name for name in done if name != "layout"]


def places(store: Path) -> dict[str, int]:
    """Return the inode of each bucket: another one if it was written again."""
    return {
        path.relative_to(store).as_posix(): path.stat().st_ino for path in store.rglob("bucket-*.parquet")
    }


def hidden_files(store: Path) -> list[str]:
    return [path.name for path in store.rglob(".*") if path.name not in (".lock", ".work")]


def test_killed_at_every_moment(
    odd_store: Path,
    undisturbed: dict[str, str],
    store_bytes: StoreBytes,
    copy_store: CopyStore,
    kill_at_every_change: KillAtEveryChange,
) -> None:
    """While one shuffle replaces another: go on, or go back, either way as if nothing had happened."""
    first = copy_store(odd_store)
    shuffle_as(first, seed=8)
    old = store_bytes(first)
    export_shards(first, ExportOptions(workers=1, shard_size=512, block_size=64))
    whole = store_bytes(first)
    resumed = []
    for number, store in enumerate(kill_at_every_change("shuffle", first, OPTIONS, MAX_ROWS)):
        if number % 4 == 1:
            back = copy_store(store, f"back-{number}")
            nothing_lost = store_bytes(back) == whole
            shuffle_as(back, seed=8)
            assert store_bytes(back) == (whole if nothing_lost else old)
        published = Store.open(store).manifest.stages.get("shuffle", {}).get("seed") == 7
        done, before = finished(store), places(store)
        resumed.append(shuffle_as(store))
        assert resumed[-1] == (0 if published else len(done))
        after = places(store)
        assert all(after[name] == before[name] for name in done if name.startswith("shuffled"))
        assert store_bytes(store) == undisturbed
        assert not hidden_files(store)
        assert not (store / ".work" / "shuffle").exists()
    assert {0, UNITS} <= set(resumed) <= set(range(UNITS + 1))
    assert len(set(resumed)) > UNITS // 2  # the worker may be ahead of the ledger


class Stop(Silent):
    """Stops the stage at its n-th step, as a Ctrl-C would."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def advance(self, amount: int) -> None:
        self.steps -= bool(amount)
        if not self.steps:
            raise KeyboardInterrupt


def stop_after(store: Path, steps: int, **other: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        shuffle_store(store, ShuffleOptions(**{**OPTIONS, **other}), Stop(steps))


@pytest.mark.parametrize("steps", [1, 2, 4, 5])
def test_interrupted(
    odd_store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, copy_store: CopyStore, steps: int
) -> None:
    store = copy_store(odd_store)
    stop_after(store, steps)
    assert "shuffle" not in Store.open(store).manifest.stages
    assert not hidden_files(store)
    done = len(finished(store))
    assert 0 < done < UNITS
    assert shuffle_as(store) == done
    assert store_bytes(store) == undisturbed


def test_interrupted_again_and_again(
    odd_store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, copy_store: CopyStore
) -> None:
    store = copy_store(odd_store)
    for steps in (1, 2, 3, 4, 5):
        stop_after(store, steps)
    assert shuffle_as(store) > 3
    assert store_bytes(store) == undisturbed


def test_what_another_seed_left_behind_is_not_taken(
    odd_store: Path, undisturbed: dict[str, str], store_bytes: StoreBytes, copy_store: CopyStore
) -> None:
    """Back to a seed whose unfinished files another seed has replaced in the meantime."""
    store = copy_store(odd_store)
    stop_after(store, 5)
    stop_after(store, 1, seed=8)
    assert shuffle_as(store) == 0
    assert store_bytes(store) == undisturbed


def test_other_limits_go_on_where_it_was(
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
    with pytest.raises(StoreError, match=r"corrupt.*Remove shuffling_progress.json"):
        shuffle_as(store)
    (store / LEDGER).unlink()
    assert shuffle_as(store) == 0
    assert store_bytes(store) == undisturbed


@pytest.mark.parametrize("most_rows", [20, 900])
def test_another_memory_goes_on_with_the_same_units(
    odd_store: Path,
    undisturbed: dict[str, str],
    store_bytes: StoreBytes,
    copy_store: CopyStore,
    monkeypatch: pytest.MonkeyPatch,
    most_rows: int,
) -> None:
    """A unit that is now too large is cut further."""
    store = copy_store(odd_store)
    stop_after(store, 2)
    done = len(finished(store))
    monkeypatch.setattr(layout, "MAX_ROWS", most_rows)
    assert shuffle_as(store) == done > 0
    assert store_bytes(store) == undisturbed
    log = (store / "logs" / "shuffle.log").read_text()
    assert ("exceed the limits: split further" in log) == (most_rows == 20)
