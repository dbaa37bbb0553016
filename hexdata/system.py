"""Calls of the operating system that differ between Unix and Windows: locks, open flags, processes, memory.

No other module imports a module that exists on only one of them.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

import psutil

__all__ = [
    "OPEN_IN_PLACE",
    "before_fork",
    "block_interrupts",
    "data_limit",
    "has_children",
    "has_ended",
    "kill_group",
    "lock_file",
    "peak_resident_bytes",
    "process_start",
    "read_at",
    "release_pages",
    "remove_locked",
    "seconds_since_boot",
    "sync_folder",
    "unlock_file",
    "wait_readable",
]

if sys.platform == "win32":
    import ctypes
    import msvcrt
    from ctypes import wintypes

    OPEN_IN_PLACE: Final = os.O_BINARY | os.O_NOINHERIT
    """Flags to open a file. Windows has none against links and devices; the caller checks what was opened."""
    _reading: Final = threading.Lock()
    _LOCK_OFFSET: Final = 1 << 62
    """Offset of the locked byte, beyond the end of any file: Windows denies others access to locked bytes."""
    _FAIL_IMMEDIATELY, _EXCLUSIVE = 1, 2
    _BUSY: Final = (33, 997)
    """ERROR_LOCK_VIOLATION and ERROR_IO_PENDING: another process holds the lock."""
    _kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)

    class _Overlapped(ctypes.Structure):
        """OVERLAPPED of the Windows API, with the offset of the locked byte."""

        _fields_ = (
            ("internal", ctypes.c_void_p),
            ("internal_high", ctypes.c_void_p),
            ("offset", wintypes.DWORD),
            ("offset_high", wintypes.DWORD),
            ("event", wintypes.HANDLE),
        )

    def _call_on_lock(function: Any, file: IO[bytes] | int, *arguments: int) -> None:
        """Call LockFileEx or UnlockFileEx for the locked byte of a file."""
        where = _Overlapped(None, None, _LOCK_OFFSET & 0xFFFFFFFF, _LOCK_OFFSET >> 32, None)
        handle = msvcrt.get_osfhandle(file if isinstance(file, int) else file.fileno())
        if function(wintypes.HANDLE(handle), *map(wintypes.DWORD, (*arguments, 1, 0)), ctypes.byref(where)):
            return
        code = ctypes.get_last_error()
        if code in _BUSY:
            raise BlockingIOError(errno.EAGAIN, "another process holds the lock")
        raise ctypes.WinError(code)

    def _lock(file: IO[bytes] | int, shared: bool, wait: bool) -> None:
        flags = (0 if shared else _EXCLUSIVE) | (0 if wait else _FAIL_IMMEDIATELY)
        _call_on_lock(_kernel32.LockFileEx, file, flags, 0)

    def _unlock(file: IO[bytes] | int) -> None:
        _call_on_lock(_kernel32.UnlockFileEx, file, 0)
else:
    import fcntl
    import resource

    OPEN_IN_PLACE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    """Flags to open a file that may be a link, a pipe or a device, without following or waiting for it."""
    _RSS_UNIT: Final = {"darwin": 1}.get(sys.platform, 1024)
    """Unit in bytes of the system's peak resident memory."""

    def _lock(file: IO[bytes] | int, shared: bool, wait: bool) -> None:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)

    def _unlock(file: IO[bytes] | int) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)


def lock_file(file: IO[bytes] | int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file. The lock ends when the file is closed, also by the end of the process.

    Other processes can still read, write and remove the file; they must ask for the lock themselves.

    Args:
        file: The file, or its descriptor.
        shared: Whether other processes may hold a shared lock at the same time. Default False.
        wait: Whether to wait until no other process holds a conflicting lock. Default False.

    Raises:
        BlockingIOError: Another process holds a conflicting lock, and ``wait`` is False.
        OSError: The file system has no locks.
    """
    _lock(file, shared, wait)


def unlock_file(file: IO[bytes] | int) -> None:
    """Release the lock of an open file.

    Args:
        file: The file, or its descriptor.
    """
    _unlock(file)


def remove_locked(file: IO[bytes], path: Path) -> None:
    """Remove a file that is open and locked here, and close it or release its lock.

    Windows removes no open file, so it is closed first there. It stays if another process has it open.

    Raises:
        OSError: The file cannot be removed.
    """
    if sys.platform == "win32":
        file.close()
        with suppress(PermissionError):
            path.unlink(missing_ok=True)
    else:
        path.unlink(missing_ok=True)
        unlock_file(file)


def sync_folder(folder: Path) -> None:
    """Sync a folder so that a new name in it survives a power failure.

    Does nothing on Windows, which cannot open folders; NTFS records new names in its journal.
    """
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_at(file: IO[bytes], size: int, offset: int) -> bytes:
    """Return ``size`` bytes of a file at an offset, or fewer at its end. Several threads may call this."""
    if sys.platform == "win32":
        with _reading:
            file.seek(offset)
            return file.read(size)
    else:
        return os.pread(file.fileno(), size, offset)


def release_pages(mapped: mmap.mmap) -> None:
    """Remove the pages of a mapped file from the memory of this process. On Windows, nothing is done."""
    if sys.platform == "win32":
        return
    else:
        mapped.madvise(mmap.MADV_DONTNEED)


def seconds_since_boot() -> float:
    """Return seconds from a fixed moment, including the time that the machine is suspended."""
    if sys.platform == "win32":
        return time.monotonic()
    else:
        clock = getattr(time, "CLOCK_BOOTTIME", None) or getattr(time, "CLOCK_MONOTONIC_RAW", None)
        return time.monotonic() if clock is None else time.clock_gettime(clock)


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    else:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


@contextmanager
def data_limit(limit: int) -> Iterator[None]:
    """Limit the memory for data of this process on Linux; other systems have no such limit.

    Args:
        limit: Bytes, including the data that the process has now. Lower limits stay in force.
    """
    if sys.platform == "linux":
        before, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [bound for bound in (limit, before, hard) if bound != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
    else:
        yield


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Block SIGINT, SIGTERM and SIGHUP in this thread, and in the processes that it starts.

    They are delivered here afterwards, and this process ends the others.

    Does nothing on Windows, where every process of a console receives Ctrl-C; a worker must ignore it itself.
    """
    if sys.platform == "win32":
        yield
    else:
        signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def before_fork(function: Callable[[], None]) -> None:
    """Call a function in this process before each fork of it. Windows has none."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=function)


def has_ended(parent: int) -> bool:
    """Return whether the parent process of this one has ended.

    Args:
        parent: Id of the parent process when this process started.
    """
    if sys.platform == "win32":  # a process keeps the id of a parent that has ended
        return not psutil.pid_exists(parent)
    else:
        return os.getppid() != parent


def process_start(pid: int) -> int | None:
    """Return when a process started, in hundredths of a second; None if it has ended.

    On Linux the time counts from the boot, because the time of psutil changes when the clock is set.
    """
    try:
        if sys.platform == "linux":
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            return None if fields[0] in (b"Z", b"X") else int(fields[19])  # a zombie has ended
        else:
            return int(100 * psutil.Process(pid).create_time())
    except (OSError, psutil.Error):
        return None


def has_children() -> bool:
    """Return whether this process has child processes; True also if the system cannot tell."""
    if sys.platform == "win32" or not hasattr(os, "waitid"):
        return True
    else:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # takes no exit status from others
        except ChildProcessError:
            return False
        return True


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and, if it leads a group of processes, all of the group."""
    if sys.platform == "win32":
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
    else:
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def wait_readable(pipe: int, seconds: float) -> bool:
    """Wait until a pipe can be read, or has ended; return whether it can. Windows does not wait."""
    if sys.platform == "win32":
        return True
    else:
        waiting = select.poll()
        waiting.register(pipe, select.POLLIN)
        return bool(waiting.poll(max(0.0, seconds) * 1000 + 1))
