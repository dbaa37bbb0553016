"""Tests of loaders that read from an S3 server, which can be told to fail."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.errors import StoreError
from hexdata.loader import Loader

if TYPE_CHECKING:
    from upath import UPath

    from tests.shard_folder import MakeShards, ShardFolder

STREAM: dict[str, Any] = {"batch_size": 12, "streams": (2, 2), "window": 24}

Upload = Callable[[Path], str]


@pytest.fixture
def upload(bucket: UPath) -> Upload:
    """Return a function that uploads a folder of shards and returns the address of the store."""

    def put(folder: Path) -> str:
        for path in folder.iterdir():
            (bucket / "store" / "shards" / path.name).write_bytes(path.read_bytes())
        return f"{str(bucket).rstrip('/')}/store"

    return put


def assert_same(ours: Any, theirs: Any) -> None:
    """Check that batches are equal, byte by byte."""
    for batch, other in zip(ours, theirs, strict=True):
        assert batch.keys() == other.keys()
        for name, array in batch.items():
            assert array.tobytes() == other[name].tobytes(), name


# --- stream mode ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"cache": None}, {"prefetch": 3}, {"cache_size": 30_000}],
    ids=["no cache", "prefetch 3", "small cache"],
)
def test_batches_equal_those_of_local_shards(
    upload: Upload, shards: ShardFolder, options: dict[str, Any]
) -> None:
    """For two epochs, and for two ranks with two workers each."""
    address = upload(shards.path)
    ours, theirs = Loader(address, **STREAM, **options), Loader(shards.path, mode="stream", **STREAM)
    for _ in range(2):
        assert_same(ours, theirs)
    assert ours.epoch_digest == theirs.epoch_digest
    for rank, worker in itertools.product(range(2), range(2)):
        ranked = {**STREAM, "rank": rank, "world_size": 2}
        ours, theirs = Loader(address, **ranked, **options), Loader(shards.path, mode="stream", **ranked)
        made = [[each.batch for each in loader._deliveries(worker, 2)] for loader in (ours, theirs)]
        assert_same(*made)


def test_shards_with_other_bytes_are_refused(make_shards: MakeShards, upload: Upload, bucket: UPath) -> None:
    """Digests are checked when a shard is fetched, and again with ``check="digests"``."""
    folder = make_shards(train=64)
    address = upload(folder.path)
    name = folder.shards["train"][1].name
    shard = bucket / "store" / "shards" / name
    data = shard.read_bytes()
    shard.write_bytes(data[:700] + bytes([data[700] ^ 1]) + data[701:])
    for mode in ("stream", "exact"):
        with pytest.raises(StoreError, match=rf"{name}: the shard is truncated or altered; found .*SHA-256"):
            list(Loader(address, mode=mode))
    shard.write_bytes(data)
    cache = Path(os.environ["HEXDATA_CACHE"]) / "shards"
    for mode in ("stream", "exact"):
        ours, theirs = Loader(address, mode=mode), Loader(folder.path, mode=mode)
        assert_same(ours, theirs)
        copy = cache / f"{folder.shards['train'][1].sha256}.tar"
        copy.write_bytes(data[:700] + bytes([data[700] ^ 1]) + data[701:])
        assert_same(Loader(address, mode=mode, check="digests"), Loader(folder.path, mode=mode))
        assert copy.read_bytes() == data
