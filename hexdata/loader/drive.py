"""Driving the loader as a trainer would, and measuring what it delivers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hexdata.errors import ConfigError, VerifyError
from hexdata.loader.loader import Loader
from hexdata.loader.options import Check, LoaderOptions, Mode
from hexdata.progress import SILENT, Progress
from hexdata.schema import SPLITS

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
    mode: Mode = "exact"
    check: Check = "sizes"

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError("epochs must be at least 1", found=self.epochs)
        LoaderOptions(batch_size=self.batch_size, seed=self.seed, mode=self.mode, check=self.check)
        if self.split not in SPLITS:
            raise ConfigError("unknown split", found=self.split, expected=" or ".join(SPLITS))


@dataclass(frozen=True)
class EpochFacts:
    """What one epoch delivered."""

    epoch: int
    batches: int
    delivered: int
    positions: int
    """Distinct ones: equal to ``delivered``, and to the split's, or the epoch was not exact."""
    seconds: float
    positions_per_second: float
    value_mean: float
    first_ids: list[int]
    """The position ids that open the epoch: another order every epoch."""
    digest: str
    """The epoch digest: the same for every run that delivers the same positions at the same steps."""


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
        mode=options.mode,
        check=options.check,
        fields=("board", "policy", "value", "position_id"),
    )
    total = loader.positions
    epochs = []
    fields: dict[str, str] = {}
    for epoch in range(options.epochs):
        progress.begin(f"epoch {epoch}", total, "positions")
        facts, fields = _epoch(loader, progress, fields)
        if facts.positions != total or facts.delivered != total:
            raise VerifyError(
                f"epoch {epoch} did not deliver every position exactly once",
                path=store,
                found=f"{facts.delivered:,} positions, {facts.positions:,} of them distinct",
                expected=f"{total:,}",
                cure="Verify the store; if it holds, this is a fault of the loader.",
            )
        epochs.append(facts)
    return LoadResult(options.split, total, epochs, fields)


def _epoch(loader: Loader, progress: Progress, fields: dict[str, str]) -> tuple[EpochFacts, dict[str, str]]:
    epoch, batches, delivered, values = loader.epoch, 0, 0, 0.0
    first_ids: list[int] = []
    seen = _Seen()
    start = time.perf_counter()
    for batch in loader:
        batches += 1
        delivered += len(batch["value"])
        seen.add(batch["position_id"])
        values += float(batch["value"].sum(dtype=np.float64))
        fields = fields or {name: f"{array.dtype} {array.shape}" for name, array in batch.items()}
        first_ids = first_ids or batch["position_id"][:5].tolist()
        progress.advance(len(batch["value"]))
    seconds = time.perf_counter() - start
    facts = EpochFacts(
        epoch=epoch,
        batches=batches,
        delivered=delivered,
        positions=seen.distinct(),
        seconds=seconds,
        positions_per_second=delivered / max(seconds, 1e-9),
        value_mean=values / max(delivered, 1),
        first_ids=first_ids,
        digest=str(loader.epoch_digest),
    )
    return facts, fields


class _Seen:
    """Which position ids have been met: a byte each, up to the largest."""

    def __init__(self) -> None:
        self._met = np.zeros(1 << 16, dtype=np.bool_)

    def add(self, ids: npt.NDArray[np.int64]) -> None:
        largest = int(ids.max(initial=0))
        if largest >= len(self._met):
            self._met = np.concatenate([self._met, np.zeros(largest + 1, dtype=np.bool_)])
        self._met[ids] = True

    def distinct(self) -> int:
        return int(np.count_nonzero(self._met))
