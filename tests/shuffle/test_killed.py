"""A shuffle in a separate process that is killed at random moments, or interrupted, and run again."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hexdata.order import uniform_draw
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from tests.ledger_units import read_units
from tests.pairs import FULL
from tests.shuffle.shuffle_script import AHEAD

if TYPE_CHECKING:
    from tests.conftest import CopyStore, StoreBytes

SCRIPT = Path(__file__).parent / "shuffle_script.py"
PASSES = 5
OPTIONS = {"seed": 5, "buckets": 60, "threads": 2}
KILLS = 4 if FULL else 2
MOST_BUCKETS = 6
"""Maximum number of buckets before a kill, so that some work remains after all kills."""
TIMEOUT_SECONDS = 300.0
"""Seconds after which a process that does not end fails the test."""

Running = subprocess.Popen[str]


def without_nanobind(errors: str) -> list[str]:
    """Remove the lines that DuckDB's binding prints if a process is interrupted while importing it."""
    noise = ("nanobind:", " - leaked", " - ...", "See https://nanobind")
    return [line for line in errors.splitlines() if not line.startswith(noise)]


def start(store: Path, buckets: int) -> Running:
    """Start a shuffle that does not end by itself, and wait until this number of buckets is written."""
    settings = {"options": OPTIONS, "passes": PASSES, "buckets": buckets}
    command = [sys.executable, str(SCRIPT), str(store), json.dumps(settings)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    running = subprocess.Popen(command, text=True, **pipes)
    assert running.stdout is not None
    assert running.stdout.readline() == "at work\n", running.stderr and running.stderr.read()
    return running


@pytest.fixture(scope="module")
def undisturbed(
    trmph_store: Path, tmp_path_factory: pytest.TempPathFactory, store_bytes: StoreBytes
) -> tuple[dict[str, str], int]:
    """The bytes and the number of buckets of an uninterrupted shuffle."""
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("undisturbed") / "store")
    result = shuffle_store(store, ShuffleOptions(**OPTIONS))
    return store_bytes(store), sum(result.buckets.values())


def finished_files(store: Path) -> dict[Path, int]:
    """Return the inode of each finished file in the ledger."""
    names = read_units(store / ".work" / "shuffle" / "progress.json")
    return {store / name: (store / name).stat().st_ino for name in names if name.startswith("shuffled/")}


def test_killed_at_random_moments(
    trmph_store: Path,
    copy_store: CopyStore,
    store_bytes: StoreBytes,
    undisturbed: tuple[dict[str, str], int],
) -> None:
    expected, buckets = undisturbed
    assert buckets > KILLS * (MOST_BUCKETS + AHEAD)
    store = copy_store(trmph_store)
    for draw in uniform_draw(range(KILLS), 7).tolist():
        before = finished_files(store)
        running = start(store, 1 + int(draw * MOST_BUCKETS))
        running.kill()
        running.communicate(timeout=TIMEOUT_SECONDS)
        assert running.returncode == -signal.SIGKILL
        assert {path: path.stat().st_ino for path in before} == before
        assert "shuffle" not in Store.open(store).manifest.stages
    assert shuffle_store(store, ShuffleOptions(**OPTIONS)).resumed > 0
    assert store_bytes(store) == expected
    assert not (store / ".work" / "shuffle").exists()
    assert [path.name for path in store.rglob(".*") if path.name not in (".lock", ".work")] == []


@pytest.mark.parametrize("part", [0.0, 0.5] if FULL else [0.5])
def test_ctrl_c_stops_the_shuffle_cleanly(
    trmph_store: Path,
    copy_store: CopyStore,
    store_bytes: StoreBytes,
    undisturbed: tuple[dict[str, str], int],
    part: float,
) -> None:
    expected, buckets = undisturbed
    store = copy_store(trmph_store)
    running = start(store, max(1, int(part * buckets)))
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=TIMEOUT_SECONDS)
    assert (running.returncode, without_nanobind(errors)) == (130, [])
    left = [
        path for path in store.rglob("*") if path.name.endswith(".tmp") or path.name.startswith("hexdata-")
    ]
    assert left == []
    assert shuffle_store(store, ShuffleOptions(**OPTIONS)).resumed > 0
    assert store_bytes(store) == expected
