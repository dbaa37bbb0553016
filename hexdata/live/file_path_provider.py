"""The stage that finds the files of a directory: first the existing ones, then new ones when they are
complete.

One loop lists the directory and compares names, sizes and modification times with those of earlier listings.
No file is opened. That works in the same way on every system and on network drives. Its cost is the listing:
the loop waits 20 times as long as a listing takes, so that it uses at most a twentieth of one core.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import Any, ClassVar, Final

from hexdata.checks import as_tuple, check_positive
from hexdata.errors import ConfigError, InputError
from hexdata.formats.registry import PATTERNS
from hexdata.live.chunk import SCANNED, KnownFile
from hexdata.live.stage import Stage, Stopped, Worker
from hexdata.storage.local import walk_once
from hexdata.text import encodable, printable

_TEMPORARY: Final = (".tmp", ".part")
"""Suffixes of files that are still being written. Names that begin with a dot are temporary as well."""
_LEAST_WAIT: Final = 0.1
"""Seconds between two listings of a small directory."""
_MOST_WAIT: Final = 30.0
"""Seconds between two listings, however long one takes."""
_WAIT_PER_LISTING: Final = 20
"""Time between two listings in times of one, so that a large directory on a network drive is not busy."""
_MOST_DOUBLINGS: Final = 20
"""Number of deliveries after which the settle time of a file grows no further: it is six days by then."""


@dataclass(kw_only=True, eq=False)
class FilePathProvider(Stage):
    """Delivers the name of each complete file below a directory, and again after each change.

    A name is the path relative to the directory, with forward slashes, and UTF-8, as in a state. A file with
    another name is not found by the next stage, which counts it as bad.

    The existing files are delivered first, in order of their names (relative to the directory, as text), then
    ``SCANNED``, then new files as they are completed. With ``watch=False``, the existing files are delivered
    as they are, without ``SCANNED``, and the stage ends.

    A file is complete when two listings at least ``settle`` seconds apart find the same size and time. Before
    each further delivery of a file, this time is twice as long, so that a file that is written to constantly
    is not read constantly. The added delay does not exceed the age of the file. An empty file is not
    complete.

    Names of files or folders that begin with a dot are ignored, as are file names that end in ``_TEMPORARY``,
    and anything that is not a regular file. A folder that several links lead to is listed once.

    If the directory disappears or becomes unreadable, the stage issues a warning (``unavailable``) and waits
    until it is back. The stage keeps the names of the existing files and of the last ``pool_size`` files,
    whose games may be in the pool. A removed file is not forgotten while part of the directory cannot be
    read, or while none of the known files exists, because then a drive may be missing.

    The counts are ``files``, ``again`` (deliveries of a changed file), ``vanished`` (files removed before
    they were complete) and ``unavailable``.

    Args:
        directory: Directory to search, with its subfolders.
        patterns: ``fnmatch`` patterns. The name of a file has to match one of them. Default ``PATTERNS``.
        settle: Seconds without a change after which a file is complete. Default 0.5.
        watch: False to deliver only the files that exist at the start. Default True.
        pool_size: Number of games in the pool. Default 100,000.

    Raises:
        ConfigError: An option cannot be used.
        InputError: The directory does not exist.
    """

    directory: Path
    patterns: Sequence[str] = PATTERNS
    settle: float = 0.5
    watch: bool = True
    pool_size: int = 100_000

    first = True
    produces = "files"
    kept: ClassVar = {"_is_scanned": bool}

    def __post_init__(self) -> None:
        super().__init__()
        if not self.directory.is_dir():
            hint = "Check the path, or create the directory."
            raise InputError("no such directory", path=self.directory, hint=hint)
        patterns = as_tuple(self.patterns)
        if not (patterns and isinstance(patterns, tuple) and all(isinstance(each, str) for each in patterns)):
            raise ConfigError(f"patterns must be a list of at least one pattern, not {self.patterns!r}")
        self._matches = re.compile("|".join(map(translate, patterns))).match
        check_positive("settle", self.settle)
        self._first_listing = math.inf
        self._is_scanned = False
        """True once ``SCANNED`` was emitted."""
        self._unavailable = ""
        """Reason why the directory cannot be listed; empty if it can."""

    def work(self, worker: Worker) -> None:
        """Deliver the existing files; then, when watching, new files until the pipeline stops."""
        while True:
            start = time.monotonic()
            complete = self._find_complete(start)
            # Before files are delivered: a full queue is no part of the time of a listing.
            wait = min(_MOST_WAIT, max(_LEAST_WAIT, _WAIT_PER_LISTING * (time.monotonic() - start)))
            for name in complete:
                file = self.coordinator.files[name]
                self.count("again" if file.deliveries else "files")
                file.delivered, file.deliveries = file.stat, file.deliveries + 1
                self.put(worker, [name])
            if not self.watch:
                return
            # Existing files are unchanged for ``settle`` seconds by then, or are still being written.
            if start >= self._first_listing + self.settle and not self._is_scanned:
                self._is_scanned = True
                self.put(worker, [SCANNED])
            # Not ``time.sleep``: the pipeline may stop or be suspended in the meantime.
            self.wait_for(worker, lambda: None, wait)

    def _find_complete(self, start: float) -> list[str]:
        """List the directory from now (``start``); return the sorted names of the files to deliver."""
        files = self.coordinator.files
        found, errors = self._list()
        # Folders below it may be removed during the walk, but without the directory there is no listing.
        lost = next((error for error in errors if Path(str(error.filename)) == self.directory), None)
        reason = str(lost.strerror or lost) if lost else ""
        if reason and not self.watch:
            raise InputError("the directory cannot be read", path=self.directory, found=reason)
        if reason and not self._unavailable:
            self.count("unavailable")
            fault = f"{self.directory}: the directory can no longer be read ({reason})"
            self.coordinator.warnings.append(f"{fault}; training continues with the games in the pool")
        self._unavailable = reason
        if reason:
            return []
        # Before the new files become known: the listing may be of the empty folder of a missing drive.
        has_known_file = not found.keys().isdisjoint(files)
        now = time.monotonic()
        for name, current in found.items():
            file = files.setdefault(name, KnownFile())
            # The time in a state may be that of the clock of another process.
            if file.stat != current or self._first_listing == math.inf or file.since > now:
                file.stat, file.since = current, now
        self._first_listing = min(self._first_listing, now)
        # Missing files that were not delivered are forgotten, and missing ones before the last ``pool_size``.
        known = list(files)
        old = max(0, len(known) - self.pool_size) if has_known_file and not errors else 0
        for number, name in enumerate(known):
            if name not in found and (number < old or not files[name].deliveries):
                self.count("vanished", int(not files[name].deliveries))
                del files[name]
        complete = []
        for name in sorted(found):  # so that the order of games does not depend on the file system
            file = files[name]
            wait = self.settle * 2.0 ** min(file.deliveries, _MOST_DOUBLINGS)
            # From the end of one listing to the start of another, since it is not known when each looked.
            is_due = not self.watch or (file.stat[0] > 0 and start >= file.since + wait)
            if is_due and file.stat != file.delivered:
                complete.append(name)
        return complete

    def _list(self) -> tuple[dict[str, tuple[int, int]], list[OSError]]:
        """Return size and time of the matching files by name, and the errors of folders that were not read.

        Raises:
            Stopped: The pipeline has stopped.
        """
        found: dict[str, tuple[int, int]] = {}
        errors: list[OSError] = []
        for folder, subfolders, names in walk_once(self.directory, onerror=errors.append):
            if self.coordinator.stopping.is_set():
                raise Stopped
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            prefix = "".join(f"{part}/" for part in folder.relative_to(self.directory).parts)
            for name in names:
                # Names first, since ``stat`` may be a request to a server.
                if name.startswith(".") or name.endswith(_TEMPORARY) or not self._matches(name):
                    continue
                try:
                    each = os.stat(f"{folder}/{name}")  # noqa: PTH116 - a Path takes longer than the call
                # The file was removed or renamed since the folder was listed.
                except OSError:
                    continue
                if stat.S_ISREG(each.st_mode):
                    found[encodable(prefix + name)] = (each.st_size, each.st_mtime_ns)
        return found, errors

    def notes(self) -> dict[str, Any]:
        """Return the reason why the directory is ``unavailable``, if it is."""
        reason = printable(f"{self.directory}: {self._unavailable}")
        return {"unavailable": reason} if self._unavailable else {}

    def wait_reason(self) -> str | None:
        """Return that no file was delivered, now or before a restart; an unavailable directory is a note."""
        if self._unavailable or any(file.deliveries for file in list(self.coordinator.files.values())):
            return None
        return f"no complete game file has been found; waiting for files named {' or '.join(self.patterns)}"
