"""Needs of larger stores: rates of this machine, the simulation compared with a real run, and the tables.

Asserts no figure. ``tests/test_task_graph.py`` tests the simulation.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parent / "scaling.py"


def test_what_larger_stores_need(store: Path, tmp_path: Path, report: Callable[[str], None]) -> None:
    command = [sys.executable, SCRIPT, store, tmp_path]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    report(done.stdout)
