"""What a shuffle is asked for, checked once. Reads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hexdata.checks import check_fields, check_seed
from hexdata.errors import BudgetError, ConfigError
from hexdata.selection import SelectionOptions

__all__ = ["MINIMUM_MEMORY", "ShuffleOptions", "too_little_memory"]

MINIMUM_MEMORY: Final = 450_000_000
"""Bytes that are enough for one thread: of boards up to 13 by 13, with 60 bytes of lists and texts a row."""
MOST_BUCKETS: Final = 100_000


def too_little_memory(found: int, expected: int) -> BudgetError:
    """Return the error for a budget of ``found`` bytes where ``expected`` are needed."""
    return BudgetError.of_memory(
        "too little memory for a shuffle", found=found, expected=expected, hint="Raise --memory."
    )


@dataclass(frozen=True)
class ShuffleOptions(SelectionOptions):
    """How to shuffle, and, of ``SelectionOptions``, what.

    Attributes:
        seed: names the order.
        buckets: for the largest split; None to follow from the number of positions.
        memory: bytes for everything together. It decides no byte of the result.
        threads: at most as many as the memory has room for; None for one a core. Nor do they.

    Raises:
        ConfigError: on a value out of range.
        BudgetError: the memory is too small for any shuffle.
    """

    seed: int = 0
    buckets: int | None = None
    memory: int = 1_000_000_000
    threads: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seed", check_seed(self.seed))
        check_fields(self, {"buckets": 1, "threads": 1, "memory": 0})
        if self.buckets is not None and self.buckets > MOST_BUCKETS:
            raise ConfigError(f"buckets must be between 1 and {MOST_BUCKETS:,}", found=self.buckets)
        if self.memory < MINIMUM_MEMORY:
            raise too_little_memory(self.memory, MINIMUM_MEMORY)
