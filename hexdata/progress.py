"""What a stage tells the one who watches it. A floor below everything: no printing, no clock."""

from __future__ import annotations

from typing import Protocol

__all__ = ["SILENT", "Progress", "Silent"]


class Progress(Protocol):
    """A watcher of stages; the command line draws a bar from these calls, a library user may log them.

    Calls come from the thread that called the stage. Raising from one stops the stage cleanly.
    """

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        """A stage (or a step of one) starts; ``total`` is the number of units, None if unknown."""

    def advance(self, amount: int) -> None:
        """So many more units are done."""

    def note(self, message: str) -> None:
        """One line that a person should see: a skipped source, a rejected file."""


class Silent:
    """The watcher that ignores everything: the default of every stage."""

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        """Ignore it."""

    def advance(self, amount: int) -> None:
        """Ignore it."""

    def note(self, message: str) -> None:
        """Ignore it."""


SILENT = Silent()
