"""The write lock of a store: at most one process writes to a store at a time.

On a local disk the kernel holds the lock and releases it when the process ends. In an object store the lock
is a lease: an object that names the writing process and must be renewed regularly. Readers take no lock.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from hexdata.errors import StoreError, StoreLockedError
from hexdata.storage.address import AnyPath
from hexdata.storage.errors import ONE_WRITER, Changed
from hexdata.system import locked, process_start, seconds_since_boot
from hexdata.temporary import place_of_processes
from hexdata.text import shortened

LOCK_NAME: Final = ".lock"
"""The lease, or an empty file whose lock the kernel holds."""
HOLDER_NAME: Final = ".lock.json"
"""Names the process that holds the kernel's lock, for messages of others. It is replaced, never written in
place, since a store from elsewhere may contain links."""
MAX_BYTES: Final = 4096
"""Maximum size of a lease, and of the file about the holder, in bytes."""
# Several renewals in a row may fail. After a kill on another machine, the next process waits as long as this.
LEASE_SECONDS: Final = 90.0
"""Seconds without renewal after which a lease has expired."""
RENEW_SECONDS: Final = 20.0
RELEASE_SECONDS: Final = 5.0
"""Maximum wait for the release of a lease."""


def _parse(data: bytes) -> dict[str, Any]:
    """Return the content of a description or lease; an empty dict only if there is none."""
    try:
        holder = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        holder = None
    return holder if isinstance(holder, dict) else {"damaged": True}


def locked_error(store: AnyPath, holder: bytes, renewed: str = "") -> StoreLockedError:
    """Return the error for a store that another process has locked, with what is known about that process."""
    known, hint = _parse(holder), "Wait until it has finished, or stop it, and run the command again."
    found = "an unknown process"
    if {"pid", "stage"} <= known.keys():
        host = f" on {known['host']}" if "host" in known else ""
        found = shortened(f"process {known['pid']}{host} ({known['stage']})")
    reason = "another process is writing to this store"
    return StoreLockedError(reason, path=store, found=found + renewed, hint=hint)


def find_lock_holder(store: AnyPath) -> str | None:
    """Return a description of the process that holds the kernel's lock of a store; None if there is none.

    The lock is tested only for a moment. In an object store, a reader cannot tell a current lease from one
    that has just ended.
    """
    if isinstance(store, Path):
        with suppress(OSError):
            holder = (store / HOLDER_NAME).read_bytes()[:MAX_BYTES]
            with locked(store / LOCK_NAME, "rb", wait=False) as is_free:  # of a holder that was killed
                return None if is_free else str(locked_error(store, holder).found)
    return None


@contextmanager
def hold_lease(store: AnyPath, file: Any, stage: str) -> Iterator[Callable[[], None]]:
    """Hold a lease: an object that names the writing process, written with conditional requests.

    It expires if it is not renewed, which a background thread does. The object remains after release, since
    it cannot be removed on a condition. A lease of a process of this machine that has ended is taken at once.

    Args:
        store: Address of the store, for messages.
        file: The object, as an ``ObjectStorage``, whose module imports this one.
        stage: Name of the stage that writes, for messages of other processes.

    Yields:
        A function that raises ``StoreLockedError`` if another process has taken the lease, or if it was not
        renewed in time and may have expired.

    Raises:
        StoreLockedError: Another process holds the lease.
        StoreError: The object store ignores conditions.
    """
    own = {"host": socket.gethostname(), "place": place_of_processes(), "pid": os.getpid(), "stage": stage}
    own["start"] = process_start(os.getpid())
    # Each content is different, and so is its tag.
    contents = (json.dumps({**own, "renewed": count}).encode() for count in itertools.count(1))
    stopped = threading.Event()
    tag: str | None = None
    renewed, is_lost = 0.0, False

    def put() -> None:
        nonlocal tag, renewed
        now = seconds_since_boot()  # before the request, from whose arrival others count
        tag, renewed = file.put(next(contents), tag), now

    def keep() -> None:
        """Renew the lease until the end, and release it."""
        nonlocal is_lost
        while not stopped.wait(RENEW_SECONDS):
            try:
                put()
            except Changed:
                is_lost = True
                return
            except OSError:
                continue  # the next attempt may succeed; ``require`` checks the time
        with suppress(Changed, OSError):  # it belongs to another process, or expires
            file.put(b"{}", tag)

    def require() -> None:
        seconds = seconds_since_boot() - renewed
        if is_lost or seconds > LEASE_SECONDS:
            reason = "this process has lost its lock on the store"
            found = "a lock of another process" if is_lost else f"no renewal for {seconds:.0f} s"
            raise StoreLockedError(reason, path=store, found=found, hint=ONE_WRITER)

    def read() -> bytes:
        nonlocal tag
        with suppress(FileNotFoundError):
            data, tag = file.read_tagged(MAX_BYTES)
            return bytes(data)
        return b""

    holder = _parse(before := read())
    # The system uses process ids again, so the start time is compared, too.
    is_here = holder.get("place") == own["place"] and "pid" in holder
    has_ended = is_here and process_start(int(holder["pid"])) != holder.get("start")
    # By the clock of S3, since those of two machines may differ by more than a lease.
    if holder and not has_ended and (age := file.age()) < LEASE_SECONDS:
        raise locked_error(store, before, f", which renewed its lock {max(age, 0):.0f} s ago")
    try:
        put()
    except Changed:
        raise locked_error(store, read()) from None
    with suppress(Changed):
        file.put(next(contents), None)  # must be refused, because the object exists
        reason = "this object store ignores conditional requests, so it cannot prevent two writers at a time"
        raise StoreError(reason, path=store, hint="Write to another store, or to a local disk.")
    renewal = threading.Thread(target=keep, name="hexdata-lease", daemon=True)
    renewal.start()
    try:
        yield require
    finally:
        stopped.set()
        renewal.join(RELEASE_SECONDS)  # the lease of a store that does not answer expires
