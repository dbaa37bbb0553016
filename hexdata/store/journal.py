"""``STORE/logs/stages.jsonl``: what each finished stage took, a line of JSON a run. No part of the dataset.

It stands outside the manifest, which holds no clock reading. A journal that cannot be written, or is damaged,
never stops a stage and never fails a reader.
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
from hexdata.remote import AnyPath, open_binary
from hexdata.store.files import append_line
from hexdata.strict_json import Count, Within, load_json

__all__ = ["JOURNAL_NAME", "Entry", "StageRun", "journaled", "read_journal"]

JOURNAL_NAME: Final = "logs/stages.jsonl"
_EVERY: Final = 0.25
"""Seconds between two looks at the memory."""
_LONGEST_LINE: Final = 1 << 12
"""Bytes of a line that could be ours."""
_READ: Final = 1 << 20
"""Bytes at the journal's end that are read: some thousand runs."""


@dataclass(frozen=True)
class Entry:
    """One finished run of a stage.

    Attributes:
        stage: "convert", "shuffle", "export", "pickles-original" or "pickles-shuffled".
        finished: when, UTC, such as "2026-01-31T12:00:00Z".
        seconds: from the lock to the manifest.
        positions: in what it made.
        bytes: of the files that it made.
        peak_bytes: resident memory of this process and its children together, the most that was seen,
            looking four times a second.
        resumed: whether it went on where an interrupted run had stopped, so that it did less than it made.
        version: of hexdata.
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
    """One run of a stage that is watched; it is recorded if ``finish`` was called."""

    def __init__(self, store: AnyPath, stage: str) -> None:
        self._path = store / JOURNAL_NAME
        self._stage = stage
        self._begin = time.perf_counter()
        self._facts: dict[str, Any] | None = None

    def finish(self, *, positions: int, bytes: int, resumed: bool = False) -> None:  # noqa: A002
        """Say what the stage made, now that it stands in the manifest."""
        self._facts = {"positions": positions, "bytes": bytes, "resumed": resumed}

    def record(self, peak_bytes: int) -> None:
        """Append the line, if there is one to write and a place to write it."""
        if self._facts is None:
            return
        entry = Entry(
            stage=self._stage,
            finished=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            seconds=round(time.perf_counter() - self._begin, 3),
            peak_bytes=peak_bytes,
            version=__version__,
            **self._facts,
        )
        line = json.dumps(asdict(entry)).encode() + b"\n"
        try:
            append_line(self._path, line, most=_READ)
        except (OSError, StoreError) as error:
            warnings.warn(f"the journal was not written, the stage is complete: {error}", stacklevel=4)


@contextmanager
def journaled(store: AnyPath, stage: str) -> Iterator[StageRun]:
    """Watch a run of a stage, and append a line once it has finished.

    Args:
        store: the store's folder, which this process has locked.
        stage: its name in the manifest.
    """
    run = StageRun(store, stage)
    with _Memory() as memory:
        yield run
    run.record(memory.peak)


def read_journal(store: AnyPath) -> list[Entry]:
    """Return the runs that the journal tells of, the oldest first; none if there is no journal.

    A line that is damaged, or of another release with other entries, is left out. Of a journal beyond all
    measure, only the end is read.
    """
    try:
        with open_binary(store / JOURNAL_NAME) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _READ, 0))
            content = file.read(_READ)
    except OSError:
        return []
    found = [_entry(line) for line in content.splitlines()]
    return [entry for entry in found if entry is not None]


def _entry(line: bytes) -> Entry | None:
    try:
        return load_json(Entry, line, JOURNAL_NAME, max_bytes=_LONGEST_LINE)
    except StoreError:
        return None


class _Memory:
    """Looks at the resident memory of this process and its children, in a thread of its own."""

    def __init__(self) -> None:
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hexdata-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, resident_bytes())
            if self._ended.wait(_EVERY):
                self.peak = max(self.peak, resident_bytes())
                return
