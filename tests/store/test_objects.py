"""The lock of a store in an object store: effects of losing it, and state for the next holder."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.errors import StoreError, StoreLockedError
from hexdata.storage import lock, objects, storage_of
from hexdata.store import Store
from hexdata.store.files import write_bytes
from hexdata.store.ledger import Ledger
from hexdata.store.manifest import Manifest
from tests.conftest import needs_conditions

if TYPE_CHECKING:
    from collections.abc import Callable

    from upath import UPath


@pytest.fixture
def store(bucket: UPath) -> Store:
    Manifest().save(bucket / "store")
    return Store.open(bucket / "store")


@pytest.fixture
def on_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return ``on_machine(name)``, which makes this process act as if it ran on that machine."""
    return lambda name: monkeypatch.setenv("HEXDATA_CACHE", str(tmp_path / name))


def test_a_process_that_lost_the_lock_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(store.path, Path)
    write_bytes(store.path / "shuffled" / "a", b"1")
    place = {"Bucket": store.path.path.partition("/")[0]}
    with store.writing("shuffle"):
        begun = store.path.fs.call_s3("create_multipart_upload", **place, Key="test/store/shuffled/b")
        before = store.manifest.tag
        monkeypatch.setattr(lock, "LEASE_SECONDS", -1.0)  # as if the lease had expired
        for change in (
            lambda: store.remove("shuffled"),
            lambda: store.keep_only("shuffled", set()),
            lambda: store.manifest.save(store.path),
        ):
            with pytest.raises(StoreLockedError):
                change()
    listed = store.path.fs.call_s3("list_multipart_uploads", **place).get("Uploads", [])
    assert [one["UploadId"] for one in listed] == [begun["UploadId"]]
    assert (store.path / "shuffled" / "a").read_bytes() == b"1"
    assert Manifest.load(store.path).tag == before


def test_the_lock_is_checked_after_the_objects_to_remove_are_listed(store: Store) -> None:
    write_bytes(store.path / "shuffled" / "a", b"1")
    checks = iter([None])

    def lost_at_the_second_check() -> None:
        if next(checks, store) is store:
            raise StoreLockedError("lost")

    with store.writing("shuffle"):
        store.require_lock = lost_at_the_second_check
        with pytest.raises(StoreLockedError, match="lost"):
            store.remove("shuffled")
    assert (store.path / "shuffled" / "a").read_bytes() == b"1"


def test_only_named_objects_are_kept(store: Store) -> None:
    for name in ("shuffled/a", "shuffled/b/c", "shuffled/b/d", "shuffled2/e"):
        write_bytes(store.path / name, b"1")
    with store.writing("shuffle"):
        store.keep_only("shuffled", {"shuffled/b/c"})
    left = {path[len(store.path.path) + 1 :] for path in store.path.fs.find(store.path.path)}
    assert {name for name in left if name.startswith("shuffled")} == {"shuffled/b/c", "shuffled2/e"}


def test_unfinished_work_is_continued_unless_another_machine_wrote(
    store: Store, on_machine: Callable[[str], None]
) -> None:
    """Finished or failed makes no difference; the location of the work counts, not the process."""

    def turn(machine: str, *, shares_work: bool = False) -> bool:
        """Hold the lock, leave a file in the work folder and return whether the last file was still there."""
        on_machine(machine)
        mine = Store.open(store.path)
        mine.shares_work = shares_work
        with suppress(KeyError), mine.writing("shuffle"):
            found = (mine.work / "left").exists()
            write_bytes(mine.work / "left", b"1")
            raise KeyError
        return found

    assert [turn("one"), turn("one"), turn("two"), turn("one"), turn("one")] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert [turn("one", shares_work=True), turn("two", shares_work=True)] == [False, True]
    assert [turn("two"), turn("two", shares_work=True)] == [False, False]


def test_a_wrong_clock_does_not_break_the_lock(
    store: Store, on_machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.writing("shuffle"):
        on_machine("another")
        ahead = SimpleNamespace(**{**vars(time), "time": lambda: time.time() + 3600})
        for module in (lock, objects):
            monkeypatch.setattr(module, "time", ahead)
        with (
            pytest.raises(StoreLockedError, match="renewed its lock"),
            Store.open(store.path).writing("export"),
        ):
            pass


def test_an_object_of_another_process_is_not_replaced(store: Store) -> None:
    path = store.path / "shuffled" / "a"
    with store.writing("shuffle"):
        for data in (b"1", b"1"):
            write_bytes(path, data, replace=False)
        with pytest.raises(StoreError, match="only one process writes"):
            write_bytes(path, b"2", replace=False)
        assert path.read_bytes() == b"1"
        write_bytes(path, b"2")
    assert path.read_bytes() == b"2"


# --- stores without conditional requests, and overtaken processes --------------------------------------


@pytest.fixture
def ignores_conditions(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the conditions of all requests, as some servers do."""
    assert not isinstance(store.path, Path)
    call = store.path.fs._call_s3

    async def without_conditions(method: str, *options: Any, **arguments: Any) -> Any:
        arguments.pop("IfNoneMatch", None)
        if method != "get_object":
            arguments.pop("IfMatch", None)
        return await call(method, *options, **arguments)

    monkeypatch.setattr(store.path.fs, "_call_s3", without_conditions)
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.0)


@pytest.mark.usefixtures("ignores_conditions")
def test_a_store_that_ignores_conditions_is_used_with_a_warning(
    store: Store, on_machine: Callable[[str], None]
) -> None:
    with ExitStack() as stack:
        with pytest.warns(UserWarning, match="does not support conditional requests"):
            stack.enter_context(store.writing("shuffle"))
        write_bytes(store.path / "shuffled" / "a", b"1", replace=False)
        on_machine("another")
        with pytest.raises(StoreLockedError, match="another process is writing"), store.writing("export"):
            pass
        with pytest.raises(StoreError, match="Another object exists"):
            write_bytes(store.path / "shuffled" / "a", b"2", replace=False)
    assert (store.path / "shuffled" / "a").read_bytes() == b"1"


@pytest.mark.usefixtures("ignores_conditions")
def test_two_processes_that_begin_together_in_such_a_store(
    store: Store, on_machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that wrote the lock last has it; the other reads it again after a pause."""

    def overtake(_: float) -> None:
        (store.path / ".lock").write_bytes(OTHER)

    monkeypatch.setattr(lock, "time", SimpleNamespace(**{**vars(time), "sleep": overtake}))
    with (
        pytest.warns(UserWarning, match="does not support conditional requests"),
        pytest.raises(
            StoreLockedError, match=r"another process is writing.*process 7 on elsewhere \(export\)"
        ),
        store.writing("shuffle"),
    ):
        pass
    assert (store.path / ".lock").read_bytes() == OTHER


OTHER = b'{"host": "elsewhere", "machine": "b", "pid": 7, "stage": "export", "work": "b", "renewed": 1}'
OVERTAKEN = (
    r"another process has taken the lock of this store, which this process held; "
    r"found process 7 on elsewhere \(export\)\. Make sure"
)


@needs_conditions
def test_a_store_with_conditions_gives_no_warning(store: Store) -> None:
    with store.writing("shuffle"):
        pass


CHANGES: dict[str, Callable[[Store], object]] = {
    "manifest": lambda store: store.manifest.save(store.path),
    "object": lambda store: write_bytes(store.path / "shuffled" / "a", b"2", replace=False),
    "removal": lambda store: store.remove("shuffled"),
}


@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_process_that_was_overtaken_is_told_that(
    store: Store, monkeypatch: pytest.MonkeyPatch, change: str, expired: bool
) -> None:
    """Such as after a suspension of the machine; by its own error, or by that of its next change."""
    if change == "removal" and not expired:
        pytest.skip("a removal does not fail before the lease has expired")

    def write_and_be_overtaken() -> None:
        with store.writing("shuffle"):
            write_bytes(store.path / "shuffled" / "a", b"1", replace=False)
            (store.path / ".lock").write_bytes(OTHER)
            other = Manifest.load(store.path)
            other.counts["games"] = 1
            other.save(store.path)
            if expired:
                monkeypatch.setattr(lock, "LEASE_SECONDS", -1.0)
            CHANGES[change](store)

    with pytest.raises(StoreLockedError, match=OVERTAKEN):
        write_and_be_overtaken()
    assert (store.path / ".lock").read_bytes() == OTHER
    assert (store.path / "shuffled" / "a").read_bytes() == b"1"
    assert Manifest.load(store.path).counts["games"] == 1


def test_a_process_that_could_not_renew_its_lock_is_told_that(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LEASE_SECONDS", -1.0)
    with (
        pytest.raises(
            StoreLockedError, match=r"not renewed its lock.*found no renewal for \d+ s; expected at most"
        ),
        store.writing("shuffle"),
    ):
        store.manifest.save(store.path)


def test_a_ledger_in_an_object_store_grows_by_objects(bucket: UPath) -> None:
    path = bucket / "work" / "progress.json"
    ledger = Ledger(path, "export", "plan")
    for number in range(3):
        ledger.finish(f"{number}", {"rows": number})
    parts = [path.with_name(f"progress.json.{number:06d}") for number in (1, 2)]
    assert sorted(storage_of(path.parent).names()) == [path.name, *(part.name for part in parts)]
    assert len(Ledger(path, "export", "plan")) == 3
    Ledger(path, "export", "plan").finish("3", {"rows": 3})
    again = Ledger(path, "export", "plan")
    assert [again[str(number)] for number in range(4)] == [{"rows": number} for number in range(4)]
    parts[0].unlink()
    with pytest.raises(StoreError, match="the progress file is corrupt"):
        Ledger(path, "export", "plan")
    assert len(Ledger(path, "export", "another plan")) == 0
    assert storage_of(path.parent).names() == [path.name]
