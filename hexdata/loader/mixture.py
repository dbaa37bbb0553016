"""Mixture of several loaders, whose batches contain their positions in fixed proportions.

The counts of each source are exact and in closed form, so any step can be computed directly.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.batch import Batch
from hexdata.checks import as_tuple, check_count, check_same_options, check_versions
from hexdata.errors import ConfigError
from hexdata.loader.loader import Delivery, Loader, refuse_index
from hexdata.loader.options import MAX_EPOCH, RankedOptions
from hexdata.loader.transform import TransformFunction, make_transform
from hexdata.order import ORDER_VERSION, Permutation, derive_key
from hexdata.strict_json import AtMost, Count, Matching, check_value

__all__ = ["Mixture", "MixtureOptions", "SourceCounts", "SourceShare"]

_STATE_VERSION: Final = 1
_UNUSED_STATE_KEYS: Final = {
    "epoch",
    "batch",
    "epoch_digest",
    "rank",
    "world_size",
    "global_batch",
    "remainder",
    "where_changed",
    "first_where",
}
"""Keys of a loader's state that do not affect the order of its positions in a mixture."""
_MAX_SOURCES: Final = 256
"""Number of values of the field ``source``, uint8."""


@dataclass(frozen=True)
class _MixtureState:
    """The schema of a state."""

    version: int
    order_version: int
    sources: Annotated[
        list[Annotated[str, Matching("[0-9a-f]{16}", "16 hexadecimal digits")]], AtMost(_MAX_SOURCES)
    ]
    weights: Annotated[list[float], AtMost(_MAX_SOURCES)]
    global_batch: Count
    seed: int
    pace: Count
    epoch: Count
    batch: Count


@dataclass(frozen=True)
class MixtureOptions(RankedOptions):
    """The options of ``Mixture``, which describes them.

    Raises:
        ConfigError: An option has an invalid value, or a source would have less than one position per step.
    """

    weights: tuple[float, ...]
    batch_size: int
    seed: int
    rank: int
    world_size: int
    pace: int

    def __post_init__(self) -> None:
        self._check_ranks()
        self._set("pace", check_count("pace", self.pace, 0))
        if not 1 <= len(self.weights) <= _MAX_SOURCES:
            raise ConfigError("invalid number of loaders", found=len(self.weights), expected="1 to 256")
        if self.pace >= len(self.weights):
            raise ConfigError(
                "pace must be the index of a loader",
                found=self.pace,
                expected=f"below {len(self.weights)}",
            )
        # JSON cannot store NumPy's numbers.
        weights = (weight.item() if isinstance(weight, np.generic) else weight for weight in self.weights)
        self._set("weights", tuple(weights))
        if not all(_is_weight(weight) for weight in self.weights):
            raise ConfigError("weights cannot be used", found=self.weights, expected="finite numbers above 0")
        shares = self.shares()
        if self.global_batch * min(shares) < 1:
            raise ConfigError(
                f"source {shares.index(min(shares))} would have less than one position per step",
                found=f"{self.global_batch} positions per step over all ranks",
                expected=f"at least {math.ceil(1 / min(shares))} for the weights {self.weights}",
                hint="Raise batch_size or the smallest weight.",
            )

    def shares(self) -> list[Fraction]:
        """Return the exact share of each source; the shares add up to 1."""
        weights = [Fraction(weight) for weight in self.weights]
        return [weight / sum(weights) for weight in weights]


def _is_weight(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


class SourceCounts:
    """Number of positions from each source among the first T positions of a mixture.

    Sources 0 … i together have floor(T·S + u) positions, where S is the sum of their shares and u, in [0, 1),
    is determined by the seed. Each source therefore has T times its share, to within one position, and the
    counts add up to T. Counts never decrease if each step adds at least 1 / (the smallest share) positions.
    The arithmetic uses integers only.
    """

    def __init__(self, options: MixtureOptions) -> None:
        shares = options.shares()
        self._unit = math.lcm(*(share.denominator for share in shares))
        parts = [int(share * self._unit) for share in shares]
        self._bounds = [sum(parts[: i + 1]) for i in range(len(parts))]
        self._offset = derive_key(options.seed, "mixture") * self._unit >> 64

    def after(self, total: int) -> list[int]:
        """Return the number of positions from each source among the first ``total``."""
        ends = [(total * bound + self._offset) // self._unit for bound in self._bounds]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class SourceShare:
    """Positions delivered from one source of a mixture, over all ranks."""

    weight: float
    """Requested share; the weights of all sources add up to 1."""
    share: float
    """Share of the positions delivered so far; 0.0 before the first."""
    positions: int
    """Number of positions delivered."""
    epochs: float
    """Number of epochs of the source delivered."""


class _StepSources(NamedTuple):
    """The positions of one rank at one step."""

    sources: npt.NDArray[np.uint8]
    """Source of each position (B,)."""
    ranges: list[tuple[int, int]]
    """For each source, the range of indices in the concatenation of its epochs."""


class Mixture:
    """Iterable over batches that contain positions of several loaders in proportion to their weights.

    The exact proportion holds after every step, to within one position per source. Each source is an endless
    stream of its epochs: each epoch has a new order and delivers every position once. A batch may contain the
    end of one epoch and the beginning of the next. Within a step the sources are mixed by a permutation
    determined by the seed and the step; ranks take consecutive parts of the step.

    An epoch of the mixture is a fixed number of steps, ``len(mixture)``: the fewest that deliver the source
    ``pace`` once or, if it has weights, as many positions as they add up to. All batches have the same size.

    Each iteration delivers the rest of the current epoch and then advances ``epoch``. If the epoch has no
    batches left, it delivers the next epoch. A batch has the fields of the loaders and ``source``, uint8
    (B,), the index of each position's loader.

    Example::

        mixture = Mixture([Loader("human"), Loader("selfplay")], weights=(1, 3), batch_size=256)
        for batch in mixture:
            train(batch["board"], batch["policy"], batch["value"])

    Args:
        loaders: The sources, at most 256, in games or exact mode. They must have the same batch options and
            board size. Their stores, splits, conditions, seeds and shuffling may differ. Their batch size,
            ranks, remainder and position are not used.
        weights: Weight of each loader, above 0. Only the ratios of weights matter.
        batch_size: Positions per batch of this rank (default 1024).
        seed: Any integer (default 0).
        rank: Rank of this process (default 0).
        world_size: Number of ranks (default 1).
        pace: Index of the loader that determines the length of an epoch (default None: the loader with the
            most positions).
        transform: Function that is called with each batch and returns the batch to deliver; see ``Loader``
            (default None). The loaders themselves must not have one.

    Raises:
        ConfigError: An option is invalid, the loaders cannot be combined, a loader has no positions, or the
            global batch is too small for the smallest weight.
    """

    def __init__(
        self,
        loaders: Sequence[Loader],
        weights: Sequence[float],
        *,
        batch_size: int = 1024,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        pace: int | None = None,
        transform: TransformFunction | None = None,
    ) -> None:
        for name, value in (("loaders", loaders), ("weights", weights)):
            if isinstance(as_tuple(value), tuple):
                continue
            expected = "a list of loaders" if name == "loaders" else "a list of numbers, one per loader"
            raise ConfigError(f"{name} cannot be used", found=repr(value), expected=expected)
        loaders, weights = as_tuple(loaders), as_tuple(weights)
        given: Any = loaders
        for number, each in enumerate(given):
            if not isinstance(each, Loader):
                what = f"loaders[{number}] cannot be used"
                raise ConfigError(what, found=repr(each), expected="a hexdata.Loader")
        if len(loaders) != len(weights):
            raise ConfigError(
                "the number of weights differs from the number of loaders",
                found=len(weights),
                expected=len(loaders),
            )
        self.transform = make_transform(transform)
        self._loaders = list(loaders)
        self._sizes = [loader.mean_positions for loader in loaders]
        if pace is None and loaders:
            pace = self._sizes.index(max(self._sizes))
        self.options = MixtureOptions(tuple(weights), batch_size, seed, rank, world_size, pace or 0)
        _check_loaders(self._loaders)
        # Copies, whose conditions do not change while the mixture exists.
        self._loaders = [each.for_rank(each.options.rank, each.options.world_size) for each in loaders]
        self._counts = SourceCounts(self.options)
        self._set_steps()
        self._epoch = self._batch = 0

    def _set_steps(self) -> None:
        paced = self.options.shares()[self.options.pace] * self.options.global_batch
        self._steps = math.ceil(self._sizes[self.options.pace] / paced)

    def for_rank(self, rank: int, world_size: int) -> Mixture:
        """Return a mixture for another rank, at the same position. The loaders are shared.

        Args:
            rank: Rank of the new mixture.
            world_size: Number of ranks.

        Raises:
            ConfigError: The rank is invalid, or this mixture is within an epoch and ``world_size`` differs.
        """
        epoch, batch = self._next_batch()
        self.options.require_world_size(world_size, "mixture", epoch, batch)
        other = copy.copy(self)
        other.options = replace(self.options, rank=rank, world_size=world_size)
        other._set_steps()
        other._epoch, other._batch = epoch, batch
        return other

    def __repr__(self) -> str:
        return f"Mixture({self._loaders!r}, weights={self.options.weights!r}, seed={self.options.seed})"

    __getitem__ = refuse_index

    def __len__(self) -> int:
        """Return the number of batches of an epoch, which is the same for every rank."""
        return self._steps

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self._epoch

    @property
    def batch(self) -> int:
        """Index of the next batch of the epoch."""
        return self._batch

    def set_epoch(self, epoch: int, batch: int = 0) -> None:
        """Start the next iteration at a batch of ``epoch``.

        Args:
            epoch: Epoch, counted from 0, at most 2^61.
            batch: Index of the first batch (default 0).

        Raises:
            ConfigError: ``epoch`` is out of range, or ``batch`` is not within the epoch.
        """
        epoch, batch = check_count("epoch", epoch, 0, MAX_EPOCH), check_count("batch", batch, 0)
        if batch > self._steps:
            raise ConfigError(
                "batch is beyond the end of the epoch", found=batch, expected=f"0 to {self._steps}"
            )
        self._epoch, self._batch = epoch, batch

    @property
    def realised(self) -> list[SourceShare]:
        """What each source contributed to all steps before the next one, over all ranks."""
        total = (self._epoch * self._steps + self._batch) * self.options.global_batch
        return [
            SourceShare(float(share), count / max(total, 1), count, float(count / size))
            for share, count, size in zip(
                self.options.shares(), self._counts.after(total), self._sizes, strict=True
            )
        ]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch, or the next epoch if no batches are left; then advance ``epoch``.

        Raises:
            StoreError, FormatError: A shard differs from its manifest. The step counts as not delivered.
            ConfigError: ``epoch`` was changed during the iteration.
        """
        with self.iteration() as epoch:
            for step, ids, batch in self.deliveries():
                self.record(step, ids)
                yield batch
                if (self._epoch, self._batch) != (epoch, step + 1):
                    raise ConfigError("the epoch was changed while iterating", hint="Start a new iteration.")

    @contextmanager
    def iteration(self) -> Iterator[int]:
        """Return a context manager that gives the epoch of an iteration and ends complete epochs.

        If the current epoch is complete when the context is entered, that epoch is ended first.
        """
        self._epoch, self._batch = self._next_batch()
        epoch = self._epoch
        try:
            yield epoch
        finally:
            if (self._epoch, self._batch) == (epoch, self._steps):
                self.set_epoch(epoch + 1)

    def record(self, step: int, position_ids: npt.NDArray[np.int64]) -> None:  # noqa: ARG002 - as for Loader
        """Count the next batch as delivered.

        Args:
            step: Step of the batch, which must be the next one.
            position_ids: Not used: a mixture has no epoch digest.

        Raises:
            ConfigError: ``step`` is not the next step.
        """
        epoch, batch = self._next_batch()
        if step != batch:
            raise ConfigError(
                "steps must be recorded in order", found=f"step {step}", expected=f"step {batch}"
            )
        self._epoch, self._batch = epoch, batch + 1

    def batches(self, worker: int = 0, workers: int = 1) -> Iterator[Batch]:
        """Yield the batches of one worker for the rest of the epoch; see :meth:`deliveries`."""
        return (delivery.batch for delivery in self.deliveries(worker, workers))

    def deliveries(self, worker: int = 0, workers: int = 1) -> Iterator[Delivery]:
        """Yield this rank's batches of every ``workers``-th step for the rest of the epoch.

        Worker w delivers the steps t with t mod ``workers`` = w. If no batches are left, yield those of the
        next epoch. The position of the mixture does not change: the caller passes each delivery, which has no
        position ids, to :meth:`record`, in order of the steps.

        Args:
            worker: Index of the worker (default 0).
            workers: Number of workers (default 1).

        Raises:
            ConfigError: ``worker`` is not below ``workers``.
        """
        if not 0 <= worker < workers:
            raise ConfigError("worker must be below workers", found=worker, expected=f"0 to {workers - 1}")
        epoch, first = self._next_batch()
        steps = range(first + (worker - first) % workers, self._steps, workers)
        no_ids = np.empty(0, np.int64)
        for step, batch in zip(steps, self._batches(self._steps_of(epoch, steps)), strict=True):
            yield Delivery(step, no_ids, batch)

    def _next_batch(self) -> tuple[int, int]:
        """Return the epoch and the index of the next batch."""
        return (self._epoch + 1, 0) if self._batch == self._steps else (self._epoch, self._batch)

    def _steps_of(self, epoch: int, steps: range) -> range:
        """Convert steps of an epoch to steps counted from the beginning of epoch 0."""
        start = epoch * self._steps
        return range(start + steps.start, start + steps.stop, steps.step)

    def _batches(self, steps: range) -> Iterator[Batch]:
        """Yield this rank's batches of these steps. Each source is read for several steps at once."""
        left = iter(steps)
        for sizes in zip(*(loader.chunk_sizes() for loader in self._loaders), strict=True):
            chunk = list(itertools.islice(left, math.ceil(min(sizes) / self.options.batch_size)))
            if not chunk:
                return
            for step, batch in zip(
                chunk, self._read([self._step_sources(step) for step in chunk]), strict=True
            ):
                epoch, number = divmod(step, self._steps)
                yield self.transform(batch, number, epoch) if self.transform else batch

    def _step_sources(self, step: int) -> _StepSources:
        """Return the positions of this rank at a step, counted from the beginning of epoch 0."""
        size, total = self.options.batch_size, self.options.global_batch
        before, after = self._counts.after(step * total), self._counts.after((step + 1) * total)
        counts = [end - start for start, end in zip(before, after, strict=True)]
        first = self.options.rank * size
        permutation = Permutation(total, derive_key(self.options.seed, "mixture", step))
        order = permutation.slice(0, first + size)  # later ranks do not affect this one
        sources = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)[order]
        earlier = np.bincount(sources[:first], minlength=len(counts))
        own = sources[first:]
        starts = [start + count for start, count in zip(before, earlier.tolist(), strict=True)]
        lengths = np.bincount(own, minlength=len(counts)).tolist()
        return _StepSources(
            own, [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        )

    def _read(self, steps: Sequence[_StepSources]) -> Iterator[Batch]:
        """Read the positions of several steps and yield the batch of each step."""
        parts = [
            loader.take_stream([step.ranges[number] for step in steps])
            for number, loader in enumerate(self._loaders)
        ]
        for step in steps:
            batch: Batch = {}
            for number, of_source in enumerate(parts):
                rows = np.flatnonzero(step.sources == number)
                while len(rows):
                    part = next(of_source)
                    length = len(next(iter(part.values())))
                    _put_rows(batch, rows[:length], part, self.options.batch_size)
                    rows = rows[length:]
            batch["source"] = step.sources
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch, and the options, as a dict for JSON."""
        return {**self._order_state(), "epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a state. The rank and world size may have changed if the global batch is the same.

        A state saved after the last batch of an epoch resumes at the next epoch.

        Raises:
            StoreError: The state belongs to another version of the order.
            ConfigError: The state belongs to a mixture with other sources or options, or it is not a state.
        """
        expected = self._order_state()
        if isinstance(state, dict) and {"version", "order_version"} <= state.keys():
            check_versions(state, expected)
        checked = check_value(_MixtureState, state, what="the state of the mixture", error=ConfigError)
        check_same_options(state, expected, expected, "mixture and its loaders")
        if checked.batch > self._steps:
            raise ConfigError(
                "the state is beyond the end of its epoch",
                found=f"batch {checked.batch} of epoch {checked.epoch}",
                expected=f"at most batch {self._steps}",
            )
        self._epoch, self._batch = checked.epoch, checked.batch
        self._epoch, self._batch = self._next_batch()

    def _order_state(self) -> dict[str, Any]:
        """Return the part of a state that determines the order of batches and never changes."""
        return {
            "version": _STATE_VERSION,
            "order_version": ORDER_VERSION,
            "sources": [_source_id(loader) for loader in self._loaders],
            "weights": list(self.options.weights),
            "global_batch": self.options.global_batch,
            "seed": self.options.seed,
            "pace": self.options.pace,
        }


def _check_loaders(loaders: Sequence[Loader]) -> None:
    """Check that positions of these loaders can be combined in a batch.

    Raises:
        ConfigError: A loader is in stream mode, has no positions or differs from loader 0.
    """
    first = loaders[0]
    for number, loader in enumerate(loaders):
        record = f"source {number}"
        if loader.options.mode == "stream":
            raise ConfigError(
                "a mixture cannot contain a loader in stream mode",
                record=record,
                found=loader.options.mode,
                hint="Make the loader with mode='games' or mode='exact'.",
            )
        if not loader.positions:
            raise ConfigError("the loader has no positions", record=record)
        if loader.transform:
            raise ConfigError(
                "a loader of a mixture cannot have a transform",
                record=record,
                hint="Give the transform to the mixture, which applies it to whole batches.",
            )
        if loader.options.batch != first.options.batch:
            raise ConfigError(
                "the batch options of the loaders differ",
                record=record,
                found=loader.options.batch,
                expected=first.options.batch,
                hint="Make all loaders of a mixture with the same fields, planes and other batch options.",
            )
        if loader.board_size != first.board_size:
            raise ConfigError(
                "the board sizes of the loaders differ",
                record=record,
                found=loader.board_size,
                expected=first.board_size,
            )


def _source_id(loader: Loader) -> str:
    """Return 16 hexadecimal digits that identify the positions of a source, their order and their fields."""
    state = {name: value for name, value in loader.state_dict().items() if name not in _UNUSED_STATE_KEYS}
    facts = [state, int(loader.mean_positions), asdict(loader.options.batch)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode("ascii")).hexdigest()[:16]


def _put_rows(batch: Batch, rows: npt.NDArray[np.int64], part: Batch, size: int) -> None:
    """Write positions to rows of a batch of ``size`` rows. Fields that the batch lacks are created."""
    for name, array in part.items():
        if name not in batch:
            batch[name] = np.empty((size, *array.shape[1:]), array.dtype)
        batch[name][rows] = array
