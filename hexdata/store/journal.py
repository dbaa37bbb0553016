"""The journal ``STORE/logs/stages.jsonl``: one line of JSON for each finished run of a stage.

The journal is not part of the dataset. It is separate from the manifest, which contains no clock times. A
journal that is damaged or cannot be written never stops a stage or a reader.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Annotated, Any, Final, Self

from hexdata import __version__
from hexdata.errors import StoreError
from hexdata.pool import resident_bytes
from hexdata.storage import AnyPath, storage_of
from hexdata.strict_json import Count, Within, load_json

__all__ = ["JOURNAL_NAME", "JournalEntry", "StageRun", "journaled", "read_journal"]

JOURNAL_NAME: Final = "logs/stages.jsonl"
_SAMPLE_SECONDS: Final = 0.25
"""Seconds between two memory measurements."""
_MAX_LINE_BYTES: Final = 1 << 12
"""Maximum bytes of a valid line."""
_READ_BYTES: Final = 1 << 20
"""Number of bytes read from the end of the journal: some thousand runs."""


@dataclass(frozen=True)
class JournalEntry:
    """One finished run of a stage.

    Attributes:
        stage: "convert", "shuffle", "export", "pickles-original" or "pickles-shuffled".
        finished: End time in UTC, such as "2026-01-31T12:00:00Z".
        seconds: Time from taking the lock to publishing the manifest.
        positions: Number of positions in the result.
        bytes: Size of the files of the result.
        peak_bytes: Highest resident memory of this process and its children together, measured four times a
            second.
        resumed: Whether the run continued an interrupted one and so did only part of the work.
        version: Version of hexdata.
    """

    stage: str
    finished: str
    seconds: Annotated[float, Within(0, 1 << 62)]
    positions: Count
    bytes: Count
    peak_bytes: Count
    resumed: bool
    version: str


class StageRun:
    """A run of a stage in progress. It is recorded only if ``finish`` is called."""

    def __init__(self, store: AnyPath, stage: str) -> None:
        self._path = store / JOURNAL_NAME
        self._stage = stage
        self._begin = time.perf_counter()
        self._facts: dict[str, Any] | None = None

    def finish(self, *, positions: int, bytes: int, resumed: bool = False) -> None:  # noqa: A002
        """Set the result of the stage, after the manifest has been published.

        Args:
            positions: Number of positions in the result.
            bytes: Size of the files of the result.
            resumed: Whether the run continued an interrupted one (default: False).
        """
        self._facts = {"positions": positions, "bytes": bytes, "resumed": resumed}

    def record(self, peak_bytes: int) -> None:
        """Append the line to the journal if the run has finished; warn if it cannot be written."""
        if self._facts is None:
            return
        entry = JournalEntry(
            stage=self._stage,
            finished=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            seconds=round(time.perf_counter() - self._begin, 3),
            peak_bytes=peak_bytes,
            version=__version__,
            **self._facts,
        )
        line = json.dumps(asdict(entry)).encode() + b"\n"
        try:
            storage_of(self._path).append(line, max_bytes=_READ_BYTES)
        except (OSError, StoreError) as error:
            warnings.warn(
                f"the stage is complete, but its line in the journal was not written: {error}", stacklevel=4
            )


@contextmanager
def journaled(store: AnyPath, stage: str) -> Iterator[StageRun]:
    """Measure a run of a stage and append it to the journal if it finishes.

    Args:
        store: Folder or address of the store, which this process has locked.
        stage: Name of the stage in the manifest.
    """
    run = StageRun(store, stage)
    with _MemorySampler() as memory:
        yield run
    run.record(memory.peak)


def read_journal(store: AnyPath) -> list[JournalEntry]:
    """Return the runs in the journal, oldest first; an empty list if there is no journal.

    Lines that are damaged or were written by a release with other fields are skipped. Of a very large
    journal, only the last part is read.
    """
    try:
        with storage_of(store / JOURNAL_NAME).open() as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _READ_BYTES, 0))
            content = file.read(_READ_BYTES)
    except OSError:
        return []
    found = [_parse_entry(line) for line in content.splitlines()]
    return [entry for entry in found if entry is not None]


def _parse_entry(line: bytes) -> JournalEntry | None:
    try:
        return load_json(JournalEntry, line, JOURNAL_NAME, max_bytes=_MAX_LINE_BYTES)
    except StoreError:
        return None


class _MemorySampler:
    """Measures the peak resident memory of this process and its children in a background thread."""

    def __init__(self) -> None:
        self.peak = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="hexdata-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, resident_bytes())
            if self._stopped.wait(_SAMPLE_SECONDS):
                self.peak = max(self.peak, resident_bytes())
                return
