"""File names, sizes and times in the watched directory, for the first stage.

The module never opens a file and keeps no record of files.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import Final

from hexdata.errors import InputError
from hexdata.live.coordinator import Stopped
from hexdata.storage import walk_once

__all__ = [
    "TEMPORARY",
    "DirectoryScan",
    "FileStat",
    "PrefixCache",
    "WatchedDirectory",
    "names_in_temporary",
    "split_name",
]

TEMPORARY: Final = (".tmp", ".part")
"""Suffixes of files that are still being written. Names that begin with a dot are temporary as well."""

_64_BITS: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class FileStat:
    """Size, time, inode and device of a file. Two are equal if size and time are."""

    size: int
    mtime_ns: int
    """Time of the last modification, in nanoseconds."""
    inode: int = field(default=0, compare=False)
    """Inode as 64 bits, which a rename does not change. 0 if the file system has none."""
    device: int = field(default=0, compare=False)
    """Number of the file system."""


@dataclass
class DirectoryScan:
    """Result of a scan of the directory, or of a folder in it."""

    names: dict[str, int] = field(default_factory=dict)
    """Files that match the patterns, each with the device of its folder."""
    devices: dict[str, int] = field(default_factory=dict)
    """Scanned folders, as the prefix of the names in them, each with its device."""
    unreadable: set[str] = field(default_factory=set)
    """Folders that exist but could not be read."""

    def is_missing(self, name: str, device: int | None) -> bool:
        """Return whether a file that existed is missing. False if its folder could not be read in this scan.

        A folder counts as not read if it is unreadable or on another device than before. In the second case,
        the scan found the mount point of a network drive instead of the drive.

        Args:
            name: Name of the file.
            device: Device of its folder at an earlier scan; None if unknown.
        """
        if name in self.names:
            return False
        folder = split_name(name)[0]
        while folder not in self.devices:
            if folder in self.unreadable or not folder:
                return False
            folder = split_name(folder[:-1])[0]
        return device in (None, self.devices[folder])


class WatchedDirectory:
    """A directory whose files are named by their relative paths, with forward slashes.

    Args:
        path: Resolved path of the directory.
        patterns: ``fnmatch`` patterns. The name of a file has to match one of them.
    """

    def __init__(self, path: Path, patterns: Sequence[str]) -> None:
        self.path = path
        self._matches = re.compile("|".join(map(translate, patterns))).match
        self._outside: dict[str, str] = {}
        """Real paths of folders outside the directory that links lead to, each with the prefix of the names
        in it."""

    def stat_file(self, name: str) -> FileStat | None:
        """Return size, time and inode of a file; None if it is not a regular file or is not accessible."""
        try:
            found = (self.path / name).stat()
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return FileStat(found.st_size, found.st_mtime_ns, found.st_ino & _64_BITS, found.st_dev)

    def scan(self, folder: Path, stopping: threading.Event) -> DirectoryScan:
        """Scan the directory or a folder in it for files that match the patterns.

        Args:
            folder: Path of the folder.
            stopping: Event that ends the scan early.

        Raises:
            InputError: The directory itself cannot be read.
            Stopped: ``stopping`` was set.
        """
        scan = DirectoryScan()
        self._drop_stale_links()

        def skip_folder(error: OSError) -> None:
            folder_path = str(error.filename or "")
            if Path(folder_path) == self.path:
                reason = error.strerror or str(error)
                raise InputError("the directory can no longer be read", path=self.path, found=reason)
            scan.unreadable.add(self.prefix_of(folder_path) or folder_path)

        for current, subfolders, files in walk_once(folder, onerror=skip_folder):
            if stopping.is_set():
                raise Stopped
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            prefix = self.prefix_of(str(current))
            if prefix is None:
                continue
            try:
                device = current.stat().st_dev
            except OSError as error:
                skip_folder(error)
                continue
            scan.devices[prefix] = device
            scan.names.update((prefix + file, device) for file in files if self.is_file_name(file))
        return scan

    def prefix_of(self, folder: str) -> str | None:
        """Return the prefix of the names of files in a folder; None if its files are ignored.

        The prefix is the folder's real path relative to the directory, so that a file has one name even if
        links lead to it. A folder outside the directory gets the prefix of the link through which it was
        found first, as long as that link leads to it.
        """
        real = Path(os.path.realpath(folder))
        if real.is_relative_to(self.path):
            return _prefix(real.relative_to(self.path))
        for above in (real, *real.parents):
            link_prefix = self._outside.get(str(above))
            if link_prefix is not None:
                below = _prefix(real.relative_to(above))
                return None if below is None else link_prefix + below
        if not Path(folder).is_relative_to(self.path):
            return None
        link_prefix = _prefix(Path(folder).relative_to(self.path))
        if link_prefix is not None:
            self._outside[str(real)] = link_prefix
        return link_prefix

    def _drop_stale_links(self) -> None:
        """Remove prefixes of folders outside the directory whose link no longer leads to them."""
        for real, prefix in list(self._outside.items()):
            if os.path.realpath(self.path / prefix) != real:
                del self._outside[real]

    def is_file_name(self, name: str) -> bool:
        """Return whether a base name matches the patterns and is not temporary."""
        return not name.startswith(".") and not name.endswith(TEMPORARY) and bool(self._matches(name))

    def identity(self) -> tuple[int, int] | None:
        """Return device and inode of the directory, to detect its replacement; None if it is missing."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


class PrefixCache:
    """Cache of the name prefixes of folders."""

    def __init__(self, directory: WatchedDirectory) -> None:
        self._directory = directory
        self._prefixes: dict[str, str | None] = {}

    def prefix(self, folder: str) -> str | None:
        """Return ``WatchedDirectory.prefix_of`` for a folder."""
        if folder not in self._prefixes:
            self._prefixes[folder] = self._directory.prefix_of(folder)
        return self._prefixes[folder]


def _prefix(path: Path) -> str | None:
    """Return the prefix of names in a folder with this relative path; None if part of the path is hidden."""
    hidden = any(part.startswith(".") for part in path.parts)
    return None if hidden else "".join(f"{part}/" for part in path.parts)


def split_name(name: str) -> tuple[str, str]:
    """Return the folder part of a name, with the final slash, and the base name."""
    base = name.rpartition("/")[2]
    return name[: len(name) - len(base)], base


def names_in_temporary(base: str) -> Iterator[str]:
    """Yield the names that a temporary name contains as a whole: it may have been renamed to one of them.

    A name is contained as a whole if no letter or digit is next to it: ``.10.trmph.tmp`` contains
    ``10.trmph`` but not ``0.trmph``. Listing them is faster than comparing many new files with many removed
    ones.
    """
    if not (base.startswith(".") or base.endswith(TEMPORARY)):
        return
    offsets = range(len(base) + 1)
    starts = [offset for offset in offsets if offset == 0 or not base[offset - 1].isalnum()]
    stops = [offset for offset in offsets if offset == len(base) or not base[offset].isalnum()]
    yield from (base[start:stop] for start in starts for stop in stops if start < stop)
