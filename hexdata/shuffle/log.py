"""``STORE/logs/shuffle.log``: what a shuffle did, line by line, for people. No part of the dataset."""

from __future__ import annotations

import resource
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hexdata.units import format_bytes

__all__ = ["LOG_NAME", "Log", "peak_resident_bytes"]

LOG_NAME: Final = "logs/shuffle.log"
_RSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024
"""Bytes in which the system counts the peak of resident memory."""


def peak_resident_bytes() -> int:
    """Return the most memory in bytes that this process has held resident since it started."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


class Log:
    """Appends lines, each with the time; every run adds to what is there."""

    def __init__(self, store: Path) -> None:
        self._path = store / LOG_NAME
        self._path.parent.mkdir(exist_ok=True)

    def line(self, text: str) -> None:
        """Append a line."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{now}Z {text}\n")

    def work(self, name: str, rows: int, seconds: float, peak: int) -> None:
        """Append what a piece of work did: its rows, its rate, and the peak of its memory so far."""
        rate = rows / max(seconds, 1e-9)
        self.line(
            f"{name}: {rows:,} rows in {seconds:.2f} s, {rate:,.0f} rows/s, "
            f"{format_bytes(peak)} resident at most so far"
        )
