"""The generated files that describe a store: dataset cards."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from hexdata.board import unpack_boards
from hexdata.cards import CARDS
from hexdata.export import ExportOptions, export_shards
from hexdata.loader import Loader
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.verify import verify_store
from tests.conftest import CopyStore, StoreBytes

SHUFFLE = ShuffleOptions(seed=3, threads=1)
EXPORT = ExportOptions(shard_size=256, block_size=64, workers=1)
DATASETS = """
import json, sys
import datasets

datasets.disable_progress_bars()
found, ids = [], []
for folder in sys.argv[2:]:
    names = datasets.get_dataset_config_names(folder)
    loaded = {name: datasets.load_dataset(folder, name, cache_dir=sys.argv[1]) for name in names}
    found.append({name: {split: len(rows) for split, rows in each.items()} for name, each in loaded.items()})
    default = datasets.load_dataset(folder, split="train", cache_dir=sys.argv[1])
    ids.append(list(default["position_id" if "position_id" in default.column_names else "position_id.npy"]))
assert "hexdata" not in sys.modules
print(json.dumps([found, ids]))
"""


@pytest.fixture(scope="module")
def store(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with all stages. Read only: copy it."""
    store = shutil.copytree(trmph_store, tmp_path_factory.mktemp("cards") / "store")
    shuffle_store(store, SHUFFLE)
    export_shards(store, EXPORT)
    return store


def run(script: str, *arguments: object, **environment: str) -> Any:
    """Return what a script prints last, as JSON."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def stored_ids(store: Path) -> list[int]:
    loader = Loader(store / "shards", shuffle=False, fields=("position_id",))
    return [int(number) for batch in loader for number in batch["position_id"]]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("datasets"), reason="needs datasets of Hugging Face")
def test_datasets_loads_a_store_and_its_shards(store: Path, tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    (tables, shards), (ids, blocks) = run(DATASETS, tmp_path / "cache", store, store / "shards", **offline)
    manifest = Store.open(store).manifest
    splits = manifest.stages["shuffle"]["splits"]
    assert tables == {
        "shuffled": {split: count for split, count in splits.items() if count},
        **{name: {"all_splits": manifest.counts[name]} for name in manifest.counts},
    }
    assert shards["shards"].keys() == {"train", "val", "test"}
    assert ids == [number for block in blocks for number in block] == stored_ids(store)


@pytest.mark.slow
def test_the_cards_describe_the_tables(store: Path) -> None:
    manifest = Store.open(store).manifest
    card = (store / "README.md").read_text(encoding="utf-8")
    for name in ("positions", "games"):
        assert f"| `{name}` | {manifest.counts[name]:,} |" in card
    assert "- 1K<n<10K\n" in card
    assert card.count("  default: true") == 1
    assert "a block of up to 64 positions" in (store / "shards" / "README.md").read_text(encoding="utf-8")


def test_the_example_of_the_card_unpacks_boards(store: Path) -> None:
    example = (
        (store / "README.md").read_text(encoding="utf-8").rpartition("```python\n")[2].partition("```")[0]
    )
    packed = pq.read_table(next((store / "shuffled" / "train").iterdir()), columns=["board"])[
        "board"
    ].to_pylist()

    class Rows:
        """Rows that are sliced as those of ``datasets.Dataset``."""

        def __getitem__(self, rows: slice) -> dict[str, list[bytes]]:
            return {"board": packed[rows]}

    names: dict[str, Any] = {"positions": Rows()}
    exec(example, names)
    rows = np.frombuffer(b"".join(packed[:256]), np.uint8).reshape(min(256, len(packed)), -1)
    assert np.array_equal(names["boards"], unpack_boards(rows, 7, np.uint8))


def test_the_same_store_has_the_same_cards(
    store: Path, trmph_store: Path, copy_store: CopyStore, store_bytes: StoreBytes
) -> None:
    other = copy_store(trmph_store)
    shuffle_store(other, ShuffleOptions(seed=9, threads=1))
    shuffle_store(other, ShuffleOptions(seed=3, threads=2))
    export_shards(other, EXPORT)
    assert {*CARDS} < store_bytes(other).keys()
    assert store_bytes(other) == store_bytes(store)
    for name in CARDS:
        (other / name).unlink()
    assert export_shards(other, EXPORT).already_done
    assert store_bytes(other) == store_bytes(store)


def test_cards_follow_the_stages_and_files_of_others_are_kept(
    trmph_store: Path, store: Path, copy_store: CopyStore
) -> None:
    assert "shuffled" not in (trmph_store / "README.md").read_text(encoding="utf-8")
    copy = copy_store(store)
    inodes = {name: (copy / name).stat().st_ino for name in CARDS}
    export_shards(copy, EXPORT)
    assert {name: (copy / name).stat().st_ino for name in CARDS} == inodes, (
        "equal files are not written again"
    )
    (copy / "README.md").write_text("mine")
    (copy / "shards" / "README.md").unlink()
    export_shards(copy, EXPORT)
    assert (copy / "README.md").read_text() == "mine"
    assert (copy / "shards" / "README.md").read_bytes() == (store / "shards" / "README.md").read_bytes()
    export_shards(copy, ExportOptions(shard_size=256, block_size=64, workers=1, free_buckets=True))
    assert verify_store(copy).ok


def test_cards_that_cannot_be_written_are_a_warning(
    trmph_store: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "README.md")

    copy = copy_store(trmph_store)
    monkeypatch.setattr("hexdata.cards.write_bytes", failing)
    with pytest.warns(UserWarning, match=r"the stage is complete, but README\.md, .* was not written"):
        shuffle_store(copy, SHUFFLE)
    assert verify_store(copy).ok
