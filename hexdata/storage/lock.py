"""The write lock of a store: at most one process writes to a store at a time.

On a local disk the kernel holds the lock and releases it when the process ends. In an object store the lock
is a lease: an object that names the writing process and must be renewed regularly.
"""

from __future__ import annotations

import io
import json
import math
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

from hexdata.errors import StoreError, StoreLockedError
from hexdata.retry import attempts_of, on_disk
from hexdata.storage.address import AnyPath
from hexdata.storage.base import Changed, Storage
from hexdata.storage.errors import add_path_to_error
from hexdata.storage.local_files import open_in_place
from hexdata.strict_json import parse_json, shortened
from hexdata.system import OPEN_IN_PLACE, lock_file, seconds_since_boot

__all__ = ["LOCK_NAME", "Lease", "find_lock_holder", "kernel_lock", "machine_id"]

LOCK_NAME: Final = ".lock"
_MAX_BYTES: Final = 4096
"""Maximum size of a lock file or a lease in bytes."""
LEASE_SECONDS: Final = 90.0
"""Seconds without renewal after which a lease has expired."""
RENEW_SECONDS: Final = 20.0
SETTLE_SECONDS: Final = 2.0
"""Pause after which a lease is read again in a store without conditional requests."""
_UNKNOWN_HOLDER: Final = "an unknown process"


@contextmanager
def kernel_lock(path: Path, store: AnyPath, stage: str) -> Iterator[None]:
    """Hold a lock of the kernel, which releases it when the process ends.

    Args:
        path: Local lock file, which is created if it does not exist.
        store: Path or address of the store, for messages.
        stage: Name of the stage that writes, for messages of other processes.

    Raises:
        StoreLockedError: Another process holds the lock; the message names it.
    """
    with open_in_place(path) as file:
        with add_path_to_error(path):
            on_disk(_take_lock, file, path, store)
            on_disk(file.truncate, 0)
            on_disk(file.write, json.dumps({"pid": os.getpid(), "stage": stage}).encode())
        yield
        with suppress(OSError):  # the kernel releases the lock; the content is only for messages
            file.truncate(0)


def _take_lock(file: io.FileIO, path: Path, store: AnyPath) -> None:
    try:
        lock_file(file)
    except BlockingIOError as error:
        raise _locked_error(store, _read_holder(path)) from error


def _locked_error(store: AnyPath, holder: str) -> StoreLockedError:
    return StoreLockedError(
        "another process is writing to this store",
        path=store,
        found=holder,
        hint="Wait until it has finished, or stop it, and run the command again.",
    )


def find_lock_holder(path: Path) -> str | None:
    """Return a description of the process that holds a kernel lock; None if there is none.

    The lock is tested only for a moment.
    """
    try:
        if not path.stat().st_size:  # the file is empty after the lock is released
            return None
        descriptor = os.open(path, os.O_RDONLY | OPEN_IN_PLACE)
    except OSError:
        return None
    try:
        lock_file(descriptor, shared=True)
    except BlockingIOError:
        return _read_holder(path)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None  # the last holder was killed


def _read_holder(path: Path) -> str:
    try:
        with path.open("rb") as file:
            holder = _parse_holder(file.read(_MAX_BYTES + 1))
    except OSError:
        return _UNKNOWN_HOLDER
    if not {"pid", "stage"} <= holder.keys():
        return _UNKNOWN_HOLDER
    return shortened(f"process {holder['pid']} ({holder['stage']})")


# --- a lease in an object store -----------------------------------------------------------------------


def machine_id(folder: Path) -> str:
    """Return an identifier shared by all processes that use this folder, and so the same kernel lock."""
    path = folder / "machine"
    try:
        with path.open("x") as file:
            file.write(os.urandom(16).hex())
    except FileExistsError:
        pass
    return path.read_text()


class Lease:
    """A lease: an object that names the writing process, written with conditional requests.

    The object remains after release and records where the last holder kept its work.

    Args:
        store: Address of the store, for messages.
        file: The object.
        age: Returns the age of the object in seconds.
        guards_writes: Returns whether the store rejects requests whose condition is not met. Called with the
            content of the object.
        stage: Name of the stage that writes, for messages of other processes.
        machine: Identifier of this machine.
        work: Where this process keeps its work: "store" or ``machine``.
    """

    def __init__(
        self,
        store: AnyPath,
        file: Storage,
        age: Callable[[], float],
        guards_writes: Callable[[bytes], bool],
        stage: str,
        machine: str,
        work: str,
    ) -> None:
        self.has_current_work = False
        self._store = store
        self._file = file
        self._age = age
        self._guards_writes = guards_writes
        self._machine = machine
        self._work = work
        self._holder = {"host": socket.gethostname(), "machine": machine, "pid": os.getpid(), "stage": stage}
        self._tag: str | None = None
        self._token = os.urandom(8).hex()
        self._renewed = 0.0
        self._count = 0
        self._lost = False
        self._stopped = threading.Event()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Take the lease, renew it in a background thread and release it at the end."""
        self._acquire()
        thread = threading.Thread(target=self._keep_renewing, name="hexdata-lease", daemon=True)
        thread.start()
        store_answers = True
        try:
            yield
        except BaseException as error:
            store_answers = attempts_of(error) is None
            is_failure = isinstance(error, (StoreError, OSError)) and not isinstance(error, StoreLockedError)
            if store_answers and is_failure:
                self._require_not_overtaken(error)
            raise
        finally:
            self._stopped.set()
            if store_answers:  # otherwise both would wait for an answer again
                thread.join()
                if not self._lost:
                    self._release()

    def require(self) -> None:
        """Check that this process still holds the lease.

        Raises:
            StoreLockedError: Another process has taken it, or it was not renewed in time and may have
                expired.
        """
        if self._lost or seconds_since_boot() - self._renewed > LEASE_SECONDS:
            self._raise_lost()

    def _acquire(self) -> None:
        try:
            data, self._tag = self._file.read_tagged(_MAX_BYTES)
        except FileNotFoundError:
            data = b""
        holder = _parse_holder(data)
        # Another holder on this machine must have ended, because this process has the kernel's lock.
        is_free = not data or holder.get("free") or holder.get("machine") == self._machine
        if not is_free and (age := self._read_age()) < LEASE_SECONDS:
            raise _locked_error(
                self._store, f"{_describe_holder(data)}, which renewed its lock {max(age, 0):.0f} s ago"
            )
        self.has_current_work = holder.get("work") == self._work
        try:
            if not self._guards_writes(self._put()):
                self._check_after_pause()
        except Changed:
            raise _locked_error(self._store, self._find_holder()) from None

    def _read_age(self) -> float:
        """Return the age of the object in seconds; infinity if it was removed since it was read."""
        try:
            return self._age()
        except FileNotFoundError:
            return math.inf

    def _check_after_pause(self) -> None:
        """Warn that the store cannot guard writers, and check that no other process took the lease meanwhile.

        Raises:
            Changed: Another process has.
        """
        warnings.warn(
            f"{self._store}: this object store does not support conditional requests, so another machine can "
            "write at the same time; make sure that only one process writes to the store",
            stacklevel=2,
        )
        time.sleep(SETTLE_SECONDS)
        data, self._tag = self._file.read_tagged(_MAX_BYTES)
        if _parse_holder(data).get("token") != self._token:
            raise Changed(LOCK_NAME)

    def _put(self) -> bytes:
        """Write the object if no other process has, and return its content."""
        now = seconds_since_boot()
        self._count += 1
        state = {"work": self._work, "renewed": self._count, "token": self._token}
        data = json.dumps(self._holder | state).encode()
        self._tag = self._file.put(data, self._tag)
        self._renewed = now
        return data

    def _keep_renewing(self) -> None:
        while not self._stopped.wait(RENEW_SECONDS):
            try:
                self._put()
            except Changed:
                self._lost = True
                return
            except OSError:
                continue  # the next attempt may succeed; ``require`` checks the time

    def _release(self) -> None:
        try:
            self._file.put(json.dumps({"free": True, "work": self._work}).encode(), self._tag)
        except (Changed, OSError):
            return  # it belongs to another process, or will expire

    def _raise_lost(self) -> NoReturn:
        self._require_not_overtaken(None)
        raise StoreLockedError(
            "this process has not renewed its lock on the store in time",
            path=self._store,
            found=f"no renewal for {seconds_since_boot() - self._renewed:.0f} s",
            expected=f"at most {LEASE_SECONDS:.0f} s",
            hint="The machine was suspended, or could not reach the store. Run the command again to resume.",
        )

    def _require_not_overtaken(self, cause: BaseException | None) -> None:
        """Check that no other process has taken the lease.

        Raises:
            StoreLockedError: Another process has, or had and has ended.
        """
        try:
            data = self._file.read_tagged(_MAX_BYTES).data
        except FileNotFoundError:
            data = b""
        except OSError:
            return
        if not self._lost and (not data or _parse_holder(data).get("token") == self._token):
            return
        raise StoreLockedError(
            "another process has taken the lock of this store, which this process held",
            path=self._store,
            found=self._find_holder(),
            hint="Make sure that only one process writes to the store, wait until the other one has "
            "finished, and run the command again.",
        ) from cause

    def _find_holder(self) -> str:
        """Return a description of the process in the lease."""
        try:
            data = self._file.read_tagged(_MAX_BYTES).data
        except OSError:
            return _UNKNOWN_HOLDER
        return "a process that has ended since" if _parse_holder(data).get("free") else _describe_holder(data)


def _parse_holder(data: bytes) -> dict[str, object]:
    """Return the content of a lease; an empty dict if it cannot be read."""
    try:
        holder = parse_json(data, LOCK_NAME, max_bytes=_MAX_BYTES)
    except StoreError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _describe_holder(data: bytes) -> str:
    holder = _parse_holder(data)
    if not {"pid", "host", "stage"} <= holder.keys():
        return _UNKNOWN_HOLDER
    return shortened(f"process {holder['pid']} on {holder['host']} ({holder['stage']})")
