"""Arguments of public constructors and functions: each is accepted, or refused by an error that names it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from hexdata import Loader, Permutation, PositionDataset, balanced_take, derive_key, shuffle_indices
from hexdata.errors import ConfigError
from hexdata.export import ExportOptions, export_shards
from hexdata.loader.mixture import Mixture
from hexdata.shuffle import ShuffleOptions, shuffle_store

NO_INTEGERS = [None, "2", 2.0, True, np.True_, float("nan"), [2], -1]


@pytest.fixture(scope="module")
def shards(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("arguments") / "store")
    shuffle_store(store, ShuffleOptions(seed=3, threads=1))
    export_shards(store, ExportOptions(workers=1))
    return store / "shards"


@pytest.mark.parametrize("form", [Loader, PositionDataset])
@pytest.mark.parametrize("store", [None, 7, True, b"store", ["store"], ""])
def test_a_store_that_is_no_address_is_refused(form, store):
    with pytest.raises(ConfigError, match=r"store cannot be used; found .*; expected a path"):
        form(store)


@pytest.mark.parametrize(
    ("name", "least"),
    [("batch_size", 1), ("world_size", 1), ("rank", 0), ("window", 1), ("cache_size", 1)],
)
@pytest.mark.parametrize("value", NO_INTEGERS)
def test_numbers_of_a_loader_are_integers(shards, name, least, value):
    if name == "cache_size" and value == "2":
        assert Loader(shards, cache_size=value).options.copies.cache_bytes == 2
        return
    with pytest.raises(ConfigError, match=f"{name} cannot be used; found .*; expected "):
        Loader(shards, **{name: value})
    Loader(shards, **{name: np.int16(least)})


@pytest.mark.parametrize("size", ["lots", "", "1 parsec", "-5GB", 0, 1.5, None])
def test_a_cache_size_that_is_none_is_named(shards, size):
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
def test_loaders_of_a_mixture_are_loaders(loaders):
    with pytest.raises(ConfigError, match=r"loaders(\[0\])? cannot be used; found .*; expected "):
        Mixture(loaders, [1, 1])


def test_numpys_integers_give_the_order_of_pythons():
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
def test_the_order_is_named_by_integers(value):
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
def test_a_torch_loader_is_made_of_a_loader(loader):
    pytest.importorskip("torch")
    from hexdata.torch import LoaderDataset, TorchLoader

    for form in (TorchLoader, LoaderDataset):
        with pytest.raises(ConfigError, match=r"loader cannot be used; found .*; expected a hexdata\.Loader"):
            form(loader)
