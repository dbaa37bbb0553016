"""What ``verify`` may use, checked once. Does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hexdata.store.limits import QueryLimits

__all__ = ["VerifyOptions"]


@dataclass(frozen=True)
class VerifyOptions(QueryLimits):
    """What a verification may use: ``memory`` in bytes, and ``threads`` of DuckDB."""

    PURPOSE: ClassVar[str] = "to verify"
    BASE: ClassVar[int] = 270 << 20
    BUFFERS: ClassVar[int] = 64 << 20
    THREAD: ClassVar[int] = 40 << 20
    THREAD_BUFFERS: ClassVar[int] = 0
