"""Tests of ``Mixture``: exact proportions, epochs of each source, ranks, workers and resuming."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hexdata.batch import FIELDS
from hexdata.errors import ConfigError
from hexdata.loader import Loader
from hexdata.loader.mixture import Mixture
from hexdata.order import Permutation, derive_key
from tests.loader.game_stores import add_search, position_rows, sample_games, write_shards, write_store

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards, ShardFolder

Arrays = dict[str, np.ndarray]
IDS = ("position_id",)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, shards: ShardFolder) -> list[ShardFolder]:
    """Three stores: 134, 41 and 9 training positions; read only."""
    folder = tmp_path_factory.mktemp("stores")
    kind = type(shards)
    return [shards, kind(folder / "b", {"train": 41}, True, 8), kind(folder / "c", {"train": 9}, False, 9)]


def loaders_of(folders: list[ShardFolder], **options: Any) -> list[Loader]:
    return [
        Loader(folder.path, seed=10 + number, **{"fields": IDS, **options})
        for number, folder in enumerate(folders)
    ]


def joined(batches: list[Arrays]) -> Arrays:
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


# --- proportions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "batch_size", "pace", "steps"),
    [
        ((1, 1, 1), 10, None, 41),  # 134 positions, 10 / 3 per step
        ((1, 1, 2), 8, 1, 21),  # 41 positions, 2 per step
        ((1, 1, 8), 20, 2, 1),  # 9 positions, 16 per step
        ((67, 32, 1), 100, None, 2),  # 134 positions, 67 per step
        ((66, 33, 1), 100, None, 3),
    ],
)
def test_an_epoch_delivers_the_pacing_source_once(
    folders: list[ShardFolder], weights: Any, batch_size: int, pace: int | None, steps: int
) -> None:
    mixture = Mixture(loaders_of(folders), weights, batch_size=batch_size, pace=pace)
    paced = joined(list(mixture))
    number = pace or 0
    size = len(folders[number].splits["train"]["position_id"])
    delivered = paced["position_id"][paced["source"] == number]
    assert len(mixture) == steps
    assert len(np.unique(delivered)) == size
    assert mixture.epoch == 1


# --- order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [{}, {"shuffle": False}, {"weights": "(position_id + 1) % 3 / 2.0"}])
def test_the_order_is_as_documented(folders: list[ShardFolder], chosen: dict[str, Any]) -> None:
    """Each source delivers its epochs in turn, here with all fields and random draws."""
    weights, size, seed = (5, 2, 1), 12, 9
    options: dict[str, Any] = {"fields": FIELDS, "planes": 3, "symmetry": True, **chosen}
    options["tier_probability"] = (1, 0.6, 0.3, 0)
    mixture = Mixture(loaders_of(folders, **options), weights, batch_size=size, seed=seed)

    def rows_of(batches: Any) -> Iterator[dict[str, bytes]]:
        for batch in batches:
            for row in range(len(batch["value"])):
                yield {name: batch[name][row].tobytes() for name in FIELDS}

    loaders = loaders_of(folders, **options)
    streams = [rows_of(itertools.chain.from_iterable(itertools.repeat(loader))) for loader in loaders]
    offset = Fraction(derive_key(seed, "mixture"), 2**64)

    def count_up_to(total: int, sources: int) -> int:
        return math.floor(Fraction(total * sum(weights[:sources]), sum(weights)) + offset)

    for step, batch in enumerate([*mixture, *mixture]):
        assert [*batch] == [*FIELDS, "source"]
        ends = [count_up_to((step + 1) * size, i) - count_up_to(step * size, i) for i in range(4)]
        unmixed = [source for source in range(3) for _ in range(ends[source + 1] - ends[source])]
        order = Permutation(size, derive_key(seed, "mixture", step))
        expected = [unmixed[order[index]] for index in range(size)]
        assert batch["source"].tolist() == expected
        assert [*rows_of([batch])] == [next(streams[source]) for source in expected]


def test_the_order_is_pinned(folders: list[ShardFolder]) -> None:
    """If these literals change, mixtures cannot be repeated or resumed; increase ORDER_VERSION."""
    batches = list(Mixture(loaders_of(folders), (4.5, 2.2, 1.3), batch_size=8, seed=1))
    assert [batch["source"].tolist() for batch in batches[:3]] == [
        [0, 1, 0, 0, 0, 1, 2, 0],
        [0, 0, 0, 1, 0, 1, 2, 2],
        [0, 0, 0, 0, 1, 0, 2, 1],
    ]


# --- states and options -------------------------------------------------------------------------------


def test_a_state_of_other_options_is_refused(folders: list[ShardFolder]) -> None:
    """Options of the loaders that a mixture does not use may differ."""

    def make(loader: Any = {}, **chosen: Any) -> Mixture:  # noqa: B006
        return Mixture(loaders_of(folders, **loader), **{"weights": (4, 2, 1), "batch_size": 12, **chosen})

    state = make().state_dict()
    make({"batch_size": 4, "rank": 1, "world_size": 2, "remainder": "drop"}).load_state_dict(state)
    others: list[dict[str, Any]] = [{"seed": 1}, {"batch_size": 8}, {"weights": (4, 2, 2)}, {"pace": 1}]
    loaders = ({"shuffle": False}, {"where": "move >= 3"}, {"symmetry": True}, {"fields": ("move",)})
    for change in (*others, *({"loader": each} for each in loaders)):
        with pytest.raises(ConfigError, match="another"):
            make(**change).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": (1, 1)}, "2 weights were given for 3 loaders"),
        ({"weights": (6, 5, 1), "batch_size": 11}, "source 2 would have less than one position per step"),
        ({"pace": 3}, "pace 3"),
        ({"pace": -1}, "pace"),
    ],
)
def test_invalid_options_are_refused(
    folders: list[ShardFolder], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture(loaders_of(folders), **{"weights": (1, 1, 1), **options})


def test_incompatible_loaders_are_refused(folders: list[ShardFolder], make_shards: MakeShards) -> None:
    first = Loader(folders[0].path)
    for others, message in (
        ([Loader(folders[1].path, mode="stream")], "source 1 is in stream mode"),
        ([Loader(folders[1].path, planes=3)], "source 1 has other batch options"),
        ([Loader(make_shards("empty", train=0).path)], "source 1 has no positions"),
        ([first] * 256, "1 to 256 loaders, not 257"),
    ):
        with pytest.raises(ConfigError, match=message):
            Mixture([first, *others], (1,) * (1 + len(others)))
    with pytest.raises(ConfigError, match="1 to 256 loaders, not 0"):
        Mixture([], ())


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A store of games, and a folder of shards with larger boards and policies."""
    folder = tmp_path_factory.mktemp("sizes")
    stores = []
    for n, count in ((4, 12), (7, 9)):
        games = sample_games(count, n, n)
        rows = [row for game in games for row in position_rows(game, n)]
        add_search(rows, n, n)
        stores.append(write_store(folder / f"store{n}", n, games, [rows]))
    return [stores[0], write_shards(stores[1], folder / "shards")]


@pytest.mark.parametrize("board", ["float32", "uint8"])
def test_smaller_boards_are_padded_and_masked(sizes: list[Path], board: Any) -> None:
    options: dict[str, Any] = {
        "fields": ("position_id", "board", "policy", "policy_mask", "move", "value"),
        "board": board,
        "planes": 3,
        "symmetry": True,
        "batch_size": 1 << 16,
    }
    loaders = [Loader(path, seed=4, **options) for path in sizes]
    own = [next(iter(loader)) for loader in loaders]
    mixture = Mixture(loaders, (1, 2), batch_size=9, seed=2, pace=0)
    steps = min(len(part["value"]) // count for part, count in zip(own, (3, 6), strict=True)) - 1
    mixed = joined(list(itertools.islice(mixture, steps)))  # positions of the first epochs of both
    assert set(mixed["source"]) == {0, 1}
    assert mixed["board"].shape[1:] == (3, 7, 7)
    assert (mixed["mask"].dtype, mixed["mask"].shape[1:]) == (np.bool_, (7, 7))
    for row, (source, position) in enumerate(zip(mixed["source"], mixed["position_id"], strict=True)):
        n, expected = (4, 7)[source], own[source]
        (at,) = np.flatnonzero(expected["position_id"] == position)
        inside = np.zeros((7, 7), bool)
        inside[:n, :n] = True
        np.testing.assert_array_equal(mixed["mask"][row], inside)
        np.testing.assert_array_equal(mixed["board"][row][:, :n, :n], expected["board"][at])
        assert not mixed["board"][row][:, ~inside].any()
        policy = mixed["policy"][row].reshape(7, 7)
        np.testing.assert_array_equal(policy[:n, :n], expected["policy"][at].reshape(n, n))
        assert not policy[~inside].any()
        move = int(expected["move"][at])
        assert mixed["move"][row] == (move if move == 65535 else move // n * 7 + move % n)
        for name in ("value", "policy_mask"):
            assert mixed[name][row] == expected[name][at]
