"""What a loader can be asked for, checked once. Reads nothing."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hexdata.errors import ConfigError
from hexdata.loader.batch import BatchOptions

__all__ = ["Check", "LoaderOptions", "Mode", "OnError", "Remainder", "as_int", "as_tuple", "check_count"]

Mode = Literal["exact", "stream"]
Remainder = Literal["short", "drop", "pad"]
OnError = Literal["raise", "skip"]
Check = Literal["sizes", "digests"]


@dataclass(frozen=True)
class LoaderOptions:
    """Which positions come, in which order and to which rank: ``Loader`` documents its options.

    ``batch`` says what batches hold. ``streams`` (P, Q) and ``window`` are for ``mode="stream"`` alone.
    Integers may be NumPy's; they are kept as Python's, as a state is to be JSON.

    Raises:
        ConfigError: if one has no meaning.
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
    newest: int | None = None
    streams: tuple[int, int] = (4, 4)
    window: int = 262_144
    batch: BatchOptions = field(default_factory=BatchOptions)

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("world_size", 1), ("rank", 0), ("window", 1)):
            self._keep(name, check_count(name, getattr(self, name), least))
        if self.rank >= self.world_size:
            raise ConfigError("rank outside the world", found=self.rank, expected=f"below {self.world_size}")
        seed = as_int(self.seed)
        if seed is None:
            raise ConfigError("seed cannot be used", found=repr(self.seed), expected="an integer")
        self._keep("seed", seed)
        if not isinstance(self.shuffle, bool):
            raise ConfigError("shuffle cannot be used", found=repr(self.shuffle), expected="True or False")
        choices = (("mode", Mode), ("remainder", Remainder), ("on_error", OnError), ("check", Check))
        for name, known in choices:
            if getattr(self, name) not in get_args(known):
                expected = " or ".join(map(repr, get_args(known)))
                raise ConfigError(f"unknown {name}", found=repr(getattr(self, name)), expected=expected)
        if self.where is not None and not (isinstance(self.where, str) and self.where.strip()):
            raise ConfigError("where cannot be used", found=repr(self.where), expected="an SQL predicate")
        if self.newest is not None:
            self._keep("newest", check_count("newest", self.newest, 1))
        if not (isinstance(self.streams, tuple) and len(self.streams) == 2):
            raise ConfigError(
                "streams cannot be used", found=repr(self.streams), expected="a pair, as (4, 4)"
            )
        self._keep("streams", tuple(check_count("streams", count, 1) for count in self.streams))

    def _keep(self, name: str, value: object) -> None:
        """Set a field while the options are being made, which are frozen from then on."""
        object.__setattr__(self, name, value)

    @property
    def global_batch(self) -> int:
        """Positions a step over all ranks."""
        return self.batch_size * self.world_size


def check_count(name: str, value: Any, least: int) -> int:
    """Return a number as Python's int: any integer will do, NumPy's too, but no bool.

    Raises:
        ConfigError: it is no integer, or below ``least``.
    """
    count = as_int(value)
    if count is None or count < least:
        expected = f"an integer, at least {least}"
        raise ConfigError(f"{name} cannot be used", found=repr(value), expected=expected)
    return count


def as_tuple(value: Any) -> Any:
    """Return a list or an array as a tuple, as options keep them, and anything else as it is."""
    return (
        value if value is None or isinstance(value, str) or not hasattr(value, "__iter__") else tuple(value)
    )


def as_int(value: Any) -> int | None:
    """Return an integer as Python's; None for bools and whatever is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
