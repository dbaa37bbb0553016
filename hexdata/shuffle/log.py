"""``STORE/logs/shuffle.log``: what a shuffle did, line by line, for people. No part of the dataset."""

from __future__ import annotations

import resource
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hexdata.errors import StoreError
from hexdata.remote import AnyPath, scratch_folder
from hexdata.store.files import append_line, make_folder
from hexdata.units import format_bytes

__all__ = ["LOG_NAME", "Log", "peak_resident_bytes"]

LOG_NAME: Final = "logs/shuffle.log"
_RSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024
"""Bytes in which the system counts the peak of resident memory."""


_MOST: Final = 1 << 20
"""Bytes of earlier lines that stay in an object store."""


def _kept_here(store: AnyPath) -> Path:
    assert not isinstance(store, Path)
    return scratch_folder("work", store).with_suffix(".log")


def peak_resident_bytes() -> int:
    """Return the most memory in bytes that this process has held resident since it started."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


class Log:
    """Appends lines, each with the time; every run adds to what is there."""

    def __init__(self, store: AnyPath) -> None:
        """Begin to write into a store's log; that of an object store is kept here until ``publish``."""
        self._published = store / LOG_NAME
        self._path = self._published if isinstance(self._published, Path) else _kept_here(store)
        self._failed = False

    def line(self, text: str) -> None:
        """Append a line. A log that cannot be written stops nothing: the first failure is warned of."""
        if self._failed:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        try:
            make_folder(self._path.parent)
            append_line(self._path, f"{now}Z {text}\n".encode(errors="replace"), most=_MOST)
        except (OSError, StoreError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        warnings.warn(f"the log is not written, the shuffle goes on: {error}", stacklevel=3)

    def publish(self) -> None:
        """Put the lines of this machine into the store, if they are not there."""
        if self._path is self._published or self._failed:
            return
        try:
            append_line(self._published, self._path.read_bytes(), most=_MOST)
            self._path.unlink()
        except OSError as error:
            self._fail(error)

    def work(self, name: str, rows: int, seconds: float, peak: int) -> None:
        """Append what a piece of work did: its rows, its rate, and the peak of its memory so far."""
        rate = rows / max(seconds, 1e-9)
        self.line(
            f"{name}: {rows:,} rows in {seconds:.2f} s, {rate:,.0f} rows/s, "
            f"{format_bytes(peak)} resident at most so far"
        )
