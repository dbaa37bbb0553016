"""Files of a store: complete or absent, never written through links; and the ledger of finished files."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from pathlib import Path

import pytest

from hexdata.errors import StoreError
from hexdata.storage import storage_of
from hexdata.storage.local import LocalStorage
from hexdata.store.files import FileFacts, Ledger, digest_file, write_bytes
from tests.kit.whole import STAGES

FACTS, OTHER = FileFacts(3, 4, "0" * 64), FileFacts(5, 6, "1" * 64)
PLAN = {"seed": 1, "sizes": [3, 4]}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- publishing ---------------------------------------------------------------------------------------


def test_a_file_appears_with_its_facts(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    with storage_of(path).publish() as file:
        file.write(b"some ")
        file.write(memoryview(b"bytes"))
        assert not path.exists()
        facts = FileFacts.of(file, rows=3)
    assert facts == FileFacts(3, 10, hashlib.sha256(b"some bytes").hexdigest())
    assert digest_file(path) == (10, facts.sha256)
    assert names(path.parent) == ["file"]


def test_a_failure_leaves_the_existing_file(tmp_path):
    write_bytes(tmp_path / "old", b"old")
    for name in ("old", "new"):
        with pytest.raises(KeyboardInterrupt), storage_of(tmp_path / name).publish():
            raise KeyboardInterrupt
    assert names(tmp_path) == ["old"]
    assert (tmp_path / "old").read_bytes() == b"old"
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_bytes(tmp_path / "folder", b"new")
    assert caught.value.filename == str(tmp_path / "folder")


def test_files_are_synced_before_they_are_renamed(tmp_path, monkeypatch):
    """The data is synced before the rename, and every folder with a new name after it."""
    events, sync, replace = [], os.fsync, Path.replace

    def record_sync(descriptor):
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "replace", lambda *paths: events.append("rename") or replace(*paths))
    write_bytes(tmp_path / "new" / "folder" / "file", b"")
    assert re.fullmatch(r"\.file\.\d+\.tmp", events.pop(2))
    assert events == [tmp_path.name, "new", "rename", "folder"]


# --- links --------------------------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path):
    """A folder outside the store, with files of names that a stage uses."""
    for name in ("file", "stages.jsonl", "progress.json", "train/x"):
        (tmp_path / "foreign" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "foreign" / name).write_text("mine")
    return tmp_path / "foreign"


FILES = [".lock", ".lock.json", "manifest.json", "logs/stages.jsonl", ".work/shuffle/progress.json"]
FOLDERS = [".work/shuffle", "logs", "shuffled/train", "pickles/original"]


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_link_is_refused(name, shuffled_store, foreign, copy_store):
    store = copy_store(shuffled_store)
    link, target = store / name, foreign if name in FOLDERS else foreign / "file"
    if name == "manifest.json":
        target.write_bytes(link.read_bytes())  # otherwise the folder is not a store
    before = contents(foreign)
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists():
        link.rename(link.with_name("moved"))
    link.symlink_to(target)
    with pytest.raises(StoreError, match="symbolic links") as caught:
        STAGES["shuffle"](store)
    assert caught.value.path == str(link)
    assert contents(foreign) == before
    assert link.is_symlink()


def test_no_file_is_written_in_place(shuffled_store, foreign, copy_store):
    """A hard link is replaced. A pipe in place of the lock is refused, because opening it would wait."""
    store = copy_store(shuffled_store)
    before = contents(foreign)
    for name in (".lock", ".lock.json", "logs/stages.jsonl"):
        (store / name).unlink(missing_ok=True)
        os.link(foreign / "file", store / name)
    STAGES["shards"](store)
    assert contents(foreign) == before
    (store / ".lock").unlink()
    os.mkfifo(store / ".lock")
    with pytest.raises(StoreError, match=r"/\.lock: "):
        STAGES["shuffle"](store)


@pytest.mark.parametrize("require", [None, lambda: None], ids=["unfinished", "finished"])
def test_a_removal_does_not_follow_links(tmp_path, foreign, require):
    before = contents(foreign)
    (tmp_path / "work").mkdir()
    for link in ("work/below", "link"):
        (tmp_path / link).symlink_to(foreign)
    for name in ("work", "link"):
        storage_of(tmp_path / name).remove_tree(require)
    assert contents(foreign) == before
    assert not (tmp_path / "work").exists()


def test_a_folder_that_cannot_be_removed_raises(tmp_path, monkeypatch):
    """Temporary errors do not."""
    remove, failures = os.rmdir, [errno.EAGAIN] * 3 + [errno.EPERM]

    def fail(path, *arguments, **named):
        if failures:
            raise OSError(failures.pop(0), "cannot remove", path)
        remove(path, *arguments, **named)

    monkeypatch.setattr(os, "rmdir", fail)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    folder = storage_of(tmp_path / "folder")
    with pytest.raises(PermissionError, match="cannot remove"):
        folder.remove_tree(lambda: None)
    folder.remove_tree(lambda: None)
    assert not folder.path.exists()


def test_the_path_of_a_store_and_a_data_file_may_be_links(
    shuffled_store, whole_store, copy_store, tmp_path, store_bytes
):
    store = copy_store(shuffled_store)
    (tmp_path / "link").symlink_to(store)
    part = next((store / "positions").iterdir())
    part.rename(tmp_path / "part")
    part.symlink_to(tmp_path / "part")
    for run in STAGES.values():
        run(tmp_path / "link")
    assert store_bytes(store) == store_bytes(whole_store)


# --- the ledger ---------------------------------------------------------------------------------------


def ledger(folder, **plan):
    return Ledger(folder / "work" / "progress.json", "shuffle", PLAN | plan, FileFacts)


def test_units_of_the_same_plan_are_kept_and_those_of_another_replaced(tmp_path):
    first = ledger(tmp_path)
    first.finish("a", FACTS)
    first.finish("b", OTHER)
    assert ledger(tmp_path).done == {"a": FACTS, "b": OTHER}
    other = ledger(tmp_path, seed=2)
    assert other.done == {}
    assert len(ledger(tmp_path).done) == 2
    other.finish("c", FACTS)
    assert ledger(tmp_path).done == {}
    assert ledger(tmp_path, seed=2).done == {"c": FACTS}


def test_of_many_units_few_are_unsaved(tmp_path):
    """A killed run repeats at most 1/32 of its units, and writes its ledger some hundred times."""
    made, saves = ledger(tmp_path), 0
    for number in range(2000):
        saves += made.finish(str(number), FACTS)
        if number % 97 == 0:
            assert number + 1 - len(ledger(tmp_path).done) <= (number + 1) / 32
    assert saves < 200
    made.save()
    assert len(ledger(tmp_path).done) == 2000


def test_a_failed_save_is_repeated_with_the_next_unit(tmp_path, monkeypatch):
    made = ledger(tmp_path)
    made.finish("a", FACTS)

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "publish", fail)
        with pytest.raises(OSError, match="full"):
            made.finish("b", FACTS)
    assert list(ledger(tmp_path).done) == ["a"]
    made.finish("c", FACTS)
    assert list(ledger(tmp_path).done) == ["a", "b", "c"]
