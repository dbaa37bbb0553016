"""Tests of ``hexdata.webdataset``: pipelines of the library webdataset over a ``Loader``."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.errors import ConfigError
from hexdata.loader import Loader
from tests.pairs import every_pair
from tests.shard_folder import ShardFolder

torch = pytest.importorskip("torch")

import webdataset as wds  # noqa: E402 - imports PyTorch

from hexdata.webdataset import LoaderPipeline  # noqa: E402 - only where PyTorch is

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # fork
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
]

POSITIONS = 75
BATCH_SIZE = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ShardFolder(tmp_path_factory.mktemp("webdataset") / "shards", {"train": POSITIONS}).path


def make_loader(folder: Path, **options: Any) -> Loader:
    return Loader(folder, **{"batch_size": BATCH_SIZE, "seed": 5, **options})


def epoch_of(folder: Path, epoch: int, **options: Any) -> list[dict[str, Any]]:
    """Return the batches of an epoch, delivered by a plain ``Loader``."""
    loader = make_loader(folder, **options)
    loader.set_epoch(epoch)
    return list(loader)


def keys_of(folder: Path, epoch: int, **options: Any) -> list[str]:
    """Return the position ids of an epoch as the keys of samples, in order."""
    batches = epoch_of(folder, epoch, fields=("position_id",), **options)
    return [f"{number:09d}" for batch in batches for number in batch["position_id"].tolist()]


def make_positions(folder: Path, **options: Any) -> LoaderPipeline:
    return LoaderPipeline(make_loader(folder, **options), samples="positions")


@pytest.mark.parametrize("workers", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_batches_are_those_of_the_loader(folder: Path, workers: int | None, mode: str) -> None:
    options = {"mode": mode, "batch_size": 12, "streams": (4, 6), "symmetry": True}
    pipeline = LoaderPipeline(make_loader(folder, **options))
    samples = pipeline if workers is None else wds.WebLoader(pipeline, batch_size=None, num_workers=workers)
    for epoch in range(3):
        expected = epoch_of(folder, epoch, **options)
        got = list(samples)
        assert [sample.pop("__key__") for sample in got] == [
            f"{epoch:06d}-{step:06d}" for step in range(len(expected))
        ]
        for sample, batch in zip(got, expected, strict=True):
            assert sample.keys() == batch.keys()
            assert all(np.array_equal(sample[name], batch[name]) for name in batch)


def test_positions_are_the_rows_of_the_batches(folder: Path) -> None:
    pipeline = make_positions(folder)
    for epoch in range(2):
        samples = list(pipeline)
        assert [sample["__key__"] for sample in samples] == keys_of(folder, epoch)
        for name in ("board", "policy", "value"):
            rows = np.concatenate([batch[name] for batch in epoch_of(folder, epoch)])
            assert np.array_equal(np.stack([sample[name] for sample in samples]), rows)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_share_the_positions_by_batches(folder: Path, workers: int) -> None:
    loader = wds.WebLoader(make_positions(folder), batch_size=None, num_workers=workers)
    for epoch in range(2):
        keys = keys_of(folder, epoch)
        batches = [keys[start : start + BATCH_SIZE] for start in range(0, len(keys), BATCH_SIZE)]
        shares = [itertools.chain.from_iterable(batches[worker::workers]) for worker in range(workers)]
        turns = itertools.zip_longest(*shares)
        expected = [key for turn in turns for key in turn if key is not None]
        assert [sample["__key__"] for sample in loader] == expected


def test_stages_of_webdataset_follow(folder: Path) -> None:
    pipeline = make_positions(folder)
    red = pipeline.map_dict(value=lambda value: value * 2).select(lambda sample: sample["value"] > 1)
    values, keys = zip(*red.to_tuple("value", "__key__"), strict=True)
    expected = {
        key: row
        for key, row in zip(
            keys_of(folder, 0), np.concatenate([b["value"] for b in epoch_of(folder, 0)]), strict=True
        )
        if row > 0.5
    }
    assert dict(zip(keys, np.array(values) / 2, strict=True)) == expected
    batches = list(pipeline.to_tuple("board", "value").batched(BATCH_SIZE))
    for (board, value), batch in zip(batches, epoch_of(folder, 1), strict=True):
        assert np.array_equal(board, batch["board"])
        assert np.array_equal(value, batch["value"])


@pytest.mark.parametrize("samples", ["batches", "positions"])
def test_ranks_are_found_in_the_environment(
    folder: Path, samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        pipeline = LoaderPipeline(make_loader(folder, fields=("value",)), samples=samples)
        expected = [
            batch["value"] for batch in epoch_of(folder, 0, rank=rank, world_size=2, fields=("value",))
        ]
        got = np.concatenate([np.atleast_1d(sample["value"]) for sample in pipeline])
        assert np.array_equal(got, np.concatenate(expected))
        given = LoaderPipeline(make_loader(folder, rank=1, world_size=3), samples=samples)
        assert (given.loader.options.rank, given.loader.options.world_size) == (1, 3)


@pytest.mark.parametrize("stop", [0, 1, 9, 10, 14, POSITIONS - 1, POSITIONS])
def test_positions_resume_after_any_position(folder: Path, stop: int) -> None:
    pipeline = make_positions(folder)
    list(pipeline)
    got = [sample["__key__"] for sample in itertools.islice(pipeline, stop)]
    state = json.loads(json.dumps(pipeline.state_dict()))
    resumed = make_positions(folder)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state or stop == POSITIONS
    rest = [sample["__key__"] for sample in resumed]
    assert got + rest == (keys_of(folder, 1) if stop < POSITIONS else got + keys_of(folder, 2))
    following = [sample["__key__"] for sample in resumed]
    assert following == keys_of(folder, 2 if stop < POSITIONS else 3)


@every_pair(workers=[0, 1, 2], stop=[1, 5, 14, 33], samples=["batches", "positions"])
def test_torchdata_resumes_a_pipeline(folder: Path, workers: int, stop: int, samples: Any) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        pipeline = LoaderPipeline(make_loader(folder), samples=samples).to_tuple("__key__")
        return torchdata.StatefulDataLoader(pipeline, batch_size=None, num_workers=workers)

    def keys(items: Any) -> list[str]:
        return [key for (key,) in items]

    whole, batches = keys(make()), make()
    iterator = iter(batches)
    got = keys(itertools.islice(iterator, stop))
    state = batches.state_dict()
    del iterator, batches
    resumed = make()
    resumed.load_state_dict(state)
    if got == whole:  # at the end of the epoch the next one begins
        assert keys(resumed)[0] == ("000001-000000" if samples == "batches" else keys_of(folder, 1)[0])
    else:
        assert got + keys(resumed) == whole


def test_repetitions_are_epochs(folder: Path) -> None:
    pipeline = make_positions(folder).repeat(2)
    assert [sample["__key__"] for sample in pipeline] == [*keys_of(folder, 0), *keys_of(folder, 1)]
    endless = make_positions(folder).with_epoch(POSITIONS + 3)
    assert [sample["__key__"] for sample in endless] == [*keys_of(folder, 0), *keys_of(folder, 1)[:3]]


def test_an_epoch_can_be_chosen(folder: Path) -> None:
    pipeline = make_positions(folder)
    next(iter(pipeline))
    pipeline.set_epoch(3)
    assert [sample["__key__"] for sample in pipeline] == keys_of(folder, 3)
    pipeline.set_epoch(3, where="value > 0.5")
    assert [sample["__key__"] for sample in pipeline] == keys_of(folder, 3, where="value > 0.5")


@pytest.mark.parametrize(
    ("options", "found"), [({"remainder": "pad"}, "remainder='pad'"), ({"transform": dict}, "transform")]
)
def test_positions_refuse_options_of_batches(folder: Path, options: dict[str, Any], found: str) -> None:
    assert len(list(LoaderPipeline(make_loader(folder, **options)))) == 8
    with pytest.raises(ConfigError, match=f"cannot use an option of the loader.*{found}"):
        make_positions(folder, **options)


def test_wrong_arguments_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="samples"):
        LoaderPipeline(make_loader(folder), samples="rows")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"expected a hexdata\.Loader"):
        LoaderPipeline("store")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a state of a pipeline of positions"):
        make_positions(folder).load_state_dict(make_loader(folder).state_dict())
