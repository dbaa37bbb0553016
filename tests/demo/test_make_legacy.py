"""The files of a demo: each game once, all layouts, and completion of interrupted runs."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections import Counter
from pathlib import Path

import pytest

from hexdata.demo import FILES_PER_LAYOUT, LAYOUTS, DemoOptions, make_legacy
from hexdata.errors import ConfigError
from hexdata.formats import open_source
from hexdata.store.ledger import Ledger

OPTIONS = DemoOptions(games=24, seed=3)


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def test_the_files_of_each_layout_are_readable(tmp_path: Path) -> None:
    made = make_legacy(tmp_path / "legacy", OPTIONS)
    files = digests(tmp_path / "legacy")
    assert Counter(name.split("/")[0] for name in files) == dict.fromkeys(LAYOUTS, FILES_PER_LAYOUT)
    formats, positions = set(), 0
    for name in files:
        with open_source(tmp_path / "legacy" / name) as reader:
            for batch in reader.batches():
                assert not batch.rejected
                positions += batch.positions.num_rows
            formats.add(reader.format)
    assert formats == {"legacy-tuples", "legacy-dicts", "trmph"}
    assert (made.games, made.positions, made.files) == (24, positions, len(files))


def test_a_second_call_changes_nothing(tmp_path: Path) -> None:
    first = make_legacy(tmp_path, OPTIONS)
    before = digests(tmp_path)
    assert make_legacy(tmp_path, OPTIONS) == first
    assert digests(tmp_path) == before


def _make_and_die(folder: Path, after: int) -> None:
    """Child process: exit without cleanup after a given number of files."""
    finish, done = Ledger.finish, []

    def dying(self: Ledger, unit: str, facts: object) -> None:
        finish(self, unit, facts)
        done.append(unit)
        if len(done) > after:
            os._exit(9)

    Ledger.finish = dying  # type: ignore[method-assign]
    make_legacy(folder, OPTIONS)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_killed_demo_is_completed(tmp_path: Path, after: int) -> None:
    whole = make_legacy(tmp_path / "whole", OPTIONS)
    child = multiprocessing.get_context("spawn").Process(target=_make_and_die, args=(tmp_path / "cut", after))
    child.start()
    child.join()
    assert child.exitcode == 9
    assert make_legacy(tmp_path / "cut", OPTIONS) == whole
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")


def test_a_folder_with_another_demo_is_refused(tmp_path: Path) -> None:
    make_legacy(tmp_path, OPTIONS)
    with pytest.raises(ConfigError, match="another demo"):
        make_legacy(tmp_path, DemoOptions(games=25, seed=3))


def test_a_demo_interrupted_at_its_start_is_begun_again(tmp_path: Path) -> None:
    """A crash may leave the temporary file of the ledger, complete, torn or empty."""
    (tmp_path / "..demo.json.123456789.tmp").write_bytes(b"torn")
    make_legacy(tmp_path, OPTIONS)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="other files"):
        make_legacy(tmp_path, OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    make_legacy(tmp_path, OPTIONS)
    (tmp_path / ".demo.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        make_legacy(tmp_path, OPTIONS)
