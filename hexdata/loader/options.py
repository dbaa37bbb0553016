"""What a loader can be asked for, checked once. Reads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hexdata.errors import ConfigError

__all__ = ["DEFAULT_FIELDS", "FIELDS", "LoaderOptions", "Remainder"]

Remainder = Literal["short", "drop"]

DEFAULT_FIELDS: Final = ("board", "policy", "value")
FIELDS: Final = (
    *DEFAULT_FIELDS,
    "position_id",
    "game_id",
    "move",
    "player_to_move",
    "value_sample_tier",
    "position_in_game",
    "total_positions",
)


@dataclass(frozen=True)
class LoaderOptions:
    """The options of ``Loader``, which documents them.

    Raises:
        ConfigError: if one has no meaning.
    """

    split: str
    batch_size: int
    seed: int
    shuffle: bool
    window_shards: int
    rank: int
    world_size: int
    remainder: Remainder
    fields: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("window_shards", 1), ("world_size", 1), ("rank", 0)):
            value = getattr(self, name)
            if not _is_int(value) or value < least:
                raise ConfigError(f"{name} cannot be used", found=repr(value), expected=f"at least {least}")
        if self.rank >= self.world_size:
            raise ConfigError("rank outside the world", found=self.rank, expected=f"below {self.world_size}")
        if not _is_int(self.seed):
            raise ConfigError("seed cannot be used", found=repr(self.seed), expected="an integer")
        if self.remainder not in ("short", "drop"):
            raise ConfigError("unknown remainder", found=repr(self.remainder), expected="'short' or 'drop'")
        unknown = [name for name in self.fields if name not in FIELDS]
        if unknown or not self.fields:
            raise ConfigError("unknown fields", found=unknown, expected=f"some of {', '.join(FIELDS)}")

    @property
    def global_batch(self) -> int:
        """Positions a step over all ranks."""
        return self.batch_size * self.world_size


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
