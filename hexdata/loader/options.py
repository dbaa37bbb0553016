"""Options of ``Loader``, checked when they are made."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from hexdata.batch import BatchOptions
from hexdata.checks import as_int, check_choice, check_count, check_seed
from hexdata.errors import ConfigError
from hexdata.selection.options import Dedup
from hexdata.shards.options import CacheOptions, Check, OnError

__all__ = [
    "ARRAY",
    "MAX_EPOCH",
    "LoaderOptions",
    "Mode",
    "RankedOptions",
    "Remainder",
    "shard_range",
]

Mode = Literal["games", "exact", "stream"]
"""Mode of the loader: "games" permutes the whole split, which it holds as games; "exact" permutes the rows of
mapped shards; "stream" reads shards sequentially."""
Remainder = Literal["short", "drop", "pad"]
"""Delivery of an incomplete last global batch: shorter, not at all, or filled with repeated positions."""


ARRAY: Final = "array"
"""Value of the option ``weights`` if arrays are given."""
MAX_EPOCH: Final = 1 << 61
"""Largest epoch that can be set. A state may contain larger ones, which follow it."""


class RankedOptions:
    """Base of the options of loaders that share batches between ranks."""

    batch_size: int
    world_size: int
    rank: int
    seed: int

    def _check_ranks(self) -> None:
        """Check the four fields and convert them to Python ints, which a state in JSON requires.

        Raises:
            ConfigError: A field has an invalid value.
        """
        for name, least in (("batch_size", 1), ("world_size", 1), ("rank", 0)):
            self._set(name, check_count(name, getattr(self, name), least))
        if self.rank >= self.world_size:
            raise ConfigError(
                "rank must be below world_size", found=self.rank, expected=f"below {self.world_size}"
            )
        check_count("batch_size * world_size", self.global_batch, 1)
        self._set("seed", check_seed(self.seed))

    def require_world_size(self, world_size: int, what: str, epoch: int, batch: int) -> None:
        """Check that the number of ranks does not change within an epoch.

        Args:
            world_size: New number of ranks.
            what: "loader" or "mixture", for the message.
            epoch: Current epoch.
            batch: Index of its next batch.

        Raises:
            ConfigError: The number changes, and the epoch has begun.
        """
        if batch and world_size != self.world_size:
            raise ConfigError(
                f"the world size of a {what} cannot change within an epoch",
                found=f"world size {world_size} at batch {batch} of epoch {epoch}",
                expected=f"world size {self.world_size}",
                hint=f"Make the {what} with the new world size, then load the state.",
            )

    def _set(self, name: str, value: object) -> None:
        """Set a field of the frozen dataclass in ``__post_init__``."""
        object.__setattr__(self, name, value)

    @property
    def global_batch(self) -> int:
        """Number of positions per step, over all ranks."""
        return self.batch_size * self.world_size


@dataclass(frozen=True)
class LoaderOptions(RankedOptions):
    """The options of ``Loader``, which describes them.

    ``shards`` is a pair (start, stop), or None; text such as "0-49" is converted to a pair. ``weights`` is
    the SQL expression, or "array" if arrays were given. ``batch`` determines the contents of batches and
    ``copies`` the shard cache. ``streams`` and ``window``
    apply to stream mode only. Integers of other types, such as NumPy's, are converted to Python ints.

    Raises:
        ConfigError: An option has an invalid value.
    """

    split: str = "train"
    batch_size: int = 1024
    seed: int = 0
    shuffle: bool = True
    mode: Mode = "exact"
    rank: int = 0
    world_size: int = 1
    remainder: Remainder = "short"
    on_error: OnError = "raise"
    check: Check = "sizes"
    where: str | None = None
    dedup: Dedup = "none"
    newest: int | None = None
    shards: str | tuple[int, int] | None = None
    weights: str | None = None
    streams: tuple[int, int] = (4, 4)
    window: int = 262_144
    batch: BatchOptions = field(default_factory=BatchOptions)
    copies: CacheOptions = field(default_factory=CacheOptions)
    threads: int = 1

    def __post_init__(self) -> None:
        self._check_ranks()
        self._set("window", check_count("window", self.window, 1))
        self._set("threads", check_count("threads", self.threads, 1))
        if not isinstance(self.shuffle, bool):
            raise ConfigError("shuffle cannot be used", found=repr(self.shuffle), expected="True or False")
        choices = {
            "mode": Mode,
            "remainder": Remainder,
            "on_error": OnError,
            "check": Check,
            "dedup": Dedup,
        }
        for name, known in choices.items():
            check_choice(name, getattr(self, name), get_args(known))
        if self.where is not None and not (isinstance(self.where, str) and self.where.strip()):
            raise ConfigError("where cannot be used", found=repr(self.where), expected="an SQL predicate")
        if self.weights is not None and not self.weights.strip():
            raise ConfigError(
                "weights cannot be used", found=repr(self.weights), expected="an SQL expression"
            )
        if self.weights is not None and self.mode == "stream":
            raise ConfigError(
                "stream mode cannot apply weights",
                found=f"weights={self.weights!r}",
                hint="Use mode='games' over a store, or mode='exact' on a local copy of the shards.",
            )
        if self.newest is not None:
            self._set("newest", check_count("newest", self.newest, 1))
        if self.shards is not None:
            self._set("shards", shard_range(self.shards))
            if self.mode == "games":
                raise ConfigError(
                    "games mode reads no shards",
                    found=f"shards {_shards_text(self.shards)}",
                    hint="Export the store and use mode='exact' or 'stream', or select games with where.",
                )
        if not (isinstance(self.streams, tuple) and len(self.streams) == 2):
            raise ConfigError(
                "streams cannot be used",
                found=repr(self.streams),
                expected="a pair of integers, such as (4, 4)",
            )
        self._set("streams", tuple(check_count("streams", count, 1) for count in self.streams))


def shard_range(value: object) -> tuple[int, int]:
    """Return a range of shards as (start, stop).

    Args:
        value: A pair (start, stop) of which stop is excluded; or text with the first and the last shard.

    Raises:
        ConfigError: The value is neither, or the range is empty.
    """
    bounds: tuple[Any, ...] = ()
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?\s*", value)
        bounds = () if match is None else (int(match[1]), int(match[2] or match[1]) + 1)
    elif isinstance(value, tuple | list) and len(value) == 2:
        bounds = tuple(as_int(bound) for bound in value)
    if len(bounds) != 2 or None in bounds or not 0 <= bounds[0] < bounds[1]:
        raise ConfigError(
            "shards cannot be used",
            found=repr(value)[:80],
            expected='the first and the last shard, such as "0-49", or a pair (start, stop), such as (0, 50)',
        )
    return bounds


def _shards_text(shards: object) -> str:
    """Return a checked range of shards as text, such as "0-49"."""
    start, stop = shard_range(shards)
    return f"{start}-{stop - 1}"
