"""The stage that finds the files of a directory: those that are there, then new ones when they are complete.

Looks at names, sizes and times; never opens a file.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from watchfiles import Change

from hexdata.checks import as_tuple, check_count
from hexdata.errors import ConfigError, InputError
from hexdata.live.chunk import SCANNED, FoundFile, Reading
from hexdata.live.directory import Directory, Folders, Look, Seen, names_in_temporary, split_name
from hexdata.live.directory_watch import GONE_SECONDS, Changes, DirectoryWatch
from hexdata.live.hub import Hub
from hexdata.live.known_files import KnownFiles
from hexdata.live.queue import Queue
from hexdata.live.stage import Stage, Worker
from hexdata.text import printable

__all__ = ["PATTERNS", "FilePathProvider"]

PATTERNS: Final = ("*.trmph", "*.trmph.gz", "*.pkl.gz", "*.pkl", "*.tar")
"""Names of the files that ``formats`` can open."""


@dataclass
class _Candidate:
    """A file that is there and not yet known to be complete."""

    look: Look
    since: float
    """When it was first seen to look so, on the clock of ``time.monotonic``."""
    settle: float
    """Seconds after which it is complete."""


class FilePathProvider(Stage):
    """Gives a :class:`FoundFile` for each file below a directory, once, when it is complete.

    First come the files that are there, in order of their names (relative to the directory, as text), then
    ``SCANNED``, then new ones as they come. A name comes once: a file that is written again under a name that
    has come is counted as ``rewritten`` and does not come. With ``watch=False`` the files that are there come
    as they are, without ``SCANNED``, and then the stage ends.

    A file is complete when it has the same size and time for ``settle`` seconds, however it came to be there;
    or at once, where a temporary name in which its name stands as a whole went away in the same moment, as
    when ``.NAME.tmp`` is renamed to ``NAME``. An empty file is not complete. One that is gone before it is
    complete is forgotten (``vanished``). Names that begin with a dot, of files or folders, are never looked
    at, nor those that end in ``TEMPORARY``. What is no regular file, a pipe or a device, never comes.

    Where a later stage tells how far it reads each file, one that it could not use, or not open, comes
    again when it has changed (``again``); so does a text that was not renamed in, for what was added to it.
    Each time it is complete after twice as long as before, so that a file that is written to for ever is not
    read for ever: what it gets comes later than it was written by no more than it is old.

    A folder to which links lead from within the directory is entered once, by its own name; one elsewhere by
    that of the link that was found first, for as long as that leads there.

    A file that came and has another name now, in the directory or a folder of it, does not come again
    (``moved``): its inode, size and time tell. Its old name is free for another file. One that may go on goes
    on under its new name. Another name of a file that is still there under its first one, a link, does
    not come (``linked``). A copy is another file. Where a drive has no inodes that stay, a file that
    was moved comes again.

    The system tells of changes; now and then all names are looked through besides, for those that it did not
    tell. A directory that goes, or cannot be read any more, is warned of (``gone``) and waited for; when
    it is back, all names are looked through. One that is put in its place is watched like the first.

    Remembered are the names of the files that are there, and of the last ``pool_size`` that came, whose games
    may be in the pool: 300 bytes each, and 250 more for one that is followed. A name that was forgotten
    may come again.

    Counted are ``files``, ``again``, ``moved``, ``linked``, ``rewritten`` (names), ``vanished`` and ``gone``.

    Args:
        directory: where to look, and below.
        patterns: what the name of a file matches, one of them, as ``fnmatch`` has it.
        settle: seconds.
        watch: False for the files that are there and no others.
        newest_files: of the files that are there at the start, only so many come, those whose names come
            last; None for all.
        rescan: seconds after which all names are looked through again.
        force_polling: look through the directory instead of being told of changes, where the system cannot
            tell: on network drives, say.
        pool_size: of the pool.

    Raises:
        ConfigError: an option cannot be used.
        InputError: there is no such directory.
    """

    first = True

    def __init__(
        self,
        directory: str | Path,
        *,
        patterns: Sequence[str] = PATTERNS,
        settle: float = 0.5,
        watch: bool = True,
        newest_files: int | None = None,
        rescan: float = 30.0,
        force_polling: bool = False,
        pool_size: int = 100_000,
    ) -> None:
        super().__init__()
        self.directory = Path(directory).resolve()
        if not self.directory.is_dir():
            raise InputError("no such directory", path=directory, hint="Check the path, or make it.")
        self.patterns = as_tuple(patterns)
        texts = isinstance(self.patterns, tuple) and all(isinstance(each, str) for each in self.patterns)
        if not (texts and self.patterns):
            expected = "a list of text, not empty"
            raise ConfigError("patterns cannot be used", found=repr(patterns), expected=expected)
        self.settle = _check_seconds("settle", settle)
        for name, value in (("watch", watch), ("force_polling", force_polling)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} cannot be used", found=repr(value), expected="True or False")
        self.watch = watch
        self.newest_files = None if newest_files is None else check_count("newest_files", newest_files, 0)
        self.rescan = _check_seconds("rescan", rescan)
        self.force_polling = force_polling
        self._place = Directory(self.directory, self.patterns)
        self._device: int | None = None
        """That the directory was on when it was last looked through."""
        self._gone = ""
        """Why the directory cannot be looked through; empty while it can."""
        self._known = KnownFiles(check_count("pool_size", pool_size, 1))
        self._hears = False
        """Whether a stage tells how far files were read."""
        self._read: deque[tuple[FoundFile, Reading | None, bool]] = deque()
        """What it told, and is not noted yet: a file, how far it was read, and whether it could be opened."""
        self._unread: set[str] = set()
        """Files that have changed since they came, and of which it is not told how far they were read."""
        self._candidates: dict[str, _Candidate] = {}
        self._freed: set[str] = set()
        """Names that were those of moved files, and are those of others now, which are to be considered."""
        self._is_searched = False
        """Whether files that were moved since a state was made have been looked for."""
        self._scanned = False
        self._to_come: list[str] | None = None
        """Without watching: the names still to come, the first one last; None before they are known."""

    def connect(self, hub: Hub, source: Queue[Any] | None, sink: Queue[Any]) -> None:
        """Give the stage its queues, and make the watch, which needs the hub."""
        super().connect(hub, source, sink)
        self._watch = DirectoryWatch(
            self._place, hub, rescan=self.rescan, force_polling=self.force_polling, warn=self._warn
        )

    # --- all that is there, and no more ---------------------------------------------------------------

    def work(self, worker: Worker) -> None:
        """Give the files that are there; then, unless that is all, new ones, until the pipeline stops."""
        if not self.watch:
            self._give_those_there(worker)
            return
        self.start_thread("watch", self._watch.run)
        if not self._scanned:
            self._give_first_scan(worker)
        self._give_new(worker)

    def _give_those_there(self, worker: Worker) -> None:
        if self._to_come is None:
            there = self._place.look_through(self.directory, self.hub.stopping).names
            self._to_come = self._newest(sorted(name for name in there if name not in self._known))[::-1]
        while self._to_come:
            name = self._to_come.pop()
            look = self._place.look_at(name)
            if look is None:
                self.count("vanished")
            elif not self._recognise(name, look):
                self._give(worker, name, look)

    def _newest(self, names: list[str]) -> list[str]:
        return names if self.newest_files is None else names[max(0, len(names) - self.newest_files) :]

    def _give(self, worker: Worker, name: str, look: Look, *, follow: bool = False) -> None:
        self.count("again" if name in self._known else "files")
        is_moved = name in self._known and self._known.has_moved(name)
        after = self._known.come(name, look, follow=follow and self._hears)
        self.put(worker, [FoundFile(self.directory / name, name, look.size, after, is_moved)])

    # --- new ones -------------------------------------------------------------------------------------

    def _give_first_scan(self, worker: Worker) -> None:
        """Give what is there and complete, in order; what still changes after ``settle`` seconds is new."""
        while (seen := self._see()) is None:
            self.wait_for(worker, _nothing, GONE_SECONDS)
        found = sorted(seen.names)
        kept = self._newest(found)
        for name in found[: len(found) - len(kept)]:
            self._known.skip(name, self._place.look_at(name))
        self._consider(kept)
        until = time.monotonic() + self.settle
        while self._candidates and (left := until - time.monotonic()) > 0:
            self.wait_for(worker, _nothing, left)
        self._give_complete(worker)
        if self.wait_for(worker, self._watch.stands, self.rescan) is None:
            self._see()  # nobody is to wait for a watch that does not stand; where it is gone, none can
        self._scanned = True
        self.put(worker, [SCANNED])

    def _give_new(self, worker: Worker) -> None:
        next_scan = time.monotonic() + self.rescan
        while True:
            told = self.wait_for(worker, self._watch.take, self._patience(next_scan))
            self._note_readings()
            now = time.monotonic()
            look_through = False
            if told is not None:
                changes, look_through = told
                next_scan = now if look_through else next_scan
                if self._follow(worker, changes):
                    # The folder may be watched only from now on.
                    next_scan = min(next_scan, now + self.settle)
            if now >= next_scan:
                if (seen := self._see()) is not None:
                    self._consider(sorted(seen.names), compare=look_through or not self._watch.watched)
                next_scan = now + self.rescan
            self._compare(self._unread)
            self._give_complete(worker)

    def _patience(self, next_scan: float) -> float:
        """Return for how many seconds nothing is to be done unless something is told."""
        due = min([next_scan, *(each.since + each.settle for each in self._candidates.values())])
        left = max(0.0, due - time.monotonic())
        return min(left, self.settle) if self._unread else left

    def _follow(self, worker: Worker, changes: Changes) -> bool:
        """Look at what has changed, and give files that were renamed; say whether folders appeared."""
        folders = Folders(self._place)
        renamed: dict[str | None, set[str]] = defaultdict(set)
        there: set[str] = set()
        appeared = False
        for change, text in changes:
            folder, base = os.path.split(text)
            if change == Change.deleted:
                renamed[folders.prefix(folder)].update(names_in_temporary(base))
            elif os.path.isdir(text):  # noqa: PTH112 - Path.is_dir raises where a network drive fails
                appeared = True
                there.update(self._scan(Path(text)))
            elif self._place.is_file_name(base) and (prefix := folders.prefix(folder)) is not None:
                there.add(prefix + base)
        for name in sorted(there):
            prefix, base = split_name(name)
            if name not in self._known and base in renamed.get(prefix, ()):
                self._give_renamed(worker, name)
        self._consider(there, compare=True)
        return appeared

    def _give_renamed(self, worker: Worker, name: str) -> None:
        look = self._place.look_at(name)
        if look is not None and look.size and not self._recognise(name, look):
            self._candidates.pop(name, None)
            self._give(worker, name, look)

    def _consider(self, names: Iterable[str], *, compare: bool = False) -> None:
        """Wait for files to be complete that have not come and are not waited for yet.

        Args:
            names: of files that are there.
            compare: whether to look, too, at all that have come, as where nobody tells of changes; otherwise
                only at those that are due, since the file system is asked for each.
        """
        now = time.monotonic()
        known = []
        for name in names:
            if name in self._candidates:
                continue
            if name in self._known:
                known += [name] if compare or self._known.is_due(name) else []
            elif (look := self._place.look_at(name)) is not None and not self._recognise(name, look):
                self._candidates[name] = _Candidate(look, now, self.settle)
        self._compare(known)
        freed, self._freed = self._freed, set()
        if freed:
            self._consider(freed)

    def _compare(self, names: Iterable[str]) -> None:
        """Look whether files that have come have changed, and wait for those that are to come again."""
        for name in list(names):
            self._unread.discard(name)
            if name not in self._known or name in self._candidates:
                continue
            look = self._place.look_at(name)
            if look is not None and self._recognise(name, look):
                continue
            verdict = self._known.compare(name, look)
            if verdict == "rewritten":
                self.count("rewritten")
            elif verdict == "unread":
                self._unread.add(name)
            elif verdict == "again" and look is not None:
                patience = self.settle * 2.0 ** self._known.times(name)
                self._candidates[name] = _Candidate(look, time.monotonic(), patience)

    def _give_complete(self, worker: Worker) -> None:
        """Give the candidates that have not changed for long enough, in order of their names."""
        now = time.monotonic()
        complete: list[tuple[str, Look]] = []
        for name, candidate in list(self._candidates.items()):
            look = self._place.look_at(name)
            if look is None:
                del self._candidates[name]
                self.count("vanished", name not in self._known)
            elif look != candidate.look:
                candidate.look, candidate.since = look, now
            elif now >= candidate.since + candidate.settle:
                del self._candidates[name]  # an empty one will be told of when it is written to
                if name in self._known:
                    is_new = self._known.compare(name, look) == "again"
                else:
                    is_new = not self._recognise(name, look)
                if look.size and is_new:
                    complete.append((name, look))
        for name, look in sorted(complete, key=lambda each: each[0]):
            if name in self._known or not self._recognise(name, look):  # a link to one that has just come
                self._give(worker, name, look, follow=True)

    # --- moved files ----------------------------------------------------------------------------------

    def _recognise(self, name: str, look: Look) -> bool:
        """Say whether a file is one that came under another name, which is gone: then this is its name now.

        A link to one that came is remembered, and is not to come either. A file that has changed since it
        came is to come: its content tells whether it goes on, or is another one with that inode.

        Args:
            name: under which the file was found.
            look: of the file.
        """
        old = self._known.owner(look)
        if old is None or self._known.has_inode(name, look):
            return False
        there = None if self._known.is_displaced(look) else self._place.look_at(old)
        if there is not None and there.inode == look.inode:
            if there.device != look.device or name in self._known:
                return False
            self._known.skip(name)
            self.count("linked")
            return True
        is_as_it_came = self._known.move(look, name)
        if is_as_it_came:
            self._candidates.pop(name, None)
            self.count("moved")
        if there is not None:
            self._freed.add(old)
        return is_as_it_came

    def find_moved(self, name: str) -> list[str]:
        """Return the names that the file of a state may have now, which had this one; for the pool.

        All files are looked at for that, once.
        """
        if not self._is_searched:
            self._is_searched = True
            seen = self._search(self.directory)
            for each in sorted(seen.names) if seen else ():
                if (look := self._place.look_at(each)) is not None:
                    self._recognise(each, look)
        return self._known.later_names(name)

    # --- how far files were read ----------------------------------------------------------------------

    def expect_readings(self) -> None:
        """Be promised that :meth:`was_read` or :meth:`was_not_read` comes for each file that is read."""
        self._hears = self.watch

    def was_read(self, file: FoundFile, reading: Reading | None) -> None:
        """Be told, by any thread, how far a file was read; None if it is not to come again."""
        if self._hears:
            self._read.append((file, reading, True))

    def was_not_read(self, file: FoundFile) -> None:
        """Be told, by any thread, that a file could not be opened."""
        if self._hears:
            self._read.append((file, file.after, False))

    def _note_readings(self) -> None:
        while self._read:
            file, reading, opened = self._read.popleft()
            if opened:
                self._known.was_read(file.name, reading)
            else:
                self._known.was_not_read(file.name, reading)
                if self._known.current_name(file.name) != file.name:  # it was moved while it was in a queue
                    self._unread.add(self._known.current_name(file.name))

    # --- the directory --------------------------------------------------------------------------------

    def _search(self, folder: Path) -> Seen | None:
        """Look through a folder, or the directory; None, and a warning, if the directory itself is gone.

        Raises:
            Stopped: the pipeline has stopped.
        """
        try:
            return self._place.look_through(folder, self.hub.stopping)
        except InputError as error:
            if not self._gone:
                self.count("gone")
                self._warn(f"the directory cannot be read any more ({error.found}); it is waited for")
            self._gone = str(error.found)
            return None

    def _scan(self, folder: Path) -> list[str]:
        """Return the names of the files below a folder that may be wanted, sorted; none if it is gone."""
        seen = self._search(folder)
        return sorted(seen.names) if seen else []

    def _see(self) -> Seen | None:
        """Look through all of the directory, and forget what need not be known; None if it is gone."""
        seen = self._search(self.directory)
        if seen is None:
            return None
        self._gone = ""
        device = seen.devices.get("")
        if self._device not in (None, device) and self._known.none_of(seen):
            self.count("gone")
            self._warn("another file system is there now, and none of the files that came")
        self._device = device
        for name in seen.names:  # before names that are gone are forgotten
            if len(self._known) and name not in self._known and (look := self._place.look_at(name)):
                self._recognise(name, look)
        self._known.note(seen)
        return seen

    def _warn(self, what: str) -> None:
        self.hub.warn(f"{self.directory}: {what}; games that are in the pool are drawn on")

    def notes(self) -> dict[str, Any]:
        """Return why the directory is ``gone``, while it is."""
        return {"gone": printable(f"{self.directory}: {self._gone}")} if self._gone else {}

    # --- states ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return which files have come, and, without watching, the names still to come, joined by NUL."""
        self._note_readings()
        left = None if self._to_come is None else "\0".join(self._to_come)
        return {"scanned": self._scanned, "came": self._known.state(), "left": left}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state: names that came then do not come again."""
        self._scanned = state["scanned"]
        self._known.load_state(state["came"])
        left = state["left"]
        self._to_come = None if left is None else left.split("\0") if left else []


def _nothing() -> None:
    """Succeed at nothing: what is waited for is time."""


def _check_seconds(name: str, value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < threading.TIMEOUT_MAX
    ):
        raise ConfigError(f"{name} cannot be used", found=repr(value), expected="seconds, above 0")
    return float(value)
