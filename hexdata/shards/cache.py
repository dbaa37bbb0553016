"""Local copies of remote shards, which several processes may share.

A copy is named by its SHA-256. Two stores with the same shard share one copy, and a shard that was exported
again with other content gets a new one. The cache changes only files that it created:

- ``DIGEST.tar`` is a complete shard whose digest was checked,
- ``.DIGEST.tar.NUMBER.tmp`` is a shard being fetched,
- ``XX.lock`` is locked by the process that fetches a shard whose digest begins with XX,
- ``.lock`` is locked while copies are evicted and a new one gets its final name.

The locks belong to the operating system and end with their process, so a temporary file without a lock is
abandoned. Such files are removed before a shard is fetched. Lock files stay: a lock on a file that can be
removed is easy to get wrong.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Final, TypeAlias

from hexdata.checks import check_fields, unusable
from hexdata.errors import BudgetError, ConfigError
from hexdata.shards.manifest import ShardEntry
from hexdata.shards.sources import REMOTE_CHUNK, ByteStream, ShardSource, altered_shard_error
from hexdata.storage import cache_folder, local_path, storage_of
from hexdata.storage.errors import translate_errors
from hexdata.system import locked
from hexdata.units import parse_bytes

# The folder may be any folder of the user, so nothing else in it is removed.
_COPY: Final = re.compile(r"[0-9a-f]{64}\.tar")
_UNFINISHED: Final = re.compile(r"\.([0-9a-f]{2})[0-9a-f]{62}\.tar\.\d+\.tmp")


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options for the local copies of remote shards.

    Attributes:
        cache: Folder of the local copies of remote shards. True (default): the default folder for shards in
            an object store, no cache for other sources. False or None: no cache.
        cache_size: Maximum size of the cache in bytes, or text such as "50GB", which is converted to bytes.
            Least recently used shards are evicted first. Default 50 GB.
        prefetch: In stream mode, number of shards to fetch ahead; 0 for none. None (default): the number of
            streams that the process reads, at least 2.

    Raises:
        ConfigError: A value is invalid.
    """

    cache: str | Path | bool | None = True
    cache_size: int | str = 50_000_000_000
    prefetch: int | None = None

    def __post_init__(self) -> None:
        if not (self.cache is None or isinstance(self.cache, (bool, str, Path))) or self.cache == "":
            raise unusable("cache", repr(self.cache), "a folder or None")
        # An address is text as well; it would become a local folder of that name.
        if isinstance(self.cache, str):
            folder = local_path(self.cache, "a cache of shards", "Give a folder as cache (--cache).")
            object.__setattr__(self, "cache", str(folder))
        if isinstance(self.cache_size, str):
            # The dataclass is frozen. Converted here, so that invalid text fails where it is given.
            object.__setattr__(self, "cache_size", parse_bytes(self.cache_size))
        check_fields(self, {"cache_size": 1, "prefetch": 0})


class _StoppedError(Exception):
    """A prefetch was stopped."""


@dataclass(frozen=True)
class CachedSource:
    """A source whose shards are copied into a folder when they are first needed.

    Threads and processes may use the folder at the same time.

    Attributes:
        source: Source of the shards.
        folder: Folder of the copies, created when it is first needed.
        size: Maximum size of all copies together in bytes. Least recently used copies are evicted first.
            Shards that are being fetched are not counted.
        entries: The shards by name. Other files are read directly from the source.
    """

    source: ShardSource
    folder: Path
    size: int
    entries: Mapping[str, ShardEntry]
    is_local = False  # a copy is, but it may have to be fetched first
    _checked: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Shards whose copy was checked. What is read afterwards is compared with the manifest by the reader."""

    def address(self, name: str) -> str:
        """Return the address of a file at its source."""
        return self.source.address(name)

    def open(
        self, name: str, start: int = 0, stop: int | None = None, *, size: int | None = None
    ) -> ByteStream:
        """Open the copy of a shard, which is fetched first if there is none; see :meth:`ShardSource.open`.

        If several callers need the same shard, it is fetched once. An open file can be read to its end even
        if the copy is evicted. A copy that has changed is fetched again.

        Raises:
            StoreError: The source fails or sends other bytes, or the cache folder cannot be used.
            BudgetError: The disk is full.
        """
        if name not in self.entries:
            return self.source.open(name, start, stop, size=size)
        entry = self.entries[name]
        with translate_errors(self.folder):
            # The digest is compared once per process: another program may have changed the copy.
            while (file := self._open_copy(entry, name not in self._checked) or self._fetch(entry)) is None:
                pass  # another process has fetched it
        self._checked.add(name)
        file.seek(start)
        return ByteStream(self.source, name, start, file)

    def prefetch(self, name: str, stopped: Callable[[], bool]) -> None:
        """Fetch a shard that is needed soon. An existing copy is marked as used now.

        Does nothing if another process is fetching the shard.

        Args:
            name: Name of the shard.
            stopped: Called repeatedly. The fetch is abandoned once it returns True.

        Raises:
            StoreError, BudgetError: As for :meth:`open`.
        """
        with translate_errors(self.folder), suppress(_StoppedError):
            if not stopped():
                entry = self.entries[name]
                # Without the digest, which is compared when the shard is read.
                file = self._open_copy(entry, digest=False) or self._fetch(entry, stopped)
                if file is not None:
                    file.close()

    def _open_copy(self, entry: ShardEntry, digest: bool) -> BufferedReader | None:
        """Open the copy of a shard and mark it as used now; return None if it is missing or damaged."""
        path = self.folder / f"{entry.sha256}.tar"
        try:
            # Opened first and then compared, so that what is compared is what is read.
            file = path.open("rb")
        except FileNotFoundError:
            return None
        is_whole = os.fstat(file.fileno()).st_size == entry.bytes
        if is_whole and digest:
            is_whole = hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
            file.seek(0)
        if not is_whole:
            file.close()  # Windows removes no open file
            path.unlink(missing_ok=True)
            return None
        with suppress(OSError):  # of another user, on a disk that is only read, or evicted
            _mark_used(path)
        return file

    def _fetch(self, entry: ShardEntry, stopped: Callable[[], bool] | None = None) -> BufferedReader | None:
        """Fetch a shard and open its copy.

        Returns None if another process has fetched it or, during a prefetch, is fetching it.

        Args:
            entry: The shard.
            stopped: For a prefetch, as for :meth:`prefetch`; None waits for another process.

        Raises:
            StoreError: The source fails, or sends other bytes.
            _StoppedError: ``stopped()`` returned True.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        # Remove what killed processes have left, before this process locks anything. A file whose lock is
        # held is being written.
        for left in self.folder.iterdir():
            if unfinished := _UNFINISHED.fullmatch(left.name):
                with (
                    suppress(PermissionError),  # of another user
                    locked(self.folder / f"{unfinished[1]}.lock", wait=False) as is_abandoned,
                ):
                    if is_abandoned:
                        left.unlink(missing_ok=True)
        path = self.folder / f"{entry.sha256}.tar"
        with ExitStack() as locks:
            # One lock per pair of digits, so that shards are fetched in parallel but few lock files exist.
            lock = locked(self.folder / f"{entry.sha256[:2]}.lock", wait=stopped is None)
            # Another process may have fetched it while this one waited for the lock.
            if not locks.enter_context(lock) or path.exists():
                return None
            with storage_of(path).publish() as file:
                with self.source.open(entry.name, size=entry.bytes) as stream:
                    # At most one chunk too many, so that an endless source cannot fill the disk.
                    while file.tell() <= entry.bytes and (data := stream.read(REMOTE_CHUNK)):
                        if stopped is not None and stopped():
                            raise _StoppedError
                        file.write(data)
                    if file.tell() <= entry.bytes:
                        stream.finish()
                found, expected = (file.tell(), file.sha256), (entry.bytes, entry.sha256)
                if found != expected:
                    shown = ("{} bytes, SHA-256 {}".format(*each) for each in (found, expected))
                    raise altered_shard_error(self.address(entry.name), *shown)
                # Until the copy is open, no other process may evict it.
                locks.enter_context(locked(self.folder / ".lock"))
                # Before the copy gets its name, so that the copies together never exceed the size.
                self._evict(entry.bytes)
            _mark_used(path)
            return path.open("rb")

    def _evict(self, needed: int) -> None:
        """Remove the least recently used copies until there is space for one of ``needed`` bytes."""
        copies: list[tuple[int, int, Path]] = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # removed because it was damaged
                if _COPY.fullmatch(path.name):
                    status = path.stat()
                    copies.append((status.st_mtime_ns, status.st_size, path))
        used = needed + sum(size for _, size, _ in copies)
        for _, size, path in sorted(copies):
            if used > self.size:
                with suppress(PermissionError):  # open in another process, on Windows
                    path.unlink(missing_ok=True)
                    used -= size


AnySource: TypeAlias = ShardSource | CachedSource
"""A source of shards, perhaps behind a cache."""


def add_cache(source: ShardSource, entries: Sequence[ShardEntry], options: CacheOptions) -> AnySource:
    """Return a source that keeps local copies of shards, or ``source`` itself if it needs no cache.

    Args:
        source: Source of the shards.
        entries: The shards that are read.
        options: Folder and size of the cache.

    Raises:
        ConfigError: A cache is given for shards in a local folder, or a file is in its place.
        BudgetError: The cache is smaller than the largest shard.
    """
    cache = options.cache
    # By default, only shards in an object store are copied.
    if not cache or (cache is True and (source.is_local or source.folder is None)):
        return source
    if source.is_local:
        hint = "Remove the option cache (--cache)."
        raise ConfigError("shards in a local folder need no cache", path=source.folder, hint=hint)
    folder = cache_folder("shards") if cache is True else Path(cache).absolute()
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if not existing.is_dir():
        raise ConfigError("the cache is not a folder", path=existing)
    # A single shard would already exceed a smaller maximum.
    needed, size = max((entry.bytes for entry in entries), default=0), int(options.cache_size)
    if needed > size:
        hint = "Raise cache_size (--cache-size)."
        reason, expected = "the shard cache is smaller than a shard", f"at least {needed:,}"
        raise BudgetError(reason, path=folder, found=f"{size:,} bytes", expected=expected, hint=hint)
    return CachedSource(source, folder, size, {entry.name: entry for entry in entries})


def _mark_used(path: Path) -> None:
    """Set the modification time to now, in nanoseconds: the system's own clock may stand for some."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))
