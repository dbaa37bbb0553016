"""Tests of the first stage: existing files, then new ones, each delivered once and only when complete.

Waits have a timeout that a passing test never reaches.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watchfiles import Change

from hexdata.errors import ConfigError, HexdataError, InputError
from hexdata.live.chunk import SCANNED, FoundFile
from hexdata.live.chunk_source_loader import ChunkSourceLoader
from hexdata.live.coordinator import Stopped
from hexdata.live.files.provider import FilePathProvider
from hexdata.live.pipeline import Pipeline
from hexdata.live.queue import Overflow
from tests.live.files.provider_steps import names, take, watching
from tests.live.number_stages import TIMEOUT, until

pytestmark = pytest.mark.usefixtures("no_thread_survives")


def all_names(pipeline: Pipeline) -> list[str]:
    pipeline.start()
    taken = []
    while True:
        try:
            taken.append(take(pipeline).name)
        except StopIteration:
            return taken


def provider_of(pipeline: Pipeline) -> FilePathProvider:
    (provider,) = pipeline.stages
    assert isinstance(provider, FilePathProvider)
    return provider


def write(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def rename_in(path: Path, text: str = "x") -> Path:
    return write(path.with_name(f".{path.name}.tmp"), text).rename(path)


def started(folder: Path, **options: Any) -> Pipeline:
    """Return a started pipeline after its first scan, with a running watcher."""
    pipeline = watching(folder, **options)
    pipeline.start()
    while take(pipeline) is not SCANNED:
        pass
    return pipeline


# --- existing files -----------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    for name in ("b.trmph", "a.trmph", "sub/c.pkl.gz", "sub/deep/d.tar", "a-2.trmph", "z.trmph.gz", "y.pkl"):
        write(tmp_path / name)
    for name in ("notes.json", ".hidden.trmph", "e.trmph.tmp", "f.trmph.part", ".work/g.trmph", "h.TRMPH"):
        write(tmp_path / name)
    return tmp_path


IN_ORDER = ["a-2.trmph", "a.trmph", "b.trmph", "sub/c.pkl.gz", "sub/deep/d.tar", "y.pkl", "z.trmph.gz"]


def test_existing_files_are_delivered_by_name_then_the_marker(filled: Path) -> None:
    with watching(filled) as pipeline:
        pipeline.start()
        assert names(pipeline, 8) == [*IN_ORDER, ""]
        write(filled / "new.trmph")
        assert names(pipeline, 1) == ["new.trmph"]


@pytest.mark.parametrize("overflow", ["drop-new", "keep-newest"])
def test_the_marker_is_delivered_even_if_files_are_dropped(filled: Path, overflow: Overflow) -> None:
    """The pool waits for the marker before it starts to draw."""
    stages = [FilePathProvider(filled, settle=0.05), ChunkSourceLoader()]
    with Pipeline(stages, [(1, overflow), (1, overflow)]) as pipeline:
        pipeline.start()
        until(lambda: any(item.is_marker for item in pipeline.queues[-1].contents()))


def test_without_watch_the_stage_ends_after_the_existing_files(filled: Path) -> None:
    with watching(filled, watch=False) as pipeline:
        assert all_names(pipeline) == IN_ORDER


def test_a_found_file_has_its_path_and_size(tmp_path: Path) -> None:
    path = write(tmp_path / "sub/a.trmph", "12345")
    with watching(tmp_path, watch=False) as pipeline:
        pipeline.start()
        assert take(pipeline) == FoundFile(path.resolve(), "sub/a.trmph", 5)


@pytest.mark.parametrize("watch", [True, False])
def test_newest_files_selects_the_last_files_by_name(filled: Path, watch: bool) -> None:
    with watching(filled, watch=watch, newest_files=2) as pipeline:
        pipeline.start()
        assert names(pipeline, 2) == IN_ORDER[-2:]
        if watch:
            assert take(pipeline) is SCANNED
            rename_in(filled / "new.trmph")
            assert names(pipeline, 1) == ["new.trmph"]


def test_patterns_select_names(filled: Path) -> None:
    with watching(filled, watch=False, patterns=["*.json", "a*"]) as pipeline:
        assert all_names(pipeline) == ["a-2.trmph", "a.trmph", "notes.json"]


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path / "other/a.trmph")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/link").symlink_to(tmp_path / "other")
    (tmp_path / "other/back").symlink_to(tmp_path / "in")
    with watching(tmp_path / "in", watch=False) as pipeline:
        assert all_names(pipeline) == ["link/a.trmph"]


# --- new files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("polling", [False, True])
def test_renamed_files_are_delivered(tmp_path: Path, polling: bool) -> None:
    with started(tmp_path, force_polling=polling) as pipeline:
        for number in range(5):
            path = rename_in(tmp_path / f"{number}.trmph", "12345")
            assert take(pipeline) == FoundFile(path.resolve(), path.name, 5)


def test_a_renamed_file_is_delivered_at_once(tmp_path: Path) -> None:
    with started(tmp_path, settle=1000.0) as pipeline:
        for number, temporary in enumerate((".{}.tmp", "{}.part", ".{}", ".tmp-{}-1234.tmp")):
            name = f"{number}.trmph"
            write(tmp_path / temporary.format(name)).rename(tmp_path / name)
            assert names(pipeline, 1) == [name]


class Clock:
    """Replacement of the ``time`` module that tests advance."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_file_written_in_place_is_delivered_once_it_settles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hexdata.live.files.provider.time", clock := Clock())
    with started(tmp_path, settle=100.0) as pipeline:
        candidates = provider_of(pipeline)._candidates
        path = tmp_path / "a.trmph"
        with path.open("w") as file:
            for count in range(1, 5):
                file.write("12345")
                file.flush()
                until(lambda size=5 * count: [each.stat.size for each in list(candidates.values())] == [size])
                clock.now += 99
                assert len(pipeline.queues[0]) == 0
        clock.now += 2
        write(tmp_path / ".wake")  # any reported change makes the stage check the clock
        assert take(pipeline) == FoundFile(path.resolve(), "a.trmph", 20)


def test_a_folder_that_is_moved_in_is_scanned(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with started(tmp_path / "in") as pipeline:
        for number in range(3):
            write(tmp_path / "out/deep/a.trmph")
            write(tmp_path / "out/b.trmph")
            (tmp_path / "out").rename(tmp_path / f"in/{number}")
            assert names(pipeline, 2) == [f"{number}/b.trmph", f"{number}/deep/a.trmph"]
            rename_in(tmp_path / f"in/{number}/deep/c.trmph")
            assert names(pipeline, 1) == [f"{number}/deep/c.trmph"]


def test_no_file_of_a_new_folder_is_missed(tmp_path: Path) -> None:
    with started(tmp_path, rescan=0.5) as pipeline:
        expected = set()
        for number in range(30):
            rename_in(tmp_path / f"{number}/deep/a.trmph")
            rename_in(tmp_path / f"{number}/b.trmph")
            expected |= {f"{number}/deep/a.trmph", f"{number}/b.trmph"}
        assert set(names(pipeline, len(expected))) == expected


MANY = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
for number in range(400):
    below = folder / str(number % 7)
    below.mkdir(exist_ok=True)
    temporary = below / f".{number}.trmph.tmp"
    temporary.write_text("x" * number)
    if number % 5:
        temporary.rename(below / f"{number}.trmph")
    else:
        temporary.unlink()
        (below / f"{number}.trmph").write_text("x" * (number + 1))
"""


def test_each_of_many_new_files_is_delivered_once(tmp_path: Path) -> None:
    with started(tmp_path, rescan=0.2) as pipeline:
        with subprocess.Popen([sys.executable, "-c", MANY, str(tmp_path)]) as writer:
            found = [take(pipeline) for _ in range(400)]
        assert writer.returncode == 0
        assert {file.name for file in found} == {f"{number % 7}/{number}.trmph" for number in range(400)}
        assert all(file.size == file.path.stat().st_size for file in found if file.path)
        assert pipeline.take(0.3) is None


def test_an_overwritten_file_is_counted_and_not_delivered(tmp_path: Path) -> None:
    write(tmp_path / "a.trmph", "1")
    with started(tmp_path) as pipeline:
        provider = provider_of(pipeline)
        rename_in(tmp_path / "a.trmph", "22")
        until(lambda: provider.counts.get("rewritten") == 1)
        rename_in(tmp_path / "a.trmph", "333")
        rename_in(tmp_path / "b.trmph", "1")
        assert names(pipeline, 1) == ["b.trmph"]
        (tmp_path / "b.trmph").unlink()
        rename_in(tmp_path / "b.trmph", "1")
        rename_in(tmp_path / "c.trmph", "1")
        assert names(pipeline, 1) == ["c.trmph"]
        assert provider.counts["files"] == 3


def test_a_file_removed_before_it_is_complete_is_forgotten(tmp_path: Path) -> None:
    with started(tmp_path, settle=1000.0) as pipeline:
        path = write(tmp_path / "a.trmph")
        until(lambda: provider_of(pipeline)._candidates)
        path.unlink()
        until(lambda: provider_of(pipeline).counts.get("vanished") == 1)
        rename_in(tmp_path / "b.trmph")
        assert names(pipeline, 1) == ["b.trmph"]


def test_an_empty_file_is_delivered_once_it_has_content(tmp_path: Path) -> None:
    write(tmp_path / "a.trmph", "")
    with started(tmp_path) as pipeline:
        write(tmp_path / "b.trmph", "")
        write(tmp_path / "c.trmph", "1")
        assert names(pipeline, 1) == ["c.trmph"]
        until(lambda: not provider_of(pipeline)._candidates)
        write(tmp_path / "a.trmph", "1")
        assert names(pipeline, 1) == ["a.trmph"]


def test_unreported_changes_are_found_by_the_next_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say_nothing(*_: object, stop_event: threading.Event, **__: object) -> Iterator[set[Any]]:
        yield set()
        stop_event.wait()

    monkeypatch.setattr("hexdata.live.files.watcher.watch", say_nothing)
    with started(tmp_path, rescan=0.05) as pipeline:
        write(tmp_path / "sub/a.trmph")
        assert names(pipeline, 1) == ["sub/a.trmph"]


def test_a_name_that_is_not_utf8_does_not_stop_the_stage(tmp_path: Path) -> None:
    odd = os.fsdecode(b"\xff.trmph")
    with started(tmp_path) as pipeline:
        try:
            write(tmp_path / odd)
        except OSError:
            pytest.skip("this file system has no such names")
        assert names(pipeline, 1) == [odd]
        rename_in(tmp_path / "a.trmph")
        assert names(pipeline, 1) == ["a.trmph"]


@pytest.mark.parametrize("watch", [True, False])
def test_only_regular_files_are_delivered(tmp_path: Path, watch: bool) -> None:
    """Opening a pipe blocks until its other end is opened, which cannot be interrupted."""
    os.mkfifo(tmp_path / "a.trmph")
    (tmp_path / "b.trmph").symlink_to("/dev/zero")
    (tmp_path / "c.trmph").symlink_to("c.trmph")
    write(tmp_path / "d.trmph")
    with watching(tmp_path, watch=watch) as pipeline:
        pipeline.start()
        assert names(pipeline, 1) == ["d.trmph"]


@pytest.mark.parametrize("polling", [False, True])
def test_a_file_has_one_name_regardless_of_links(tmp_path: Path, polling: bool) -> None:
    """For example, a link "latest" leads to the folder of the current run."""
    write(tmp_path / "run-1/a.trmph")
    (tmp_path / "latest").symlink_to("run-1")
    with watching(tmp_path, force_polling=polling, rescan=0.05) as pipeline:
        pipeline.start()
        assert names(pipeline, 2) == ["run-1/a.trmph", ""]
        rename_in(tmp_path / "run-1/b.trmph")
        rename_in(tmp_path / "latest/c.trmph")
        assert sorted(names(pipeline, 2)) == ["run-1/b.trmph", "run-1/c.trmph"]
        (tmp_path / "latest").unlink()
        write(tmp_path / "run-2/a.trmph")
        (tmp_path / "latest").symlink_to("run-2")
        assert names(pipeline, 1) == ["run-2/a.trmph"]
        assert pipeline.take(0.2) is None


def test_a_directory_that_replaces_the_watched_one_is_watched(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    with started(folder) as pipeline:
        until(lambda: not provider_of(pipeline)._watcher._needs_scan)
        pipeline.state()  # the idle stage does not scan while the directory is missing
        folder.rename(tmp_path / "before")
        folder.mkdir()
        for number in range(3):
            rename_in(folder / f"{number}.trmph")
            assert names(pipeline, 1) == [f"{number}.trmph"]


def test_names_contained_in_a_temporary_name(tmp_path: Path) -> None:
    with started(tmp_path, settle=1000.0) as pipeline:
        write(tmp_path / ".10.trmph.tmp")
        write(tmp_path / "0.trmph")  # by another writer, which has not finished
        (tmp_path / ".10.trmph.tmp").rename(tmp_path / "10.trmph")
        assert names(pipeline, 1) == ["10.trmph"]
        assert pipeline.take(0.2) is None


def test_the_cost_of_files_grows_linearly(tmp_path: Path) -> None:
    """Counts function calls."""

    def calls(count: int) -> int:
        folder = tmp_path / str(count)
        changes = {(Change.deleted, str(folder / f".{n}.trmph.tmp")) for n in range(count)}
        changes |= {(Change.added, str(write(folder / f"{n}.trmph"))) for n in range(count)}
        with Pipeline([provider := FilePathProvider(folder)], [(count, "block")]) as pipeline:
            counted = 0

            def see(*_: object) -> None:
                nonlocal counted
                counted += 1

            gc.collect()
            gc.disable()  # it would count calls for objects of other tests
            sys.setprofile(see)
            try:
                provider._process_changes(provider.workers[0], changes)
            finally:
                sys.setprofile(None)
                gc.enable()
            assert len(pipeline.queues[0]) == count
        return counted

    assert calls(400) < 5 * calls(100)


# --- states and errors --------------------------------------------------------------------------------


def test_a_state_can_be_read_without_waiting_for_a_file(tmp_path: Path) -> None:
    with started(tmp_path) as pipeline:
        for _ in range(20):
            pipeline.state()


@pytest.mark.parametrize("taken", range(0, 8, 3))
def test_without_watch_a_resumed_stage_uses_the_original_list(filled: Path, taken: int) -> None:
    with watching(filled, watch=False) as pipeline:
        pipeline.start()
        before = names(pipeline, taken) if taken else []
        until(lambda: provider_of(pipeline)._remaining is not None)
        state = pickle.loads(pickle.dumps(pipeline.state()))
    write(filled / "aaa.trmph")
    with watching(filled, watch=False) as other:
        other.load_state(state)
        assert before + all_names(other) == IN_ORDER


@pytest.mark.parametrize("taken", range(0, 10, 3))
def test_a_resumed_stage_delivers_only_new_files(filled: Path, taken: int) -> None:
    with watching(filled) as pipeline:
        pipeline.start()
        before = names(pipeline, min(taken, 8))
        state = pickle.loads(pickle.dumps(pipeline.state()))
    write(filled / "new.trmph")
    with watching(filled) as other:
        other.load_state(state)
        other.start()
        after = names(other, 9 - len(before))
        assert sorted(before + after) == sorted([*IN_ORDER, "", "new.trmph"])
        assert (before + after)[-1] in ("new.trmph", "")
        assert other.take(0.1) is None


@pytest.mark.parametrize("taken", [1, 8])
def test_a_state_with_watch_can_be_loaded_without(filled: Path, taken: int) -> None:
    with watching(filled) as pipeline:
        pipeline.start()
        before = names(pipeline, taken)
        state = pickle.loads(pickle.dumps(pipeline.state()))
    with watching(filled, watch=False) as other:
        other.load_state(state)
        assert sorted(name for name in before + all_names(other) if name) == IN_ORDER


def test_a_scan_ends_when_the_pipeline_stops(filled: Path) -> None:
    with watching(filled) as pipeline:
        pipeline.coordinator.stop()
        with pytest.raises(Stopped):
            provider_of(pipeline)._names_below(filled)


@pytest.mark.parametrize(
    "wrong",
    [
        {"settle": 0},
        {"settle": "1"},
        {"rescan": float("nan")},
        {"patterns": "*.trmph"},
        {"patterns": [1]},
        {"patterns": []},
        {"newest_files": -1},
        {"watch": 1},
        {"force_polling": "yes"},
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FilePathProvider(tmp_path, **wrong)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        FilePathProvider(tmp_path / "none")


def test_a_directory_that_cannot_be_watched_stops_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Iterator[Any]:
        raise OSError("OS file watch limit reached")

    monkeypatch.setattr("hexdata.live.files.watcher.watch", refuse)
    with watching(tmp_path) as pipeline:
        pipeline.start()
        with pytest.raises(HexdataError, match="cannot be watched"):
            pipeline.take(TIMEOUT)
