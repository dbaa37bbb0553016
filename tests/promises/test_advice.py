"""Stages that are killed: what hexdata recommends gives the files of an undisturbed run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.stages import (
    FOLDERS,
    KILLED,
    MORE,
    RUN,
    STAGES,
    STORE,
    Commands,
    StageCase,
    damaged_files,
    files_of,
    make_inputs,
)
from tests.pairs import FULL

FIRST = 1 if FULL else 25
LONGEST = 1 if FULL else 100
"""First and longest distance of the tried moments, which grows, so that short stages are killed often too."""
RECORDED = 2
"""Changes until the options of a run are recorded: the holder of the lock is named first."""


@pytest.fixture(scope="module")
def after(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return ``after(*lines)``: the folder after these commands, each run once. Read only: copy it."""
    made: dict[tuple[str, ...], Path] = {}

    def run(*lines: str) -> Path:
        if lines not in made:
            folder = tmp_path_factory.mktemp("after") / "folder"
            if lines:
                shutil.copytree(run(*lines[:-1]), folder)
                assert commands.run(folder, lines[-1]) == 0, (folder / "output").read_text()
            else:
                folder.mkdir()
                make_inputs(folder)
            made[lines] = folder
        return made[lines]

    return run


@pytest.mark.parametrize("case", STAGES, ids=str)
def test_what_is_recommended_after_a_kill_finishes_the_stage(
    case: StageCase, commands: Commands, after: Callable[..., Path], tmp_path: Path
) -> None:
    start = after(*case.before)
    expected = files_of(after(*case.before, case.command) / STORE)
    assert ("positions/part-000000-1.parquet" in expected) == (case.command == MORE)
    moment, killed = STAGES.index(case) % FIRST, 0
    while True:
        folder = tmp_path / f"killed {moment}"
        shutil.copytree(start, folder)
        if (status := commands.run(folder, case.command, moment)) != KILLED:
            assert status == 0
            break
        killed += 1
        if moment < RECORDED:  # nothing was done
            assert files_of(folder / STORE) == files_of(start / STORE)
            assert commands.run(folder, case.command) == 0, (folder / "output").read_text()
            assert files_of(folder / STORE) == expected
        else:
            finish(case, commands, folder, expected, moment)
        shutil.rmtree(folder)
        moment += min(FIRST * killed, LONGEST if case.command != RUN else 2 * LONGEST)
    assert killed


def finish(case: StageCase, commands: Commands, folder: Path, expected: dict[str, str], moment: int) -> None:
    """Check the store of a killed command, and run what is recommended."""
    steps = commands.steps(folder)
    for stage in case.replaces:
        assert not damaged_files(folder / STORE, FOLDERS[stage]), f"killed before change {moment}"
    stages = ("convert", "shuffle", "export") if case.command == RUN else (case.command.split()[0],)
    if files_of(folder / STORE) != expected:  # otherwise it was killed after everything was published
        unfinished = [line for line in steps if line.split()[1] in stages]
        assert unfinished, (moment, steps)
        assert commands.run(folder, unfinished[0]) == 0, (unfinished[0], (folder / "output").read_text())
    if case.command == RUN:
        assert commands.run(folder, RUN) == 0, (folder / "output").read_text()
    assert files_of(folder / STORE) == expected, (moment, steps)
