"""A store: opened or refused, written by one process at a time, stages in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hexdata.errors import StoreError, StoreLockedError
from hexdata.store import Store
from hexdata.store.files import FileFacts
from hexdata.store.manifest import MANIFEST_NAME, Manifest

FACTS = FileFacts(1, 1, "0" * 64)

CONVERT = {"val": 0.05, "test": 0.01, "records": 7, "positions": 7, "rejected": 0}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    folder = tmp_path / "store"
    Manifest(files={"positions/part-000000.parquet": FACTS}, stages={"convert": CONVERT}).save(folder)
    return Store.open(folder)


@pytest.fixture
def writer(store: Store) -> Iterator[subprocess.Popen[str]]:
    """Another process that is shuffling the store."""
    code = (
        "import sys; from hexdata.store import Store\n"
        "with Store.open(sys.argv[1]).writing('shuffle'):\n"
        "    print('writing', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(store.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        yield process
        process.kill()


def test_an_existing_store_is_opened(store: Store) -> None:
    assert Store.open(str(store.path)).manifest == store.manifest
    assert Store.open_or_create(store.path).manifest == store.manifest


@pytest.mark.parametrize("there", ["nothing", "empty folder", "hidden file"])
def test_a_store_is_created_in_an_empty_folder(tmp_path: Path, there: str) -> None:
    folder = tmp_path / "store"
    if there != "nothing":
        folder.mkdir()
    if there == "hidden file":
        (folder / ".lock").touch()
    store = Store.open_or_create(folder)
    assert store.manifest == Manifest()
    with store.writing("convert"):
        assert folder.is_dir()
    with pytest.raises(StoreError, match="not a hexdata store: an empty folder"):
        Store.open(folder)


def test_a_folder_of_other_files_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(StoreError, match="is not a store"):
        Store.open_or_create(tmp_path)
    with pytest.raises(StoreError, match="this is a file"):
        Store.open_or_create(tmp_path / "photo.jpg")


def test_paths_of_files_are_absolute(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.path.parent)
    (path,) = Store.open(store.path.name).files("positions")
    assert path == store.path.resolve() / "positions" / "part-000000.parquet"


def test_the_error_of_a_second_writer_names_the_first(store: Store, writer: subprocess.Popen[str]) -> None:
    with pytest.raises(StoreLockedError) as caught, store.writing("export"):
        pytest.fail("two processes write")
    assert caught.value.found == f"process {writer.pid} (shuffle)"
    assert caught.value.path == str(store.path)


def test_a_killed_writer_holds_no_lock(store: Store, writer: subprocess.Popen[str]) -> None:
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    with store.writing("export"), pytest.raises(StoreLockedError) as caught, store.writing("shuffle"):
        pytest.fail("written twice")
    assert caught.value.found == f"process {os.getpid()} (export)"


def test_a_failed_writer_holds_no_lock(store: Store) -> None:
    with pytest.raises(ValueError, match="stop"), store.writing("export"):
        raise ValueError("stop")
    with store.writing("export"):
        pass


def test_an_empty_lock_file_does_not_block_the_store(store: Store) -> None:
    with store.writing("export"):
        for text in ("{", "[" * 4000, "[" * 200_000, '{"pid": 1, "pid": 2, "stage": "x"}', "[]", "\0"):
            (store.path / ".lock").write_text(text)
            with pytest.raises(StoreLockedError, match="an unknown process"), store.writing("shuffle"):
                pytest.fail("written twice")
        (store.path / ".lock").write_text('{"pid": 1, "stage": "\\u001b[31m"}')
        with pytest.raises(StoreLockedError, match=r"process 1 \(\\x1b"), store.writing("shuffle"):
            pytest.fail("written twice")


def test_a_writer_sees_what_the_one_before_it_published(store: Store) -> None:
    other = Store.open(store.path)
    with other.writing("convert"):
        other.manifest.counts["games"] = 7
        other.manifest.save(other.path)
    assert store.manifest.counts["games"] == 0
    with store.writing("shuffle"):
        assert store.manifest.counts["games"] == 7


def test_a_store_damaged_since_it_was_opened_is_not_written(store: Store) -> None:
    (store.path / MANIFEST_NAME).write_text("{")
    with pytest.raises(StoreError, match="not valid JSON"), store.writing("shuffle"):
        pytest.fail("written")


def test_a_stage_requires_the_stage_before_it(store: Store) -> None:
    with pytest.raises(StoreError, match=r"no shuffle stage yet.*hexdata shuffle"):
        store.require_stage("shuffle")
    store.manifest.stages["shuffle"] = {"of": store.manifest.digest("positions", "games")}
    store.require_stage("shuffle")
    store.manifest.stages["export"] = {"of": store.manifest.digest("shuffled")}
    store.require_stage("export")


@pytest.mark.parametrize(
    ("stage", "made_of", "new"),
    [
        ("shuffle", ("positions", "games"), "games/part-000001.parquet"),
        ("export", ("shuffled",), "shuffled/train/bucket-000000.parquet"),
    ],
)
def test_a_stage_older_than_its_input_is_refused(
    store: Store, stage: str, made_of: tuple[str, ...], new: str
) -> None:
    store.manifest.stages[stage] = {"of": store.manifest.digest(*made_of)}
    store.manifest.files[new] = FACTS
    with pytest.raises(StoreError, match=f"{stage} stage is older than.*hexdata {stage}"):
        store.require_stage(stage)
