"""The lock of a store in an object store, and what happens to a process that has lost it."""

from __future__ import annotations

import os
import time

import pytest

from hexdata.errors import StoreError, StoreLockedError
from hexdata.storage import lock
from hexdata.store import Store
from hexdata.store.files import write_bytes
from hexdata.store.manifest import Manifest

OTHER = b'{"host": "elsewhere", "machine": "b", "pid": 7, "stage": "export", "renewed": 1}'


@pytest.fixture
def store(bucket):
    Manifest().save(bucket / "store")
    return Store.open(bucket / "store")


def test_a_store_that_ignores_conditions_is_not_written(store, monkeypatch):
    """The conditions of all requests are dropped, as some servers do."""
    call = store.path.fs._call_s3

    async def without_conditions(method, *options, **arguments):
        arguments.pop("IfNoneMatch", None)
        if method != "get_object":
            arguments.pop("IfMatch", None)
        return await call(method, *options, **arguments)

    monkeypatch.setattr(store.path.fs, "_call_s3", without_conditions)
    with pytest.raises(StoreError, match="ignores conditional requests"), store.writing("shuffle"):
        pass


def test_another_machine_that_holds_the_lock_is_named(store, monkeypatch):
    with store.writing("shuffle"):
        monkeypatch.setattr(lock, "place_of_processes", lambda: "another")
        other = Store.open(store.path)
        with (
            pytest.raises(StoreLockedError, match=rf"process {os.getpid()} on .* \(shuffle\)"),
            other.writing("export"),
        ):
            pass
    with other.writing("export"):
        pass


CHANGES = {
    "manifest": lambda store: store.manifest.save(store.path),
    "object": lambda store: write_bytes(store.path / "shuffled" / "a", b"2", replace=False),
    "removal": lambda store: store.remove("shuffled"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_process_that_was_overtaken_changes_nothing(store, monkeypatch, change):
    """Such as after a suspension of the machine."""

    def write_and_be_overtaken():
        with store.writing("shuffle"):
            write_bytes(store.path / "shuffled" / "a", b"1", replace=False)
            (store.path / ".lock").write_bytes(OTHER)
            other = Manifest.load(store.path)
            other.counts["games"] = 1
            other.save(store.path)
            if change == "manifest":  # which is refused without the lock, too
                with pytest.raises(StoreError, match="another process has changed this store"):
                    CHANGES[change](store)
            monkeypatch.setattr(lock, "LEASE_SECONDS", -1.0)
            CHANGES[change](store)

    kind = StoreError if change == "object" else StoreLockedError
    with pytest.raises(kind, match="Make sure that only one process writes to the store"):
        write_and_be_overtaken()
    assert (store.path / ".lock").read_bytes() == OTHER
    assert (store.path / "shuffled" / "a").read_bytes() == b"1"
    assert Manifest.load(store.path).counts["games"] == 1


def test_a_process_whose_lock_was_taken_is_told_that(store, monkeypatch):
    """The next renewal finds it."""

    def write_until_told():
        with store.writing("shuffle"):
            (store.path / ".lock").write_bytes(OTHER)
            for _ in range(30_000):
                time.sleep(0.01)
                store.require_lock()

    monkeypatch.setattr(lock, "RENEW_SECONDS", 0.01)
    with pytest.raises(StoreLockedError, match="found a lock of another process"):
        write_until_told()
