"""Driving the loader as a trainer would, and measuring what it delivers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hexdata.errors import ConfigError, VerifyError
from hexdata.loader.loader import Loader
from hexdata.progress import SILENT, Progress

__all__ = ["EpochFacts", "LoadOptions", "LoadResult", "drive_loader"]


@dataclass(frozen=True)
class LoadOptions:
    """How to drive the loader; the loader's own options keep their defaults.

    Raises:
        ConfigError: on a value out of range.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, not a field

    split: str = "train"
    epochs: int = 1
    batch_size: int = 1024
    seed: int = 0
    window_shards: int = 8

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError("epochs must be at least 1", found=self.epochs)


@dataclass(frozen=True)
class EpochFacts:
    """What one epoch delivered."""

    epoch: int
    batches: int
    positions: int
    seconds: float
    positions_per_second: float
    value_mean: float
    first_ids: list[int]
    """The position ids that open the epoch: another order every epoch."""


@dataclass(frozen=True)
class LoadResult:
    """What ``drive_loader`` measured; ``fields`` gives a batch's arrays as ``name: dtype (shape)``."""

    split: str
    positions: int
    epochs: list[EpochFacts]
    fields: dict[str, str]


def drive_loader(
    store: str | Path, options: LoadOptions | None = None, progress: Progress = SILENT
) -> LoadResult:
    """Run some epochs of a split; see that each delivers every position exactly once.

    Raises:
        VerifyError: an epoch did not.
        StoreError, FormatError, ConfigError: as ``Loader`` does.
    """
    options = options or LoadOptions()
    loader = Loader(
        store,
        split=options.split,
        batch_size=options.batch_size,
        seed=options.seed,
        window_shards=options.window_shards,
        fields=("board", "policy", "value", "position_id"),
    )
    total = loader.manifest.positions(options.split)
    epochs = []
    fields: dict[str, str] = {}
    for epoch in range(options.epochs):
        progress.begin(f"epoch {epoch}", total, "positions")
        facts, fields = _epoch(loader, progress, fields)
        if facts.positions != total:
            raise VerifyError("an epoch lacks positions", path=store, found=facts.positions, expected=total)
        epochs.append(facts)
    return LoadResult(options.split, total, epochs, fields)


def _epoch(loader: Loader, progress: Progress, fields: dict[str, str]) -> tuple[EpochFacts, dict[str, str]]:
    epoch, batches, seen, values = loader.epoch, 0, [], 0.0
    start = time.perf_counter()
    for batch in loader:
        batches += 1
        seen.append(batch["position_id"])
        values += float(batch["value"].sum(dtype=np.float64))
        fields = fields or {name: f"{array.dtype} {array.shape}" for name, array in batch.items()}
        progress.advance(len(batch["value"]))
    seconds = time.perf_counter() - start
    ids = np.concatenate(seen) if seen else np.empty(0, dtype=np.int64)
    distinct = len(np.unique(ids))
    return (
        EpochFacts(
            epoch=epoch,
            batches=batches,
            positions=distinct,
            seconds=seconds,
            positions_per_second=len(ids) / max(seconds, 1e-9),
            value_mean=values / max(len(ids), 1),
            first_ids=ids[:5].tolist(),
        ),
        fields,
    )
