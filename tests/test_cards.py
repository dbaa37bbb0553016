"""The generated files that describe a store: dataset cards, and the metadata of Croissant."""

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
from hexdata.errors import VerifyError
from hexdata.export import ExportOptions, export_shards
from hexdata.loader import Loader
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.store import Store
from hexdata.verify import verify_store
from hexdata.verify.tables import check_files
from tests.conftest import CopyStore, StoreBytes

SHUFFLE = ShuffleOptions(seed=3, threads=1)
EXPORT = ExportOptions(shard_size=256, block_size=64, workers=1)
LOAD = """
import json, sys
import datasets

datasets.disable_progress_bars()
folder, cache = sys.argv[1:3]
found = {}
for config in datasets.get_dataset_config_names(folder):
    loaded = datasets.load_dataset(folder, config, cache_dir=cache)
    found[config] = {split: len(rows) for split, rows in loaded.items()}
default = datasets.load_dataset(folder, split="train", cache_dir=cache)
assert "hexdata" not in sys.modules
key = "position_id" if "position_id" in default.column_names else "position_id.npy"
print(json.dumps([found, list(default[key])]))
"""


@pytest.fixture(scope="module")
def store(trmph_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with all stages. Read only: copy it."""
    store = tmp_path_factory.mktemp("cards") / "store"
    shutil.copytree(trmph_store, store)
    shuffle_store(store, SHUFFLE)
    export_shards(store, EXPORT)
    return store


def load(folder: Path, scratch: Path) -> Any:
    """Return the rows by config and split that ``datasets`` loads, and the ids of the default config."""
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(scratch), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", LOAD, str(folder), str(scratch / "cache")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=scratch, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def stored_ids(store: Path) -> list[int]:
    return [
        int(number)
        for batch in Loader(store / "shards", shuffle=False, fields=("position_id",))
        for number in batch["position_id"]
    ]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("datasets"), reason="needs datasets of Hugging Face")
def test_datasets_loads_a_store(store: Path, tmp_path: Path) -> None:
    found, ids = load(store, tmp_path)
    manifest = Store.open(store).manifest
    splits = manifest.stages["shuffle"]["splits"]
    assert found == {
        "shuffled": {split: count for split, count in splits.items() if count},
        **{
            name: {"all_splits": manifest.counts[name]}
            for name in ("positions", "games", "sources", "rejected")
        },
    }
    assert ids == stored_ids(store)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("datasets"), reason="needs datasets of Hugging Face")
def test_datasets_loads_shards(store: Path, tmp_path: Path) -> None:
    found, ids = load(store / "shards", tmp_path)
    assert found["shards"].keys() == {"train", "val", "test"}
    assert [number for block in ids for number in block] == stored_ids(store)


def test_the_example_of_the_card_unpacks_boards(store: Path) -> None:
    text = (store / "README.md").read_text(encoding="utf-8")
    example = text.rpartition("```python\n")[2].partition("```")[0]
    (bucket, *_) = sorted((store / "shuffled" / "train").iterdir())
    packed = pq.read_table(bucket, columns=["board"])["board"].to_pylist()
    names: dict[str, Any] = {"positions": _Rows(packed)}
    exec(example, names)
    board_size = Store.open(store).manifest.board_size
    rows = np.frombuffer(b"".join(packed[:256]), np.uint8).reshape(min(256, len(packed)), -1)
    assert np.array_equal(names["boards"], unpack_boards(rows, board_size, np.uint8))


class _Rows:
    """Rows that are sliced as those of ``datasets.Dataset``."""

    def __init__(self, boards: list[bytes]) -> None:
        self._boards = boards

    def __getitem__(self, rows: slice) -> dict[str, list[bytes]]:
        return {"board": self._boards[rows]}


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


def test_cards_follow_the_stages(trmph_store: Path, store: Path, copy_store: CopyStore) -> None:
    assert "shuffled" not in (trmph_store / "README.md").read_text(encoding="utf-8")
    copy = copy_store(store)
    before = {name: (copy / name).stat() for name in CARDS}
    export_shards(copy, EXPORT)
    after = {name: (copy / name).stat() for name in CARDS}
    assert [(s.st_ino, s.st_mtime_ns) for s in after.values()] == [
        (s.st_ino, s.st_mtime_ns) for s in before.values()
    ]
    export_shards(copy, ExportOptions(shard_size=256, block_size=64, workers=1, free_buckets=True))
    assert "shuffled" not in json.loads((copy / "croissant.json").read_text())["recordSet"][0]["@id"]
    assert verify_store(copy).ok


def test_files_of_others_are_kept(store: Path, copy_store: CopyStore) -> None:
    copy = copy_store(store)
    (copy / "README.md").write_text("mine")
    (copy / "shards" / "README.md").unlink()
    export_shards(copy, EXPORT)
    assert (copy / "README.md").read_text() == "mine"
    assert (copy / "shards" / "README.md").read_bytes() == (store / "shards" / "README.md").read_bytes()


def test_other_files_are_still_errors(store: Path, copy_store: CopyStore) -> None:
    copy = copy_store(store)
    check_files(Store.open(copy), {})
    (copy / "shards" / "readme.txt").write_text("")
    with pytest.raises(VerifyError, match=r"not in the manifest.*shards/readme\.txt"):
        check_files(Store.open(copy), {})


def test_cards_that_cannot_be_written_are_a_warning(
    trmph_store: Path, copy_store: CopyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "README.md")

    copy = copy_store(trmph_store)
    monkeypatch.setattr("hexdata.cards.write_bytes", failing)
    with pytest.warns(UserWarning, match=r"README\.md, .* were not written, the stage is complete"):
        shuffle_store(copy, SHUFFLE)
    assert verify_store(copy).ok


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("mlcroissant"), reason="needs mlcroissant")
def test_the_metadata_of_croissant_are_valid(store: Path) -> None:
    script = """
import json, sys
import mlcroissant

dataset = mlcroissant.Dataset(jsonld=sys.argv[1])
issues = dataset.metadata.ctx.issues
assert not issues.errors, issues.report()
ids = {}
for records in dataset.metadata.record_sets:
    rows = list(dataset.records(records.uuid))
    ids[records.uuid] = [row.get(f"{records.uuid}/position_id") for row in rows]
    if records.uuid == "shuffled":
        splits = [row["shuffled/split"].decode() for row in rows]
print(json.dumps([ids, splits], default=int))
"""
    command = [sys.executable, "-c", script, str(store / "croissant.json")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ids, splits = json.loads(done.stdout.splitlines()[-1])
    counts = Store.open(store).manifest.counts
    assert {name: len(rows) for name, rows in ids.items()} == {"shuffled": counts["positions"], **counts}
    train = [number for number, split in zip(ids["shuffled"], splits, strict=True) if split == "train"]
    assert sorted(train) == sorted(stored_ids(store))
