"""The part of a pickle that is at hand, and the ways to read on from it. Knows no opcode's meaning.

Bytes are asked of the source in pieces of one size, so a length that lies makes nothing be reserved.
"""

from __future__ import annotations

from typing import Final

from hexdata.errors import FormatError
from hexdata.formats.legacy.limits import Limits
from hexdata.formats.legacy.source import ByteSource

__all__ = ["Window"]

_PIECE: Final = 1 << 18
"""Bytes asked of the source at a time: few enough to stay in the processor's cache."""
_MARGIN: Final = 16
"""No opcode has a longer argument of fixed size; so many bytes are at hand whenever one starts."""
_LONGEST_ANCHORED: Final = 1 << 20
"""An anchor further back than this is given up."""


class Window:
    """Bytes ``buf`` of a source, read up to ``pos``.

    What is before ``pos`` goes when more is read, unless ``anchor`` holds it.
    """

    def __init__(self, source: ByteSource, limits: Limits) -> None:
        self.limits = limits
        self.buf = b""
        self.pos = 0
        self.origin = 0
        """Where in the source ``buf`` begins, so that ``origin + pos`` is the next byte's offset."""
        self.anchor = -1
        """From here on the bytes stay in ``buf``; -1 for none. Moves as ``buf`` does."""
        self._source = source
        self._safe = 0  # before this place, an opcode and its argument of fixed size are at hand
        self._at_end = False

    @property
    def offset(self) -> int:
        """How many bytes of the source have been read."""
        return self.origin + self.pos

    def more(self) -> bool:
        """Append the next piece of the source to ``buf``; False where there is none.

        Raises:
            FormatError: "truncated", if nothing is left at all; or a limit.
        """
        self.check_limits()
        piece = b"" if self._at_end else self._source.read(_PIECE)
        if not piece:
            self._at_end = True
            self.refresh()
            if self.pos >= len(self.buf):
                raise self.truncated()
            return False
        if self.pos - self.anchor > _LONGEST_ANCHORED:
            self.anchor = -1
        keep = self.pos if self.anchor < 0 else self.anchor
        self.buf = self.buf[keep:] + piece
        self.pos -= keep
        self.origin += keep
        self.anchor = min(self.anchor, 0)
        self.refresh()
        return True

    def refresh(self) -> None:
        """Find anew how far opcodes can be read without asking for more."""
        self._safe = len(self.buf) - (0 if self._at_end else _MARGIN)

    def check_limits(self) -> None:
        """Called before each piece, to look at whatever has grown."""

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes; the caller has seen that a limit allows so many."""
        end = self.pos + size
        while end > len(self.buf):
            if not self.more():
                raise self.truncated()
            end = self.pos + size
        raw = self.buf[self.pos : end]
        self.pos = end
        return raw

    def uint(self, size: int) -> int:
        """Return the next little-endian unsigned integer: the argument of an opcode that just began."""
        end = self.pos + size
        if end > len(self.buf):
            raise self.truncated()
        value = int.from_bytes(self.buf[self.pos : end], "little")
        self.pos = end
        return value

    def line(self, limit: int) -> bytes:
        """Return what stands before the next line feed.

        Raises:
            FormatError: "limit-text", if that is more than ``limit`` bytes.
        """
        while (end := self.buf.find(b"\n", self.pos)) < 0 and len(self.buf) - self.pos <= limit:
            if not self.more():
                raise self.truncated()
        if end < 0 or end - self.pos > limit:
            raise self.past("limit-text", "longer than the limit for one line", limit)
        line = self.buf[self.pos : end]
        self.pos = end + 1
        return line

    def at_end(self) -> bool:
        """Say whether the source has nothing left; only that is read for it which tells."""
        return self.pos >= len(self.buf) and (self._at_end or not self._source.read(1))

    def truncated(self) -> FormatError:
        """Make the error for a source that ends too early."""
        return FormatError(
            "the pickle ends in the middle",
            code="truncated",
            record=f"byte {self.origin + len(self.buf)}",
            hint="Copy the file again, or leave it out.",
        )

    def corrupt(self, reason: str, found: object = None) -> FormatError:
        """Make the error for bytes that no writer of pickles gives."""
        return FormatError(
            f"not a sound pickle: {reason}", code="corrupt-pickle", record=f"byte {self.offset}", found=found
        )

    def past(self, code: str, reason: str, limit: int, found: int | None = None) -> FormatError:
        """Make the error for a limit that was passed."""
        return FormatError(
            reason,
            code=code,
            record=f"byte {self.offset}",
            found=None if found is None else f"{found:,}",
            expected=f"at most {limit:,}",
        )
