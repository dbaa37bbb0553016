"""What ``convert`` can be asked for, and what it answers. Reads and writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar

from hexdata.checks import check_choice, check_fields, check_shares
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
        check_fields(self, {"workers": 1, "memory": 0})
        super().__post_init__()
        check_fields(self, flags=("salvage", "truncate_repeats"))
        rate: Any = self.max_reject_rate
        is_number = isinstance(rate, Real) and not isinstance(rate, bool)
        if not (is_number and 0 <= rate <= 1):
            raise ConfigError(
                "max_reject_rate cannot be used", found=repr(rate), expected="a number between 0 and 1"
            )
        check_choice("value_convention", self.value_convention, ("auto", *CONVENTIONS))
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
