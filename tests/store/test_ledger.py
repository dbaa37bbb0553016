"""The ledger of a stage: finished units of the same plan are kept, all others are ignored."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hexdata.errors import StoreError
from hexdata.storage.local import LocalStorage
from hexdata.store.files import FileFacts
from hexdata.store.ledger import Ledger

PLAN = {"seed": 1, "sizes": [3, 4]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ledger = Ledger(tmp_path / "work" / "progress.json", "shuffle", PLAN)
    ledger.finish("a", {"rows": 3})
    ledger.finish("b", {"rows": 4})
    return ledger.path


def test_the_same_plan_resumes(path: Path) -> None:
    again = Ledger(path, "shuffle", {"sizes": [3, 4], "seed": 1})
    assert len(again) == 2
    assert "a" in again
    assert "c" not in again
    assert again["b"] == {"rows": 4}


def test_nothing_is_written_before_a_unit_is_finished(tmp_path: Path) -> None:
    assert len(Ledger(tmp_path / "progress.json", "shuffle", PLAN)) == 0
    assert list(tmp_path.iterdir()) == []


def test_another_plan_starts_from_scratch_and_empties_the_ledger(path: Path) -> None:
    """The files of the first plan will be replaced, so a later run with that plan must not use the ledger."""
    assert len(Ledger(path, "shuffle", {**PLAN, "seed": 2})) == 0
    assert len(Ledger(path, "shuffle", PLAN)) == 0


def test_saves_append_only_the_new_units(tmp_path: Path) -> None:
    """At most 1/256 of the units can be lost, and what is on disk is never written again."""
    path, most = tmp_path / "progress.json", 700
    ledger = Ledger(path, "shuffle", PLAN)
    before, saves = b"", 0
    for number in range(most):
        saved = ledger.finish_buffered(str(number), {"rows": number})
        content = path.read_bytes()
        assert content.startswith(before)
        assert saved == (content != before)
        saves, before = saves + saved, content
        if number % 97 == 0:
            kept = len(Ledger(path, "shuffle", PLAN))
            assert number + 1 - kept <= number / 256
    assert saves < most * 0.7
    ledger.save()
    again = Ledger(path, "shuffle", PLAN)
    assert [again[str(number)] for number in range(most)] == [{"rows": n} for n in range(most)]
    again.finish("0", {"rows": -1})
    assert Ledger(path, "shuffle", PLAN)["0"] == {"rows": -1}


def test_a_torn_last_line_is_dropped_and_replaced(path: Path) -> None:
    """A process was killed while it appended the unit b."""
    whole = path.read_bytes()
    start = len(b"".join(whole.splitlines(keepends=True)[:2]))
    for size in range(start, len(whole)):
        path.write_bytes(whole[:size])
        ledger = Ledger(path, "shuffle", PLAN)
        assert list(ledger._done) == ["a"]
        assert path.read_bytes() == whole[:size]
        ledger.finish("b", {"rows": 4})
        assert path.read_bytes() == whole


def test_a_failed_save_is_repeated_with_the_next_unit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, extend = Ledger(path, "shuffle", PLAN), LocalStorage.extend

    def fail(self: LocalStorage, data: bytes, size: int) -> bool:
        extend(self, data[: len(data) // 2], size)
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "extend", fail)
        with pytest.raises(OSError, match="full"):
            ledger.finish("c", {"rows": 5})
    ledger.finish("d", {"rows": 6})
    assert list(Ledger(path, "shuffle", PLAN)._done) == ["a", "b", "c", "d"]


def test_a_ledger_that_was_removed_or_copied_with_links_is_written_whole(path: Path) -> None:
    ledger, copy = Ledger(path, "shuffle", PLAN), path.with_name("copy")
    copy.hardlink_to(path)
    before = copy.read_bytes()
    ledger.finish("c", {"rows": 5})
    assert copy.read_bytes() == before
    assert len(Ledger(path, "shuffle", PLAN)) == 3
    path.unlink()
    ledger.finish("d", {"rows": 6})
    assert len(Ledger(path, "shuffle", PLAN)) == 4


def test_any_damage_before_the_last_line_is_refused(path: Path) -> None:
    """Each byte altered or removed, and each line removed, repeated or moved."""
    whole = path.read_bytes()
    header, first, second = whole.splitlines(keepends=True)
    bad = [header + second, header + first + first, header + second + first, first + second]
    bad += [header + first + header + second, header + b"\n" + first + second]
    for index in range(len(whole) - 1):
        bad.append(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        bad.append(whole[:index] + whole[index + 1 :])
    for content in bad:
        path.write_bytes(content)
        with pytest.raises(StoreError, match=r"the progress file.*Remove progress.json"):
            Ledger(path, "shuffle", PLAN)
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content",
    [b'{"stage": "shuffle", "pl', b'{"stage": "shuffle", "plan": "", "done": {}}', b"", b"\xff\xfe", b"[]"],
)
def test_an_invalid_ledger_is_named(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreError, match="the progress file is corrupt") as caught:
        Ledger(path, "shuffle", PLAN)
    assert caught.value.path == str(path)
    assert path.read_bytes() == content


def test_a_ledger_of_another_stage_is_refused(path: Path) -> None:
    with pytest.raises(StoreError, match=r"belongs to another stage.*shuffle.*Remove progress.json"):
        Ledger(path, "export", PLAN)


def test_units_are_checked_against_the_schema_of_the_stage(tmp_path: Path) -> None:
    """An attacker can write a valid digest, so each unit is checked against the schema of its stage."""
    path = tmp_path / "progress.json"
    facts = {"rows": 3, "bytes": 4, "sha256": "0" * 64}
    Ledger(path, "export", PLAN).finish("a", facts)
    assert Ledger(path, "export", PLAN, FileFacts)["a"] == facts
    for wrong in ({**facts, "rows": "3"}, {**facts, "more": 1}, {"rows": 3}, [], None):
        Ledger(path, "export", PLAN).finish("a", wrong)
        with pytest.raises(StoreError, match=r"the progress file.*a.*Remove progress.json"):
            Ledger(path, "export", PLAN, FileFacts)


def test_lines_lost_in_a_power_failure_are_dropped(path: Path) -> None:
    """The size of a file may be stored before its sectors, which then contain zeros."""
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + bytes(20) + lines[-1][20:])
    ledger = Ledger(path, "shuffle", PLAN)
    assert len(ledger) == len(lines) - 2
    ledger.finish("again", None)
    assert path.read_bytes().startswith(b"".join(lines[:-1]))
    assert "again" in Ledger(path, "shuffle", PLAN)
