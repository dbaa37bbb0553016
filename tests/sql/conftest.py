"""Stores of every kind at every stage, for queries. Tests must not change them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hexdata.convert import ConvertOptions, convert_sources
from hexdata.export import ExportOptions, export_shards
from hexdata.shuffle import ShuffleOptions, shuffle_store
from hexdata.sql import run_query

KINDS = ("none", "one", "converted", "exported", "odd-shuffled", "searched")
TARGETS = ("extra.odd", "extra.temperature", "root_value", "visits", "weight")
"""Optional columns of the store "searched". They are null in the second of its three parts."""


def ask(store: Path, query: str) -> list[dict[str, Any]]:
    """Return the rows of a query."""
    with run_query(store, query, memory=500_000_000, threads=1) as result:
        return [row for batch in result.batches for row in batch.to_pylist()]


@pytest.fixture(scope="session")
def stores(tmp_path_factory, trmph_store, odd_store, write_odd_store) -> dict[str, Path]:
    """A store of each of ``KINDS``: without games, with one, at each stage, and with nulls everywhere."""
    folder = tmp_path_factory.mktemp("stores")
    made = {"converted": trmph_store}
    for name, text in {"none": "#5,z9 b\n", "one": "#5,a1 b\n"}.items():
        (folder / f"{name}.trmph").write_text(text)
        options = ConvertOptions(workers=1, max_reject_rate=1.0)
        convert_sources(folder / f"{name}.trmph", folder / name, options)
        made[name] = folder / name
    for name, of in {"exported": trmph_store, "odd-shuffled": odd_store}.items():
        made[name] = shutil.copytree(of, folder / name)
        shuffle_store(made[name], ShuffleOptions(seed=7, buckets=3, threads=1))
    export_shards(made["exported"], ExportOptions(workers=1, shard_size=1024, block_size=256))
    made["searched"] = write_odd_store(folder / "searched", 300, 3, TARGETS)
    return made


@pytest.fixture(params=KINDS)
def any_store(request: pytest.FixtureRequest, stores: dict[str, Path]) -> Path:
    """Each of the stores in turn."""
    return stores[request.param]
