"""The stage that finds the files of a directory: those that are there, then new ones when they are complete.

Looks at names, sizes and times; never opens a file.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import Any, Final

from watchfiles import Change, watch

from hexdata.checks import as_tuple, check_count
from hexdata.errors import ConfigError, InputError
from hexdata.live.chunk import SCANNED, FoundFile
from hexdata.live.hub import Stopped
from hexdata.live.stage import Stage, Worker
from hexdata.store.files import walk_once

__all__ = ["PATTERNS", "TEMPORARY", "FilePathProvider"]

PATTERNS: Final = ("*.trmph", "*.trmph.gz", "*.pkl.gz", "*.pkl", "*.tar")
"""Names of the files that ``formats`` can open."""

TEMPORARY: Final = (".tmp", ".part")
"""Ends of names that a file has only while it is written; names that begin with a dot are such too."""

_GROUPING_MS: Final = 100
"""Changes are told together for so long at most, in milliseconds,"""
_QUIET_MS: Final = 25
"""and as soon as nothing has changed for so long."""
_FIRST_MS: Final = 100
"""How long the watch waits for a first change before it says that it stands."""

_GONE_SECONDS: Final = 0.1
"""How often it is looked whether a directory that is gone is back."""

_CANNOT_SPELL: Final = "Unable to decode path"
"""What the watch says of a name that is no UTF-8."""

_Look = tuple[int, int]
"""Size and modification time of a file, in nanoseconds."""


@dataclass
class _Candidate:
    """A file that is there and not yet known to be complete."""

    look: _Look
    since: float
    """When it was first seen to look so, on the clock of ``time.monotonic``."""


class FilePathProvider(Stage):
    """Gives a :class:`FoundFile` for each file below a directory, once, when it is complete.

    First come the files that are there, in order of their names (relative to the directory, as text), then
    ``SCANNED``, then new ones as they come. Each name comes once, ever: a file that is written again under a
    name that has come is counted as ``rewritten`` and does not come. With ``watch=False`` the files that are
    there come as they are, without ``SCANNED``, and then the stage ends.

    A file is complete when it has the same size and time for ``settle`` seconds, however it came to be there;
    or at once, where a temporary name in which its name stands as a whole went away in the same moment, as
    when ``.NAME.tmp`` is renamed to ``NAME``. An empty file is not complete. One that is gone before it is
    complete is forgotten (``vanished``). Names that begin with a dot, of files or folders, are never looked
    at, nor those that end in ``TEMPORARY``; what writes a file in place and pauses for longer than ``settle``
    must use such a name. What is no regular file, a pipe or a device, never comes.

    A folder to which links lead from within the directory is entered once, by its own name; one elsewhere by
    that of a link.

    The system tells of changes; now and then all names are looked through besides, for those that it did not
    tell. A directory that goes stops the pipeline when that is found out then; one that is put in its place
    before is watched like the first. Memory grows by some 300 bytes for each file that ever came.

    Counted are ``files``, ``rewritten`` (names) and ``vanished``.

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
    ) -> None:
        super().__init__()
        self.directory = Path(directory).resolve()
        if not self.directory.is_dir():
            raise InputError("no such directory", path=directory, cure="Check the path, or make it.")
        self.patterns = as_tuple(patterns)
        texts = isinstance(self.patterns, tuple) and all(isinstance(each, str) for each in self.patterns)
        if not (texts and self.patterns):
            expected = "a list of text, not empty"
            raise ConfigError("patterns cannot be used", found=repr(patterns), expected=expected)
        self.settle = _check_seconds("settle", settle)
        for name, value in (("watch", watch), ("force_polling", force_polling)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} cannot be used", found=repr(value), expected="True or False")
        self._is_wanted = re.compile("|".join(map(translate, self.patterns))).match
        self.watch = watch
        self.newest_files = None if newest_files is None else check_count("newest_files", newest_files, 0)
        self.rescan = _check_seconds("rescan", rescan)
        self.force_polling = force_polling
        self._came: dict[str, _Look | None] = {}
        """The names that have come, with their looks then; None for those that are not compared any more."""
        self._candidates: dict[str, _Candidate] = {}
        self._scanned = False
        self._to_come: list[str] | None = None
        """Without watching: the names still to come, the first one last; None before they are known."""
        self._told: set[tuple[Change, str]] = set()
        """What the watch told, and nobody looked at yet; under the hub's lock."""
        self._look_through = False
        """Whether the watch asks for all names to be looked through; under the hub's lock."""

    # --- all that is there, and no more ---------------------------------------------------------------

    def work(self, worker: Worker) -> None:
        """Give the files that are there; then, unless that is all, new ones, until the pipeline stops."""
        if not self.watch:
            self._give_those_there(worker)
            return
        self.start_thread("watch", self._watch)
        if not self._scanned:
            self._give_first_scan(worker)
        self._give_new(worker)

    def _give_those_there(self, worker: Worker) -> None:
        if self._to_come is None:
            self._to_come = self._newest(self._scan(self.directory))[::-1]
        while self._to_come:
            name = self._to_come.pop()
            look = self._look_at(name)
            if look is None:
                self.count("vanished")
            else:
                self._give(worker, name, look)

    def _newest(self, names: list[str]) -> list[str]:
        return names if self.newest_files is None else names[max(0, len(names) - self.newest_files) :]

    def _give(self, worker: Worker, name: str, look: _Look) -> None:
        self._came[name] = look
        self.count("files")
        self.put(worker, [FoundFile(self.directory / name, name, look[0])])

    def _look_at(self, name: str) -> _Look | None:
        """Return size and time of a file; None if there is no such regular file, or we may not look at it."""
        try:
            found = (self.directory / name).stat()
        except OSError:
            return None
        return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None

    # --- new ones -------------------------------------------------------------------------------------

    def _give_first_scan(self, worker: Worker) -> None:
        """Give what is there and complete, in order; what still changes after ``settle`` seconds is new."""
        found = self._scan(self.directory)
        kept = self._newest(found)
        for name in found[: len(found) - len(kept)]:
            self._came.setdefault(name, None)
        self._consider(kept)
        until = time.monotonic() + self.settle
        while self._candidates and (left := until - time.monotonic()) > 0:
            self.wait_for(worker, _nothing, left)
        self._give_complete(worker)
        while self.wait_for(worker, self._stands, self.rescan) is None:
            self._scan(self.directory)  # which says if it is gone, so that no watch can ever stand
        self._scanned = True
        self.put(worker, [SCANNED])

    def _give_new(self, worker: Worker) -> None:
        next_scan = time.monotonic() + self.rescan
        while True:
            told = self.wait_for(worker, self._take_told, self._patience(next_scan))
            now = time.monotonic()
            if told is not None:
                changes, look_through = told
                next_scan = now if look_through else next_scan
                if self._follow(worker, changes):
                    next_scan = min(
                        next_scan, now + self.settle
                    )  # the folder may be watched only from now on
            if now >= next_scan:
                self._consider(self._scan(self.directory))
                next_scan = now + self.rescan
            self._give_complete(worker)

    def _patience(self, next_scan: float) -> float:
        """Return for how many seconds nothing is to be done unless something is told."""
        due = min([next_scan, *(each.since + self.settle for each in self._candidates.values())])
        return max(0.0, due - time.monotonic())

    def _stands(self) -> bool | None:
        """Say whether the watch stands: what comes from then on is told of."""
        return self._look_through or None

    def _take_told(self) -> tuple[set[tuple[Change, str]], bool] | None:
        if not self._told and not self._look_through:
            return None
        told = self._told, self._look_through
        self._told, self._look_through = set(), False
        return told

    def _follow(self, worker: Worker, changes: set[tuple[Change, str]]) -> bool:
        """Look at what has changed, and give files that were renamed; say whether folders appeared."""
        folders = _Folders(self)
        renamed: dict[str | None, set[str]] = defaultdict(set)
        there: set[str] = set()
        appeared = False
        for change, text in changes:
            folder, base = os.path.split(text)
            if change == Change.deleted:
                renamed[folders.prefix(folder)].update(_names_in_temporary(base))
            elif (path := Path(text)).is_dir():
                appeared = True
                there.update(self._scan(path))
            elif self._is_file_name(base) and (prefix := folders.prefix(folder)) is not None:
                there.add(prefix + base)
        for name in sorted(there):
            prefix, base = _split_name(name)
            if name in self._came:
                self._compare(name, self._look_at(name))
            elif base in renamed.get(prefix, ()):
                self._give_renamed(worker, name)
        self._consider(there)
        return appeared

    def _give_renamed(self, worker: Worker, name: str) -> None:
        look = self._look_at(name)
        if look is not None and look[0]:
            self._candidates.pop(name, None)
            self._give(worker, name, look)

    def _compare(self, name: str, look: _Look | None) -> None:
        """Count a name that has come and is now another file, once."""
        before = self._came[name]
        if look is not None and before is not None and look != before:
            self._came[name] = None
            self.count("rewritten")

    def _consider(self, names: Iterable[str]) -> None:
        """Wait for files to be complete that have not come and are not waited for yet."""
        now = time.monotonic()
        for name in names:
            if name not in self._came and name not in self._candidates:
                look = self._look_at(name)
                if look is not None:
                    self._candidates[name] = _Candidate(look, now)

    def _give_complete(self, worker: Worker) -> None:
        """Give the candidates that have not changed for long enough, in order of their names."""
        now = time.monotonic()
        complete: list[tuple[str, _Look]] = []
        for name, candidate in list(self._candidates.items()):
            look = self._look_at(name)
            if look is None:
                del self._candidates[name]
                self.count("vanished")
            elif look != candidate.look:
                candidate.look, candidate.since = look, now
            elif now >= candidate.since + self.settle:
                del self._candidates[name]  # an empty one will be told of when it is written to
                if look[0]:
                    complete.append((name, look))
        for name, look in sorted(complete):
            self._give(worker, name, look)

    # --- names ----------------------------------------------------------------------------------------

    def _scan(self, folder: Path) -> list[str]:
        """Return the names of the files below a folder that may be wanted, sorted.

        Raises:
            InputError: the directory itself cannot be read.
            Stopped: the pipeline has stopped.
        """
        found: list[str] = []
        for here, subfolders, files in walk_once(folder, onerror=self._cannot_enter):
            if self.hub.stopping.is_set():
                raise Stopped
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            prefix = self.prefix_of(str(here))
            if prefix is not None:
                found += [prefix + file for file in files if self._is_file_name(file)]
        return sorted(found)

    def _cannot_enter(self, error: OSError) -> None:
        """Pass over a folder that is gone or closed to us, but not the directory itself."""
        if Path(error.filename or "") == self.directory:
            reason = error.strerror or str(error)
            raise InputError("the directory cannot be read any more", path=self.directory, found=reason)

    def prefix_of(self, folder: str) -> str | None:
        """Return what the names of the files in a folder begin with; None if they are not looked at.

        That is the folder's own place in the directory, by whatever links it was reached, so that a file has
        one name; or where it was reached, if it is elsewhere.
        """
        for path in (os.path.realpath(folder), folder):
            try:
                place = Path(path).relative_to(self.directory)
            except ValueError:
                continue
            hidden = any(part.startswith(".") for part in place.parts)
            return None if hidden else "".join(f"{part}/" for part in place.parts)
        return None

    def _is_file_name(self, name: str) -> bool:
        """Say whether files with this name, whatever their folder, are wanted."""
        return not name.startswith(".") and not name.endswith(TEMPORARY) and bool(self._is_wanted(name))

    # --- the watch ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Thread: be told of changes, and pass them on."""
        try:
            while not self.hub.stopping.is_set():
                if self.directory.is_dir():
                    self._watch_on()
                else:
                    self.hub.stopping.wait(_GONE_SECONDS)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self.hub.stop(error)

    def _watch_on(self) -> None:
        """Watch until the pipeline stops, another folder takes the directory's name, or the watch ends.

        The watch ends when a name comes that it cannot spell.
        """
        stands = False
        watched = self._identity()
        try:
            for changes in self._changes():
                self._tell(changes, look_through=not stands)
                stands = True
                if self._identity() != watched:
                    return
        except (RuntimeError, OSError) as error:  # a RuntimeError is the watch's own kind
            if not stands and _CANNOT_SPELL not in str(error) and self.directory.is_dir():
                raise InputError(
                    "the directory cannot be watched",
                    path=self.directory,
                    found=str(error),
                    cure="Use force_polling = true, or raise the system's limit of watches.",
                ) from error

    def _identity(self) -> tuple[int, int] | None:
        """Return what tells the directory from another of its name; None if it is gone."""
        try:
            found = self.directory.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _changes(self) -> Iterator[set[tuple[Change, str]]]:
        return watch(
            self.directory,
            watch_filter=None,
            debounce=_GROUPING_MS,
            step=_QUIET_MS,
            rust_timeout=_FIRST_MS,
            yield_on_timeout=True,
            stop_event=self.hub.stopping,
            raise_interrupt=False,
            force_polling=self.force_polling or None,
            ignore_permission_denied=True,
        )

    def _tell(self, changes: set[tuple[Change, str]], look_through: bool) -> None:
        if changes or look_through:
            self.hub.change(lambda: self._add_told(changes, look_through))

    def _add_told(self, changes: set[tuple[Change, str]], look_through: bool) -> None:
        self._told |= changes
        self._look_through = self._look_through or look_through

    # --- states ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return which names have come, joined by NUL, and, without watching, which are still to come."""
        left = None if self._to_come is None else "\0".join(self._to_come)
        return {"scanned": self._scanned, "came": "\0".join(self._came), "left": left}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a state: names that came then do not come again."""
        self._scanned = state["scanned"]
        self._came = dict.fromkeys(_split(state["came"]))
        self._to_come = None if state["left"] is None else _split(state["left"])


def _nothing() -> None:
    """Succeed at nothing: what is waited for is time."""


def _split(joined: str) -> list[str]:
    return joined.split("\0") if joined else []


class _Folders:
    """What the names of the files in some folders begin with; each folder is looked at once."""

    def __init__(self, provider: FilePathProvider) -> None:
        self._provider = provider
        self._known: dict[str, str | None] = {}

    def prefix(self, folder: str) -> str | None:
        """Return what ``FilePathProvider.prefix_of`` does."""
        if folder not in self._known:
            self._known[folder] = self._provider.prefix_of(folder)
        return self._known[folder]


def _split_name(name: str) -> tuple[str, str]:
    """Return the folders of a name, each with its slash, and the rest."""
    base = name.rpartition("/")[2]
    return name[: len(name) - len(base)], base


def _names_in_temporary(base: str) -> Iterator[str]:
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


def _check_seconds(name: str, value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < threading.TIMEOUT_MAX
    ):
        raise ConfigError(f"{name} cannot be used", found=repr(value), expected="seconds, above 0")
    return float(value)
