"""The options of ``verify_store``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hexdata.store.limits import QueryLimits

__all__ = ["VerifyOptions"]


@dataclass(frozen=True)
class VerifyOptions(QueryLimits):
    """Limits of ``verify_store``.

    Attributes:
        memory: Memory limit in bytes. Default 1 GB. Data that does not fit is written to the system's
            temporary folder.
        threads: Number of DuckDB threads, and of files hashed at a time. Default None: one per core, as far
            as ``memory`` allows.

    Raises:
        ConfigError: A value is out of range.
        BudgetError: The memory is too small for the threads, or for one thread.
    """

    PURPOSE: ClassVar[str] = "to verify"
    BASE: ClassVar[int] = 270 << 20
    BUFFERS: ClassVar[int] = 64 << 20
    THREAD: ClassVar[int] = 40 << 20
    THREAD_BUFFERS: ClassVar[int] = 0
