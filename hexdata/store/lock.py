"""One process writes to a store at a time. Knows who it is, and nothing of what is written.

On this machine the kernel holds the lock, and lets go of it when the process ends, however it ends. An object
store has no such thing: there, an object says who writes, for as long as it is renewed.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

from hexdata.errors import StoreLockedError
from hexdata.remote import AnyPath, Changed, RemotePath, file_system, put_if, read_tagged, scratch_folder

__all__ = ["LOCK_NAME", "locked"]

LOCK_NAME: Final = ".lock"
LEASE_SECONDS: Final = 90.0
"""After which an object that was not renewed is nobody's."""
RENEW_SECONDS: Final = 20.0
_NOBODY: Final = "a process that did not say its name"


def _still_held() -> None:
    """Say that the lock is held: the kernel keeps its word."""


@contextmanager
def locked(store: AnyPath, stage: str) -> Iterator[Callable[[], None]]:
    """Hold the store's lock; give what is called before anything is published.

    Raises:
        StoreLockedError: another process holds it; the message names it. Also from what is given, where the
            lock has been lost.
    """
    if isinstance(store, Path):
        store.mkdir(parents=True, exist_ok=True)
        with _flocked(store / LOCK_NAME, store, stage):
            yield _still_held
        return
    # Processes of this machine are told by the kernel, so that a dead one is known at once.
    folder = scratch_folder("locks")
    folder.mkdir(parents=True, exist_ok=True)
    with _flocked(scratch_folder("locks", store), store, stage):
        lease = _Lease(store, stage, _machine(folder))
        with lease.held():
            yield lease.require


@contextmanager
def _flocked(path: Path, store: AnyPath, stage: str) -> Iterator[None]:
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _locked(store, _holder(path)) from error
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "stage": stage}))
        file.flush()
        yield
        file.truncate(0)


def _locked(store: AnyPath, holder: str) -> StoreLockedError:
    return StoreLockedError(
        "another process is writing to this store",
        path=store,
        found=holder,
        cure="Wait for it, or stop it, and run the command again.",
    )


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} ({holder['stage']})"
    except (OSError, ValueError, KeyError, TypeError):
        return _NOBODY


# --- a lease in an object store -----------------------------------------------------------------------


def _machine(folder: Path) -> str:
    """Return a name for all processes that share this folder, and with it the kernel's lock."""
    path = folder / "machine"
    try:
        with path.open("x") as file:
            file.write(os.urandom(16).hex())
    except FileExistsError:
        pass
    return path.read_text()


class _Lease:
    """An object that names the process that writes, put on the condition that nobody else has put one."""

    def __init__(self, store: RemotePath, stage: str, machine: str) -> None:
        self._store = store
        self._path = store / LOCK_NAME
        self._machine = machine
        self._holder = {"host": socket.gethostname(), "machine": machine, "pid": os.getpid(), "stage": stage}
        self._tag: str | None = None
        self._renewed = 0.0
        self._count = 0
        self._taken = False
        self._ended = threading.Event()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Take the lease, renew it in a thread, and give it back."""
        self._take()
        thread = threading.Thread(target=self._keep, name="hexdata-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            if not self._taken:
                self._give_back()

    def require(self) -> None:
        """See that the lease is still ours.

        Raises:
            StoreLockedError: it is not, or could not be renewed for so long that another may have it.
        """
        if self._taken or time.monotonic() - self._renewed > LEASE_SECONDS:
            self._refuse()

    def _take(self) -> None:
        tag = None
        try:
            data, tag = read_tagged(self._path)
            age = time.time() - file_system(self._path).modified(self._path.path).timestamp()
        except FileNotFoundError:
            data = b""
        if data and not self._is_free(data) and age < LEASE_SECONDS:
            raise _locked(self._store, f"{_named(data)}, which renewed its lock {max(age, 0):.0f} s ago")
        self._tag = tag
        try:
            self._put()
        except Changed:
            self._refuse()

    def _is_free(self, data: bytes) -> bool:
        """Say whether a lease was given back, or is one of this machine's, whose process must be dead."""
        try:
            holder = json.loads(data)
            return holder is None or holder["machine"] == self._machine
        except (ValueError, KeyError, TypeError):
            return False

    def _put(self) -> None:
        now = time.monotonic()
        self._count += 1
        data = json.dumps(self._holder | {"renewed": self._count, "token": os.urandom(8).hex()})
        self._tag = put_if(self._path, data.encode(), self._tag)
        self._renewed = now

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_SECONDS):
            try:
                self._put()
            except Changed:
                self._taken = True
                return
            except OSError:
                continue  # it may answer next time; ``require`` counts the seconds

    def _give_back(self) -> None:
        try:
            put_if(self._path, b"null", self._tag)
        except (Changed, OSError):
            return  # it is another's, or ends by itself

    def _refuse(self) -> NoReturn:
        try:
            holder = _named(read_tagged(self._path).data)
        except OSError:
            holder = _NOBODY
        raise _locked(self._store, holder)


def _named(data: bytes) -> str:
    try:
        holder = json.loads(data)
        return f"process {holder['pid']} on {holder['host']} ({holder['stage']})"
    except (ValueError, KeyError, TypeError):
        return _NOBODY
