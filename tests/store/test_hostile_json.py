"""Randomly altered manifests: each reader works or gives one clear error, and writes nothing else."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.demo.games import make_games
from hexdata.errors import HexdataError
from hexdata.export import ExportOptions, export_shards
from hexdata.formats.trmph import write_trmph
from hexdata.loader import Loader
from hexdata.report import write_report
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.sql import run_query
from hexdata.store.files import canonical_json
from hexdata.verify import verify_store
from tests.pairs import FULL

MUTATIONS = int(os.environ.get("HEXDATA_HOSTILE_JSON", "60" if FULL else "20"))
"""Number of altered stores; raise it to search for longer."""
VALUES: list[Any] = [
    *(None, True, -1, 0, 1.5, 1e308, 2**31, 2**63, 10**30, "", "x", "13", [], {}, [[]], {"a": {}}),
    *("../../x.parquet", "/etc/passwd", "a\0b", "\x1b[31m", "'); SELECT 1; --", "|O", "\u202e", "a" * 10_000),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store through every stage. Read only: copy it."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "games").mkdir()
    write_trmph(folder / "games" / "a.trmph", list(make_games(8, 1, 5)), 5)
    convert_sources(folder / "games", folder / "store", ConvertOptions(workers=1))
    shuffle_store(folder / "store", ShuffleOptions(seed=7, threads=1))
    export_shards(folder / "store", ExportOptions(workers=1, shard_size=64, block_size=16))
    return folder / "store"


def query(store: Path) -> None:
    with run_query(store, "FROM shards", memory=500_000_000, threads=1) as result:
        assert sum(batch.num_rows for batch in result.batches) >= 0


def load(store: Path) -> None:
    next(iter(Loader(store, split="train", batch_size=16)), None)


READERS: dict[str, Callable[[Path], object]] = {
    "sql": query,
    "load": load,
    "verify": verify_store,
    "shuffle": lambda store: shuffle_store(store, ShuffleOptions(seed=8, threads=1)),
    "export": lambda store: export_shards(store, ExportOptions(workers=1, shard_size=32, block_size=16)),
    "report": lambda store: write_report(store),
}


def places(value: Any, found: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*found, key)
        yield from places(item, (*found, key))


def altered(content: Any, rng: np.random.Generator) -> bytes:
    """Return a JSON text with one random error, possibly with a valid digest."""
    content = copy.deepcopy(content)
    kind = rng.integers(10)
    if kind == 0:
        text = canonical_json(content)
        cut = int(rng.integers(len(text)))
        return [text[:cut], text[:cut] + b"\xff" + text[cut:], b"", b"[" * 200_000, b"\x80\x04N."][cut % 5]
    listed = list(places(content))
    *path, last = listed[rng.integers(len(listed))]
    parent = content
    for key in path:
        parent = parent[key]
    if kind in (1, 2) and isinstance(parent, dict):
        parent[str(VALUES[rng.integers(len(VALUES))])] = parent.pop(last)
    elif kind == 3:
        del parent[last]
    else:
        parent[last] = copy.deepcopy(VALUES[rng.integers(len(VALUES))])
    return sign(content)


def sign(content: Any) -> bytes:
    """Set a manifest's digest to the valid one, as an attacker would."""
    if isinstance(content, dict) and "digest" in content:
        facts = {name: value for name, value in content.items() if name != "digest"}
        compact = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
        text = canonical_json(facts) if "kind" in content else compact
        content["digest"] = hashlib.sha256(text).hexdigest()
    return json.dumps(content).encode()


def contents(folder: Path, without: Path) -> dict[Path, bytes]:
    """Return the files below a folder that do not belong to a store."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and without not in p.parents}


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("number", range(MUTATIONS))
def test_an_altered_file_ends_in_one_clear_error(sound: Path, tmp_path: Path, number: int) -> None:
    rng = np.random.default_rng(number)
    store = shutil.copytree(sound, tmp_path / "deep" / "er" / "store")
    (tmp_path / "x.parquet").write_bytes(b"of somebody else")
    name = ["manifest.json", "shards/manifest.json"][number % 2]
    data = altered(json.loads((store / name).read_bytes()), rng)
    (store / name).write_bytes(data)
    if name.startswith("shards"):  # and the store's manifest agrees
        manifest = json.loads((store / "manifest.json").read_bytes())
        manifest["files"][name] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (store / "manifest.json").write_bytes(sign(manifest))
    before = contents(tmp_path, store)
    errors = []
    for reader in [*list(READERS)[:3], list(READERS)[3 + number % 3]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                READERS[reader](store)
            except HexdataError as error:
                errors.append(str(error))
    assert [text for text in errors if "\x1b" in text or len(text) > 2_000] == []
    assert contents(tmp_path, store) == before
