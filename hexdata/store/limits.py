"""How much memory and how many threads a session of DuckDB is given out of a budget. Opens none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from hexdata.checks import check_fields
from hexdata.errors import BudgetError
from hexdata.pool import default_workers
from hexdata.remote import AnyPath, client_memory

__all__ = ["QueryLimits", "Share"]


class Share(NamedTuple):
    """What one session of DuckDB is given: bytes for its buffers, and threads."""

    memory: int
    threads: int


@dataclass(frozen=True)
class QueryLimits:
    """What the queries of one command may use.

    Attributes:
        memory: bytes for everything together. What does not fit is spilled to the system's temporary
            folder (``TMPDIR``), never into the store, which may be read-only.
        threads: of DuckDB; None for one a core, as far as ``memory`` allows.

    Raises:
        ConfigError: on a value out of range.
        BudgetError: the memory is too small for so many threads, or for one.
    """

    PURPOSE: ClassVar[str] = "for queries"
    BASE: ClassVar[int]
    """Bytes held besides DuckDB's buffers: interpreter, libraries, Arrow batches, as measured."""
    BUFFERS: ClassVar[int]
    """Bytes of buffers that are needed for any number of threads."""
    THREAD: ClassVar[int]
    """Bytes that a thread of DuckDB holds besides, reading Parquet."""
    THREAD_BUFFERS: ClassVar[int]
    """Bytes of buffers that a thread needs."""
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic, not a field

    memory: int = 1_000_000_000
    threads: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, {"threads": 1, "memory": 0})
        self._require_room(self.BASE)

    def _require_room(self, base: int) -> None:
        threads = 1 if self.threads is None else self.threads
        least = base + self.BUFFERS + threads * (self.THREAD + self.THREAD_BUFFERS)
        if self.memory < least:
            raise BudgetError.of_memory(
                f"too little memory {self.PURPOSE} with {threads} thread{'s' if threads > 1 else ''}",
                found=self.memory,
                expected=least,
                hint="Raise --memory, or lower --threads.",
            )

    def share(self, place: AnyPath) -> Share:
        """Return what a session may have that reads a store there; the client of an object store needs some.

        Raises:
            BudgetError: there is no room for that.
        """
        base = self.BASE + client_memory(place)
        self._require_room(base)
        room = (self.memory - base - self.BUFFERS) // (self.THREAD + self.THREAD_BUFFERS)
        threads = self.threads or min(default_workers(), room)
        return Share(self.memory - base - threads * self.THREAD, threads)
