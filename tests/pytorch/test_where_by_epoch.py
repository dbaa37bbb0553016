"""Tests of ``set_epoch(epoch, where=…)`` with worker processes and on a device."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hexdata.errors import ConfigError
from hexdata.loader import Loader

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402 - only where PyTorch is

from hexdata.torch import DeviceLoader, LoaderDataset, TorchLoader  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

PLAN = ((1, "position_in_game < 9"), (2, "move % 2 = 1"), (3, None))


def make(store: Path, **options: Any) -> Loader:
    return Loader(store, batch_size=100, seed=3, fields=("position_id",), **options)


def ids_of(batches: Any) -> list[list[int]]:
    return [batch["position_id"].tolist() for batch in batches]


def epoch_of(store: Path, epoch: int, where: str | None) -> list[list[int]]:
    loader = make(store, where=where)
    loader.set_epoch(epoch)
    return ids_of(loader)


@pytest.mark.parametrize(("kind", "persistent"), [("workers", True), ("workers", False), ("device", True)])
def test_running_workers_and_devices_follow(trmph_store: Path, kind: str, persistent: bool) -> None:
    inner = make(trmph_store)
    loader: Any = (
        DeviceLoader(inner, "cpu")
        if kind == "device"
        else TorchLoader(inner, num_workers=2, persistent_workers=persistent)
    )
    assert ids_of(loader) == epoch_of(trmph_store, 0, None)
    for epoch, where in PLAN:
        loader.set_epoch(epoch, where=where)
        expected = epoch_of(trmph_store, epoch, where)
        assert len(loader) == len(expected)
        assert ids_of(islice(loader, 2)) == expected[:2]
        state = loader.state_dict()
        assert ids_of(loader) == expected[2:]
        resumed = TorchLoader(make(trmph_store))
        resumed.load_state_dict(state)
        assert ids_of(resumed) == expected[2:]


def test_a_change_within_an_iteration_is_refused(trmph_store: Path) -> None:
    loader = TorchLoader(make(trmph_store), num_workers=1)
    with pytest.raises(ConfigError, match="was changed while iterating"):  # noqa: PT012 - the loop raises
        for _ in loader:
            loader.set_epoch(0, where="move % 2 = 1")


def test_the_workers_of_a_data_loader_follow(trmph_store: Path) -> None:
    dataset = LoaderDataset(make(trmph_store))
    batches = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    assert ids_of(batches) == epoch_of(trmph_store, 0, None)
    for epoch, where in PLAN:
        dataset.set_epoch(epoch, where=where)
        assert ids_of(batches) == epoch_of(trmph_store, epoch, where)
        assert ids_of(batches) == epoch_of(trmph_store, epoch + 1, where)


def test_a_condition_that_does_not_fit_is_refused(trmph_store: Path) -> None:
    dataset = LoaderDataset(make(trmph_store))
    with pytest.raises(ConfigError, match="where is too long for running workers"):
        dataset.set_epoch(1, where=" OR ".join(f"position_id = {number}" for number in range(1000)))
    assert ids_of(dataset) == epoch_of(trmph_store, 0, None)
