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
    existing: set[str] = field(default_factory=set)
    delivered_names: list[str] = field(default_factory=list)
    last_devices: dict[str, int] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    """Folders whose drive is not mounted just now: they are there, and empty."""
    closed: set[str] = field(default_factory=set)
    """Folders that cannot be looked into."""

    def make_scan(self) -> DirectoryScan:
        """Return the result of a scan. Folder a and the folders below it are on a drive."""
        scan = DirectoryScan()
        for folder in FOLDERS:
            hidden = [above for above in ("a/", "c/") if folder.startswith(above)]
            if folder in self.closed or any(above in self.closed for above in hidden if above != folder):
                scan.unreadable.update({folder} & self.closed)
                continue
            is_away = any(above in self.away for above in hidden)
            if is_away and folder not in self.away:
                continue  # an unmounted drive has no subfolders
            scan.devices[folder] = OTHER if is_away else DRIVE if hidden else HERE
            if not is_away:
                names = {name for name in self.existing if folder_of(name) == folder}
                scan.names.update(dict.fromkeys(names, scan.devices[folder]))
        return scan

    def can_be_judged(self, name: str, scan: DirectoryScan) -> bool:
        folder = folder_of(name)
        if any(folder.startswith(closed) for closed in self.closed):
            return False
        is_away = any(folder.startswith(away) for away in self.away)
        return not (is_away and name in self.last_devices)

    def forget(self, scan: DirectoryScan) -> None:
        self.last_devices.update(
            {name: device for name, device in scan.names.items() if name in self.delivered_names}
        )
        old = self.delivered_names[: max(0, len(self.delivered_names) - self.remembered)]
        for name in old:
            if name not in scan.names and self.can_be_judged(name, scan):
                self.delivered_names.remove(name)
                self.last_devices.pop(name, None)


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
    model, delivered = Model(remembered), DeliveredFiles(remembered)
    first: list[tuple[str, str | None]] = [("come", name) for name in order]
    for verb, what in [*first, *steps, ("look", None)]:
        if what is None:
            scan = model.make_scan()
            model.forget(scan)
            delivered.update(scan)
            if not model.away and not model.closed:
                assert len(delivered) <= len(model.existing) + remembered
        elif verb == "come":
            model.existing.add(what)
            model.delivered_names = [*(name for name in model.delivered_names if name != what), what]
            delivered.add(what, FileStat(1, 1), may_grow=False)
        elif verb == "go":
            model.existing.discard(what)
        elif verb == "return":
            model.existing.add(what)
        else:
            where = model.away if verb == "away" else model.closed
            where ^= {what}
        assert [name for name in NAMES if name in delivered] == sorted(model.delivered_names, key=NAMES.index)


def test_all_existing_files_are_remembered() -> None:
    delivered = DeliveredFiles(10)
    scan = DirectoryScan({f"{n}.trmph": HERE for n in range(1000)}, {"": HERE})
    for name in scan.names:
        delivered.add(name, FileStat(1, 1), may_grow=False)
    delivered.update(scan)
    assert len(delivered) == 1000
    delivered.update(DirectoryScan({}, {"": HERE}))
    assert [name for name in scan.names if name in delivered] == [f"{n}.trmph" for n in range(990, 1000)]


def test_the_number_of_removed_files_remembered_is_limited() -> None:
    delivered = DeliveredFiles(100)
    for start in range(0, 20_000, 50):
        names = [f"games-{n:08d}.trmph" for n in range(start, start + 50)]
        for name in names:
            delivered.add(name, FileStat(1, 1), may_grow=True)
        delivered.update(DirectoryScan(dict.fromkeys(names, HERE), {"": HERE}))
        assert len(delivered) <= 150
        assert len(pickle.dumps(encode_state(delivered.state()))) < 20_000


def test_a_remounted_drive_may_have_another_device_number() -> None:
    delivered = DeliveredFiles(1)
    for name in ("a.trmph", "b.trmph", "c.trmph"):
        delivered.add(name, FileStat(1, 1), may_grow=False)
    delivered.update(DirectoryScan(dict.fromkeys(("a.trmph", "b.trmph", "c.trmph"), DRIVE), {"": DRIVE}))
    delivered.update(DirectoryScan({}, {"": HERE}))
    delivered.update(DirectoryScan(dict.fromkeys(("a.trmph", "b.trmph"), OTHER), {"": OTHER}))
    assert "a.trmph" in delivered
    delivered.update(DirectoryScan({"b.trmph": OTHER}, {"": OTHER}))
    assert ["a.trmph" in delivered, "b.trmph" in delivered, "c.trmph" in delivered] == [False, True, True]


READING = ReadProgress(3, 40, b"0123456789abcdef")


def test_a_state_preserves_the_records() -> None:
    delivered = DeliveredFiles(10)
    odd = b"\xff\xc3.trmph".decode("utf-8", "surrogateescape")
    for name in ("whole", "sub/goes on", "unread", "missed", odd, "skipped"):
        delivered.add(name, FileStat(len(name), 1 << 62), may_grow=name not in ("whole", odd))
    delivered.skip("never")
    for name, reading in (("whole", None), ("sub/goes on", READING), (odd, NOTHING_READ), ("skipped", None)):
        delivered.was_read(name, reading)
    delivered.was_not_read("missed", READING)
    other = DeliveredFiles(10)
    other.load_state(decode_state(pickle.loads(pickle.dumps(encode_state(delivered.state())))))
    for each in (delivered, other):
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
    assert delivered.compare("whole", FileStat(9, 9)) == "rewritten"
    assert [delivered.compare("whole", FileStat(9, 9)), other.compare("whole", FileStat(9, 9))] == [
        "same",
        "same",
    ]


def test_a_state_preserves_read_progress_of_queued_files() -> None:
    file = FoundFile(Path("/in/a.trmph"), "a.trmph", 5, READING)
    held = [file, ChunkSource(file, [], READING), ChunkSource(file)]
    assert decode_state(pickle.loads(pickle.dumps(encode_state(held)))) == held


def test_an_empty_state_can_be_loaded() -> None:
    delivered = DeliveredFiles(10)
    delivered.load_state(decode_state(encode_state(DeliveredFiles(10).state())))
    assert len(delivered) == 0


def test_a_growing_file_is_due_for_two_scans_after_each_reading() -> None:
    delivered = DeliveredFiles(10)
    names = ("goes on", "bad", "whole")
    for name in names:
        delivered.add(name, FileStat(1, 1), may_grow=name == "goes on")
    scan = DirectoryScan(dict.fromkeys(names, HERE), {"": HERE})
    for _ in range(2):
        for name, reading in (("goes on", READING), ("bad", NOTHING_READ), ("whole", None)):
            delivered.was_read(name, reading)
        due = []
        for _ in range(4):
            delivered.update(scan)
            due.append([name for name in names if delivered.is_due(name)])
        assert due == [["goes on", "bad"], ["goes on", "bad"], [], []]


@pytest.mark.parametrize("reading", [None, READING, NOTHING_READ])
def test_reports_about_a_forgotten_file_change_nothing(reading: ReadProgress | None) -> None:
    delivered = DeliveredFiles(10)
    delivered.was_read("a", reading)
    delivered.was_not_read("a", reading)
    assert len(delivered) == 0
