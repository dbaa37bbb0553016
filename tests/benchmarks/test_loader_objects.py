"""The loader over an object store, from a warm cache, against the same shards in a folder; in one run."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.loader import Loader
from hexdata.shards.manifest import ShardManifest

if TYPE_CHECKING:
    from upath import UPath

HERE = Path(__file__).parent
POSITIONS = 1_000_000
LEAST_SHARE = 0.8
"""Of the local rate; 0.9 is the aim, and what a machine with nothing else to do gives."""
ROUNDS = 7


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards of ``POSITIONS`` random positions, with the digests that a cache asks for."""
    path = tmp_path / "shards"
    path.mkdir()
    subprocess.run([sys.executable, HERE / "positions.py", path, str(POSITIONS)], check=True)
    (path / "records.npy").unlink()
    manifest = ShardManifest.load(path)
    entries = [
        replace(entry, sha256=hashlib.sha256((path / entry.name).read_bytes()).hexdigest())
        for entry in manifest.splits["train"]
    ]
    (path / "manifest.json").write_bytes(replace(manifest, splits={"train": entries}).dumps())
    return path


@pytest.fixture
def address(bucket: UPath, folder: Path) -> str:
    """The same in a bucket."""
    for path in folder.iterdir():
        (bucket / "shards" / path.name).write_bytes(path.read_bytes())
    return f"{str(bucket).rstrip('/')}/shards"


def run(loader: Loader) -> None:
    """Deliver an epoch."""
    assert sum(len(batch["value"]) for batch in loader) == POSITIONS


@pytest.mark.parametrize("mode", ["exact", "stream"])
def test_from_a_warm_cache(
    folder: Path, address: str, mode: Any, versus: Callable[..., float], report: Callable[[str], None]
) -> None:
    options: dict[str, Any] = {"mode": mode, "batch_size": 1024, "planes": 3}
    start = time.perf_counter()
    ours = Loader(address, **options)
    run(ours)
    report(
        f"from an empty cache: {POSITIONS / (time.perf_counter() - start):,.0f} positions/s, opened and all"
    )
    local = Loader(folder, **options)
    run(local)
    assert ours.epoch_digest == local.epoch_digest
    share = versus(lambda: run(ours), lambda: run(local), POSITIONS, ROUNDS)
    assert share > LEAST_SHARE
