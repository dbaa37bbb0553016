"""Links in a store are refused before anything is written; their targets are not changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.convert import convert_sources
from hexdata.errors import StoreError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.storage import open_in_place, storage_of
from hexdata.verify import verify_store

if TYPE_CHECKING:
    from tests.conftest import CopyStore, DemoTrmph, StoreBytes

SHUFFLE = ShuffleOptions(seed=1, threads=1)
SHARDS = ExportOptions(shard_size=256, block_size=64, workers=1)
STAGES: dict[str, Callable[[Path], Any]] = {
    "shuffle": lambda store: shuffle_store(store, SHUFFLE),
    "export": lambda store: export_shards(store, SHARDS),
    "pickles": lambda store: export_pickles(store, PicklesOptions(order="original", workers=1)),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture(scope="module")
def shuffled(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shuffled store. Read only: copy it."""
    import shutil

    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("shuffled") / "store")
    shuffle_store(store, SHUFFLE)
    return store


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder outside the store, with files of every name that a stage uses."""
    folder = tmp_path / "foreign"
    names = ("file", "shuffle.log", "progress.json", "shuffling_progress.json", "train/x", "runs/x", "x")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")
    return folder


FILES = [
    ".lock",
    "manifest.json",
    "hexdata.duckdb",
    "README.md",
    "croissant.json",
    ".hexdata.duckdb.123.tmp",
    "logs/shuffle.log",
    "logs/stages.jsonl",
    ".work/shuffle/progress.json",
    ".work/export/progress.json",
    ".work/shuffle/.run.1.tmp",
]
FOLDERS = [
    ".work",
    ".work/shuffle",
    ".work/shuffle/runs",
    ".work/shuffle/spill",
    ".work/export",
    "logs",
    "shuffled",
    "shuffled/train",
    "shards",
    "pickles",
    "pickles/original",
    "positions",
    "games",
    "sources",
    "rejected",
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_link_is_refused(
    stage: str, name: str, shuffled: Path, foreign: Path, copy_store: CopyStore
) -> None:
    store = copy_store(shuffled)
    link, target = store / name, foreign if name in FOLDERS else foreign / "file"
    before = contents(foreign)
    if name == "manifest.json":
        target.write_bytes(link.read_bytes())  # otherwise the folder is not a store
        before = contents(foreign)
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists():
        link.rename(link.with_name("moved"))
    link.symlink_to(target)
    with pytest.raises(StoreError, match="does not write through symbolic links") as caught:
        STAGES[stage](store)
    assert caught.value.path == str(link)
    assert contents(foreign) == before
    assert link.is_symlink()


@pytest.mark.parametrize("stage", STAGES)
def test_a_lock_file_with_a_hard_link_is_refused(
    stage: str, shuffled: Path, foreign: Path, copy_store: CopyStore
) -> None:
    """It would be truncated."""
    store = copy_store(shuffled)
    (store / ".lock").unlink(missing_ok=True)
    os.link(foreign / "file", store / ".lock")
    with pytest.raises(StoreError, match="must be a regular file without links"):
        STAGES[stage](store)
    assert (foreign / "file").read_text() == "mine: file"


@pytest.mark.parametrize("name", ["logs/shuffle.log", "logs/stages.jsonl"])
def test_a_log_with_a_hard_link_is_not_written(
    name: str, trmph_store: Path, foreign: Path, copy_store: CopyStore
) -> None:
    """The stage completes, and a warning explains why there is no log."""
    store = copy_store(trmph_store)
    (store / "logs").mkdir(exist_ok=True)
    (store / name).unlink(missing_ok=True)
    os.link(foreign / "file", store / name)
    with pytest.warns(UserWarning, match="must be a regular file without links"):
        shuffle_store(store, SHUFFLE)
    assert (foreign / "file").read_text() == "mine: file"
    assert verify_store(store).ok


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_only_regular_files_are_opened_in_place(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    other.write_bytes(b"mine")
    if kind == "link":
        path.symlink_to(other)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    for use in (open_in_place, lambda path: storage_of(path).append(b"line\n", max_bytes=9)):
        with pytest.raises(StoreError, match="must be a regular file without links"):
            use(path)
    assert other.read_bytes() == b"mine"


def test_a_removal_does_not_follow_links(tmp_path: Path, foreign: Path) -> None:
    before = contents(foreign)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "below").symlink_to(foreign)
    (tmp_path / "link").symlink_to(foreign)
    storage_of(tmp_path / "work").remove_tree()
    storage_of(tmp_path / "link").remove_tree()
    assert contents(foreign) == before
    assert not (tmp_path / "work").exists()


def test_the_path_of_a_store_may_be_a_link(
    shuffled: Path, copy_store: CopyStore, tmp_path: Path, store_bytes: StoreBytes
) -> None:
    """A data file may be a link, too, because it is replaced and never written in place."""
    plain, linked = copy_store(shuffled, "plain"), copy_store(shuffled, "linked")
    (tmp_path / "link").symlink_to(linked)
    part = next((linked / "positions").iterdir())
    part.rename(tmp_path / "part")
    part.symlink_to(tmp_path / "part")
    for run in STAGES.values():
        run(plain)
        run(tmp_path / "link")
    assert store_bytes(linked) == store_bytes(plain)


def test_convert_refuses_links_in_a_new_store(demo_trmph: DemoTrmph, tmp_path: Path, foreign: Path) -> None:
    demo_trmph(tmp_path / "inputs", files=1, games=8)
    before = contents(foreign)
    (tmp_path / "store" / ".work").mkdir(parents=True)
    (tmp_path / "store" / "positions").symlink_to(foreign)
    with pytest.raises(StoreError, match="does not write through symbolic links"):
        convert_sources(tmp_path / "inputs", tmp_path / "store")
    assert contents(foreign) == before


def test_a_new_store_survives_a_power_cut(
    demo_trmph: DemoTrmph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent of each new folder is synced."""
    synced, sync = set(), os.fsync

    def record(descriptor: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc")
    demo_trmph(tmp_path / "inputs", files=1, games=8)
    monkeypatch.setattr(os, "fsync", record)
    convert_sources(tmp_path / "inputs", tmp_path / "new" / "below" / "store")
    assert {str(tmp_path), str(tmp_path / "new"), str(tmp_path / "new" / "below")} <= synced
