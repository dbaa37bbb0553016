"""Tests of ``transform``: the function applied to each batch of a loader or a mixture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.errors import ConfigError
from hexdata.loader import Loader, Mixture
from tests.pairs import every_pair

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


@every_pair(mode=["exact", "stream"], threads=[1, 3], remainder=["short", "pad"])
def test_batches_are_those_that_the_function_returns(
    shards: ShardFolder, mode: Any, threads: int, remainder: Any
) -> None:
    """It may also change the arrays in place."""
    options: dict[str, Any] = {"mode": mode, "batch_size": 24, "fields": FIELDS, "remainder": remainder}
    plain = Loader(shards.path, **options)
    loader, clearing = (
        Loader(shards.path, **options, threads=threads, transform=each) for each in (centred, cleared)
    )
    assert arrays(loader) == arrays(map(centred, plain))
    assert len(list(clearing)) == len(plain)
    assert loader.epoch_digest == clearing.epoch_digest == plain.epoch_digest
    assert loader.state_dict() == plain.state_dict()


def cleared(batch: dict[str, Any]) -> dict[str, Any]:
    """Change all arrays of a batch in place."""
    for array in batch.values():
        array[...] = 0
    return batch


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


def test_other_functions_and_results_are_refused(shards: ShardFolder) -> None:
    for result in (None, [1], {"value": 1.5}, {7: np.zeros(3)}):
        with pytest.raises(ConfigError, match="transform returned no batch"):
            next(iter(Loader(shards.path, transform=lambda batch, result=result: result)))
    with pytest.raises(ConfigError, match="transform cannot be used"):
        Loader(shards.path, transform="centred")  # type: ignore[arg-type]


def test_a_mixture_applies_its_function_to_whole_batches(shards: ShardFolder) -> None:
    def mixture(**options: Any) -> Mixture:
        loaders = [Loader(shards.path, fields=FIELDS, seed=seed) for seed in range(2)]
        return Mixture(loaders, (1, 2), batch_size=30, **options)

    assert arrays(mixture(transform=centred)) == arrays(map(centred, mixture()))
    with pytest.raises(ConfigError, match=r"of epoch 0.*ValueError"):
        list(mixture(transform=fail_at_id))
    with pytest.raises(ConfigError, match="source 0 has a transform"):
        Mixture([Loader(shards.path, transform=centred)], (1,))
