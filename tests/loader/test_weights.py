"""Tests of ``weights``: exact counts of each position per epoch, equal to those of ``docs/order.md``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hexdata.errors import ConfigError
from hexdata.loader import Loader
from hexdata.order import Permutation, derive_key
from tests.kit.loaders import ids_of

PAGE = Path(__file__).parents[2] / "docs" / "order.md"
IDS = ("position_id",)

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
        numbers = (realised.epoch, realised.delivered, realised.positions)
        assert numbers == (epoch, len(items), len(set(items)))
        assert realised.weight_sum == pytest.approx(weights.sum())
        assert realised.ratio == len(items) / realised.weight_sum
        order = Permutation(len(items), derive_key(9, "epoch", epoch)).slice(0, len(items))
        assert list(chain(*ids_of(loader))) == items[order].tolist()
    assert Loader(data, weights=65_535 * (ids == ids[0])).positions == 65_535


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


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("weight", "coalesce"),
        ("coalesce(visits, 0)", "least"),
        ("value_sample_tier", r"a weight cannot be used.*null or nan"),
        ("-1.5", r"position \d+: a weight cannot be used.*-1.5"),
        ("if(position_id % 50 = 7, -2, 1)", r"position \d*7: a weight cannot be used"),
        ("65_535.01", "a weight cannot be used.*65,535"),
        ("0", "the weights select no position"),
        ("1 / 100_000", "the weights select no position.*sum of at least 1"),
        ("'2'", "weights is not a number.*VARCHAR"),
        ("move > 3", "weights is not a number.*BOOLEAN"),
        ([1.0, 2.0], "weights have another length"),
        (np.ones((2, 2)), "weights cannot be used"),
        (([1, 1], [1.0, 2.0]), "position 1: weights contain a position twice"),
        (([1, 2], [1.0]), "weights have another length"),
        (([1, 2], [1.0, 2.0]), r"position \d+: a weight cannot be used.*null or nan"),
        (([1.5, 2.0], [1.0, 2.0]), "the position ids of weights cannot be used"),
    ],
)
def test_wrong_weights_are_refused(data: Path, weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        Loader(data, weights=weights)


@pytest.mark.parametrize("bad", ["NULL", "CAST('x' || position_id AS INT)"])
def test_only_selected_positions_need_weights(data: Path, bad: str) -> None:
    """Nothing is wrong with the weights of positions that ``where`` leaves out, until it is changed."""
    inside, given = "position_in_game >= 4", f"CASE WHEN position_in_game < 4 THEN {bad} ELSE 2 END"
    loader = Loader(data, batch_size=40, fields=IDS, where=inside, weights=given)
    plain = Loader(data, batch_size=40, fields=IDS, where=inside, weights="2")
    assert ids_of(loader) == ids_of(plain)
    state = loader.state_dict()
    with pytest.raises(ConfigError):
        loader.set_epoch(1, where="position_in_game >= 3")
    assert loader.state_dict() == state
    assert Loader(data, where=inside).state_dict()["rows"] != Loader(data).state_dict()["rows"] is None
    loader.set_epoch(1, where="position_in_game >= 5")
    assert loader.positions == 2 * Loader(data, where="position_in_game >= 5").positions
    with pytest.raises(ConfigError):
        Loader(data, weights=given)
