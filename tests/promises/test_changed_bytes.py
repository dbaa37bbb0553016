"""One changed bit in any file of a store, or of the work of a killed command, under commands that read it.

``verify`` names the file. Every other command ends with an error, or with the output and the files that it
gives without the change. Loaders are in ``test_changes_under_readers``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from hexdata.cards import CARDS
from tests.kit.stages import (
    CONVERT,
    EXPORT_AGAIN,
    KILLED,
    ORIGINAL,
    SHUFFLE,
    SHUFFLED,
    STORE,
    Commands,
    files_of,
    make_inputs,
)
from tests.pairs import FULL

COMMANDS = {
    "verify": f"verify '{STORE}'",
    "sql": f"sql '{STORE}' 'SELECT * FROM positions ORDER BY position_id' --json",
    "sql of games": f"sql '{STORE}' 'SELECT * FROM games ORDER BY game_id' --json",
    "sql of sources": f"sql '{STORE}' 'SELECT * FROM sources LEFT JOIN rejected USING (source_id)' --json",
    "sql of shuffled": f"sql '{STORE}' 'SELECT * FROM shuffled ORDER BY position_id' --json",
    "show": f"show '{STORE}' 3",
    "show a game": f"show '{STORE}' --game 0",
    "info": f"info '{STORE}' --json",
    "round trip": f"verify '{STORE}' --round-trip 'old games' --round-trip 'more games'",
    "convert more": "convert 'more games' 'my store' --val 0.2 --test 0.1 --max-reject-rate 0.9 "
    "--board-size 13 --workers 1",
    "shuffle again": f"shuffle '{STORE}' --seed 3 --buckets 2 --threads 1",
    "export again": EXPORT_AGAIN.replace("96", "64"),
    "original pickles": ORIGINAL.replace("--level 1", "--level 3"),
    "shuffled pickles": SHUFFLED.replace("--level 2", "--level 3"),
}
"""Command lines that read a store. Their output is compared, except times."""
STAGES = (CONVERT, SHUFFLE, EXPORT_AGAIN, ORIGINAL, SHUFFLED)
READ_BY = {
    "positions": ("sql", "show", "shuffle again", "original pickles", "round trip"),
    "games": ("sql of games", "show a game", "shuffle again"),
    "sources": ("sql of sources",),
    "rejected": ("sql of sources",),
    "shuffled": ("sql of shuffled", "export again", "shuffled pickles"),
    "shards": (),
    "pickles": (),
}
"""Commands that must refuse a changed bit in some file of a folder, besides ``verify``."""
_WRITTEN_ANYWAY = ("hexdata.duckdb", *CARDS)
FLIPS = 20 if FULL else 1


@pytest.fixture(scope="module")
def whole(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs and a store with all stages, and before each stage a copy of it beside it."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    folder.mkdir()
    make_inputs(folder)
    for number, line in enumerate(STAGES):
        shutil.copytree(folder, folder.parent / str(number), copy_function=link)
        assert commands.run(folder, line) == 0, (folder / "output").read_text()
    return folder


def link(source: str, target: str) -> None:
    """Copy a file as a link: stages replace files, they do not change them, except logs and ledgers."""
    if "/logs/" in target or "/." in target or target.endswith("/output"):
        shutil.copyfile(source, target)
    else:
        Path(target).hardlink_to(source)


def outcome(commands: Commands, folder: Path, line: str) -> tuple[int, str, dict[str, str]]:
    status = commands.run(folder, line)
    files = {name: facts for name, facts in files_of(folder / STORE).items() if name not in _WRITTEN_ANYWAY}
    return status, (folder / "output").read_text(), files


def flipped(path: Path, random: np.random.Generator) -> bytes:
    data = bytearray(path.read_bytes())
    data[int(random.integers(len(data)))] ^= 1 << int(random.integers(8))
    return bytes(data)


@pytest.mark.parametrize("part", READ_BY)
def test_a_changed_bit_is_named_or_has_no_effect(
    part: str, commands: Commands, whole: Path, tmp_path: Path
) -> None:
    """Each command runs in a copy of the store with a changed bit; if it succeeds, also in one without."""
    files = sorted(
        path for path in (whole / STORE / part).rglob("*") if path.suffix != ".md" and path.is_file()
    )
    random = np.random.default_rng(list(part.encode()))
    refusing, original = set(), files_of(whole / STORE)
    for name in COMMANDS if FULL else ("verify", *READ_BY[part]):
        for path in [files[int(random.integers(len(files)))] for _ in range(FLIPS)]:
            copy, changed = tmp_path / "changed", path.relative_to(whole)
            shutil.copytree(whole, copy, copy_function=link)
            (copy / changed).unlink()
            (copy / changed).write_bytes(flipped(path, random))
            status, text, found = outcome(commands, copy, COMMANDS[name])
            shutil.rmtree(copy)
            assert "Traceback" not in text, (name, changed, text)
            if status:
                refusing.add(name)
                assert changed.name in text or name == "round trip", (name, changed, text)
                continue
            shutil.copytree(whole, copy, copy_function=link)
            _, output, made = outcome(commands, copy, COMMANDS[name])
            shutil.rmtree(copy)
            key = changed.relative_to(STORE).as_posix()
            if original.get(key) == made.get(key):  # the command leaves this file as it is
                found[key] = original[key]
            assert found == made, (name, changed)
            assert not name.startswith(("sql", "show", "info")) or text == output, (name, changed)
    assert "verify" in refusing
    assert not FULL or {*READ_BY[part]} <= refusing


@pytest.mark.parametrize(("number", "moment"), [(0, 30), (1, 9), (2, 5)])
def test_a_changed_bit_of_unfinished_work(
    number: int, moment: int, commands: Commands, whole: Path, tmp_path: Path
) -> None:
    """The same command gives the files of an undisturbed run, or an error."""
    start, line = tmp_path / "start", STAGES[number]
    shutil.copytree(whole.parent / str(number), start, copy_function=link)
    expected = files_of(whole.parent / str(number + 1) / STORE)
    assert commands.run(start, line, moment) == KILLED
    work = [path for path in sorted((start / STORE).rglob("*")) if path.is_file()]
    work = [path for path in work if any(part[0] == "." for part in path.relative_to(start).parts)]
    assert work
    random = np.random.default_rng(moment)
    for path in work if FULL else work[:: max(1, len(work) // 3)]:
        if path.stat().st_size == 0:
            continue
        shutil.copytree(start, tmp_path / "changed")
        (tmp_path / "changed" / path.relative_to(start)).write_bytes(flipped(path, random))
        status = commands.run(tmp_path / "changed", line)
        text = (tmp_path / "changed" / "output").read_text()
        assert "Traceback" not in text, (path, text)
        assert status or files_of(tmp_path / "changed" / STORE) == expected, path
        shutil.rmtree(tmp_path / "changed")
