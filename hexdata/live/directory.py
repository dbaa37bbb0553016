"""A directory as the first stage looks at it: which names in it are files that are wanted.

Looks at names, sizes and times; never opens a file, and remembers no file.
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
from hexdata.live.hub import Stopped
from hexdata.store.files import walk_once

__all__ = ["TEMPORARY", "Directory", "Folders", "Look", "Seen", "names_in_temporary", "split_name"]

TEMPORARY: Final = (".tmp", ".part")
"""Ends of names that a file has only while it is written; names that begin with a dot are such too."""

_64_BITS: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Look:
    """What the file system says of a file. Two are equal if size and time are."""

    size: int
    mtime_ns: int
    """Time of the last modification, in nanoseconds."""
    inode: int = field(default=0, compare=False)
    """64 bits; stays when the file is renamed. 0 where the file system has none."""
    device: int = field(default=0, compare=False)
    """Number of the file system."""


@dataclass
class Seen:
    """What a look through the directory, or a folder of it, found."""

    names: dict[str, int] = field(default_factory=dict)
    """The files that may be wanted, each with the device that its folder is on."""
    devices: dict[str, int] = field(default_factory=dict)
    """The folders that were looked into, as the names in them begin, each with its device."""
    closed: set[str] = field(default_factory=set)
    """Those that are there and could not be looked into."""

    def lacks(self, name: str, device: int | None) -> bool:
        """Say whether a file that was there is gone: not where its folder could not be looked at just now.

        That is so where the folder is closed, or stands on another device than it did: there the place is
        seen at which a network drive is mounted, and not the drive.

        Args:
            name: of the file.
            device: that its folder was on; None where that is not known.
        """
        if name in self.names:
            return False
        folder = split_name(name)[0]
        while folder not in self.devices:
            if folder in self.closed or not folder:
                return False
            folder = split_name(folder[:-1])[0]
        return device in (None, self.devices[folder])


class Directory:
    """A directory whose files are called by their place in it, with forward slashes.

    Args:
        path: of the directory, resolved.
        patterns: what the name of a file matches, one of them, as ``fnmatch`` has it.
    """

    def __init__(self, path: Path, patterns: Sequence[str]) -> None:
        self.path = path
        self._is_wanted = re.compile("|".join(map(translate, patterns))).match
        self._elsewhere: dict[str, str] = {}
        """Folders elsewhere to which links lead, by their own paths: what names in them begin with."""

    def look_at(self, name: str) -> Look | None:
        """Return size, time and inode of a file; None if it is no regular file that we may look at."""
        try:
            found = (self.path / name).stat()
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return Look(found.st_size, found.st_mtime_ns, found.st_ino & _64_BITS, found.st_dev)

    def look_through(self, folder: Path, stopping: threading.Event) -> Seen:
        """Find the files below a folder of the directory, or of all of it, that may be wanted.

        Raises:
            InputError: the directory itself cannot be read.
            Stopped: ``stopping`` was set.
        """
        seen = Seen()
        self._forget_links()

        def pass_over(error: OSError) -> None:
            where = str(error.filename or "")
            if Path(where) == self.path:
                reason = error.strerror or str(error)
                raise InputError("the directory cannot be read any more", path=self.path, found=reason)
            seen.closed.add(self.prefix_of(where) or where)

        for here, subfolders, files in walk_once(folder, onerror=pass_over):
            if stopping.is_set():
                raise Stopped
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            prefix = self.prefix_of(str(here))
            if prefix is None:
                continue
            try:
                device = here.stat().st_dev
            except OSError as error:
                pass_over(error)
                continue
            seen.devices[prefix] = device
            seen.names.update((prefix + file, device) for file in files if self.is_file_name(file))
        return seen

    def prefix_of(self, folder: str) -> str | None:
        """Return what the names of the files in a folder begin with; None if they are not looked at.

        That is the folder's own place in the directory, by whatever links it was reached, so that a file has
        one name; if it is elsewhere, where it was reached first, for as long as that way leads there.
        """
        real = Path(os.path.realpath(folder))
        if real.is_relative_to(self.path):
            return _prefix(real.relative_to(self.path))
        for above in (real, *real.parents):
            known = self._elsewhere.get(str(above))
            if known is not None:
                below = _prefix(real.relative_to(above))
                return None if below is None else known + below
        if not Path(folder).is_relative_to(self.path):
            return None
        reached = _prefix(Path(folder).relative_to(self.path))
        if reached is not None:
            self._elsewhere[str(real)] = reached
        return reached

    def _forget_links(self) -> None:
        """Forget by what links folders elsewhere were reached that lead there no more."""
        for real, prefix in list(self._elsewhere.items()):
            if os.path.realpath(self.path / prefix) != real:
                del self._elsewhere[real]

    def is_file_name(self, name: str) -> bool:
        """Say whether files with this name, whatever their folder, are wanted."""
        return not name.startswith(".") and not name.endswith(TEMPORARY) and bool(self._is_wanted(name))

    def identity(self) -> tuple[int, int] | None:
        """Return what tells the directory from another of its name; None if it is gone."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


class Folders:
    """What the names of the files in some folders begin with; each folder is looked at once."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._known: dict[str, str | None] = {}

    def prefix(self, folder: str) -> str | None:
        """Return what ``Directory.prefix_of`` does."""
        if folder not in self._known:
            self._known[folder] = self._directory.prefix_of(folder)
        return self._known[folder]


def _prefix(place: Path) -> str | None:
    """Return what names in a folder begin with, from its place; None where a part of it is hidden."""
    hidden = any(part.startswith(".") for part in place.parts)
    return None if hidden else "".join(f"{part}/" for part in place.parts)


def split_name(name: str) -> tuple[str, str]:
    """Return the folders of a name, each with its slash, and the rest."""
    base = name.rpartition("/")[2]
    return name[: len(name) - len(base)], base


def names_in_temporary(base: str) -> Iterator[str]:
    """Yield the names that stand as a whole in a temporary one, which may have been renamed to them.

    As a whole: next to it there is neither letter nor digit, so that ``.10.trmph.tmp`` is not for
    ``0.trmph``. All are listed, since many files may come at once, and none is to be compared with all.
    """
    if not (base.startswith(".") or base.endswith(TEMPORARY)):
        return
    places = range(len(base) + 1)
    starts = [place for place in places if place == 0 or not base[place - 1].isalnum()]
    stops = [place for place in places if place == len(base) or not base[place].isalnum()]
    yield from (base[start:stop] for start in starts for stop in stops if start < stop)
