"""The watch over a directory: the system tells what changes in it, and that is kept until somebody takes it.

Looks at no file, and decides nothing about one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from watchfiles import Change, watch

from hexdata.errors import InputError
from hexdata.live.directory import Directory
from hexdata.live.hub import Hub, Stopped

__all__ = ["GONE_SECONDS", "Changes", "DirectoryWatch"]

GONE_SECONDS: Final = 0.1
"""How often it is looked whether a directory that is gone is back."""

Changes = set[tuple[Change, str]]
"""What happened, and the path to which."""

_GROUPING_MS: Final = 100
"""Changes are told together for so long at most, in milliseconds,"""
_QUIET_MS: Final = 25
"""and as soon as nothing has changed for so long."""
_FIRST_MS: Final = 100
"""How long the watch waits for a first change before it says that it stands."""

_CANNOT_SPELL: Final = "Unable to decode path"
"""What the watch says of a name that is no UTF-8."""


class DirectoryWatch:
    """Watches a directory on a thread of its own, :meth:`run`, also one that is put in its place.

    Args:
        place: the directory.
        hub: of the pipeline.
        rescan: seconds after which a directory that could not be watched is tried again.
        force_polling: look through the directory instead of being told by the system.
        warn: called with what the trainer is to know.
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
        """Whether the directory is watched, as far as is known; None before it was for the first time."""
        self._place = place
        self._hub = hub
        self._rescan = rescan
        self._force_polling = force_polling
        self._warn = warn
        self._told: Changes = set()
        """What nobody has taken yet; under the hub's lock."""
        self._look_through = False
        """Whether all names are to be looked through; under the hub's lock."""

    def stands(self) -> bool | None:
        """Say, for ``Hub.wait_for``, whether the watch stands: what comes from then on is told of."""
        return self._look_through or None

    def take(self) -> tuple[Changes, bool] | None:
        """Take, for ``Hub.wait_for``, what was told, and whether all names are to be looked through."""
        if not self._told and not self._look_through:
            return None
        told = self._told, self._look_through
        self._told, self._look_through = set(), False
        return told

    def run(self) -> None:
        """Be told of changes until the pipeline stops; the work of a thread."""
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
        """Watch until the pipeline stops, another folder takes the directory's name, or the watch ends.

        The watch ends when a name comes that it cannot spell.
        """
        stands = False
        watched = self._place.identity()
        try:
            for changes in self._changes():
                self._tell(changes, look_through=not stands)
                stands, self.watched = True, True
                # One made at once in the place of one that was removed may be the same to the system.
                removed = (Change.deleted, str(self._place.path)) in changes
                if removed or self._place.identity() != watched:
                    self._tell(set(), look_through=True)
                    return
        except (RuntimeError, OSError) as error:  # a RuntimeError is the watch's own kind
            went = isinstance(error, FileNotFoundError) or self._place.identity() is None
            if not (went or _CANNOT_SPELL in str(error)):
                self._do_without(error)

    def _do_without(self, error: RuntimeError | OSError) -> None:
        """Let all names be looked through now and then, where that will do.

        A drive that fails for a while stops nothing, nor a folder in it that a poll may not read.
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
