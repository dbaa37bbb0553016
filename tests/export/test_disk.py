"""Exports on a full disk: one clear error, no incomplete files, and the next run resumes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hexdata.errors import BudgetError
from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.progress import Silent
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store

if TYPE_CHECKING:
    from tests.conftest import CopyStore, StoreBytes

LIMITED = """
import resource, sys
size = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
sys.argv = ["hexdata", *sys.argv[2:]]
from hexdata.cli import main
main()
"""
"""A program that runs the command line with a limit on the size of files, in bytes."""
UNCOMPILED = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Without this, Python may leave a truncated bytecode file, which breaks later imports of the module."""

SHARDS = ["--shard-size", "512", "--block-size", "256"]
COMMANDS = {
    "shards": SHARDS,
    "original": ["--format", "pickle", "--order", "original"],
    "shuffled": ["--format", "pickle", "--order", "shuffled"],
}
FILES = {
    "shards": "shards/*.tar",
    "original": "pickles/original/**/*.pkl.gz",
    "shuffled": "pickles/shuffled/**/*.pkl.gz",
}


@pytest.fixture(scope="module")
def shuffled_store(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shuffled store. Read-only: copy it."""
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("shuffled") / "store")
    shuffle_store(store, ShuffleOptions(seed=5, buckets=4, threads=1))
    return store


def export(kind: str, store: Path, progress: Silent | None = None) -> Any:
    if kind == "shards":
        options = ExportOptions(shard_size=512, block_size=256, workers=1)
        return export_shards(store, options, progress or Silent())
    return export_pickles(store, PicklesOptions(order=kind, workers=1), progress or Silent())


def left_over(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize(("kind", "workers"), [*((kind, "1") for kind in COMMANDS), ("shards", "2")])
def test_a_file_size_limit_stops_an_export_cleanly(
    shuffled_store: Path, copy_store: CopyStore, store_bytes: StoreBytes, kind: str, workers: str
) -> None:
    """Run in a separate process, because the limit cannot be raised again. Its workers inherit it."""
    store, whole = copy_store(shuffled_store), copy_store(shuffled_store, "whole")
    export(kind, whole)
    sizes = {path.relative_to(whole): path.stat().st_size for path in whole.glob(FILES[kind])}
    largest = max(sizes, key=lambda name: sizes[name])
    assert sizes[largest] > max(path.stat().st_size for path in store.glob("manifest.json"))
    command = ["export", str(store), "--workers", workers, *COMMANDS[kind]]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(sizes[largest] - 1), *command],
        capture_output=True,
        text=True,
        env=os.environ | UNCOMPILED,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hexdata: ")]
    message = line.removeprefix("hexdata: ").partition(": the disk is full; found ")
    assert sizes[Path(message[0]).relative_to(store)] == sizes[largest]
    assert message[2].startswith(os.strerror(errno.EFBIG))
    assert line.endswith(" free. Free disk space and run the command again. It continues where it stopped.")
    assert left_over(store) == []
    assert not {"export", f"pickles-{kind}"} & Store.open(store).manifest.stages.keys()
    export(kind, store)
    assert store_bytes(store) == store_bytes(whole)


# --- a disk that fills up -----------------------------------------------------------------------------


class Filler(Silent):
    """Fills the disk when the first file has been written."""

    def __init__(self, disk: Path) -> None:
        self.ballast = disk / "ballast"

    def advance(self, amount: int) -> None:
        if amount and not self.ballast.exists():
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                self._fill()

    def _fill(self) -> None:
        with self.ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 12)):
                pass


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_full_disk_stops_an_export_cleanly(
    small_disk: Path, shuffled_store: Path, copy_store: CopyStore, store_bytes: StoreBytes, kind: str
) -> None:
    whole = copy_store(shuffled_store, "whole")
    export(kind, whole)
    store = shutil.copytree(shuffled_store, small_disk / "store")
    filler = Filler(small_disk)
    with pytest.raises(BudgetError) as caught:
        export(kind, store, filler)
    assert caught.value.reason == "the disk is full"
    assert str(caught.value.path).startswith(str(store))
    assert str(caught.value.found).startswith(f"{os.strerror(errno.ENOSPC)}, ")
    assert left_over(store) == []
    assert not {"export", f"pickles-{kind}"} & Store.open(store).manifest.stages.keys()
    filler.ballast.unlink()
    assert export(kind, store).resumed == 1
    assert store_bytes(store) == store_bytes(whole)
