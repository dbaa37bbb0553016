"""Tests of ``hexdata.loader.trial``."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo.games import make_games
from hexdata.errors import ConfigError, StoreError
from hexdata.formats.trmph import write_trmph
from hexdata.loader import Loader
from hexdata.loader.trial import LoadOptions, run_loader_trial
from hexdata.shards.blocks import Block
from tests.altered_shards import alter_blocks
from tests.legacy_pickles import example, save_pickle, top_level

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_the_result_describes_the_epochs(shards: ShardFolder, mode: Any) -> None:
    result = run_loader_trial(shards.path, LoadOptions(epochs=2, batch_size=40, seed=3, mode=mode))
    loader = Loader(shards.path, batch_size=40, seed=3, mode=mode, fields=("position_id",))
    assert (result.split, result.mode, result.positions) == ("train", mode, 134)
    assert len(result.epochs) == 2
    assert result.seconds_to_open > 0
    assert 0 < result.seconds_to_first_batch <= result.epochs[0].seconds
    for number, stats in enumerate(result.epochs):
        ids = [batch["position_id"].tolist() for batch in loader]
        assert (stats.epoch, stats.batches, stats.delivered, stats.positions) == (number, 4, 134, 134)
        assert stats.first_ids == ids[0][:5]
        assert stats.digest == loader.epoch_digest
        assert stats.value_mean == pytest.approx(np.mean(shards.splits["train"]["value"]))
        assert stats.positions_per_second > 0
    assert result.fields == {
        "board": "float32 (40, 2, 5, 5)",
        "policy": "float32 (40, 25)",
        "value": "float32 (40,)",
        "position_id": "int64 (40,)",
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a converted store of 12 whole games and one game whose first positions are missing."""
    folder = tmp_path_factory.mktemp("trial")
    write_trmph(folder / "whole.trmph", make_games(12, seed=1, board_size=5), 5)
    save_pickle(folder / "part.pkl.gz", top_level([example(0, ply, 10) for ply in range(3, 10)]))
    convert_sources([folder], folder / "store", ConvertOptions(workers=1, val=0, test=0))
    return folder / "store"


def test_weights_are_checked_by_their_counts(shards: ShardFolder) -> None:
    options = LoadOptions(epochs=2, batch_size=32, weights="if(position_id % 2 = 0, 1.5, 0)")
    result = run_loader_trial(shards.path, options)
    ids = shards.splits["train"]["position_id"]
    for stats in result.epochs:
        assert stats.weight_sum == 1.5 * np.count_nonzero(ids % 2 == 0)
        assert abs(stats.delivered - stats.weight_sum) < 1
        assert stats.positions == np.count_nonzero(ids % 2 == 0)


def test_the_result_counts_games_and_packed_positions(store: Path) -> None:
    result = run_loader_trial(store, LoadOptions(batch_size=40))
    games = sum(len(game.moves) + 1 for game in make_games(12, seed=1, board_size=5))
    assert (result.mode, result.games, result.packed) == ("games", 12, 7)
    assert result.positions == games + 7


def test_the_default_mode_depends_on_the_location(shards: ShardFolder) -> None:
    result = run_loader_trial(shards.path)
    assert (result.mode, result.games, result.packed) == ("exact", None, None)
    piped = run_loader_trial(f"pipe:cat {shards.path}/{{name}}")
    assert (piped.mode, piped.positions) == ("stream", 134)


@pytest.mark.parametrize("first", [2**31, 2**61])
def test_the_memory_does_not_depend_on_the_position_ids(make_shards: MakeShards, first: int) -> None:
    folder = make_shards(train=100).path

    def shift(blocks: dict[str, Block]) -> dict[str, Block]:
        for block in blocks.values():
            block["position_id"] += first
        return blocks

    for path in sorted(folder.glob("*.tar")):
        alter_blocks(folder, path.name, shift)
    tracemalloc.start()
    try:
        result = run_loader_trial(folder, LoadOptions(batch_size=40))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (result.epochs[0].delivered, result.epochs[0].positions) == (100, 100)
    assert min(result.epochs[0].first_ids) >= first
    assert peak < 200 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"batch_size": 0}, "batch_size cannot be used"),
        ({"mode": "exakt"}, "unknown mode"),
        ({"check": "all"}, "unknown check"),
        ({"split": "training"}, "unknown split; found training"),
        ({"cache_size": "much"}, "cache_size cannot be used; found .much.; expected a number and a unit"),
        ({"prefetch": -1}, "prefetch cannot be used"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadOptions(**options)


def test_an_error_names_the_shard(make_shards: MakeShards) -> None:
    folder = make_shards(train=40)
    path = folder.path / "train-000001.tar"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(StoreError, match=r"train-000001\.tar: .*altered; found SHA-256"):
        run_loader_trial(folder.path)
