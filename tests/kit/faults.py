"""Runs a command on a disk whose operations fail once, or fail always, below Python, Arrow and DuckDB.

    LD_PRELOAD=shim.so python -m tests.kit.faults FOLDER COMMAND ERROR... [--every N]

The operations of an undisturbed run are divided by their kind and by the kind of their file. Of each group,
one operation fails, in a run of its own. Prints one line of JSON for each run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.simulation.disk import ERRORS, REACHED, Simulation, published, run_in
from tests.simulation.replay import KINDS, Operation, read_tree, write_tree

TEMPORARY: Final = ("eio", "estale", "etimedout", "eagain")
"""Errors that a repetition may not meet again."""
_NUMBERS: Final = re.compile("[0-9]+|[0-9a-f]{16,}|t[0-9]{7}")


def _groups(operations: list[Operation], error: str) -> dict[tuple[str, str], list[Operation]]:
    """Return the operations that an error may concern, by their kind and by the path without numbers."""
    reached = REACHED.get(error, KINDS)
    found: dict[tuple[str, str], list[Operation]] = {}
    for operation in operations:
        if not operation.failed and operation.kind in reached:
            found.setdefault((operation.kind, _NUMBERS.sub("N", operation.path)), []).append(operation)
    return found


def _run_with_fault(simulation: Simulation, folder: Path, at: int, error: str) -> dict[str, Any]:
    """Run a command whose operation ``at`` fails, and return how it ended and what is different."""
    write_tree(simulation.start, folder)
    outcome = run_in(folder, simulation.action, at=at, fault=error)
    same = published(read_tree(folder)) == published(simulation.end)
    return {"ending": outcome.ending, "faults": outcome.faults, "same": same, "text": outcome.text}


def runs(command: str, errors: list[str], folder: Path, every: int) -> Iterator[dict[str, Any]]:
    """Run a command once for each error and group of operations; yield these and how the run ended."""
    simulation = Simulation(command, folder / "simulation")
    work = folder / "work"
    work.mkdir()
    for error in errors:
        for (kind, path), operations in list(_groups(simulation.operations, error).items())[::every]:
            chosen = operations[len(operations) // 2].number
            facts = {"error": error, "kind": kind, "path": path}
            yield {**facts, **_run_with_fault(simulation, work, chosen, error)}


def main() -> None:
    """Run the command with each fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("command")
    parser.add_argument("errors", nargs="+", choices=[*ERRORS, "eio-lasting"])
    parser.add_argument("--every", type=int, default=1)
    given = parser.parse_args()
    for run in runs(given.command, given.errors, given.folder, given.every):
        sys.stdout.write(json.dumps(run) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
