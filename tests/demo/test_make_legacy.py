"""The files of a demo: each game once, all layouts, and completion of interrupted runs."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hexdata.demo import FILES_PER_LAYOUT, LAYOUTS, DemoOptions, make_legacy
from hexdata.errors import ConfigError
from hexdata.formats import open_source
from hexdata.store.files import Ledger

OPTIONS = DemoOptions(games=24, seed=3)


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("demo")
    return folder, make_legacy(folder, OPTIONS)


def test_the_files_of_each_layout_are_readable(whole: tuple[Path, Any]) -> None:
    folder, made = whole
    files = digests(folder)
    assert Counter(name.split("/")[0] for name in files) == dict.fromkeys(LAYOUTS, FILES_PER_LAYOUT)
    formats, positions = set(), 0
    for name in files:
        with open_source(folder / name) as reader:
            for batch in reader.batches():
                assert not batch.rejected
                positions += batch.positions.num_rows
            formats.add(reader.format)
    assert formats == {"legacy-tuples", "legacy-dicts", "trmph"}
    assert (made.games, made.positions, made.files) == (24, positions, len(files))


class Killed(BaseException):
    """Ends a run as a signal does: nothing catches it."""


def test_an_interrupted_demo_is_completed_and_another_one_refused(
    whole: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, done = Ledger.finish, list[str]()

    def dying(self: Ledger, unit: str, facts: Any) -> None:
        finish(self, unit, facts)
        done.append(unit)
        if len(done) in (1, 3):
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "finish", dying)
        for _ in range(2):
            with pytest.raises(Killed):
                make_legacy(tmp_path, OPTIONS)
    for is_done in (False, True):  # the second call changes nothing
        assert make_legacy(tmp_path, OPTIONS) == replace(whole[1], already_done=is_done)
        assert digests(tmp_path) == digests(whole[0])
    with pytest.raises(ConfigError, match="another demo"):
        make_legacy(tmp_path, DemoOptions(games=25, seed=3))


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="other files"):
        make_legacy(tmp_path, OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
