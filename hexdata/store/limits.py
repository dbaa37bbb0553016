"""Memory and thread limits of DuckDB sessions, computed from a memory budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from hexdata.checks import check_fields
from hexdata.errors import BudgetError
from hexdata.pool import default_workers
from hexdata.storage import AnyPath, client_memory

__all__ = ["QueryLimits", "SessionLimits"]


class SessionLimits(NamedTuple):
    """The limits of one DuckDB session: bytes for its buffers, and number of threads."""

    memory: int
    threads: int


@dataclass(frozen=True)
class QueryLimits:
    """Limits for the queries of one command.

    Attributes:
        memory: Total memory in bytes (default: 1 GB). Data that does not fit is spilled to the system's
            temporary folder (``TMPDIR``), never into the store, which may be read-only.
        threads: Number of DuckDB threads; None for one per core, as far as ``memory`` allows (default).

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The memory is too small for this number of threads, or for one thread.
    """

    PURPOSE: ClassVar[str] = "for queries"
    BASE: ClassVar[int]
    """Measured memory in bytes outside DuckDB's buffers: interpreter, libraries and Arrow batches."""
    BUFFERS: ClassVar[int]
    """Buffer bytes needed regardless of the number of threads."""
    THREAD: ClassVar[int]
    """Memory in bytes that each DuckDB thread uses outside the buffers to read Parquet."""
    THREAD_BUFFERS: ClassVar[int]
    """Buffer bytes needed per thread."""
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, not a field

    memory: int = 1_000_000_000
    threads: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, {"threads": 1, "memory": 0})
        self._require_memory(self.BASE)

    def _require_memory(self, base: int) -> None:
        threads = 1 if self.threads is None else self.threads
        least = base + self.BUFFERS + threads * (self.THREAD + self.THREAD_BUFFERS)
        if self.memory < least:
            raise BudgetError.of_memory(
                f"too little memory {self.PURPOSE} with {threads} thread{'s' if threads > 1 else ''}",
                found=self.memory,
                expected=least,
                hint="Raise --memory, or lower --threads." if threads > 1 else "Raise --memory.",
            )

    def session(self, store: AnyPath) -> SessionLimits:
        """Return the limits of a session that reads the store at ``store``.

        If the store is in an object store, memory for its client is subtracted.

        Raises:
            BudgetError: The memory is too small.
        """
        base = self.BASE + client_memory(store)
        self._require_memory(base)
        max_threads = (self.memory - base - self.BUFFERS) // (self.THREAD + self.THREAD_BUFFERS)
        threads = self.threads or min(default_workers(), max_threads)
        return SessionLimits(self.memory - base - threads * self.THREAD, threads)
