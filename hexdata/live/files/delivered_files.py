"""Record of the files that the first stage has emitted: names, inodes, and how far some of them were read.

It contains every emitted file that still exists, and a limited number of others. It never scans the directory
itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

import numpy as np

from hexdata.live.chunk import NOTHING_READ, Reading
from hexdata.live.files.scan import Look, Seen

__all__ = ["KnownFiles", "Verdict"]

Verdict = Literal["same", "rewritten", "unread", "again"]
"""Result of a comparison of a known file with its current size and time: unchanged or not compared ("same");
replaced by another file of that name ("rewritten"); changed, but its last reading is not reported yet
("unread"); changed, and to be emitted again ("again")."""

_DIGEST: Final = len(NOTHING_READ.digest)
_LOOKS: Final = 2
"""Number of scans after a reading that compare the file, even if no change of it was reported. The second
scan is later than the reading by at least the interval between scans, so the resolution of the clock does not
matter."""
_UNKNOWN: Final = -1
"""In a state: no number. No hash has this value."""


@dataclass(slots=True)
class _Follow:
    """Record of a file that may grow."""

    reading: Reading | None = None
    """State of its last reading; None until that is reported."""
    times: int = 1
    """Number of times it was emitted under its name, or under an earlier name from which it was moved
    unchanged."""
    looks: int = 0
    """Number of scans that saw the file since its last reading, counted up to the number needed."""


@dataclass(slots=True)
class _Known:
    look: int | None
    """Hash of size and time when the file was last emitted; None if unknown, or if the file could not be
    opened."""
    is_compared: bool = True
    """True if another size or time makes it ``rewritten``; False if that was reported, or a state was loaded.
    """
    inode: int = 0
    """Inode of the file when it was last emitted; 0 if unknown."""
    device: int | None = None
    """Device of its folder when a scan last saw the file; None before the first scan."""
    follow: _Follow | None = None
    """None for a file that does not grow."""


class KnownFiles:
    """Names of the files that the first stage has emitted, in that order.

    Files that were removed from the directory are forgotten, except among the last ``remembered`` ones
    emitted.

    Args:
        remembered: Number of latest files that are kept, whether or not they still exist.
    """

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._files: dict[str, _Known] = {}
        self._by_inode: dict[int, str] = {}
        """Name of each file whose inode is known."""
        self._displaced: dict[int, tuple[str, _Known]] = {}
        """Files whose name is now used by another known file, by inode. Cleared at the next scan."""
        self._moved: dict[str, str] = {}
        """Earlier names of moved files, each with the next name; at most ``remembered``."""

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    def skip(self, name: str, look: Look | None = None) -> None:
        """Record a file that is not emitted, also by its inode if ``look`` is given."""
        known = self._files.setdefault(name, _Known(None))
        if look is not None:
            known.look, known.is_compared = hash(look), False
            self._set_inode(name, known, look.inode)

    def come(self, name: str, look: Look, *, follow: bool) -> Reading | None:
        """Record that a file is emitted; return the state of its last reading, or None.

        Args:
            name: Name of the file.
            look: Current size, time and inode.
            follow: True if the file may grow and has to be emitted again after a change.
        """
        known = self._files.pop(name, None) or _Known(None)
        self._files[name] = known  # moves it to the end
        known.look, known.is_compared = hash(look), True
        self._set_inode(name, known, look.inode)
        if known.follow is None:
            known.follow = _Follow() if follow else None
            return None
        before, known.follow.reading = known.follow.reading, None
        known.follow.times += 1
        return before

    def was_read(self, name: str, reading: Reading | None) -> None:
        """Record how far a file was read; None if it is complete, or must not be emitted again.

        A bad file is followed from then on. A good file that was emitted as complete is not.
        """
        known = self._files.get(self.current_name(name))
        if known is None:
            return
        if reading is None:
            known.follow = None
        elif known.follow is not None:
            known.follow.reading, known.follow.looks = reading, 0
        elif not reading.games:
            known.follow = _Follow(reading)

    def was_not_read(self, name: str, before: Reading | None) -> None:
        """Record that a file could not be opened: it is emitted again, whether or not it changes.

        Args:
            name: Name of the file.
            before: State of its last reading; None if there was none.
        """
        known = self._files.get(self.current_name(name))
        if known is not None:
            known.look = None
            known.follow = known.follow or _Follow()
            known.follow.reading = before or NOTHING_READ

    def compare(self, name: str, look: Look | None) -> Verdict:
        """Compare a known file with its current size and time. "rewritten" is returned once per name.

        Args:
            name: Name of a known file.
            look: Current size, time and inode; None if the file is missing.
        """
        known = self._files[name]
        if look is None or hash(look) == known.look:
            return "same"
        if known.follow is not None:
            return "unread" if known.follow.reading is None else "again"
        if known.look is None or not known.is_compared:
            return "same"
        known.is_compared = False
        return "rewritten"

    def times(self, name: str) -> int:
        """Return how often a file was emitted; 0 if it is not followed."""
        known = self._files.get(name)
        return 0 if known is None or known.follow is None else known.follow.times

    def is_due(self, name: str) -> bool:
        """Return whether to compare an emitted file although no change of it was reported.

        That is necessary for a file that could not be opened, and for a growing file for some scans after
        each reading. Not every change is reported, and polling misses a change within a second of the last
        one.
        """
        known = self._files.get(name)
        if known is None or known.follow is None:
            return False
        return known.look is None or known.follow.looks <= _LOOKS

    def note(self, seen: Seen) -> None:
        """Update the records after a scan of the whole directory, and remove those no longer needed."""
        self._displaced.clear()
        for name, device in seen.names.items():
            known = self._files.get(name)
            if known is not None:
                known.device = device
                if known.follow is not None and known.follow.looks <= _LOOKS:
                    known.follow.looks += 1
        old = islice(self._files.items(), max(0, len(self._files) - self._remembered))
        for name in [name for name, known in old if seen.lacks(name, known.device)]:
            self._set_inode(name, self._files.pop(name), 0)

    def none_of(self, seen: Seen) -> bool:
        """Return whether files were emitted but the scan saw none of them."""
        return bool(self._files) and self._files.keys().isdisjoint(seen.names)

    # --- moved files ----------------------------------------------------------------------------------

    def owner(self, look: Look) -> str | None:
        """Return the name under which the file with this inode was emitted; None if it was not.

        A file that may grow may have another size and time than when it was read. For any other file they
        must be equal, because the inode of a deleted file is used again.
        """
        name, known = self._at(look.inode)
        if known is None:
            return None
        may_go_on = known.follow is not None and known.follow.reading is not None
        return name if may_go_on or known.look == hash(look) else None

    def has_inode(self, name: str, look: Look) -> bool:
        """Return whether a file was emitted under this name with the same inode."""
        return name in self._files and self._files[name].inode == look.inode

    def is_displaced(self, look: Look) -> bool:
        """Return whether another known file now uses the name of this file."""
        return look.inode in self._displaced

    def has_moved(self, name: str) -> bool:
        """Return whether a known file was moved and changed, and has not been emitted since."""
        follow = self._files[name].follow
        return follow is not None and not follow.times

    def move(self, look: Look, name: str) -> bool:
        """Record the new name of a file; return whether its size and time are those of its emission.

        If they are not, it may be another file with the inode of a deleted one. A known file that had the new
        name is found by its inode until the next scan.

        Args:
            look: Current size, time and inode; :meth:`owner` must return a name for it.
            name: New name.
        """
        old, known = self._at(look.inode)
        assert known is not None
        if self._displaced.pop(look.inode, None) is None:
            del self._files[old]
        before = self._files.pop(name, None)
        if before is not None and before.inode:
            self._displaced[before.inode] = (name, before)
            self._by_inode.pop(before.inode, None)
        self._files[name] = known
        self._by_inode[look.inode] = name
        self._moved.pop(old, None)
        self._moved[old] = name
        if len(self._moved) > self._remembered:
            del self._moved[next(iter(self._moved))]
        if known.look == hash(look):
            return True
        if known.follow is not None:
            known.follow = _Follow(known.follow.reading, 0)
        return False

    def later_names(self, name: str) -> list[str]:
        """Return the names that a file had after this one, in order."""
        found: list[str] = []
        while (following := self._moved.get(found[-1] if found else name)) not in (None, name, *found):
            assert following is not None
            found.append(following)
        return found

    def current_name(self, name: str) -> str:
        """Return the current name of the file that was emitted under this name."""
        if name in self._files:
            return name
        return next((later for later in self.later_names(name) if later in self._files), name)

    def _at(self, inode: int) -> tuple[str, _Known | None]:
        if inode in self._displaced:
            return self._displaced[inode]
        name = self._by_inode.get(inode)
        return ("", None) if name is None else (name, self._files[name])

    def _set_inode(self, name: str, known: _Known, inode: int) -> None:
        """Record the inode of a file in place of the earlier one; 0 for none."""
        if self._by_inode.get(known.inode) == name:
            del self._by_inode[known.inode]
        known.inode = inode
        if inode:
            self._by_inode[inode] = name

    # --- states ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return names, inodes, hashes of size and time, and the records of files that may grow."""
        looks = [_UNKNOWN if known.look is None else known.look for known in self._files.values()]
        moved = [name for pair in self._moved.items() for name in pair]
        followed = [(place, known) for place, known in enumerate(self._files.values()) if known.follow]
        rows = [_row(place, known) for place, known in followed]
        digests = [known.follow.reading or NOTHING_READ for _, known in followed if known.follow]
        return {
            "names": _pack(self._files),
            "inodes": np.array([known.inode for known in self._files.values()], np.uint64),
            "looks": np.array(looks, np.int64),
            "moved": _pack(moved),
            "followed": np.array(rows, np.int64).reshape(-1, 5),
            "digests": b"".join(reading.digest for reading in digests),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state. Files in it that are not followed are not compared.

        In a state without ``inodes``, from an older version, a file that was moved since counts as new.
        """
        names = _unpack(state["names"])
        looks = [None if look == _UNKNOWN else look for look in state.get("looks", np.empty(0)).tolist()]
        looks += [None] * (len(names) - len(looks))
        self._files = {name: _Known(look, False) for name, look in zip(names, looks, strict=True)}
        self._by_inode, self._displaced = {}, {}
        for name, inode in zip(names, state.get("inodes", np.empty(0)).tolist(), strict=False):
            self._set_inode(name, self._files[name], inode)
        moved = _unpack(state["moved"]) if "moved" in state else []
        self._moved = dict(zip(moved[::2], moved[1::2], strict=True))
        for number, (place, look, times, games, records) in enumerate(state["followed"].tolist()):
            digest = state["digests"][number * _DIGEST : (number + 1) * _DIGEST]
            reading = None if games == _UNKNOWN else Reading(games, records, digest)
            known = self._files[names[place]]
            known.look = None if look == _UNKNOWN else look
            known.follow = _Follow(reading, times)


def _pack(names: Iterable[str]) -> bytes:
    """Return the names joined by NUL and compressed."""
    return zlib.compress("\0".join(names).encode("utf-8", "surrogateescape"), 1)


def _unpack(packed: bytes) -> list[str]:
    text = zlib.decompress(packed).decode("utf-8", "surrogateescape")
    return text.split("\0") if text else []


def _row(place: int, known: _Known) -> tuple[int, ...]:
    """Return the record of a file that may grow: index of its name, look, times, games and records."""
    assert known.follow is not None
    look = _UNKNOWN if known.look is None else known.look
    reading = known.follow.reading
    games, records = (_UNKNOWN, 0) if reading is None else (reading.games, reading.records)
    return place, look, known.follow.times, games, records
