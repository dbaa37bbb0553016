"""Tests of a directory that disappears while it is watched, and comes back."""

from __future__ import annotations

import shutil
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hexdata.batch import BatchOptions
from hexdata.demo.games import make_games
from hexdata.errors import InputError
from hexdata.formats.trmph import write_trmph
from hexdata.live import LiveLoader, LiveOptions
from hexdata.live.chunk import SCANNED
from hexdata.live.chunk_source_loader import ChunkSourceLoader
from hexdata.live.files import watcher
from hexdata.live.files.provider import FilePathProvider
from hexdata.live.pipeline import Pipeline
from hexdata.live.shuffling_chunk_pool import ShufflingChunkPool
from tests.live.files.provider_steps import names, take, watching
from tests.live.number_stages import TIMEOUT, until

pytestmark = pytest.mark.usefixtures("no_thread_survives")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def started(folder: Path, **options: Any) -> Pipeline:
    """Return a started pipeline after its first scan, with a running watcher."""
    pipeline = watching(folder, **options)
    pipeline.start()
    while take(pipeline) is not SCANNED:
        pass
    until(lambda: not provider_of(pipeline)._watcher._needs_scan)
    return pipeline


def provider_of(pipeline: Pipeline) -> FilePathProvider:
    provider = pipeline.stages[0]
    assert isinstance(provider, FilePathProvider)
    return provider


def is_gone(pipeline: Pipeline) -> bool:
    return "unavailable" in pipeline.notes().get("FilePathProvider", {})


def warned(pipeline: Pipeline) -> list[str]:
    """Return the warnings issued by the next call of the trainer."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline.take(0)
    return [str(each.message) for each in caught]


def rename_in(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f".{path.name}.tmp").write_text(text)
    return path.with_name(f".{path.name}.tmp").rename(path)


@pytest.mark.parametrize("polling", [False, True])
def test_a_removed_and_recreated_directory_is_watched_again(folder: Path, polling: bool) -> None:
    with started(folder, force_polling=polling) as pipeline:
        rename_in(folder / "a.trmph")
        assert names(pipeline, 1) == ["a.trmph"]
        for number in range(3):
            shutil.rmtree(folder)
            until(lambda: is_gone(pipeline))
            (message,) = warned(pipeline)
            assert message.startswith(
                f"{folder.resolve()}: the directory can no longer be read (No such file"
            )
            rename_in(folder / f"sub/{number}.trmph")
            rename_in(folder / "a.trmph")  # a known name
            assert names(pipeline, 1) == [f"sub/{number}.trmph"]
            rename_in(folder / f"{number}.trmph")
            assert names(pipeline, 1) == [f"{number}.trmph"]
            assert not is_gone(pipeline)
        assert pipeline.metrics()["FilePathProvider"]["unavailable"] == 3


def test_new_files_are_found_after_a_directory_is_moved_away_and_back(folder: Path) -> None:
    away = folder.with_name("away")
    with started(folder, pool_size=1) as pipeline:
        for number in range(5):
            rename_in(folder / f"{number}.trmph")
        assert sorted(names(pipeline, 5)) == [f"{number}.trmph" for number in range(5)]
        folder.rename(away)
        until(lambda: is_gone(pipeline))
        assert len(warned(pipeline)) == 1
        rename_in(away / "meanwhile.trmph")
        away.rename(folder)
        assert names(pipeline, 1) == ["meanwhile.trmph"]
        rename_in(folder / "new.trmph")
        assert names(pipeline, 1) == ["new.trmph"]
        assert len(provider_of(pipeline)._delivered) == 7, "none was forgotten while it was not there"


def test_a_recreated_directory_with_the_same_inode_is_watched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may reuse the inode of a removed directory."""
    with started(folder) as pipeline:
        monkeypatch.setattr(provider_of(pipeline)._root, "identity", lambda: (1, 1))
        folder.rmdir()
        folder.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a check may have found it missing
            for number in range(3):
                rename_in(folder / f"{number}.trmph")
                assert names(pipeline, 1) == [f"{number}.trmph"]


def test_a_missing_directory_gives_one_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(folder, rescan=0.02) as pipeline:
        root = provider_of(pipeline)._root
        scans = []
        scan = root.scan

        def count(*arguments: Any) -> Any:
            scans.append(arguments)
            return scan(*arguments)

        monkeypatch.setattr(root, "scan", count)
        folder.rmdir()
        until(lambda: is_gone(pipeline))
        before = len(scans)
        until(lambda: len(scans) > before + 5)
        assert len(warned(pipeline)) == 1
        assert pipeline.metrics()["FilePathProvider"]["unavailable"] == 1
        state = pipeline.state()  # it can be read meanwhile
    folder.mkdir()
    rename_in(folder / "a.trmph")
    with watching(folder) as resumed:
        resumed.load_state(state)
        resumed.start()
        assert names(resumed, 1) == ["a.trmph"]


def test_the_stage_waits_for_a_directory_removed_before_the_first_scan(folder: Path) -> None:
    with watching(folder) as pipeline:
        folder.rmdir()
        pipeline.start()
        until(lambda: is_gone(pipeline))
        rename_in(folder / "a.trmph")
        with pytest.warns(UserWarning, match="can no longer be read"):
            assert take(pipeline).name == "a.trmph"
        assert take(pipeline) is SCANNED


def test_without_watch_a_missing_directory_is_an_error(folder: Path) -> None:
    with watching(folder, watch=False) as pipeline:
        folder.rmdir()
        pipeline.start()
        with pytest.raises(InputError, match="can no longer be read"):
            pipeline.take(TIMEOUT)


def test_a_directory_that_never_existed_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        FilePathProvider(folder / "none")


def test_the_pipeline_can_be_closed_while_the_directory_is_missing(folder: Path) -> None:
    with started(folder) as pipeline:
        folder.rmdir()
        until(lambda: is_gone(pipeline))


def write_games(path: Path, count: int, seed: int) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    write_trmph(temporary, [(game.moves, game.winner) for game in make_games(count, seed, 5)], 5)
    temporary.rename(path)


def test_games_of_the_pool_are_drawn_while_the_directory_is_missing(folder: Path) -> None:
    stages = [
        FilePathProvider(folder, settle=0.05),
        ChunkSourceLoader(),
        ShufflingChunkPool(seed=3, pool_size=40, game_batch_size=5),
    ]
    write_games(folder / "a.trmph", 20, 1)
    with Pipeline(stages, [(4, "block"), (4, "block"), (2, "block")]) as pipeline:
        pipeline.start()
        assert pipeline.take(TIMEOUT)
        shutil.rmtree(folder)
        until(lambda: is_gone(pipeline))
        assert len(warned(pipeline)) == 1
        game_batches = [pipeline.take(TIMEOUT) for _ in range(20)]
        assert {chunk.number for game_batch in game_batches for chunk in game_batch} == set(range(20))
        folder.mkdir()
        write_games(folder / "b.trmph", 20, 2)
        found: set[int] = set()
        while not found >= set(range(20, 40)):
            found |= {chunk.number for chunk in pipeline.take(TIMEOUT)}
        assert pipeline.metrics()["ShufflingChunkPool"]["entered"] == 40


def test_the_warning_contains_the_path(folder: Path) -> None:
    live = LiveOptions(val=0.0, test=0.0, reservoir=50, batch_size=10, batch=BatchOptions(fields=("value",)))
    write_games(folder / "a.trmph", 20, 1)
    with LiveLoader(folder, config=live) as loader:
        batches = iter(loader)
        next(batches)
        shutil.rmtree(folder)
        until(lambda: "unavailable" in loader.notes().get("FilePathProvider", {}))
        with pytest.warns(UserWarning, match="can no longer be read") as caught:
            next(batches)
        assert caught[0].filename == __file__
        assert str(folder) in str(caught[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(10):
                next(batches)


def test_the_stage_continues_if_watching_cannot_restart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example if the system's limit of watches is reached. Names are scanned instead."""

    def stand_once(*_: object, **__: object) -> Iterator[set[Any]]:
        if stood:
            raise OSError("OS file watch limit reached")
        stood.append(True)
        yield set()
        failed.wait(TIMEOUT)
        raise OSError("the first one fails as well")

    stood: list[bool] = []
    failed = threading.Event()
    monkeypatch.setattr("hexdata.live.files.watcher.watch", stand_once)
    with started(folder, rescan=0.05) as pipeline:
        failed.set()
        until(lambda: pipeline.coordinator.warnings)
        (message,) = warned(pipeline)
        assert "cannot be watched" in message
        for number in range(3):
            (folder / f"{number}.trmph").write_text("x")
            assert names(pipeline, 1) == [f"{number}.trmph"]
        assert not pipeline.coordinator.warnings


def test_files_are_delivered_even_if_watching_never_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example if a name that is not UTF-8 changes constantly. Names are scanned instead."""

    def cannot_spell(*_: object, **__: object) -> Iterator[set[Any]]:
        raise RuntimeError("Unable to decode path")

    monkeypatch.setattr("hexdata.live.files.watcher.watch", cannot_spell)
    (folder / "a.trmph").write_text("x")
    with watching(folder, rescan=0.05) as pipeline:
        pipeline.start()
        assert [take(pipeline), take(pipeline)][1] is SCANNED
        (folder / "b.trmph").write_text("x")
        assert names(pipeline, 1) == ["b.trmph"]


def test_names_are_scanned_if_polling_cannot_read_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the start; growing files are read again although no change is reported."""

    def closed(*_: object, **__: object) -> Iterator[set[Any]]:
        raise RuntimeError("IO error for operation on lost+found: Permission denied")

    monkeypatch.setattr("hexdata.live.files.watcher.watch", closed)
    write_games(folder / "a.trmph", 3, 1)
    provider = FilePathProvider(folder, settle=0.05, rescan=0.05, force_polling=True)
    with Pipeline([provider, ChunkSourceLoader()], [(4, "block"), (4, "block")]) as pipeline:
        pipeline.start()
        until(lambda: pipeline.coordinator.warnings)
        assert "scanned every 0.05 seconds" in pipeline.coordinator.warnings.pop()
        assert len(pipeline.take(TIMEOUT).chunks) == 3
        assert pipeline.take(TIMEOUT).is_marker
        scans: list[object] = []
        update = provider._delivered.update
        monkeypatch.setattr(provider._delivered, "update", lambda scan: (scans.append(scan), update(scan)))
        until(lambda: len(scans) > 5)
        write_games(folder / "more", 3, 2)
        with (folder / "a.trmph").open("ab") as file:
            file.write((folder / "more").read_bytes())
        assert [chunk.index for chunk in pipeline.take(TIMEOUT).chunks] == [3, 4, 5]


def test_a_directory_may_disappear_while_watching_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory exists before and afterwards."""

    def gone_once(*arguments: Any, **options: Any) -> Iterator[set[Any]]:
        if not failed:
            failed.append(True)
            raise FileNotFoundError("No such file or directory")
        return real(*arguments, **options)

    failed: list[bool] = []
    real = watcher.watch
    monkeypatch.setattr(watcher, "watch", gone_once)
    with started(folder) as pipeline:
        rename_in(folder / "a.trmph")
        assert names(pipeline, 1) == ["a.trmph"]
        assert not pipeline.coordinator.warnings


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Path]:
    """A separate file system mounted at ``in``, and a folder that keeps its content."""
    root, kept = tmp_path / "in", tmp_path / "kept"
    root.mkdir()
    kept.mkdir()
    if shutil.which("mount") is None or shutil.which("umount") is None:
        pytest.skip("no program to mount with")
    made = subprocess.run(["mount", "-t", "tmpfs", "none", str(kept)], capture_output=True)
    if made.returncode:
        pytest.skip("not allowed to mount")
    try:
        if subprocess.run(["mount", "--bind", str(kept), str(root)], capture_output=True).returncode:
            pytest.skip("not allowed to mount a folder")
        yield root
    finally:
        for each in (root, kept):
            subprocess.run(["umount", "-l", str(each)], capture_output=True)


def test_an_unmounted_drive_repeats_no_file(drive: Path) -> None:
    """The mount point is an empty folder meanwhile, and no file is forgotten."""
    with started(drive, pool_size=1, rescan=0.05) as pipeline:
        for number in range(5):
            rename_in(drive / f"{number}.trmph")
        assert sorted(names(pipeline, 5)) == [f"{number}.trmph" for number in range(5)]
        until(
            lambda: all(file.device is not None for file in provider_of(pipeline)._delivered._files.values())
        )
        subprocess.run(["umount", "-l", str(drive)], check=True)
        until(lambda: pipeline.coordinator.warnings)
        (message,) = warned(pipeline)
        assert "the directory is now on another file system" in message
        rename_in(drive.with_name("kept") / "meanwhile.trmph")
        subprocess.run(["mount", "--bind", str(drive.with_name("kept")), str(drive)], check=True)
        assert names(pipeline, 1) == ["meanwhile.trmph"]
        rename_in(drive / "new.trmph")
        assert names(pipeline, 1) == ["new.trmph"]
        assert len(provider_of(pipeline)._delivered) == 7
