"""Watch on a directory: collects the changes that the operating system reports, until they are taken.

It does not open files and makes no decision about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from watchfiles import Change, watch

from hexdata.errors import InputError
from hexdata.live.coordinator import Hub, Stopped
from hexdata.live.files.scan import Directory

__all__ = ["GONE_SECONDS", "Changes", "DirectoryWatch"]

GONE_SECONDS: Final = 0.1
"""Interval in seconds at which a missing directory is looked for."""

Changes = set[tuple[Change, str]]
"""Set of changes: the kind, and the path it applies to."""

_GROUPING_MS: Final = 100
"""Maximum time in milliseconds in which changes are grouped."""
_QUIET_MS: Final = 25
"""Time in milliseconds without a change after which a group is complete."""
_FIRST_MS: Final = 100
"""Time in milliseconds that the watch waits for a first change before it reports that it is running."""

_CANNOT_SPELL: Final = "Unable to decode path"
"""Error text of the watch for a name that is not UTF-8."""


class DirectoryWatch:
    """Watches a directory in its own thread, which runs :meth:`run`. A directory that replaces it is watched
    too.

    Args:
        place: Directory to watch.
        hub: Hub of the pipeline.
        rescan: Seconds after which a failed watch is tried again.
        force_polling: True to poll the directory instead of using notifications of the system.
        warn: Called with a message for the trainer.
    """

    def __init__(
        self,
        place: Directory,
        hub: Hub,
        *,
        rescan: float,
        force_polling: bool,
        warn: Callable[[str], None],
    ) -> None:
        self.watched: bool | None = None
        """True if the directory is watched, False if watching failed; None before the first attempt."""
        self._place = place
        self._hub = hub
        self._rescan = rescan
        self._force_polling = force_polling
        self._warn = warn
        self._told: Changes = set()
        """Changes that have not been taken; guarded by the hub's lock."""
        self._look_through = False
        """True if all names have to be scanned; guarded by the hub's lock."""

    def stands(self) -> bool | None:
        """Return True once the watch is running and reports every later change, else None; for
        ``Hub.wait_for``.
        """
        return self._look_through or None

    def take(self) -> tuple[Changes, bool] | None:
        """Return the changes since the last call, and whether to scan all names; None if there are none. For
        ``Hub.wait_for``.
        """
        if not self._told and not self._look_through:
            return None
        told = self._told, self._look_through
        self._told, self._look_through = set(), False
        return told

    def run(self) -> None:
        """Collect changes until the pipeline stops; the target of the thread."""
        try:
            while not self._hub.stopping.is_set():
                if self._place.identity() is not None:
                    self._watch_on()
                self._hub.stopping.wait(self._rescan if self.watched is False else GONE_SECONDS)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self._hub.stop(error)

    def _watch_on(self) -> None:
        """Watch until the pipeline stops, another folder replaces the directory, or the watch fails.

        The watch fails on a name that is not UTF-8.
        """
        stands = False
        watched = self._place.identity()
        try:
            for changes in self._changes():
                self._tell(changes, look_through=not stands)
                stands, self.watched = True, True
                # A directory recreated at once may have the inode of the removed one.
                removed = (Change.deleted, str(self._place.path)) in changes
                if removed or self._place.identity() != watched:
                    self._tell(set(), look_through=True)
                    return
        except (RuntimeError, OSError) as error:  # watchfiles raises RuntimeError
            went = isinstance(error, FileNotFoundError) or self._place.identity() is None
            if not (went or _CANNOT_SPELL in str(error)):
                self._do_without(error)

    def _do_without(self, error: RuntimeError | OSError) -> None:
        """Scan all names at intervals while the directory cannot be watched; raise if it never could be.

        A temporary failure of the drive does not stop the pipeline, nor does a folder that polling may not
        read.
        """
        if self.watched is None and not self._force_polling:
            raise InputError(
                "the directory cannot be watched",
                path=self._place.path,
                found=str(error),
                hint="Use force_polling = true, or raise the system's limit of watches.",
            ) from error
        if self.watched is not False:
            now_and_then = f"is looked through every {self._rescan:g} seconds"
            self._warn(f"it cannot be watched ({error}), but {now_and_then}")
            self._tell(set(), look_through=True)
        self.watched = False

    def _changes(self) -> Iterator[Changes]:
        return watch(
            self._place.path,
            watch_filter=None,
            debounce=_GROUPING_MS,
            step=_QUIET_MS,
            rust_timeout=_FIRST_MS,
            yield_on_timeout=True,
            stop_event=self._hub.stopping,
            raise_interrupt=False,
            force_polling=self._force_polling or None,
            ignore_permission_denied=True,
        )

    def _tell(self, changes: Changes, *, look_through: bool) -> None:
        if changes or look_through:
            self._hub.change(lambda: self._add_told(changes, look_through))

    def _add_told(self, changes: Changes, look_through: bool) -> None:
        self._told |= changes
        self._look_through = self._look_through or look_through
