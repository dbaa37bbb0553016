"""Interface through which stages report progress."""

from __future__ import annotations

from typing import Protocol

__all__ = ["SILENT", "Progress", "Silent"]


class Progress(Protocol):
    """Receives progress reports. The command line draws a bar from them; a program may log them.

    The methods are called on the thread that called the stage. If one raises, the stage stops cleanly.
    """

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        """Report the start of a stage or step; ``total`` is the number of units, or None if unknown."""

    def advance(self, amount: int) -> None:
        """Report that ``amount`` more units are done."""

    def note(self, message: str) -> None:
        """Report a message for the user, such as a skipped source."""


class Silent:
    """Ignores all reports. The default of every stage."""

    def __repr__(self) -> str:
        return "SILENT"

    def begin(self, stage: str, total: int | None, unit: str) -> None:
        """Do nothing."""

    def advance(self, amount: int) -> None:
        """Do nothing."""

    def note(self, message: str) -> None:
        """Do nothing."""


SILENT = Silent()
