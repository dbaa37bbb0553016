"""The journal ``STORE/logs/stages.jsonl``: one line of JSON for each finished run of a stage.

The journal is not part of the dataset. The manifest cannot contain it: equal inputs give equal manifests, and
a run takes another time each time. Nor can a ledger, which is removed with the other files of its run. A
journal that is damaged or cannot be written never stops a stage or a reader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from hexdata import __version__
from hexdata.errors import StoreError
from hexdata.json_models import Count, Model, as_model, read_json
from hexdata.storage import AnyPath, storage_of
from hexdata.store.files import may_be_missing, write_bytes

JOURNAL_NAME: Final = "logs/stages.jsonl"
_Text = Annotated[str, Meta(max_length=64)]
_READ_BYTES: Final = 1 << 20
"""Maximum size of a journal before a line is added: some thousand runs."""


class JournalEntry(Model, frozen=True):
    """One finished run of a stage.

    Attributes:
        stage: "convert", "shuffle", "export", "pickles-original" or "pickles-shuffled".
        finished: End time in UTC, such as "2026-01-31T12:00:00Z".
        seconds: Time from taking the lock to publishing the manifest.
        positions: Number of positions in the result.
        bytes: Size of the files of the result.
        resumed: Whether the run continued an interrupted one and so did only part of the work.
        version: Version of hexdata.
    """

    stage: _Text
    finished: _Text
    seconds: Annotated[float, Meta(ge=0, le=1 << 62)]
    positions: Count
    bytes: Count
    resumed: bool
    version: _Text


@contextmanager
def journaled(store: AnyPath, stage: str) -> Iterator[Callable[..., None]]:
    """Measure a run of a stage and append it to the journal, if the run gives its result and does not raise.

    Args:
        store: Folder or address of the store, which this process has locked.
        stage: Name of the stage in the manifest.

    Yields:
        A function to call with ``positions``, ``bytes`` and ``resumed`` when the manifest is published.
    """
    result: dict[str, Any] = {}
    begin = time.perf_counter()
    yield result.update
    # ``finish`` was not called: the result existed already.
    if not result:
        return
    finished = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    seconds = round(time.perf_counter() - begin, 3)
    entry = JournalEntry(stage, finished, seconds, version=__version__, **result)
    with may_be_missing("the journal"):
        # Written again as a whole: objects cannot be appended to, and a kill would leave half a line.
        lines = [*_read(store).splitlines(), msgspec.json.encode(entry)]
        write_bytes(store / JOURNAL_NAME, b"\n".join(lines) + b"\n")


def read_journal(store: AnyPath) -> list[JournalEntry]:
    """Return the runs in the journal, oldest first; an empty list if there is no journal.

    Lines that are damaged or were written by a release with other fields are skipped.
    """
    found: list[JournalEntry] = []
    with suppress(OSError):
        for line in _read(store).splitlines():
            with suppress(StoreError):
                entry = as_model(JournalEntry, read_json(line, JOURNAL_NAME), what="a line of the journal")
                found.append(entry)
    return found


def _read(store: AnyPath) -> bytes:
    """Return the end of the journal; empty if there is none."""
    with suppress(FileNotFoundError):
        # A journal has at most this size plus one line; a larger file is not read whole. A line that is cut
        # at the beginning is skipped by ``read_journal``.
        return storage_of(store / JOURNAL_NAME).read_range(0, 2 * _READ_BYTES)[-_READ_BYTES:]
    return b""
