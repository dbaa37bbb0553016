"""Merged positions in games mode: equal to exact mode over shards of a store that was shuffled with merge."""

from __future__ import annotations

import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.errors import ConfigError
from hexdata.export import ExportOptions, export_shards
from hexdata.loader import Loader, PositionDataset
from hexdata.selection import SelectionOptions
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from tests.loader.game_stores import SEARCHED, Row, add_search, position_rows, sample_games, write_store
from tests.pairs import FULL

N = 3
FIELDS = ("board", "policy", "value", "weight", "extra.count", "position_id", "move", "policy_mask")
pytestmark = pytest.mark.filterwarnings("ignore:games mode delivers all positions")


def many_games(count: int, searched: bool) -> tuple[list[Row], list[list[Row]]]:
    """Return games on a tiny board, of which many positions are equal, and some positions of no game."""
    games = sample_games(count, N, seed=5)
    for number, game in enumerate(games):  # begin with the centre or a corner
        first = 4 + number % 2 * 4
        game["moves"] = [first, *(move for move in game["moves"] if move != first)]
        game["positions"] = game["total_positions"] = len(game["moves"]) + 1
    parts = [position_rows(game, N, number % 3 / 2) for number, game in enumerate(games)]
    for row in parts[-1]:
        row["game_id"] = None
    del parts[2][-1]  # a game with missing positions, which are packed
    if searched:
        for number, rows in enumerate(parts):
            add_search(rows, N, number)
    return games, parts


@pytest.fixture(scope="module", params=["games", "targets"])
def stores(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return stores by weight of the merge. Each was shuffled with merge and exported."""
    made = {}
    searched = request.param == "targets"
    games, parts = many_games(40, searched)
    for weight in ("count", "root"):
        store = tmp_path_factory.mktemp("merged") / weight
        write_store(store, N, games, parts, targets=SEARCHED if searched else ())
        shuffle_store(store, ShuffleOptions(merge="positions", merge_weight=weight))  # type: ignore[arg-type]
        export_shards(store, ExportOptions(workers=1, block_size=32))
        made[weight] = store
    return made


def contents(loader: Loader) -> dict[str, np.ndarray]:
    """Return all positions of an epoch by position id."""
    batches = list(loader)
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    order = np.argsort(joined["position_id"], kind="stable")
    return {name: array[order] for name, array in joined.items()}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"where": "position_in_game < 4"},
    {"where": "weight > 1.5 AND extra.count >= 2"},
    {"weights": "weight"},
    {"final_policy": "skip"},
    {"final_policy": "uniform", "planes": 3},
    {"board": "packed"},
    {"board": "fill", "fields": ("board", "policy", "position_id")},
    {"symmetry": True, "seed": 3},
    {"split": "val"},
    {"fields": ("position_id", "policy_mask")},
    {"fields": ("position_id", "move", "value", "player_to_move", "game_id", "total_positions")},
]


def test_games_mode_merges_as_the_shuffle_does(stores: dict[str, Path]) -> None:
    """Half of the options on each store, every second of them with each weight; all if all tests run."""
    searched = "root_value" in Loader(stores["count"], mode="games").games.targets  # type: ignore[union-attr]
    for number, options in enumerate(OPTIONS):
        if FULL or number % 2 == searched:
            for weight in ("count", "root") if FULL else (("count", "root")[number // 2 % 2],):
                compare_modes(stores[weight], weight, options, searched)


def compare_modes(store: Path, weight: Any, options: dict[str, Any], searched: bool) -> None:
    given = {"fields": FIELDS, "shuffle": False, "batch_size": 17, **options}
    if searched and "fields" not in options:
        given["fields"] = (*FIELDS, "root_value", "visits", "extra.temperature")
    ours = contents(Loader(store, mode="games", merge="positions", merge_weight=weight, **given))
    theirs = contents(Loader(store, mode="exact", **given))
    assert ours.keys() == theirs.keys()
    for name in ours if options.get("board") != "fill" else ("policy", "position_id"):
        assert ours[name].dtype == theirs[name].dtype
        equal_nan = ours[name].dtype.kind == "f"
        assert np.array_equal(ours[name], theirs[name], equal_nan=equal_nan), (name, options)


def test_fewer_positions_are_delivered_and_their_counts_add_up(stores: dict[str, Path]) -> None:
    plain = Loader(stores["count"], mode="games")
    merged = Loader(stores["count"], mode="games", merge="positions", fields=("extra.count",), batch_size=7)
    assert merged.positions < 0.9 * plain.positions
    counts = np.concatenate([batch["extra.count"] for batch in merged])
    assert counts.sum() == plain.positions
    assert counts.max() > 5
    chosen = SelectionOptions(merge="positions").non_default()
    assert Store.open(stores["count"]).manifest.stages["shuffle"]["choices"] == chosen


def test_an_epoch_is_resumed_also_by_a_copy(stores: dict[str, Path]) -> None:
    def make() -> Loader:
        return Loader(stores["count"], mode="games", merge="positions", fields=FIELDS, batch_size=16, seed=2)

    loader = make()
    first = list(islice(loader, 3))
    assert len(first) == 3
    state = loader.state_dict()
    assert (state["merge"], state["merge_weight"]) == ("positions", "count")
    rest = [batch["position_id"].tolist() for batch in loader]
    for other in (make(), pickle.loads(pickle.dumps(make()))):
        other.load_state_dict(state)
        assert [batch["position_id"].tolist() for batch in other] == rest
    with pytest.raises(ConfigError, match="merge"):
        Loader(stores["count"], mode="games", batch_size=16, seed=2).load_state_dict(state)


def test_a_dataset_merges_too(stores: dict[str, Path]) -> None:
    dataset = PositionDataset(stores["count"], mode="games", merge="positions", fields=FIELDS)
    loader = Loader(stores["count"], mode="games", merge="positions")
    assert len(dataset) == loader.positions


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_modes_of_shards_refuse_to_merge(stores: dict[str, Path], mode: Any) -> None:
    with pytest.raises(ConfigError, match="only games mode can merge positions"):
        Loader(stores["count"], mode=mode, merge="positions")


def test_an_unknown_choice_is_refused(stores: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="merge"):
        Loader(stores["count"], mode="games", merge="games")  # type: ignore[arg-type]
