"""Calls of the operating system that differ between Unix and Windows: locks, open flags, processes, memory.

No other module imports a module that exists on only one of them.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

_CGROUP: Final = Path("/sys/fs/cgroup")
"""The control group of a Linux container, as processes in it see it."""
_STACK: Final = 8 << 20
"""Bytes that the system counts for the stack of a thread, whether used or not."""
_OTHER_THREADS: Final = 4
"""Threads of libraries, whose stacks count too."""

if sys.platform == "win32":
    import msvcrt

    _LOCK_OFFSET: Final = 1 << 30
    """Offset of the locked byte, beyond the end of any lock file: Windows denies access to locked bytes."""

    def _lock(descriptor: int, *, wait: bool) -> None:
        os.lseek(descriptor, _LOCK_OFFSET, os.SEEK_SET)
        while True:
            try:
                return msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EDEADLK):
                    raise
                if not wait:  # otherwise it gives up after ten seconds
                    raise BlockingIOError(errno.EAGAIN, "another process holds the lock") from error

    def _unlock(descriptor: int) -> None:
        os.lseek(descriptor, _LOCK_OFFSET, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
else:
    import fcntl
    import resource

    def _lock(descriptor: int, *, wait: bool) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path, mode: str = "ab", *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file, which is created if it is missing and stays.

    Other processes can still read, write and remove the file; they must ask for the lock themselves. The
    lock also ends with the process.

    Args:
        path: Path of the lock file.
        mode: Mode in which the file is opened: "ab" (default), or "rb" to neither create nor change it.
        wait: Whether to wait while another process holds the lock (default: True).

    Yields:
        Whether the lock is held: False if another process holds it and ``wait`` is false.

    Raises:
        OSError: The file cannot be opened, or the file system has no locks.
    """
    with path.open(mode) as file:
        try:
            _lock(file.fileno(), wait=wait)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:  # closing is not enough: a forked child inherits the open file, and would keep the lock
            _unlock(file.fileno())


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


def seconds_since_boot() -> float:
    """Return seconds from a fixed moment; on Linux including the time that the machine is suspended."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    else:
        return time.monotonic()


def default_workers() -> int:
    """Return the number of cores that this process may use."""
    # A scheduler of jobs may allow a process fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Return the bytes of memory that are free, or that the system can free, such as its page cache.

    The memory limit of a Linux container counts.
    """
    available: int = psutil.virtual_memory().available
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        used = {name: int(size) for name, _, size in (line.partition(" ") for line in lines)}
    except (OSError, ValueError):  # no container, or no limit: "max"
        return available
    # Of the memory of the container, only this kind cannot be freed by the system when it is needed.
    return max(0, min(available, limit - used.get("anon", 0)))


def resident_bytes() -> int:
    """Return the resident bytes of this process and its children; shared pages count in each."""
    this = psutil.Process()
    total = 0
    for process in [this, *this.children(recursive=True)]:
        with suppress(psutil.Error):  # the process ended between the two calls
            total += process.memory_info().rss
    return total


@contextmanager
def memory_limit(memory: int, threads: int | None = None) -> Iterator[None]:
    """Limit the memory of this process while a ``with`` block runs, on Linux only.

    An allocation above it raises a ``MemoryError``. A process that already uses most of ``memory``, such as a
    notebook, may still allocate half of it. Lower limits stay in force.

    Args:
        memory: Bytes for the whole process, including the memory that it uses now.
        threads: Number of threads that the block starts. Default None: one per core.
    """
    if sys.platform != "linux":
        yield
    else:
        usage = psutil.Process().memory_info()
        stacks = _STACK * ((threads or default_workers()) + _OTHER_THREADS)
        # The limit counts reserved memory, used or not, so what the process may add is counted from there.
        limit = usage.data + max(memory - usage.rss, memory // 2) + stacks
        before, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [bound for bound in (limit, before, hard) if bound != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


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


def has_ended(parent: int) -> bool:
    """Return whether the parent process of this one has ended.

    Args:
        parent: Id of the parent process when this process started.
    """
    # On Windows, a process keeps the id of a parent that has ended.
    return os.getppid() != parent or not psutil.pid_exists(parent)


def process_start(pid: int) -> int | None:
    """Return when a process started, in hundredths of a second; None if it has ended.

    On Linux the time counts from the boot, because the time of psutil changes when the clock is set.
    """
    try:
        if sys.platform == "linux":
            # The name of the program may contain spaces and parentheses. Field 22 is the start time.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            return None if fields[0] in (b"Z", b"X") else int(fields[19])  # a zombie has ended
        else:
            return int(100 * psutil.Process(pid).create_time())
    except (OSError, psutil.Error):
        return None


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and, if it leads a group of processes, all of the group. Windows has no groups."""
    if sys.platform != "win32" and os.getpgid(process.pid) == process.pid:
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
