"""How often verify reads a file. In an object store, each time is a transfer."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.verify import VerifyOptions, verify_store

if TYPE_CHECKING:
    from upath import UPath

    from tests.object_store import ObjectStore


def test_a_shard_is_read_twice(
    bucket: UPath, object_store: ObjectStore, trmph_store: Path, tmp_path: Path
) -> None:
    """Once for its digest and once for the comparison of blocks and offsets."""
    local = shutil.copytree(trmph_store, tmp_path / "store")
    shuffle_store(local, ShuffleOptions(seed=1, buckets=2, threads=1))
    export_shards(local, ExportOptions(shard_size=1024, block_size=256, workers=1))
    bucket.fs.put(str(local), f"{bucket.path.strip('/')}/store", recursive=True)
    object_store.requests()
    verify_store(bucket / "store", VerifyOptions(threads=1)).require()
    asked = Counter(path for method, path in object_store.requests() if method == "GET")
    found = {path.rpartition("/")[2]: count for path, count in asked.items() if path.endswith(".tar")}
    assert found == {path.name: 2 for path in (local / "shards").glob("*.tar")}
