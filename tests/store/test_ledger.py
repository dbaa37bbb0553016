"""The ledger of a stage: finished units of the same plan are kept, all others are ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from hexdata.errors import StoreError
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


def test_many_units_are_saved_in_batches(tmp_path: Path) -> None:
    """At most 1/256 of the units can be lost, and the bytes written grow linearly."""
    path, most = tmp_path / "progress.json", 700
    ledger = Ledger(path, "shuffle", PLAN)
    last, saves = -1, 0
    for number in range(most):
        ledger.finish_buffered(str(number), {"rows": number})
        inode = path.stat().st_ino
        saves, last = saves + (inode != last), inode
        if number % 97 == 0:
            kept = len(Ledger(path, "shuffle", PLAN))
            assert number + 1 - kept <= number / 256
    assert saves < most * 0.7
    ledger.save()
    again = Ledger(path, "shuffle", PLAN)
    assert [again[str(number)] for number in range(most)] == [{"rows": n} for n in range(most)]


@pytest.mark.parametrize(
    ("found", "altered"), [('"rows": 3', '"rows": 4'), ('"rows": 3', '"row": 3'), ('"a"', '"c"')]
)
def test_altered_units_are_refused(path: Path, found: str, altered: str) -> None:
    content = path.read_text()
    path.write_text(content.replace(found, altered))
    assert path.read_text() != content
    with pytest.raises(StoreError, match=r"corrupt.*do not match their digest.*Remove progress.json"):
        Ledger(path, "shuffle", PLAN)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"stage": "shuffle", "pl', "is not valid JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"stage": "shuffle", "plan": "", "done": {}}', "lacks the key sha256"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[]", "has a wrong value"),
        (b"null", "has a wrong value"),
        (
            b'{"stage": "export", "plan": "", "done": {}, "sha256": "%s"}' % (b"0" * 64),
            "belongs to another stage",
        ),
        (b'{"stage": "shuffle", "plan": "", "done": [], "sha256": ""}', "wrong value of sha256"),
        (b'{"stage": "shuffle", "plan": 3, "done": {}}', "wrong value of plan"),
    ],
)
def test_an_invalid_ledger_is_named(path: Path, content: bytes, reason: str) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreError, match=f"the progress file.*{reason}") as caught:
        Ledger(path, "shuffle", PLAN)
    assert caught.value.path == str(path)
    assert "Remove progress.json" in str(caught.value)
    assert path.read_bytes() == content


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
