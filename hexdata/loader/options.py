"""Options of ``Loader``, ``PositionDataset`` and ``hexdata load``.

Each is declared, described and checked here, or in ``BatchOptions`` and ``CacheOptions``, and nowhere else.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Concatenate, Final, Literal, ParamSpec, get_args

import numpy.typing as npt

from hexdata.batch import Batch, BatchOptions
from hexdata.checks import as_int, as_tuple, check_choice, check_count, check_fields, check_seed, unusable
from hexdata.errors import ConfigError
from hexdata.options import Dedup, RankedOptions, describe_options
from hexdata.progress import SILENT, Progress
from hexdata.schema import SPLITS
from hexdata.shards.cache import CacheOptions
from hexdata.storage import AnyPath

Mode = Literal["games", "exact", "stream"]
Remainder = Literal["auto", "short", "drop", "pad"]
OnError = Literal["raise", "skip"]
"""A damaged shard raises an error, or is skipped with a warning."""
Check = Literal["sizes", "digests"]
"""What is compared with the manifest when shards are opened: file sizes only, or SHA-256 digests too."""
Weights = str | npt.ArrayLike | tuple[npt.ArrayLike, npt.ArrayLike]
"""Weights as given: an SQL expression, one weight for each row, or a pair of position ids and weights."""
TransformFunction = Callable[[Batch], Mapping[str, Any]]
"""Function from a batch to a mapping of names to arrays."""

ARRAY: Final = "array"
"""The option ``weights`` in states, and in the options of a loader, if arrays were given."""
# Half of the largest number that a state may contain, which leaves as many epochs to follow.
MAX_EPOCH: Final = 1 << 61
"""Largest epoch that can be set. A state may contain larger ones, which follow it."""
_P = ParamSpec("_P")


@describe_options
@dataclass(frozen=True, kw_only=True)
class SplitOptions(CacheOptions, BatchOptions):
    """Options that choose positions of a split, and determine the contents of their batches.

    Attributes:
        split: "train", "val" or "test".
        seed: Seed of the order, of the symmetries and of the value weights: any integer.
        mode: "games" holds the games of a store in memory, and permutes their positions; no shuffle or export
            is needed. "exact" reads the shards of the split into memory, and permutes their positions.
            "stream" reads shards sequentially, and permutes windows of them. None: "games" for a store
            without shards, "exact" for local shards, otherwise "stream".
        check: "digests" also compares every board with its game in games mode. The digest of every file is
            compared when it is read, in all modes.
        where: SQL condition that selects positions by labels, such as ``"value_sample_tier < 2"``, by the
            results of a search that the store has, such as ``"visits >= 100 AND extra.temperature < 0.5"``,
            and by columns of the game and of its source, such as ``"provenance = 'metadata'"``, which require
            a store. Null counts as false. Not in stream mode. None: all positions.
        dedup: "exact" leaves out games with the moves and the first player of an earlier game, "symmetric"
            also those that equal one under a symmetry of the board, as ``hexdata shuffle --dedup`` does. Only
            games with positions that ``where`` selects are compared. Requires a store; not in stream mode.
        newest: Number of games with the highest ids whose positions are selected. Not in stream mode. None:
            all games.
        shards: Shards of the split to read, counted from 0 in the order of the manifest: text with the first
            and the last one, such as ``"0-49"``, or a pair (start, stop), such as ``(0, 50)``. Not in games
            mode. None: all shards.
        weights: Weight of each position, from 0 to 65,535. Each epoch delivers a position of weight w
            floor(w) or ceil(w) times, w times on average, and 0 leaves it out. An SQL expression over the
            columns of ``where``, such as ``"weight"`` or ``"CASE WHEN value_sample_tier = 0 THEN 2 ELSE 0.5
            END"``; or numbers (positions of the split,) in stored order; or a pair of position ids and
            weights, both (M,), in any order, which contains every position of the split. Not in stream mode.
            None: each position once.

    Raises:
        ConfigError: An option has an invalid value, or options contradict each other.
    """

    split: str = field(default="train", kw_only=False)
    seed: int = 0
    mode: Mode | None = None
    check: Check = "sizes"
    where: str | None = None
    dedup: Dedup = "none"
    newest: int | None = None
    shards: str | Sequence[int] | None = None
    weights: Weights | None = None

    def __post_init__(self) -> None:
        # Called by name: super() would stop at the first parent, which does not pass the call on.
        BatchOptions.__post_init__(self)
        CacheOptions.__post_init__(self)
        check_choice("split", self.split, SPLITS)
        object.__setattr__(self, "seed", check_seed(self.seed))
        check_fields(self, {"newest": 1})
        if self.mode is not None:
            check_choice("mode", self.mode, get_args(Mode))
        check_choice("check", self.check, get_args(Check))
        check_choice("dedup", self.dedup, get_args(Dedup))
        if self.where is not None and not (isinstance(self.where, str) and self.where.strip()):
            raise unusable("where", repr(self.where), "an SQL condition")
        if isinstance(self.weights, str) and not self.weights.strip():
            raise unusable("weights", repr(self.weights), "an SQL expression")
        if self.weights is not None and self.mode == "stream":
            raise ConfigError(f"stream mode cannot apply weights={self.weights_text!r}; use another mode")
        if self.shards is not None:
            object.__setattr__(self, "shards", shard_range(self.shards))
            if self.mode == "games":
                raise ConfigError(f"games mode reads no shards; found shards={self.shards}")

    @property
    def batch(self) -> BatchOptions:
        """The options of the contents of batches alone."""
        return BatchOptions(**{each.name: getattr(self, each.name) for each in fields(BatchOptions)})

    @property
    def weights_text(self) -> str | None:
        """The weights as states record them: the expression, or "array" for arrays."""
        return self.weights if self.weights is None or isinstance(self.weights, str) else ARRAY

    @property
    def selecting(self) -> dict[str, Any]:
        """The options that select positions and are not at their defaults."""
        names, unselecting = ("where", "dedup", "newest", "final_policy"), (None, "none", "zeros", "uniform")
        return {name: getattr(self, name) for name in names if getattr(self, name) not in unselecting}


@describe_options
@dataclass(frozen=True, kw_only=True)
class LoaderOptions(SplitOptions, RankedOptions):
    """Options of ``Loader``. Integers of other types, such as NumPy's, become Python ints, and lists tuples.

    Attributes:
        shuffle: Whether to shuffle. False delivers the stored order. None: only ``train`` is shuffled.
        remainder: How to deliver the last global batch if it is incomplete. "short" shares its positions
            evenly among the ranks; batches may then be shorter, or empty if there are fewer positions than
            ranks. "pad" fills the batches with repeated positions; every batch then contains ``padding``,
            bool (B,), True for repeated positions. "drop" omits the global batch. "auto" is "short" on one
            rank and "pad" on several, so that all ranks have full batches.
        on_error: "skip" leaves out shards that are missing, truncated or altered (in stream mode, their
            windows with damaged blocks); each gives a warning and an entry in ``skipped``. Requires shards.
            "raise" raises an error.
        streams: (P, Q) of stream mode: each global batch has P parts, and consecutive steps cycle through Q
            streams per part, so an epoch is read as P · Q streams. The number of ranks must divide P, and the
            number of workers Q.
        window: Maximum number of consecutive rows of a stream that are permuted together in stream mode.
        threads: Number of threads that prepare batches ahead of the caller. 1: batches are prepared in the
            thread that asks for them. More threads let batches be prepared while the caller computes, but
            hardly raise the rate otherwise. The batches are the same.
        transform: Function that is called with each batch, a dict of arrays, and returns the batch to
            deliver, a mapping of names to arrays. It is called where the batch is made: in the threads, or in
            the workers of ``hexdata.torch``.
        progress: Receives progress while shards or games are read. Default: no reports.

    Raises:
        ConfigError: An option has an invalid value, or options contradict each other.
    """

    shuffle: bool | None = None
    remainder: Remainder = "auto"
    on_error: OnError = "raise"
    # 1, 2 or 4 ranks and workers fit without setting it; more streams hold more windows in memory.
    streams: Sequence[int] = (4, 4)
    # The default size of a shard, so that a window is one shard, which is read once.
    window: int = 262_144
    threads: int = 1
    transform: TransformFunction | None = None
    progress: Progress = SILENT

    def __post_init__(self) -> None:
        SplitOptions.__post_init__(self)
        RankedOptions.__post_init__(self)
        if self.shuffle is None:
            object.__setattr__(self, "shuffle", self.split == "train")
        check_fields(self, {"window": 1, "threads": 1})
        check_choice("remainder", self.remainder, get_args(Remainder))
        check_choice("on_error", self.on_error, get_args(OnError))
        check_transform(self.transform)
        streams = as_tuple(self.streams)
        if not (isinstance(streams, tuple) and len(streams) == 2):
            raise unusable("streams", repr(self.streams), "a pair of integers, such as (4, 4)")
        object.__setattr__(self, "streams", tuple(check_count("streams", count, 1) for count in streams))
        if self.mode == "stream" and self.selecting:
            names = ", ".join(self.selecting)
            raise ConfigError(f"stream mode cannot select positions by {names}; use another mode")
        if self.mode == "games" and self.on_error != "raise":
            raise ConfigError(f"games mode has no shards to skip with on_error={self.on_error!r}")

    @property
    def last_batch(self) -> Literal["short", "drop", "pad"]:
        """``remainder``, with the meaning of "auto" for the number of ranks."""
        if self.remainder == "auto":
            # With several ranks, one with a shorter batch or none would leave the
            # others waiting in a collective operation.
            return "short" if self.world_size == 1 else "pad"
        return self.remainder


def takes_options(
    kind: Callable[_P, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, str | AnyPath, _P], None]]:
    """Return a decorator for a constructor of a location and of the options of a class.

    The constructor takes them as ``**given``; type checkers and ``help`` know them from the class.
    """

    def declare(init: Any) -> Any:
        # `self` and the location; the options of the class replace the others.
        own = [*inspect.signature(init).parameters.values()][:2]
        options = [
            each.replace(annotation=each.empty) for each in inspect.signature(kind).parameters.values()
        ]
        init.__signature__ = inspect.Signature([*own, *options])
        return init

    return declare


def shard_range(value: object) -> tuple[int, int]:
    """Return a range of shards as (start, stop). Args: value: A pair (start, stop) of which stop is excluded;
    or text with the first and the last shard.

    Raises:
        ConfigError: The value is neither, or the range is empty.
    """
    bounds: tuple[Any, ...] = ()
    if isinstance(value, str):
        # Text includes the last shard, as people write ranges; a pair excludes it, as Python does.
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?\s*", value)
        bounds = () if match is None else (int(match[1]), int(match[2] or match[1]) + 1)
    elif isinstance(given := as_tuple(value), tuple):
        bounds = tuple(map(as_int, given))
    if len(bounds) != 2 or None in bounds or not 0 <= bounds[0] < bounds[1]:
        expected = 'the first and the last shard, such as "0-49", or a pair (start, stop), such as (0, 50)'
        raise unusable("shards", repr(value)[:80], expected)
    return bounds


def check_transform(transform: object) -> None:
    """Check that a transform, if there is one, is a function.

    Raises:
        ConfigError: It is not.
    """
    if not (transform is None or callable(transform)):
        raise unusable("transform", repr(transform), "a function of one argument")
