"""Everything that keeps a dataset open and reads its positions, for tests of data that change meanwhile."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hexdata import Loader, PositionDataset
from hexdata.loader import Mixture

__all__ = ["READERS", "SPAWNED", "Reader", "pairs_of"]

FIELDS = ("position_id", "board")
Pairs = list[tuple[int, bytes]]


@dataclass(frozen=True)
class Reader:
    """A way to read the positions of the training split of a store.

    Attributes:
        open: Opens the store, with shards of 5 x 5 boards in its folder ``shards``.
        batches: Returns the batches of one epoch of what ``open`` returned.
        once: Whether the batches contain each position of the split exactly once.
    """

    open: Callable[[Path], Any]
    batches: Callable[[Any], Iterator[Any]] = iter
    once: bool = True


def pairs_of(batch: Any) -> Pairs:
    """Return the id and the board of each position of a batch of arrays or tensors."""
    ids, boards = np.asarray(batch["position_id"]), np.asarray(batch["board"])
    return [(int(position), board.tobytes()) for position, board in zip(ids, boards, strict=True)]


def _loader(mode: Any, **options: Any) -> Callable[[Path], Loader]:
    return lambda store: Loader(store, mode=mode, batch_size=16, fields=FIELDS, **options)


def _through_a_pipe(store: Path) -> Loader:
    command = f"pipe:cat {shlex.quote(str(store / 'shards'))}/{{name}}"
    return Loader(command, batch_size=16, fields=FIELDS)


def _cached(mode: Any) -> Callable[[Path], Loader]:
    def open_cached(store: Path) -> Loader:
        command = f"pipe:cat {shlex.quote(str(store / 'shards'))}/{{name}}"
        return Loader(command, mode=mode, batch_size=16, fields=FIELDS, cache=store.parent / "copies")

    return open_cached


def _dataset(mode: Any) -> Callable[[Path], PositionDataset]:
    return lambda store: PositionDataset(store, mode=mode, fields=FIELDS)


def _of_dataset(dataset: PositionDataset) -> Iterator[Any]:
    return (
        dataset.batch(range(start, min(start + 16, len(dataset)))) for start in range(0, len(dataset), 16)
    )


def _mixture(store: Path) -> Mixture:
    return Mixture([_loader("games")(store), _loader("exact", seed=1)(store)], (1, 1), batch_size=16)


def _tensors(mode: Any) -> Callable[[Path], Any]:
    def open_workers(store: Path) -> Any:
        from hexdata.torch import TorchLoader

        return TorchLoader(_loader(mode)(store), num_workers=2, multiprocessing_context="spawn")

    return open_workers


READERS: dict[str, Reader] = {
    "games": Reader(_loader("games")),
    "games with a condition": Reader(_loader("games", where="position_id >= 0")),
    "exact": Reader(_loader("exact")),
    "exact in threads": Reader(_loader("exact", threads=2)),
    "stream": Reader(_loader("stream")),
    "stream of small windows": Reader(_loader("stream", streams=(2, 2), window=8)),
    "stored order of a stream": Reader(_loader("stream", shuffle=False)),
    "pipe": Reader(_through_a_pipe),
    "cached stream": Reader(_cached("stream")),
    "cached exact": Reader(_cached("exact")),
    "dataset of games": Reader(_dataset("games"), _of_dataset),
    "dataset of shards": Reader(_dataset("exact"), _of_dataset),
    "mixture": Reader(_mixture, once=False),
}
"""The readers by name."""
SPAWNED: dict[str, Reader] = {mode: Reader(_tensors(mode)) for mode in ("games", "exact", "stream")}
"""Readers whose positions are read in processes that are started with the first batch. They need PyTorch."""
