"""Watcher of a directory: collects the changes that the operating system reports.

It never opens a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from hexdata.errors import InputError
from hexdata.extras import installed_by
from hexdata.live.coordinator import Coordinator, Stopped
from hexdata.live.files.scan import WatchedDirectory

with installed_by("live", "live loading"):
    from watchfiles import Change, watch

__all__ = ["MISSING_POLL_SECONDS", "Changes", "DirectoryWatcher"]

MISSING_POLL_SECONDS: Final = 0.1
"""Seconds between two checks whether a missing directory is back."""

Changes = set[tuple[Change, str]]
"""Set of changes: the kind, and the path it applies to."""

_GROUPING_MS: Final = 100
"""Maximum time in milliseconds in which changes are grouped."""
_QUIET_MS: Final = 25
"""Time in milliseconds without a change after which a group is complete."""
_FIRST_MS: Final = 100
"""Time in milliseconds that the watcher waits for a first change before it reports that it is running."""

_UNDECODABLE: Final = "Unable to decode path"
"""Error text of watchfiles for a name that is not UTF-8."""


class DirectoryWatcher:
    """Watches a directory in its own thread, which runs :meth:`run`. A directory that replaces it is watched
    too.

    Args:
        directory: Directory to watch.
        coordinator: Coordinator of the pipeline.
        rescan: Seconds after which a failed watch is tried again.
        force_polling: True to poll the directory instead of using notifications of the system.
        warn: Called with a message for the trainer.
    """

    def __init__(
        self,
        directory: WatchedDirectory,
        coordinator: Coordinator,
        *,
        rescan: float,
        force_polling: bool,
        warn: Callable[[str], None],
    ) -> None:
        self.is_watching: bool | None = None
        """True if the directory is watched, False if watching failed; None before the first attempt."""
        self._directory = directory
        self._coordinator = coordinator
        self._rescan = rescan
        self._force_polling = force_polling
        self._warn = warn
        self._changes: Changes = set()
        """Changes that have not been taken; guarded by the coordinator's lock."""
        self._needs_scan = False
        """True if all names have to be scanned; guarded by the coordinator's lock."""

    def has_started(self) -> bool | None:
        """Return True once the watcher reports every later change, otherwise None.

        This is an attempt for ``Coordinator.wait_for``.
        """
        return self._needs_scan or None

    def take_changes(self) -> tuple[Changes, bool] | None:
        """Return the changes since the last call, and whether to scan all names; None if there are none.

        This is an attempt for ``Coordinator.wait_for``.
        """
        if not self._changes and not self._needs_scan:
            return None
        changes = self._changes, self._needs_scan
        self._changes, self._needs_scan = set(), False
        return changes

    def run(self) -> None:
        """Collect changes until the pipeline stops; the target of the thread."""
        try:
            while not self._coordinator.stopping.is_set():
                if self._directory.identity() is not None:
                    self._watch_until_replaced()
                self._coordinator.stopping.wait(
                    self._rescan if self.is_watching is False else MISSING_POLL_SECONDS
                )
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            self._coordinator.stop(error)

    def _watch_until_replaced(self) -> None:
        """Watch until the pipeline stops, another folder replaces the directory, or the watch fails.

        The watch fails on a name that is not UTF-8.
        """
        has_started = False
        identity = self._directory.identity()
        try:
            for changes in self._watch_changes():
                self._report(changes, needs_scan=not has_started)
                has_started, self.is_watching = True, True
                # A directory recreated at once may have the inode of the removed one.
                removed = (Change.deleted, str(self._directory.path)) in changes
                if removed or self._directory.identity() != identity:
                    self._report(set(), needs_scan=True)
                    return
        except (RuntimeError, OSError) as error:  # watchfiles raises RuntimeError
            is_missing = isinstance(error, FileNotFoundError) or self._directory.identity() is None
            if not (is_missing or _UNDECODABLE in str(error)):
                self._fall_back_to_scans(error)

    def _fall_back_to_scans(self, error: RuntimeError | OSError) -> None:
        """Scan all names at intervals while the directory cannot be watched; raise if it never could be.

        A temporary failure of the drive does not stop the pipeline, nor does a folder that polling may not
        read.
        """
        if self.is_watching is None and not self._force_polling:
            raise InputError(
                "the directory cannot be watched",
                path=self._directory.path,
                found=str(error),
                hint="Set force_polling = true, or raise the system's limit of watches.",
            ) from error
        if self.is_watching is not False:
            self._warn(
                f"the directory cannot be watched ({error}); it is scanned every {self._rescan:g} seconds"
            )
            self._report(set(), needs_scan=True)
        self.is_watching = False

    def _watch_changes(self) -> Iterator[Changes]:
        return watch(
            self._directory.path,
            watch_filter=None,
            debounce=_GROUPING_MS,
            step=_QUIET_MS,
            rust_timeout=_FIRST_MS,
            yield_on_timeout=True,
            stop_event=self._coordinator.stopping,
            raise_interrupt=False,
            force_polling=self._force_polling or None,
            ignore_permission_denied=True,
        )

    def _report(self, changes: Changes, *, needs_scan: bool) -> None:
        if changes or needs_scan:
            self._coordinator.change(lambda: self._add_changes(changes, needs_scan))

    def _add_changes(self, changes: Changes, needs_scan: bool) -> None:
        self._changes |= changes
        self._needs_scan = self._needs_scan or needs_scan
