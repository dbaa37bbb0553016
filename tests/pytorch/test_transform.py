"""Tests of ``transform`` in the workers of a ``TorchLoader``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.errors import ConfigError
from hexdata.loader import Loader

torch = pytest.importorskip("torch")

from hexdata.torch import DeviceLoader, TorchLoader  # noqa: E402 - only where PyTorch is

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

FIELDS = ("position_id", "value")


def with_process(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the values from -1 to 1, and the process that computed them."""
    return {"value": 1 - 2 * batch["value"], "process": np.array([os.getpid()])}


def failing(batch: dict[str, Any]) -> dict[str, Any]:
    raise KeyError("komi")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_workers_apply_the_function(trmph_store: Path, workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 700, "fields": FIELDS}
    plain = Loader(trmph_store, **options)
    loader = TorchLoader(Loader(trmph_store, **options, transform=with_process), num_workers=workers)
    processes = set()
    for batch, expected in zip(loader, plain, strict=True):
        assert torch.equal(batch["value"], torch.from_numpy(1 - 2 * expected["value"]))
        processes.add(int(batch["process"]))
    assert len(processes) == max(workers, 1)
    assert (os.getpid() in processes) == (workers == 0)
    assert loader.epoch_digest == plain.epoch_digest


def test_an_exception_in_a_worker_names_the_batch(trmph_store: Path) -> None:
    loader = TorchLoader(Loader(trmph_store, batch_size=64, transform=failing), num_workers=1)
    with pytest.raises(ConfigError, match=r"batch 0 of epoch 0.*KeyError: 'komi'"):
        next(iter(loader))


def test_spawned_workers_need_a_function_that_can_be_pickled(trmph_store: Path) -> None:
    local = Loader(trmph_store, transform=lambda batch: batch)
    loader = TorchLoader(local, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(ConfigError, match="transform cannot be sent to worker processes"):
        next(iter(loader))


def test_a_device_loader_refuses_a_function(trmph_store: Path) -> None:
    with pytest.raises(ConfigError, match="a DeviceLoader cannot apply a transform"):
        DeviceLoader(Loader(trmph_store, transform=with_process), "cpu")
