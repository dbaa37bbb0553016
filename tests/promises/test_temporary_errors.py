"""Temporary errors of local disks: an operation that fails once is repeated, with the same result.

The errors are returned below Python, Arrow and DuckDB, so these tests need Linux and a C compiler.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.faults import TEMPORARY
from tests.pairs import FULL
from tests.simulation.commands import COMMANDS
from tests.simulation.disk import build_shim, environment

ROOT = Path(__file__).parents[2]
EVERY = 1 if FULL else 12
"""One of so many kinds of operations is tried with each command."""
CHOSEN = sorted(COMMANDS) if FULL else ["convert", "shuffle", "export", "verify", "load", "sql"]
DERIVED = "hexdata.duckdb"
"""A file that a stage may leave out, with a note, as it is made from the others."""


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_shim(tmp_path_factory.mktemp("shim"))
    if built is None:
        pytest.skip("faults of the disk need Linux and a C compiler")
    return built


def runs(shim: Path, folder: Path, command: str, error: str, every: int) -> list[dict[str, Any]]:
    """Run a command with each fault, in a process of its own."""
    script = [sys.executable, "-m", "tests.kit.faults", str(folder), command, error, "--every", str(every)]
    done = subprocess.run(
        script, env=environment(shim), cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found
    assert all(run["faults"] for run in found), "no operation failed"
    return found


@pytest.mark.parametrize("command", CHOSEN)
def test_an_operation_that_fails_once_changes_nothing(command: str, shim: Path, tmp_path: Path) -> None:
    """The command succeeds, with the bytes of an undisturbed run."""
    for run in runs(shim, tmp_path, command, "eio", EVERY):
        assert run["ending"] == "done", run
        assert run["same"] or DERIVED in run["path"], run


@pytest.mark.parametrize("error", TEMPORARY[1:])
def test_all_temporary_errors_are_repeated(error: str, shim: Path, tmp_path: Path) -> None:
    for run in runs(shim, tmp_path, "convert", error, 3 if FULL else 20):
        assert run["ending"] == "done", run
        assert run["same"] or DERIVED in run["path"], run


def test_an_operation_that_always_fails_is_one_error_with_its_file(shim: Path, tmp_path: Path) -> None:
    """Or no error, where a file is not needed, such as a log."""
    found = runs(shim, tmp_path, "convert", "eio-lasting", 3 if FULL else 12)
    for run in found:
        assert run["ending"] in ("done", "error"), run
        if run["ending"] == "error":
            assert "\n" not in run["text"], run
    assert any(run["ending"] == "error" for run in found)


def test_a_full_disk_is_not_repeated(shim: Path, tmp_path: Path) -> None:
    found = runs(shim, tmp_path, "convert", "enospc", 3 if FULL else 12)
    assert any(run["ending"] == "error" for run in found)
