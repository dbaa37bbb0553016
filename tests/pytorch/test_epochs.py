"""Tests of the ends of epochs in ``hexdata.torch``, for many ways to stop a loop."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hexdata.export import ExportOptions, export_shards
from hexdata.loader import Loader
from hexdata.shuffle import ShuffleOptions, shuffle_store
from tests.loader.loops import WAYS, Steps, check_loops, run_loop
from tests.pairs import every_pair

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402 - only where PyTorch is

from hexdata.torch import LoaderDataset, TorchLoader  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # fork
]

HERE = Path(__file__).parent
TIMEOUT = 600
"""Seconds after which a process is assumed to hang."""
STREAM = {"mode": "stream", "batch_size": 52, "streams": (4, 6), "window": 128}


@pytest.fixture(scope="module")
def shards(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return shards of 256 with some 2,000 positions. Do not modify them."""
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("torch") / "store")
    shuffle_store(store, ShuffleOptions(seed=3, threads=1))
    export_shards(store, ExportOptions(shard_size=256, block_size=64, workers=1))
    return store / "shards"


def make_loader(shards: Path, **options: Any) -> Loader:
    return Loader(shards, **{"batch_size": 50, "seed": 5, "fields": ("position_id",), **options})


def epoch_of(shards: Path, epoch: int, **options: Any) -> Steps:
    """Return the ids of each batch of an epoch, delivered by a plain ``Loader``."""
    loader = make_loader(shards, **options)
    loader.set_epoch(epoch)
    return [batch["position_id"].tolist() for batch in loader]


@pytest.mark.parametrize(
    ("options", "workers", "persistent"),
    [
        *(({}, *workers) for workers in ((0, False), (1, True), (2, True), (2, False), (3, True))),
        ({"remainder": "pad", "rank": 1, "world_size": 2}, 2, True),
        (STREAM, 0, False),
        (STREAM, 2, True),
    ],
)
def test_the_next_loop_continues_after_the_last_batch(shards, options, workers, persistent):
    def make() -> TorchLoader:
        loader = make_loader(shards, **options)
        return TorchLoader(loader, num_workers=workers, persistent_workers=persistent and workers > 0)

    @cache
    def expected(epoch: int) -> Steps:
        return epoch_of(shards, epoch, **options)

    assert check_loops(make, expected, seed=workers, loops=8) > 1


@every_pair(before=[0, 2], after=[0, 3], way=WAYS)
def test_a_state_at_the_end_of_an_epoch_resumes_with_other_workers(shards, before, after, way):
    loader = TorchLoader(make_loader(shards), num_workers=before)
    _, state = run_loop(loader, len(loader), way)
    assert (state["epoch"], state["batch"]) == (0, len(loader))
    resumed = TorchLoader(make_loader(shards), num_workers=after)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.epoch == 1
    assert [batch["position_id"].tolist() for batch in resumed] == epoch_of(shards, 1)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_your_own_data_loader_has_no_empty_epoch(shards, workers, persistent):
    dataset = LoaderDataset(make_loader(shards))
    batches = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=persistent)
    for epoch in range(3):
        got = [batch["position_id"].tolist() for _, batch in zip(range(len(dataset)), batches)]  # noqa: B905
        assert got == epoch_of(shards, epoch)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("origin", ["loader", "state"])
def test_a_dataset_at_the_end_of_an_epoch_runs_the_next_epochs(shards, workers, origin):
    loader = make_loader(shards)
    loader.set_epoch(1, len(loader))
    if origin == "loader":
        dataset = LoaderDataset(loader)
    else:
        dataset = LoaderDataset(make_loader(shards))
        dataset.load_state_dict(loader.state_dict())
    batches = DataLoader(dataset, batch_size=None, num_workers=workers)
    for epoch in (2, 3):
        assert [batch["position_id"].tolist() for batch in batches] == epoch_of(shards, epoch)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_continues_after_exactly_the_last_batch(shards, workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return torchdata.StatefulDataLoader(
            LoaderDataset(make_loader(shards)), batch_size=None, num_workers=workers
        )

    batches = make()
    for epoch in range(2):
        got = [batch["position_id"].tolist() for batch in islice(batches, len(batches.dataset))]
        assert got == epoch_of(shards, epoch)
    resumed = make()
    resumed.load_state_dict(batches.state_dict())
    got = [batch["position_id"].tolist() for batch in resumed]
    if workers:  # torchdata first resumes the old epoch, which has no batches left
        assert got == []
        got = [batch["position_id"].tolist() for batch in resumed]
    assert got == epoch_of(shards, 2)


@pytest.mark.skipif(not find_spec("pytorch_lightning"), reason="needs PyTorch Lightning")
def test_lightning_trains_on_every_epoch(shards):
    """Without workers, with new ones for each epoch and with persistent ones, in one process."""
    ways = ["0,0", "2,0", "2,1"]
    command = [sys.executable, "-W", "ignore", str(HERE / "train_lightning.py"), str(shards), "3", *ways]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("[[")]
    for way, line in zip(ways, lines, strict=True):
        steps = json.loads(line)
        for epoch in range(3):
            assert [ids for number, ids in steps if number == epoch] == epoch_of(shards, epoch), way
