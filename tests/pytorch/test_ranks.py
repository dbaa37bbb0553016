"""Loaders that are made before the process group take their rank from it at the first iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from torch import distributed
from torch.utils.data import DataLoader

from hexdata import Loader
from hexdata.errors import ConfigError
from hexdata.loader import Mixture
from hexdata.torch import DeviceLoader, LoaderDataset, TorchLoader
from hexdata.webdataset import LoaderPipeline

WORLD = 2
CreateGroup = Callable[[int], None]


def make_loader(store: Path, batch_size: int = 90) -> Loader:
    return Loader(store, mode="games", seed=5, fields=("position_id",), batch_size=batch_size)


def make_mixture(store: Path, batch_size: int = 90) -> Mixture:
    return Mixture([make_loader(store), make_loader(store)], weights=(1, 2), batch_size=batch_size)


def data_loader(store: Path, start: str) -> Any:
    options: Any = {"batch_size": None, "num_workers": 2, "multiprocessing_context": start}
    return DataLoader(LoaderDataset(make_loader(store)), **options)


KINDS: dict[str, Callable[[Path], Iterable[Any]]] = {
    "TorchLoader": lambda store: TorchLoader(make_loader(store)),
    "TorchLoader, workers": lambda store: TorchLoader(
        make_loader(store), num_workers=2, multiprocessing_context="forkserver"
    ),
    "TorchLoader, mixture": lambda store: TorchLoader(make_mixture(store)),
    "DeviceLoader": lambda store: DeviceLoader(make_loader(store), "cpu"),
    "LoaderDataset": lambda store: LoaderDataset(make_loader(store)),
    "DataLoader, fork": lambda store: data_loader(store, "fork"),
    "DataLoader, forkserver": lambda store: data_loader(store, "forkserver"),
    "LoaderPipeline": lambda store: LoaderPipeline(make_loader(store)),
    "LoaderPipeline, positions": lambda store: LoaderPipeline(make_loader(store), samples="positions"),
}


def epochs_of(batches: Iterable[Any], count: int = 2) -> list[list[int]]:
    """Return the position ids of each epoch, without those that fill the last batches."""

    def ids_of(batch: Any) -> list[int]:
        ids = batch["position_id"].reshape(-1)
        return list((ids[~batch["padding"]] if "padding" in batch else ids).tolist())

    return [[number for batch in batches for number in ids_of(batch)] for _ in range(count)]


@pytest.fixture
def create_group(monkeypatch: pytest.MonkeyPatch) -> CreateGroup:
    """Return ``create(rank)``, which simulates a process group."""

    def create(rank: int) -> None:
        for name, value in (("is_initialized", True), ("get_rank", rank), ("get_world_size", WORLD)):
            monkeypatch.setattr(distributed, name, lambda group=None, value=value: value)

    return create


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_divide_every_epoch(kind: str, trmph_store: Path, create_group: CreateGroup) -> None:
    made = [KINDS[kind](trmph_store) for _ in range(WORLD)]
    by_rank = []
    for rank, batches in enumerate(made):
        create_group(rank)
        by_rank.append(epochs_of(batches))
    make_alone: Any = make_mixture if "mixture" in kind else make_loader
    for first, second, expected in zip(*by_rank, epochs_of(make_alone(trmph_store, 90 * WORLD)), strict=True):
        assert len(first) < len(expected)
        assert sorted(first + second) == sorted(expected)


@pytest.mark.parametrize("make", [TorchLoader, LoaderDataset])
def test_a_group_after_the_first_iteration_is_refused(
    make: Any, trmph_store: Path, create_group: CreateGroup
) -> None:
    """All ranks have received the same positions."""
    loader = make(make_loader(trmph_store))
    list(islice(loader, 1))
    create_group(0)
    with pytest.raises(ConfigError, match="after the first iteration"):
        next(iter(loader))
