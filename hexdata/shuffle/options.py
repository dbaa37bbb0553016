"""The options of a shuffle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hexdata.checks import check_fields, check_seed, describe_options
from hexdata.errors import BudgetError, ConfigError
from hexdata.selection import SelectionOptions

BASE_MEMORY: Final = 420_000_000
"""Measured bytes besides DuckDB's limit: interpreter, libraries, row groups that are read and written."""
MINIMUM_MEMORY: Final = BASE_MEMORY + 150_000_000
"""Bytes needed for DuckDB to sort with one thread."""
MAX_BUCKETS: Final = 100_000


@describe_options
@dataclass(frozen=True)
class ShuffleOptions(SelectionOptions):
    """How to shuffle, and which positions.

    Attributes:
        seed: Seed that determines the order; None for the seed of the present shuffle of the store, or 0 if
            there is none (default).
        buckets: Number of buckets of the largest split, 1 to 100,000; None to derive it from the number of
            positions (default).
        memory: Total memory in bytes (default: 1 GB). It does not affect the result.
        threads: Maximum number of threads, limited by the memory; None for one per core (default). It does
            not affect the result.
        replace: Whether to remove another shuffle of the store, and the shards and pickles made from it,
            before the new one is written, to save disk space. By default (False) another shuffle is
            replaced when the new one is complete, and what was made from it stays.

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The memory is too small for any shuffle.
    """

    seed: int | None = None
    buckets: int | None = None
    memory: int = 1_000_000_000
    threads: int | None = None
    replace: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is not None:
            object.__setattr__(self, "seed", check_seed(self.seed))
        check_fields(self, {"buckets": 1, "threads": 1, "memory": 0}, flags=("replace",))
        if self.buckets is not None and self.buckets > MAX_BUCKETS:
            raise ConfigError(f"buckets must be between 1 and {MAX_BUCKETS:,}", found=self.buckets)
        if self.memory < MINIMUM_MEMORY:
            raise BudgetError.of_memory(
                "too little memory for a shuffle",
                found=self.memory,
                expected=MINIMUM_MEMORY,
                hint="Raise --memory.",
            )
