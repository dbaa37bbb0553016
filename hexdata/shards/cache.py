"""Copies of shards on this machine, for loaders whose shards lie elsewhere; several processes share them.

A copy is named by its SHA-256, so the same shard of two stores is kept once, and a shard that was exported
anew is another one. Never knows what a shard holds, and never touches a file that it did not make.

There are three kinds of files: ``DIGEST.tar`` is a whole shard that was held against its digest;
``DIGEST.part`` is one on its way, of its final size from the beginning, which is how it reserves its room;
``DIGEST.lock`` is held by the process that fetches it. What is reserved and what has to go is decided by one
process at a time, which holds ``.lock``. All locks are the kernel's and end with their process; what a killed
one left behind goes when room is next asked for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import IO, Final, NamedTuple

from hexdata.errors import BudgetError, StoreError
from hexdata.shards.manifest import ShardEntry
from hexdata.shards.member_check import HINT
from hexdata.shards.source import Part, Source
from hexdata.units import format_bytes

__all__ = ["CopyFile", "NoRoomError", "ShardCache"]

CopyFile = BufferedReader | BufferedRandom
"""A shard's file, opened."""

_CHUNK: Final = 1 << 20
_OURS: Final = re.compile(r"([0-9a-f]{64})\.(tar|part)")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoRoomError(BudgetError):
    """The cache is full of shards that are mapped and cannot go."""


class _StoppedError(Exception):
    """Whoever wanted the shard beforehand wants it no more."""


class _Kept(NamedTuple):
    """A whole shard in the cache; the one that was used longest ago sorts first."""

    used: int
    name: str
    bytes: int


@dataclass(frozen=True)
class ShardCache:
    """A folder of copies, which threads and processes may use at the same time.

    Attributes:
        folder: made when it is first needed.
        size: bytes that all copies together may take. Those used longest ago make room for others, but
            for those that are mapped.
    """

    folder: Path
    size: int

    def require_size(self, entries: Iterable[ShardEntry], *, together: bool) -> None:
        """See, before anything is fetched, that each of these shards can be kept, or all of them together.

        Raises:
            BudgetError: they cannot.
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
        self, entry: ShardEntry, source: Source, *, digest: bool = False, mapped: bool = False
    ) -> CopyFile:
        """Return the copy of a shard, opened at its beginning; it is fetched if it is not there.

        Two that want the same one fetch it once. What was opened can be read to its end, whatever becomes
        of the copy.

        Args:
            entry: which shard.
            source: where it is fetched from.
            digest: hold a copy that is there against its digest once more; one that has changed is
                fetched again.
            mapped: keep the copy where it is for as long as this file is open, or a map of it.

        Raises:
            StoreError: the source does not give it, or gives something else; or the folder cannot be used.
            NoRoomError: all the room is taken by copies that are mapped.
            BudgetError: the disk is full.
        """
        with self._explained():
            while True:
                file = self._find(entry, digest) or self._fetch(entry, source)
                if file is not None and (not mapped or _hold(file, self._path(entry))):
                    return file

    def prefetch(self, entry: ShardEntry, source: Source, stopped: Callable[[], bool]) -> None:
        """Fetch a shard that will be wanted soon, unless somebody is at it; a copy counts as used now.

        Ends early once ``stopped()``, and waits for no other process.

        Raises:
            StoreError, BudgetError: as ``open``.
        """
        with self._explained(), contextlib.suppress(_StoppedError):
            file = None if stopped() else self._find(entry, digest=False)
            if file is None and not stopped():
                file = self._fetch(entry, source, stopped)
            if file is not None:
                file.close()

    # --- one shard ------------------------------------------------------------------------------------

    def _path(self, entry: ShardEntry, kind: str = "tar") -> Path:
        if not _DIGEST.fullmatch(entry.sha256):
            raise StoreError("a shard's SHA-256 is 64 hexadecimal digits", found=entry.sha256)
        return self.folder / f"{entry.sha256}.{kind}"

    def _find(self, entry: ShardEntry, digest: bool) -> CopyFile | None:
        """Return the copy, now the one used last; None if there is none, or only one that is damaged."""
        path = self._path(entry)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        with contextlib.ExitStack() as unless_whole:
            unless_whole.callback(file.close)
            whole = os.fstat(file.fileno()).st_size == entry.bytes
            if whole and digest:
                whole = hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
                file.seek(0)
            if not whole:
                with self._deciding():
                    if _is_at(file, path):
                        path.unlink()
                return None
            with contextlib.suppress(PermissionError):  # another user's: it is theirs to keep in order
                _touch(file)
            unless_whole.pop_all()
        return file

    def _fetch(
        self, entry: ShardEntry, source: Source, stopped: Callable[[], bool] | None = None
    ) -> CopyFile | None:
        """Fetch a shard; None if another has done so meanwhile, or is at it and there is no waiting."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, part, lock = (self._path(entry, kind) for kind in ("tar", "part", "lock"))
        with _locked(lock, wait=stopped is None) as is_ours:
            if not is_ours or path.exists():
                return None
            part.unlink(missing_ok=True)  # of one that was killed
            file = self._reserve(entry, wait=stopped is None)
            try:
                _copy(entry, source, file, stopped or _never)
                with self._deciding():  # nobody measures the folder while it passes from one name to another
                    _touch(file)
                    part.rename(path)
            except BaseException:
                part.unlink(missing_ok=True)
                file.close()
                raise
            file.seek(0)
            return file

    # --- room -----------------------------------------------------------------------------------------

    def _reserve(self, entry: ShardEntry, *, wait: bool) -> CopyFile:
        """Return the new part file of a shard, as large as the shard, once there is room for it."""
        part = self._path(entry, "part")
        while True:
            with self._deciding():
                fetched = self._make_room(entry)
                if fetched is None:
                    file = part.open("w+b")
                    try:
                        file.truncate(entry.bytes)
                    except BaseException:
                        file.close()
                        part.unlink()
                        raise
                    return file
            if not wait:
                raise _StoppedError
            with _locked(fetched, wait=True):  # until it has been fetched, and may go again
                pass

    def _make_room(self, entry: ShardEntry) -> Path | None:
        """Let copies go until there is room for a shard; return None, or the lock to wait for.

        Raises:
            NoRoomError: there is nothing to wait for either.
        """
        kept, fetched = self._measure()
        room = self.size - sum(one.bytes for one in kept) - sum(fetched.values()) - entry.bytes
        for one in sorted(kept):
            if room >= 0:
                break
            if _remove_unless_held(self.folder / one.name):
                room += one.bytes
        if room >= 0:
            return None
        if fetched:
            return next(iter(fetched))
        raise NoRoomError(
            "the shard cache is full of shards that are mapped",
            path=self.folder,
            found=f"{format_bytes(-room)} too little of {format_bytes(self.size)} for {entry.name}",
            hint="Raise cache_size (--cache-size), give this loader a cache of its own, or end others.",
        )

    def _measure(self) -> tuple[list[_Kept], dict[Path, int]]:
        """Return the copies, and the room reserved for those that are fetched, by their locks.

        What was left by processes that are no more is removed.
        """
        kept: list[_Kept] = []
        fetched: dict[Path, int] = {}
        for found in list(os.scandir(self.folder)):
            named = _OURS.fullmatch(found.name)
            if named is None:
                continue
            try:
                facts = found.stat()
            except FileNotFoundError:
                continue
            lock = self.folder / f"{named[1]}.lock"
            if named[2] == "tar":
                kept.append(_Kept(facts.st_mtime_ns, found.name, facts.st_size))
            elif _remove_unless_held(lock):
                # Nobody can have made it anew: that takes the lock that we decide under.
                (self.folder / found.name).unlink(missing_ok=True)
            else:
                fetched[lock] = facts.st_size
        return kept, fetched

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Be the one process that decides what is in the cache."""
        with _locked(self.folder / ".lock", wait=True, remove=False):
            yield

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what the disk says into an error of ours."""
        try:
            yield
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise BudgetError(
                    "the disk of the shard cache is full",
                    path=self.folder,
                    found=error.strerror,
                    hint="Make room there, lower cache_size (--cache-size), or give another cache (--cache).",
                ) from error
            raise StoreError(
                "the shard cache cannot be used",
                path=error.filename or self.folder,
                found=error.strerror or str(error),
                hint="Give another folder as cache (--cache), or none (--no-cache).",
            ) from error


def _copy(entry: ShardEntry, source: Source, file: IO[bytes], stopped: Callable[[], bool]) -> None:
    """Write a shard into a file, and hold it against its size and digest on the way.

    Raises:
        StoreError: the source fails, or gives something else.
        _StoppedError: ``stopped()``.
    """
    address = source.address(entry.name)
    digest, size = hashlib.sha256(), 0
    with source.open(entry.name, Part(0, None, entry.bytes)) as stream:
        while size <= entry.bytes and (data := stream.read(_CHUNK)):
            if stopped():
                raise _StoppedError
            digest.update(data)
            file.write(data)
            size += len(data)
        if size <= entry.bytes:
            stream.finish()
    if size != entry.bytes:
        raise _altered(address, f"{'more' if size > entry.bytes else size} bytes", entry.bytes)
    if digest.hexdigest() != entry.sha256:
        raise _altered(address, f"SHA-256 {digest.hexdigest()}", entry.sha256)
    file.flush()
    os.fsync(file.fileno())


def _altered(address: str, found: object, expected: object) -> StoreError:
    return StoreError("a shard is cut or altered", path=address, found=found, expected=expected, hint=HINT)


def _never() -> bool:
    return False


def _touch(file: IO[bytes]) -> None:
    now = time.time_ns()
    os.utime(file.fileno(), ns=(now, now))


# --- locks ----------------------------------------------------------------------------------------------


@contextmanager
def _locked(path: Path, *, wait: bool, remove: bool = True) -> Iterator[bool]:
    """Hold the lock that a file is, which is made for it and removed again; say whether it is held.

    It is not if another holds it and there is no waiting; nor if the one that was waited for has removed
    the file. A forked child inherits the open file: so the lock is given back in so many words.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            is_held = _is_at(file, path)
            try:
                yield is_held
            finally:
                if is_held and remove:
                    path.unlink(missing_ok=True)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _remove_unless_held(path: Path) -> bool:
    """Remove a lock's file, or a copy; return False if somebody holds it, and it stays."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return True
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if _is_at(file, path):
            path.unlink()
        fcntl.flock(file, fcntl.LOCK_UN)
        return True


def _hold(file: IO[bytes], path: Path) -> bool:
    """Keep a copy from being let go while it is open or mapped; False if that has happened already."""
    fcntl.flock(file, fcntl.LOCK_SH)
    if _is_at(file, path):
        return True
    file.close()
    return False


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Say whether a path still leads to a file that was opened there."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
