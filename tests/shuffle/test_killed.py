"""A shuffle in a process of its own that is killed at random moments, or interrupted, and run again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.order import uniform_draw
from hexdata.shuffle import ShuffleOptions, plan, shuffle_store

if TYPE_CHECKING:
    from tests.conftest import CopyStore, StoreBytes

SCRIPT = Path(__file__).parent / "running.py"
MOST_ROWS = 250
OPTIONS = {"seed": 5, "buckets": 30, "threads": 3}
KILLS = 4
LONGEST = 60.0
PROMPTLY = 2.0
"""Seconds within which Ctrl-C must have stopped it; a loaded machine gets twice as long."""

Running = subprocess.Popen[str]


def without_nanobind(errors: str) -> list[str]:
    """Leave out what DuckDB's binding says when a process is interrupted while importing it."""
    noise = ("nanobind:", " - leaked", " - ...", "See https://nanobind")
    return [line for line in errors.splitlines() if not line.startswith(noise)]


def start(store: Path, **asked: Any) -> Running:
    """Start a shuffle and wait until it is at work."""
    asked = {"options": OPTIONS, "most_rows": MOST_ROWS, **asked}
    command = [sys.executable, str(SCRIPT), str(store), json.dumps(asked)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stdout.readline() == "at work\n", running.stderr and running.stderr.read()
    return running


def ended(running: Running, seconds: float) -> bool:
    """Give a process so long; say whether it has ended."""
    try:
        running.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.fixture
def undisturbed(
    trmph_store: Path,
    copy_store: CopyStore,
    store_bytes: StoreBytes,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[dict[str, str], float]:
    """The bytes of a shuffle that nobody stopped, and how long it took."""
    monkeypatch.setattr(plan, "MOST_ROWS", MOST_ROWS)
    store = copy_store(trmph_store, "undisturbed")
    begin = time.perf_counter()
    shuffle_store(store, ShuffleOptions(**OPTIONS))
    return store_bytes(store), time.perf_counter() - begin


def finished_files(store: Path) -> dict[Path, int]:
    """Return the inode of each file that the ledger says is finished."""
    ledger = store / ".work" / "shuffle" / "shuffling_progress.json"
    names = json.loads(ledger.read_bytes())["done"] if ledger.exists() else {}
    return {store / name: (store / name).stat().st_ino for name in names if name.startswith("shuffled/")}


def test_killed_at_random_moments(
    trmph_store: Path,
    copy_store: CopyStore,
    store_bytes: StoreBytes,
    undisturbed: tuple[dict[str, str], float],
) -> None:
    expected, seconds = undisturbed
    store = copy_store(trmph_store)
    kills = 0
    for delay in uniform_draw(range(KILLS), 7) * seconds / 3:
        before = finished_files(store)
        running = start(store)
        was_done = ended(running, float(delay))
        running.kill()
        running.communicate(timeout=LONGEST)
        assert {path: path.stat().st_ino for path in before} == before
        if was_done:
            break
        kills += 1
    assert kills > 1
    shuffle_store(store, ShuffleOptions(**OPTIONS))
    assert store_bytes(store) == expected
    assert not (store / ".work" / "shuffle").exists()
    assert [path.name for path in store.rglob(".*") if path.name not in (".lock", ".work")] == []


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_ctrl_c_stops_it(
    trmph_store: Path,
    copy_store: CopyStore,
    store_bytes: StoreBytes,
    undisturbed: tuple[dict[str, str], float],
    part: float,
) -> None:
    expected, seconds = undisturbed
    store = copy_store(trmph_store)
    running = start(store)
    was_done = ended(running, part * seconds)
    running.send_signal(signal.SIGINT)
    begin = time.perf_counter()
    _, errors = running.communicate(timeout=LONGEST)
    assert time.perf_counter() - begin < 2 * PROMPTLY
    if not was_done and running.returncode:
        assert (running.returncode, without_nanobind(errors)) == (130, [])
    left = [path for path in store.rglob("*") if path.name.endswith(".tmp") or "cut-" in path.name]
    assert left == []
    shuffle_store(store, ShuffleOptions(**OPTIONS))
    assert store_bytes(store) == expected
