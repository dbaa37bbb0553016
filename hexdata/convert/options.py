"""What ``convert`` can be asked for, and what it answers. Reads and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from hexdata.checks import check_shares
from hexdata.errors import ConfigError
from hexdata.games.convention import CONVENTIONS
from hexdata.pool import WorkerOptions

__all__ = ["ConvertOptions", "ConvertResult"]


@dataclass(frozen=True)
class ConvertOptions(WorkerOptions):
    """How to convert.

    Attributes:
        workers, memory: as ``WorkerOptions`` has them.
        max_reject_rate: publish nothing if a larger share of the records, or of the input's bytes (for
            files that cannot be read at all), is rejected.
        value_convention: what the values of sources mean whose games and layout do not show it, blue-is-0 or
            blue-is-1; with "auto", such a source is an error.
        val: share of games in the validation split.
        test: share of games in the test split.
        salvage: of a truncated or corrupt file, keep the whole examples before the damage.
        truncate_repeats: cut games before the first move on an occupied cell, as the old tool did.

    Raises:
        ConfigError: on a value out of range.
    """

    WORKER_MEMORY: ClassVar[int] = 400 << 20

    max_reject_rate: float = 0.01
    value_convention: str = "auto"
    val: float = 0.05
    test: float = 0.01
    salvage: bool = False
    truncate_repeats: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.max_reject_rate <= 1:
            raise ConfigError("max_reject_rate must be between 0 and 1", found=self.max_reject_rate)
        if self.value_convention not in ("auto", *CONVENTIONS):
            raise ConfigError(
                "unknown value_convention",
                found=self.value_convention,
                expected=" or ".join(("auto", *CONVENTIONS)),
            )
        check_shares(self.val, self.test)


@dataclass(frozen=True)
class ConvertResult:
    """What a run of ``convert_sources`` did; counts are of this run's sources."""

    sources: int
    skipped: int
    records: int
    positions: int
    rejected: int
    games: int
    duplicate_games: int
    reasons: dict[str, int]
    failed_files: dict[str, str]
    flags: dict[str, int] = field(default_factory=dict)
    """Games by the code of what is suspicious about them."""
    notes: list[str] = field(default_factory=list)
