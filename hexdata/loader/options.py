"""What a loader can be asked for, checked once. Reads nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from hexdata.errors import ConfigError
from hexdata.loader.batch import BatchOptions

__all__ = ["Check", "LoaderOptions", "Mode", "OnError", "Remainder", "check_epoch"]

Mode = Literal["exact", "stream"]
Remainder = Literal["short", "drop", "pad"]
OnError = Literal["raise", "skip"]
Check = Literal["sizes", "digests"]


@dataclass(frozen=True)
class LoaderOptions:
    """Which positions come, in which order and to which rank: ``Loader`` documents its options.

    ``batch`` says what batches hold. ``streams`` (P, Q) and ``window`` are for ``mode="stream"`` alone.

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
            _check_int(name, getattr(self, name), least)
        if self.rank >= self.world_size:
            raise ConfigError("rank outside the world", found=self.rank, expected=f"below {self.world_size}")
        if not _is_int(self.seed):
            raise ConfigError("seed cannot be used", found=repr(self.seed), expected="an integer")
        choices = (("mode", Mode), ("remainder", Remainder), ("on_error", OnError), ("check", Check))
        for name, known in choices:
            if getattr(self, name) not in get_args(known):
                expected = " or ".join(map(repr, get_args(known)))
                raise ConfigError(f"unknown {name}", found=repr(getattr(self, name)), expected=expected)
        if self.where is not None and not (isinstance(self.where, str) and self.where.strip()):
            raise ConfigError("where cannot be used", found=repr(self.where), expected="an SQL predicate")
        if self.newest is not None:
            _check_int("newest", self.newest, 1)
        if not (isinstance(self.streams, tuple) and len(self.streams) == 2):
            raise ConfigError(
                "streams cannot be used", found=repr(self.streams), expected="a pair, as (4, 4)"
            )
        for count in self.streams:
            _check_int("streams", count, 1)

    @property
    def global_batch(self) -> int:
        """Positions a step over all ranks."""
        return self.batch_size * self.world_size


def check_epoch(epoch: int) -> None:
    """Refuse what is no epoch.

    Raises:
        ConfigError: it is not an integer from 0 on.
    """
    _check_int("epoch", epoch, 0)


def _check_int(name: str, value: object, least: int) -> None:
    if not _is_int(value) or value < least:  # type: ignore[operator]  # _is_int has seen to it
        raise ConfigError(f"{name} cannot be used", found=repr(value), expected=f"at least {least}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
