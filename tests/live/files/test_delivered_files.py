"""Tests of the record of delivered files, against a simple model and with many files."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexdata.live.chunk import NOTHING_READ, ChunkSource, FoundFile, ReadProgress
from hexdata.live.files.delivered_files import DeliveredFiles
from hexdata.live.files.scan import DirectoryScan, FileStat
from hexdata.live.state import decode_state, encode_state

FOLDERS = ("", "a/", "a/b/", "c/")
NAMES = [f"{folder}{number}.trmph" for folder in FOLDERS for number in range(2)]
HERE, DRIVE, OTHER = 1, 2, 3
"""Devices: of the directory, of a drive that is mounted in it, and of one that is not."""


def folder_of(name: str) -> str:
    return name[: name.rindex("/") + 1] if "/" in name else ""


@dataclass
class Model:
    """Simple model: existing files, delivered files in order, and folders that a scan cannot read."""

    remembered: int
    there: set[str] = field(default_factory=set)
    came: list[str] = field(default_factory=list)
    seen_on: dict[str, int] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    """Folders whose drive is not mounted just now: they are there, and empty."""
    closed: set[str] = field(default_factory=set)
    """Folders that cannot be looked into."""

    def look(self) -> DirectoryScan:
        """Return the result of a scan. Folder a and the folders below it are on a drive."""
        seen = DirectoryScan()
        for folder in FOLDERS:
            hidden = [above for above in ("a/", "c/") if folder.startswith(above)]
            if folder in self.closed or any(above in self.closed for above in hidden if above != folder):
                seen.unreadable.update({folder} & self.closed)
                continue
            is_away = any(above in self.away for above in hidden)
            if is_away and folder not in self.away:
                continue  # an unmounted drive has no subfolders
            seen.devices[folder] = OTHER if is_away else DRIVE if hidden else HERE
            if not is_away:
                names = {name for name in self.there if folder_of(name) == folder}
                seen.names.update(dict.fromkeys(names, seen.devices[folder]))
        return seen

    def can_be_judged(self, name: str, seen: DirectoryScan) -> bool:
        folder = folder_of(name)
        if any(folder.startswith(closed) for closed in self.closed):
            return False
        is_away = any(folder.startswith(away) for away in self.away)
        return not (is_away and name in self.seen_on)

    def forget(self, seen: DirectoryScan) -> None:
        self.seen_on.update({name: device for name, device in seen.names.items() if name in self.came})
        old = self.came[: max(0, len(self.came) - self.remembered)]
        for name in old:
            if name not in seen.names and self.can_be_judged(name, seen):
                self.came.remove(name)
                self.seen_on.pop(name, None)


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["come", "go", "go", "go", "return"]), st.sampled_from(NAMES)),
        st.tuples(st.sampled_from(["away", "close"]), st.sampled_from(["a/", "c/"])),
        st.tuples(st.just("look"), st.none()),
    ),
    max_size=40,
)


@given(remembered=st.integers(1, 5), order=st.permutations(NAMES), steps=steps)
def test_remembered_files_match_the_model(
    remembered: int, order: list[str], steps: list[tuple[str, str | None]]
) -> None:
    """All files are delivered; then some are removed and restored, with complete and incomplete scans."""
    model, known = Model(remembered), DeliveredFiles(remembered)
    first: list[tuple[str, str | None]] = [("come", name) for name in order]
    for verb, what in [*first, *steps, ("look", None)]:
        if what is None:
            seen = model.look()
            model.forget(seen)
            known.update(seen)
            if not model.away and not model.closed:
                assert len(known) <= len(model.there) + remembered
        elif verb == "come":
            model.there.add(what)
            model.came = [*(name for name in model.came if name != what), what]
            known.add(what, FileStat(1, 1), may_grow=False)
        elif verb == "go":
            model.there.discard(what)
        elif verb == "return":
            model.there.add(what)
        else:
            where = model.away if verb == "away" else model.closed
            where ^= {what}
        assert [name for name in NAMES if name in known] == sorted(model.came, key=NAMES.index)


def test_all_existing_files_are_remembered() -> None:
    known = DeliveredFiles(10)
    seen = DirectoryScan({f"{n}.trmph": HERE for n in range(1000)}, {"": HERE})
    for name in seen.names:
        known.add(name, FileStat(1, 1), may_grow=False)
    known.update(seen)
    assert len(known) == 1000
    known.update(DirectoryScan({}, {"": HERE}))
    assert [name for name in seen.names if name in known] == [f"{n}.trmph" for n in range(990, 1000)]


def test_the_number_of_removed_files_remembered_is_limited() -> None:
    known = DeliveredFiles(100)
    for start in range(0, 20_000, 50):
        names = [f"games-{n:08d}.trmph" for n in range(start, start + 50)]
        for name in names:
            known.add(name, FileStat(1, 1), may_grow=True)
        known.update(DirectoryScan(dict.fromkeys(names, HERE), {"": HERE}))
        assert len(known) <= 150
        assert len(pickle.dumps(encode_state(known.state()))) < 20_000


def test_a_remounted_drive_may_have_another_device_number() -> None:
    known = DeliveredFiles(1)
    for name in ("a.trmph", "b.trmph", "c.trmph"):
        known.add(name, FileStat(1, 1), may_grow=False)
    known.update(DirectoryScan(dict.fromkeys(("a.trmph", "b.trmph", "c.trmph"), DRIVE), {"": DRIVE}))
    known.update(DirectoryScan({}, {"": HERE}))
    known.update(DirectoryScan(dict.fromkeys(("a.trmph", "b.trmph"), OTHER), {"": OTHER}))
    assert "a.trmph" in known
    known.update(DirectoryScan({"b.trmph": OTHER}, {"": OTHER}))
    assert ["a.trmph" in known, "b.trmph" in known, "c.trmph" in known] == [False, True, True]


READING = ReadProgress(3, 40, b"0123456789abcdef")


def test_a_state_preserves_the_records() -> None:
    known = DeliveredFiles(10)
    odd = b"\xff\xc3.trmph".decode("utf-8", "surrogateescape")
    for name in ("whole", "sub/goes on", "unread", "missed", odd, "skipped"):
        known.add(name, FileStat(len(name), 1 << 62), may_grow=name not in ("whole", odd))
    known.skip("never")
    for name, reading in (("whole", None), ("sub/goes on", READING), (odd, NOTHING_READ), ("skipped", None)):
        known.was_read(name, reading)
    known.was_not_read("missed", READING)
    other = DeliveredFiles(10)
    other.load_state(decode_state(pickle.loads(pickle.dumps(encode_state(known.state())))))
    for each in (known, other):
        assert all(name in each for name in ("whole", "sub/goes on", "unread", "missed", odd, "never"))
        assert each.compare("sub/goes on", FileStat(11, 1 << 62)) == "same"
        assert each.compare("sub/goes on", FileStat(12, 1 << 62)) == "again"
        assert each.compare("unread", FileStat(7, 1 << 62)) == "unread"
        assert each.compare("missed", FileStat(6, 1 << 62)) == "again"
        assert each.is_due("missed")
        assert each.delivery_count("sub/goes on") == 1
        assert each.add("sub/goes on", FileStat(12, 1 << 62), may_grow=True) == READING
        assert each.add("missed", FileStat(6, 1 << 62), may_grow=True) == READING
        assert each.add(odd, FileStat(7, 1), may_grow=False) == NOTHING_READ
        assert each.delivery_count("sub/goes on") == 2
    assert known.compare("whole", FileStat(9, 9)) == "rewritten"
    assert [known.compare("whole", FileStat(9, 9)), other.compare("whole", FileStat(9, 9))] == [
        "same",
        "same",
    ]


def test_a_state_preserves_read_progress_of_queued_files() -> None:
    file = FoundFile(Path("/in/a.trmph"), "a.trmph", 5, READING)
    held = [file, ChunkSource(file, [], READING), ChunkSource(file)]
    assert decode_state(pickle.loads(pickle.dumps(encode_state(held)))) == held


def test_an_empty_state_can_be_loaded() -> None:
    known = DeliveredFiles(10)
    known.load_state(decode_state(encode_state(DeliveredFiles(10).state())))
    assert len(known) == 0


def test_a_growing_file_is_due_for_two_scans_after_each_reading() -> None:
    known = DeliveredFiles(10)
    names = ("goes on", "bad", "whole")
    for name in names:
        known.add(name, FileStat(1, 1), may_grow=name == "goes on")
    seen = DirectoryScan(dict.fromkeys(names, HERE), {"": HERE})
    for _ in range(2):
        for name, reading in (("goes on", READING), ("bad", NOTHING_READ), ("whole", None)):
            known.was_read(name, reading)
        due = []
        for _ in range(4):
            known.update(seen)
            due.append([name for name in names if known.is_due(name)])
        assert due == [["goes on", "bad"], ["goes on", "bad"], [], []]


@pytest.mark.parametrize("reading", [None, READING, NOTHING_READ])
def test_reports_about_a_forgotten_file_change_nothing(reading: ReadProgress | None) -> None:
    known = DeliveredFiles(10)
    known.was_read("a", reading)
    known.was_not_read("a", reading)
    assert len(known) == 0
