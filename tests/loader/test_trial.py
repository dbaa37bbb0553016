"""Tests of ``hexdata load`` and of the trial run that it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.loader import Loader
from tests.kit.command_line import hexdata_run
from tests.kit.loaders import ids_of

if TYPE_CHECKING:
    from tests.shard_folder import ShardFolder


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_the_result_describes_the_epochs(shards: ShardFolder, mode: Any) -> None:
    options = ("--epochs", 2, "--batch-size", 40, "--seed", 3, "--mode", mode, "--json")
    result = hexdata_run("load", shards.path, *options).facts
    loader = Loader(shards.path, batch_size=40, seed=3, mode=mode, fields=("position_id",))
    assert (result["split"], result["mode"], result["positions"]) == ("train", mode, 134)
    assert result["seconds_to_open"] > 0
    for number, stats in enumerate(result["epochs"]):
        ids = ids_of(loader)
        counts = [stats[name] for name in ("epoch", "batches", "delivered", "positions")]
        assert counts == [number, 4, 134, 134]
        assert stats["first_ids"] == ids[0][:5]
        assert stats["digest"] == loader.epoch_digest
        assert stats["value_mean"] == pytest.approx(np.mean(shards.splits["train"]["value"]))
    assert len(result["epochs"]) == 2
    assert result["fields"] == {
        "board": "float32 (40, 2, 5, 5)",
        "policy": "float32 (40, 25)",
        "value": "float32 (40,)",
        "position_id": "int64 (40,)",
    }


def test_weights_are_checked_by_their_counts(shards: ShardFolder) -> None:
    weights = "if(position_id % 2 = 0, 1.5, 0)"
    result = hexdata_run("load", shards.path, "--epochs", 2, "--weights", weights, "--json").facts
    for stats in result["epochs"]:
        assert (stats["weight_sum"], stats["positions"]) == (1.5 * 67, 67)
        assert abs(stats["delivered"] - stats["weight_sum"]) < 1
