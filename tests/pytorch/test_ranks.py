"""Loaders that are made before the process group take their rank from it at the first iteration."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hexdata import Loader
from hexdata.errors import ConfigError
from hexdata.loader import Mixture

torch = pytest.importorskip("torch")

from torch import distributed  # noqa: E402 - only where PyTorch is
from torch.utils.data import DataLoader  # noqa: E402

from hexdata.torch import DeviceLoader, LoaderDataset, TorchLoader  # noqa: E402
from hexdata.webdataset import LoaderPipeline  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # fork
]

ROOT = Path(__file__).parents[2]
WORLD = 2
TIMEOUT = 300
"""Seconds after which a process is assumed to hang."""


def make_loader(store: Path, **options: Any) -> Loader:
    return Loader(store, mode="games", seed=5, fields=("position_id",), **{"batch_size": 90, **options})


def make_mixture(store: Path, batch_size: int = 90) -> Mixture:
    return Mixture([make_loader(store), make_loader(store)], weights=(1, 2), batch_size=batch_size)


def data_loader(dataset: Any, start: str) -> Any:
    return DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=start)


KINDS: dict[str, Callable[[Path], Iterable[Any]]] = {
    "TorchLoader": lambda store: TorchLoader(make_loader(store)),
    "TorchLoader, workers": lambda store: TorchLoader(
        make_loader(store), num_workers=2, multiprocessing_context="forkserver"
    ),
    "TorchLoader, mixture": lambda store: TorchLoader(make_mixture(store)),
    "DeviceLoader": lambda store: DeviceLoader(make_loader(store), "cpu"),
    "LoaderDataset": lambda store: LoaderDataset(make_loader(store)),
    "DataLoader, fork": lambda store: data_loader(LoaderDataset(make_loader(store)), "fork"),
    "DataLoader, forkserver": lambda store: data_loader(LoaderDataset(make_loader(store)), "forkserver"),
    "LoaderPipeline": lambda store: LoaderPipeline(make_loader(store)),
    "LoaderPipeline, positions": lambda store: LoaderPipeline(make_loader(store), samples="positions"),
}


def epochs_of(batches: Iterable[Any], count: int = 2) -> list[list[int]]:
    """Return the position ids of each epoch."""
    return [
        [number for batch in batches for number in batch["position_id"].reshape(-1).tolist()]
        for _ in range(count)
    ]


class Group:
    """A process group that is only simulated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def create(self, rank: int) -> None:
        for name, value in (("is_initialized", True), ("get_rank", rank), ("get_world_size", WORLD)):
            self.monkeypatch.setattr(distributed, name, lambda group=None, value=value: value)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_divide_every_epoch(kind: str, trmph_store: Path, group: Group) -> None:
    made = [KINDS[kind](trmph_store) for _ in range(WORLD)]
    by_rank = []
    for rank, batches in enumerate(made):
        group.create(rank)
        by_rank.append(epochs_of(batches))
    make_alone = make_mixture if "mixture" in kind else make_loader
    alone = make_alone(trmph_store, batch_size=90 * WORLD)
    for first, second, expected in zip(*by_rank, epochs_of(alone), strict=True):
        assert len(first) < len(expected)
        assert sorted(first + second) == sorted(expected)


def test_a_copy_has_the_rank(trmph_store: Path, group: Group) -> None:
    """Frameworks pickle loaders for the processes that they start, before or after they create the group."""
    for make in (TorchLoader, LoaderDataset):
        loader = make(make_loader(trmph_store))
        before = pickle.loads(pickle.dumps(loader))
        group.create(1)
        assert before.loader.options.rank == 1
        assert pickle.loads(pickle.dumps(loader)).loader.options.rank == 1
        group.monkeypatch.undo()


def test_lengths_states_and_epochs_are_those_of_the_rank(trmph_store: Path, group: Group) -> None:
    ranked = make_loader(trmph_store, rank=1, world_size=WORLD)
    loader, dataset = TorchLoader(make_loader(trmph_store)), LoaderDataset(make_loader(trmph_store))
    loader.set_epoch(3)
    group.create(1)
    assert len(loader) == len(dataset) == len(ranked) < len(make_loader(trmph_store))
    assert (loader.epoch, loader.state_dict()["rank"], loader.state_dict()["world_size"]) == (3, 1, WORLD)
    for _ in zip(range(2), ranked, strict=False):
        pass
    loader.load_state_dict(ranked.state_dict())
    assert epochs_of(loader, 1) == epochs_of(ranked, 1)
    assert loader.epoch_digest == ranked.epoch_digest is not None


@pytest.mark.parametrize("make", [TorchLoader, LoaderDataset])
def test_a_group_after_the_first_iteration_is_refused(make: Any, trmph_store: Path, group: Group) -> None:
    """All ranks have received the same positions."""
    loader = make(make_loader(trmph_store))
    list(islice(loader, 1))
    group.create(0)
    with pytest.raises(ConfigError, match="initialised after the first iteration"):
        next(iter(loader))


def test_a_rank_that_was_given_stays(trmph_store: Path, group: Group) -> None:
    given = TorchLoader(make_loader(trmph_store), rank=2, world_size=3)
    own = TorchLoader(make_loader(trmph_store, rank=2, world_size=3))
    group.create(0)
    assert epochs_of(given) == epochs_of(own) == epochs_of(make_loader(trmph_store, rank=2, world_size=3))


@pytest.mark.parametrize("way", ["DataModule", "DataLoader"])
def test_lightning_trains_on_two_devices(way: str, trmph_store: Path, tmp_path: Path) -> None:
    """The trainer starts a second process and creates the process group in ``fit``."""
    pytest.importorskip("pytorch_lightning")
    script = Path(__file__).with_name("train_devices.py")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(trmph_store), str(tmp_path), way],
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    assert len(ranks[0]) == len(ranks[1])
    positions = make_loader(trmph_store).positions
    for epoch in range(2):
        ids = [each for steps in ranks for number, batch in steps if number == epoch for each in batch]
        assert len(ids) == len({*ids}) == positions
