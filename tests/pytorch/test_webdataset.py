"""Tests of ``hexdata.webdataset``: pipelines of the library webdataset over a ``Loader``."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import webdataset as wds

from hexdata.loader import Loader
from hexdata.webdataset import LoaderPipeline
from tests.pairs import every_pair
from tests.shard_folder import ShardFolder

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
]

POSITIONS = 75
BATCH_SIZE = 10
FIELDS = ("board", "value", "position_id")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ShardFolder(tmp_path_factory.mktemp("webdataset") / "shards", {"train": POSITIONS}).path


def make_loader(folder: Path, **options: Any) -> Loader:
    return Loader(folder, **{"batch_size": BATCH_SIZE, "seed": 5, "fields": FIELDS, **options})


def make_positions(folder: Path) -> LoaderPipeline:
    return LoaderPipeline(make_loader(folder), samples="positions")


def keys_of(folder: Path, epoch: int) -> list[list[str]]:
    """Return the position ids of each batch of an epoch as the keys of samples."""
    loader = make_loader(folder)
    loader.set_epoch(epoch)
    return [[f"{number:09d}" for number in batch["position_id"].tolist()] for batch in loader]


@every_pair(workers=[None, 3], mode=["exact", "stream"])
def test_batches_are_those_of_the_loader(folder: Path, workers: int | None, mode: str) -> None:
    options = {"mode": mode, "batch_size": 12, "streams": (4, 6), "symmetry": True}
    pipeline, plain = LoaderPipeline(make_loader(folder, **options)), make_loader(folder, **options)
    samples = pipeline if workers is None else wds.WebLoader(pipeline, batch_size=None, num_workers=workers)
    for epoch in range(2):
        for step, (sample, batch) in enumerate(zip(list(samples), plain, strict=True)):
            assert sample.pop("__key__") == f"{epoch:06d}-{step:06d}"
            assert sample.keys() == batch.keys()
            assert all(np.array_equal(sample[name], batch[name]) for name in batch)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_positions_are_the_rows_of_the_batches(folder: Path, workers: int) -> None:
    """Workers share them by batches."""
    pipeline, plain = make_positions(folder), make_loader(folder)
    samples = wds.WebLoader(pipeline, batch_size=None, num_workers=workers) if workers else pipeline
    for epoch in range(2):
        batches, got = keys_of(folder, epoch), list(samples)
        shares = [itertools.chain(*batches[worker :: workers or 1]) for worker in range(workers or 1)]
        expected = [key for turn in itertools.zip_longest(*shares) for key in turn if key is not None]
        assert [sample["__key__"] for sample in got] == expected
        rows = {position: row for batch in plain for row, position in zip(*take(batch), strict=True)}
        assert all(np.asarray(sample["board"]).tobytes() == rows[int(sample["__key__"])] for sample in got)


def take(batch: Any) -> tuple[list[bytes], list[int]]:
    """Return the boards and the ids of a batch."""
    return [board.tobytes() for board in batch["board"]], batch["position_id"].tolist()


@pytest.mark.parametrize("samples", ["batches", "positions"])
def test_ranks_are_found_in_the_environment(
    folder: Path, samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    remainder: Any = "short" if samples == "positions" else "auto"
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        pipeline = LoaderPipeline(make_loader(folder), samples=samples)
        expected = make_loader(folder, rank=rank, world_size=2, remainder=remainder)
        got = np.concatenate([np.atleast_1d(sample["position_id"]) for sample in pipeline])
        assert got.tolist() == [number for batch in expected for number in batch["position_id"].tolist()]
        given = LoaderPipeline(make_loader(folder, rank=1, world_size=3), samples=samples)
        assert (given.loader.options.rank, given.loader.options.world_size) == (1, 3)


@pytest.mark.parametrize("stop", [0, 9, 10, POSITIONS - 1, POSITIONS])
def test_positions_resume_after_any_position(folder: Path, stop: int) -> None:
    pipeline, resumed = make_positions(folder), make_positions(folder)
    list(pipeline)
    got = [sample["__key__"] for sample in itertools.islice(pipeline, stop)]
    resumed.load_state_dict(json.loads(json.dumps(pipeline.state_dict())))
    epochs = [list(itertools.chain(*keys_of(folder, epoch))) for epoch in (1, 2, 3)]
    assert got == epochs[0][:stop]
    for expected in (epochs[0][stop:], epochs[1]) if stop < POSITIONS else epochs[1:]:
        assert [sample["__key__"] for sample in resumed] == expected


@every_pair(workers=[0, 2], stop=[1, 14, 33], samples=["batches", "positions"])
def test_torchdata_resumes_a_pipeline(folder: Path, workers: int, stop: int, samples: Any) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        pipeline = LoaderPipeline(make_loader(folder), samples=samples).to_tuple("__key__")
        return torchdata.StatefulDataLoader(pipeline, batch_size=None, num_workers=workers)

    whole, batches, resumed = list(make()), make(), make()
    iterator = iter(batches)
    got = list(itertools.islice(iterator, stop))
    resumed.load_state_dict(batches.state_dict())
    if got == whole:  # at the end of the epoch the next one begins
        (first,) = next(iter(resumed))
        assert first == ("000001-000000" if samples == "batches" else keys_of(folder, 1)[0][0])
    else:
        assert got + list(resumed) == whole
