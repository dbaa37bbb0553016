"""Several loaders as one: every batch mixes their positions in given proportions, step by step.

Counting is exact and in closed form, so that any step can be had at once. Never opens a shard: it asks the
loaders, and only for the places that it delivers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hexdata.batch import Batch
from hexdata.checks import as_tuple, check_count, check_same_options, check_versions
from hexdata.errors import ConfigError
from hexdata.loader.loader import Loader
from hexdata.loader.options import RankedOptions
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
}
"""What the state of a loader says beyond the order of its positions: a mixture does not use it."""
_MAX_SOURCES: Final = 256
"""As many as ``source``, uint8, can name."""


@dataclass(frozen=True)
class _State:
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
    """The options of ``Mixture``, which documents them.

    Raises:
        ConfigError: if one has no meaning, or a source is due less than one position a step.
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
            raise ConfigError("too few or too many sources", found=len(self.weights), expected="1 to 256")
        if self.pace >= len(self.weights):
            raise ConfigError("pace names no source", found=self.pace, expected=f"below {len(self.weights)}")
        # NumPy's numbers as Python's, as a state is to be JSON.
        weights = (weight.item() if isinstance(weight, np.generic) else weight for weight in self.weights)
        self._set("weights", tuple(weights))
        if not all(_is_weight(weight) for weight in self.weights):
            raise ConfigError("weights cannot be used", found=self.weights, expected="finite numbers above 0")
        shares = self.shares()
        if self.global_batch * min(shares) < 1:
            raise ConfigError(
                f"source {shares.index(min(shares))} is due less than one position a step",
                found=f"{self.global_batch} positions a step over all ranks",
                expected=f"at least {math.ceil(1 / min(shares))} for the weights {self.weights}",
                hint="Raise batch_size, or the smallest weight.",
            )

    def shares(self) -> list[Fraction]:
        """Return each source's share of the whole, exactly: they add up to 1."""
        weights = [Fraction(weight) for weight in self.weights]
        return [weight / sum(weights) for weight in weights]


def _is_weight(value: object) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and math.isfinite(value)
    )


class SourceCounts:
    """How many positions each source has given after any number of positions in all.

    After T positions, sources 0 … i together have given floor(T·S + u): S is the sum of their shares and u,
    in [0, 1), follows from the seed. So each has given T times its share to within one, and the counts add
    up to T. Where a step adds 1 / (the least share) or more to T, no count ever falls. All in integers.
    """

    def __init__(self, options: MixtureOptions) -> None:
        shares = options.shares()
        self._unit = math.lcm(*(share.denominator for share in shares))
        parts = [int(share * self._unit) for share in shares]
        self._bounds = [sum(parts[: i + 1]) for i in range(len(parts))]
        self._offset = derive_key(options.seed, "mixture") * self._unit >> 64

    def after(self, total: int) -> list[int]:
        """Return the positions that each source has given among the first ``total``."""
        ends = [(total * bound + self._offset) // self._unit for bound in self._bounds]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class SourceShare:
    """What one source of a mixture has given up to a step, over all ranks."""

    weight: float
    """Its share as asked for; those of all sources add up to 1."""
    share: float
    """Its share of the positions delivered; 0.0 before the first."""
    positions: int
    epochs: float
    """How often it has been gone through."""


class _StepSources(NamedTuple):
    """What one rank gets at one step: the source of each position, and each source's places.

    Places count on over a source's epochs, one after the other.
    """

    sources: npt.NDArray[np.uint8]
    ranges: list[tuple[int, int]]


class Mixture:
    """Delivers batches whose positions come from several loaders, in the proportion of their weights.

    The mixture is one row of steps without end. After each step every source has given its share of all
    positions so far, to within one. Each source is an endless stream too: its epochs one after the other,
    each in its own new order, every position once before any comes again; a batch may hold the end of one
    and the beginning of the next. Within a step the sources are mixed by a permutation that follows from
    (seed, step); ranks take consecutive parts of the step, so they change nothing but who gets what.

    An epoch of the mixture is a fixed number of steps: the fewest in which the source ``pace`` is delivered
    once, ``len(mixture)``. All batches are whole.

    Iterating runs the epoch to its end, from the next step on that was not delivered, then advances
    ``epoch``; an iteration that begins when all steps of an epoch are delivered runs the next one. A batch is
    that of the loaders, and ``source`` uint8 (B,): which loader a position is from.

    Args:
        loaders: the sources, in exact mode and with the same batch options and board size; stores, splits,
            predicates, seeds and shuffling are each one's own. Only the places of their epochs are used:
            their batch size, remainder and state play no part, and ranks are the mixture's business.
        weights: one a loader, above 0; only their proportions count.
        batch_size: positions a batch on this rank.
        seed: any integer.
        rank, world_size: this process among those that train together.
        pace: the number of the source that an epoch is measured by; None means the one with most positions.

    Raises:
        ConfigError: an option has no meaning, the loaders do not go together, one has no positions, or the
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
    ) -> None:
        for name, value in (("loaders", loaders), ("weights", weights)):
            if isinstance(as_tuple(value), tuple):
                continue
            expected = "a list of loaders" if name == "loaders" else "a list of numbers, one a loader"
            raise ConfigError(f"{name} cannot be used", found=repr(value), expected=expected)
        loaders, weights = as_tuple(loaders), as_tuple(weights)
        given: Any = loaders
        for number, each in enumerate(given):
            if not isinstance(each, Loader):
                what = f"loaders[{number}] cannot be used"
                raise ConfigError(what, found=repr(each), expected="a hexdata.Loader")
        if len(loaders) != len(weights):
            raise ConfigError(
                "weights and loaders differ in number", found=len(weights), expected=len(loaders)
            )
        self._loaders = list(loaders)
        self._sizes = [loader.positions for loader in loaders]
        if pace is None and loaders:
            pace = self._sizes.index(max(self._sizes))
        self.options = MixtureOptions(tuple(weights), batch_size, seed, rank, world_size, pace or 0)
        _check_loaders(self._loaders)
        self._counts = SourceCounts(self.options)
        paced = self.options.shares()[self.options.pace] * self.options.global_batch
        self._steps = math.ceil(self._sizes[self.options.pace] / paced)
        self._epoch = self._batch = 0

    def __len__(self) -> int:
        """Return the batches of an epoch, the same for every rank."""
        return self._steps

    @property
    def epoch(self) -> int:
        """The epoch that iterating runs, counted from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Start ``epoch`` from its first batch.

        Raises:
            ConfigError: there is no such epoch.
        """
        self._epoch, self._batch = check_count("epoch", epoch, 0), 0

    @property
    def realised(self) -> list[SourceShare]:
        """What each source has given in all steps before the next one, over all ranks."""
        total = (self._epoch * self._steps + self._batch) * self.options.global_batch
        return [
            SourceShare(float(share), given / max(total, 1), given, given / size)
            for share, given, size in zip(
                self.options.shares(), self._counts.after(total), self._sizes, strict=True
            )
        ]

    def __iter__(self) -> Iterator[Batch]:
        """Deliver the rest of the epoch, or all of the next one if nothing is left; then advance ``epoch``.

        Raises:
            StoreError, FormatError: a shard is not what its manifest says. The step was not delivered.
            ConfigError: ``epoch`` was changed while iterating.
        """
        epoch, first = self._epoch, self._batch = self._next_batch()
        try:
            for batch in self._batches(self._steps_of(epoch, range(first, self._steps))):
                self._batch = first = first + 1
                yield batch
                if (self._epoch, self._batch) != (epoch, first):
                    raise ConfigError("the epoch was changed while iterating", hint="Start a new iteration.")
        finally:
            if (self._epoch, self._batch) == (epoch, self._steps):
                self.set_epoch(epoch + 1)

    def batches(self, worker: int = 0, workers: int = 1) -> Iterator[Batch]:
        """Deliver those of the rest of the epoch whose step in it is ``worker`` mod ``workers``.

        If nothing is left of the epoch, those of the next epoch are delivered. Where the mixture stands does
        not move: that is for whoever puts the workers' batches together.

        Raises:
            ConfigError: there is no such worker.
        """
        if not 0 <= worker < workers:
            raise ConfigError("no such worker", found=worker, expected=f"0 to {workers - 1}")
        epoch, first = self._next_batch()
        steps = range(first + (worker - first) % workers, self._steps, workers)
        yield from self._batches(self._steps_of(epoch, steps))

    def _next_batch(self) -> tuple[int, int]:
        """Return the epoch and the batch that are delivered next."""
        return (self._epoch + 1, 0) if self._batch == self._steps else (self._epoch, self._batch)

    def _steps_of(self, epoch: int, steps: range) -> range:
        """Return steps of an epoch as steps of the mixture, counted from its beginning."""
        start = epoch * self._steps
        return range(start + steps.start, start + steps.stop, steps.step)

    def _batches(self, steps: range) -> Iterator[Batch]:
        """Yield this rank's parts of these steps; the sources are asked for several steps at once."""
        left = iter(steps)
        for sizes in zip(*(loader.chunk_sizes() for loader in self._loaders), strict=True):
            chunk = list(itertools.islice(left, math.ceil(min(sizes) / self.options.batch_size)))
            if not chunk:
                return
            yield from self._deliver([self._step_sources(step) for step in chunk])

    def _step_sources(self, step: int) -> _StepSources:
        """Return what this rank gets at a step, counted from the beginning of the mixture."""
        size, total = self.options.batch_size, self.options.global_batch
        before, after = self._counts.after(step * total), self._counts.after((step + 1) * total)
        counts = [end - start for start, end in zip(before, after, strict=True)]
        first = self.options.rank * size
        permutation = Permutation(total, derive_key(self.options.seed, "mixture", step))
        order = permutation.slice(0, first + size)  # what later ranks get is nothing to this one
        sources = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)[order]
        earlier = np.bincount(sources[:first], minlength=len(counts))
        own = sources[first:]
        starts = [start + count for start, count in zip(before, earlier.tolist(), strict=True)]
        lengths = np.bincount(own, minlength=len(counts)).tolist()
        return _StepSources(
            own, [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        )

    def _deliver(self, shares: Sequence[_StepSources]) -> Iterator[Batch]:
        """Yield the batches of these shares."""
        parts = [
            _read_ranges(loader, [share.ranges[number] for share in shares])
            for number, loader in enumerate(self._loaders)
        ]
        for share in shares:
            batch: Batch = {}
            for number, of_source in enumerate(parts):
                rows = np.flatnonzero(share.sources == number)
                while len(rows):
                    part = next(of_source)
                    length = len(next(iter(part.values())))
                    _put_rows(batch, rows[:length], part, self.options.batch_size)
                    rows = rows[length:]
            batch["source"] = share.sources
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return where the mixture stands, JSON-able: the batches delivered count, and no others."""
        return {**self._order_state(), "epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: of any rank and world size with the same global batch.

        A state taken after the last batch of an epoch is the beginning of the next epoch.

        Raises:
            StoreError: it was taken under another version of the order.
            ConfigError: it was taken with other sources or options, or is no state.
        """
        fixed = self._order_state()
        if isinstance(state, dict) and {"version", "order_version"} <= state.keys():
            check_versions(state, fixed)
        checked = check_value(_State, state, what="the state of the mixture", error=ConfigError)
        check_same_options(state, fixed, fixed, "mixture, and its loaders,")
        if checked.batch > self._steps:
            found = f"batch {checked.batch} of epoch {checked.epoch}"
            raise ConfigError(
                "the state stands nowhere", found=found, expected=f"at most batch {self._steps}"
            )
        self._epoch, self._batch = checked.epoch, checked.batch
        self._epoch, self._batch = self._next_batch()

    def _order_state(self) -> dict[str, Any]:
        """Return what the order of the batches hangs on, and does not move."""
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
    """See that batches of these loaders can be joined.

    Raises:
        ConfigError: naming the first that does not go with loader 0.
    """
    first = loaders[0]
    for number, loader in enumerate(loaders):
        record = f"source {number}"
        if loader.options.mode != "exact":
            raise ConfigError(
                "a mixture needs loaders in exact mode", record=record, found=loader.options.mode
            )
        if not loader.positions:
            raise ConfigError("the source has no positions", record=record)
        if loader.options.batch != first.options.batch:
            raise ConfigError(
                "the batches of the sources differ",
                record=record,
                found=loader.options.batch,
                expected=first.options.batch,
                hint="Give all loaders of a mixture the same fields, planes and other batch options.",
            )
        if loader.manifest.board_size != first.manifest.board_size:
            raise ConfigError(
                "the boards of the sources differ in size",
                record=record,
                found=loader.manifest.board_size,
                expected=first.manifest.board_size,
            )


def _source_id(loader: Loader) -> str:
    """Return 16 hexadecimal digits that name a source: its positions, their order, what batches hold."""
    state = {name: value for name, value in loader.state_dict().items() if name not in _UNUSED_STATE_KEYS}
    facts = [state, loader.positions, asdict(loader.options.batch)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode("ascii")).hexdigest()[:16]


def _read_ranges(loader: Loader, ranges: Sequence[tuple[int, int]]) -> Iterator[Batch]:
    """Yield these ranges of a loader's endless stream; one that epochs cut comes in as many pieces."""
    size = loader.positions
    pieces = [
        (epoch, max(start - epoch * size, 0), min(stop - epoch * size, size))
        for start, stop in ranges
        if start < stop
        for epoch in range(start // size, (stop - 1) // size + 1)
    ]
    for epoch, group in itertools.groupby(pieces, key=operator.itemgetter(0)):
        yield from loader.take([(first, last) for _, first, last in group], epoch)


def _put_rows(batch: Batch, rows: npt.NDArray[np.int64], part: Batch, size: int) -> None:
    """Write the positions of ``part`` to these rows of a batch of ``size``, made as its fields are met."""
    for name, array in part.items():
        if name not in batch:
            batch[name] = np.empty((size, *array.shape[1:]), array.dtype)
        batch[name][rows] = array
