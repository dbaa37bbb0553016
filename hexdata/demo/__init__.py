"""Legacy files out of thin air: legal games, written in every layout that the legacy pipeline had."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hexdata.errors import ConfigError
from hexdata.progress import SILENT, Progress

__all__ = ["DemoOptions"]


@dataclass(frozen=True)
class DemoOptions:
    """What to make.

    Attributes:
        games: how many.
        seed: names them; the first n games of a seed are the same for every ``games`` ≥ n.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, not a field

    games: int = 1_500
    seed: int = 7

    def __post_init__(self) -> None:
        if self.games < 1:
            raise ConfigError("games must be at least 1", found=self.games)
