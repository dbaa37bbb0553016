"""``hexdata report``: arguments and output."""

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

pytestmark = pytest.mark.usefixtures("no_charts")
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


def test_the_output_agrees_with_the_page(store: Path, capsys: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run(capsys, monkeypatch, store)
    assert status == 0
    page = (store / "report.html").read_text(encoding="utf-8")
    headline = out.splitlines()[0]
    assert f"<span>{headline}</span>" in page
    assert f"Write shards for training: hexdata export {store}" in out
    assert str(store / "report.html") in out


def test_json_contains_the_numbers_of_the_page(
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
    ("arguments", "status", "message"),
    [
        (["{folder}"], 1, "no manifest"),
        (["{store}", "--memory", "1MB"], 1, "too little memory"),
        (["{store}", "--memory", "much"], 2, "not a size"),
        (["{store}", "--output", "{folder}"], 2, "{folder}: the report cannot be written"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: list[str],
    status: int,
    message: str,
    store: Path,
    tmp_path: Path,
    capsys: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty").mkdir()
    paths = {"store": store, "folder": tmp_path / "empty"}
    found, out, err = run(capsys, monkeypatch, *(each.format(**paths) for each in arguments))
    assert found == status
    assert message.format(**paths) in err
    assert out == ""
