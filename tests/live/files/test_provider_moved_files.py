"""Tests of files that are moved or linked within the directory; their inodes identify them."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hexdata.live.files.delivered_files import DeliveredFiles
from hexdata.live.files.scan import DirectoryScan, FileStat, WatchedDirectory
from hexdata.live.pipeline import Pipeline
from hexdata.live.state import decode_state, encode_state
from tests.live.files.provider_steps import (
    Clock,
    Steps,
    clock,
    names,
    start_pool,
    take,
    text_of,
    wait_until,
    watching,
)
from tests.live.number_stages import TIMEOUT, until

__all__ = ["clock"]

pytestmark = pytest.mark.usefixtures("no_thread_survives")


@pytest.fixture
def steps(tmp_path: Path, clock: Clock) -> Steps:
    """Steps that have read ``a`` and ``b`` with 3 games each and ``sub/c`` with 5."""
    (tmp_path / "sub").mkdir()
    for name, count, seed in (("a", 3, 1), ("b", 3, 2), ("sub/c", 5, 3)):
        (tmp_path / f"{name}.trmph").write_bytes(text_of(count, seed=seed))
    made = Steps(tmp_path, clock)
    assert len(made.step()) == 11
    return made


def rename(steps: Steps, old: str, new: str) -> None:
    (steps.folder / old).rename(steps.folder / new)


Change = Callable[[Steps], None]


def to_another_name(steps: Steps) -> None:
    rename(steps, "a.trmph", "z.trmph")


def into_a_folder(steps: Steps) -> None:
    (steps.folder / "done").mkdir()
    rename(steps, "a.trmph", "done/a.trmph")


def the_folder(steps: Steps) -> None:
    rename(steps, "sub", "other")


def by_a_temporary_name(steps: Steps) -> None:
    rename(steps, "a.trmph", ".z.trmph.tmp")
    assert not steps.step()
    rename(steps, ".z.trmph.tmp", "z.trmph")


def over_another(steps: Steps) -> None:
    rename(steps, "a.trmph", "b.trmph")


def swapped(steps: Steps) -> None:
    rename(steps, "a.trmph", ".x")
    rename(steps, "b.trmph", "a.trmph")
    rename(steps, ".x", "b.trmph")


def in_a_ring(steps: Steps) -> None:
    rename(steps, "a.trmph", ".x")
    rename(steps, "b.trmph", "a.trmph")
    rename(steps, "sub/c.trmph", "b.trmph")
    rename(steps, ".x", "sub/c.trmph")


def away_and_back(steps: Steps) -> None:
    away = steps.folder.parent / f"{steps.folder.name}-away"
    away.mkdir()
    rename(steps, "a.trmph", str(away / "a.trmph"))
    assert not steps.step()
    (away / "a.trmph").rename(steps.folder / "back.trmph")


def hard_linked(steps: Steps) -> None:
    (steps.folder / "link.trmph").hardlink_to(steps.folder / "a.trmph")


def linked(steps: Steps) -> None:
    (steps.folder / "link.trmph").symlink_to("a.trmph")


def linked_and_unlinked(steps: Steps) -> None:
    hard_linked(steps)
    assert not steps.step()
    (steps.folder / "a.trmph").unlink()


CHANGES = {
    each.__name__: each
    for each in (
        to_another_name, into_a_folder, the_folder, by_a_temporary_name, over_another, swapped, in_a_ring,
        away_and_back, hard_linked, linked, linked_and_unlinked,
    )
}  # fmt: skip


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_moved_files_are_not_read_again_and_appended_games_are(
    steps: Steps, clock: Clock, change: str, resumed: bool
) -> None:
    """While watching, and between saving and loading a state."""
    state = pickle.loads(pickle.dumps(encode_state(steps.provider.state())))
    CHANGES[change](steps)
    if resumed:
        steps = Steps(steps.folder, clock)
        steps.provider.load_state(decode_state(state))
    for _ in range(2):
        assert not steps.step()
    assert steps.counts().get("bad_files", 0) == 0
    assert any(steps.counts().get(name) for name in ("moved", "linked"))
    files = sorted({path.resolve() for path in steps.folder.rglob("*.trmph")})
    for path in files:
        with path.open("ab") as file:
            file.write(text_of(1, seed=50))
    assert len(steps.step()) == len(files)
    assert not steps.step()


def test_a_freed_name_can_belong_to_a_new_file(steps: Steps) -> None:
    """For example after log rotation."""
    rename(steps, "b.trmph", "b.2.trmph")
    rename(steps, "a.trmph", "b.trmph")
    (steps.folder / "a.trmph").write_bytes(text_of(7, seed=9))
    assert [chunk.source for chunk in steps.step()] == ["a.trmph"] * 7
    assert steps.counts()["moved"] == 2


def test_a_file_appended_to_and_moved_at_once_gives_its_new_games(steps: Steps) -> None:
    text = text_of(8, seed=1)
    (steps.folder / "a.trmph").write_bytes(text)
    rename(steps, "a.trmph", "full.trmph")
    (steps.folder / "a.trmph").write_bytes(text_of(2, seed=9))
    new = [(chunk.source, chunk.index) for chunk in steps.step()]
    assert new == [("a.trmph", 0), ("a.trmph", 1), *(("full.trmph", index) for index in range(3, 8))]
    assert not steps.step()


def test_a_copy_is_another_file(steps: Steps) -> None:
    shutil.copy2(steps.folder / "a.trmph", steps.folder / "copy.trmph")
    assert [chunk.source for chunk in steps.step()] == ["copy.trmph"] * 3


@pytest.mark.parametrize("bad", [False, True])
def test_a_new_file_with_the_inode_of_a_deleted_one_is_read(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, bad: bool
) -> None:
    """File systems reuse inodes at once. The content shows that it is another file."""
    inode = (steps.folder / "a.trmph").stat().st_ino
    before = steps.counts()["rejected"]
    (steps.folder / "a.trmph").unlink()
    text = b"nothing\n" + text_of(6, seed=8)
    (steps.folder / "new.trmph").write_bytes(b"nothing\n" if bad else text)
    stat_file = WatchedDirectory.stat_file

    def stat_with_inode(directory: WatchedDirectory, name: str) -> FileStat | None:
        stat = stat_file(directory, name)
        return replace(stat, inode=inode) if stat is not None and name == "new.trmph" else stat

    monkeypatch.setattr(WatchedDirectory, "stat_file", stat_with_inode)
    if bad:
        assert not steps.step()
        (steps.folder / "new.trmph").write_bytes(text)
    assert [chunk.index for chunk in steps.step()] == list(range(6))
    assert steps.counts()["rejected"] == before + 2
    assert "bad.rewritten" not in steps.counts()


def test_a_moved_file_without_inode_is_read_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat_file = WatchedDirectory.stat_file

    def stat_without_inode(directory: WatchedDirectory, name: str) -> FileStat | None:
        stat = stat_file(directory, name)
        return None if stat is None else replace(stat, inode=0)

    monkeypatch.setattr(WatchedDirectory, "stat_file", stat_without_inode)
    (tmp_path / "a.trmph").write_bytes(text_of(3))
    steps = Steps(tmp_path, clock)
    assert len(steps.step()) == 3
    rename(steps, "a.trmph", "b.trmph")
    assert len(steps.step()) == 3


def test_a_file_moved_before_it_is_opened_is_read_once(steps: Steps, clock: Clock) -> None:
    (steps.folder / "d.trmph").write_bytes(text_of(4, seed=7))
    found = steps.find()
    rename(steps, "d.trmph", "e.trmph")
    assert not steps.step()
    assert not steps.read(found)  # it no longer has that name
    steps.provider._find_changed(steps.provider._unread)
    assert [chunk.source for chunk in steps.step()] == ["e.trmph"] * 4
    assert not steps.step()


def test_renaming_a_folder_of_many_files_repeats_none(
    tmp_path: Path,
) -> None:
    """No event reports the files: only the scan of all names finds them, and it forgets names too."""
    (tmp_path / "in").mkdir()
    for number in range(50):
        (tmp_path / "in" / f"{number}.trmph").write_text("x")
    with watching(tmp_path, pool_size=5, force_polling=True) as pipeline:
        provider = pipeline.stages[0]
        pipeline.start()
        names(pipeline, 51)
        (tmp_path / "in").rename(tmp_path / "out")
        until(lambda: provider.counts.get("moved") == 50)
        (tmp_path / "z.trmph").write_text("x")
        assert take(pipeline).name == "z.trmph"
        assert provider.counts["files"] == 51


@pytest.mark.parametrize("polling", [False, True])
def test_renamed_files_and_folders_are_not_delivered_again(tmp_path: Path, polling: bool) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.trmph", "in/b.trmph"):
        (tmp_path / name).write_text(name)
    with watching(tmp_path, force_polling=polling) as pipeline:
        provider = pipeline.stages[0]
        pipeline.start()
        names(pipeline, 3)
        (tmp_path / "a.trmph").rename(tmp_path / "z.trmph")
        (tmp_path / "in").rename(tmp_path / "out")
        until(lambda: provider.counts.get("moved") == 2)
        (tmp_path / "new.trmph").write_text("x")
        assert take(pipeline).name == "new.trmph"


def test_files_skipped_at_the_start_are_not_delivered_after_a_move(tmp_path: Path) -> None:
    for name in ("a.trmph", "b.trmph"):
        (tmp_path / name).write_text(name)
    with watching(tmp_path, newest_files=1) as pipeline:
        provider = pipeline.stages[0]
        pipeline.start()
        assert names(pipeline, 2) == ["b.trmph", ""]
        (tmp_path / "a.trmph").rename(tmp_path / "c.trmph")
        until(lambda: provider.counts.get("moved") == 1)


# --- states and the pool ------------------------------------------------------------------------------


def drawn(pipeline: Pipeline, count: int) -> list[list[bytes]]:
    return [[chunk.game_hash for chunk in pipeline.take(TIMEOUT)] for _ in range(count)]


@pytest.mark.parametrize("when", ["watching", "stopped", "both"])
@pytest.mark.parametrize("swap", [False, True])
def test_a_resumed_pool_draws_the_same_games_from_moved_files(tmp_path: Path, when: str, swap: bool) -> None:
    def move(number: int) -> None:
        if swap:
            (tmp_path / "a.trmph").rename(tmp_path / ".x")
            (tmp_path / "b.trmph").rename(tmp_path / "a.trmph")
            (tmp_path / ".x").rename(tmp_path / "b.trmph")
        else:
            old, new = (f"a-{each}.trmph" if each else "a.trmph" for each in (number, number + 1))
            (tmp_path / old).rename(tmp_path / new)

    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.trmph").write_bytes(text_of(6, seed=seed))
    with start_pool(tmp_path) as pipeline:
        pipeline.start()
        wait_until(pipeline, lambda metrics: metrics["ShufflingChunkPool"]["entered"] == 12)
        drawn(pipeline, 3)
        if when != "stopped":
            move(0)
            moves = 2 if swap else 1
            wait_until(pipeline, lambda metrics: metrics["FilePathProvider"].get("moved") == moves)
        state = pickle.loads(pickle.dumps(encode_state(pipeline.state())))
        expected = drawn(pipeline, 20)
    if when != "watching":
        move(int(when == "both"))
    with start_pool(tmp_path) as resumed:
        resumed.load_state(decode_state(state))
        assert "missing" not in resumed.metrics()["ShufflingChunkPool"]
        resumed.start()
        assert drawn(resumed, 20) == expected
        assert resumed.metrics()["ShufflingChunkPool"]["entered"] == 12


def test_a_resumed_pool_continues_a_file_moved_and_appended_to(tmp_path: Path) -> None:
    (tmp_path / "a.trmph").write_bytes(text_of(6))
    with start_pool(tmp_path) as pipeline:
        pipeline.start()
        wait_until(pipeline, lambda metrics: metrics["ShufflingChunkPool"]["entered"] == 6)
        state = pipeline.state()
    (tmp_path / "a.trmph").rename(tmp_path / "b.trmph")
    with (tmp_path / "b.trmph").open("ab") as file:
        file.write(text_of(3, seed=5))
    with start_pool(tmp_path) as resumed:
        resumed.load_state(state)
        assert "missing" not in resumed.metrics()["ShufflingChunkPool"]
        resumed.start()
        wait_until(resumed, lambda metrics: metrics["ShufflingChunkPool"]["entered"] == 9)


def test_a_state_without_inodes_can_be_loaded(steps: Steps, clock: Clock) -> None:
    state = steps.provider.state()
    for name in ("inodes", "looks", "moved"):
        del state["came"][name]
    rename(steps, "a.trmph", "z.trmph")
    resumed = Steps(steps.folder, clock)
    resumed.provider.load_state(state)
    assert [chunk.source for chunk in resumed.step()] == ["z.trmph"] * 3


def test_the_number_of_former_names_is_limited() -> None:
    delivered = DeliveredFiles(10)
    delivered.add("0", FileStat(1, 1, 5), may_grow=False)
    for number in range(1000):
        delivered.move(FileStat(1, 1, 5), str(number + 1))
    assert delivered.current_name("995") == "1000"
    assert len(delivered.later_names("990")) == 10
    assert delivered.later_names("980") == []
    delivered.update(DirectoryScan({}, {"": 1}))
    assert len(pickle.dumps(encode_state(delivered.state()))) < 1000


def test_inodes_of_forgotten_files_are_removed() -> None:
    delivered = DeliveredFiles(10)
    for number in range(100):
        delivered.add(str(number), FileStat(1, 1, number + 1), may_grow=False)
    delivered.update(DirectoryScan({}, {"": 1}))
    names_found = [delivered.find_name(FileStat(1, 1, number + 1)) for number in range(100)]
    assert names_found == [None] * 90 + [str(number) for number in range(90, 100)]


def test_an_inode_may_have_64_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network drives have such inodes."""
    delivered = DeliveredFiles(10)
    stat = FileStat(1, 1, (1 << 64) - 1)
    delivered.add("a", stat, may_grow=False)
    other = DeliveredFiles(10)
    other.load_state(decode_state(encode_state(delivered.state())))
    assert other.find_name(stat) == "a"
    assert os.name == "nt" or WatchedDirectory(tmp_path, ["*"]).stat_file("missing") is None
