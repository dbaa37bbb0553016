"""Arguments of public classes and functions: wrong ones are refused by an error with their name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from hexdata import (
    ConvertOptions,
    LiveLoader,
    Loader,
    Permutation,
    PositionDataset,
    convert_sources,
    read_game,
    read_position,
    shuffle_indices,
    verify_store,
)
from hexdata.errors import ConfigError, HexdataError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.loader.mixture import Mixture
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.verify import VerifyOptions

NAN = float("nan")
NO_NUMBERS: list[Any] = ["2", 2.5, True, np.True_, NAN, [2], -1]
NO_INTEGERS = [None, 2.0, *NO_NUMBERS]
NO_SEEDS = ["2", 2.0, True, [2]]
NO_CHOICES = ["red", True, 0, ["auto"]]
NO_FLAGS = ["yes", 2, []]
NO_TEXTS = [True, 3, ["ply"], b"true"]
Call = Callable[..., Any]


OPTIONS: list[tuple[Call, str, list[Any]]] = [
    (Loader, "batch_size world_size rank window cache_size", NO_INTEGERS),
    (Loader, "split mode check dedup remainder on_error board final_policy planes", NO_CHOICES),
    (Loader, "symmetry", NO_FLAGS),
    (Loader, "seed", NO_SEEDS),
    (Loader, "where weights", ["", " "]),
    (Loader, "cache_size", ["lots", "", "1 parsec", "-5GB", 0]),
    (PositionDataset, "cache_size", ["lots", None]),
    (ShuffleOptions, "seed", NO_SEEDS),
    (ShuffleOptions, "where balance_by stratify_by", NO_TEXTS),
    (ShuffleOptions, "dedup per_game_by assign", NO_CHOICES),
    (ConvertOptions, "max_reject_rate val test", ["0.1", True, None, NAN, -0.1, 1.1, [0.1]]),
    (ConvertOptions, "value_convention variations format alphazero_convention", NO_CHOICES),
    (PicklesOptions, "order", NO_CHOICES),
    (PicklesOptions, "level", [0, 10]),
    (LiveLoader, "batch_size pool_size reservoir", [*NO_NUMBERS, 10**30]),
    (LiveLoader, "split board final_policy", NO_CHOICES),
    (LiveLoader, "watch symmetry", NO_FLAGS),
    (LiveLoader, "seed", NO_SEEDS),
    (LiveLoader, "fields", ["board", 3, [3], ["bored"]]),
    (LiveLoader, "tier_probability", ["1", 1, [1, 1], [1, 1, 1, NAN], [1, 1, 1, 2]]),
    (LiveLoader, "warn_after timeout", ["1", True, 0, -1, NAN, [1]]),
    (LiveLoader, "config", [3, True, b"live.toml", [], ""]),
]


def test_a_wrong_option_is_refused(shards: Path, tmp_path: Path) -> None:
    cases = list(OPTIONS)
    for kind in (ConvertOptions, ExportOptions, PicklesOptions, ShuffleOptions, VerifyOptions):
        hints = get_type_hints(kind)
        integers = [name for name, hint in hints.items() if hint in (int, int | None) and name != "seed"]
        assert "memory" in integers
        cases.append((kind, " ".join(integers), [*NO_NUMBERS, 2.0, 10**30]))
        cases.append((kind, " ".join(name for name, hint in hints.items() if hint is bool), NO_FLAGS))
    places = {Loader: (shards,), PositionDataset: (shards,), LiveLoader: (tmp_path,)}
    for function, names, values in cases:
        for name in names.split():
            for value in values:
                with pytest.raises(ConfigError, match=r"(found|expected) "):
                    function(*places.get(function, ()), **{name: value})  # type: ignore[call-overload]


def test_integers_of_numpy_are_accepted(shards: Path) -> None:
    loader = Loader(shards, batch_size=np.int16(3), world_size=np.uint8(2), rank=np.int64(1))
    assert type(loader.options.batch_size) is int
    for kind in (np.int32, np.uint8):
        assert ShuffleOptions(seed=kind(2), per_game=kind(3)) == ShuffleOptions(seed=2, per_game=3)
        assert shuffle_indices(range(20), kind(3), kind(2)) == shuffle_indices(range(20), 3, 2)
        assert Permutation(kind(20), 7).slice(0, 20).tolist() == Permutation(20, 7).slice(0, 20).tolist()


def test_a_location_is_a_path_or_an_address() -> None:
    opened: list[Call] = [Loader, PositionDataset, LiveLoader, shuffle_store, export_shards, export_pickles]
    opened += [verify_store, lambda store: read_game(store, 1), lambda store: read_position(store, 1)]
    opened += [lambda path: convert_sources([path], "new"), partial(convert_sources, "games.trmph")]
    for open_ in opened:
        for value in (None, 7, True, b"store", ""):
            with pytest.raises(ConfigError, match=r"cannot be used; found .*; expected a path"):
                open_(value)


def test_an_epoch_is_an_integer_from_0_on(shards: Path) -> None:
    loader = Loader(shards)
    for each in (loader, PositionDataset(shards), Mixture([loader], [1], batch_size=8)):
        each.set_epoch(np.uint8(3))  # type: ignore[arg-type]
        for epoch in NO_INTEGERS:
            with pytest.raises(ConfigError, match="epoch"):
                each.set_epoch(epoch)
            with pytest.raises((TypeError, ValueError), match="epoch must be"):
                shuffle_indices(range(5), 1, epoch)


def test_weights_of_a_mixture_are_numbers(shards: Path) -> None:
    loader = Loader(shards)
    for weights in (None, 3, "12", [None, 1], [1, "2"], [1, np.nan], [True, 1], [1, -1]):
        with pytest.raises(ConfigError, match="weights"):
            Mixture([loader, loader], weights, batch_size=8)  # type: ignore[arg-type]
    json.dumps(Mixture([loader], np.ones(1, np.float32), batch_size=8).state_dict())


@pytest.mark.parametrize("function", [read_game, read_position])
def test_a_record_is_selected_by_an_integer(shards: Path, function: Call) -> None:
    assert function(shards.parent, np.uint8(1))
    for value in [None, "1", 1.0, True, NAN, [1], -1, 10**30]:
        with pytest.raises((HexdataError, TypeError), match=r"expected|must be"):
            function(shards.parent, value)


def test_positions_are_indexed_like_a_list(shards: Path) -> None:
    dataset: Any = PositionDataset(shards, fields=("position_id",))
    ids = [dataset[index]["position_id"] for index in range(len(dataset))]
    for index in (-1, -len(ids), np.int8(3), np.array(1)):
        assert dataset[index]["position_id"] == ids[int(index)]
    for index in (len(ids), -len(ids) - 1, 10**30, np.uint64((1 << 64) - 1)):
        for use in (lambda index=index: dataset[index], lambda index=index: dataset.batch([index])):
            with pytest.raises(IndexError, match=str(index)):
                use()
    for several in ([0, -1], (0, np.int8(1)), np.array([1, 0], np.uint8), range(3), []):
        assert dataset.batch(several)["position_id"].tolist() == [ids[int(index)] for index in several]
    for index in ("2", 2.0, True, None, NAN, [1], slice(0, 2)):
        with pytest.raises(TypeError):
            dataset[index]
    for several in (5, None, "12", slice(2), [True, False], [0.0], ["1"], [[0, 1]]):
        with pytest.raises(TypeError):
            dataset.batch(several)


def test_arguments_of_the_functions_for_tensors_are_checked(shards: Path) -> None:
    torch = pytest.importorskip("torch")
    from hexdata.torch import TorchLoader, expand_policy, to_device, unpack

    boards = {"packed": np.zeros((2, 43), np.uint8)}
    moves = {"move": np.array([1, 65535], np.uint16), "cells": 4}
    batch = {"batch": {"value": np.zeros(2, np.float32)}, "device": "cpu"}
    devices = ["nowhere", True, 1.5, [], -1]
    rows = ["x", [0.5, 1.0], [[0], [1]], [True, False], 3]
    loader = {"loader": Loader(shards)}
    TorchLoader(**loader, num_workers=np.int64(1), prefetch_factor=np.int8(2))  # type: ignore[arg-type]
    cases: list[tuple[Call, dict[str, Any], str, list[Any]]] = [
        (unpack, boards, "packed", [None, "x", 3, [[0] * 43], np.zeros((2, 43)), np.zeros(43, np.uint8)]),
        (unpack, boards, "board_size", ["13", 13.0, True, -1, 10**30, 12]),
        (unpack, boards, "player_to_move", [*rows, [0], [0, 1, 0]]),
        (unpack, boards, "dtype", ["float32", np.float32, float, None, 3]),
        (expand_policy, moves, "move", [None, *rows, [4], [-1], torch.tensor([70000])]),
        (expand_policy, moves, "cells", ["4", 4.0, True, None, 0, -1, 10**30]),
        (expand_policy, moves, "final_policy", ["skip", None, 0]),
        (expand_policy, moves, "device", devices),
        (to_device, batch, "batch", [None, 3, "batch", [1], {"value": "x"}]),
        (to_device, batch, "device", devices),
        (TorchLoader, loader, "loader", ["path", None, 3]),
        (TorchLoader, loader, "num_workers", NO_INTEGERS),
        (TorchLoader, loader, "prefetch_factor", [*NO_INTEGERS, 0]),
        (TorchLoader, loader, "pin_memory", [0, "yes"]),
    ]
    for function, usable, name, values in cases:
        for value in values:
            with pytest.raises((ConfigError, TypeError), match=r"(found|expected) "):
                function(**{**usable, name: value})
