"""The log ``STORE/logs/shuffle.log`` of all shuffles, for users. It is not part of the dataset."""

from __future__ import annotations

import warnings
from datetime import UTC, datetime
from typing import Final

from hexdata.errors import StoreError
from hexdata.storage import AnyPath, make_folder, storage_of
from hexdata.units import format_bytes

__all__ = ["LOG_NAME", "Log"]

LOG_NAME: Final = "logs/shuffle.log"
_MAX_BYTES: Final = 1 << 20
"""Maximum bytes of earlier lines that are kept in an object store."""


class Log:
    """A log that appends lines with a time stamp, also to the lines of earlier runs."""

    def __init__(self, store: AnyPath) -> None:
        """Open the log of a store. The log of an object store is kept on this machine until ``publish``."""
        self._published = store / LOG_NAME
        self._path = storage_of(store).work_path(LOG_NAME, "work").with_suffix(".log")
        self._failed = False

    def line(self, text: str) -> None:
        """Append a line. If the log cannot be written, warn once and ignore later lines."""
        if self._failed:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        try:
            make_folder(self._path.parent)
            storage_of(self._path).append(f"{now}Z {text}\n".encode(errors="replace"), max_bytes=_MAX_BYTES)
        except (OSError, StoreError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        warnings.warn(f"the log cannot be written, the shuffle continues without it: {error}", stacklevel=3)

    def publish(self) -> None:
        """Append the lines kept on this machine to the log in the object store."""
        if self._path == self._published or self._failed:
            return
        try:
            storage_of(self._published).append(self._path.read_bytes(), max_bytes=_MAX_BYTES)
            self._path.unlink()
        except OSError as error:
            self._fail(error)

    def work(self, name: str, rows: int, seconds: float, peak: int) -> None:
        """Append a line about finished work.

        Args:
            name: Name of the slice or bucket.
            rows: Number of rows.
            seconds: Duration.
            peak: Peak resident memory so far, in bytes.
        """
        rate = rows / max(seconds, 1e-9)
        self.line(
            f"{name}: {rows:,} rows in {seconds:.2f} s, {rate:,.0f} rows/s, "
            f"{format_bytes(peak)} peak resident memory"
        )
