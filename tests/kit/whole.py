"""The stages after ``convert`` with fixed options. The fixture ``whole_store`` has run all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hexdata.export import ExportOptions, PicklesOptions, export_pickles, export_shards
from hexdata.progress import SILENT
from hexdata.shuffle import ShuffleOptions, shuffle_store

SHUFFLE = ShuffleOptions(seed=5, buckets=4, threads=1)
SHARDS = ExportOptions(shard_size=512, block_size=128, workers=1)
ORIGINAL, SHUFFLED = (PicklesOptions(order=order, workers=1, level=1) for order in ("original", "shuffled"))
STAGES: dict[str, Callable[..., Any]] = {
    "shuffle": lambda store, progress=SILENT: shuffle_store(store, SHUFFLE, progress),
    "shards": lambda store, progress=SILENT: export_shards(store, SHARDS, progress),
    "original": lambda store, progress=SILENT: export_pickles(store, ORIGINAL, progress),
    "shuffled": lambda store, progress=SILENT: export_pickles(store, SHUFFLED, progress),
}
FOLDERS = {
    "shuffle": "shuffled",
    "shards": "shards",
    "original": "pickles/original",
    "shuffled": "pickles/shuffled",
}
