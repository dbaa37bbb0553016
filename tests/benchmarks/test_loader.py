"""The training loader compared with other loaders and with memory, and opening large splits.

Every loader runs in its own process and delivers the same batches: 1,024 positions with float32 boards
(3, 13, 13), dense policies and values. ``peers.py`` shows how the other loaders are set up.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
POSITIONS = 1_000_000
MANY = 97_000_000
ROUNDS = 3

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


class Contestant:
    """A loader in its own process, ready to run epochs."""

    def __init__(self, name: str, folder: Path) -> None:
        command = [sys.executable, str(HERE / "contestant.py"), name, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.missing: str | None = None
        self.sums: dict[str, Any] = {}

    def make_ready(self) -> None:
        """Wait until the loader is ready, and store the checksums of its first epoch."""
        self.missing = self._answer().get("missing")
        if not self.missing:
            self.sums = self._do("check")

    @property
    def positions(self) -> int:
        """Return the number of positions of an epoch."""
        return int(self.sums["positions"])

    def run(self) -> None:
        """Deliver an epoch."""
        assert self._do("run") == {"positions": self.positions}

    def close(self) -> None:
        self._process.communicate()

    def _do(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the contestant died"
        answer: dict[str, Any] = json.loads(line)
        return answer


def run_script(*arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write shards of ``POSITIONS`` random positions, and the same positions as plain records."""
    path = tmp_path_factory.mktemp("positions")
    run_script(HERE / "positions.py", path, POSITIONS)
    return path


@pytest.fixture(scope="module")
def contest(folder: Path) -> Iterator[Any]:
    """Return ``contest(name)``: the loader of that name, started at the first call."""
    started: dict[str, Contestant] = {}

    def start(name: str) -> Contestant:
        if name not in started:
            started[name] = Contestant(name, folder)
            started[name].make_ready()
        if started[name].missing:
            pytest.skip(f"{started[name].missing} is not installed")
        return started[name]

    yield start
    for contestant in started.values():
        contestant.close()


@pytest.fixture
def race(contest, versus):
    """Return ``race(ours, rival)``: the ratio of the two rates, after checking what both deliver."""

    def run(ours: str, rival: str, rounds: int = ROUNDS) -> float:
        first, second = contest(ours), contest(rival)
        factor: float = versus(first.run, second.run, first.positions, rounds, second.positions)
        return factor

    return run


@pytest.fixture
def records(folder: Path) -> np.ndarray:
    """Return the packed positions, uint8 (n, 50): board 43, move 2, value 4, player to move 1."""
    return np.load(folder / "records.npy")


def check_sums(sums: dict[str, Any], records: np.ndarray) -> None:
    """Check by checksums that an epoch contained exactly these positions."""
    bits = np.zeros(344)
    for start in range(0, len(records), 100_000):
        bits += np.unpackbits(records[start : start + 100_000, :43], axis=1).sum(axis=0, dtype=np.int64)
    moves = records[:, 43].astype(int) + 256 * records[:, 44].astype(int)
    values = np.ascontiguousarray(records[:, 45:49]).view("<f4")
    assert sums["shapes"] == [["<f4", [3, 13, 13], "<f4", [169], "<f4"]]
    assert np.array_equal(np.ravel(sums["planes"][:2]), bits[:338])
    assert np.array_equal(sums["planes"][2], np.full((13, 13), records[:, 49].sum(dtype=int)))
    assert np.array_equal(sums["policy"], np.bincount(moves[moves < 65535], minlength=169))
    assert sums["value"] == pytest.approx(values.sum(dtype=np.float64), rel=1e-9)


@pytest.mark.parametrize("name", ["memory", "exact", "stream", "workers", "workers-packed", *PEERS])
def test_all_deliver_the_same(contest, records, name):
    contestant = contest(name)
    check_sums(contestant.sums, records[: contestant.positions])


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


def test_opening_and_resuming_among_many(tmp_path, report):
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
