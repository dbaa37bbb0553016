"""Kinds of loaders, for tests of what holds for every one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hexdata import ConvertOptions, ExportOptions, Loader, ShuffleOptions
from hexdata.convert import convert_sources
from hexdata.export import export_shards
from hexdata.loader import Mixture
from hexdata.shuffle import shuffle_store

__all__ = ["BATCH", "LOADERS", "LoaderKind", "Steps", "ids_of", "make_store"]

Steps = list[list[int]]
"""The position ids of batches."""
BATCH = 12
"""The global batch of a kind is a multiple of this number, which every number of ranks in a test divides."""


def ids_of(batches: Any) -> Steps:
    """Return the position ids of each batch."""
    return [batch["position_id"].tolist() for batch in batches]


@dataclass(frozen=True)
class LoaderKind:
    """One kind of loader.

    Attributes:
        options: Options of ``Loader``.
        once: Whether an epoch delivers each position exactly once.
        make: Makes the loader, given a store and further options; None for ``Loader(store, **options)``.
        counts_ids: Whether there is an epoch digest.
        most_workers: Largest number of workers.
    """

    options: dict[str, Any]
    once: bool = True
    make: Callable[..., Any] | None = None
    counts_ids: bool = True
    most_workers: int = 3

    def __call__(self, store: Path, **changes: Any) -> Any:
        """Return a loader of the positions' ids, with options that have small defaults."""
        given = {"batch_size": BATCH, "seed": 3, "fields": ("position_id",), **self.options, **changes}
        return Loader(store, **given) if self.make is None else self.make(store, **given)


def _mixture(store: Path, **given: Any) -> Mixture:
    fields = given.pop("fields")
    games = Loader(store, fields=fields, mode="games", seed=1)
    exact = Loader(store, fields=fields, mode="exact", seed=2, weights="0.5 + position_id % 3")
    return Mixture([games, exact], (1, 2), **given)


def _double(batch: Any) -> Any:
    """Return a batch with an array more; a transform that can be pickled."""
    return {**batch, "double": 2 * batch["position_id"]}


LOADERS: dict[str, LoaderKind] = {
    "games": LoaderKind({"mode": "games"}),
    "exact": LoaderKind({"mode": "exact"}),
    "stream": LoaderKind({"mode": "stream", "streams": (12, 6), "window": 2}),
    "whole windows": LoaderKind({"mode": "stream", "streams": (12, 6)}),
    "stored order": LoaderKind({"mode": "exact", "shuffle": False}),
    "stored order of games": LoaderKind({"mode": "games", "shuffle": False}),
    "stored order of streams": LoaderKind({"mode": "stream", "shuffle": False}),
    "weighted": LoaderKind({"mode": "games", "weights": "0.5 + position_id % 3"}, once=False),
    "weighted shards": LoaderKind({"mode": "exact", "weights": "position_id % 3 / 2"}, once=False),
    "filtered": LoaderKind({"mode": "exact", "where": "position_id % 2 = 0"}),
    "filtered and weighted": LoaderKind(
        {"mode": "games", "where": "move > 3", "weights": "if(move > 3, 1.5, -1)"}, once=False
    ),
    "newest": LoaderKind({"mode": "games", "newest": 5}),
    "without duplicates": LoaderKind({"mode": "games", "dedup": "symmetric"}),
    "without finals": LoaderKind({"mode": "games", "final_policy": "skip"}),
    "some shards": LoaderKind({"mode": "exact", "shards": "0-1"}),
    "transformed": LoaderKind({"mode": "games", "symmetry": True, "transform": _double}),
    "threads": LoaderKind({"mode": "exact", "threads": 2}),
    "val": LoaderKind({"mode": "games", "split": "val", "shuffle": True}),
    "mixture": LoaderKind({}, once=False, make=_mixture, counts_ids=False),
}
"""The kinds by name."""


def make_store(folder: Path) -> Path:
    """Write a store of 5 x 5 boards with shards: 16 games, two of them equal, in ``train`` and ``val``."""
    source = folder / "in"
    source.mkdir(parents=True)
    random = np.random.default_rng(1)
    lines = []
    for number in range(15):
        cells = random.permutation(25)[: 6 + number % 19]
        moves = "".join(f"{'abcde'[cell % 5]}{cell // 5 + 1}" for cell in cells)
        lines.append(f"#5,{moves} {'rb'[number % 2]}\n")
    (source / "a.trmph").write_text("".join([*lines, lines[3]]))
    store = folder / "store"
    convert_sources([source], store, ConvertOptions(workers=1, val=0.3, test=0))
    shuffle_store(store, ShuffleOptions(seed=1, threads=1))
    export_shards(store, ExportOptions(shard_size=64, block_size=16, workers=1))
    return store
