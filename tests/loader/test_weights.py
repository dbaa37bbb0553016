"""Tests of ``weights``: exact counts of each position per epoch, equal to those of ``docs/order.md``."""

from __future__ import annotations

import json
import pickle
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hexdata.errors import BudgetError, ConfigError, StoreError
from hexdata.loader import Loader, Mixture, PositionDataset, combine_digests
from hexdata.loader import weights as weights_module
from hexdata.order import Permutation, derive_key, shuffle_indices
from tests.loader.game_stores import (
    FEW,
    assert_modes_agree,
    position_rows,
    sample_games,
    write_shards,
    write_store,
)
from tests.loader.loops import check_loops
from tests.pairs import FULL

BOARD_SIZE = 5
PAGE = Path(__file__).parents[2] / "docs" / "order.md"
IDS = ("position_id",)
EXPRESSION = "CASE WHEN value_sample_tier = 0 THEN 2.25 WHEN move = 7 THEN 0 ELSE position_id % 7 / 3 END"

Copies = Callable[[Mapping[int, float], int, int], dict[int, int]]


@pytest.fixture(scope="module")
def copies() -> Copies:
    """Return the function of this name on the page."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    first = next(block for block in blocks if "def element(" in block)
    own = next(block for block in blocks if "def copies(" in block)
    names: dict[str, Any] = {}
    exec(first[: first.index("\nassert ")], names)
    exec(own[: own.index("\nweights = ")], names)
    function: Copies = names["copies"]
    return function


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 30 games whose position ids have another order than its games."""
    games = sample_games(30, BOARD_SIZE, 5)
    parts: list[list[Any]] = [[], []]
    for number, game in enumerate(games):
        rows = position_rows(game, BOARD_SIZE)
        if number % 4 == 3:
            del rows[len(rows) // 2]  # its other positions are packed
        parts[number % 2] += rows
    return write_store(tmp_path_factory.mktemp("weights") / "store", BOARD_SIZE, games, parts)


@pytest.fixture(scope="module")
def shards(store: Path) -> Path:
    return write_shards(store, store.parent / "shards")


@pytest.fixture(params=["games", "exact"])
def data(request: pytest.FixtureRequest, store: Path, shards: Path) -> Path:
    """The same positions for games mode and for exact mode."""
    return store if request.param == "games" else shards


def ids_of(batches: Any) -> list[list[int]]:
    return [batch["position_id"].tolist() for batch in batches]


def joined(batches: Any) -> list[int]:
    return list(chain.from_iterable(batches))


def stored_ids(data: Path, **options: Any) -> npt.NDArray[np.int64]:
    loader = Loader(data, shuffle=False, fields=IDS, **options)
    return np.concatenate([batch["position_id"] for batch in loader])


def random_weights(count: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """Return weights of every kind: 0, integers, halves, and small and large fractions."""
    rng = np.random.default_rng(seed)
    kinds = [np.zeros(count), rng.integers(1, 4, count), np.full(count, 0.5), rng.random(count) * 3]
    return np.choose(rng.integers(len(kinds), size=count), kinds)


def test_counts_and_order_are_the_documented_ones(data: Path, copies: Copies) -> None:
    ids = stored_ids(data)
    weights = random_weights(len(ids))
    by_id = dict(zip(ids.tolist(), weights.tolist(), strict=True))
    loader = Loader(data, batch_size=100, seed=9, fields=IDS, weights=weights)
    for epoch in range(4):
        counts = copies(by_id, 9, epoch)
        items = np.array([position for position in ids.tolist() for _ in range(counts[position])])
        assert loader.positions == len(items)
        assert abs(len(items) - weights.sum()) < 1
        assert all(int(by_id[i]) <= counts[i] <= -int(-by_id[i] // 1) for i in counts)
        assert len(loader) == loader.steps(epoch) == -(-len(items) // 100)
        realised = loader.realised
        assert realised is not None
        assert (realised.epoch, realised.delivered, realised.positions) == (
            epoch,
            len(items),
            len(set(items)),
        )
        assert realised.weight_sum == pytest.approx(weights.sum())
        assert realised.ratio == len(items) / realised.weight_sum
        order = Permutation(len(items), derive_key(9, "epoch", epoch)).slice(0, len(items))
        assert joined(ids_of(loader)) == items[order].tolist()


def test_copies_of_a_position_are_apart(data: Path) -> None:
    loader = Loader(data, batch_size=1 << 20, fields=IDS, weights="3")
    (batch,) = loader
    ids = batch["position_id"]
    assert set(Counter(ids.tolist()).values()) == {3}
    assert np.count_nonzero(ids[1:] == ids[:-1]) < 12  # some two are expected of a random order


def test_over_many_epochs_a_position_is_delivered_evenly(store: Path) -> None:
    ids = stored_ids(store, split="val")
    weights = random_weights(len(ids), 3)
    dataset = PositionDataset(store, "val", weights=weights, seed=4)
    total = np.zeros(len(ids), np.int64)
    for epoch in range(200):
        total += np.bincount(dataset.epoch_indices(epoch), minlength=len(ids))
        assert abs(total - (epoch + 1) * weights).max() < 4


def test_expression_array_and_pair_are_the_same_weights(data: Path) -> None:
    ids = stored_ids(data)
    values = np.where(ids % 3 == 1, 1.75, 0.5).astype(np.float32)
    mixed = np.random.default_rng(2).permutation(len(ids))
    other = np.arange(10**6, 10**6 + 5)  # ids that are not in the split
    pair = (np.concatenate([other, ids[mixed]]), np.concatenate([other / 3, values[mixed]]))
    given = ("if(position_id % 3 = 1, 1.75, 0.5)", values, values.tolist(), pair)
    loaders = [Loader(data, batch_size=64, fields=IDS, weights=each) for each in given]
    first, *others = [(loader.state_dict()["rows"], ids_of(loader)) for loader in loaders]
    assert others == [first] * 3


def test_games_mode_and_exact_mode_deliver_the_same_positions(store: Path, shards: Path) -> None:
    assert (stored_ids(store) != stored_ids(shards)).any()
    for loader in assert_modes_agree(store, shards, FEW, weights=f"coalesce({EXPRESSION}, 0.3)"):
        assert loader.realised is not None
    loaders = [Loader(path, batch_size=1 << 20, weights="position_id % 5 / 4") for path in (store, shards)]
    for _ in range(3):
        first, second = (np.sort(ids) for ids in map(np.concatenate, map(ids_with, loaders)))
        assert first.tolist() == second.tolist()


def ids_with(loader: Loader) -> list[Any]:
    return [delivery.position_ids for delivery in deliver(loader)]


def deliver(loader: Loader) -> Any:
    for delivery in loader.deliveries():
        loader.record(delivery.step, delivery.position_ids)
        yield delivery
    loader.end_epoch()


def test_weights_apply_to_the_selected_positions(data: Path, copies: Copies) -> None:
    ids = stored_ids(data)
    weights = random_weights(len(ids), 1)
    options: dict[str, Any] = {"where": "move % 3 = 1", "fields": IDS, "seed": 2}
    chosen = stored_ids(data, where="move % 3 = 1").tolist()
    by_id = {i: w for i, w in zip(ids.tolist(), weights.tolist(), strict=True) if i in set(chosen)}
    expected = copies(by_id, 2, 0)
    loader = Loader(data, weights=weights, **options)
    assert Counter(joined(ids_of(loader))) == Counter({i: n for i, n in expected.items() if n})


@pytest.mark.parametrize("remainder", ["short", "pad", "drop"])
def test_ranks_and_workers_share_an_epoch(data: Path, remainder: Any) -> None:
    def make(batch_size: int, **ranks: int) -> Loader:
        return Loader(
            data,
            batch_size=batch_size,
            seed=3,
            fields=IDS,
            weights="position_id % 4 / 3",
            remainder=remainder,
            **ranks,
        )

    alone = make(60)
    ranks = [make(20, rank=rank, world_size=3) for rank in range(3)]
    for _ in range(3):
        whole = ids_of(alone)
        workers = [[ids_of(rank.batches(worker, 2)) for worker in range(2)] for rank in ranks]
        parts = [ids_of(rank) for rank in ranks]
        for part, (even, odd) in zip(parts, workers, strict=True):
            assert (part[::2], part[1::2]) == (even, odd)
        assert [sorted(joined(step)) for step in zip(*parts, strict=True)] == list(map(sorted, whole))
        assert combine_digests(str(rank.epoch_digest) for rank in ranks) == alone.epoch_digest


def test_every_step_of_every_epoch_can_be_resumed(data: Path) -> None:
    options: dict[str, Any] = {"seed": 6, "fields": IDS, "weights": "position_id % 9 / 7 + 0.01"}
    loader = Loader(data, batch_size=50, **options)
    for _ in range(3):
        epoch, whole = loader.epoch, []
        states = [json.dumps(loader.state_dict())]
        for batch in loader:
            whole.append(batch["position_id"].tolist())
            states.append(json.dumps(loader.state_dict()))
        for step, state in enumerate(states):
            resumed = Loader(data, batch_size=50, **options)
            resumed.load_state_dict(json.loads(state))
            if step == len(whole):
                assert (resumed.epoch, resumed.batch) == (epoch + 1, 0)
            else:
                assert ids_of(resumed) == whole[step:]
                assert resumed.epoch_digest == loader.epoch_digest
        half = Loader(data, batch_size=25, rank=1, world_size=2, **options)
        half.load_state_dict(json.loads(states[2]))
        assert [set(part) <= set(step) for part, step in zip(ids_of(half), whole[2:], strict=True)]


@pytest.mark.parametrize("batch_size", [7, 33])
def test_loops_that_stop_anywhere(store: Path, batch_size: int) -> None:
    def make() -> Loader:
        weights = np.full(len(stored_ids(store, split="test")), 1.0)  # epochs of the same length
        weights[::2], weights[1::2] = 0.5, 1.5
        return Loader(store, split="test", shuffle=True, batch_size=batch_size, fields=IDS, weights=weights)

    @cache
    def expected(epoch: int) -> list[list[int]]:
        loader = make()
        loader.set_epoch(epoch)
        return ids_of(loader)

    check_loops(make, expected, batch_size, 60 if FULL else 30)


def test_the_length_of_an_epoch_may_change(store: Path) -> None:
    """A sum of 40.5 gives epochs of 40 and 41 positions: with batches of 40, one or two batches."""
    count = len(stored_ids(store, split="val"))
    weights = np.zeros(count)
    weights[:81] = 0.5
    loader = Loader(store, split="val", shuffle=True, batch_size=40, fields=IDS, weights=weights)
    lengths = []
    for epoch in range(12):
        assert loader.epoch == epoch
        length, positions = len(loader), loader.positions
        for _, batch in zip(range(length), loader, strict=False):  # as a framework counts the steps
            positions -= len(batch["position_id"])
        assert positions == 0
        lengths.append(length)
    assert set(lengths) == {1, 2}
    loader.set_epoch(lengths.index(2), 1)
    with pytest.raises(ConfigError, match="batch is beyond the end of the epoch"):
        loader.set_epoch(lengths.index(1), 2)
    with pytest.raises(ConfigError, match="remainder='drop' leaves no batch"):
        Loader(store, split="val", batch_size=41, weights=weights, remainder="drop")


def test_a_dataset_gives_the_indices_of_an_epoch(data: Path) -> None:
    options: dict[str, Any] = {
        "seed": 8,
        "fields": IDS,
        "weights": "position_id % 5 / 2",
        "where": "move > 3",
    }
    dataset, loader = PositionDataset(data, **options), Loader(data, batch_size=64, **options)
    loader.set_epoch(3)
    indices = shuffle_indices(dataset.epoch_indices(3), 8, 3)
    assert dataset.batch(indices)["position_id"].tolist() == joined(ids_of(loader))
    plain = PositionDataset(data, fields=IDS)
    assert plain.epoch_indices(3).tolist() == list(range(len(plain)))


def test_a_mixture_repeats_the_weighted_epochs(store: Path) -> None:
    def loader(seed: int, **options: Any) -> Loader:
        return Loader(store, split="val", shuffle=True, seed=seed, fields=IDS, **options)

    weighted = loader(1, weights="position_id % 4 / 3")
    mixture = Mixture([weighted, loader(2)], (2, 1), batch_size=30, seed=5)
    taken = [batch["position_id"][batch["source"] == 0] for _ in range(4) for batch in mixture]
    stream = np.concatenate(taken)
    alone, expected = loader(1, weights="position_id % 4 / 3", batch_size=1 << 20), []
    while sum(map(len, expected)) < len(stream):
        expected += [batch["position_id"] for batch in alone]
    # A step takes its positions from a range of the stream, in another order.
    ends = np.cumsum([len(each) for each in taken])[:-1]
    for ours, theirs in zip(taken, np.split(np.concatenate(expected)[: len(stream)], ends), strict=True):
        assert sorted(ours.tolist()) == sorted(theirs.tolist())
    share, _ = mixture.realised
    assert share.epochs == pytest.approx(len(stream) / float(weighted.mean_positions))
    resumed = Mixture([loader(1, weights="position_id % 4 / 2"), loader(2)], (2, 1), batch_size=30, seed=5)
    with pytest.raises(ConfigError, match="saved with another sources"):
        resumed.load_state_dict(mixture.state_dict())


def test_the_order_of_the_draw_is_sorted_in_parts(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = "position_id % 11 / 5"
    whole = [PositionDataset(store, weights=given).epoch_indices(epoch).tolist() for epoch in range(3)]
    monkeypatch.setattr(weights_module, "_SORTED_ROWS", 17)
    monkeypatch.setattr(weights_module, "_CHUNK", 5)
    assert [
        PositionDataset(store, weights=given).epoch_indices(epoch).tolist() for epoch in range(3)
    ] == whole


def test_weights_take_few_bytes(store: Path) -> None:
    count = len(stored_ids(store))
    for given, expected in (("2", 1), ("position_id % 300", 2), ("1 / 3", 9)):
        weighted = Loader(store, weights=given)._selected.weighted  # type: ignore[union-attr]
        arrays = [value for value in vars(weighted).values() if isinstance(value, np.ndarray)]
        assert sum(array.nbytes for array in arrays) == expected * count
    rows = Loader(store, weights="2").epoch_rows(0)
    assert rows is not None
    assert rows.low.nbytes == 2 * 2 * count


def test_a_loader_is_pickled_with_its_weights(data: Path) -> None:
    loader = Loader(data, batch_size=40, fields=IDS, weights="position_id % 5 / 4")
    for _ in islice(loader, 3):
        pass
    rest = ids_of(pickle.loads(pickle.dumps(loader)))
    assert rest == ids_of(loader)


def test_a_state_belongs_to_its_weights(data: Path) -> None:
    def make(weights: Any) -> Loader:
        return Loader(data, batch_size=40, fields=IDS, weights=weights)

    count = len(stored_ids(data))
    state = {}
    for weights in ("position_id % 3", np.full(count, 0.5), None):
        loader = make(weights)
        for _ in islice(loader, 3):
            pass
        state[str(weights)[:3]] = loader.state_dict()
    by_text, by_array, without = state.values()
    assert "weights" not in without
    for wrong, weights in ((by_text, "position_id % 4"), (by_text, None), (without, "position_id % 3")):
        with pytest.raises(ConfigError, match="saved with another weights"):
            make(weights).load_state_dict(wrong)
    with pytest.raises(StoreError, match="or to other weights"):
        make(np.full(count, 0.25)).load_state_dict(by_array)
    make(np.full(count, 0.5)).load_state_dict(by_array)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("", "weights cannot be used"),
        ("value_sample_tier", r"a weight cannot be used.*null or nan"),
        ("-1.5", r"position \d+: a weight cannot be used.*-1.5"),
        ("if(position_id % 50 = 7, -2, 1)", r"position \d*[05]7: a weight cannot be used"),
        ("70_000", "a weight cannot be used.*65,535"),
        ("1e300 * 1e300", "a weight cannot be used.*inf"),
        ("0", "the weights select no position"),
        ("1 / 100_000", "the weights select no position.*sum of at least 1"),
        ("'2'", "weights is not a number.*VARCHAR"),
        ("move > 3", "weights is not a number.*BOOLEAN"),
        ("random()", "weights: random"),
        ("games", "weights: no column 'games'"),
        ("2; SELECT 1", "weights: more than one statement"),
        ([1.0, 2.0], "weights have another length"),
        (np.ones((2, 2)), "weights cannot be used"),
        ([[1.0], [1.0, 2.0]], "weights cannot be used"),
        (np.array(["a"]), "weights cannot be used"),
        (([1, 1], [1.0, 2.0]), "position 1: weights contain a position twice"),
        (([1, 2], [1.0]), "weights have another length"),
        (([1, 2], [1.0, 2.0]), r"position \d+: a weight cannot be used.*none or nan"),
        (([[1], [1, 2]], [1.0, 2.0]), "the position ids of weights cannot be used"),
        ((0.5, 2.0), "weights have another length"),
        (([1.5, 2.0], [1.0, 2.0]), "the position ids of weights cannot be used"),
    ],
)
def test_wrong_weights_are_refused(data: Path, weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        Loader(data, weights=weights)


def test_nan_in_an_array_is_refused(data: Path) -> None:
    ids = stored_ids(data)
    weights = np.ones(len(ids))
    weights[20] = np.nan
    with pytest.raises(ConfigError, match=re.compile(f"position {ids[20]}.*nan", re.DOTALL)):
        Loader(data, weights=weights)


def test_stream_mode_refuses_weights(shards: Path) -> None:
    for weights in ("2", [1.0]):
        with pytest.raises(ConfigError, match="stream mode cannot apply weights"):
            Loader(shards, mode="stream", weights=weights)


def test_an_epoch_that_does_not_fit_into_memory_is_refused(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(stored_ids(store))
    monkeypatch.setattr(weights_module, "available_memory", lambda: count * 10)
    Loader(store, weights="3")
    with pytest.raises(BudgetError, match="the positions of an epoch do not fit into memory"):
        Loader(store, weights="30")


OUTSIDE = "CASE WHEN position_in_game < 4 THEN {} ELSE 2 END"


@pytest.mark.parametrize("bad", ["NULL", "-1", "1e9", "sqrt(-1.0)", "CAST('x' || position_id AS INT)", "nan"])
def test_only_selected_positions_need_weights(data: Path, bad: str) -> None:
    """Nothing is wrong with the weights of positions that ``where`` leaves out, until it is changed."""
    inside, given = "position_in_game >= 4", OUTSIDE.format(bad.replace("nan", "'nan'::FLOAT"))
    loader = Loader(data, batch_size=40, fields=IDS, where=inside, weights=given)
    plain = Loader(data, batch_size=40, fields=IDS, where=inside, weights="2")
    assert ids_of(loader) == ids_of(plain)
    state = loader.state_dict()
    with pytest.raises(ConfigError):
        loader.set_epoch(1, where="position_in_game >= 3")
    assert loader.state_dict() == state
    loader.set_epoch(1, where="position_in_game >= 5")
    assert loader.positions == 2 * Loader(data, where="position_in_game >= 5").positions
    with pytest.raises(ConfigError):
        Loader(data, weights=given)


@pytest.mark.parametrize("kind", ["array", "pair", "pair without the others"])
@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf])
def test_only_selected_positions_need_weights_in_arrays(data: Path, kind: str, bad: float) -> None:
    ids = stored_ids(data)
    inside = np.isin(ids, stored_ids(data, where="position_in_game >= 4"))
    array = np.where(inside, 1.5, bad)
    pair = (ids[inside], array[inside]) if "without" in kind else (ids, array)
    weights = array if kind == "array" else pair
    loader = Loader(data, fields=IDS, where="position_in_game >= 4", weights=weights)
    array[:] = 0  # the loader has its own copy
    assert loader.positions == Loader(data, where="position_in_game >= 4", weights="1.5").positions
    with pytest.raises(ConfigError, match="a weight cannot be used"):
        loader.set_epoch(1, where=None)
    loader.set_epoch(1, where="position_in_game >= 5")
    assert loader.positions == Loader(data, where="position_in_game >= 5", weights="1.5").positions


@pytest.mark.parametrize("given", ["position_id % 11 / 5", "1 / 3", "3", "0.999999", "position_id % 7"])
def test_the_positions_before_an_epoch_are_the_sum_of_all_before(store: Path, given: str) -> None:
    weighted = Loader(store, weights=given)._selected.weighted  # type: ignore[union-attr]
    assert weighted is not None
    total = 0
    for epoch in range(300):
        assert weighted.first(epoch) == total
        total += weighted.size(epoch)
    for epoch in (10**7, 2**31 - 1, 2**40):
        assert weighted.first(epoch + 1) - weighted.first(epoch) == weighted.size(epoch)
        assert abs(weighted.first(epoch) - epoch * weighted.weight_sum) < 4 + epoch * 2**-32


def test_a_mixture_of_late_epochs_takes_no_memory(store: Path) -> None:
    loaders = [Loader(store, fields=IDS, weights="position_id % 4 / 2"), Loader(store, fields=IDS)]
    mixture = Mixture(loaders, (1, 2), batch_size=30)
    mixture.set_epoch(10**7, 3)
    tracemalloc.start()
    batches = list(mixture)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    assert len(batches) == len(mixture) - 3
    mixture.set_epoch(2**61)
    resumed = Mixture(loaders, (1, 2), batch_size=30)
    resumed.load_state_dict(mixture.state_dict())
    next(iter(resumed))
