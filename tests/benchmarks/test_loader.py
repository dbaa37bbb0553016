"""The training loader compared with other loaders, with other modes and with memory.

Every loader runs in its own process and delivers the same batches: 1,024 positions with float32 boards
(3, 13, 13), dense policies and values. ``peers.py`` shows how the other loaders are set up.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.export import ExportOptions, export_shards
from hexdata.loader import Loader
from hexdata.shuffle import ShuffleOptions, shuffle_store

N = 13
HERE = Path(__file__).parent
POSITIONS = 1_000_000
FIELDS = ("board", "move", "value", "player_to_move")
"""The fields of a record in their order."""

RACES: dict[str, dict[tuple[str, str], float]] = {
    "random positions": {
        ("exact", "litdata"): 5,
        ("exact", "datasets"): 4,
        ("exact", "datasets-streaming"): 3,
        ("exact", "webdataset"): 20,
        ("exact", "mosaicml-streaming"): 20,
        ("exact", "grain"): 10,
        ("exact", "torch-items"): 5,
        ("exact", "torch-batches"): 4,
        ("exact", "torch-batches-alone"): 1,
        ("stream", "litdata"): 3,
        ("stream", "datasets"): 3,
        # Unpacking the same arrays from memory, in order.
        ("exact", "memory"): 0.25,
        ("stream", "memory"): 0.15,
    },
    "a store of games": {
        ("games", "exact-of-store"): 0.9,
        ("games", "litdata"): 8,
        ("games", "datasets"): 4,
        ("games-uint8", "exact-of-store"): 1.2,
        ("games-fill", "exact-of-store"): 2,
        ("games-fill-threads", "exact-of-store"): 1,
    },
}
"""Least ratio of the rates of two loaders, by the data that they read."""
CASES = [(data, *pair) for data, pairs in RACES.items() for pair in pairs]
BOARDS = {
    "games-uint8": ((3, N, N), "|u1"),
    "games-fill": ((2, N, N), "|u1"),
    "games-fill-threads": ((2, N, N), "|u1"),
}
"""Shape and dtype of boards other than float32 (3, 13, 13); made of fill rows where these are delivered."""


class Contestant:
    """A loader in its own process, ready to run epochs, with the checksums of its first epoch."""

    def __init__(self, name: str, folder: Path) -> None:
        command = [sys.executable, str(HERE / "contestant.py"), name, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.missing = self._answer().get("missing")
        self.sums = {} if self.missing else self._do("check")

    @property
    def positions(self) -> int:
        return int(self.sums["positions"])

    def run(self) -> None:
        """Deliver an epoch."""
        assert self._do("run") == {"positions": self.positions}

    def _do(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the contestant died"
        answer: dict[str, Any] = json.loads(line)
        return answer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, store: Path) -> dict[str, Path]:
    """Data of both kinds, each with the same positions as plain records in ``records.npy``."""
    made = {data: tmp_path_factory.mktemp("positions") for data in RACES}
    command = [sys.executable, HERE / "positions.py", made["random positions"], str(POSITIONS)]
    subprocess.run(command, check=True)
    copy = shutil.copytree(store, made["a store of games"] / "store")
    shuffle_store(copy, ShuffleOptions())
    export_shards(copy, ExportOptions(workers=1))
    rows = []
    for batch in Loader(copy, mode="exact", shuffle=False, board="packed", fields=FIELDS):
        columns = (np.ascontiguousarray(batch[name]) for name in FIELDS)
        rows.append(np.hstack([column.reshape(len(column), -1).view(np.uint8) for column in columns]))
    np.save(copy.parent / "records.npy", np.concatenate(rows))
    return made


@pytest.fixture(scope="module")
def contest(folders: dict[str, Path]) -> Iterator[Callable[[str, str], Contestant]]:
    """Return ``contest(data, name)``: the loader of that name, started at the first call."""
    started: dict[tuple[str, str], Contestant] = {}

    def start(data: str, name: str) -> Contestant:
        if (data, name) not in started:
            started[data, name] = Contestant(name, folders[data])
        if started[data, name].missing:
            pytest.skip(f"{started[data, name].missing} is not installed")
        return started[data, name]

    yield start
    for contestant in started.values():
        contestant.process.communicate()


@pytest.mark.parametrize(("data", "name"), sorted({(data, name) for data, *pair in CASES for name in pair}))
def test_all_deliver_the_same(contest, folders, data, name):
    """The checksums of an epoch are those of the records: board 43 bytes, move 2, value 4, player 1."""
    sums = contest(data, name).sums
    records = np.load(folders[data] / "records.npy")[: sums["positions"]]
    shape, dtype = BOARDS.get(name, ((3, N, N), "<f4"))
    assert sums["shapes"] == [[dtype, [*shape], "<f4", [N * N], "<f4"]]
    bits = np.zeros(344)
    for start in range(0, len(records), 100_000):
        bits += np.unpackbits(records[start : start + 100_000, :43], axis=1).sum(axis=0, dtype=np.int64)
    moves = records[:, 43].astype(int) + 256 * records[:, 44].astype(int)
    assert np.array_equal(np.ravel(sums["planes"][:2]), bits[:338])
    for plane in sums["planes"][2:]:
        assert np.array_equal(plane, np.full((N, N), records[:, 49].sum(dtype=int)))
    assert np.array_equal(sums["policy"], np.bincount(moves[moves < 65535], minlength=169))
    values = np.ascontiguousarray(records[:, 45:49]).view("<f4")
    assert sums["value"] == pytest.approx(values.sum(dtype=np.float64), rel=1e-9)


@pytest.mark.parametrize(("data", "ours", "rival"), CASES)
def test_rate(contest, versus, data, ours, rival):
    first, second = contest(data, ours), contest(data, rival)
    ratio = versus(first.run, second.run, first.positions, 3, second.positions)
    assert ratio > RACES[data][ours, rival]
