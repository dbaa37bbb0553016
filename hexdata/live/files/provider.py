"""The stage that finds the files of a directory: first the existing ones, then new ones when they are
complete.

It uses names, sizes and times, and never opens a file.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hexdata.checks import as_tuple, check_count
from hexdata.errors import ConfigError, InputError
from hexdata.extras import installed_by
from hexdata.formats import PATTERNS as SOURCE_PATTERNS
from hexdata.live.chunk import SCANNED, FoundFile, ReadProgress
from hexdata.live.coordinator import Coordinator
from hexdata.live.files.delivered_files import DeliveredFiles
from hexdata.live.files.scan import (
    DirectoryScan,
    FileStat,
    PrefixCache,
    WatchedDirectory,
    names_in_temporary,
    split_name,
)
from hexdata.live.files.watcher import MISSING_POLL_SECONDS, Changes, DirectoryWatcher
from hexdata.live.queue import Queue
from hexdata.live.stage import Stage, Worker, check_seconds
from hexdata.text import printable

with installed_by("live", "live loading"):
    from watchfiles import Change

__all__ = ["PATTERNS", "FilePathProvider"]

PATTERNS: Final = (*SOURCE_PATTERNS, "*.tar")
"""Name patterns of the files that ``formats`` can open, and of shards."""


@dataclass
class _Candidate:
    """An existing file that is not yet known to be complete."""

    stat: FileStat
    since: float
    """Time of ``time.monotonic`` at which it was first found with this size and time."""
    settle: float
    """Seconds without a change after which it is complete."""


class FilePathProvider(Stage):
    """Delivers a :class:`FoundFile` once for each complete file below a directory.

    The existing files are delivered first, in order of their names (relative to the directory, as text), then
    ``SCANNED``, then new files as they are completed. Each name is delivered once. A file that is overwritten
    later is counted as ``rewritten`` and not delivered. With ``watch=False``, the existing files are
    delivered as they are, without ``SCANNED``, and the stage ends.

    A file is complete when its size and time have not changed for ``settle`` seconds. It is complete at once
    if a temporary name that contains its name was removed at the same moment, for example if ``.NAME.tmp``
    was renamed to ``NAME``. An empty file is not complete. A file that is removed before it is complete is
    counted as ``vanished``. Names of files or folders that begin with a dot are ignored, as are file names
    that end in ``TEMPORARY``. Only regular files are delivered, no pipes or devices.

    If a later stage reports how far it reads each file, some files are delivered again after a change
    (``again``): files that could not be used or opened, and texts that may grow, so that the added games are
    read. A text that was renamed to its name is complete and does not grow. Each time, the file has to be
    unchanged for twice as long as before, so that a file that is written to constantly is not read
    constantly. The added delay never exceeds the age of the file.

    A folder that links lead to is scanned once. If it is inside the directory, its own path is used;
    otherwise that of the link found first, as long as the link leads to it.

    A file that is renamed or moved within the directory after it was delivered is not delivered again
    (``moved``); it is recognised by its inode, size and time. Another file may then use the old name. A
    growing file continues under its new name. A link to a delivered file is not delivered (``linked``); a
    copy is. On a drive without stable inodes, moved files are delivered again.

    The operating system reports changes. In addition, all names are scanned at intervals, to find changes
    that were not reported. If the directory disappears or becomes unreadable, the stage issues a warning
    (``unavailable``), waits until it is back, and scans it again. A directory that replaces it is watched in
    the same way.

    The stage keeps the names of the existing files and of the last ``pool_size`` files delivered, whose games
    may be in the pool. Each name takes 300 bytes, and 250 more if the file may be delivered again. A file
    whose name has been forgotten may be delivered again.

    The counts are ``files``, ``again``, ``moved``, ``linked``, ``rewritten`` (names), ``vanished`` and
    ``unavailable``.

    Args:
        directory: Directory to search, with its subfolders.
        patterns: ``fnmatch`` patterns. The name of a file has to match one of them. Default ``PATTERNS``.
        settle: Seconds without a change after which a file is complete. Default 0.5.
        watch: False to deliver only the files that exist at the start. Default True.
        newest_files: Maximum number of files delivered from those that exist at the start: the last ones by
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
            raise InputError(
                "no such directory", path=directory, hint="Check the path, or create the directory."
            )
        self.patterns = as_tuple(patterns)
        texts = isinstance(self.patterns, tuple) and all(isinstance(each, str) for each in self.patterns)
        if not (texts and self.patterns):
            expected = "a list of at least one pattern"
            raise ConfigError("patterns cannot be used", found=repr(patterns), expected=expected)
        self.settle = check_seconds("settle", settle)
        for name, value in (("watch", watch), ("force_polling", force_polling)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} cannot be used", found=repr(value), expected="True or False")
        self.watch = watch
        self.newest_files = None if newest_files is None else check_count("newest_files", newest_files, 0)
        self.rescan = check_seconds("rescan", rescan)
        self.force_polling = force_polling
        self._root = WatchedDirectory(self.directory, self.patterns)
        self._device: int | None = None
        """Device of the directory at the last scan."""
        self._unavailable = ""
        """Reason why the directory cannot be scanned; empty if it can."""
        self._delivered = DeliveredFiles(check_count("pool_size", pool_size, 1))
        self._expects_reports = False
        """True if a stage reports how far files were read."""
        self._reports: deque[tuple[FoundFile, ReadProgress | None, bool]] = deque()
        """Reports not processed yet: the file, its progress, and whether it could be opened."""
        self._unread: set[str] = set()
        """Delivered files that have changed, and whose last reading is not reported yet."""
        self._candidates: dict[str, _Candidate] = {}
        self._freed_names: set[str] = set()
        """Old names of moved files that other files use now; these files may be new."""
        self._is_searched = False
        """True once the directory was searched for files that were moved since a state was saved."""
        self._scanned = False
        self._remaining: list[str] | None = None
        """With ``watch=False``: names not yet delivered, in reverse order; None before the scan."""

    def connect(self, coordinator: Coordinator, source: Queue[Any] | None, sink: Queue[Any]) -> None:
        """Connect the stage to its queues, and create the watcher, which needs the coordinator."""
        super().connect(coordinator, source, sink)
        self._watcher = DirectoryWatcher(
            self._root, coordinator, rescan=self.rescan, force_polling=self.force_polling, warn=self._warn
        )

    # --- existing files -------------------------------------------------------------------------------

    def work(self, worker: Worker) -> None:
        """Deliver the existing files; then, when watching, new files until the pipeline stops."""
        if not self.watch:
            self._deliver_existing(worker)
            return
        self.start_thread("watch", self._watcher.run)
        if not self._scanned:
            self._deliver_first_scan(worker)
        self._deliver_new(worker)

    def _deliver_existing(self, worker: Worker) -> None:
        if self._remaining is None:
            existing = self._root.scan(self.directory, self.coordinator.stopping).names
            self._remaining = self._newest(sorted(name for name in existing if name not in self._delivered))[
                ::-1
            ]
        while self._remaining:
            name = self._remaining.pop()
            stat = self._root.stat_file(name)
            if stat is None:
                self.count("vanished")
            elif not self._is_duplicate(name, stat):
                self._deliver(worker, name, stat)

    def _newest(self, names: list[str]) -> list[str]:
        return names if self.newest_files is None else names[max(0, len(names) - self.newest_files) :]

    def _deliver(self, worker: Worker, name: str, stat: FileStat, *, may_grow: bool = False) -> None:
        self.count("again" if name in self._delivered else "files")
        is_moved = name in self._delivered and self._delivered.is_moved_and_changed(name)
        previous = self._delivered.add(name, stat, may_grow=may_grow and self._expects_reports)
        self.put(worker, [FoundFile(self.directory / name, name, stat.size, previous, is_moved)])

    # --- new files ------------------------------------------------------------------------------------

    def _deliver_first_scan(self, worker: Worker) -> None:
        """Deliver the existing complete files in order. Files that still change after ``settle`` seconds
        count as new.
        """
        while (scan := self._scan_directory()) is None:
            self.wait_for(worker, _never, MISSING_POLL_SECONDS)
        found = sorted(scan.names)
        kept = self._newest(found)
        for name in found[: len(found) - len(kept)]:
            self._delivered.skip(name, self._root.stat_file(name))
        self._add_candidates(kept)
        until = time.monotonic() + self.settle
        while self._candidates and (left := until - time.monotonic()) > 0:
            self.wait_for(worker, _never, left)
        self._deliver_complete(worker)
        if self.wait_for(worker, self._watcher.has_started, self.rescan) is None:
            self._scan_directory()  # continue without the watcher: a missing directory cannot be watched
        self._scanned = True
        self.put(worker, [SCANNED])

    def _deliver_new(self, worker: Worker) -> None:
        next_scan = time.monotonic() + self.rescan
        while True:
            reported = self.wait_for(worker, self._watcher.take_changes, self._seconds_to_wait(next_scan))
            self._process_reports()
            now = time.monotonic()
            needs_scan = False
            if reported is not None:
                changes, needs_scan = reported
                next_scan = now if needs_scan else next_scan
                if self._process_changes(worker, changes):
                    # Files may have appeared in the folder before it was watched.
                    next_scan = min(next_scan, now + self.settle)
            if now >= next_scan:
                if (scan := self._scan_directory()) is not None:
                    self._add_candidates(
                        sorted(scan.names), compare=needs_scan or not self._watcher.is_watching
                    )
                next_scan = now + self.rescan
            self._find_changed(self._unread)
            self._deliver_complete(worker)

    def _seconds_to_wait(self, next_scan: float) -> float:
        """Return the seconds until the next action, if no change is reported."""
        due = min([next_scan, *(each.since + each.settle for each in self._candidates.values())])
        left = max(0.0, due - time.monotonic())
        return min(left, self.settle) if self._unread else left

    def _process_changes(self, worker: Worker, changes: Changes) -> bool:
        """Process changes and deliver renamed files; return whether folders appeared."""
        prefixes = PrefixCache(self._root)
        renamed: dict[str | None, set[str]] = defaultdict(set)
        existing: set[str] = set()
        appeared = False
        for change, text in changes:
            folder, base = os.path.split(text)
            if change == Change.deleted:
                renamed[prefixes.prefix(folder)].update(names_in_temporary(base))
            elif os.path.isdir(text):  # noqa: PTH112 - Path.is_dir raises where a network drive fails
                appeared = True
                existing.update(self._names_below(Path(text)))
            elif self._root.is_file_name(base) and (prefix := prefixes.prefix(folder)) is not None:
                existing.add(prefix + base)
        for name in sorted(existing):
            prefix, base = split_name(name)
            if name not in self._delivered and base in renamed.get(prefix, ()):
                self._deliver_renamed(worker, name)
        self._add_candidates(existing, compare=True)
        return appeared

    def _deliver_renamed(self, worker: Worker, name: str) -> None:
        stat = self._root.stat_file(name)
        if stat is not None and stat.size and not self._is_duplicate(name, stat):
            self._candidates.pop(name, None)
            self._deliver(worker, name, stat)

    def _add_candidates(self, names: Iterable[str], *, compare: bool = False) -> None:
        """Add files that were not delivered yet to the candidates, unless they are candidates already.

        Args:
            names: Names of existing files.
            compare: True to also compare all delivered files, needed where no changes are reported. Otherwise
                only files that are due are compared, because each comparison calls the file system.
        """
        now = time.monotonic()
        delivered = []
        for name in names:
            if name in self._candidates:
                continue
            if name in self._delivered:
                delivered += [name] if compare or self._delivered.is_due(name) else []
            elif (stat := self._root.stat_file(name)) is not None and not self._is_duplicate(name, stat):
                self._candidates[name] = _Candidate(stat, now, self.settle)
        self._find_changed(delivered)
        freed, self._freed_names = self._freed_names, set()
        if freed:
            self._add_candidates(freed)

    def _find_changed(self, names: Iterable[str]) -> None:
        """Compare delivered files with their current size and time, to find candidates to deliver again."""
        for name in list(names):
            self._unread.discard(name)
            if name not in self._delivered or name in self._candidates:
                continue
            stat = self._root.stat_file(name)
            if stat is not None and self._is_duplicate(name, stat):
                continue
            change = self._delivered.compare(name, stat)
            if change == "rewritten":
                self.count("rewritten")
            elif change == "unread":
                self._unread.add(name)
            elif change == "again" and stat is not None:
                settle = self.settle * 2.0 ** self._delivered.delivery_count(name)
                self._candidates[name] = _Candidate(stat, time.monotonic(), settle)

    def _deliver_complete(self, worker: Worker) -> None:
        """Deliver the candidates that have not changed for long enough, in order of their names."""
        now = time.monotonic()
        complete: list[tuple[str, FileStat]] = []
        for name, candidate in list(self._candidates.items()):
            stat = self._root.stat_file(name)
            if stat is None:
                del self._candidates[name]
                self.count("vanished", name not in self._delivered)
            elif stat != candidate.stat:
                candidate.stat, candidate.since = stat, now
            elif now >= candidate.since + candidate.settle:
                del self._candidates[name]  # a write to an empty file will be reported
                if name in self._delivered:
                    is_new = self._delivered.compare(name, stat) == "again"
                else:
                    is_new = not self._is_duplicate(name, stat)
                if stat.size and is_new:
                    complete.append((name, stat))
        for name, stat in sorted(complete, key=lambda each: each[0]):
            if name in self._delivered or not self._is_duplicate(name, stat):  # not a link to another
                self._deliver(worker, name, stat, may_grow=True)

    # --- moved files ----------------------------------------------------------------------------------

    def _is_duplicate(self, name: str, stat: FileStat) -> bool:
        """Return whether a file must not be delivered because it was delivered under another name.

        If the other name no longer exists, the new name is recorded; otherwise the file is a link. A file
        that has changed since it was delivered has to be delivered: its content shows whether it has grown,
        or is another file with the same inode.

        Args:
            name: Name under which the file was found.
            stat: Current size, time and inode.
        """
        old = self._delivered.find_name(stat)
        if old is None or self._delivered.has_inode(name, stat):
            return False
        other = None if self._delivered.is_displaced(stat) else self._root.stat_file(old)
        if other is not None and other.inode == stat.inode:
            if other.device != stat.device or name in self._delivered:
                return False
            self._delivered.skip(name)
            self.count("linked")
            return True
        is_unchanged = self._delivered.move(stat, name)
        if is_unchanged:
            self._candidates.pop(name, None)
            self.count("moved")
        if other is not None:
            self._freed_names.add(old)
        return is_unchanged

    def find_moved(self, name: str) -> list[str]:
        """Return the later names of a file in a state, for the pool.

        The first call examines all files in the directory.
        """
        if not self._is_searched:
            self._is_searched = True
            scan = self._try_scan(self.directory)
            for each in sorted(scan.names) if scan else ():
                if (stat := self._root.stat_file(each)) is not None:
                    self._is_duplicate(each, stat)
        return self._delivered.later_names(name)

    # --- reports of readings --------------------------------------------------------------------------

    def expect_readings(self) -> None:
        """Enable reports: :meth:`was_read` or :meth:`was_not_read` will be called for each file."""
        self._expects_reports = self.watch

    def was_read(self, file: FoundFile, progress: ReadProgress | None) -> None:
        """Report how far a file was read; None if it must not be delivered again. Any thread may call
        this.
        """
        if self._expects_reports:
            self._reports.append((file, progress, True))

    def was_not_read(self, file: FoundFile) -> None:
        """Report that a file could not be opened. Any thread may call this."""
        if self._expects_reports:
            self._reports.append((file, file.previous, False))

    def _process_reports(self) -> None:
        while self._reports:
            file, progress, opened = self._reports.popleft()
            if opened:
                self._delivered.was_read(file.name, progress)
            else:
                self._delivered.was_not_read(file.name, progress)
                if self._delivered.current_name(file.name) != file.name:  # moved while it was in a queue
                    self._unread.add(self._delivered.current_name(file.name))

    # --- the directory --------------------------------------------------------------------------------

    def _try_scan(self, folder: Path) -> DirectoryScan | None:
        """Scan a folder or the directory; warn and return None if the directory itself is missing.

        Raises:
            Stopped: The pipeline has stopped.
        """
        try:
            return self._root.scan(folder, self.coordinator.stopping)
        except InputError as error:
            if not self._unavailable:
                self.count("unavailable")
                self._warn(
                    f"the directory can no longer be read ({error.found}) and is checked until it is back"
                )
            self._unavailable = str(error.found)
            return None

    def _names_below(self, folder: Path) -> list[str]:
        """Return the sorted names of matching files below a folder; none if the directory is missing."""
        scan = self._try_scan(folder)
        return sorted(scan.names) if scan else []

    def _scan_directory(self) -> DirectoryScan | None:
        """Scan the whole directory and update the record of files; return None if it is missing."""
        scan = self._try_scan(self.directory)
        if scan is None:
            return None
        self._unavailable = ""
        device = scan.devices.get("")
        if self._device not in (None, device) and self._delivered.has_none_of(scan):
            self.count("unavailable")
            self._warn("the directory is now on another file system, without any of the files read so far")
        self._device = device
        for name in scan.names:  # before missing names are forgotten
            if len(self._delivered) and name not in self._delivered and (stat := self._root.stat_file(name)):
                self._is_duplicate(name, stat)
        self._delivered.update(scan)
        return scan

    def _warn(self, message: str) -> None:
        self.coordinator.warn(f"{self.directory}: {message}; training continues with the games in the pool")

    def notes(self) -> dict[str, Any]:
        """Return the reason why the directory is ``unavailable``, if it is."""
        return (
            {"unavailable": printable(f"{self.directory}: {self._unavailable}")} if self._unavailable else {}
        )

    # --- states ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the record of delivered files and, with ``watch=False``, the names not yet delivered, joined
        by NUL.
        """
        self._process_reports()
        remaining = None if self._remaining is None else "\0".join(self._remaining)
        return {"scanned": self._scanned, "came": self._delivered.state(), "left": remaining}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state. Names in it are not delivered again."""
        self._scanned = state["scanned"]
        self._delivered.load_state(state["came"])
        names = state["left"]
        self._remaining = None if names is None else names.split("\0") if names else []


def _never() -> None:
    """Return None, so that the caller waits for the whole timeout."""
