"""Stages that are killed: what hexdata recommends gives the files of an undisturbed run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.stages import (
    FOLDERS,
    KILLED,
    RUN,
    STAGES,
    STORE,
    Commands,
    StageCase,
    damaged_files,
    files_of,
    make_inputs,
    running_commands,
)
from tests.pairs import FULL

FIRST = 1 if FULL else 4
LONGEST = 1 if FULL else 17
"""First and longest distance of the tried moments, which grows, so that short stages are killed often too."""


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with running_commands() as running:
        yield running


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


@pytest.mark.parametrize("case", STAGES, ids=str)
def test_what_is_recommended_after_a_kill_finishes_the_stage(
    case: StageCase, commands: Commands, inputs: Path, tmp_path: Path
) -> None:
    start, whole = tmp_path / "start", tmp_path / "whole"
    shutil.copytree(inputs, start)
    for line in case.before:
        assert commands.run(start, line) == 0, (start / "output").read_text()
    shutil.copytree(start, whole)
    assert commands.run(whole, case.command) == 0, (whole / "output").read_text()
    expected = files_of(whole / STORE)
    moment, killed = STAGES.index(case) % FIRST, 0
    while True:
        folder = tmp_path / f"killed {moment}"
        shutil.copytree(start, folder)
        if (status := commands.run(folder, case.command, moment)) != KILLED:
            assert status == 0
            break
        killed += 1
        finish(case, commands, folder, expected, moment)
        shutil.rmtree(folder)
        moment += min(FIRST * killed, LONGEST)
    assert killed > 1


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
