"""Arguments of public classes and functions: accepted, or refused by an error with their name."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from hexdata import (
    ConvertOptions,
    LiveLoader,
    Loader,
    Permutation,
    PositionDataset,
    balanced_take,
    convert_sources,
    derive_key,
    read_game,
    read_position,
    shuffle_indices,
    verify_store,
)
from hexdata.errors import BudgetError, ConfigError, HexdataError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.loader.mixture import Mixture
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.verify import VerifyOptions

NO_INTEGERS = [None, "2", 2.0, True, np.True_, float("nan"), [2], -1]


@pytest.fixture(scope="module")
def shards(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("arguments") / "store")
    shuffle_store(store, ShuffleOptions(seed=3, threads=1))
    export_shards(store, ExportOptions(workers=1))
    return store / "shards"


@pytest.mark.parametrize("form", [Loader, PositionDataset])
@pytest.mark.parametrize("store", [None, 7, True, b"store", ["store"], ""])
def test_a_store_with_an_invalid_address_is_refused(form, store):
    with pytest.raises(ConfigError, match=r"store cannot be used; found .*; expected a path"):
        form(store)


@pytest.mark.parametrize(
    ("name", "least"),
    [("batch_size", 1), ("world_size", 1), ("rank", 0), ("window", 1), ("cache_size", 1)],
)
@pytest.mark.parametrize("value", NO_INTEGERS)
def test_integer_options_of_a_loader_are_checked(shards, name, least, value):
    with pytest.raises(ConfigError, match=f"{name} cannot be used; found .*; expected "):
        Loader(shards, **{name: value})
    Loader(shards, **{name: np.int16(least)})


@pytest.mark.parametrize("size", ["lots", "", "1 parsec", "-5GB", 0, 1.5, None])
def test_an_invalid_cache_size_is_named(shards, size):
    for form in (Loader, PositionDataset):
        with pytest.raises(ConfigError, match=r"cache_size cannot be used; found .*; expected "):
            form(shards, cache_size=size)


@pytest.mark.parametrize("epoch", NO_INTEGERS)
def test_an_epoch_is_an_integer_from_0_on(shards, epoch):
    loader = Loader(shards)
    for each in (loader, PositionDataset(shards), Mixture([loader], [1], batch_size=8)):
        each.set_epoch(np.uint8(3))
        with pytest.raises(ConfigError, match=r"epoch cannot be used; found .*; expected an integer"):
            each.set_epoch(epoch)
    with pytest.raises((TypeError, ValueError), match="epoch must be"):
        shuffle_indices(range(5), 1, epoch)


@pytest.mark.parametrize("weights", [None, 3, "12", [None, 1], [1, "2"], [1, np.nan], [True, 1], [1, -1]])
def test_weights_of_a_mixture_are_numbers(shards, weights):
    loader = Loader(shards)
    with pytest.raises(ConfigError, match="weights cannot be used; found "):
        Mixture([loader, loader], weights, batch_size=8)


@pytest.mark.parametrize("loaders", [None, 3, "loaders", ["store", None]])
def test_loaders_of_a_mixture_are_checked(loaders):
    with pytest.raises(ConfigError, match=r"loaders(\[0\])? cannot be used; found .*; expected "):
        Mixture(loaders, [1, 1])


def test_numpy_integers_give_the_same_order():
    expected = shuffle_indices([*range(20)], 3, 2)
    for kind in (np.int32, np.uint8, np.int64):
        assert shuffle_indices([*range(20)], kind(3), kind(2)) == expected
        assert derive_key(kind(3), "epoch", kind(2)) == derive_key(3, "epoch", 2)
        assert Permutation(kind(20), 7).slice(0, 20).tolist() == Permutation(20, 7).slice(0, 20).tolist()
        taken = balanced_take({"a": kind(9), "b": 5}, kind(1))
        assert [taken[name].tolist() for name in "ab"] == [
            each.tolist() for each in balanced_take({"a": 9, "b": 5}, 1).values()
        ]


@pytest.mark.parametrize("value", [None, "2", 2.0, True, np.True_, float("nan"), [2]])
def test_seeds_of_an_order_are_integers(value):
    with pytest.raises(TypeError, match="a seed must be an integer, not"):
        shuffle_indices(range(5), value)
    with pytest.raises(TypeError, match="a permutation needs an integer length, not"):
        Permutation(value, 1)
    with pytest.raises(TypeError, match="must be an integer, not"):
        Permutation(5, value)
    with pytest.raises(TypeError, match="indices must be a sequence or an array, not NoneType"):
        shuffle_indices(None, 1)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("num_workers", NO_INTEGERS),
        ("prefetch_factor", [*NO_INTEGERS, 0]),
        ("pin_memory", [0, 1, "yes"]),
        ("persistent_workers", [0, None, "yes"]),
        ("multiprocessing_context", ["thread", 3, True]),
    ],
)
def test_options_of_a_torch_loader_are_checked(shards, option, values):
    pytest.importorskip("torch")
    from hexdata.torch import TorchLoader

    loader = Loader(shards)
    for value in values:
        with pytest.raises(
            ConfigError, match=f"({option} cannot be used|unknown {option}); found .*; expected "
        ):
            TorchLoader(loader, **{option: value})
    TorchLoader(loader, num_workers=np.int64(1), prefetch_factor=np.int8(2))


@pytest.mark.parametrize("loader", ["path", None, Path("store"), 3])
def test_a_torch_loader_requires_a_loader(loader):
    pytest.importorskip("torch")
    from hexdata.torch import DeviceLoader, LoaderDataset, TorchLoader

    for form in (TorchLoader, LoaderDataset, DeviceLoader):
        with pytest.raises(ConfigError, match=r"loader cannot be used; found .*; expected a hexdata\.Loader"):
            form(loader)


# --- stages -------------------------------------------------------------------------------------------

NO_NUMBERS = [value for value in NO_INTEGERS if value is not None]
NO_PATHS = [None, 7, True, b"store", ["store"], ""]
REFUSED = r"(cannot be used|unknown .*|leave games for train); found .*; expected "

INTEGERS = {
    ConvertOptions: {"workers": 2, "memory": 10**9},
    ExportOptions: {"workers": 2, "memory": 10**9, "shard_size": 8192, "block_size": 4},
    PicklesOptions: {"workers": 2, "memory": 10**9, "level": 2},
    ShuffleOptions: {"seed": 2, "buckets": 2, "memory": 10**9, "threads": 2, "per_game": 2},
    VerifyOptions: {"memory": 10**9, "threads": 2},
}
OPTIONAL = {"seed", "workers", "buckets", "threads", "per_game"}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, numbers in INTEGERS.items() for name in numbers]
)
def test_integer_options_of_a_stage_are_checked(kind, name):
    for value in [*NO_NUMBERS, 10**30, *([] if name in OPTIONAL else [None])]:
        if name == "seed" and type(value) is int:
            assert kind(seed=value).seed == value
            continue
        with pytest.raises(ConfigError, match=f"{name} {REFUSED}"):
            kind(**{name: value})
    for number in (np.int64, np.uint32):
        accepted = getattr(kind(**{name: number(INTEGERS[kind][name])}), name)
        assert type(accepted) is int
        assert accepted == INTEGERS[kind][name]


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (ConvertOptions, "max_reject_rate", ["0.1", True, None, float("nan"), -0.1, 1.1, 10**400, [0.1]]),
        (ConvertOptions, "value_convention", ["red", True, None, 0, ["auto"]]),
        (ConvertOptions, "val", ["0.1", True, None, float("nan"), -0.1, 1, [0.1]]),
        (ConvertOptions, "test", ["0.1", True, None, float("nan"), -0.1, 1, [0.1]]),
        (ConvertOptions, "salvage", ["yes", 1, None, []]),
        (ConvertOptions, "truncate_repeats", ["yes", 1, None, []]),
        (ExportOptions, "layout", ["tar", True, None, 0, ["blocks"]]),
        (PicklesOptions, "order", ["sorted", True, None, 0, ["original"]]),
        (PicklesOptions, "level", [0, 10]),
        (ShuffleOptions, "where", [True, 3, ["ply > 3"], b"true"]),
        (ShuffleOptions, "balance_by", [True, 3, ["ply"]]),
        (ShuffleOptions, "stratify_by", [True, 3, ["ply"]]),
        (ShuffleOptions, "dedup", [True, None, 0, ["exact"]]),
        (ShuffleOptions, "per_game_by", [True, None, 0, ["key"]]),
        (ShuffleOptions, "assign", [True, None, 0, ["game"]]),
    ],
)
def test_other_options_of_a_stage_are_checked(kind, name, values):
    for value in values:
        with pytest.raises(ConfigError, match=REFUSED):
            kind(**{name: value})


def test_too_little_memory_is_a_budget_error():
    for kind in INTEGERS:
        with pytest.raises(BudgetError):
            kind(memory=0)


STAGES = [
    (shuffle_store, "store", ()),
    (export_shards, "store", ()),
    (export_pickles, "store", ()),
    (verify_store, "store", ()),
    (read_game, "store", (1,)),
    (read_position, "store", (1,)),
    (convert_sources, "inputs", ("new",)),
    (lambda store: convert_sources("games.trmph", store), "store", ()),
    (lambda path: convert_sources([path], "new"), "inputs", ()),
    (LiveLoader, "directory", ()),
]


@pytest.mark.parametrize(("function", "name", "others"), STAGES)
@pytest.mark.parametrize("value", NO_PATHS)
def test_a_location_is_a_path_or_an_address(function, name, others, value):
    if value == ["store"] and function is convert_sources:
        value = [value]  # the option expects a list of inputs
    with pytest.raises(ConfigError, match=f"{name} cannot be used; found .*; expected a path"):
        function(value, *others)


@pytest.mark.parametrize("options", [{}, {"seed": 1}, 3, "fast", True])
def test_options_of_a_stage_have_the_type_of_the_stage(shards, options):
    store = shards.parent
    for function in (shuffle_store, export_shards, export_pickles, verify_store):
        with pytest.raises(ConfigError, match=r"options cannot be used; found .*; expected hexdata\."):
            function(store, options)
    with pytest.raises(ConfigError, match=r"options cannot be used; found .*; expected hexdata\."):
        convert_sources("games.trmph", store, options)


@pytest.mark.parametrize(("function", "name"), [(read_game, "game_id"), (read_position, "position_id")])
def test_a_record_is_selected_by_an_integer(shards, function, name):
    store = shards.parent
    assert getattr(function(store, np.uint8(1)), name) == 1
    for value in [None, "1", 1.0, True, np.True_, float("nan"), [1]]:
        with pytest.raises(ConfigError, match=f"{name} cannot be used; found .*; expected an integer"):
            function(store, value)
    for value in (-1, 10**30):
        with pytest.raises(HexdataError, match=f"no such .*; found .* {value}; expected 0 to"):
            function(store, value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, [*NO_NUMBERS, 10**30]) for name in ("batch_size", "pool_size", "reservoir")),
        ("seed", ["2", 2.0, True, float("nan"), [2]]),
        ("planes", ["2", 2.5, float("nan"), 10**30, [2]]),
        ("split", ["all", 3, True, ["train"]]),
        ("watch", ["yes", 1, [True]]),
        ("symmetry", ["yes", 2, [True]]),
        ("fields", ["board", 3, [3], ["bored"]]),
        ("board", ["float", 3, True]),
        ("final_policy", ["one", 3, True]),
        ("tier_probability", ["1", 1, [1, 1], [1, 1, 1, float("nan")], [1, 1, 1, "1"], [1, 1, 1, 2]]),
        ("warn_after", ["1", True, 0, -1, float("nan"), [1], None]),
        ("timeout", ["1", True, 0, -1, float("nan"), [1]]),
        ("config", [3, True, b"live.toml", [], ""]),
    ],
)
def test_arguments_of_a_live_loader_are_checked(tmp_path, name, values):
    for value in values:
        with pytest.raises(ConfigError, match=r"; (found|expected) "):
            LiveLoader(tmp_path, **{name: value})


def test_numpy_numbers_are_accepted_by_a_live_loader(tmp_path):
    with LiveLoader(tmp_path, seed=np.int64(3), batch_size=np.uint8(4), pool_size=np.int16(5)) as loader:
        assert [loader.options.seed, loader.options.batch_size, loader.options.pool_size] == [3, 4, 5]


# --- positions and tensors ----------------------------------------------------------------------------


def test_positions_are_indexed_like_a_list(shards):
    dataset = PositionDataset(shards, fields=("position_id",))
    ids = [dataset[index]["position_id"] for index in range(len(dataset))]
    for index in (-1, -len(ids), np.int8(3), np.uint64(2), np.array(1)):
        assert dataset[index]["position_id"] == ids[int(index)]
    for index in (len(ids), -len(ids) - 1, 10**30, -(10**30), np.uint64((1 << 64) - 1)):
        with pytest.raises(IndexError, match=f"index {index} is out of range for the {len(ids):,}"):
            dataset[index]
        with pytest.raises(IndexError, match=f"index {index} is out of range for the {len(ids):,}"):
            dataset.batch([index])
    for index in ("2", 2.0, True, np.True_, None, float("nan"), [1], slice(0, 2)):
        with pytest.raises(TypeError, match="the index of a position must be an integer, not "):
            dataset[index]
    for several in ([0, -1], (0, np.int8(1)), np.array([1, 0], np.uint8), range(3), []):
        expected = [ids[int(index)] for index in several]
        assert dataset.batch(several)["position_id"].tolist() == expected
    for several in (5, None, "12", slice(2), [True, False], [0.0], ["1"], [[0, 1]], [[0], [1, 2]], [None]):
        with pytest.raises(TypeError, match="indices must be a sequence or an array of integers, not"):
            dataset.batch(several)


def tensor_calls():
    """Return tuples of function, valid keyword arguments, argument and invalid values for it."""
    torch = pytest.importorskip("torch")
    from hexdata.torch import expand_policy, to_device, unpack

    boards = {"packed": np.zeros((2, 43), np.uint8)}
    moves = {"move": np.array([1, 65535], np.uint16), "cells": 4}
    batch = {"batch": {"value": np.zeros(2, np.float32)}, "device": "cpu"}
    devices = ["nowhere", True, 1.5, [], -1]
    dtypes = ["float32", np.float32, float, None, 3]
    rows = ["x", [0.5, 1.0], [[0], [1]], [True, False], 3]
    return [
        (unpack, boards, "packed", [None, "x", 3, [[0] * 43], np.zeros((2, 43)), np.zeros(43, np.uint8)]),
        (unpack, boards, "board_size", ["13", 13.0, True, -1, 10**30, float("nan"), 12, [13]]),
        (unpack, boards, "player_to_move", [*rows, [0], [0, 1, 0]]),
        (unpack, boards, "dtype", dtypes),
        (unpack, boards, "device", devices),
        (expand_policy, moves, "move", [None, *rows, [4], [-1], torch.tensor([70000])]),
        (expand_policy, moves, "cells", ["4", 4.0, True, None, 0, -1, 10**30, 10**6, float("nan"), [4]]),
        (expand_policy, moves, "final_policy", ["skip", None, 0, ["zeros"]]),
        (expand_policy, moves, "dtype", dtypes),
        (expand_policy, moves, "device", devices),
        (to_device, batch, "batch", [None, 3, "batch", [1], {"value": "x"}, {"value": None}]),
        (to_device, batch, "device", devices),
    ]


def test_arguments_of_the_functions_for_tensors_are_checked():
    for function, usable, name, values in tensor_calls():
        function(**usable)
        for value in values:
            refused = "packed cannot be used" if name in ("packed", "board_size") else f"unknown {name}"
            with pytest.raises(
                ConfigError, match=rf"({name}.* cannot be used|{refused}); found .*; expected "
            ):
                function(**{**usable, name: value})


def test_numpy_integers_are_accepted_for_tensors():
    pytest.importorskip("torch")
    from hexdata.torch import expand_policy, unpack

    assert unpack(np.zeros((2, 43), np.uint8), np.int64(13)).shape == (2, 2, 13, 13)
    assert expand_policy([1, 2], np.uint8(4)).tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
