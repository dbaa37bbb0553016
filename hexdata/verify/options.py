"""What ``verify`` may use, checked once. Does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hexdata.errors import BudgetError, ConfigError
from hexdata.pool import default_workers

__all__ = ["VerifyOptions"]

BASE_MEMORY: Final = 270 << 20
"""Bytes held besides DuckDB's buffers: interpreter, libraries, Arrow batches, as measured."""
THREAD_MEMORY: Final = 40 << 20
"""Bytes that a thread of DuckDB holds besides, reading Parquet."""
LEAST_DUCKDB_MEMORY: Final = 64 << 20


@dataclass(frozen=True)
class VerifyOptions:
    """What a verification may use.

    Attributes:
        memory: bytes for everything together. What does not fit is spilled to the system's temporary
            folder (``TMPDIR``), never into the store, which may be read-only.
        threads: of DuckDB; None for one a core, as far as ``memory`` allows.

    Raises:
        ConfigError: on a value out of range.
        BudgetError: the memory is too small for so many threads, or for one.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, not a field

    memory: int = 1_000_000_000
    threads: int | None = None

    def __post_init__(self) -> None:
        threads = 1 if self.threads is None else self.threads
        if threads < 1:
            raise ConfigError("threads must be at least 1", found=self.threads)
        least = BASE_MEMORY + threads * THREAD_MEMORY + LEAST_DUCKDB_MEMORY
        if self.memory < least:
            raise BudgetError(
                f"too little memory to verify with {threads} thread{'s' if threads > 1 else ''}",
                found=f"{self.memory / 1e6:,.0f} MB",
                expected=f"at least {least / 1e6:,.0f} MB",
                cure="Raise --memory, or lower --threads.",
            )

    @property
    def duckdb_threads(self) -> int:
        """Threads of DuckDB."""
        room = (self.memory - BASE_MEMORY - LEAST_DUCKDB_MEMORY) // THREAD_MEMORY
        return self.threads or max(1, min(default_workers(), room))

    @property
    def duckdb_memory(self) -> int:
        """Bytes for DuckDB's buffers."""
        return self.memory - BASE_MEMORY - self.duckdb_threads * THREAD_MEMORY
