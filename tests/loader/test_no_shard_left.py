"""Stream mode without a shard that can be used: an error, and no epoch of empty batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hexdata.errors import StoreError
from hexdata.loader import Loader

if TYPE_CHECKING:
    from tests.shard_folder import MakeShards


def test_missing_shards_are_refused_when_the_loader_is_made(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    for path in folder.path.glob("train-*.tar"):
        path.unlink()
    for mode in ("exact", "stream"):
        with pytest.raises(StoreError, match=r"no shard of train can be used; found .*missing"):
            Loader(folder.path, mode=mode, on_error="skip", batch_size=8)


def test_broken_shards_are_refused_before_a_batch_is_delivered(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    for path in folder.path.glob("train-*.tar"):
        path.write_bytes(path.read_bytes().replace(b"NUMPY", b"NUMPI"))
    loader = Loader(folder.path, mode="stream", on_error="skip", batch_size=8, window=8)
    for worker in range(2):
        with pytest.raises(StoreError, match="no shard of train can be used"):
            next(loader.batches(worker, 2))


@pytest.mark.filterwarnings("ignore:skipped a shard:UserWarning")
def test_one_good_shard_is_enough(make_shards: MakeShards) -> None:
    folder = make_shards(train=64)
    *broken, good = sorted(folder.path.glob("train-*.tar"))
    for path in broken:
        path.write_bytes(path.read_bytes().replace(b"NUMPY", b"NUMPI"))
    loader = Loader(folder.path, mode="stream", on_error="skip", batch_size=8, window=8)
    assert sum(len(batch["value"]) for batch in loader) == 16
    assert good.name not in loader.skipped
