"""Tests of loops that are left: the next loop continues, and no loop is empty."""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.errors import ConfigError
from hexdata.loader import Loader
from hexdata.loader.mixture import Mixture
from tests.loader.loops import Steps, check_loops, run_loop
from tests.pairs import FULL, paired

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder

MODES: list[dict[str, Any]] = [
    {"mode": "exact"},
    {"mode": "exact", "shuffle": False},
    {"mode": "stream", "streams": (12, 6), "window": 8},
]


@pytest.mark.parametrize(
    ("options", "remainder", "world_size"),
    [
        *paired(MODES, ("short", "pad", "drop"), (1, 2, 3)),
        ({"where": "position_id % 3 = 0"}, "short", 2),
    ],
)
def test_the_next_loop_continues_after_the_last_batch(
    shards: ShardFolder, options: dict[str, Any], remainder: Any, world_size: int
) -> None:
    all_ranks: list[Steps] = []
    for rank in range(world_size):
        options = {**options, "remainder": remainder, "rank": rank, "world_size": world_size}

        def make(options: Any = options) -> Loader:
            return Loader(shards.path, batch_size=12 // world_size, fields=("position_id",), **options)

        @cache
        def expected(epoch: int, make: Any = make) -> Steps:
            plain = make()
            plain.set_epoch(epoch)
            return [batch["position_id"].tolist() for batch in plain]

        all_ranks.append(expected(1))
        assert check_loops(make, expected, seed=rank, loops=24 if FULL else 12) > 1
    if remainder == "short":
        ids = [*itertools.chain(*itertools.chain(*all_ranks))]
        assert sorted(ids) == [n for n in range(134) if "where" not in options or n % 3 == 0]


def test_the_next_loop_over_a_mixture_continues(make_shards: MakeShards) -> None:
    folders = [make_shards(f"of {size}", train=size) for size in (70, 40)]

    def make() -> Mixture:
        loaders = [Loader(folder.path, fields=("position_id",)) for folder in folders]
        return Mixture(loaders, (2, 1), batch_size=12)

    @cache
    def expected(epoch: int) -> Steps:
        plain = make()
        plain.set_epoch(epoch)
        return [batch["position_id"].tolist() for batch in plain]

    assert sum(check_loops(make, expected, seed, loops=20) for seed in range(6)) > 10


@pytest.mark.parametrize("form", ["loader", "mixture"])
def test_a_state_at_the_end_of_an_epoch_resumes_at_the_next(make_shards: MakeShards, form) -> None:
    folder = make_shards(train=70)

    def make() -> Any:
        loader = Loader(folder.path, batch_size=16, fields=("position_id",))
        return loader if form == "loader" else Mixture([loader], (1,), batch_size=16)

    loader = make()
    _, inside = run_loop(loader, len(loader), "break")
    assert (inside["epoch"], inside["batch"]) == (0, len(loader))
    after = loader.state_dict()
    assert (after["epoch"], after["batch"]) == (1, 0)
    rest = [batch["position_id"].tolist() for batch in loader]
    for state in (inside, after):
        resumed = make()
        resumed.load_state_dict(state)
        assert (resumed.epoch, resumed.state_dict()["batch"]) == (1, 0)
        assert [batch["position_id"].tolist() for batch in resumed] == rest
        assert resumed.epoch == 2


def test_recording_a_step_after_the_last_one_begins_the_next_epoch(shards: ShardFolder) -> None:
    """``end_epoch`` is not called."""
    plain = Loader(shards.path, batch_size=20)
    whole = [[batch["value"].tolist() for batch in plain] for _ in range(2)]
    loader = Loader(shards.path, batch_size=20)
    for epoch in whole:
        of_worker = [loader.deliveries(worker, 2) for worker in range(2)]
        got = []
        for number in range(len(loader)):
            step, ids, batch = next(of_worker[number % 2])
            loader.record(step, ids)
            got.append(batch["value"].tolist())
        assert got == epoch
        with pytest.raises(ConfigError, match="recorded in order; found step 6; expected step 0"):
            loader.record(len(loader) - 1, ids)
    assert loader.batch == len(loader)
    other = loader.for_rank(0, 2)  # allowed, as no batches of the epoch are left
    assert (other.epoch, other.batch) == (2, 0)


def test_the_digest_is_available_after_the_last_batch(shards: ShardFolder) -> None:
    plain = Loader(shards.path, batch_size=20)
    for _ in plain:
        pass
    loader = Loader(shards.path, batch_size=20)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    assert loader.epoch_digest is None
    batches.close()  # type: ignore[attr-defined]
    assert loader.epoch_digest == plain.epoch_digest is not None


def test_closing_an_old_iterator_does_not_end_another_epoch(shards: ShardFolder) -> None:
    loader = Loader(shards.path, batch_size=20, fields=("position_id",))
    left = iter(loader)
    next(left)
    loader.set_epoch(4)
    whole = [batch["position_id"].tolist() for batch in loader]
    assert loader.epoch == 5
    left.close()  # type: ignore[attr-defined]
    assert (loader.epoch, loader.batch, len(whole)) == (5, 0, len(loader))
