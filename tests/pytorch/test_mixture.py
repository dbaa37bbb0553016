"""Tests of ``TorchLoader`` over a ``Mixture``, against the mixture itself."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hexdata.errors import ConfigError
from hexdata.loader import Loader, Mixture

torch = pytest.importorskip("torch")

from hexdata.torch import DeviceLoader, LoaderDataset, TorchLoader, as_tensors  # noqa: E402 - only where PyTorch is

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "value": batch["value"] * 2}


def make(store: Path, batch_size: int = 120, **options: Any) -> Mixture:
    common: dict[str, Any] = {"fields": ("board", "value", "position_id"), "symmetry": True}
    loaders = [
        Loader(store, seed=1, weights="position_id % 3 / 2", **common),
        Loader(store, split="val", shuffle=True, seed=2, **common),
    ]
    return Mixture(loaders, (3, 1), batch_size=batch_size, seed=4, **options)


def assert_equal(ours: Any, expected: Any) -> None:
    for batch, arrays in zip(ours, expected, strict=True):
        tensors = as_tensors(arrays)
        assert batch.keys() == tensors.keys()
        assert all(torch.equal(batch[name], tensor) for name, tensor in tensors.items())


def ids_of(batches: Any) -> list[list[int]]:
    return [batch["position_id"].tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_and_states_are_those_of_the_mixture(trmph_store: Path, workers: int) -> None:
    plain = make(trmph_store, transform=double)
    loader = TorchLoader(make(trmph_store, transform=double), num_workers=workers)
    for epoch in range(2):
        assert (loader.epoch, loader.batch, len(loader)) == (epoch, 0, len(plain))
        assert_equal(islice(loader, 2), islice(plain, 2))
        assert loader.state_dict() == plain.state_dict()
        assert_equal(loader, plain)
        assert loader.state_dict() == plain.state_dict()
    loader.set_epoch(7)
    plain.set_epoch(7)
    assert_equal(islice(loader, 2), islice(plain, 2))
    assert loader.epoch_digest is None


def test_every_step_can_be_resumed(trmph_store: Path) -> None:
    mixture = make(trmph_store, 400)
    whole, states = [], [mixture.state_dict()]
    for batch in mixture:
        whole.append(batch["position_id"].tolist())
        states.append(mixture.state_dict())
    loader = TorchLoader(make(trmph_store, 400), num_workers=1)
    for step, state in enumerate(states):
        loader.load_state_dict(json.loads(json.dumps(state)))
        if step < len(whole):
            assert ids_of(loader) == whole[step:]
        assert (loader.epoch, loader.batch) == (1, 0)


def test_ranks_share_the_steps(trmph_store: Path) -> None:
    whole = ids_of(make(trmph_store, 240))
    ranks = [TorchLoader(make(trmph_store, 80), rank=rank, world_size=3) for rank in range(3)]
    assert [len(rank) for rank in ranks] == [len(whole)] * 3
    parts = [ids_of(rank) for rank in ranks]
    assert [[i for ids in step for i in ids] for step in zip(*parts, strict=True)] == whole
    state = ranks[0].state_dict()
    other = TorchLoader(make(trmph_store, 120), rank=1, world_size=2)
    other.load_state_dict(state)
    assert other.epoch == 1
    within = make(trmph_store)
    next(iter(within))
    with pytest.raises(ConfigError, match="the world size of a mixture cannot change within an epoch"):
        within.for_rank(0, 2)


def test_a_mixture_is_pickled_at_its_position(trmph_store: Path) -> None:
    mixture = make(trmph_store)
    for _ in islice(mixture, 3):
        pass
    assert ids_of(pickle.loads(pickle.dumps(mixture))) == ids_of(mixture)


def test_steps_are_recorded_in_order(trmph_store: Path) -> None:
    mixture = make(trmph_store, 600)
    first, second, *_ = deliveries = list(mixture.deliveries())
    with pytest.raises(ConfigError, match="steps must be recorded in order"):
        mixture.record(second.step, second.position_ids)
    for step, ids, _ in deliveries:
        mixture.record(step, ids)
    assert (mixture.epoch, mixture.batch) == (0, len(mixture))
    mixture.record(first.step, first.position_ids)  # of the next epoch
    assert (mixture.epoch, mixture.batch) == (1, 1)
    with pytest.raises(ConfigError, match="batch is beyond the end of the epoch"):
        mixture.set_epoch(2, len(mixture) + 1)


def test_what_a_mixture_cannot_do_is_refused(trmph_store: Path) -> None:
    mixture: Any = make(trmph_store)
    for kind in (lambda given: DeviceLoader(given, "cpu"), LoaderDataset):
        with pytest.raises(ConfigError, match="loader cannot be used"):
            kind(mixture)
    with pytest.raises(ConfigError, match="a mixture keeps the conditions of its loaders"):
        TorchLoader(mixture).set_epoch(1, where="move = 1")
    with pytest.raises(
        ConfigError, match=r"loader cannot be used.*a hexdata.Loader or a hexdata.loader.Mixture"
    ):
        TorchLoader("store")  # type: ignore[arg-type]
