"""What the first stage remembers of the files that came: names, inodes, and how far some of them were read.

Holds as many names as files are there, and a bounded number besides. Never looks at the directory itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

import numpy as np

from hexdata.live.chunk import NOTHING_READ, Reading
from hexdata.live.directory import Look, Seen

__all__ = ["KnownFiles", "Verdict"]

Verdict = Literal["same", "rewritten", "unread", "again"]
"""What to make of a known file: it is as it was, or is not compared; it is another one, whose name has come;
it has changed, but how far it was read is not told yet; it has changed, and is to come again."""

_DIGEST: Final = len(NOTHING_READ.digest)
_LOOKS: Final = 2
"""So many looks through the directory compare a file that was read and may go on, whatever is told of it. The
second is later than the reading by the time between two, so that no clock is too coarse for it."""
_UNKNOWN: Final = -1
"""In a state, where there is no number; no hash is this one."""


@dataclass(slots=True)
class _Follow:
    """What is known of a file that may go on."""

    reading: Reading | None = None
    """How far it was read; None as long as nobody has told."""
    times: int = 1
    """So often it came under its name, or one before that was not changed."""
    looks: int = 0
    """So often it was seen there since it was told how far it was read; not counted further than needed."""


@dataclass(slots=True)
class _Known:
    look: int | None
    """Hash of its look when it came last; None if it was not looked at then, or could not be opened."""
    is_compared: bool = True
    """Whether another look makes it ``rewritten``: not where that was told, nor after a state was loaded."""
    inode: int = 0
    """Of the file when it came last; 0 where that is not known."""
    device: int | None = None
    """That its folder was on when it was last seen there; None before."""
    follow: _Follow | None = None
    """None for a file that was whole."""


class KnownFiles:
    """The names of the files that came, in the order in which they did.

    Forgotten are those that have left the directory, except for the last ``remembered`` ones that came, gone
    or not.

    Args:
        remembered: so many.
    """

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._files: dict[str, _Known] = {}
        self._by_inode: dict[int, str] = {}
        """The names of the files whose inode is known."""
        self._displaced: dict[int, tuple[str, _Known]] = {}
        """Files whose name another one that is known has taken, by their inodes, until the next look."""
        self._moved: dict[str, str] = {}
        """Names that files had, each with the next one; the last ``remembered``."""

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    def skip(self, name: str, look: Look | None = None) -> None:
        """Remember a file that is not to come; with its look, by its inode too."""
        known = self._files.setdefault(name, _Known(None))
        if look is not None:
            known.look, known.is_compared = hash(look), False
            self._set_inode(name, known, look.inode)

    def come(self, name: str, look: Look, *, follow: bool) -> Reading | None:
        """Note that a file comes, and return how far it was read before.

        Args:
            name: of the file.
            look: of the file now.
            follow: whether it may go on, so that it is to come again when it has changed.
        """
        known = self._files.pop(name, None) or _Known(None)
        self._files[name] = known  # as the last one
        known.look, known.is_compared = hash(look), True
        self._set_inode(name, known, look.inode)
        if known.follow is None:
            known.follow = _Follow() if follow else None
            return None
        before, known.follow.reading = known.follow.reading, None
        known.follow.times += 1
        return before

    def was_read(self, name: str, reading: Reading | None) -> None:
        """Note how far a file was read; None if all of it was there, or it is not to come again.

        A bad file is followed from then on. A good one that came as a whole is not.
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
        """Note that a file could not be opened: it is to come again, changed or not.

        Args:
            name: of the file.
            before: how far it was read earlier.
        """
        known = self._files.get(self.current_name(name))
        if known is not None:
            known.look = None
            known.follow = known.follow or _Follow()
            known.follow.reading = before or NOTHING_READ

    def compare(self, name: str, look: Look | None) -> Verdict:
        """Say what has become of a file; a name whose file is another one is told once.

        Args:
            name: of a known file.
            look: of the file now; None if it is not there.
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
        """Return how often a file has come, as far as anybody counts: 0 for one that is not followed."""
        known = self._files.get(name)
        return 0 if known is None or known.follow is None else known.follow.times

    def is_due(self, name: str) -> bool:
        """Say whether to compare a file that came though nothing is told of it.

        That is so where it could not be opened, and where it may go on and was read not long ago: not every
        change is told, and a watch that polls sees none within the second of the one before.
        """
        known = self._files.get(name)
        if known is None or known.follow is None:
            return False
        return known.look is None or known.follow.looks <= _LOOKS

    def note(self, seen: Seen) -> None:
        """Forget, after a look through the whole directory, what need not be remembered any more."""
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
        """Say whether there are files that came, and none of them was seen."""
        return bool(self._files) and self._files.keys().isdisjoint(seen.names)

    # --- moved files ----------------------------------------------------------------------------------

    def owner(self, look: Look) -> str | None:
        """Return the name under which a file came, going by its inode; None if none did.

        A file that may go on may have changed since it was read. Any other has the same size and time: the
        inode of a file that was deleted is used again.
        """
        name, known = self._at(look.inode)
        if known is None:
            return None
        may_go_on = known.follow is not None and known.follow.reading is not None
        return name if may_go_on or known.look == hash(look) else None

    def has_inode(self, name: str, look: Look) -> bool:
        """Say whether a file that was looked at came under this name, going by its inode."""
        return name in self._files and self._files[name].inode == look.inode

    def is_displaced(self, look: Look) -> bool:
        """Say whether another file that came has taken the name of this one."""
        return look.inode in self._displaced

    def has_moved(self, name: str) -> bool:
        """Say whether a known file has changed since it came, and was moved, and has not come since."""
        follow = self._files[name].follow
        return follow is not None and not follow.times

    def move(self, look: Look, name: str) -> bool:
        """Note the new name of a file, and say whether it has the size and time with which it came.

        One that has not may be another file, with the inode of one that was deleted. A file that had this
        name is found again by its inode, until the next look through the directory.

        Args:
            look: of the file; it has an :meth:`owner`.
            name: the new one.
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
        """Return the names that a file got after this one, in order."""
        found: list[str] = []
        while (following := self._moved.get(found[-1] if found else name)) not in (None, name, *found):
            assert following is not None
            found.append(following)
        return found

    def current_name(self, name: str) -> str:
        """Return the name that a file has now, which had this one when it came."""
        if name in self._files:
            return name
        return next((later for later in self.later_names(name) if later in self._files), name)

    def _at(self, inode: int) -> tuple[str, _Known | None]:
        if inode in self._displaced:
            return self._displaced[inode]
        name = self._by_inode.get(inode)
        return ("", None) if name is None else (name, self._files[name])

    def _set_inode(self, name: str, known: _Known, inode: int) -> None:
        """Note the inode of a file, and forget the one before; 0 for none."""
        if self._by_inode.get(known.inode) == name:
            del self._by_inode[known.inode]
        known.inode = inode
        if inode:
            self._by_inode[inode] = name

    # --- states ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return names, inodes and looks, and what is known of the files that may go on."""
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
        """Go on from a state. Of the files that came then, those that are not followed are not compared.

        Without ``inodes`` (before hexdata knew them), a file that was moved since is a new one.
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
    """Return names, joined by NUL and compressed."""
    return zlib.compress("\0".join(names).encode("utf-8", "surrogateescape"), 1)


def _unpack(packed: bytes) -> list[str]:
    text = zlib.decompress(packed).decode("utf-8", "surrogateescape")
    return text.split("\0") if text else []


def _row(place: int, known: _Known) -> tuple[int, ...]:
    """Return one that may go on in numbers: its place among the names, look, times, games, records."""
    assert known.follow is not None
    look = _UNKNOWN if known.look is None else known.look
    reading = known.follow.reading
    games, records = (_UNKNOWN, 0) if reading is None else (reading.games, reading.records)
    return place, look, known.follow.times, games, records
