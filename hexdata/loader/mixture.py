"""Mixture of several loaders, whose batches contain their positions in fixed proportions.

The counts of each source are exact and in closed form, so any step can be computed directly.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hexdata.batch import Batch
from hexdata.checks import as_tuple, check_fields, check_same_options, unusable
from hexdata.errors import ConfigError
from hexdata.loader.checkpoint import check_form
from hexdata.loader.epochs import Delivery, EpochLoader
from hexdata.loader.loader import Loader
from hexdata.loader.options import TransformFunction, check_transform
from hexdata.options import RankedOptions
from hexdata.order import ORDER_VERSION, Permutation, derive_key
from hexdata.schema import NO_MOVE

_STATE_VERSION: Final = 1
_UNUSED_STATE_KEYS: Final = frozenset(
    ("epoch", "batch", "epoch_digest", "rank", "world_size", "global_batch", "remainder")
) | {"where_changed", "first_where"}
"""Keys of a loader's state that do not affect the order of its positions in a mixture."""
_ROWS_TOGETHER: Final = 1 << 12
"""Approximate number of positions whose batches are made together."""
_MAX_SOURCES: Final = 256
"""Number of values of the field ``source``, uint8."""


@dataclass(frozen=True, kw_only=True)
class MixtureOptions(RankedOptions):
    """The options of ``Mixture``, which describes them.

    Raises:
        ConfigError: An option has an invalid value, or a source would have less than one position per step.
    """

    weights: tuple[float, ...]
    pace: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, {"pace": 0})
        if not 1 <= len(self.weights) <= _MAX_SOURCES:
            raise ConfigError(f"a mixture has 1 to {_MAX_SOURCES} loaders, not {len(self.weights)}")
        if self.pace >= len(self.weights):
            raise ConfigError(f"pace {self.pace} must be the index of one of {len(self.weights)} loaders")
        # JSON cannot store NumPy's numbers.
        weights = tuple(each.item() if isinstance(each, np.generic) else each for each in self.weights)
        object.__setattr__(self, "weights", weights)
        if not all(
            isinstance(each, (int, float)) and not isinstance(each, bool) and 0 < each <= sys.float_info.max
            for each in weights
        ):
            raise unusable("weights", repr(weights), "finite numbers above 0")
        # With less than one position per step, the floors of SourceCounts could make a count decrease.
        smallest = min(self.shares())
        if self.global_batch * smallest < 1:
            reason = f"source {self.shares().index(smallest)} would have less than one position per step"
            expected = f"a batch_size * world_size of at least {math.ceil(1 / smallest)}"
            raise ConfigError(reason, found=self.global_batch, expected=expected)

    def shares(self) -> list[Fraction]:
        """Return the exact share of each source; the shares add up to 1."""
        weights = [Fraction(weight) for weight in self.weights]
        return [weight / sum(weights) for weight in weights]


class SourceCounts:
    """Number of positions from each source among the first T positions of a mixture.

    Sources 0 … i together have floor(T·S + u) positions, where S is the sum of their shares and u, in [0, 1),
    is determined by the seed. Each source therefore has T times its share, to within one position, and the
    counts add up to T. Counts never decrease if each step adds at least 1 / (the smallest share) positions.
    The arithmetic uses integers only.
    """

    def __init__(self, options: MixtureOptions) -> None:
        shares = options.shares()
        # All shares as integers over one denominator: floats would drift over many steps.
        self._unit = math.lcm(*(share.denominator for share in shares))
        parts = [int(share * self._unit) for share in shares]
        self._bounds = [sum(parts[: i + 1]) for i in range(len(parts))]
        # u in units of the denominator. Without it, the first source would always be rounded down first.
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


class Mixture(EpochLoader):
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

    If the board sizes differ, boards and policies have the largest size N: a smaller board is at the lower
    rows and columns, its other cells are 0, and cells are numbered row · N + column, also in ``move``. The
    field ``mask``, bool (B, N, N), is True for the cells of each position's board. A symmetry acts on the
    position's own board.

    Example::

        mixture = Mixture([Loader("human"), Loader("selfplay")], weights=(1, 3), batch_size=256)
        for batch in mixture:
            train(batch["board"], batch["policy"], batch["value"])

    Args:
        loaders: The sources, at most 256, in games or exact mode. They must have the same batch options.
            Boards of different sizes must not be packed or fill rows. Stores, splits, conditions, seeds and
            shuffling may differ. Batch size, ranks, remainder and position of the loaders are not used.
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

    options: MixtureOptions

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
        loaders, weights = as_tuple(loaders), as_tuple(weights)
        if not (isinstance(loaders, tuple) and all(isinstance(each, Loader) for each in loaders)):
            raise unusable("loaders", repr(loaders), "a list of hexdata.Loader")
        if not isinstance(weights, tuple):
            raise unusable("weights", repr(weights), "a list of numbers, one per loader")
        if len(loaders) != len(weights):
            raise ConfigError(f"{len(weights)} weights were given for {len(loaders)} loaders")
        check_transform(transform)
        self.transform = transform
        # Fixed here: with weights, epochs differ by one position, but the
        # length of the mixture's epoch must not.
        sizes = [loader._mean_positions for loader in loaders]
        if pace is None:
            pace = sizes.index(max(sizes)) if sizes else 0
        self.options = MixtureOptions(
            weights=weights, batch_size=batch_size, seed=seed, rank=rank, world_size=world_size, pace=pace
        )
        _check_loaders(loaders)
        # Copies, whose conditions do not change while the mixture exists.
        self._loaders = [each._for_rank(each.options.rank, each.options.world_size) for each in loaders]
        self._sizes: list[Fraction] = sizes
        self._paced_share = self.options.shares()[pace]
        self._counts = SourceCounts(self.options)
        self._move_to(0)

    def __repr__(self) -> str:
        return f"Mixture({self._loaders!r}, weights={self.options.weights!r}, seed={self.options.seed})"

    def steps(self, epoch: int) -> int:  # noqa: ARG002 - the same for all epochs
        """Return the number of batches of an epoch, which is the same for every rank and epoch."""
        return math.ceil(self._sizes[self.options.pace] / (self._paced_share * self.options.global_batch))

    @property
    def realised(self) -> list[SourceShare]:
        """What each source contributed to all steps before the next one, over all ranks."""
        total = (self._epoch * len(self) + self._batch) * self.options.global_batch
        return [
            SourceShare(float(share), count / max(total, 1), count, float(count / size))
            for share, count, size in zip(
                self.options.shares(), self._counts.after(total), self._sizes, strict=True
            )
        ]

    def _make(self, epoch: int, steps: range) -> Iterator[Delivery]:
        """Yield this rank's batches of these steps. Each source is read for several steps at once."""
        first = epoch * self.steps(epoch)
        # Small batches are made together, since each read of a source has a cost of its own.
        count = math.ceil(_ROWS_TOGETHER / self.options.batch_size)
        for start in range(0, len(steps), count):
            chunk = steps[start : start + count]
            made = self._read([self._step_sources(first + step) for step in chunk])
            for step, batch in zip(chunk, made, strict=True):
                yield Delivery(step, self._transformed(batch, step, epoch))

    def _step_sources(self, step: int) -> tuple[npt.NDArray[np.uint8], list[tuple[int, int]]]:
        """Return the positions of this rank at a step, counted from the beginning of epoch 0.

        Returns:
            The source of each position (B,); and for each source the range of indices in the concatenation of
            its epochs.
        """
        size, total = self.options.batch_size, self.options.global_batch
        before, after = self._counts.after(step * total), self._counts.after((step + 1) * total)
        counts = [end - start for start, end in zip(before, after, strict=True)]
        # Ranks share one permutation of the global batch, so a step has
        # the same positions for any number of ranks.
        first = self.options.rank * size
        permutation = Permutation(total, derive_key(self.options.seed, "mixture", step))
        order = permutation.slice(0, first + size)  # later ranks do not affect this one
        sources = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)[order]
        # The ranks below take the first positions of each source; this rank continues behind them.
        earlier = np.bincount(sources[:first], minlength=len(counts))
        own = sources[first:]
        starts = [start + count for start, count in zip(before, earlier.tolist(), strict=True)]
        lengths = np.bincount(own, minlength=len(counts)).tolist()
        return own, [(start, start + length) for start, length in zip(starts, lengths, strict=True)]

    def _read(self, steps: Sequence[tuple[npt.NDArray[np.uint8], list[tuple[int, int]]]]) -> Iterator[Batch]:
        """Read the positions of several steps, from :meth:`_step_sources`, and yield their batches."""
        parts = [
            loader._take_stream([ranges[number] for _, ranges in steps])
            for number, loader in enumerate(self._loaders)
        ]
        sizes = [loader.board_size for loader in self._loaders]
        for sources, _ in steps:
            batch: Batch = {}
            for number, of_source in enumerate(parts):
                rows = np.flatnonzero(sources == number)
                while len(rows):  # a part ends at the end of an epoch of the source
                    part = next(of_source)
                    if min(sizes) < max(sizes):
                        part = _enlarge(part, sizes[number], max(sizes))
                    length = len(next(iter(part.values())))
                    for name, array in part.items():
                        if name not in batch:
                            batch[name] = np.empty((len(sources), *array.shape[1:]), array.dtype)
                        batch[name][rows[:length]] = array
                    rows = rows[length:]
            batch["source"] = sources
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
        given = check_form(state, {**expected, "epoch": 0, "batch": 0}, (), "mixture")
        check_same_options(given, expected, expected, "mixture and its loaders")
        if given["batch"] > len(self):
            raise ConfigError(f"the state is beyond its epoch: batch {given['batch']} of {len(self)}")
        # Only the number of the step: everything else of a mixture is computed from it.
        self._move_to(given["epoch"], given["batch"])
        self._end_complete_epoch()

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
        options, fault = loader.options, None
        if options.mode == "stream":
            fault = "is in stream mode; make it with mode='games' or mode='exact'"
        elif not loader.positions:
            fault = "has no positions"
        elif loader.transform:
            fault = "has a transform; give it to the mixture, which applies it to whole batches"
        elif options.batch != first.options.batch:
            fault = f"has other batch options than source 0: {options.batch}, not {first.options.batch}"
        elif loader.board_size != first.board_size and options.board in ("packed", "fill"):
            fault = f"has boards of another size than source 0, which board={options.board!r} cannot deliver"
        if fault:
            raise ConfigError(f"source {number} {fault}")


def _source_id(loader: Loader) -> str:
    """Return 16 hexadecimal digits that identify the positions of a source, their order and their fields."""
    # A digest instead of the states: an option that differs in any source is found, but states stay short.
    state = {name: value for name, value in loader.state_dict().items() if name not in _UNUSED_STATE_KEYS}
    facts = [state, int(loader._mean_positions), asdict(loader.options.batch)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode("ascii")).hexdigest()[:16]


def _enlarge(part: Batch, n: int, largest: int) -> Batch:
    """Return positions on boards of size ``n`` as positions on larger boards, with their ``mask``."""
    size = len(next(iter(part.values())))
    # A smaller board keeps its corner: row and column stay the same, only the number of the cell changes.
    cells = (np.arange(n)[:, np.newaxis] * largest + np.arange(n)).reshape(-1)  # of the large board
    enlarged = dict(part)
    if "board" in part:
        planes = part["board"].shape[1]
        enlarged["board"] = np.zeros((size, planes, largest, largest), part["board"].dtype)
        enlarged["board"][:, :, :n, :n] = part["board"]
    if "policy" in part:
        enlarged["policy"] = np.zeros((size, largest * largest), part["policy"].dtype)
        enlarged["policy"][:, cells] = part["policy"]
    if "move" in part:
        move = part["move"]
        # NO_MOVE is clipped to the last cell and put back below.
        images = cells.astype(move.dtype).take(move, mode="clip")
        enlarged["move"] = np.where(move == NO_MOVE, move, images)
    enlarged["mask"] = np.zeros((size, largest, largest), np.bool_)
    enlarged["mask"][:, :n, :n] = True
    return enlarged
