"""Trial run of a loader, which takes batches as a trainer does, checks the epochs and reports rates.

The batches are discarded.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from hexdata.checks import check_fields
from hexdata.errors import VerifyError
from hexdata.loader.loader import Loader
from hexdata.loader.options import Mode, SplitOptions
from hexdata.options import describe_options
from hexdata.progress import SILENT, Progress
from hexdata.storage import AnyPath

_NEEDED: Final = ("value", "position_id")
"""Fields from which a trial run computes its results."""


@describe_options
@dataclass(frozen=True, kw_only=True)
class LoadOptions(SplitOptions):
    """Options of a trial run. The fields ``value`` and ``position_id`` are added to the batches.

    Attributes:
        weights: SQL expression of the weight of each position. None: each position once.
        epochs: Number of epochs to run.
        batch_size: Positions per batch.

    Raises:
        ConfigError: An option has an invalid value.
    """

    weights: str | None = None
    epochs: int = 1
    batch_size: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, {"epochs": 1, "batch_size": 1})


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
    given = {each.name: getattr(options, each.name) for each in fields(SplitOptions)}
    # The ids show that nothing is missing or repeated; the values are read as a trainer would.
    given["fields"] = (*options.fields, *(name for name in _NEEDED if name not in options.fields))
    loader = Loader(store, batch_size=options.batch_size, progress=progress, **given)
    opened = time.perf_counter() - start
    total, epochs = loader.positions, []
    fields_of_batch: dict[str, str] = {}
    seconds_to_first = 0.0
    for epoch in range(options.epochs):
        size, realised = loader.positions, loader.realised
        delivered, batches, values = 0, 0, 0.0
        # One array for all ids, since a set would take many times the memory.
        ids = np.full(size, np.iinfo(np.int64).max)
        # Without the array above, which a trainer does not make.
        start = time.perf_counter()
        for batch in loader:
            if not fields_of_batch:
                seconds_to_first = time.perf_counter() - start
                fields_of_batch = {name: f"{array.dtype} {array.shape}" for name, array in batch.items()}
            if not batches:
                progress.begin(f"epoch {epoch}", size, "positions")  # not before reading ahead ends
            own = ids[delivered : delivered + len(batch["value"])]
            own[...] = batch["position_id"][: len(own)]  # too many positions fail the check below
            batches += 1
            delivered += len(batch["value"])
            values += float(batch["value"].sum(dtype=np.float64))
            progress.advance(len(batch["value"]))
        seconds = time.perf_counter() - start
        first_ids = ids[: min(delivered, 5)].tolist()
        ids.sort()  # in place: np.unique would copy them, and np.diff would make numbers of 8 bytes
        found = ids[:delivered]
        distinct = min(delivered, 1) + int(np.count_nonzero(found[1:] != found[:-1]))
        expected = realised.positions if realised else size
        if (delivered, distinct) != (size, expected):
            raise VerifyError(
                f"epoch {epoch} did not deliver every position {'by weight' if realised else 'exactly once'}",
                path=store,
                found=f"{delivered:,} positions, {distinct:,} of them distinct",
                expected=f"{size:,} positions, {expected:,} of them distinct",
            )
        epochs.append(
            EpochStats(
                epoch=epoch,
                batches=batches,
                delivered=delivered,
                positions=distinct,
                weight_sum=realised.weight_sum if realised else None,
                seconds=seconds,
                positions_per_second=delivered / max(seconds, 1e-9),
                value_mean=values / max(delivered, 1),
                first_ids=first_ids,
                digest=str(loader.epoch_digest),
            )
        )
    table = loader.games
    mode: Any = loader.options.mode
    return LoadResult(
        split=options.split,
        mode=mode,
        seed=loader.options.seed,
        positions=total,
        games=table.games if table else None,
        packed=table.positions - table.game_rows if table else None,
        seconds_to_open=opened,
        seconds_to_first_batch=seconds_to_first,
        epochs=epochs,
        fields=fields_of_batch,
    )
