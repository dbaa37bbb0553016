"""Logs ``STORE/logs/STAGE.log`` of the runs of a stage, for users. They are not part of the dataset."""

from __future__ import annotations

import warnings
from datetime import UTC, datetime
from typing import Final

from hexdata.errors import StoreError
from hexdata.storage import AnyPath, make_folder, storage_of
from hexdata.text import printable

__all__ = ["StageLog"]

_MAX_BYTES: Final = 1 << 20
"""Maximum bytes of earlier lines that are kept in an object store."""


class StageLog:
    """A log that appends lines with a time stamp, also to the lines of earlier runs."""

    def __init__(self, store: AnyPath, stage: str) -> None:
        """Open the log of a stage. The log of an object store is kept on this machine until ``publish``."""
        name = f"logs/{stage}.log"
        self._published = store / name
        self._path = storage_of(store).work_path(name, "work").with_suffix(".log")
        self._failed = False

    def line(self, *texts: str) -> None:
        """Append lines, with control characters escaped.

        If the log cannot be written, warn once and ignore later lines.
        """
        if self._failed or not texts:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        lines = "".join(f"{now}Z {printable(text)}\n" for text in texts)
        try:
            make_folder(self._path.parent)
            storage_of(self._path).append(lines.encode(), max_bytes=_MAX_BYTES)
        except (OSError, StoreError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        warnings.warn(f"the log cannot be written, the stage continues without it: {error}", stacklevel=3)

    def publish(self) -> None:
        """Append the lines kept on this machine to the log in the object store."""
        if self._path == self._published or self._failed:
            return
        try:
            storage_of(self._published).append(self._path.read_bytes(), max_bytes=_MAX_BYTES)
            self._path.unlink()
        except OSError as error:
            self._fail(error)
