"""What a shuffle will do, computed before anything is written: buckets, slices, limits. Does no work."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from hexdata.errors import BudgetError, ConfigError
from hexdata.order import ORDER_VERSION, bucket_bounds, derive_key
from hexdata.pool import default_workers
from hexdata.schema import board_bytes

__all__ = ["Bucket", "ShuffleOptions", "ShufflePlan", "Slice", "make_plan"]

BASE_MEMORY: Final = 260 << 20
"""Bytes held besides DuckDB's buffers and the rows at hand: interpreter, libraries, Arrow batches."""
MINIMUM_MEMORY: Final = 400 << 20
ROW_OVERHEAD: Final = 110
"""Bytes a row takes in DuckDB's sort besides its board, as measured on thirteen columns."""
SORT_SHARE: Final = 0.5
"""Part of DuckDB's memory that the rows of one bucket may fill, so that its sort stays in memory."""


@dataclass(frozen=True)
class ShuffleOptions:
    """How to shuffle.

    Attributes:
        seed: names the order.
        buckets: for the largest split; None to follow from the memory. The order does not depend on it.
        memory: bytes for everything together.
        threads: of DuckDB; None for one a core.

    Raises:
        ConfigError: on a value out of range.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, not a field

    seed: int = 0
    buckets: int | None = None
    memory: int = 1_000_000_000
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.buckets is not None and not 1 <= self.buckets <= 100_000:
            raise ConfigError("buckets must be between 1 and 100,000", found=self.buckets)
        if self.threads is not None and self.threads < 1:
            raise ConfigError("threads must be at least 1", found=self.threads)
        if self.memory < MINIMUM_MEMORY:
            raise BudgetError(
                "too little memory for a shuffle",
                found=f"{self.memory / 1e6:,.0f} MB",
                expected=f"at least {MINIMUM_MEMORY / 1e6:,.0f} MB",
                cure="Raise --memory.",
            )


@dataclass(frozen=True)
class Slice:
    """Phase 1's unit: a range of position ids, sorted by key into one run."""

    index: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """File name of its run."""
        return f"run-{self.index:06d}.parquet"


@dataclass(frozen=True)
class Bucket:
    """Phase 2's unit: a range of the key space of one split, [low, high)."""

    split: str
    index: int
    low: int
    high: int

    @property
    def name(self) -> str:
        """Path of its file, relative to the store."""
        return f"shuffled/{self.split}/bucket-{self.index:06d}.parquet"


@dataclass(frozen=True)
class ShufflePlan:
    """All that decides the files of a shuffle, and the limits it runs under."""

    seed: int
    key: int
    board_size: int
    rows: dict[str, int]
    slices: list[Slice]
    buckets: list[Bucket]
    duckdb_memory: int
    threads: int

    def identity(self) -> dict[str, Any]:
        """Return what decides the bytes of the files, as JSON: the limits do not."""
        return {
            "order_version": ORDER_VERSION,
            "rows": self.rows,
            "seed": self.seed,
            "slices": [asdict(s) for s in self.slices],
            "buckets": [asdict(b) for b in self.buckets],
        }


def make_plan(options: ShuffleOptions, board_size: int, rows: dict[str, int]) -> ShufflePlan:
    """Plan a shuffle of so many rows a split.

    A bucket holds as many rows as DuckDB can sort in its part of the memory; smaller splits get fewer
    buckets, in proportion. A slice of the input is as large as a bucket.
    """
    duckdb_memory = options.memory - BASE_MEMORY
    fitting = int(duckdb_memory * SORT_SHARE) // (board_bytes(board_size) + ROW_OVERHEAD)
    largest = max(rows.values(), default=0)
    per_bucket = -(-largest // options.buckets) if options.buckets else fitting
    key = derive_key(options.seed, "shuffle")
    total = sum(rows.values())
    return ShufflePlan(
        seed=options.seed,
        key=key,
        board_size=board_size,
        rows=rows,
        slices=[
            Slice(index, start, min(start + fitting, total))
            for index, start in enumerate(range(0, total, fitting))
        ],
        buckets=[
            bucket
            for split, count in rows.items()
            for bucket in _buckets(split, -(-count // max(per_bucket, 1)))
        ],
        duckdb_memory=duckdb_memory,
        threads=options.threads or default_workers(),
    )


def _buckets(split: str, count: int) -> list[Bucket]:
    bounds = bucket_bounds(count) if count else []
    return [Bucket(split, i, low, high) for i, (low, high) in enumerate(pairwise(bounds))]
