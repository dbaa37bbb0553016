"""Local copies of remote shards, which several processes may share.

A copy is named by its SHA-256. Two stores with the same shard share one copy, and a shard that was exported
again with other content gets a new one. The cache changes only files that it created.

The cache folder contains three kinds of files: ``DIGEST.tar`` is a complete shard whose digest was checked;
``DIGEST.part`` is a shard being fetched, which has its final size from the beginning to reserve disk space;
``DIGEST.lock`` is locked by the process that fetches it. Space is reserved and copies are evicted by one
process at a time, which holds ``.lock``. All locks belong to the operating system and end with their process.
Files left by killed processes are removed when space is next needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, NamedTuple

from hexdata.errors import BudgetError, StoreError
from hexdata.retry import is_disk_full
from hexdata.shards.manifest import ShardEntry
from hexdata.shards.sources import (
    WHOLE_FILE,
    ByteRange,
    ByteStream,
    FileStream,
    ShardFile,
    ShardSource,
    altered_shard_error,
)
from hexdata.system import lock_file, remove_locked, unlock_file
from hexdata.units import format_bytes

__all__ = ["CacheFullError", "CachedSource", "ShardCache"]

_CHUNK: Final = 1 << 20
_CACHE_FILE: Final = re.compile(r"([0-9a-f]{64})\.(tar|part)")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class CacheFullError(BudgetError):
    """The cache is full of shards that are mapped into memory and cannot be evicted."""


class _FetchStoppedError(Exception):
    """A prefetch was stopped."""


class _CachedShard(NamedTuple):
    """A complete shard in the cache. The least recently used one sorts first."""

    used: int
    name: str
    bytes: int


@dataclass(frozen=True)
class ShardCache:
    """A folder of shard copies, which threads and processes may use at the same time.

    Attributes:
        folder: Folder of the cache, created when it is first needed.
        size: Maximum size of all copies together in bytes. Least recently used copies are evicted first,
            except those that are mapped into memory.
    """

    folder: Path
    size: int

    def require_size(self, entries: Iterable[ShardEntry], *, together: bool) -> None:
        """Check that the cache is large enough for each of these shards, or for all of them together.

        Args:
            entries: The shards.
            together: Whether all shards must fit at the same time.

        Raises:
            BudgetError: The cache is too small.
        """
        sizes = {entry.sha256: entry.bytes for entry in entries}.values()
        needed = sum(sizes) if together else max(sizes, default=0)
        if needed > self.size:
            raise BudgetError(
                f"the shard cache is smaller than {'the shards of the split' if together else 'a shard'}",
                path=self.folder,
                found=f"{self.size:,} bytes",
                expected=f"at least {needed:,}",
                hint="Raise cache_size (--cache-size)" + (", or use mode='stream'." if together else "."),
            )

    def open(
        self, entry: ShardEntry, source: ShardSource, *, digest: bool = False, mapped: bool = False
    ) -> ShardFile:
        """Open the copy of a shard, which is fetched first if there is none.

        If several callers need the same shard, it is fetched once. An open file can be read to its end even
        if the copy is evicted.

        Args:
            entry: The shard.
            source: Source to fetch it from.
            digest: Whether to check the digest of an existing copy. A copy that has changed is fetched
                again. Default False.
            mapped: Whether the copy must not be evicted while the file is open or mapped. Default False.

        Raises:
            StoreError: The source fails or sends other bytes, or the cache folder cannot be used.
            CacheFullError: All other copies are mapped, and not enough space is left.
            BudgetError: The disk is full.
        """
        with self._translate_os_errors():
            while True:
                file = self._open_copy(entry, digest) or self._fetch(entry, source)
                if file is not None and (not mapped or _lock_shared(file, self._path(entry))):
                    return file

    def prefetch(self, entry: ShardEntry, source: ShardSource, stopped: Callable[[], bool]) -> None:
        """Fetch a shard that is needed soon. An existing copy is marked as used now.

        Does nothing if another process is fetching the shard or if other fetches occupy the space.

        Args:
            entry: The shard.
            source: Source to fetch it from.
            stopped: Called repeatedly. The fetch is abandoned once it returns True.

        Raises:
            StoreError, BudgetError: As for :meth:`open`.
        """
        with self._translate_os_errors(), contextlib.suppress(_FetchStoppedError):
            file = None if stopped() else self._open_copy(entry, digest=False)
            if file is None and not stopped():
                file = self._fetch(entry, source, stopped)
            if file is not None:
                file.close()

    # --- one shard ------------------------------------------------------------------------------------

    def _path(self, entry: ShardEntry, suffix: str = "tar") -> Path:
        if not _DIGEST.fullmatch(entry.sha256):
            raise StoreError("the SHA-256 of a shard must be 64 hexadecimal digits", found=entry.sha256)
        return self.folder / f"{entry.sha256}.{suffix}"

    def _open_copy(self, entry: ShardEntry, digest: bool) -> ShardFile | None:
        """Open the copy of a shard and mark it as used now; return None if it is missing or damaged."""
        path = self._path(entry)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        with contextlib.ExitStack() as close_on_failure:
            close_on_failure.callback(file.close)
            is_whole = os.fstat(file.fileno()).st_size == entry.bytes
            if is_whole and digest:
                is_whole = hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
                file.seek(0)
            if not is_whole:
                with self._exclusive():
                    is_same = _is_same_file(file, path)
                    file.close()  # Windows removes no open file
                    if is_same:
                        path.unlink()
                return None
            with contextlib.suppress(PermissionError, FileNotFoundError):  # of another user, or evicted
                _mark_used(path)
            close_on_failure.pop_all()
        return file

    def _fetch(
        self, entry: ShardEntry, source: ShardSource, stopped: Callable[[], bool] | None = None
    ) -> ShardFile | None:
        """Fetch a shard; return None if another process has fetched it, or is fetching it during a prefetch.

        Args:
            entry: The shard.
            source: Source to fetch it from.
            stopped: For a prefetch, as for :meth:`prefetch`; None waits for locks and for space.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path, part, lock = (self._path(entry, suffix) for suffix in ("tar", "part", "lock"))
        with _locked(lock, wait=stopped is None) as is_locked:
            if not is_locked or path.exists():
                return None
            part.unlink(missing_ok=True)  # left by a killed process
            file = self._reserve(entry, wait=stopped is None)
            try:
                _copy(entry, source, file, stopped or _never)
                file.close()  # Windows renames no open file
                with self._exclusive():  # no other process sums up sizes or evicts the copy
                    _mark_used(part)
                    part.rename(path)
                    return path.open("rb")
            except BaseException:
                file.close()
                part.unlink(missing_ok=True)
                raise

    # --- disk space -----------------------------------------------------------------------------------

    def _reserve(self, entry: ShardEntry, *, wait: bool) -> ShardFile:
        """Create the part file of a shard in the shard's size, once there is space for it."""
        part = self._path(entry, "part")
        while True:
            with self._exclusive():
                other_fetch = self._evict_for(entry)
                if other_fetch is None:
                    file = part.open("w+b")
                    try:
                        file.truncate(entry.bytes)
                    except BaseException:
                        file.close()
                        part.unlink()
                        raise
                    return file
            if not wait:
                raise _FetchStoppedError
            with _locked(other_fetch, wait=True):  # until that shard has been fetched and can be evicted
                pass

    def _evict_for(self, entry: ShardEntry) -> Path | None:
        """Evict copies until there is space for a shard.

        Returns:
            None, or the lock of another fetch to wait for, if that occupies the space.

        Raises:
            CacheFullError: There is no space, and no fetch to wait for.
        """
        copies, fetches = self._list_files()
        free = self.size - sum(copy.bytes for copy in copies) - sum(fetches.values()) - entry.bytes
        for copy in sorted(copies):
            if free >= 0:
                break
            if _remove_if_unlocked(self.folder / copy.name):
                free += copy.bytes
        if free >= 0:
            return None
        if fetches:
            return next(iter(fetches))
        raise CacheFullError(
            "the shard cache is full of shards that are mapped into memory",
            path=self.folder,
            found=f"{format_bytes(-free)} too little of {format_bytes(self.size)} for {entry.name}",
            hint="Raise cache_size (--cache-size), use a separate cache, or stop other loaders.",
        )

    def _list_files(self) -> tuple[list[_CachedShard], dict[Path, int]]:
        """Return the complete copies, and the bytes reserved by each running fetch, by the path of its lock.

        Removes the files of processes that no longer run.
        """
        copies: list[_CachedShard] = []
        fetches: dict[Path, int] = {}
        for found in list(os.scandir(self.folder)):
            match = _CACHE_FILE.fullmatch(found.name)
            if match is None:
                continue
            try:
                status = found.stat()
            except FileNotFoundError:
                continue
            lock = self.folder / f"{match[1]}.lock"
            if match[2] == "tar":
                copies.append(_CachedShard(status.st_mtime_ns, found.name, status.st_size))
            elif _remove_if_unlocked(lock):
                # No process can have created it again: that requires the lock held here.
                (self.folder / found.name).unlink(missing_ok=True)
            else:
                fetches[lock] = status.st_size
        return copies, fetches

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock of the whole cache."""
        with _locked(self.folder / ".lock", wait=True, remove=False):
            yield

    @contextmanager
    def _translate_os_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_disk_full(error):
                raise BudgetError(
                    "the disk of the shard cache is full",
                    path=self.folder,
                    found=error.strerror,
                    hint="Free space there, lower cache_size (--cache-size), or use another cache (--cache).",
                ) from error
            raise StoreError(
                "the shard cache cannot be used",
                path=error.filename or self.folder,
                found=error.strerror or str(error),
                hint="Give another folder as cache (--cache), or none (--no-cache).",
            ) from error


@dataclass(frozen=True)
class CachedSource:
    """A source whose shards are copied into a cache when they are first needed.

    Attributes:
        source: Source of the shards.
        cache: The cache.
        entries: The shards by name. Other files are read directly from the source.
    """

    source: ShardSource
    cache: ShardCache
    entries: Mapping[str, ShardEntry]
    _checked: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Shards whose copy was checked. What is read afterwards is compared with the manifest by the reader."""

    def address(self, name: str) -> str:
        """Return the address of a file at its source."""
        return self.source.address(name)

    @contextmanager
    def open(self, name: str, part: ByteRange = WHOLE_FILE) -> Iterator[ByteStream]:
        """Open the copy of a shard; see :meth:`ShardSource.open`.

        If mapped shards fill the cache, the shard is read directly from the source, with a warning.
        """
        if name not in self.entries:
            with self.source.open(name, part) as stream:
                yield stream
            return
        try:
            file = self.cache.open(self.entries[name], self.source, digest=name not in self._checked)
            self._checked.add(name)
        except CacheFullError as error:
            warnings.warn(f"shard read without the cache: {error}", stacklevel=2)
            with self.source.open(name, part) as stream:
                yield stream
            return
        with file:
            file.seek(part.start)
            yield FileStream(file, self.address(name))

    def open_to_map(self, entry: ShardEntry) -> ShardFile:
        """Open the copy of a shard to be mapped, and check its digest. It is not evicted while it is mapped.

        Raises:
            StoreError, BudgetError: As for :meth:`ShardCache.open`.
        """
        return self.cache.open(entry, self.source, digest=True, mapped=True)


def _copy(entry: ShardEntry, source: ShardSource, file: IO[bytes], stopped: Callable[[], bool]) -> None:
    """Write a shard to a file and check its size and digest.

    Raises:
        StoreError: The source fails, or sends other bytes.
        _FetchStoppedError: ``stopped()`` returned True.
    """
    address = source.address(entry.name)
    digest, size = hashlib.sha256(), 0
    with source.open(entry.name, ByteRange(0, None, entry.bytes)) as stream:
        while size <= entry.bytes and (data := stream.read(_CHUNK)):
            if stopped():
                raise _FetchStoppedError
            digest.update(data)
            file.write(data)
            size += len(data)
        if size <= entry.bytes:
            stream.finish()
    if size != entry.bytes:
        found = f"{'more' if size > entry.bytes else size} bytes"
        raise altered_shard_error(address, found, entry.bytes)
    if digest.hexdigest() != entry.sha256:
        raise altered_shard_error(address, f"SHA-256 {digest.hexdigest()}", entry.sha256)
    file.flush()
    os.fsync(file.fileno())


def _never() -> bool:
    return False


def _mark_used(path: Path) -> None:
    now = time.time_ns()
    os.utime(path, ns=(now, now))


# --- locks ----------------------------------------------------------------------------------------------


@contextmanager
def _locked(path: Path, *, wait: bool, remove: bool = True) -> Iterator[bool]:
    """Create a lock file, lock it, and remove it afterwards.

    Unlocks explicitly, because a forked child inherits the open file and would keep the lock.

    Args:
        path: Path of the lock file.
        wait: Whether to wait while another process holds the lock.
        remove: Whether to remove the file afterwards. Default True.

    Yields:
        True if the lock is held; False if another process holds it and ``wait`` is False, or if the file
        was removed by the process waited for.
    """
    with path.open("ab") as file:
        try:
            lock_file(file, wait=wait)
        except BlockingIOError:
            yield False
            return
        is_held = False
        try:
            is_held = _is_same_file(file, path)
            yield is_held
        finally:
            if is_held and remove:
                remove_locked(file, path)
            else:
                unlock_file(file)


def _remove_if_unlocked(path: Path) -> bool:
    """Remove a file unless another process has locked it; return whether it no longer exists."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return True
    with file:
        try:
            lock_file(file)
        except BlockingIOError:
            return False
        if _is_same_file(file, path):
            remove_locked(file, path)
        else:
            unlock_file(file)
    return not path.exists()  # on Windows, a file that is open elsewhere stays


def _lock_shared(file: IO[bytes], path: Path) -> bool:
    """Protect an open copy from eviction; close it and return False if it has been evicted already."""
    lock_file(file, shared=True, wait=True)
    if _is_same_file(file, path):
        return True
    file.close()
    return False


def _is_same_file(file: IO[bytes], path: Path) -> bool:
    """Return whether a path still leads to a file that was opened there."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
