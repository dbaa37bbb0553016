"""Tests of ``weights`` with workers and on a device, against a plain ``Loader``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hexdata.loader import Loader

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402 - only where PyTorch is

from hexdata.torch import DeviceLoader, LoaderDataset, TorchLoader, as_tensors  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

OPTIONS: dict[str, Any] = {
    "batch_size": 300,
    "seed": 5,
    "symmetry": True,
    "fields": ("board", "value", "position_id"),
    "weights": "CASE WHEN position_in_game < 9 THEN 2.5 ELSE position_id % 4 / 3 END",
}


@pytest.mark.parametrize("make", [DeviceLoader, TorchLoader])
def test_batches_equal_those_of_the_loader(trmph_store: Path, make: Any) -> None:
    plain = Loader(trmph_store, remainder="pad", **OPTIONS)
    more = {"device": "cpu"} if make is DeviceLoader else {"num_workers": 2}
    ours = make(Loader(trmph_store, remainder="pad", **OPTIONS), **more)
    for _ in range(2):
        assert len(ours) == len(plain)
        for batch, expected in zip(ours, plain, strict=True):
            tensors = as_tensors(expected)
            assert batch.keys() == tensors.keys()
            assert all(torch.equal(batch[name], tensor) for name, tensor in tensors.items())
        assert ours.epoch_digest == plain.epoch_digest


def test_a_loader_dataset_delivers_epochs_of_different_lengths(trmph_store: Path) -> None:
    count = Loader(trmph_store, split="val").positions
    weights = [0.5 if index < 81 else 0.0 for index in range(count)]
    options: dict[str, Any] = {"split": "val", "shuffle": True, "batch_size": 40, "fields": ("position_id",)}
    plain = Loader(trmph_store, weights=weights, **options)
    dataset = LoaderDataset(Loader(trmph_store, weights=weights, **options))
    batches = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    lengths = set()
    for _ in range(4):
        expected = [batch["position_id"].tolist() for batch in plain]
        assert [batch["position_id"].tolist() for batch in batches] == expected
        lengths.add(len(expected))
    assert lengths == {1, 2}
