"""Temporary errors of local disks: an operation that fails once is repeated, with the same result.

The errors are returned below Python, Arrow and DuckDB, so these tests need Linux and a C compiler.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.faults import TEMPORARY
from tests.pairs import FULL
from tests.simulation.disk import COMMANDS, build_shim, environment

ROOT = Path(__file__).parents[2]
EVERY = 1 if FULL else 40
"""One of so many kinds of operations is tried with each command and error."""
SOME = ("eio-lasting", "enospc", "eio", "estale")
CASES: dict[str, tuple[str, ...]] = {"convert": SOME, "shuffle": ("eio",), "load": ("eio",)}
if FULL:
    CASES = dict.fromkeys(COMMANDS, ("eio-lasting", "enospc", *TEMPORARY))
"""Errors that are tried with each command."""
DERIVED = "hexdata.duckdb"
"""A file that a stage may leave out, with a note, as it is made from the others."""


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_shim(tmp_path_factory.mktemp("shim"))
    if built is None:
        pytest.skip("faults of the disk need Linux and a C compiler")
    return built


@pytest.mark.parametrize("command", CASES)
def test_errors_of_a_disk(command: str, shim: Path, tmp_path: Path) -> None:
    """After a temporary error, the command succeeds, with the bytes of an undisturbed run.

    An error that lasts, and a full disk, which is not tried again, is one error of hexdata; or none, where a
    file is not needed, such as a log.
    """
    script = [sys.executable, "-m", "tests.kit.faults", str(tmp_path), command, *CASES[command]]
    done = subprocess.run(
        [*script, "--every", str(EVERY)],
        env=environment(shim),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found
    for run in found:
        assert run["faults"], run
        if run["error"] in TEMPORARY:
            assert run["ending"] == "done", run
            assert run["same"] or DERIVED in run["path"], run
        else:
            assert run["ending"] in ("done", "error"), run
            assert run["ending"] == "done" or "\n" not in run["text"], run
    if command == "convert":
        assert {run["error"] for run in found} == {*CASES[command]}
        assert {run["error"] for run in found if run["ending"] == "error"} == {"eio-lasting", "enospc"}
