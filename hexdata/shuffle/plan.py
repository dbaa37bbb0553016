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

BASE_MEMORY: Final = 280 << 20
"""Bytes held besides DuckDB's buffers and the rows at hand: interpreter and libraries."""
MINIMUM_MEMORY: Final = 400 << 20
IN_FLIGHT_ROWS: Final = 6 << 16
"""Rows between DuckDB and the disk, as Arrow batches and row groups; each thread needs as many again."""
ROW_OVERHEAD: Final = 110
"""Bytes a row takes in DuckDB's sort besides its board, as measured on thirteen columns."""
SORT_SHARE: Final = 0.5
"""Part of DuckDB's memory that the rows of one sort may fill, so that it stays in memory."""


def too_little_memory(found: int, expected: int) -> BudgetError:
    """Return the error for a budget of ``found`` bytes where ``expected`` are needed."""
    return BudgetError(
        "too little memory for a shuffle",
        found=f"{found / 1e6:,.0f} MB",
        expected=f"at least {expected / 1e6:,.0f} MB",
        cure="Raise --memory.",
    )


@dataclass(frozen=True)
class ShuffleOptions:
    """How to shuffle.

    Attributes:
        seed: names the order.
        buckets: for the largest split; None to follow from the memory. The order does not depend on it.
        memory: bytes for everything together.
        threads: of DuckDB, at most as many as the memory has room for; None for one a core.

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
            raise too_little_memory(self.memory, MINIMUM_MEMORY)


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
    sort_rows: int
    """Rows that DuckDB sorts at a time."""
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

    def ranges(self, split: str) -> list[tuple[int, int]]:
        """Cut the keys of a split into ranges, each [low, high) with few enough rows to sort at a time."""
        return list(pairwise(bucket_bounds(-(-self.rows[split] // self.sort_rows))))


def make_plan(
    options: ShuffleOptions, board_size: int, rows: dict[str, int], varying_bytes: int = 0
) -> ShufflePlan:
    """Plan a shuffle.

    A slice of the input holds as many rows as DuckDB can sort in its part of the memory, and so does a
    bucket unless their number is given; smaller splits get fewer buckets, in proportion.

    Args:
        options: what was asked for.
        board_size: n.
        rows: positions by split; at least one.
        varying_bytes: what the columns of varying length hold, all rows together.

    Raises:
        BudgetError: rows so wide do not fit into the memory.
    """
    total, largest = sum(rows.values()), max(rows.values())
    row_bytes = board_bytes(board_size) + ROW_OVERHEAD + -(-varying_bytes // total)
    in_flight = IN_FLIGHT_ROWS * row_bytes
    duckdb_memory = options.memory - BASE_MEMORY - in_flight
    if duckdb_memory < in_flight:
        raise too_little_memory(options.memory, BASE_MEMORY + 2 * in_flight)
    sort_rows = int(duckdb_memory * SORT_SHARE) // row_bytes
    buckets = options.buckets or -(-largest // sort_rows)
    return ShufflePlan(
        seed=options.seed,
        key=derive_key(options.seed, "shuffle"),
        board_size=board_size,
        rows=rows,
        slices=[
            Slice(index, start, min(start + sort_rows, total))
            for index, start in enumerate(range(0, total, sort_rows))
        ],
        buckets=[
            Bucket(split, index, low, high)
            for split, count in rows.items()
            for index, (low, high) in enumerate(pairwise(bucket_bounds(-(-count * buckets // largest))))
        ],
        sort_rows=sort_rows,
        duckdb_memory=duckdb_memory,
        threads=min(options.threads or default_workers(), duckdb_memory // in_flight),
    )
