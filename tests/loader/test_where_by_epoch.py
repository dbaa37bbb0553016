"""Tests of ``set_epoch(epoch, where=…)``: the selection of positions changes between epochs."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from hexdata.errors import ConfigError, StoreError
from hexdata.loader import Loader, Mixture
from tests.loader.game_stores import position_rows, sample_games, write_shards, write_store

BOARD_SIZE = 5
FIELDS = ("position_id", "position_in_game", "move")
FIRST, SECOND = "position_in_game < 4", "move % 2 = 1"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    games = sample_games(20, BOARD_SIZE, 6)
    rows = [row for game in games for row in position_rows(game, BOARD_SIZE)]
    return write_store(tmp_path_factory.mktemp("curriculum") / "store", BOARD_SIZE, games, [rows])


@pytest.fixture(scope="module")
def shards(store: Path) -> Path:
    return write_shards(store, store.parent / "shards")


@pytest.fixture(params=["games", "exact"])
def data(request: pytest.FixtureRequest, store: Path, shards: Path) -> Path:
    """The same positions for games mode and for exact mode."""
    return store if request.param == "games" else shards


def make(data: Path, **options: Any) -> Loader:
    return Loader(data, **{"batch_size": 20, "seed": 3, "fields": FIELDS, **options})


def ids_of(batches: Any) -> list[list[int]]:
    return [batch["position_id"].tolist() for batch in batches]


def epoch_of(data: Path, epoch: int, **options: Any) -> list[list[int]]:
    """Return an epoch of a loader that was made with these options."""
    loader = make(data, **options)
    loader.set_epoch(epoch)
    return ids_of(loader)


def test_an_epoch_is_that_of_a_loader_with_the_condition(data: Path) -> None:
    loader = make(data)
    plan: list[tuple[int, str | None]] = [
        (0, None),
        (1, FIRST),
        (2, SECOND),
        (0, None),
        (4, SECOND),
        (4, FIRST),
    ]
    for epoch, where in plan:
        loader.set_epoch(epoch, where=where)
        plain = make(data, where=where)
        assert (loader.positions, len(loader), loader.options) == (plain.positions, len(plain), plain.options)
        assert ids_of(loader) == epoch_of(data, epoch, where=where)


def test_the_condition_remains_for_later_epochs(data: Path) -> None:
    loader = make(data)
    loader.set_epoch(2, where=FIRST)
    for epoch in (2, 3):
        assert loader.epoch == epoch
        batches = list(loader)
        assert all((batch["position_in_game"] < 4).all() for batch in batches)
        assert ids_of(batches) == epoch_of(data, epoch, where=FIRST)
    loader.set_epoch(2)
    assert ids_of(loader) == epoch_of(data, 2, where=FIRST)


@pytest.mark.parametrize("remainder", ["short", "pad", "drop"])
def test_ranks_share_the_selected_positions(data: Path, remainder: Any) -> None:
    alone = make(data, batch_size=24, remainder=remainder)
    ranks = [make(data, batch_size=8, rank=rank, world_size=3, remainder=remainder) for rank in range(3)]
    for each in (alone, *ranks):
        each.set_epoch(1, where=SECOND)
    parts = [ids_of(rank.for_rank(rank.options.rank, 3)) for rank in ranks]
    for whole, *part in zip(ids_of(alone), *parts, strict=True):
        assert sorted(whole) == sorted(i for ids in part for i in ids)


def test_every_step_can_be_resumed(data: Path) -> None:
    loader = make(data, where=FIRST)
    loader.set_epoch(3, where=SECOND)
    whole, states = [], [loader.state_dict()]
    for batch in loader:
        whole.append(batch["position_id"].tolist())
        states.append(loader.state_dict())
    for step, state in enumerate(states):
        for where in (FIRST, SECOND):  # made as before, or with the condition of the epoch
            resumed = make(data, where=where)
            resumed.load_state_dict(json.loads(json.dumps(state)))
            assert resumed.options.where == SECOND
            if step < len(whole):
                assert ids_of(resumed) == whole[step:]
                assert resumed.epoch_digest == loader.epoch_digest
            assert ids_of(resumed) == epoch_of(data, 4, where=SECOND)


def test_a_state_without_a_change_restores_the_first_condition(data: Path) -> None:
    loader = make(data, where=FIRST)
    for _ in islice(loader, 2):
        pass
    state = loader.state_dict()
    assert "where_changed" not in state
    rest = ids_of(loader)
    loader.set_epoch(0, where=None)
    assert loader.state_dict()["first_where"] == FIRST
    loader.load_state_dict(state)
    assert ids_of(loader) == rest


def test_a_state_with_another_first_condition_is_refused(data: Path) -> None:
    loader = make(data)
    loader.set_epoch(0, where=SECOND)
    other = make(data, where=FIRST)
    with pytest.raises(ConfigError, match="saved with another where"):
        other.load_state_dict(loader.state_dict())
    assert other.options.where == FIRST
    wrong = {**loader.state_dict(), "batch": 1, "rows": "0" * 64}
    with pytest.raises(StoreError, match="other positions"):
        make(data).load_state_dict(wrong)


def test_a_copy_selects_by_the_same_condition(data: Path) -> None:
    loader = make(data)
    loader.set_epoch(1, where=SECOND)
    for _ in islice(loader, 2):
        pass
    assert ids_of(pickle.loads(pickle.dumps(loader))) == ids_of(loader)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("position_id < 0", "the options select no position of train"),
        ("winner = 0", "where: no column 'winner'"),
        ("", "where cannot be used"),
        (5, "where cannot be used"),
        ("move", "where is not a condition"),
    ],
)
def test_a_refused_condition_changes_nothing(data: Path, where: Any, message: str) -> None:
    loader, plain = make(data, where=FIRST), make(data, where=FIRST)
    for each in (loader, plain):
        for _ in islice(each, 2):
            pass
    with pytest.raises(ConfigError, match=message):
        loader.set_epoch(5, where=where)
    assert loader.state_dict() == plain.state_dict()
    assert ids_of(loader) == ids_of(plain)


def test_too_few_positions_for_a_whole_batch_are_refused(data: Path) -> None:
    loader = make(data, remainder="drop", batch_size=50)
    with pytest.raises(ConfigError, match="remainder='drop' leaves no batch"):
        loader.set_epoch(0, where="position_id % 50 = 0")
    assert loader.options.where is None
    with pytest.raises(ConfigError, match="batch is beyond the end of the epoch"):
        loader.set_epoch(0, 6, where=FIRST)


def test_a_change_within_an_iteration_is_refused(data: Path) -> None:
    loader = make(data)
    with pytest.raises(ConfigError, match="was changed while iterating"):  # noqa: PT012 - the loop raises
        for step, _ in enumerate(loader):
            loader.set_epoch(0, step + 1, where=SECOND)


def test_stream_mode_refuses_a_condition(shards: Path) -> None:
    loader = make(shards, mode="stream")
    with pytest.raises(ConfigError, match="stream mode cannot select positions"):
        loader.set_epoch(1, where=FIRST)
    assert len(ids_of(loader)) == len(loader)


@pytest.mark.parametrize("where", [None, "true"])
def test_a_later_condition_on_tiers(data: Path, where: str | None) -> None:
    """Games mode reads them again if the loader was made without a condition."""
    loader, tiers = make(data, where=where), "value_sample_tier = 0"
    loader.set_epoch(1, where=tiers)
    assert ids_of(loader) == epoch_of(data, 1, where=tiers)


def test_weights_apply_to_the_new_selection(data: Path) -> None:
    loader = make(data, weights="position_id % 3 / 2")
    loader.set_epoch(2, where=SECOND)
    assert ids_of(loader) == epoch_of(data, 2, where=SECOND, weights="position_id % 3 / 2")


def test_a_mixture_keeps_the_conditions_of_its_loaders(data: Path) -> None:
    loaders = [make(data, seed=seed) for seed in range(2)]
    loaders[0].set_epoch(0, where=FIRST)
    mixture = Mixture(loaders, (1, 1), batch_size=20)
    plain = Mixture([make(data, seed=0, where=FIRST), make(data, seed=1)], (1, 1), batch_size=20)
    loaders[0].set_epoch(0, where=SECOND)
    assert mixture.state_dict() == plain.state_dict()
    assert ids_of(mixture) == ids_of(plain)
