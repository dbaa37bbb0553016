"""Tests of ``transform``: the function applied to each batch of a loader or a mixture."""

from __future__ import annotations

import pickle
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.errors import ConfigError
from hexdata.loader import Loader, Mixture

if TYPE_CHECKING:
    from tests.shard_folder import ShardFolder

FIELDS = ("position_id", "value", "board")


def centred(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the ids, the values from -1 to 1, and the number of stones in another order of fields."""
    return {
        "stones": batch["board"].sum(axis=(1, 2, 3)),
        "value": 1 - 2 * batch["value"],
        "position_id": batch["position_id"],
    }


def fail_at_id(batch: dict[str, Any]) -> dict[str, Any]:
    if 40 in batch["position_id"]:
        raise ValueError("id 40")
    return batch


def arrays(batches: Any) -> list[dict[str, bytes]]:
    return [{name: array.tobytes() for name, array in batch.items()} for batch in batches]


@pytest.mark.parametrize("mode", ["exact", "stream"])
@pytest.mark.parametrize("threads", [1, 3])
def test_batches_are_those_that_the_function_returns(shards: ShardFolder, mode: Any, threads: int) -> None:
    options: dict[str, Any] = {"mode": mode, "batch_size": 24, "fields": FIELDS, "remainder": "short"}
    plain, loader = Loader(shards.path, **options), Loader(shards.path, **options, transform=centred)
    assert arrays(loader) == arrays(map(centred, plain))
    assert loader.epoch_digest == plain.epoch_digest
    assert loader.state_dict() == plain.state_dict()


def test_the_function_receives_the_padding_and_may_drop_ids(shards: ShardFolder) -> None:
    loader = Loader(shards.path, batch_size=100, remainder="pad", transform=lambda b: {"p": b["padding"]})
    assert [list(batch) for batch in loader] == [["p"], ["p"]]
    assert loader.epoch_digest == digest_of(Loader(shards.path, batch_size=100, remainder="pad"))


def digest_of(loader: Loader) -> str | None:
    for _ in loader:
        pass
    return loader.epoch_digest


def test_an_exception_names_the_batch_and_is_raised_again_by_the_next_iteration(shards: ShardFolder) -> None:
    loader = Loader(shards.path, batch_size=20, fields=FIELDS, seed=3, transform=fail_at_id)
    plain = Loader(shards.path, batch_size=20, fields=FIELDS, seed=3)
    loader.set_epoch(2)
    plain.set_epoch(2)
    (step,) = (step for step, batch in enumerate(plain) if 40 in batch["position_id"])
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"batch {step} of epoch 2") as caught:
            list(loader)
        assert loader.batch == step
        assert "ValueError: id 40" in str(caught.value)
        assert "test_transform.py, line" in str(caught.value)


@pytest.mark.parametrize("result", [None, [1], {"value": 1.5}, {7: np.zeros(3)}])
def test_other_results_are_refused(shards: ShardFolder, result: Any) -> None:
    with pytest.raises(ConfigError, match="transform returned no batch"):
        next(iter(Loader(shards.path, transform=lambda batch: result)))


def test_something_else_than_a_function_is_refused(shards: ShardFolder) -> None:
    with pytest.raises(ConfigError, match="transform cannot be used"):
        Loader(shards.path, transform="centred")  # type: ignore[arg-type]


def test_a_loader_is_resumed_and_pickled_with_its_function(shards: ShardFolder) -> None:
    loader = Loader(shards.path, batch_size=20, fields=FIELDS, transform=centred)
    whole = arrays(loader)
    loader.set_epoch(0)
    for _ in islice(loader, 3):
        pass
    copy = pickle.loads(bytes(ForkingPickler.dumps(loader)))
    assert arrays(copy) == arrays(loader.for_rank(0, 1)) == whole[3:]


def test_a_function_that_cannot_be_pickled_is_named(shards: ShardFolder) -> None:
    loader = Loader(shards.path, transform=lambda batch: batch)
    assert loader.for_rank(0, 1).transform is loader.transform
    with pytest.raises(ConfigError, match="transform cannot be sent to worker processes"):
        pickle.dumps(loader)


def test_a_mixture_applies_its_function_to_whole_batches(shards: ShardFolder) -> None:
    def mixture(**options: Any) -> Mixture:
        loaders = [Loader(shards.path, fields=FIELDS, seed=seed) for seed in range(2)]
        return Mixture(loaders, (1, 2), batch_size=30, **options)

    assert arrays(mixture(transform=centred)) == arrays(map(centred, mixture()))
    with pytest.raises(ConfigError, match=r"of epoch 0.*ValueError"):
        list(mixture(transform=fail_at_id))
    with pytest.raises(ConfigError, match="a loader of a mixture cannot have a transform"):
        Mixture([Loader(shards.path, transform=centred)], (1,))
