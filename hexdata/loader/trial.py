"""Driving the loader as a trainer would, and measuring what it delivers."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hexdata.errors import ConfigError, VerifyError
from hexdata.loader.loader import Loader
from hexdata.loader.options import LoaderOptions, Mode
from hexdata.progress import SILENT, Progress
from hexdata.schema import SPLITS
from hexdata.shards.options import CACHE_SIZE, CacheOptions, Check
from hexdata.storage import AnyPath

__all__ = ["EpochStats", "LoadOptions", "LoadResult", "run_loader_trial"]


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
    mode: Mode | None = None
    """None: as the place asks for, exact for a folder and stream for a URL."""
    check: Check = "sizes"
    cache: str | bool = True
    """The folder of copies; True for the usual one, for shards in an object store; False for none."""
    cache_size: int | str = CACHE_SIZE
    prefetch: int | None = None

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError("epochs must be at least 1", found=self.epochs)
        mode: Mode = "exact" if self.mode is None else self.mode
        LoaderOptions(batch_size=self.batch_size, seed=self.seed, mode=mode, check=self.check)
        CacheOptions(self.cache, self.cache_size, self.prefetch)
        if self.split not in SPLITS:
            raise ConfigError("unknown split", found=self.split, expected=" or ".join(SPLITS))


@dataclass(frozen=True)
class EpochStats:
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
    """What ``run_loader_trial`` measured; ``fields`` gives a batch's arrays as ``name: dtype (shape)``."""

    split: str
    mode: Mode
    positions: int
    seconds_to_open: float
    seconds_to_first_batch: float
    """From the opened loader to the first batch of the first epoch."""
    epochs: list[EpochStats]
    fields: dict[str, str]


def run_loader_trial(
    store: str | AnyPath, options: LoadOptions | None = None, progress: Progress = SILENT
) -> LoadResult:
    """Run some epochs of a split; see that each delivers every position exactly once.

    Raises:
        VerifyError: an epoch did not.
        StoreError, FormatError, ConfigError, BudgetError: as ``Loader`` does.
    """
    options = options or LoadOptions()
    start = time.perf_counter()
    loader = Loader(
        store,
        split=options.split,
        batch_size=options.batch_size,
        seed=options.seed,
        mode=options.mode,
        check=options.check,
        cache=options.cache,
        cache_size=options.cache_size,
        prefetch=options.prefetch,
        progress=progress,
        fields=("board", "policy", "value", "position_id"),
    )
    opened = time.perf_counter() - start
    total = loader.positions
    epochs: list[EpochStats] = []
    fields: dict[str, str] = {}
    first = 0.0
    for epoch in range(options.epochs):
        progress.begin(f"epoch {epoch}", total, "positions")
        facts, own_fields, waited = _run_epoch(loader, progress)
        if not epoch:
            fields, first = own_fields, waited
        if facts.positions != total or facts.delivered != total:
            raise VerifyError(
                f"epoch {epoch} did not deliver every position exactly once",
                path=store,
                found=f"{facts.delivered:,} positions, {facts.positions:,} of them distinct",
                expected=f"{total:,}",
                hint="Verify the store; if it holds, this is a fault of the loader.",
            )
        epochs.append(facts)
    return LoadResult(options.split, loader.options.mode, total, opened, first, epochs, fields)


def _run_epoch(loader: Loader, progress: Progress) -> tuple[EpochStats, dict[str, str], float]:
    """Run an epoch; return what it delivered, its first batch's arrays, and how long that one took."""
    fields: dict[str, str] = {}
    waited = 0.0
    epoch, batches, delivered, values = loader.epoch, 0, 0, 0.0
    first_ids: list[int] = []
    ids = _DeliveredIds(loader.positions)
    start = time.perf_counter()
    for batch in loader:
        waited = waited or time.perf_counter() - start
        batches += 1
        delivered += len(batch["value"])
        ids.add(batch["position_id"])
        values += float(batch["value"].sum(dtype=np.float64))
        fields = fields or {name: f"{array.dtype} {array.shape}" for name, array in batch.items()}
        first_ids = first_ids or batch["position_id"][:5].tolist()
        progress.advance(len(batch["value"]))
    seconds = time.perf_counter() - start
    facts = EpochStats(
        epoch=epoch,
        batches=batches,
        delivered=delivered,
        positions=ids.distinct(),
        seconds=seconds,
        positions_per_second=delivered / max(seconds, 1e-9),
        value_mean=values / max(delivered, 1),
        first_ids=first_ids,
        digest=str(loader.epoch_digest),
    )
    return facts, fields, waited


class _DeliveredIds:
    """The position ids of an epoch, 8 bytes each, whatever they are."""

    def __init__(self, positions: int) -> None:
        self._ids = np.empty(positions, np.int64)
        self._count = 0

    def add(self, ids: npt.NDArray[np.int64]) -> None:
        space = self._ids[self._count : self._count + len(ids)]
        space[...] = ids[: len(space)]  # an epoch that delivers too many fails by their number
        self._count += len(space)

    def distinct(self) -> int:
        ids = self._ids[: self._count]
        ids.sort()
        return int(np.count_nonzero(ids[1:] != ids[:-1])) + (len(ids) > 0)
