"""Full disks: a shuffle is refused at its start; a stage whose disk fills up stops and resumes."""

from __future__ import annotations

import errno
import shutil
from collections import namedtuple
from contextlib import suppress
from dataclasses import replace

import pytest

from hexdata.errors import BudgetError, StoreError
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, plan_shuffle, shuffle_store, sort
from hexdata.store import Store
from tests.kit.whole import STAGES

Usage = namedtuple("Usage", ["total", "used", "free"])


def test_too_little_disk_is_refused_before_anything_is_written(
    shuffled_store, copy_store, store_bytes, monkeypatch
):
    store, other = copy_store(shuffled_store), ShuffleOptions(seed=4, threads=1)
    plan = plan_shuffle(store, replace(other, replace=True))
    assert 0 < plan.disk_freed < plan.disk_needed
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 0, plan.disk_needed - 1))
    with pytest.raises(BudgetError, match=rf"{store}: too little disk space.*expected .*--replace"):
        shuffle_store(store, other)
    assert store_bytes(store) == store_bytes(shuffled_store)
    freed = plan.disk_needed - plan.disk_freed
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 0, freed))
    shuffle_store(store, replace(other, replace=True))


class Filler(Silent):
    """Fills the disk when the stage has written its first file."""

    def __init__(self, disk):
        self.ballast = disk / "ballast"

    def advance(self, amount):
        if amount and not self.ballast.exists():
            with suppress(OSError), self.ballast.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass


@pytest.mark.parametrize("stage", ["shuffle", "shards", "shuffled"])
def test_a_disk_that_fills_up_stops_a_stage_cleanly(
    stage, small_disk, trmph_store, shuffled_store, store_bytes, copy_store
):
    start = trmph_store if stage == "shuffle" else shuffled_store
    store, expected = shutil.copytree(start, small_disk / "store"), copy_store(start)
    STAGES[stage](expected)
    filler = Filler(small_disk)
    with pytest.raises(BudgetError, match=r"the disk is full; found .* free.*Free disk space"):
        STAGES[stage](store, filler)
    assert Store.open(store).manifest.stages == Store.open(start).manifest.stages
    assert not [p for p in store.rglob("*") if p.name.endswith(".tmp") or p.name.startswith("hexdata-")]
    filler.ballast.unlink()
    STAGES[stage](store)
    assert store_bytes(store) == store_bytes(expected)


def test_an_error_of_the_output_is_reported_while_the_query_goes_on(trmph_store, copy_store, monkeypatch):
    """Rows are computed ahead, in a thread, and the session cannot be closed before this query ends."""
    rows = sort.Sort._sorted

    def with_endless_query(self, con, buckets):
        yield from rows(self, con, buckets)
        con.sql("SELECT count(*) FROM range(1_000_000_000_000) t(i) WHERE i % 7 = 3").fetchall()

    def fail(*_, **__):
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(sort.Sort, "_sorted", with_endless_query)
    monkeypatch.setattr(sort, "write_parquet", fail)
    with pytest.raises(StoreError, match="read-only"):
        shuffle_store(copy_store(trmph_store), ShuffleOptions(seed=4, buckets=1, threads=1))
