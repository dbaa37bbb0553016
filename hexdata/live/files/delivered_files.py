"""Record of the files that the first stage has delivered: names, inodes, and how far some of them were read.

It contains every delivered file that still exists and a limited number of removed ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

import numpy as np

from hexdata.live.chunk import NOTHING_READ, ReadProgress
from hexdata.live.files.scan import DirectoryScan, FileStat

__all__ = ["DeliveredFiles", "FileChange"]

FileChange = Literal["same", "rewritten", "unread", "again"]
"""Result of a comparison of a delivered file with its current size and time: unchanged or not compared
("same"); replaced by another file of that name ("rewritten"); changed, but its last reading is not reported
yet ("unread"); changed, and to be delivered again ("again")."""

_DIGEST: Final = len(NOTHING_READ.digest)
_SCANS_AFTER_READING: Final = 2
"""Number of scans after a reading that compare the file, even if no change of it was reported. The second
scan is later than the reading by at least the interval between scans, so the resolution of the clock does not
matter."""
_NONE: Final = -1
"""In a state: no number. No hash has this value."""


@dataclass(slots=True)
class _Growth:
    """Record of a file that may grow."""

    progress: ReadProgress | None = None
    """Progress of its last reading; None until that is reported."""
    deliveries: int = 1
    """Number of times it was delivered under its name, or under an earlier name from which it was moved
    unchanged."""
    scans: int = 0
    """Number of scans that found the file since its last reading, counted up to the number needed."""


@dataclass(slots=True)
class _DeliveredFile:
    stat_hash: int | None
    """Hash of size and time when the file was last delivered; None if unknown, or if the file could not be
    opened."""
    is_compared: bool = True
    """True if another size or time makes it ``rewritten``; False if that was reported, or a state was loaded.
    """
    inode: int = 0
    """Inode of the file when it was last delivered; 0 if unknown."""
    device: int | None = None
    """Device of its folder when a scan last found the file; None before the first scan."""
    growth: _Growth | None = None
    """None for a file that does not grow."""


class DeliveredFiles:
    """Names of the files that the first stage has delivered, in that order.

    Files that were removed from the directory are forgotten, except among the last ``remembered`` ones
    delivered.

    Args:
        remembered: Number of latest files that are kept, whether or not they still exist.
    """

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._files: dict[str, _DeliveredFile] = {}
        self._by_inode: dict[int, str] = {}
        """Name of each file whose inode is known."""
        self._displaced: dict[int, tuple[str, _DeliveredFile]] = {}
        """Files whose name is now used by another delivered file, by inode. Cleared at the next scan."""
        self._moved: dict[str, str] = {}
        """Earlier names of moved files, each with the next name; at most ``remembered``."""

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    def skip(self, name: str, stat: FileStat | None = None) -> None:
        """Record a file that is not delivered, also by its inode if ``stat`` is given."""
        file = self._files.setdefault(name, _DeliveredFile(None))
        if stat is not None:
            file.stat_hash, file.is_compared = hash(stat), False
            self._set_inode(name, file, stat.inode)

    def add(self, name: str, stat: FileStat, *, may_grow: bool) -> ReadProgress | None:
        """Record that a file is delivered; return the progress of its last reading, or None.

        Args:
            name: Name of the file.
            stat: Current size, time and inode.
            may_grow: True if the file may grow and has to be delivered again after a change.
        """
        file = self._files.pop(name, None) or _DeliveredFile(None)
        self._files[name] = file  # moves it to the end
        file.stat_hash, file.is_compared = hash(stat), True
        self._set_inode(name, file, stat.inode)
        if file.growth is None:
            file.growth = _Growth() if may_grow else None
            return None
        previous, file.growth.progress = file.growth.progress, None
        file.growth.deliveries += 1
        return previous

    def was_read(self, name: str, progress: ReadProgress | None) -> None:
        """Record how far a file was read; None if it is complete, or must not be delivered again.

        A bad file counts as growing from then on. A good file that was delivered as complete does not.
        """
        file = self._files.get(self.current_name(name))
        if file is None:
            return
        if progress is None:
            file.growth = None
        elif file.growth is not None:
            file.growth.progress, file.growth.scans = progress, 0
        elif not progress.games:
            file.growth = _Growth(progress)

    def was_not_read(self, name: str, previous: ReadProgress | None) -> None:
        """Record that a file could not be opened: it is delivered again, whether or not it changes.

        Args:
            name: Name of the file.
            previous: Progress of its last reading; None if there was none.
        """
        file = self._files.get(self.current_name(name))
        if file is not None:
            file.stat_hash = None
            file.growth = file.growth or _Growth()
            file.growth.progress = previous or NOTHING_READ

    def compare(self, name: str, stat: FileStat | None) -> FileChange:
        """Compare a delivered file with its current size and time. "rewritten" is returned once per name.

        Args:
            name: Name of a delivered file.
            stat: Current size, time and inode; None if the file is missing.
        """
        file = self._files[name]
        if stat is None or hash(stat) == file.stat_hash:
            return "same"
        if file.growth is not None:
            return "unread" if file.growth.progress is None else "again"
        if file.stat_hash is None or not file.is_compared:
            return "same"
        file.is_compared = False
        return "rewritten"

    def delivery_count(self, name: str) -> int:
        """Return how often a file was delivered; 0 if it does not grow."""
        file = self._files.get(name)
        return 0 if file is None or file.growth is None else file.growth.deliveries

    def is_due(self, name: str) -> bool:
        """Return whether to compare a delivered file although no change of it was reported.

        That is necessary for a file that could not be opened, and for a growing file for some scans after
        each reading. Not every change is reported, and polling misses a change within a second of the last
        one.
        """
        file = self._files.get(name)
        if file is None or file.growth is None:
            return False
        return file.stat_hash is None or file.growth.scans <= _SCANS_AFTER_READING

    def update(self, scan: DirectoryScan) -> None:
        """Update the records after a scan of the whole directory, and remove those no longer needed."""
        self._displaced.clear()
        for name, device in scan.names.items():
            file = self._files.get(name)
            if file is not None:
                file.device = device
                if file.growth is not None and file.growth.scans <= _SCANS_AFTER_READING:
                    file.growth.scans += 1
        old = islice(self._files.items(), max(0, len(self._files) - self._remembered))
        for name in [name for name, file in old if scan.is_missing(name, file.device)]:
            self._set_inode(name, self._files.pop(name), 0)

    def has_none_of(self, scan: DirectoryScan) -> bool:
        """Return whether files were delivered but the scan found none of them."""
        return bool(self._files) and self._files.keys().isdisjoint(scan.names)

    # --- moved files ----------------------------------------------------------------------------------

    def find_name(self, stat: FileStat) -> str | None:
        """Return the name under which the file with this inode was delivered; None if it was not.

        A file that may grow may have another size and time than when it was read. For any other file they
        must be equal, because the system reuses the inode of a deleted file.
        """
        name, file = self._find_inode(stat.inode)
        if file is None:
            return None
        may_grow = file.growth is not None and file.growth.progress is not None
        return name if may_grow or file.stat_hash == hash(stat) else None

    def has_inode(self, name: str, stat: FileStat) -> bool:
        """Return whether a file was delivered under this name with the same inode."""
        return name in self._files and self._files[name].inode == stat.inode

    def is_displaced(self, stat: FileStat) -> bool:
        """Return whether another delivered file now uses the name of this file."""
        return stat.inode in self._displaced

    def is_moved_and_changed(self, name: str) -> bool:
        """Return whether a delivered file was moved and changed, and has not been delivered since."""
        growth = self._files[name].growth
        return growth is not None and not growth.deliveries

    def move(self, stat: FileStat, name: str) -> bool:
        """Record the new name of a file; return whether its size and time are those of its delivery.

        If they are not, it may be another file with the inode of a deleted one. A delivered file that had the
        new name is found by its inode until the next scan.

        Args:
            stat: Current size, time and inode; :meth:`find_name` must return a name for it.
            name: New name.
        """
        old, file = self._find_inode(stat.inode)
        assert file is not None
        if self._displaced.pop(stat.inode, None) is None:
            del self._files[old]
        displaced = self._files.pop(name, None)
        if displaced is not None and displaced.inode:
            self._displaced[displaced.inode] = (name, displaced)
            self._by_inode.pop(displaced.inode, None)
        self._files[name] = file
        self._by_inode[stat.inode] = name
        self._moved.pop(old, None)
        self._moved[old] = name
        if len(self._moved) > self._remembered:
            del self._moved[next(iter(self._moved))]
        if file.stat_hash == hash(stat):
            return True
        if file.growth is not None:
            file.growth = _Growth(file.growth.progress, 0)
        return False

    def later_names(self, name: str) -> list[str]:
        """Return the names that a file had after this one, in order."""
        names: list[str] = []
        while (following := self._moved.get(names[-1] if names else name)) not in (None, name, *names):
            assert following is not None
            names.append(following)
        return names

    def current_name(self, name: str) -> str:
        """Return the current name of the file that was delivered under this name."""
        if name in self._files:
            return name
        return next((later for later in self.later_names(name) if later in self._files), name)

    def _find_inode(self, inode: int) -> tuple[str, _DeliveredFile | None]:
        if inode in self._displaced:
            return self._displaced[inode]
        name = self._by_inode.get(inode)
        return ("", None) if name is None else (name, self._files[name])

    def _set_inode(self, name: str, file: _DeliveredFile, inode: int) -> None:
        """Record the inode of a file in place of the earlier one; 0 for none."""
        if self._by_inode.get(file.inode) == name:
            del self._by_inode[file.inode]
        file.inode = inode
        if inode:
            self._by_inode[inode] = name

    # --- states ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return names, inodes, hashes of size and time, and the records of files that may grow."""
        stat_hashes = [_NONE if file.stat_hash is None else file.stat_hash for file in self._files.values()]
        moved = [name for pair in self._moved.items() for name in pair]
        growing = [(index, file) for index, file in enumerate(self._files.values()) if file.growth]
        rows = [_growth_row(index, file) for index, file in growing]
        progress = [file.growth.progress or NOTHING_READ for _, file in growing if file.growth]
        return {
            "names": _pack(self._files),
            "inodes": np.array([file.inode for file in self._files.values()], np.uint64),
            "looks": np.array(stat_hashes, np.int64),
            "moved": _pack(moved),
            "followed": np.array(rows, np.int64).reshape(-1, 5),
            "digests": b"".join(each.digest for each in progress),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state. Files in it that do not grow are not compared.

        In a state without ``inodes``, from an older version, a file that was moved since counts as new.
        """
        names = _unpack(state["names"])
        hashes = [None if each == _NONE else each for each in state.get("looks", np.empty(0)).tolist()]
        hashes += [None] * (len(names) - len(hashes))
        self._files = {name: _DeliveredFile(each, False) for name, each in zip(names, hashes, strict=True)}
        self._by_inode, self._displaced = {}, {}
        for name, inode in zip(names, state.get("inodes", np.empty(0)).tolist(), strict=False):
            self._set_inode(name, self._files[name], inode)
        moved = _unpack(state["moved"]) if "moved" in state else []
        self._moved = dict(zip(moved[::2], moved[1::2], strict=True))
        for number, (index, stat_hash, deliveries, games, records) in enumerate(state["followed"].tolist()):
            digest = state["digests"][number * _DIGEST : (number + 1) * _DIGEST]
            progress = None if games == _NONE else ReadProgress(games, records, digest)
            file = self._files[names[index]]
            file.stat_hash = None if stat_hash == _NONE else stat_hash
            file.growth = _Growth(progress, deliveries)


def _pack(names: Iterable[str]) -> bytes:
    """Return the names joined by NUL and compressed."""
    return zlib.compress("\0".join(names).encode("utf-8", "surrogateescape"), 1)


def _unpack(packed: bytes) -> list[str]:
    text = zlib.decompress(packed).decode("utf-8", "surrogateescape")
    return text.split("\0") if text else []


def _growth_row(index: int, file: _DeliveredFile) -> tuple[int, ...]:
    """Return the record of a file that may grow: index of its name, hash of size and time, number of
    deliveries, games and records.
    """
    assert file.growth is not None
    stat_hash = _NONE if file.stat_hash is None else file.stat_hash
    progress = file.growth.progress
    games, records = (_NONE, 0) if progress is None else (progress.games, progress.records)
    return index, stat_hash, file.growth.deliveries, games, records
