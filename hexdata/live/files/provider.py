"""The stage that finds the files of a directory: first the existing ones, then new ones when they are
complete.

It uses names, sizes and times, and never opens a file.
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
from hexdata.live.coordinator import Hub
from hexdata.live.files.delivered_files import KnownFiles
from hexdata.live.files.scan import Directory, Folders, Look, Seen, names_in_temporary, split_name
from hexdata.live.files.watcher import GONE_SECONDS, Changes, DirectoryWatch
from hexdata.live.queue import Queue
from hexdata.live.stage import Stage, Worker
from hexdata.text import printable

__all__ = ["PATTERNS", "FilePathProvider"]

PATTERNS: Final = ("*.trmph", "*.trmph.gz", "*.pkl.gz", "*.pkl", "*.tar")
"""Name patterns of the files that ``formats`` can open."""


@dataclass
class _Candidate:
    """An existing file that is not yet known to be complete."""

    look: Look
    since: float
    """Time of ``time.monotonic`` at which it was first seen with this size and time."""
    settle: float
    """Seconds without a change after which it is complete."""


class FilePathProvider(Stage):
    """Emits a :class:`FoundFile` once for each complete file below a directory.

    The existing files are emitted first, in order of their names (relative to the directory, as text), then
    ``SCANNED``, then new files as they are completed. Each name is emitted once. A file that is overwritten
    later is counted as ``rewritten`` and not emitted. With ``watch=False``, the existing files are emitted as
    they are, without ``SCANNED``, and the stage ends.

    A file is complete when its size and time have not changed for ``settle`` seconds. It is complete at once
    if a temporary name that contains its name was removed at the same moment, for example if ``.NAME.tmp``
    was renamed to ``NAME``. An empty file is not complete. A file that is removed before it is complete is
    counted as ``vanished``. Names of files or folders that begin with a dot are ignored, as are file names
    that end in ``TEMPORARY``. Only regular files are emitted, no pipes or devices.

    If a later stage reports how far it reads each file, some files are emitted again after a change
    (``again``): files that could not be used or opened, and texts that may grow, so that the added games are
    read. A text that was renamed to its name is complete and does not grow. Each time, the file has to be
    unchanged for twice as long as before, so that a file that is written to constantly is not read
    constantly. The added delay never exceeds the age of the file.

    A folder that links lead to is scanned once. If it is inside the directory, its own path is used;
    otherwise that of the link found first, as long as the link leads to it.

    A file that is renamed or moved within the directory after it was emitted is not emitted again
    (``moved``); it is recognised by its inode, size and time. Another file may then use the old name. A
    growing file continues under its new name. A link to an emitted file is not emitted (``linked``); a
    copy is. On a drive without stable inodes, moved files are emitted again.

    The operating system reports changes. In addition, all names are scanned at intervals, to find changes
    that were not reported. If the directory disappears or becomes unreadable, the stage issues a warning
    (``gone``), waits until it is back, and scans it again. A directory that replaces it is watched in the
    same way.

    The stage keeps the names of the existing files and of the last ``pool_size`` files emitted, whose games
    may be in the pool. Each name takes 300 bytes, and 250 more if the file may be emitted again. A file whose
    name has been forgotten may be emitted again.

    The counts are ``files``, ``again``, ``moved``, ``linked``, ``rewritten`` (names), ``vanished`` and
    ``gone``.

    Args:
        directory: Directory to search, with its subfolders.
        patterns: ``fnmatch`` patterns. The name of a file has to match one of them. Default ``PATTERNS``.
        settle: Seconds without a change after which a file is complete. Default 0.5.
        watch: False to emit only the files that exist at the start. Default True.
        newest_files: Maximum number of files emitted from those that exist at the start: the last ones by
            name. None (default) for all.
        rescan: Seconds between scans of all names. Default 30.
        force_polling: True to poll the directory where the system does not report changes, for example on
            network drives. Default False.
        pool_size: Number of games in the pool. Default 100,000.

    Raises:
        ConfigError: An option cannot be used.
        InputError: The directory does not exist.
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
        """Device of the directory at the last scan."""
        self._gone = ""
        """Reason why the directory cannot be scanned; empty if it can."""
        self._known = KnownFiles(check_count("pool_size", pool_size, 1))
        self._hears = False
        """True if a stage reports how far files were read."""
        self._read: deque[tuple[FoundFile, Reading | None, bool]] = deque()
        """Reports not processed yet: the file, its reading, and whether it could be opened."""
        self._unread: set[str] = set()
        """Emitted files that have changed, and whose last reading is not reported yet."""
        self._candidates: dict[str, _Candidate] = {}
        self._freed: set[str] = set()
        """Old names of moved files that other files use now, which have to be considered."""
        self._is_searched = False
        """True once the directory was searched for files that were moved since a state was saved."""
        self._scanned = False
        self._to_come: list[str] | None = None
        """With ``watch=False``: names not yet emitted, in reverse order; None before the scan."""

    def connect(self, hub: Hub, source: Queue[Any] | None, sink: Queue[Any]) -> None:
        """Connect the stage to its queues, and create the watch, which needs the hub."""
        super().connect(hub, source, sink)
        self._watch = DirectoryWatch(
            self._place, hub, rescan=self.rescan, force_polling=self.force_polling, warn=self._warn
        )

    # --- existing files -------------------------------------------------------------------------------

    def work(self, worker: Worker) -> None:
        """Emit the existing files; then, when watching, new files until the pipeline stops."""
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

    # --- new files ------------------------------------------------------------------------------------

    def _give_first_scan(self, worker: Worker) -> None:
        """Emit the existing complete files in order. Files that still change after ``settle`` seconds count
        as new.
        """
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
            self._see()  # go on without the watch; a missing directory cannot be watched
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
                    # Files may have appeared in the folder before it was watched.
                    next_scan = min(next_scan, now + self.settle)
            if now >= next_scan:
                if (seen := self._see()) is not None:
                    self._consider(sorted(seen.names), compare=look_through or not self._watch.watched)
                next_scan = now + self.rescan
            self._compare(self._unread)
            self._give_complete(worker)

    def _patience(self, next_scan: float) -> float:
        """Return the seconds until the next action, if no change is reported."""
        due = min([next_scan, *(each.since + each.settle for each in self._candidates.values())])
        left = max(0.0, due - time.monotonic())
        return min(left, self.settle) if self._unread else left

    def _follow(self, worker: Worker, changes: Changes) -> bool:
        """Process changes and emit renamed files; return whether folders appeared."""
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
        """Add files that were not emitted yet to the candidates, unless they are candidates already.

        Args:
            names: Names of existing files.
            compare: True to also compare all emitted files, needed where no changes are reported. Otherwise
                only files that are due are compared, because each comparison is a call of the file system.
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
        """Compare emitted files with their current size and time, to find candidates to emit again."""
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
        """Emit the candidates that have not changed for long enough, in order of their names."""
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
                del self._candidates[name]  # a write to an empty file will be reported
                if name in self._known:
                    is_new = self._known.compare(name, look) == "again"
                else:
                    is_new = not self._recognise(name, look)
                if look.size and is_new:
                    complete.append((name, look))
        for name, look in sorted(complete, key=lambda each: each[0]):
            if name in self._known or not self._recognise(name, look):  # not a link to another
                self._give(worker, name, look, follow=True)

    # --- moved files ----------------------------------------------------------------------------------

    def _recognise(self, name: str, look: Look) -> bool:
        """Return whether a file must not be emitted because it was emitted under another name.

        If the other name no longer exists, the new name is recorded; otherwise the file is a link. A file
        that has changed since it was emitted has to be emitted: its content shows whether it has grown, or is
        another file with the same inode.

        Args:
            name: Name under which the file was found.
            look: Current size, time and inode.
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
        """Return the later names of a file in a state, for the pool.

        The first call examines all files in the directory.
        """
        if not self._is_searched:
            self._is_searched = True
            seen = self._search(self.directory)
            for each in sorted(seen.names) if seen else ():
                if (look := self._place.look_at(each)) is not None:
                    self._recognise(each, look)
        return self._known.later_names(name)

    # --- reports of readings --------------------------------------------------------------------------

    def expect_readings(self) -> None:
        """Enable reports: :meth:`was_read` or :meth:`was_not_read` will be called for each file."""
        self._hears = self.watch

    def was_read(self, file: FoundFile, reading: Reading | None) -> None:
        """Report how far a file was read; None if it must not be emitted again. Any thread may call this."""
        if self._hears:
            self._read.append((file, reading, True))

    def was_not_read(self, file: FoundFile) -> None:
        """Report that a file could not be opened. Any thread may call this."""
        if self._hears:
            self._read.append((file, file.after, False))

    def _note_readings(self) -> None:
        while self._read:
            file, reading, opened = self._read.popleft()
            if opened:
                self._known.was_read(file.name, reading)
            else:
                self._known.was_not_read(file.name, reading)
                if self._known.current_name(file.name) != file.name:  # moved while it was in a queue
                    self._unread.add(self._known.current_name(file.name))

    # --- the directory --------------------------------------------------------------------------------

    def _search(self, folder: Path) -> Seen | None:
        """Scan a folder or the directory; warn and return None if the directory itself is missing.

        Raises:
            Stopped: The pipeline has stopped.
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
        """Return the sorted names of matching files below a folder; none if the directory is missing."""
        seen = self._search(folder)
        return sorted(seen.names) if seen else []

    def _see(self) -> Seen | None:
        """Scan the whole directory and update the record of files; return None if it is missing."""
        seen = self._search(self.directory)
        if seen is None:
            return None
        self._gone = ""
        device = seen.devices.get("")
        if self._device not in (None, device) and self._known.none_of(seen):
            self.count("gone")
            self._warn("another file system is there now, and none of the files that came")
        self._device = device
        for name in seen.names:  # before missing names are forgotten
            if len(self._known) and name not in self._known and (look := self._place.look_at(name)):
                self._recognise(name, look)
        self._known.note(seen)
        return seen

    def _warn(self, what: str) -> None:
        self.hub.warn(f"{self.directory}: {what}; games that are in the pool are drawn on")

    def notes(self) -> dict[str, Any]:
        """Return the reason why the directory is ``gone``, if it is."""
        return {"gone": printable(f"{self.directory}: {self._gone}")} if self._gone else {}

    # --- states ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the record of emitted files and, with ``watch=False``, the names not yet emitted, joined by
        NUL.
        """
        self._note_readings()
        left = None if self._to_come is None else "\0".join(self._to_come)
        return {"scanned": self._scanned, "came": self._known.state(), "left": left}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state. Names in it are not emitted again."""
        self._scanned = state["scanned"]
        self._known.load_state(state["came"])
        left = state["left"]
        self._to_come = None if left is None else left.split("\0") if left else []


def _nothing() -> None:
    """Return None, so that the caller waits for the whole timeout."""


def _check_seconds(name: str, value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < threading.TIMEOUT_MAX
    ):
        raise ConfigError(f"{name} cannot be used", found=repr(value), expected="seconds, above 0")
    return float(value)
