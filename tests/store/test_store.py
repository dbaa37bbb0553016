"""A store: opened or refused, written by one process at a time, repaired; its journal, and failing disks."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hexdata import __version__
from hexdata.errors import StoreError, StoreLockedError
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.sql import database
from hexdata.store import Store
from hexdata.store.files import FileFacts
from hexdata.store.journal import JOURNAL_NAME, read_journal
from hexdata.store.manifest import Manifest
from hexdata.verify import verify_store
from tests.kit.whole import FOLDERS, STAGES

FACTS = FileFacts(1, 1, "0" * 64)
CONVERT = {"val": 0.05, "test": 0.01, "records": 7, "positions": 7, "rejected": 0}
REPLACING = ShuffleOptions(seed=9, threads=1, replace=True)


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    Manifest(files={"positions/part-000000.parquet": FACTS}, stages={"convert": CONVERT}).save(folder)
    return Store.open(folder)


# --- opening ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["nothing", "empty folder", "hidden file"])
def test_a_store_is_created_in_an_empty_folder(tmp_path, there):
    folder = tmp_path / "store"
    if there != "nothing":
        folder.mkdir()
    if there == "hidden file":
        (folder / ".lock").touch()
    store = Store.open_or_create(folder)
    assert store.manifest == Manifest()
    with store.writing("convert"):
        assert folder.is_dir()
    with pytest.raises(StoreError, match="an empty folder"):
        Store.open(folder)


# --- the lock -----------------------------------------------------------------------------------------


def second_writer(store):
    """Return the error of another stage that would write."""
    with pytest.raises(StoreLockedError) as caught, store.writing("export"):
        pytest.fail("two processes write")
    assert caught.value.path == str(store.path)
    return caught.value.found


def test_a_second_writer_is_refused_until_the_first_has_ended(store):
    code = (
        "import sys; from hexdata.store import Store\n"
        "with Store.open(sys.argv[1]).writing('shuffle'):\n"
        "    print('writing', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(store.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"writing\n"
        assert second_writer(store) == f"process {writer.pid} (shuffle)"
        writer.send_signal(signal.SIGKILL)
    with store.writing("convert"):
        assert second_writer(store) == f"process {os.getpid()} (convert)"


def test_a_damaged_description_of_the_writer_is_no_fault(store):
    holder = store.path / ".lock.json"
    with store.writing("export"):
        for text in ("", "{", "[" * 200_000, "[]", "\0"):
            holder.write_text(text)
            assert second_writer(store) == "an unknown process"
        holder.write_text('{"pid": 1, "stage": "\\u001b[31m"}')
        assert second_writer(store).startswith(r"process 1 (\x1b")


# --- damaged files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_damaged_output_is_written_again(stage, whole_store, copy_store, store_bytes):
    """Only damaged files are written, with the same bytes; files derived from them are kept."""
    store = copy_store(whole_store)
    first, *others, last = sorted(Store.open(store).manifest.files_in(FOLDERS[stage]))
    data, place = bytearray((store / first).read_bytes()), random.Random(1)
    data[place.randrange(len(data))] ^= 1 << place.randrange(8)
    (store / first).write_bytes(data)
    (store / last).unlink()
    kept = {name: (store / name).stat().st_ino for name in others}
    assert not STAGES[stage](store).already_done
    assert store_bytes(store) == store_bytes(whole_store)
    # With its manifest, the entries of the shards are lost.
    if not first.endswith("manifest.json"):
        assert {name: (store / name).stat().st_ino for name in others} == kept
    assert STAGES[stage](store).already_done
    assert verify_store(store).ok


# --- failing disks ------------------------------------------------------------------------------------


def test_files_that_cannot_be_written_or_removed(whole_store, copy_store, monkeypatch):
    """A database is only a note; shards of an older shuffle, which readers would use, are an error."""

    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "hexdata.duckdb")

    store, unlink = copy_store(whole_store), os.unlink

    def keep_shards(path, **options):
        if str(path).endswith(".tar"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        unlink(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", keep_shards)
        with pytest.raises(StoreError, match=rf"{store}/shards/.*\.tar.*Check the disk"):
            shuffle_store(store, REPLACING)
    assert any((store / "shards").iterdir())
    monkeypatch.setattr(database, "write_bytes", failing)
    with pytest.warns(UserWarning, match="the stage is complete, but hexdata.duckdb was not written"):
        assert not shuffle_store(store, REPLACING).already_done
    assert not (store / "shards").exists()
    assert verify_store(store).ok


def test_removed_shards_that_a_process_has_open_on_nfs_are_no_error(whole_store, copy_store, monkeypatch):
    """NFS renames an open file instead of removing it, so its folder stays."""
    store, unlink = copy_store(whole_store), os.unlink

    def rename(path, **options):
        path = Path(path)
        path.rename(path.with_name(f".nfs{path.name}")) if path.suffix == ".tar" else unlink(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", rename)
        shuffle_store(store, REPLACING)
    assert {path.name[:4] for path in (store / "shards").iterdir()} == {".nfs"}
    STAGES["shards"](store)


# --- the journal --------------------------------------------------------------------------------------


def test_every_stage_writes_a_line(whole_store, trmph_store, copy_store):
    """Compares positions and bytes with those of the files. A line that was cut stays one of its own."""
    store = copy_store(trmph_store)
    journal = store / JOURNAL_NAME
    journal.write_bytes(journal.read_bytes().rstrip(b"\n"))
    before = len(journal.read_text().splitlines())
    for run in STAGES.values():
        run(store)
    made = [json.loads(line) for line in journal.read_text().splitlines()[before:]]
    assert [line["stage"] for line in made] == ["shuffle", "export", "pickles-original", "pickles-shuffled"]
    for line, folder in zip(made, FOLDERS.values(), strict=True):
        paths = [path for path in (store / folder).rglob("*.*") if path.suffix != ".md"]
        assert line["bytes"] == sum(path.stat().st_size for path in paths)
        assert line["positions"] == Store.open(store).manifest.counts["positions"]
        assert line["seconds"] > 0
        assert (line["version"], line["resumed"]) == (__version__, False)
        age = datetime.now(UTC) - datetime.fromisoformat(line["finished"])
        assert timedelta(0) <= age < timedelta(hours=1)


def test_a_journal_that_cannot_be_written_is_a_warning(trmph_store, shuffled_store, copy_store, store_bytes):
    store = copy_store(trmph_store)
    (store / JOURNAL_NAME).unlink()
    (store / JOURNAL_NAME).mkdir()
    with pytest.warns(UserWarning, match="the stage is complete, but the journal was not written"):
        STAGES["shuffle"](store)
    assert store_bytes(store) == store_bytes(shuffled_store)
    assert read_journal(store) == []
