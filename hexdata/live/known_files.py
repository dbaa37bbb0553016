"""What the first stage remembers of the files that came: names, and how far those were read that may go on.

Holds as many names as files are there, and a bounded number besides. Never looks at the directory itself.
"""

from __future__ import annotations

import zlib
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
    """So often it came."""
    looks: int = 0
    """So often it was seen there since it was told how far it was read; not counted further than needed."""


@dataclass(slots=True)
class _Known:
    look: int | None
    """Hash of its look when it came last; None if it was not looked at then, or could not be opened."""
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

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __len__(self) -> int:
        return len(self._files)

    def skip(self, name: str) -> None:
        """Remember a file that is not to come."""
        self._files.setdefault(name, _Known(None))

    def come(self, name: str, look: Look, *, follow: bool) -> Reading | None:
        """Note that a file comes, and return how far it was read before.

        Args:
            name: of the file.
            look: of the file now.
            follow: whether it may go on, so that it is to come again when it has changed.
        """
        known = self._files.pop(name, None) or _Known(None)
        self._files[name] = known  # as the last one
        known.look = hash(look)
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
        known = self._files.get(name)
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
        known = self._files.get(name)
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
        if known.look is None:
            return "same"
        known.look = None
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
        for name, device in seen.names.items():
            known = self._files.get(name)
            if known is not None:
                known.device = device
                if known.follow is not None and known.follow.looks <= _LOOKS:
                    known.follow.looks += 1
        old = islice(self._files.items(), max(0, len(self._files) - self._remembered))
        for name in [name for name, known in old if seen.lacks(name, known.device)]:
            del self._files[name]

    def none_of(self, seen: Seen) -> bool:
        """Say whether there are files that came, and none of them was seen."""
        return bool(self._files) and self._files.keys().isdisjoint(seen.names)

    # --- states ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the names, joined by NUL and compressed, and what is known of the files that may go on."""
        text = "\0".join(self._files).encode("utf-8", "surrogateescape")
        followed = [(place, known) for place, known in enumerate(self._files.values()) if known.follow]
        rows = [_row(place, known) for place, known in followed]
        digests = [known.follow.reading or NOTHING_READ for _, known in followed if known.follow]
        return {
            "names": zlib.compress(text, 1),
            "followed": np.array(rows, np.int64).reshape(-1, 5),
            "digests": b"".join(reading.digest for reading in digests),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state. Of the files that came then, those that are not followed are not compared."""
        text = zlib.decompress(state["names"]).decode("utf-8", "surrogateescape")
        names = text.split("\0") if text else []
        self._files = {name: _Known(None) for name in names}
        for number, (place, look, times, games, records) in enumerate(state["followed"].tolist()):
            digest = state["digests"][number * _DIGEST : (number + 1) * _DIGEST]
            reading = None if games == _UNKNOWN else Reading(games, records, digest)
            follow = _Follow(reading, times)
            self._files[names[place]] = _Known(None if look == _UNKNOWN else look, follow=follow)


def _row(place: int, known: _Known) -> tuple[int, ...]:
    """Return one that may go on in numbers: its place among the names, look, times, games, records."""
    assert known.follow is not None
    look = _UNKNOWN if known.look is None else known.look
    reading = known.follow.reading
    games, records = (_UNKNOWN, 0) if reading is None else (reading.games, reading.records)
    return place, look, known.follow.times, games, records
