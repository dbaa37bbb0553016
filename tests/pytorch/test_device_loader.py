"""Tests of ``DeviceLoader`` on the CPU against the ``Loader`` it was made from, and of its seeded order."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.batch import FIELDS
from hexdata.errors import BudgetError, ConfigError
from hexdata.loader import Loader
from hexdata.order import Permutation, derive_key, sort_key
from tests.loader.game_stores import SEARCHED, add_search, position_rows, sample_games, write_store
from tests.pairs import every_pair
from tests.shard_folder import ShardFolder

torch = pytest.importorskip("torch")

from hexdata.torch import DeviceLoader, as_tensors  # noqa: E402 - only where PyTorch is
from hexdata.torch import arrays as torch_arrays  # noqa: E402

MakeLoader = Callable[..., Loader]
TIERS = (0.0, 0.25, 0.7, 1.0)
CPU = torch.device("cpu")
DATA: dict[str, dict[str, Any]] = {
    "games": {"n": 13, "games": 8},
    "games and positions": {"n": 11, "games": 6, "loose": 3, "own": True},
    "search": {"n": 9, "games": 9, "loose": 3, "search": True},
    "positions": {"n": 7, "games": 0, "loose": 9, "search": True},
    "large boards": {"n": 17, "games": 2, "loose": 1, "own": True, "search": True},
}
"""Stores: the board size, the number of games, and of games whose positions are held one by one; whether each
position has an id and a value of its own; and whether there are results of a search."""


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> MakeLoader:
    """Return ``load(name, **options)``: a loader of a store of ``DATA``, or of "shards"."""

    @cache
    def written(name: str) -> tuple[Path, bool]:
        folder = tmp_path_factory.mktemp("data") / "store"
        if name == "shards":
            return ShardFolder(folder, {"train": 134}, dense=True, targets=True).path, True
        facts = DATA[name]
        games = sample_games(facts["games"] + facts.get("loose", 0), facts["n"], facts["n"])
        rows = []
        for number, game in enumerate(games):
            game["split"] = "train"
            own = position_rows(game, facts["n"], number % 2)
            if number >= facts["games"]:
                own = [{**row, "game_id": None} for row in own]
            rows += own
        if facts.get("own"):
            rows = [
                {**rows[i], "value": i / len(rows)} for i in np.random.default_rng(1).permutation(len(rows))
            ]
        if facts.get("search"):
            add_search(rows, facts["n"])
            rows[-1]["move"] = games[-1]["moves"][0]  # on an occupied cell, which becomes a policy
        targets = SEARCHED if facts.get("search") else ()
        return write_store(folder, facts["n"], games, [rows], targets=targets), bool(targets)

    def make(name: str, **options: Any) -> Loader:
        path, has_search = written(name)
        if options.get("fields") == FIELDS and has_search:
            own = (each for each in SEARCHED if name != "shards" or each != "extra.limits")
            options["fields"] = (*FIELDS, *own)
        return Loader(path, **{"batch_size": 50, "seed": 5, **options})

    return make


def compare(ours: Any, plain: Any) -> int:
    """Compare the batches of two iterations, and return their number."""
    number = 0
    for batch, arrays in zip(ours, plain, strict=True):
        expected = as_tensors(arrays)
        assert [*batch] == [*expected]
        for name, tensor in expected.items():
            assert (batch[name].dtype, batch[name].shape) == (tensor.dtype, tensor.shape), name
            assert batch[name].is_contiguous()
            assert batch[name].numpy().tobytes() == tensor.numpy().tobytes(), name
        number += 1
    return number


def compare_epochs(make: Callable[[], Loader], epochs: int = 2) -> None:
    """Compare whole epochs of a ``DeviceLoader`` with those of a loader, with their digests and states."""
    ours, plain = DeviceLoader(make(), "cpu"), make()
    for epoch in range(epochs):
        assert (ours.epoch, ours.batch, len(ours)) == (epoch, 0, len(plain))
        assert compare(ours, plain) == len(plain) > 0
        assert ours.epoch_digest == plain.epoch_digest is not None
        assert ours.state_dict() == plain.state_dict()


@every_pair(
    name=[*DATA, "shards"],
    symmetry=[False, True],
    final=["zeros", "uniform", "skip"],
    board=["float32", "float16", "uint8", "packed", "fill"],
    planes=[2, 3],
    selection=[
        {},
        {"shuffle": False},
        {"where": "value_sample_tier < 2"},
        {"weights": "0.5 + position_id % 3", "remainder": "pad"},
        {"remainder": "drop", "batch_size": 7, "rank": 1, "world_size": 3},
    ],
)
def test_every_field_equals_that_of_the_loader(
    load: MakeLoader,
    name: str,
    symmetry: bool,
    final: str,
    board: str,
    planes: int,
    selection: dict[str, Any],
) -> None:
    options = {"symmetry": symmetry, "final_policy": final, "board": board, "planes": planes, **selection}
    compare_epochs(lambda: load(name, fields=FIELDS, tier_probability=TIERS, **options))


def test_states_are_interchangeable_after_every_batch(load: MakeLoader) -> None:
    def make() -> Loader:
        return load("games and positions", batch_size=200, fields=("position_id", "board"), symmetry=True)

    whole = make()
    list(whole)
    for batches in range(len(whole) + 1):
        ours, plain = DeviceLoader(make(), "cpu"), make()
        assert compare(islice(ours, batches), islice(plain, batches)) == batches
        state = json.loads(json.dumps(ours.state_dict()))
        assert state == plain.state_dict()
        device, host = DeviceLoader(make(), "cpu"), make()
        device.load_state_dict(state)
        host.load_state_dict(state)
        compare(device, host)
        expected = whole.epoch_digest if batches < len(whole) else host.epoch_digest
        assert device.epoch_digest == host.epoch_digest == expected


def test_batches_are_made_without_waiting_for_the_device(
    load: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only sparse policies make it wait, for the number of their entries."""
    options = {"fields": FIELDS, "symmetry": True, "tier_probability": TIERS, "newest": 4}
    ours = DeviceLoader(load("games and positions", **options), "cpu")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the host waits for the device")

    batches = iter(ours)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "cpu"):
            patch.setattr(torch.Tensor, name, refuse)
        for name in ("tensor", "from_numpy", "nonzero"):
            patch.setattr(torch, name, refuse)
        delivered = [*islice(batches, len(ours))]
    compare(delivered, load("games and positions", **options))


def test_what_a_device_cannot_do_is_refused(load: MakeLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("nonsense", None, 1.5, "cuda:99"):
        with pytest.raises(ConfigError, match="device cannot be used"):
            DeviceLoader(load("shards"), device)
    for options in ({"mode": "stream", "batch_size": 48}, {"transform": dict}):
        with pytest.raises(ConfigError, match="DeviceLoader"):
            DeviceLoader(load("shards", **options), "cpu")
    loader = load("games")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4_000_000, 8_000_000))
    with pytest.raises(BudgetError, match="4 MB"):
        torch_arrays.TorchArrays(torch.device("cuda")).put_all({"array": np.zeros(4_000_001, np.uint8)})
    empty = torch.empty

    def full(shape: Any, **options: Any) -> Any:
        if shape == 1:
            return empty(shape, **options)
        raise RuntimeError("MPS backend out of memory (MPS allocated: 18 GB)\nUse …")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(BudgetError, match="18 GB"):
        DeviceLoader(loader, "cpu")


# --- the seeded order ---------------------------------------------------------------------------------

KEYS = [0, (1 << 64) - 1, derive_key(3, "epoch", 0), derive_key(3, "epoch", 1)]
POWERS = [17, 20, 31, 32, 33, 48, 61]
LENGTHS = [0, 1, 3, 169, 65_535, 65_536, 65_537, 97_321_456, 1 << 62]
LENGTHS += [(1 << power) + change for power in POWERS for change in (-1, 0, 1)]


@pytest.mark.parametrize("key", KEYS)
def test_sort_keys_equal_those_of_numpy(key: int) -> None:
    random = np.random.default_rng(1)
    ids = np.concatenate([np.arange(1000), random.integers(-(1 << 63), 1 << 63, 1000)]).reshape(2, -1)
    keys = torch_arrays.sort_key(torch.from_numpy(ids), key)
    assert keys.numpy().view(np.uint64).tolist() == sort_key(ids, key).tolist()


@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("n", LENGTHS)
def test_a_permutation_equals_that_of_numpy(n: int, passes: int) -> None:
    """With the numbers of passes on a CPU and on an accelerator."""
    ends, random = np.arange(min(n, 500)), np.random.default_rng(n)
    indices = np.stack([ends, n - 1 - ends, random.integers(0, max(n, 1), len(ends))])
    for key in KEYS if n > 1 << 16 else KEYS[2:3]:
        permutation = torch_arrays.DevicePermutation(n, key, CPU)
        permutation._passes = passes
        taken = permutation[torch.from_numpy(indices)]
        assert taken.dtype == torch.int64
        assert (taken.numpy() == Permutation(n, key)[indices]).all()
