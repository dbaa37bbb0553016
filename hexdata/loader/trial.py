"""Trial run of a loader, which takes batches as a trainer does, checks the epochs and reports rates.

The batches are discarded.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hexdata.batch import DEFAULT_FIELDS, BatchOptions
from hexdata.checks import as_tuple
from hexdata.errors import ConfigError, VerifyError
from hexdata.loader.loader import Loader
from hexdata.loader.options import LoaderOptions, Mode
from hexdata.progress import SILENT, Progress
from hexdata.schema import SPLITS
from hexdata.selection.options import Dedup
from hexdata.shards.options import CACHE_SIZE, CacheOptions, Check
from hexdata.storage import AnyPath

__all__ = ["EpochStats", "LoadOptions", "LoadResult", "run_loader_trial"]

_NEEDED: Final = ("value", "position_id")
"""Fields from which a trial run computes its results."""


@dataclass(frozen=True)
class LoadOptions:
    """Options of a trial run. The other options of ``Loader`` have their defaults.

    Raises:
        ConfigError: An option has an invalid value.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, not a field

    split: str = "train"
    """Split: "train", "val" or "test"."""
    epochs: int = 1
    """Number of epochs to run."""
    batch_size: int = 1024
    """Positions per batch."""
    seed: int = 0
    """Seed of the order."""
    shards: str | None = None
    """First and last shard of the split to read, such as "0-49". None: all shards."""
    mode: Mode | None = None
    """Mode of the loader: "games", "exact" or "stream". None: as for ``Loader``."""
    where: str | None = None
    """SQL condition that selects positions. None: all positions."""
    dedup: Dedup = "none"
    """Duplicate games to leave out: "none", "exact" or "symmetric"."""
    weights: str | None = None
    """SQL expression of the weight of each position. None: each position once."""
    check: Check = "sizes"
    """What to check before the first epoch: "sizes" of files, or also their "digests"."""
    cache: str | bool = True
    """Folder of the shard cache. True: the default folder, for object stores only. False: no cache."""
    cache_size: int | str = CACHE_SIZE
    """Maximum size of the cache in bytes, or text such as "50GB"."""
    prefetch: int | None = None
    """Number of shards that stream mode fetches in advance. None: one per stream."""
    fields: tuple[str, ...] = DEFAULT_FIELDS
    """Fields of the batches. ``value`` and ``position_id`` are added."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError("epochs must be at least 1", found=self.epochs)
        mode: Mode = "exact" if self.mode is None else self.mode
        LoaderOptions(
            batch_size=self.batch_size,
            seed=self.seed,
            mode=mode,
            check=self.check,
            shards=self.shards,
            where=self.where,
            dedup=self.dedup,
            weights=self.weights,
        )
        CacheOptions(self.cache, self.cache_size, self.prefetch)
        object.__setattr__(self, "fields", as_tuple(self.fields))
        BatchOptions(self.fields)
        if self.split not in SPLITS:
            raise ConfigError("unknown split", found=self.split, expected=" or ".join(SPLITS))


@dataclass(frozen=True)
class EpochStats:
    """Measurements of one epoch."""

    epoch: int
    batches: int
    delivered: int
    """Number of positions delivered, counting each repetition."""
    positions: int
    """Number of distinct positions delivered."""
    weight_sum: float | None
    """Sum of the weights of all positions; None without weights."""
    seconds: float
    positions_per_second: float
    value_mean: float
    first_ids: list[int]
    """Ids of the first five positions, which differ between epochs."""
    digest: str
    """The epoch digest, equal for runs that deliver the same positions at the same steps."""


@dataclass(frozen=True)
class LoadResult:
    """Result of :func:`run_loader_trial`."""

    split: str
    mode: Mode
    seed: int
    """Seed of the order."""
    positions: int
    games: int | None
    """Number of games that games mode holds as games; None in the other modes."""
    packed: int | None
    """Number of positions outside these games, which games mode holds packed; None in the other modes."""
    seconds_to_open: float
    seconds_to_first_batch: float
    """Seconds from opening the loader to the first batch."""
    epochs: list[EpochStats]
    fields: dict[str, str]
    """Dtype and shape of each array of the first batch, such as ``"float32 (1024, 2, 13, 13)"``."""


def run_loader_trial(
    store: str | AnyPath, options: LoadOptions | None = None, progress: Progress = SILENT
) -> LoadResult:
    """Run epochs of a split and check that each delivers every position exactly once.

    With weights, check the number of positions of each epoch and that of different positions.

    Args:
        store: As for ``Loader``.
        options: Options of the trial run (default None: the defaults of ``LoadOptions``).
        progress: Receives progress (default: no reports).

    Raises:
        VerifyError: An epoch did not deliver every position exactly once.
        StoreError, FormatError, ConfigError, BudgetError: As for ``Loader``.
    """
    options = options or LoadOptions()
    start = time.perf_counter()
    loader = Loader(
        store,
        split=options.split,
        batch_size=options.batch_size,
        seed=options.seed,
        shards=options.shards,
        mode=options.mode,
        where=options.where,
        dedup=options.dedup,
        weights=options.weights,
        check=options.check,
        cache=options.cache,
        cache_size=options.cache_size,
        prefetch=options.prefetch,
        progress=progress,
        fields=(*options.fields, *(name for name in _NEEDED if name not in options.fields)),
    )
    opened = time.perf_counter() - start
    total = loader.positions
    epochs: list[EpochStats] = []
    fields: dict[str, str] = {}
    seconds_to_first = 0.0
    for epoch in range(options.epochs):
        size, realised = loader.positions, loader.realised
        distinct = realised.positions if realised else size
        stats, epoch_fields, seconds = _run_epoch(loader, progress)
        if not epoch:
            fields, seconds_to_first = epoch_fields, seconds
        if stats.positions != distinct or stats.delivered != size:
            times = "by its weight" if realised else "exactly once"
            raise VerifyError(
                f"epoch {epoch} did not deliver every position {times}",
                path=store,
                found=f"{stats.delivered:,} positions, {stats.positions:,} of them distinct",
                expected=f"{size:,} positions, {distinct:,} of them distinct",
                hint="Run `hexdata verify`. If it finds no error, report a bug of the loader.",
            )
        epochs.append(stats)
    table = loader.games
    return LoadResult(
        split=options.split,
        mode=loader.options.mode,
        seed=loader.options.seed,
        positions=total,
        games=table.games if table else None,
        packed=table.positions - table.game_rows if table else None,
        seconds_to_open=opened,
        seconds_to_first_batch=seconds_to_first,
        epochs=epochs,
        fields=fields,
    )


def _run_epoch(loader: Loader, progress: Progress) -> tuple[EpochStats, dict[str, str], float]:
    """Run an epoch; return its measurements, the fields of a batch and the seconds to the first batch."""
    fields: dict[str, str] = {}
    seconds_to_first = 0.0
    epoch, batches, delivered, values = loader.epoch, 0, 0, 0.0
    size, realised = loader.positions, loader.realised
    first_ids: list[int] = []
    ids = _DeliveredIds(size)
    start = time.perf_counter()
    for batch in loader:
        if not batches:
            seconds_to_first = time.perf_counter() - start
            progress.begin(f"epoch {epoch}", size, "positions")  # not before reading ahead ends
        batches += 1
        delivered += len(batch["value"])
        ids.add(batch["position_id"])
        values += float(batch["value"].sum(dtype=np.float64))
        fields = fields or {name: f"{array.dtype} {array.shape}" for name, array in batch.items()}
        first_ids = first_ids or batch["position_id"][:5].tolist()
        progress.advance(len(batch["value"]))
    seconds = time.perf_counter() - start
    stats = EpochStats(
        epoch=epoch,
        batches=batches,
        delivered=delivered,
        positions=ids.count_distinct(),
        weight_sum=None if realised is None else realised.weight_sum,
        seconds=seconds,
        positions_per_second=delivered / max(seconds, 1e-9),
        value_mean=values / max(delivered, 1),
        first_ids=first_ids,
        digest=str(loader.epoch_digest),
    )
    return stats, fields, seconds_to_first


class _DeliveredIds:
    """The position ids delivered in an epoch, 8 bytes each.

    Args:
        positions: Number of positions in the epoch. Further ids are not stored.
    """

    def __init__(self, positions: int) -> None:
        self._ids = np.empty(positions, np.int64)
        self._count = 0

    def add(self, ids: npt.NDArray[np.int64]) -> None:
        """Store ids, int64 (B,)."""
        space = self._ids[self._count : self._count + len(ids)]
        space[...] = ids[: len(space)]  # an epoch with too many positions fails the check of ``delivered``
        self._count += len(space)

    def count_distinct(self) -> int:
        """Return the number of different ids, and sort the stored ids."""
        ids = self._ids[: self._count]
        ids.sort()
        return int(np.count_nonzero(ids[1:] != ids[:-1])) + (len(ids) > 0)
