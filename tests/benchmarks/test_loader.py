"""The training loader compared with other loaders and with memory, and opening large splits.

Every loader runs in its own process and delivers the same batches: 1,024 positions with float32 boards
(3, 13, 13), dense policies and values. ``peers.py`` shows how the other loaders are set up.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).parent
POSITIONS = 1_000_000
MANY = 97_000_000

PEERS = {
    "litdata": 5,
    "datasets": 4,
    "datasets-streaming": 20,
    "webdataset": 20,
    "mosaicml-streaming": 20,
    "grain": 10,
    "torch-items": 5,
    "torch-batches": 4,
    "torch-batches-alone": 1,
}
"""Minimum ratio of exact mode to each other loader."""
STREAM_FACTOR = 3
"""Minimum ratio of stream mode to the two fastest libraries."""
SHARE_OF_MEMORY = {"exact": 0.25, "stream": 0.15}
"""Minimum ratio to unpacking the same arrays from memory, in order."""
SHARE_IN_WORKERS = {"workers": 0.04, "workers-packed": 0.4}
"""Minimum ratio of workers to one process without workers. Workers and main process share two cores."""
MOST_SECONDS = 5.0
"""Maximum seconds to open and to resume so large a split; the target is 1 on an idle machine."""
MOST_LATER = 5
"""Maximum ratio of the first batch after a resume to the first batch of an epoch."""
MOST_MEMORY = 300_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_script) -> Path:
    """Write shards of ``POSITIONS`` random positions, and the same positions as plain records."""
    path = tmp_path_factory.mktemp("positions")
    run_script(HERE / "positions.py", path, POSITIONS)
    return path


@pytest.mark.parametrize("name", ["memory", "exact", "stream", "workers", "workers-packed", *PEERS])
def test_all_deliver_the_same(contest, check_sums, name):
    check_sums(contest(name).sums)


@pytest.mark.parametrize("peer", PEERS)
def test_exact_against(race, peer):
    assert race("exact", peer) > PEERS[peer]


@pytest.mark.parametrize("peer", ["litdata", "datasets"])
def test_stream_against(race, peer):
    assert race("stream", peer) > STREAM_FACTOR


@pytest.mark.parametrize("mode", SHARE_OF_MEMORY)
def test_against_memory(race, mode):
    assert race(mode, "memory", rounds=7) > SHARE_OF_MEMORY[mode]


@pytest.mark.parametrize("workers", SHARE_IN_WORKERS)
def test_workers_against_none(race, workers):
    assert race(workers, "exact") > SHARE_IN_WORKERS[workers]


def test_opening_and_resuming_among_many(tmp_path, run_script, report):
    run_script(HERE / "positions.py", tmp_path, MANY, "hollow")
    found = json.loads(run_script(HERE / "opening.py", tmp_path, 5))
    assert found["positions"] == MANY
    start, middle, end = found["first batch"]
    report(
        f"{MANY:,} positions: opened in {found['open']:.2f} s, the first batch {start:.2f} s later, "
        f"{middle:.2f} s in the middle, {end:.2f} s at 99 %; {found['memory'] / 1e6:.0f} MB, "
        f"{found['before'] / 1e6:.0f} MB of it before"
    )
    assert found["open"] + max(start, middle, end) < MOST_SECONDS
    assert max(middle, end) < MOST_LATER * start
    assert found["memory"] < MOST_MEMORY
    shutil.rmtree(tmp_path)
