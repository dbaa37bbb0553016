"""An open store with its index and its SQL session, opened again when the store changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from hexdata.browse.index import StoreIndex, open_index
from hexdata.browse.listing import Listings
from hexdata.browse.rows import StoreRows
from hexdata.errors import HexdataError, StoreError
from hexdata.pool import resident_bytes
from hexdata.sql import open_catalog
from hexdata.storage import AnyPath, storage_of
from hexdata.store import Store
from hexdata.store.integrity import VERIFY_HINT
from hexdata.store.limits import QueryLimits
from hexdata.store.manifest import MANIFEST_NAME
from hexdata.store.session import DuckDBPyConnection
from hexdata.units import format_bytes, format_duration

__all__ = ["BrowseLimits", "IndexingError", "Library", "OpenStore"]

_CHECKED_EVERY: Final = 3.0
"""Minimum number of seconds between two checks whether the store has changed."""


@dataclass(frozen=True)
class BrowseLimits(QueryLimits):
    """Limits of ``hexdata browse``: ``memory`` in bytes and ``threads`` of DuckDB."""

    PURPOSE: ClassVar[str] = "to browse a store"
    BASE: ClassVar[int] = 450 << 20
    BUFFERS: ClassVar[int] = 0
    THREAD: ClassVar[int] = 60 << 20
    THREAD_BUFFERS: ClassVar[int] = 100 << 20
    PAGES: ClassVar[int] = 250 << 20
    """Part of ``BASE`` for the server and for the rows of pages, outside the SQL session."""


@dataclass(frozen=True)
class OpenStore:
    """A store as it was when it was opened.

    Attributes:
        rows: Reader of its rows.
        listings: Its lists.
        con: SQL session. Use a cursor of it per request.
    """

    store: Store
    index: StoreIndex
    rows: StoreRows
    listings: Listings
    con: DuckDBPyConnection


class IndexingError(HexdataError):
    """The index is being built; the page asks again."""


class Steps:
    """Progress of the index for the page. The methods are those of ``Progress``."""

    def __init__(self, forward: Callable[[str], None]) -> None:
        self.stage, self.done, self.total, self.unit = "opening the store", 0, 0, ""
        self._began = time.monotonic()
        self.stopped = False
        self._forward = forward

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        """Start a step."""
        self.stage, self.done, self.total, self.unit = stage, 0, total or 0, unit
        self._began = time.monotonic()
        self._forward(stage)

    def advance(self, amount: int) -> None:
        """Add finished units.

        Raises:
            IndexingError: The server ends.
        """
        if self.stopped:
            raise IndexingError("the index is not needed any more")
        self.done += amount

    def note(self, message: str) -> None:
        """Pass on a message."""
        self._forward(message)

    def to_json(self) -> dict[str, Any]:
        """Return the step, its share done, from 0 to 1, and its rate, time left and memory as texts."""
        done, total = self.done, self.total
        facts, passed = [], time.monotonic() - self._began
        if done and passed:
            facts.append(f"{done / passed:,.0f} {self.unit}/s")
        if 0 < done < total:
            facts.append(f"{format_duration(passed / done * (total - done))} left")
        facts.append(f"memory {format_bytes(resident_bytes())}")
        return {"stage": self.stage, "share": min(1.0, done / total) if total else 0.0, "facts": facts}


class Library:
    """The store that the page shows. Thread-safe.

    Args:
        path: Folder or address of the store.
        limits: Memory and threads.
        note: Called with each step of building an index, from a thread of its own.
    """

    def __init__(self, path: AnyPath, limits: BrowseLimits, note: Callable[[str], None]) -> None:
        self._path, self._limits, self._note = path, limits, note
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._open: OpenStore | None = None
        self._error: HexdataError | None = None
        self._thread: threading.Thread | None = None
        self._version, self._checked = "", 0.0
        self.steps = Steps(note)

    def start(self) -> None:
        """Open the store in the background."""
        with self._lock:
            self._start()

    def current(self) -> OpenStore:
        """Return the open store.

        Raises:
            IndexingError: Its index is being built.
            HexdataError: It cannot be opened. The next call tries again.
        """
        with self._lock:
            now = time.monotonic()
            if self._thread is None and now - self._checked > _CHECKED_EVERY:
                self._checked = now
                if self._open is None or storage_of(self._path / MANIFEST_NAME).version() != self._version:
                    self._start()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._open is None or self._thread is not None:
                raise IndexingError("the index is being built")
            return self._open

    def wait(self) -> None:
        """Wait until the store has been opened, or has failed to open."""
        while (thread := self._thread) is not None:
            thread.join()

    def close(self) -> None:
        """Stop building the index, and end the SQL session."""
        self.steps.stopped = True
        self.wait()
        with self._lock:
            self._close()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._build, daemon=True)
            self._thread.start()

    def _build(self) -> None:
        opened, error, version = None, None, ""
        stack = ExitStack()
        try:
            version = storage_of(self._path / MANIFEST_NAME).version()
            store = Store.open(self._path)
            index = open_index(store, self.steps)
            memory = self._limits.memory - self._limits.PAGES
            con = stack.enter_context(open_catalog(store, memory=memory, threads=self._limits.threads))
            opened = OpenStore(store, index, StoreRows(store, index), Listings(con, store), con)
        except HexdataError as found:
            error = found
        except Exception as found:  # noqa: BLE001  # a thread has no caller, and the page must see it
            error = StoreError(
                "the store cannot be opened", path=self._path, found=repr(found), hint=VERIFY_HINT
            )
        with self._lock:
            self._close()
            self._open, self._error, self._stack, self._version = opened, error, stack, version
            self._checked = time.monotonic()
            self._thread = None

    def _close(self) -> None:
        if self._open is not None:
            self._open.listings.close()
        self._open = None
        with suppress(Exception):  # a function that cannot be interrupted keeps its session until the end
            self._stack.close()
