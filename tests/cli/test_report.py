"""``hexdata report``: what it takes and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hexdata.cli import main
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store

if TYPE_CHECKING:
    from tests.conftest import CopyStore

Run = pytest.CaptureFixture[str]


@pytest.fixture
def store(trmph_store: Path, copy_store: CopyStore) -> Path:
    folder = copy_store(trmph_store)
    shuffle_store(folder, ShuffleOptions(threads=1, seed=4))
    return folder


def run(capsys: Run, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["hexdata", "report", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


def test_it_says_what_the_page_says(store: Path, capsys: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run(capsys, monkeypatch, store)
    assert status == 0
    page = (store / "report.html").read_text(encoding="utf-8")
    headline = out.splitlines()[0]
    assert f"<span>{headline}</span>" in page
    assert "Write shards for training: hexdata export STORE" in out
    assert str(store / "report.html") in out


def test_the_numbers_are_to_be_had_as_json(
    store: Path, tmp_path: Path, capsys: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    status, out, _ = run(
        capsys, monkeypatch, store, "--json", "--output", page, "--memory", "500MB", "--threads", 1
    )
    made = json.loads(out)
    assert status == 0
    assert made["path"] == str(page)
    assert made["bytes"] == page.stat().st_size
    assert made["facts"]["counts"] == Store.open(store).manifest.counts
    assert made["facts"]["quality"]["positions"] > 0
    assert [answer["question"] for answer in made["verdict"]["answers"]] == [
        "Is it shuffled?",
        "Is it complete?",
        "Is anything unusual?",
    ]
    assert not (store / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["{folder}"], 1, "no manifest"),
        (["{store}", "--memory", "1MB"], 1, "too little memory"),
        (["{store}", "--memory", "much"], 2, "not a size"),
        (["{store}", "--output", "{folder}"], 2, "{folder}: the report cannot be written"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: list[str],
    status: int,
    said: str,
    store: Path,
    tmp_path: Path,
    capsys: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"store": store, "folder": tmp_path / "empty"}
    found, out, err = run(capsys, monkeypatch, *(each.format(**places) for each in arguments))
    assert found == status
    assert said.format(**places) in err
    assert out == ""
